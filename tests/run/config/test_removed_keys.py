"""A removed key: its default is accepted with a note wherever a config is read, another value is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import rewritten, write_checkpoint
from tests.support.launched import forked_zero_tp, script
from tests.support.mistakes import WORLD_SIZE, written
from tests.support.settings import gpt2_config
from zero_tp.base.errors import UserError
from zero_tp.base.settings.removed import REMOVED_KEYS, RemovedKey, drop_removed_keys
from zero_tp.base.strict_json import read_json
from zero_tp.base.validation import ConfigErrors
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.checkpoint.directory import Damaged, read_manifest
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.checkpoint.inspect import inspect
from zero_tp.run.checkpoint.same_run import differences
from zero_tp.run.config import RunConfig
from zero_tp.tools.evaluation.model_directory import open_directory

KEY = "zero_tp.parallel.fused_products"
NOTE = f"{KEY}: was removed; false, its default, changes nothing"


def with_key(value: Any) -> dict[str, Any]:
    return {"zero_tp": {"parallel": {"tensor": 2, "fused_products": value}}}


def test_each_key_is_judged_by_itself() -> None:
    removed = {"a": RemovedKey(0, "leave it out"), "b.c": RemovedKey(False, "write d")}
    config = {"a": 0, "b": {"c": False, "e": 1}, "f": 2}
    assert drop_removed_keys(config, removed) == (
        {"b": {"e": 1}, "f": 2},
        (
            "a: was removed; 0, its default, changes nothing",
            "b.c: was removed; false, its default, changes nothing",
        ),
    )
    assert config == {"a": 0, "b": {"c": False, "e": 1}, "f": 2}, "the argument stays as it is"
    with pytest.raises(ConfigErrors) as caught:
        drop_removed_keys({"a": False, "b": {"c": True}}, removed)
    assert [str(error) for error in caught.value.errors] == [
        "a: false, but this key was removed; leave it out",
        "b.c: true, but this key was removed; write d",
    ]
    assert drop_removed_keys({"b": 3}, removed) == ({"b": 3}, ())


def test_a_written_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    config = RunConfig.load(path, (f"{KEY}=false",), WORLD_SIZE)
    assert NOTE in config.cautions()
    assert "fused_products" not in config.resolved()["zero_tp"]["parallel"]
    with pytest.raises(ConfigErrors) as caught:
        RunConfig.load(path, (f"{KEY}=true",), WORLD_SIZE)
    assert str(caught.value) == f"{KEY}: true, but this key was removed; {REMOVED_KEYS[KEY].remedy}"
    values = read_json(path)
    values["zero_tp"]["parallel"] = {"tensor": 2, "fused_products": True}
    path.write_text(json.dumps(values))
    done = forked_zero_tp(tmp_path, "check", str(path))
    assert done.returncode == 2 and done.stderr.startswith(f"error: {KEY}: true"), done.stderr


def test_a_checkpoint_of_an_earlier_version(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint = write_checkpoint(run, gpt2_config())
    with rewritten(checkpoint) as manifest:
        manifest["config"] = with_key(False)
    line = f"{checkpoint}: {NOTE}"
    assert find_checkpoint(run).notes == (line,), "what a resume and --from log"
    rows = inspect(run, verify=True).splitlines()
    assert f"note        {line}" in rows and "verified    every checksum OK" in rows
    assert not [row for row in rows if row.startswith("skipped")]
    assert to_huggingface(run, tmp_path / "export").notes == (line,)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_directory(run, tokenizer=tmp_path).note == line
    config = RunConfig.load(written(tmp_path), (), WORLD_SIZE)
    assert not any(
        "fused" in change for change in differences(read_manifest(checkpoint), config, {})
    )

    with rewritten(checkpoint) as manifest:
        manifest["config"] = with_key(True)
    with pytest.raises(UserError) as caught:
        read_manifest(checkpoint)
    assert not isinstance(caught.value, Damaged), "on_corrupt does not set it aside"
    assert f"{KEY}: true, but this key was removed; with the version that wrote it" in str(
        caught.value
    )
    done = script("launch/convert.py", tmp_path, "to-hf", "run", "--output", "again")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
