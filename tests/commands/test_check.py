"""`zero-tp check`: every mistake at once, what is missing, and what a run would be."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.corpora import run
from tests.support.launched import forked_zero_tp
from tests.support.mistakes import RIGHT, changed, written
from tests.support.tiny_configs import tiny_fields
from zero_tp.base import cli
from zero_tp.base.errors import UserError
from zero_tp.base.validation import ConfigErrors
from zero_tp.commands import check as command
from zero_tp.commands.check import describe
from zero_tp.data import tokenizer_files
from zero_tp.data.indexed_writer import IndexedWriter
from zero_tp.run.config import ConfigError, RunConfig

TUTORIAL: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_fp16_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The ZeRO-3 config of transformers' documentation, as it was before DeepSpeed renamed a key."""


def check(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return forked_zero_tp(path.parent, "check", str(path), *options)


def errors(tmp_path: Path, config: dict[str, Any], world_size: int | None = None) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        RunConfig.load(written(tmp_path, config), world_size=world_size)
    assert str(caught.value) == str(caught.value.errors[0])
    return [error.key for error in caught.value.errors]


def test_a_pasted_tutorial_has_one_line_for_each_mistake(tmp_path: Path) -> None:
    keys = errors(tmp_path, TUTORIAL)
    assert keys == [
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "optimizer.params.lr",
        "zero_tp",
        "train_micro_batch_size_per_gpu",
    ]
    done = check(written(tmp_path, TUTORIAL))
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.split(": ")[:2] for line in done.stderr.splitlines()] == [
        ["error", key] for key in keys
    ]


def test_keys_of_all_blocks_are_reported_together(tmp_path: Path) -> None:
    config = changed(
        zero_optimization={"stage": "two", "round_robin_gradients": True, "elastic_checkpoint": 7},
        optimizer__params={"learning_rate": 1.0, "betas": "auto"},
        scheduler__params={"warmup_num_steps": "auto", "total_steps": 5},
        tensor_parallel={"autotp_size": 2},
        train_batch_size="many",
    )
    config["zero_tp"]["training"] = {"step": 3}
    config["zero_tp"]["model"]["attn_implementation"] = "eager"
    assert set(errors(tmp_path, config)) == {
        *("zero_optimization.stage", "zero_optimization.round_robin_gradients"),
        *(
            "zero_optimization.elastic_checkpoint",
            "optimizer.params.learning_rate",
            "optimizer.params.lr",
        ),
        *("scheduler.params.total_steps", "scheduler.params.total_num_steps", "tensor_parallel"),
        *("train_batch_size", "zero_tp.training.step", "zero_tp.model.attn_implementation"),
    }


def test_an_auto_is_no_missing_key(tmp_path: Path) -> None:
    """A schedule's length may be "auto" where it is required, and its warm-up where the default
    would be too long.
    """
    config = changed(
        scheduler__params={"warmup_num_steps": "auto", "total_num_steps": 500}, nonsense=1
    )
    assert errors(tmp_path, config) == ["nonsense"]
    config = changed(
        scheduler__params={"warmup_num_steps": 10, "total_num_steps": "auto"}, nonsense=1
    )
    assert errors(tmp_path, config) == ["nonsense"]


def test_combinations_and_sums_are_reported_together(tmp_path: Path) -> None:
    config = changed(
        fp16__enabled=True,
        zero_optimization__offload_param={"device": "cpu"},
        scheduler__params__total_num_steps=5,
        zero_tp__recompute={"mode": "full", "layers": 3},
    )
    assert errors(tmp_path, config, world_size=4) == [
        *("fp16.enabled", "scheduler.params.total_num_steps", "zero_tp.recompute.layers"),
        "zero_optimization.offload_param",
    ]


def test_the_sums_of_model_and_batch_are_reported_together(tmp_path: Path) -> None:
    config = changed(zero_tp__data__sequence_length=999, train_batch_size=64)
    assert errors(tmp_path, config, world_size=4) == [
        "train_batch_size",
        "zero_tp.data.sequence_length",
    ]


def test_nothing_is_fetched_for_a_wrong_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def snapshot(*words: object, **_: object) -> Path:
        asked.append(words)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    config = changed(zero_tp__model={"from_pretrained": "somebody/tiny"})
    assert errors(tmp_path, config) == ["zero_tp.model.from_pretrained"] and len(asked) == 1
    assert errors(tmp_path, config | {"nonsense": 1}) == ["nonsense"] and len(asked) == 1


def checked(path: Path, *words: str) -> int:
    """Check a file in this process, in its directory."""
    parser = cli.Parser("check")
    command.add_arguments(parser)
    with contextlib.chdir(path.parent):
        return command.main(parser.parse_args([str(path), *words]))


def test_a_right_config_without_its_corpora_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    with IndexedWriter(tmp_path / "mine" / "train", 512) as corpus:
        corpus.add_documents([1, 2, 3] * 200, [600])
    path = written(
        tmp_path, changed(zero_tp__data__train="mine", zero_tp__data__validation="mine/train")
    )
    done = check(path, "--world-size", "4")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"config     {path} is valid, but these are missing: mine.bin, mine.idx"
    assert lines[-2:] == [
        f"not here   mine.{ending}, which a run needs; did you mean mine/train?"
        for ending in ("bin", "idx")
    ]
    assert checked(path, "--world-size", "4", "--set", "zero_tp.data.train=mine/train") == 0
    text = capsys.readouterr().out
    # DeepSpeed may have a warning of its own, if no test before has imported it.
    assert f"config     {path} is valid" in text.splitlines()
    # 2 ranks × 4 × 2 samples of 128 tokens, 100 times; the corpus has 4 windows.
    assert "data       mine/train: 600 tokens, 400 epochs" in text
    assert "validation mine/train: 600 tokens" in text
    for output in (path, path / "run"):
        with pytest.raises(UserError) as refusal:
            checked(path, "--output-dir", str(output))
        assert str(refusal.value) == (
            f"{output}: cannot be a run's directory ({path} is a file); give another --output-dir"
        )


