#!/usr/bin/env bash
# transformers 5.24.0: with a rate of a parameter group, `cosine_with_min_lr` and `polynomial` end at other rates than they are given.
#
# Both compute a factor of each group's rate from `optimizer.defaults["lr"]`, which is the constructor's argument (for AdamW 1e-3 if it
# is left out) and not the group's. With groups at 0.02 and the default 1e-3, a cosine to min_lr 0.002 rises to 0.04, and a line to
# lr_end 0.0005 ends at 0.01. Where both rates are equal the schedules are right; `cosine` does not read the default.
#
# Seen: rates of five updates [0.02, 0.0229, 0.03, 0.0371, 0.04] and [0.02, 0.0175, 0.015, 0.0125, 0.01].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cd "$folder"
HOME="$folder" "$folder/env/bin/python" - <<'PY'
import torch
from transformers import get_scheduler


def rates(name, defaults, **arguments):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, **defaults)
    schedule = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=0,
        num_training_steps=4,
        scheduler_specific_kwargs=arguments,
    )
    used = []
    for _ in range(5):
        used.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        schedule.step()
    return used


ENDS = {"cosine_with_min_lr": {"min_lr": 0.002}, "polynomial": {"lr_end": 0.0005}}
for name, end in ENDS.items():
    print(name, rates(name, {}, **end), "with the default as well:", rates(name, {"lr": 0.02}, **end))
    assert rates(name, {"lr": 0.02}, **end)[-1] == next(iter(end.values()))
assert rates("cosine_with_min_lr", {}, min_lr=0.002) == [0.02, 0.0229, 0.03, 0.0371, 0.04]
assert rates("polynomial", {}, lr_end=0.0005) == [0.02, 0.0175, 0.015, 0.0125, 0.01]
assert rates("cosine", {}) == rates("cosine", {"lr": 0.02})
PY
