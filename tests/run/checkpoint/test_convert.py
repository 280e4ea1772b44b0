"""Exports of checkpoints of any topology, with one parameter in memory; and their description."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from tests.support.checkpoints import drawn, flip_bit, rewritten, write_checkpoint
from tests.support.native import to_ours, to_theirs
from tests.support.tiny_models import tiny_gpt2_config
from tests.tiers import THOROUGH
from zero_tp import commands
from zero_tp.base.errors import UserError
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.checkpoint.directory import MANIFEST, incomplete_after
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.checkpoint.inspect import inspect
from zero_tp.tools.evaluation import model_directory


def expected(of: GPT2Config) -> dict[str, Tensor]:
    shapes = to_ours(of, AutoModelForCausalLM.from_config(of).state_dict())
    return to_theirs(of, {name: drawn(name, "master", like.shape) for name, like in shapes.items()})


def stored(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    return tensors


@pytest.mark.parametrize(
    ("tensor", "data", "dtype"),
    [
        (1, 1, "float32"),
        (2, 3, "float32"),
        (4, 1, "float32"),
        (8, 2, "float32"),
        (2, 1, "bfloat16"),
        (2, 1, "float16"),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_holds_the_masters(
    tmp_path: Path, tensor: int, data: int, dtype: str, tied: bool
) -> None:
    model = tiny_gpt2_config(tie_word_embeddings=tied)
    write_checkpoint(tmp_path / "run", model, tensor=tensor, data=data)
    converted = to_huggingface(
        tmp_path / "run", tmp_path / "export", dtype=getattr(torch, dtype), max_shard_size="10KB"
    )
    found = stored(tmp_path / "export")
    wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in expected(model).items()}
    assert found.keys() == wanted.keys(), "tied weights once"
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), (
        "without padding, bit for bit"
    )
    assert converted.parameters == sum(tensor.numel() for tensor in wanted.values())
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == dtype
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    assert set(index["weight_map"].values()) == {
        path.name for path in (tmp_path / "export").glob("*.safetensors")
    }
    both: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    opened, info = both
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(opened.state_dict()[name], wanted[name]) for name in wanted)
    assert (opened.get_output_embeddings().weight is opened.get_input_embeddings().weight) == tied


def test_files_are_as_transformers_writes_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", tiny_gpt2_config())
    to_huggingface(tmp_path / "run", tmp_path / "ours", max_shard_size="20KB")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    for name in ("model.safetensors.index.json", "config.json", "generation_config.json"):
        ours, theirs = (
            json.loads((tmp_path / who / name).read_text()) for who in ("ours", "theirs")
        )
        for volatile in ("transformers_version", "_from_model_config"):
            ours.pop(volatile, None), theirs.pop(volatile, None)
        if "weight_map" in ours:  # the order of the tensors, and so the files, are theirs and ours
            assert ours.pop("weight_map").keys() == theirs.pop("weight_map").keys()
        assert ours == theirs, name


def test_flags_of_generation_without_effect_are_written_back(tmp_path: Path) -> None:
    """Published files have them: sampling flags without do_sample, which transformers takes and
    does not save.
    """
    flags = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 3]}
    write_checkpoint(tmp_path / "run", tiny_gpt2_config())
    with rewritten(find_checkpoint(tmp_path / "run").path) as manifest:
        manifest["generation"] = flags
    to_huggingface(tmp_path / "run", tmp_path / "export")
    again = ZeroTPForCausalLM.from_pretrained(tmp_path / "export")
    again.save_pretrained(tmp_path / "again")
    for name in ("export", "again"):
        settings = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert {key: settings.get(key) for key in (*flags, "do_sample")} == flags | {
            "do_sample": None
        }, name


def anonymous_growth(work: Callable[[], object]) -> int:
    """Run `work` in a thread; return by how many bytes the process's anonymous memory grows,
    sampled every ms.
    """

    def resident() -> int:
        return (
            int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
        )

    before = most = resident()
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(work)
        while not running.done():
            most = max(most, resident())
            time.sleep(0.001)
    running.result()
    return max(most, resident()) - before


@THOROUGH
def test_memory_is_that_of_one_parameter(tmp_path: Path) -> None:
    """A checkpoint of 77 M parameters, the largest with 1 M: all of them at once would be 310
    MB.
    """
    model = tiny_gpt2_config(n_layer=24, n_embd=512, vocab_size=2000, n_positions=512)
    write_checkpoint(tmp_path / "warm", tiny_gpt2_config())
    to_huggingface(tmp_path / "warm", tmp_path / "first")  # what is imported late

    def halves(name: str, kind: str, shape: Any) -> Tensor:
        return torch.full(tuple(shape), 0.5)

    write_checkpoint(tmp_path / "run", model, tensor=2, data=2, kinds=("master",), whole=halves)
    grown = anonymous_growth(lambda: to_huggingface(tmp_path / "run", tmp_path / "export"))
    assert (tmp_path / "export" / "model.safetensors").stat().st_size > 300e6
    assert grown < 2 * 12 * 4 * 512 * 512 + 60e6, f"{grown / 1e6:.0f} MB"


def test_an_output_that_exists_is_refused_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", tiny_gpt2_config())
    next(checkpoint.glob("*.safetensors")).unlink()
    (tmp_path / "export").mkdir()
    with pytest.raises(UserError, match="export: exists already"):
        to_huggingface(tmp_path / "run", tmp_path / "export")


def test_a_parameter_that_is_missing_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", tiny_gpt2_config())
    with rewritten(checkpoint) as manifest:
        del manifest["parameters"]["transformer.layers.1.mlp.up.bias"]
    with pytest.raises(UserError, match=r"no parameter transformer\.layers\.1\.mlp\.up\.bias"):
        to_huggingface(tmp_path / "run", tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_inspect_describes_a_run_and_verifies_its_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no complete checkpoint there"):
        inspect(tmp_path)
    for step in (10, 20):
        checkpoint = write_checkpoint(
            tmp_path / "run", tiny_gpt2_config(), tensor=2, data=2, step=step
        )
    rows = [
        tuple(line.split(maxsplit=1))
        for line in inspect(tmp_path / "run", verify=True).splitlines()
    ]
    parameters = sum(tensor.numel() for tensor in expected(tiny_gpt2_config()).values())
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    for row in (
        ("checkpoint", str(checkpoint)),
        ("complete", "steps 10, 20"),
        ("step", "20"),
        ("parameters", f"{parameters:,}"),
        ("states", "master, exp_avg, exp_avg_sq"),
        ("files", f"4, {size / 1e6:,.3f} MB"),
        ("verified", "every checksum OK"),
    ):
        assert row in rows
    damaged = checkpoint / "states_tp00_dp0001.safetensors"
    flip_bit(damaged, -1)
    text = inspect(checkpoint)
    assert "TP 2 × DP 2, SP, ZeRO-2, fp32" in text and "n_layer 2" in text
    assert all(path.name in text for path in checkpoint.glob("*.safetensors"))
    assert "complete" not in text and "OK" not in text, "nothing is read without --verify"
    with pytest.raises(UserError, match=rf"{damaged.name}: its hash"):
        inspect(tmp_path / "run", verify=True)


def test_a_newest_checkpoint_without_its_manifest_is_named_wherever_an_older_one_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    older, lost = (write_checkpoint(run, tiny_gpt2_config(), step=step) for step in (1, 2))
    (lost / MANIFEST).unlink()
    line = f"{lost}: not a checkpoint (no {MANIFEST})"

    def command(name: str, *words: str) -> list[str]:
        parser = argparse.ArgumentParser()
        commands.command_module(name).add_arguments(parser)
        commands.command_module(name).main(parser.parse_args(words))
        return capsys.readouterr().out.splitlines()

    assert line in command("convert", "to-hf", str(run), "--output", str(tmp_path / "export"))
    assert f"skipped     {line}" in command("inspect", str(run))
    assert "skipped" not in inspect(older, verify=True)
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        inspect(run, verify=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    for source, notes in ((run, (line,)), (older, ())):
        assert model_directory.open_directory(source, tokenizer=tmp_path).note == "".join(notes)
        assert find_checkpoint(source).notes == notes
    (lost / MANIFEST).write_bytes((older / MANIFEST).read_bytes())
    assert incomplete_after(run, 1) == ()
