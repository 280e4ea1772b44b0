"""`ZeroTPTrainer(router_bias_update_rate=…)` against plain Trainer with a callback that moves the
biases.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from tests.support.compare import check_close
from tests.support.corrected_routers import (
    counted_choices,
    move_biases,
    reference_model,
)
from tests.support.pools import Pools
from tests.support.trainer_scripts import ROWS, deepspeed, script
from zero_tp.tools.trainer import ZeroTPTrainer

RATE = 0.01


class PlainBiases(Trainer):
    """transformers' Trainer that moves the biases after each step."""

    model: Any

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        trainer = self
        self.counts: Any = 0

        class Move(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                move_biases(trainer.model, trainer.counts, RATE)
                trainer.counts = 0

        self.add_callback(Move())

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        with counted_choices(model, inputs["attention_mask"]) as counts:
            loss = super().training_step(model, inputs, *arguments, **options)
        self.counts = self.counts + counts
        return loss


def train(directory: str, folder: str, tensor: int, stage: int) -> list[dict[str, float]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        history, _ = script(
            partial(ZeroTPTrainer, tensor_parallel=tensor, router_bias_update_rate=RATE),
            "causal",
            directory,
            folder,
            ROWS // 2 // (2 // tensor),
            2,
            deepspeed=deepspeed(stage),
            per_device_eval_batch_size=2 * tensor,
        )
        return history
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "tensor", "stage"),
    [("glm4_moe", 2, 1), ("dots1", 1, 3), ("ernie4_5_moe", 2, 2), ("ernie4_5_moe", 1, 0)],
)
def test_a_script_moves_the_biases(
    ranks: Pools, tmp_path: Path, model_type: str, tensor: int, stage: int
) -> None:
    """Rows are padded to other lengths on each rank; an evaluation runs between the steps."""
    start = tmp_path / "start"
    reference_model(1, model_type=model_type, vocab_size=101).save_pretrained(start)
    expected, _ = script(
        PlainBiases,
        "causal",
        str(start),
        str(tmp_path / "plain"),
        ROWS // 2,
        2,
        per_device_eval_batch_size=4,
    )
    found = ranks(2).run(train, str(start), str(tmp_path / "ours"), tensor, stage)[0]
    for name in ("loss", "eval_loss"):
        wanted = [line[name] for line in expected if name in line]
        assert [line[name] for line in found if name in line] == pytest.approx(wanted, rel=1e-5)
    ours, theirs, before = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "ours" / "model", tmp_path / "plain" / "model", start)
    )
    check_close(ours, theirs)
    biases = [name for name in theirs if name.endswith("correction_bias")]
    assert len(biases) == 2
    for name in biases:
        assert torch.equal(ours[name], theirs[name])
        assert not torch.equal(before[name], theirs[name])
