#!/usr/bin/env bash
# deepspeed 0.19.8: WarmupLR from a minimum of 0 takes its first two steps at rate 0, so two batches change nothing.
#
# The schedule is made at iteration -1 with rate 0, and the call after the first step sets iteration 0, whose rate is 0 too.
#
# Seen, linear warm-up to 0.1 in 10 steps: rates of the first five updates 0, 0, 0.01, 0.02, 0.03; weights move from the third on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8 setuptools ninja
cd "$folder"
HOME="$folder" DS_ACCELERATOR=cpu PATH="$folder/env/bin:$PATH" MASTER_ADDR=127.0.0.1 MASTER_PORT=29533 RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 \
    "$folder/env/bin/python" - <<'PY'
import deepspeed
import torch

torch.manual_seed(0)
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True, "weight_decay": 0.0}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"},
    },
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4, bias=False), config=settings)
rates, moved = [], []
for _ in range(5):
    before = engine.module.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 4)).square().sum())
    rates.append(round(engine.optimizer.param_groups[0]["lr"], 6))
    engine.step()
    moved.append(not torch.equal(engine.module.weight, before))
print("rates", rates, "moved", moved)
assert rates == [0, 0, 0.01, 0.02, 0.03], rates
assert moved == [False, False, True, True, True], moved
torch.distributed.destroy_process_group()
PY
