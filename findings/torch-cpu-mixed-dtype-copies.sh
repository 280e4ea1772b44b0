#!/usr/bin/env bash
# torch 2.13.0 on a CPU: an elementwise operation of a bf16 and an fp32 tensor first makes whole fp32 copies of what is bf16.
#
# Its kernels take operands of one dtype. Where they differ, TensorIterator converts each whole operand, and each output that is not
# in that dtype has a whole buffer. So the memory of "x *= scale" depends on the shape of one number:
#
#   x bf16 [n], in place                           bytes an element
#   x *= 0.5, or a tensor of shape []              0
#   x *= a tensor of shape [1]                     8, a copy of x and a buffer of the product
#   x += fp32 gradients                            8
#   fp32 sums += x, as in accumulation             4
#   vector_norm(x)                                 0
#   vector_norm(x, dtype=float32), to be exact     4
#   x.copy_(fp32 weights)                          0
#
# The gradient of an output layer of 152,064 × 4,096 in bf16 is 1.2 GB; scaling it by a tensor of one element takes 5 GB more. A tensor
# of shape [] is as exact: 255 · 1.003 is 256 by all three, where 1.003 rounded to bf16 is 1. Chunks cure the other cases.
# A CUDA kernel converts while it reads.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
export HOME="$folder"
"$folder/env/bin/python" - <<'PY'
import torch
from torch.profiler import ProfilerActivity, profile

NUMEL = 2**22


def bytes_an_element(run):
    """The most that lives at once beyond the start."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    live = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return round(most / NUMEL, 2)


narrow, wide = torch.randn(NUMEL).bfloat16(), torch.randn(NUMEL)
none, one = torch.tensor(0.5), torch.tensor([0.5])
norm = torch.linalg.vector_norm
found = {
    "number": bytes_an_element(lambda: narrow.mul_(0.5)),
    "shape []": bytes_an_element(lambda: narrow.mul_(none)),
    "shape [1]": bytes_an_element(lambda: narrow.mul_(one)),
    "bf16 += fp32": bytes_an_element(lambda: narrow.add_(wide)),
    "fp32 += bf16": bytes_an_element(lambda: wide.add_(narrow)),
    "norm": bytes_an_element(lambda: norm(narrow)),
    "norm in fp32": bytes_an_element(lambda: norm(narrow, dtype=torch.float32)),
    "copy": bytes_an_element(lambda: narrow.copy_(wide)),
}
products = [
    (torch.full((64,), 255.0).bfloat16() * scale)[0].item()
    for scale in (1.003, torch.tensor(1.003))
]
products.append(torch.full((64,), 255.0).bfloat16().mul_(torch.tensor([1.003]))[0].item())
print(torch.__version__, found, products)
expected = {
    "number": 0.0,
    "shape []": 0.0,
    "shape [1]": 8.0,
    "bf16 += fp32": 8.0,
    "fp32 += bf16": 4.0,
    "norm": 0.0,
    "norm in fp32": 4.0,
    "copy": 0.0,
}
assert found == expected, "whole fp32 copies"
assert products == [256.0] * 3, "the number is not rounded to bf16"
PY
echo "as described"
