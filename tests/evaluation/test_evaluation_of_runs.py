"""A run evaluated as it is equals its export, on any grid that saved it; reports and two of them side by side."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers
from transformers import AutoConfig, BertConfig

from tests.support.checkpoints import write_checkpoint
from tests.support.tiny_models import tiny_gpt2
from zero_tp.checkpoint.convert import to_huggingface
from zero_tp.checkpoint.manifest import states_file
from zero_tp.commands import sample
from zero_tp.errors import UserError
from zero_tp.evaluation.evaluation_report import table
from zero_tp.evaluation.model_directory import open_directory
from zero_tp.evaluation.zero_shot import EvaluationSettings, evaluate, make_tasks
from zero_tp.tensors.safetensors_files import read_header
from zero_tp.zero.states import MASTER

SETTINGS = EvaluationSettings(device="cpu", batch_size=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gpt2(tmp_path_factory.mktemp("models") / "tiny", ["some words of a text, and more of them"] * 3)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    texts, passages = tmp_path / "texts.txt", tmp_path / "passages.txt"
    texts.write_text("Some words of a text that are scored, " * 20)
    passages.write_text("more of them and some words\nwords of a text\n")
    return {"perplexity": texts, "lambada": passages}


@pytest.mark.parametrize(("tensor", "shards"), [(1, 1), (2, 2)])
def test_a_run_equals_its_export(
    tokenizer: Path, data: dict[str, Path], tmp_path: Path, tensor: int, shards: int
) -> None:
    run = tmp_path / "run"
    config = AutoConfig.from_pretrained(str(tokenizer))
    write_checkpoint(run, config, tensor=tensor, data=shards, step=7, tokenizer=tokenizer)
    checkpoint = write_checkpoint(run, config, tensor=tensor, data=shards, step=12, tokenizer=tokenizer)
    to_huggingface(run, tmp_path / "export")
    expected = evaluate(tmp_path / "export", list(data), data, SETTINGS)
    assert expected["model"]["step"] is None and expected["model"]["class"] == "GPT2LMHeadModel"
    for path, step in ((run, 12), (checkpoint, 12), (checkpoint.with_name("step_00000007"), 7)):
        found = evaluate(path, list(data), data, SETTINGS)
        assert found["model"]["step"] == step and found["model"]["class"] == "ZeroTPForCausalLM"
        assert found["model"]["parameters"] == expected["model"]["parameters"]
        for task in data:
            assert found["tasks"][task]["nll"] == pytest.approx(expected["tasks"][task]["nll"], rel=1e-5)
        assert found["tasks"]["lambada"]["accuracy"] == expected["tasks"]["lambada"]["accuracy"]


def test_a_damaged_run_is_not_evaluated(tokenizer: Path, data: dict[str, Path], tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(str(tokenizer))
    checkpoint = write_checkpoint(tmp_path / "run", config, tokenizer=tokenizer)
    file = checkpoint / states_file(0, 0)
    header, base = read_header(file)
    name = next(name for name in header if name.endswith(f"/{MASTER}"))
    content = bytearray(file.read_bytes())
    content[base + header[name]["data_offsets"][0]] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file.name}: SHA-256 is"):
        evaluate(tmp_path / "run", ["perplexity"], {"perplexity": data["perplexity"]}, SETTINGS)


def test_a_run_without_its_tokenizer(tokenizer: Path, data: dict[str, Path], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", AutoConfig.from_pretrained(str(tokenizer)))
    with pytest.raises(UserError, match="the run has no tokenizer: say where it is with --tokenizer DIR"):
        evaluate(tmp_path / "run", list(data), data, SETTINGS)
    given = EvaluationSettings(device="cpu", tokenizer=tokenizer)
    assert evaluate(tmp_path / "run", list(data), data, given)["tasks"]["perplexity"]["tokens"] > 0


def test_a_run_of_an_encoder_is_refused(
    tokenizer: Path, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "run", AutoConfig.from_pretrained(str(tokenizer)), tokenizer=tokenizer)
    monkeypatch.setattr("zero_tp.checkpoint.convert.config_of", lambda manifest: BertConfig())
    with pytest.raises(UserError, match=r"bert is an encoder.* nor is scored by tasks of causal models"):
        evaluate(tmp_path / "run", list(data), data, SETTINGS)


def test_paths_and_texts_are_checked_before_torch_is_imported(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.jsonl").write_text('{"other": 1}\n')
    code = (
        "import sys; from pathlib import Path; from zero_tp.errors import UserError;"
        "from zero_tp.evaluation.zero_shot import EvaluationSettings, evaluate, parse_data\n"
        "for model, names, data in (('none', ['lambada'], []), (sys.argv[1], ['lambada'], ['lambada=wrong.jsonl']),"
        "(sys.argv[1], ['multiple_choice'], ['multiple_choice=wrong.jsonl']),"
        "(sys.argv[1], ['copa'], ['copa=none'])):\n"
        "    try: evaluate(Path(model), names, parse_data(data, names), EvaluationSettings())\n"
        "    except UserError as error: print(error)\n"
        "assert not {'torch', 'transformers', 'lm_eval'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tokenizer)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second, third, fourth = done.stdout.splitlines()
    assert first == "--model none: no such directory" and fourth == "none: no such file"
    assert "wrong.jsonl:1: no key 'text'" in second and "no field query" in third


def test_a_limit_is_for_the_tasks_that_have_examples(tokenizer: Path, data: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "wiki.txt"
    text.write_text("some words of a text \n" * 30)
    found = evaluate(
        tokenizer,
        ["lambada", "wikitext103"],
        {"lambada": data["lambada"], "wikitext103": text},
        replace(SETTINGS, limit=1),
    )["tasks"]
    assert found["lambada"]["examples"] == 1 and found["wikitext103"]["original_tokens"] > 100
    with pytest.raises(UserError, match="--limit 1: wikitext103 is one text; leave the limit out"):
        evaluate(tokenizer, ["wikitext103"], {"wikitext103": text}, replace(SETTINGS, limit=1))


def test_an_encoder_continues_no_prompt(tokenizer: Path, tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    shutil.copytree(tokenizer, encoder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertConfig(**sizes).save_pretrained(str(encoder))  # type: ignore[arg-type]
    parser = argparse.ArgumentParser()
    sample.add_arguments(parser)
    with pytest.raises(UserError, match=r"^[^\n]*bert is an encoder, whose tokens see those after them[^\n]*$"):
        sample.main(parser.parse_args(["--model", str(encoder), "--prompt", "some words"]))


def test_a_report_is_shown_as_tables(tokenizer: Path, data: dict[str, Path]) -> None:
    shown = table(evaluate(tokenizer, list(data), data, SETTINGS)).splitlines()
    assert [line.split()[0] for line in shown if line] == ["task", "perplexity", "task", "lambada"]


def test_texts_without_a_token(tokenizer: Path, data: dict[str, Path]) -> None:
    directory = open_directory(tokenizer)
    eval_model = directory.load("float32", "cpu")
    eval_model.tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("."), "")
    for name in data:
        (task,) = make_tasks([name], {name: data[name]}, SETTINGS)
        with pytest.raises(UserError, match="no token"):
            task.run(eval_model)


@pytest.mark.parametrize("options", [{"batch_size": 10**30}, {"limit": 10**30}, {"overlap": 10**30}])
def test_numbers_beyond_every_model(tokenizer: Path, data: dict[str, Path], options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"to 2147483647$"):
        evaluate(tokenizer, ["perplexity"], {"perplexity": data["perplexity"]}, replace(SETTINGS, **options))
