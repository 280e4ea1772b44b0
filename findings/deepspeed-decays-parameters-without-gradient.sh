#!/usr/bin/env bash
# deepspeed 0.19.8: a parameter that took no part in the loss is decayed, at every ZeRO stage. torch's AdamW leaves it alone.
#
# DeepSpeed writes zeros where a gradient is None, and its optimizers then apply weight decay. A branch that a batch does not
# use (an expert without tokens, a head of another task) shrinks in each step.
#
# Seen, rate 0.1 and decay 0.5, one step: 1.0 becomes 0.95 at stages 0, 1, 2 and 3; torch keeps 1.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8 setuptools ninja
cd "$folder"
HOME="$folder" DS_ACCELERATOR=cpu PATH="$folder/env/bin:$PATH" MASTER_ADDR=127.0.0.1 MASTER_PORT=29534 RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 \
    "$folder/env/bin/python" - <<'PY'
import deepspeed
import torch

ADAM = {"lr": 0.1, "weight_decay": 0.5}


class TwoBranches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.used * inputs).sum()


model = TwoBranches()
optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
model(torch.ones(4)).backward()
optimizer.step()
assert torch.equal(model.unused, torch.ones(4))
for stage in range(4):
    model = TwoBranches()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.backward(engine(torch.ones(4)))
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        values = model.unused.detach().clone()
    print("stage", stage, values.tolist())
    assert torch.allclose(values, torch.full((4,), 0.95)), values
torch.distributed.destroy_process_group()
PY
