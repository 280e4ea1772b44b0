"""A run resumes only its own checkpoints, and logs what has changed since."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from tests.support.checkpoints import rewritten, write_checkpoint
from zero_tp.base.errors import UserError
from zero_tp.base.versions import versions
from zero_tp.run.checkpoint.directory import read_manifest, step_directory
from zero_tp.run.checkpoint.same_run import check_same_run, differences, fixed_settings
from zero_tp.run.config import RunConfig

SIZES: dict[str, Any] = {
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "n_positions": 8,
    "vocab_size": 31,
}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0}


def config_of(folder: Path, **changes: Any) -> RunConfig:
    """Return the config of a run of SIZES; `__` in a key stands for a dot."""
    raw = {
        "train_batch_size": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-3}},
        "zero_tp": {
            "model": {"model_type": "gpt2", **SIZES},
            "data": {"train": "nowhere/train", "sequence_length": 8},
            "training": {"steps": 4, "seed": 7},
        },
    }
    (folder / "run.json").write_text(json.dumps(raw))
    options = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
    return RunConfig.load(folder / "run.json", options, 2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of `config_of`."""
    config = config_of(tmp_path)
    checkpoint = write_checkpoint(tmp_path / "run", GPT2Config(**SIZES), tensor=2, data=2)
    with rewritten(checkpoint) as manifest:
        manifest |= {
            "fixed": fixed_settings(config),
            "config": config.resolved(),
            "versions": versions(),
        }
    return checkpoint.parents[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"zero_tp__training__seed": 8},
            r"zero_tp\.training\.seed: 8, but the run of .* was started with 7; ",
        ),
        (
            {"zero_tp__data__document_attention": "reset"},
            r'zero_tp\.data\.document_attention: "reset", but the run of .* with "continue"',
        ),
        (
            {"zero_tp__model__pad_token_id": None},
            r"zero_tp\.model: .*, but the run of .* was started with ",
        ),
    ],
)
def test_another_run_is_not_resumed(
    run: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    checkpoint = step_directory(run, 1)
    with pytest.raises(UserError, match=message):
        check_same_run(checkpoint, read_manifest(checkpoint), config_of(tmp_path, **change))
    with rewritten(checkpoint) as manifest:
        del manifest["fixed"]["optimizer"]
    with pytest.raises(UserError, match="saved by a Trainer"):
        check_same_run(checkpoint, read_manifest(checkpoint), config_of(tmp_path))


def test_what_differs_from_the_last_start_is_logged(run: Path, tmp_path: Path) -> None:
    manifest = read_manifest(step_directory(run, 1))
    assert differences(manifest, config_of(tmp_path), {}) == []
    changed = config_of(
        tmp_path,
        scheduler__params__warmup_max_lr=0.5,
        gradient_clipping=3.0,
        zero_tp__data__validation="nowhere/validation",
        zero_tp__parallel__tensor=2,
    )
    validation = {"a": {"tokens": 5}, "b": {}}
    other = manifest.model_copy(
        update={"versions": {**manifest.versions, "torch": "1.0"}, "validation": validation}
    )
    lines = differences(other, changed, {"a": {"tokens": 6}, "b": {}})
    saved = "when step 1 was saved"
    for line in (
        f"scheduler.params.warmup_max_lr: 0.5, was 0.001 {saved}",
        f"gradient_clipping: 3.0, was 1.0 {saved}",
        f'zero_tp.data.validation: {{"nowhere/validation": 1.0}}, was not set {saved}',
        f"zero_tp.data.validation: a holds other documents or tokens than {saved}",
    ):
        assert line in lines
    assert any(
        line.startswith("torch's version: ") and line.endswith(f'was "1.0" {saved}')
        for line in lines
    )
    assert not any("parallel" in line for line in lines), "the line on resuming has them"
