#!/usr/bin/env bash
# DeepSpeed 0.19.8: with WarmupLR the first two updates have the rate 0, and the warm-up ends a step late.
#
# The schedule sets warmup_min_lr when it is made, and the value of its first iteration, which is warmup_min_lr too, after the
# first update. So update 1 and update 2 of a linear warm-up of 4 steps to 0.04 change nothing; transformers' schedule of as
# many steps wastes one.
#
# Seen: rates of six updates: 0, 0, 0.01, 0.02, 0.03, 0.04 (transformers' linear warm-up: 0, 0.01, 0.02, 0.03, 0.04, 0.04).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 setuptools wheel ninja
"$folder/env/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cd "$folder"
HOME="$folder" DS_ACCELERATOR=cpu "$folder/env/bin/python" - <<'PY'
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from transformers import get_constant_schedule_with_warmup

STEPS, RATE = 4, 0.04


def rates(schedule_of):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
    schedule = schedule_of(optimizer)
    used = []
    for _ in range(6):
        used.append(round(optimizer.param_groups[0]["lr"], 6))
        optimizer.step()
        schedule.step()
    return used


theirs = rates(
    lambda optimizer: WarmupLR(
        optimizer, warmup_max_lr=RATE, warmup_num_steps=STEPS, warmup_type="linear"
    )
)
usual = rates(lambda optimizer: get_constant_schedule_with_warmup(optimizer, STEPS))
print("DeepSpeed:   ", theirs)
print("transformers:", usual)
assert theirs == [0.0, 0.0, 0.01, 0.02, 0.03, 0.04], theirs
assert usual == [0.0, 0.01, 0.02, 0.03, 0.04, 0.04], usual
PY
