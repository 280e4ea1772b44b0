#!/usr/bin/env bash
# torch 2.13.0: on bf16 weights and without Nesterov, torch.optim.Muon divides its momentum by its norm at every step.
#
# Newton-Schulz begins with `grad.bfloat16()`, which is a copy of an fp32 tensor but the tensor itself in bf16, and then divides it
# in place. Without Nesterov that tensor is the momentum, so each step forgets how large the earlier gradients were. With
# Nesterov, and in fp32, the momentum stays.
#
# torch 2.15 copies it. Seen in 2.13: norm of the momentum after one step, where half of the gradient's norm is 14.02: 14.02 with Nesterov, 1.00 without.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import torch

expected, norms = 0.0, {}
for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (True, False):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(8, 16).to(dtype))
        optimizer = torch.optim.Muon(
            [weight], lr=0.1, momentum=0.5, nesterov=nesterov, weight_decay=0.0
        )
        gradient = 3 * torch.randn(8, 16)
        weight.grad = gradient.to(dtype)
        optimizer.step()
        expected = float((0.5 * gradient).norm())  # momentum starts at zero
        momentum = optimizer.state[weight]["momentum_buffer"].float()
        norms[dtype, nesterov] = float(momentum.norm())
        print(f"{dtype}, Nesterov {nesterov}: {norms[dtype, nesterov]:.2f} of {expected:.2f}")
wrong = norms.pop((torch.bfloat16, False))
assert all(abs(norm - expected) < 0.01 * expected for norm in norms.values()), norms
assert abs(wrong - 1) < 0.01, wrong
PY
