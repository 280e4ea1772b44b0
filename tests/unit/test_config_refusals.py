"""Every row of the refusals and of what is not built yet stops a config that has it, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.mistakes import Mistake
from zero_tp.config import ConfigError, RunConfig
from zero_tp.config.deepspeed import OFF_BLOCKS, REMOVED, RENAMED
from zero_tp.config.optimizer import REFUSED_OPTIMIZERS
from zero_tp.config.refusals import NOT_BUILT, REFUSALS, View
from zero_tp.config.schema import ZeroTP

ACTIVATIONS = "activation_checkpointing"
REFUSED: tuple[dict[str, Any], ...] = (
    {"fp16.enabled": True},
    {"data_types.param_dtype": "fp32"},
    {"gradient_allreduce_op": "sum"},
    {"managed_gradient_accumulation": False},
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 2.0},
    {"data_types.grad_accum_dtype": "fp32", "zero_optimization.stage": 0},
    {"zero_optimization.compute_grad_norm": False},
    {"bf16.check_grad_overflow": False},
    {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    {"sequence_parallel_size": 2},
    {"seq_parallel_communication_data_type": "fp32"},
    {"use_data_before_expert_parallelism": True},
    {"zero_optimization.zero_hpz_partition_size": 2},
    {"zero_optimization.zero_quantized_weights": True},
    {"zero_optimization.zero_quantized_nontrainable_weights": True},
    {"zero_optimization.zero_quantized_gradients": True},
    {"zero_optimization.offload_param": {"device": "cpu"}},
    {"zero_optimization.offload_optimizer": {"device": "cpu"}, "zero_optimization.stage": 0},
    {"zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
    {"zero_optimization.offload_optimizer": {"device": "nvme"}, "zero_optimization.stage": 3},
    {"zero_optimization.offload_param": {"device": "nvme"}, "zero_optimization.stage": 3},
    {"zero_optimization.elastic_checkpoint": True},
    {"zero_optimization.legacy_stage1": True},
    {"zero_optimization.pipeline_loading_checkpoint": True},
    {"zero_optimization.zenflow": {"topk_ratio": 0.1}},
    {f"{ACTIVATIONS}.partition_activations": True},
    {f"{ACTIVATIONS}.cpu_checkpointing": True},
    {f"{ACTIVATIONS}.contiguous_memory_optimization": True, "zero_tp.parallel.sequence": False},
    {
        f"{ACTIVATIONS}.contiguous_memory_optimization": True,
        f"{ACTIVATIONS}.partition_activations": True,
        "zero_tp.recompute": "full",
    },
    {"dataloader_drop_last": True},
    {"checkpoint.load_universal": True},
    {"checkpoint.use_node_local_storage": True},
    {"checkpoint.writer": {"type": "fast"}},
    {"checkpoint.checkpoint_serialization": False},
    {"checkpoint.parallel_write": {"pipeline_stage": True}},
)
NOT_BUILT_VALUES: dict[str, Any] = {
    "zero_tp.objective": {"type": "masked"},
    "zero_tp.compile": True,
    "zero_tp.evaluation.tasks": ["lambada"],
    f"{ACTIVATIONS}.profile": True,
    f"{ACTIVATIONS}.synchronize_checkpoint_boundary": True,
    "zero_optimization.offload_optimizer.super_offload": True,
    "bf16.bf16_master_weights_and_grads": True,
    "bf16.bf16_optimizer_states": True,
    "fp16.fp16_master_weights_and_grads": True,
}


def line(changes: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(Mistake(changes, "", ()).config()))
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path, world_size=4)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows(changes: dict[str, Any]) -> set[tuple[str, str]]:
    config = Mistake(changes, "", ()).config()
    view = View(config, ZeroTP(**config.pop("zero_tp")))
    return {(row.key, row.when) for row in REFUSALS if row.test(view)}


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_a_refused_combination_is_named_with_its_reason(changes: dict[str, Any], tmp_path: Path) -> None:
    found = line(changes, tmp_path)
    assert any(found.startswith(f"{key}: refused {when}: ") for key, when in rows(changes)), found


def test_every_refusal_has_a_config_here_and_the_right_config_has_none() -> None:
    assert rows({}) == set()
    assert set().union(*map(rows, REFUSED)) == {(row.key, row.when) for row in REFUSALS}


@pytest.mark.parametrize("key", NOT_BUILT_VALUES)
def test_what_is_not_built_yet_says_so(key: str, tmp_path: Path) -> None:
    changes = {key: NOT_BUILT_VALUES[key]}
    if key.startswith("zero_optimization"):
        changes["zero_optimization.stage"] = 3
    found = line(changes, tmp_path)
    assert found.startswith(f"{key}: ") and "is not built yet" in found


def test_everything_not_built_is_tried_here() -> None:
    assert set(NOT_BUILT_VALUES) == set(NOT_BUILT)


@pytest.mark.parametrize("key", [*REMOVED, *RENAMED])
def test_removed_and_renamed_keys(key: str, tmp_path: Path) -> None:
    assert line({key: True}, tmp_path).startswith(f"{key}: ")


@pytest.mark.parametrize("block", OFF_BLOCKS)
def test_blocks_that_stay_off(block: str, tmp_path: Path) -> None:
    assert line({block: {"enabled": True}}, tmp_path).startswith(f"{block}.enabled: true is refused: ")
    path = tmp_path / "off.json"
    path.write_text(json.dumps(Mistake({block: {"enabled": False}}, "", ()).config()))
    assert block not in RunConfig.load(path, world_size=4).deepspeed_config()


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_refused_optimizers(name: str, tmp_path: Path) -> None:
    found = line({"optimizer.type": name}, tmp_path)
    assert found.startswith(f'optimizer.type: "{name}" is refused: {REFUSED_OPTIMIZERS[name]}')
