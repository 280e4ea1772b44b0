"""Every door refuses the same expert-parallel runs with the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoConfig, TrainingArguments

from tests.support.experts import fields
from tests.support.launched import forked_zero_tp
from tests.support.native import native_model
from tests.support.pools import Pools
from tests.support.trainer_scripts import collate, deepspeed, rows_of
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.engine.engine import TrainingEngine
from zero_tp.model.huggingface import parallel_model
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig
from zero_tp.tools.trainer import ZeroTPTrainer

WORLD = 4
MIXTRAL = fields(num_local_experts=6, vocab_size=128, num_hidden_layers=1)
LLAMA = {
    **{
        name: value
        for name, value in MIXTRAL.items()
        if "expert" not in name and "router" not in name
    },
    "model_type": "llama",
}
KEY = "zero_tp.parallel.expert: "
NO_STAGE = "there adds up the experts of several ranks; use zero_optimization.stage 1 or 2"
WHOLE = (
    "DeepSpeed gathers a parameter over all replicas, and these have other experts; use "
    "zero_optimization.stage 1 or 2"
)
CASES: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "replicas": (MIXTRAL, 3, 1, "expert 3 does not divide data 4; use 2 or 4"),
    "experts": (MIXTRAL, 4, 1, "6 experts do not divide over 4 ranks; use 2"),
    "dense": (LLAMA, 2, 1, "2, but the model has no experts; leave it out"),
    "stage 0": (MIXTRAL, 2, 0, f"refused at stage 0: no gradient norm {NO_STAGE}"),
    "stage 3": (MIXTRAL, 2, 3, f"refused at stage 3: {WHOLE}"),
}
"""Model, EP degree, ZeRO stage and the message."""


def train(model: dict[str, Any], expert: int, stage: int, folder: str) -> None:
    settings = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        deepspeed=deepspeed(stage),
    )
    trainer = ZeroTPTrainer(
        whole(model),
        settings,
        expert_parallel=expert,
        data_collator=collate,
        train_dataset=rows_of("causal", 4, 1),
    )
    trainer.train()


def build_engine(model: dict[str, Any], expert: int, stage: int, _: str) -> None:
    values = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    config = AutoConfig.for_model(**model)
    TrainingEngine.from_dict(config, Topology(expert=expert), values, seed=1)


def split(model: dict[str, Any], expert: int, _: int, __: str) -> None:
    parallel_model(whole(model), Topology(expert=expert))


DOORS: dict[str, Callable[[dict[str, Any], int, int, str], None]] = {
    "Trainer": train,
    "engine": build_engine,
    "model": split,
}


def test_engines_that_do_not_know_experts_are_refused() -> None:
    """At TP 1, where each rank has whole weights but for the experts."""
    topology = Topology(expert=2, world=2)
    model = parallel_model(whole(MIXTRAL), topology)
    with pytest.raises(UserError, match=r"DistributedDataParallel.*\(expert parallel size 2\)"):
        _ = model._ddp_params_and_buffers_to_ignore  # which DDP reads
    with pytest.raises(UserError, match=r"FSDP.*\(expert parallel size 2\)"):
        model._is_fsdp_managed_module = True
    with pytest.raises(UserError, match="PEFT on a model of expert parallel size 2"):
        model.peft_config = {"default": Mock()}
    with (
        patch("deepspeed.utils.groups.mpu", topology),
        pytest.raises(UserError, match=r"DeepSpeed engine.*\(expert parallel size 2\)"),
    ):
        model.set_deepspeed_parallelism()


def whole(model: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return native_model(AutoConfig.for_model(**model))


def refusals(folder: str) -> dict[tuple[str, str], str]:
    """The message of each case at each door that judges it."""
    found = {}
    for case, (model, expert, stage, _) in CASES.items():
        for door, enter in DOORS.items():
            if door == "model" and case.startswith("stage"):
                continue  # a model has no stage yet
            AcceleratorState._reset_state(reset_partial_state=True)
            try:
                with pytest.raises(UserError) as refused:
                    enter(model, expert, stage, folder)
            finally:
                AcceleratorState._reset_state(reset_partial_state=True)
            found[case, door] = str(refused.value)
    return found


@THOROUGH
def test_doors_on_ranks_refuse_with_the_same_words(ranks: Pools, tmp_path: Path) -> None:
    for messages in ranks(WORLD).run(refusals, str(tmp_path), timeout=90):
        expected = {name: f"{KEY}{CASES[name[0]][3]}" for name in messages}
        assert len(messages) == 3 * len(CASES) - 2
        assert messages == expected


def run_config(model: dict[str, Any], expert: int, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "zero_tp": {
            "model": model,
            "parallel": {"expert": expert},
            "data": {"train": "train", "sequence_length": 16},
            "training": {"steps": 1},
        },
    }


@pytest.mark.parametrize("case", CASES)
def test_a_runs_file_is_refused_with_the_same_words(case: str, tmp_path: Path) -> None:
    model, expert, stage, message = CASES[case]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run_config(model, expert, stage)))
    with pytest.raises(UserError) as refused:
        RunConfig.load(file, world_size=WORLD)
    assert str(refused.value) == f"{KEY}{message}"
    done = forked_zero_tp(tmp_path, "check", str(file), "--world-size", str(WORLD))
    assert done.returncode == 2
    assert done.stderr.strip().endswith(f"{KEY}{message}") and "Traceback" not in done.stderr


def test_the_file_without_a_mistake_is_accepted(tmp_path: Path) -> None:
    """The files of these tests differ from one that is valid only by what is refused."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run_config(MIXTRAL, 2, 1)))
    assert RunConfig.load(file, world_size=WORLD).zero_tp.parallel.expert == 2
