#!/usr/bin/env bash
# DeepSpeed 0.19.8: after `engine.set_train_batch_size` the next step can have too few micro-batches, without an error.
#
# The function changes the number of micro-batches of a step. Where a step ends is where the count of all micro-batches so far
# is a multiple of that number, and the count goes on. After 4 steps of 2 micro-batches it is 8: with 3 a step the next one ends
# at 9, after a single micro-batch, whose loss was divided by 3. Later steps are right.
#
# Seen at ZeRO stages 0 and 1: micro-batches of the steps 2, 2, 2, 2, then with a batch of 3: 1, 3, 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 setuptools wheel ninja
"$folder/env/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cd "$folder"
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29577 HOME="$folder" DS_ACCELERATOR=cpu
export PATH="$folder/env/bin:$PATH"
python - <<'PY'
import deepspeed
import torch


def sizes_of_steps(stage):
    model = torch.nn.Linear(4, 1, bias=False)
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def size():
        count, before = 0, engine.global_steps
        while engine.global_steps == before:
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()
            count += 1
        return count

    sizes = [size() for _ in range(4)]
    engine.set_train_batch_size(3)
    assert engine.gradient_accumulation_steps() == 3
    return sizes + [size() for _ in range(3)]


for stage in (0, 1):
    sizes = sizes_of_steps(stage)
    print(f"ZeRO-{stage}: micro-batches of each step {sizes}")
    assert sizes == [2, 2, 2, 2, 1, 3, 3], sizes
PY
