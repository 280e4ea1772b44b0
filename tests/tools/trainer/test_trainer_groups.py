"""`ZeroTPTrainer(param_groups=…)` against plain Trainer with the same groups of torch's AdamW."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer

from tests.support.compare import check_close
from tests.support.pools import Pools
from tests.support.trainer_scripts import ROWS, deepspeed, save_model, script
from zero_tp.base.errors import UserError
from zero_tp.tools.trainer import ZeroTPTrainer

RATE, DECAY, EPS = 1e-2, 0.1, 1e-3
ENTRIES: list[dict[str, Any]] = [
    {"pattern": "q_proj", "lr_scale": 0.5, "weight_decay": 0.3},
    {"kind": "embedding", "weight_decay": 0.0, "lr_scale": 2.0},
    {"kind": "norm", "weight_decay": 0.2},
]
SETTINGS = [("q_proj", 0.5, 0.3), ("embed", 2.0, 0.0), ("norm", 1.0, 0.2), ("", 1.0, DECAY)]
"""A part of Hugging Face's names, the first that matches; factor of the rate and decay."""
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
ADAMW = {"type": "AdamW", "params": {"torch_adam": True}}
BLOCKS: dict[str, dict[str, Any]] = {
    "Trainer's": {},
    "DeepSpeed's optimizer": {"optimizer": ADAMW},
    "DeepSpeed's schedule": {"scheduler": WARMUP},
    "both DeepSpeed's": {"optimizer": ADAMW, "scheduler": WARMUP},
}


class PlainGroups(Trainer):
    """transformers' Trainer whose optimizer has the groups, each with a rate of its own."""

    native_warmup = False
    model: Any
    optimizer: Any

    def create_optimizer(self, *_: Any) -> Any:
        if self.optimizer is None:
            groups: list[dict[str, Any]] = [
                {"params": [], "lr": RATE * scale, "weight_decay": decay}
                for _, scale, decay in SETTINGS
            ]
            for name, parameter in self.model.named_parameters():
                number = next(n for n, (part, _, _) in enumerate(SETTINGS) if part in name)
                groups[number]["params"].append(parameter)
            # Trainer logs the rate of the first one.
            self.optimizer = torch.optim.AdamW(groups[::-1], lr=RATE, eps=EPS)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if not self.native_warmup:
            return super().create_scheduler(num_training_steps, optimizer)
        # DeepSpeed starts its warm-up one step late, and then from 0.
        self.lr_scheduler = LambdaLR(self.optimizer, lambda k: min(1.0, max(0, k - 1) / 2))
        return self.lr_scheduler


class PlainWarmup(PlainGroups):
    native_warmup = True


def train(
    directory: str, folder: str, tensor: int, stage: int, blocks: dict[str, Any], **options: Any
) -> list[dict[str, float]]:
    """One script on two ranks; its eval batches are of as many rows as the plain one's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    groups = options.pop("param_groups", ENTRIES)
    try:
        history, _ = script(
            partial(ZeroTPTrainer, tensor_parallel=tensor, param_groups=groups),
            "causal",
            directory,
            folder,
            ROWS // 2 // (2 // tensor),
            2,
            deepspeed={**deepspeed(stage), **blocks},
            per_device_eval_batch_size=2 * tensor,
            **options,
        )
        return history
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[type, Any]:
    folder = tmp_path_factory.mktemp("plain")
    directory = str(save_model("causal", folder / "start"))
    runs: dict[type, Any] = {}
    for trainer in (PlainGroups, PlainWarmup):
        own = folder / trainer.__name__
        history, _ = script(
            trainer, "causal", directory, str(own), ROWS // 2, 2, per_device_eval_batch_size=4
        )
        runs[trainer] = directory, history, load_file(own / "model" / "model.safetensors")
    return runs


def check(history: list[dict[str, float]], folder: Path, reference: tuple[Any, ...]) -> None:
    _, expected, weights = reference
    for name in ("loss", "eval_loss"):
        wanted = [line[name] for line in expected if name in line]
        assert [line[name] for line in history if name in line] == pytest.approx(wanted, rel=1e-5)
    check_close(load_file(folder / "model" / "model.safetensors"), weights)


@pytest.mark.thorough
@pytest.mark.parametrize(("tensor", "stage"), [(2, 1), (1, 3), (2, 0), (1, 2)])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_script_with_groups_gives_the_same(
    ranks: Pools, plain: dict[type, Any], tmp_path: Path, blocks: str, tensor: int, stage: int
) -> None:
    reference = plain[PlainWarmup if "scheduler" in BLOCKS[blocks] else PlainGroups]
    arguments = (reference[0], str(tmp_path), tensor, stage, BLOCKS[blocks])
    check(ranks(2).run(train, *arguments)[0], tmp_path, reference)


@pytest.mark.thorough
@pytest.mark.parametrize("blocks", ["Trainer's", "both DeepSpeed's"])
def test_a_resumed_trainer_keeps_the_groups(
    ranks: Pools, plain: dict[type, Any], tmp_path: Path, blocks: str
) -> None:
    reference = plain[PlainWarmup if "scheduler" in BLOCKS[blocks] else PlainGroups]
    folder = str(tmp_path)
    resume: dict[str, Any] = {"resume": f"{folder}/checkpoint-2"}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    ranks(2).run(train, reference[0], folder, 2, 1, BLOCKS[blocks], **saving)
    history = ranks(2).run(train, reference[0], folder, 1, 3, BLOCKS[blocks], **resume)[0]
    check(history, tmp_path, reference)


def refused(directory: str, folder: str) -> str:
    """Resume without the groups of the save."""
    train(directory, folder, 2, 1, {}, save_strategy="steps", save_steps=2)
    with pytest.raises(UserError) as error:
        train(directory, folder, 2, 1, {}, resume=f"{folder}/checkpoint-2", param_groups=())
    return str(error.value)


@pytest.mark.thorough
def test_other_groups_than_those_of_the_save_are_refused(
    ranks: Pools, plain: dict[type, Any], tmp_path: Path
) -> None:
    messages = ranks(2).run(refused, plain[PlainGroups][0], str(tmp_path))
    for message in messages:
        assert "its optimizer has 4 groups of parameters, and this run's has 2; give" in message
