"""Routers' biases in checkpoints: resumed on another grid, and exported, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.checkpoint_runs import (
    VOCABULARY,
    batch_of,
    build,
    resume_and_train,
    steps_of,
    train_and_save,
    write_config,
)
from tests.support.corrected_routers import biases, corrected_fields
from tests.support.pools import Pools
from tests.tiers import THOROUGH, in_tiers
from zero_tp.parallel.layout import stored_buffers
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.checkpoint.reader import CheckpointReader

NAMES = [f"transformer.layers.{layer}.mlp.router.correction_bias" for layer in (1, 2)]


def run_file(path: Path, tensor: int, stage: int, dtype: str = "fp32") -> Path:
    config = json.loads(write_config(path, stage, dtype, tensor).read_text())
    config["zero_tp"]["model"] = corrected_fields(vocab_size=VOCABULARY)
    config["zero_tp"]["training"]["router_bias_update_rate"] = 0.01
    path.write_text(json.dumps(config))
    return path


def saved_biases(run: Path) -> Tensor:
    checkpoint = find_checkpoint(run)
    reader = CheckpointReader(checkpoint.path, checkpoint.manifest)
    return torch.stack([reader.whole(name) for name in NAMES])


def resumed_biases(path: str, run: str) -> list[Tensor]:
    """Of this rank, after the restore, and how many there are."""
    from zero_tp.run.checkpoint.start_point import Resume

    engine, config = build(path)
    Resume(find_checkpoint(Path(run))).restore(engine.zero, config.zero_tp.training.seed)
    restored = [buffer.clone() for _, buffer in stored_buffers(engine.model)]
    steps_of(engine, 4, 4)
    return restored


@THOROUGH
@pytest.mark.parametrize(("tensor", "stage"), in_tiers([(1, 3), (4, 2), (2, 1), (2, 0)], [(4, 2)]))
def test_biases_resume_on_another_grid(
    ranks: Pools, tmp_path: Path, tensor: int, stage: int
) -> None:
    """From TP 2 × DP 2 at ZeRO-1. The steps after it are those of the whole run."""
    before = run_file(tmp_path / "before.json", 2, 1)
    after = run_file(tmp_path / "after.json", tensor, stage)
    run = tmp_path / "run"
    whole = ranks(4).run(train_and_save, str(before), str(run), [3], 6)
    saved = saved_biases(run)
    assert saved.any()
    for restored in ranks(4).run(resumed_biases, str(after), str(run)):
        assert torch.equal(torch.stack(restored), saved)
    again = ranks(4).run(resume_and_train, str(after), str(run), 6)
    for found, expected in zip(again[0]["steps"], whole[0]["steps"][3:], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", in_tiers([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_an_export_has_the_biases_in_fp32(ranks: Pools, tmp_path: Path, dtype: torch.dtype) -> None:
    run = tmp_path / "run"
    path = run_file(tmp_path / "run.json", 2, 1)
    traces: list[dict[str, Any]] = ranks(2).run(train_and_save, str(path), str(run), [3], 3)
    to_huggingface(run, tmp_path / "export", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert model.dtype == dtype
    assert torch.equal(biases(model), saved_biases(run))
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32 and bias.any()
    if dtype == torch.float32:
        logits = model(batch_of(0)[:2, :-1]).logits
        assert (logits - traces[0]["logits"]).abs().max() < 1e-5