def test_a_check_says_that_an_export_will_lack_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers 5 opens qwen2's tokenizers with its own class, unless the export's settings
    prevent it.
    """
    output = run(tmp_path, "data").output
    fields = tiny_fields("qwen2", 512)
    config = changed(
        zero_tp__model=fields, zero_tp__data={"train": str(output / "train"), "sequence_length": 8}
    )
    parser = cli.Parser("check")
    command.add_arguments(parser)
    options = parser.parse_args(
        [str(written(tmp_path, config)), "--output-dir", str(tmp_path / "run")]
    )
    for forms in (tokenizer_files._FORMS, ()):
        monkeypatch.setattr(tokenizer_files, "_FORMS", forms)
        assert command.main(options) == 0
        printed = capsys.readouterr().out.splitlines()
        lines = [line for line in printed if "an export will lack the tokenizer" in line]
        assert len(lines) == (not forms)
    assert "as transformers opens it (Qwen2Tokenizer)" in lines[0] and lines[0].startswith("note ")


def test_the_description_shows_the_sums(tmp_path: Path) -> None:
    path = written(tmp_path, RIGHT)
    text = describe(RunConfig.load(path, world_size=4), tmp_path)
    assert "4 = tensor 2 × data 2, sequence parallel" in text
    assert "16 samples = micro 4 × accumulation 2 × data 2" in text
    assert "204,800 tokens" in text
    assert "--world-size N" in describe(RunConfig.load(path), tmp_path)
    alone = RunConfig.load(path, ["zero_tp.parallel.tensor=1", "zero_tp.parallel.sequence=true"], 4)
    assert "4 = tensor 1 × data 4\n" in describe(alone, tmp_path)


def test_the_description_says_how_large_the_model_is_and_where_its_weights_come_from(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, RIGHT)
    config = RunConfig.load(path, world_size=4)
    # Embeddings, two layers, the last norm.
    count = 512 * 64 + 128 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64
    assert f"vocabulary 512: {count:,} parameters\n" in describe(config, tmp_path)
    # ZeRO-2 in bf16 on 2 replicas of 2 TP ranks: 2Ψ + 14Ψ/2 bytes
    total = re.search(r"^memory +([\d.]+) GiB a rank", describe(config, tmp_path), re.MULTILINE)
    assert total is not None and float(total[1]) == pytest.approx(9 * count / 2 / 2**30, rel=0.01)
    assert "weights    drawn from the seed 1234\n" in describe(config, tmp_path)
    assert "weights    of runs/other, with its moments\n" in describe(
        config, tmp_path, parent=Path("runs/other")
    )
    (tmp_path / "checkpoints" / "step_00000050").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000050" / "manifest.json").touch()
    assert f"weights    of {tmp_path}, which the run resumes from step 50\n" in describe(
        config, tmp_path
    )


def test_the_description_shows_each_group_of_parameters(tmp_path: Path) -> None:
    """With tensors of Hugging Face's files and elements of the whole model."""
    path = written(tmp_path, RIGHT)
    assert "\ngroup " not in describe(RunConfig.load(path, world_size=4), tmp_path)
    entries = [
        {"kind": "embedding", "weight_decay": 0},
        {"pattern": "c_attn.weight", "lr_scale": 0.5},
    ]
    changes = [f"zero_tp.param_groups={json.dumps(entries)}", "optimizer.params.weight_decay=0.1"]
    text = describe(RunConfig.load(path, changes, world_size=4), tmp_path)
    others = 2 * 9 * 64**2
    assert [line for line in text.splitlines() if line.startswith("group ")] == [
        f"group      the rest: tensors 6, parameters {others:,}, decay 0.1, lr × 1",
        f"group      the rest: tensors 18, parameters {2 * 13 * 64 + 2 * 64:,}, decay 0, lr × 1",
        f'group      kind "embedding": tensors 2, parameters {(512 + 128) * 64:,}, decay 0, lr × 1',
        f'group      pattern "c_attn.weight": tensors 2, parameters {2 * 3 * 64**2:,}, decay 0.1, '
        "lr × 0.5",
    ]


def test_a_bare_model_type_is_noted(tmp_path: Path) -> None:
    noted = (
        "zero_tp.model.model_type: no size is written, so that all are the defaults of "
        "transformers' class"
    )
    bare = RunConfig.load(
        written(
            tmp_path, changed(zero_tp__model={"model_type": "llama", "tie_word_embeddings": True})
        )
    )
    assert bare.cautions() == [noted]
    assert RunConfig.load(written(tmp_path, RIGHT)).cautions() == []


def test_a_dtype_that_this_machine_does_not_compute_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    parser = cli.Parser("check")
    command.add_arguments(parser)
    options = parser.parse_args(
        [str(written(tmp_path, changed(bf16__enabled=False, fp16__enabled=True)))]
    )
    with pytest.raises(
        ConfigError,
        match=r"^fp16.enabled: the accelerator .* \(cpu\) does not support fp16; use bf16",
    ):
        command.main(options)
