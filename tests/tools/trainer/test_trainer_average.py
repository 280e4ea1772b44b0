"""`ZeroTPTrainer(ema=…)` against plain Trainer with torch's `AveragedModel` in a callback."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback

from tests.support.compare import check_close
from tests.support.pools import Pools
from tests.support.trainer_scripts import ROWS, deepspeed, save_model, script
from zero_tp.base.errors import UserError
from zero_tp.tools.trainer import ZeroTPTrainer

DECAY = 0.7


class PlainAverage(Trainer):
    """transformers' Trainer that averages its weights after each step."""

    model: Any
    averaged: Any

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        trainer = self

        class Average(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                average = get_ema_multi_avg_fn(DECAY)
                trainer.averaged = AveragedModel(trainer.model, multi_avg_fn=average)
                trainer.averaged.update_parameters(trainer.model)

            def on_step_end(self, *_: Any, **__: Any) -> None:
                trainer.averaged.update_parameters(trainer.model)

        self.add_callback(Average())


def train(
    directory: str, folder: str, tensor: int, stage: int, resume: str | None = None
) -> tuple[list[float], float]:
    """The losses of the steps; the validation loss of the average, which is saved, too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        history, trainer = script(
            partial(ZeroTPTrainer, tensor_parallel=tensor, ema=DECAY),
            "causal",
            directory,
            folder,
            ROWS // 2 // (2 // tensor),
            2,
            deepspeed=deepspeed(stage),
            per_device_eval_batch_size=2 * tensor,
            save_strategy="steps",
            save_steps=2,
            resume=resume,
        )
        before = trainer.evaluate()["eval_loss"]
        with trainer.averaged_weights():
            loss = trainer.evaluate(metric_key_prefix="ema")["ema_loss"]
            trainer.save_model(str(Path(folder) / "average"))
        assert trainer.evaluate()["eval_loss"] == before
        return [line["loss"] for line in history if "loss" in line], loss
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.thorough
@pytest.mark.parametrize(("tensor", "stage"), [(2, 1), (1, 3), (2, 0)])
def test_a_script_averages_its_weights(
    ranks: Pools, tmp_path: Path, tensor: int, stage: int
) -> None:
    """Also one that resumes on another grid."""
    start = save_model("causal", tmp_path / "start")
    plain = str(tmp_path / "plain")
    _, trainer = script(
        PlainAverage, "causal", str(start), plain, ROWS // 2, 2, per_device_eval_batch_size=4
    )
    expected = tmp_path / "expected"
    trainer.averaged.module.save_pretrained(expected)
    trainer.model = trainer.averaged.module
    wanted = trainer.evaluate()["eval_loss"]
    ours = tmp_path / "ours"
    losses, loss = ranks(2).run(train, str(start), str(ours), tensor, stage)[0]
    again = tmp_path / "again"
    other = 3 - tensor, 2, str(ours / "checkpoint-2")
    losses_after, loss_after = ranks(2).run(train, str(start), str(again), *other)[0]
    assert losses_after[-2:] == pytest.approx(losses[-2:], rel=1e-5)
    assert loss == pytest.approx(wanted, rel=1e-5) and loss_after == pytest.approx(wanted, rel=1e-5)
    for folder in (ours, again):
        check_close(
            load_file(folder / "average" / "model.safetensors"),
            load_file(expected / "model.safetensors"),
        )


def refusal(directory: str, folder: str) -> str:
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with pytest.raises(UserError) as caught:
            script(
                partial(ZeroTPTrainer, ema=1.5),
                "causal",
                directory,
                folder,
                ROWS // 4,
                2,
                deepspeed=deepspeed(1),
            )
        return str(caught.value)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.thorough
def test_a_wrong_decay_is_refused(ranks: Pools, tmp_path: Path) -> None:
    start = save_model("causal", tmp_path / "start")
    lines = ranks(2).run(refusal, str(start), str(tmp_path / "ours"))
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("ema: 1.5 is no decay between 0 and 1"), line
