"""Single methods of ZeroTPTrainer, without ranks: divisors, figures of an evaluation, warnings
and devices.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.support.encoders import encoder
from tests.support.native import parallel_model
from tests.support.plain_trainer import PlainTrainer
from tests.support.tiny_models import bert_fields
from zero_tp.base.errors import UserError
from zero_tp.engine.bias_update import BiasUpdate
from zero_tp.parallel.topology import Topology
from zero_tp.tools.trainer import TensorParallel, ZeroTPTrainer
from zero_tp.tools.trainer.tensor_parallel_accelerator import TensorParallelAccelerator


def tiny_encoder(topology: Topology) -> Any:
    return parallel_model(
        encoder(bert_fields(model_type="bert", num_hidden_layers=1, vocab_size=40), 0), topology
    )


class Losses:
    """A Trainer whose forward returns its arguments and which logs nowhere."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        return inputs

    def log(self, logs: dict[str, float]) -> None:
        self.logged = dict(logs)

    def evaluation_loop(self, metrics: dict[str, float]) -> Any:
        return SimpleNamespace(metrics=metrics, num_samples=12)


def bare_trainer() -> Any:
    trainer: Any = object.__new__(type("Mine", (TensorParallel, Losses), {}))
    trainer.model, trainer.topology = tiny_encoder(Topology(world=1)), Topology(1, world=4)
    trainer.args = SimpleNamespace(device=torch.device("cpu"), eval_batch_size=1)
    trainer.deepspeed = trainer.model
    trainer._bias_update = BiasUpdate(trainer.model, trainer.topology, 0.0)
    trainer._z_losses = trainer.model.z_losses
    return trainer


def test_rows_of_another_step_are_no_divisor() -> None:
    """A script that computes a loss of its own gives no number of labels; both kinds have their
    own mean then.
    """
    trainer, labels = bare_trainer(), torch.zeros(2, dtype=torch.int64)
    trainer._labelled_rows = torch.tensor(7)
    inputs = {"input_ids": torch.arange(8).view(2, 4), "next_sentence_label": labels}
    assert "num_rows_in_batch" not in trainer.compute_loss(trainer.model, inputs)
    assert (
        trainer.compute_loss(trainer.model, inputs, num_items_in_batch=3)["num_rows_in_batch"] == 7
    )


def test_only_an_evaluations_own_speed_is_corrected() -> None:
    trainer, own = bare_trainer(), {"decode_steps_per_second": 5.0}
    trainer.log(own)
    metrics = {
        "eval_runtime": 2.0,
        "eval_steps_per_second": 99.0,
        "eval_mine_steps_per_second": 7.0,
    }
    trainer.evaluation_loop(metrics)
    trainer.log(metrics)
    assert trainer.logged == metrics | {"eval_steps_per_second": 1.5}, (
        "12 samples on 4 replicas are 3 steps"
    )
    own["decode_runtime"] = 1.0
    trainer.log(own)
    assert trainer.logged["decode_steps_per_second"] == 5.0


@pytest.mark.parametrize(
    ("accumulation", "replicas", "averages", "warned"),
    [(1, 1, True, False), (2, 1, False, True), (1, 2, True, True), (1, 2, False, False)],
)
def test_an_encoder_is_announced_where_plain_trainer_adds_up_means(
    accumulation: int, replicas: int, averages: bool, warned: bool
) -> None:
    """With `average_tokens_across_devices` it multiplies the mean of each replica by their
    number.
    """
    trainer: Any = type("Mine", (TensorParallel, PlainTrainer), {})
    model = tiny_encoder(Topology(world=replicas, rank=0))
    options: dict[str, Any] = {
        "device": "cpu",
        "world_size": 1,
        "label_names": None,
        "deepspeed": None,
    }
    options |= {
        "gradient_accumulation_steps": accumulation,
        "average_tokens_across_devices": averages,
    }
    expected = pytest.warns(
        UserWarning, match="adds up the mean losses of an encoder's micro-batches on all replicas"
    )
    with expected if warned else warnings.catch_warnings():
        if not warned:
            warnings.simplefilter("error")
        trainer(model, SimpleNamespace(**options))


def test_a_model_is_on_its_device_before_any_training() -> None:
    """An evaluation needs no engine, which would move it."""
    model, accelerator = (
        torch.nn.Linear(2, 2),
        cast(Any, SimpleNamespace(_models=[], device=torch.device("meta"))),
    )
    assert (
        TensorParallelAccelerator._prepare_deepspeed(accelerator, model)[0].weight.device.type
        == "meta"
    )


def test_a_model_of_no_kind_is_refused_by_name() -> None:
    args: Any = SimpleNamespace(device="cpu", world_size=1, seed=0)
    with pytest.raises(UserError, match=r"^model: PosixPath is no model of transformers"):
        ZeroTPTrainer(Path("exports/gpt2"), args)
