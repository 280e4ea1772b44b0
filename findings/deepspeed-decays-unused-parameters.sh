#!/usr/bin/env bash
# DeepSpeed 0.19.8: ZeRO-1 decays a parameter that got no gradient; torch's AdamW leaves it alone.
#
# ZeRO's partition of a group is one flat tensor. A parameter whose gradient is None contributes zeros to it, so AdamW's decay
# multiplies it in every step. An unused head, an expert without tokens, or a layer that is skipped shrinks towards zero.
#
# Seen: after one step at rate 0.1 with weight decay 0.5 an unused weight of 1 is 0.95 under ZeRO-1, and 1 with torch's AdamW.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 setuptools wheel ninja
"$folder/env/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cd "$folder"
HOME="$folder" DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29731 \
    "$folder/env/bin/python" - <<'PY'
import copy

import deepspeed
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(4, 4)
        self.unused = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.ones_(self.unused.weight)

    def forward(self, tensor):
        return self.used(tensor).square().sum()


adamw = {"lr": 0.1, "weight_decay": 0.5}
model = Model()
plain = copy.deepcopy(model)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {**adamw, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
engine.backward(engine(torch.ones(1, 4)))
engine.step()
optimizer = torch.optim.AdamW(plain.parameters(), **adamw)
plain(torch.ones(1, 4)).backward()
optimizer.step()
under_zero, by_torch = model.unused.weight.mean().item(), plain.unused.weight.mean().item()
print("unused weight of 1 after a step: ZeRO-1", round(under_zero, 6), "torch", by_torch)
assert abs(under_zero - 0.95) < 1e-6, under_zero
assert by_torch == 1.0, by_torch
PY
