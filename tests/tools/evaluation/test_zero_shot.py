"""`zero-tp evaluate`: a run equals its export, the report, and mistakes reported before the
work.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers
from transformers import AutoConfig

from tests.support.checkpoints import flip_master, write_checkpoint
from zero_tp.base.errors import BAD_INPUT, UserError
from zero_tp.commands import start
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.checkpoint.manifest import states_file
from zero_tp.tools.evaluation.evaluation_report import table, write_samples
from zero_tp.tools.evaluation.model_directory import open_directory
from zero_tp.tools.evaluation.settings import EvaluationSettings
from zero_tp.tools.evaluation.zero_shot import evaluate, make_tasks, parse_data, parse_tasks

SETTINGS = EvaluationSettings(device="cpu", batch_size=3)


@pytest.fixture
def model(small_model: Path) -> Path:
    return small_model


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    texts, passages = tmp_path / "texts.txt", tmp_path / "passages.txt"
    texts.write_text("Some words of a text that are scored, " * 20)
    passages.write_text("more of them and some words\nwords of a text\n")
    return {"perplexity": texts, "lambada": passages}


@pytest.mark.parametrize(("tensor", "shards"), [(1, 1), (2, 2)])
def test_a_run_equals_its_export(
    model: Path, data: dict[str, Path], tmp_path: Path, tensor: int, shards: int
) -> None:
    run = tmp_path / "run"
    config = AutoConfig.from_pretrained(str(model))
    write_checkpoint(run, config, tensor=tensor, data=shards, step=7, tokenizer=model)
    checkpoint = write_checkpoint(run, config, tensor=tensor, data=shards, step=12, tokenizer=model)
    to_huggingface(run, tmp_path / "export")
    expected = evaluate(tmp_path / "export", list(data), data, SETTINGS)
    assert expected["model"]["step"] is None and expected["model"]["class"] == "GPT2LMHeadModel"
    for path, step in ((run, 12), (checkpoint, 12), (checkpoint.with_name("step_00000007"), 7)):
        found = evaluate(path, list(data), data, SETTINGS)
        assert found["model"]["step"] == step and found["model"]["class"] == "ZeroTPForCausalLM"
        assert found["model"]["parameters"] == expected["model"]["parameters"]
        for task in data:
            assert found["tasks"][task]["nll"] == pytest.approx(
                expected["tasks"][task]["nll"], rel=1e-5
            )
        assert found["tasks"]["lambada"]["accuracy"] == expected["tasks"]["lambada"]["accuracy"]


def test_a_damaged_run_is_not_evaluated(model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(str(model))
    checkpoint = write_checkpoint(tmp_path / "run", config, tokenizer=model)
    file = checkpoint / states_file(0, 0)
    flip_master(file)
    with pytest.raises(UserError, match=rf"{file.name}: its hash is"):
        evaluate(tmp_path / "run", ["perplexity"], {"perplexity": data["perplexity"]}, SETTINGS)


def test_a_run_without_its_tokenizer(model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", AutoConfig.from_pretrained(str(model)))
    with pytest.raises(UserError, match="the run has no tokenizer; give one with --tokenizer DIR"):
        evaluate(tmp_path / "run", list(data), data, SETTINGS)
    given = EvaluationSettings(device="cpu", tokenizer=model)
    assert evaluate(tmp_path / "run", list(data), data, given)["tasks"]["perplexity"]["tokens"] > 0


def test_paths_and_texts_are_checked_before_torch_is_imported(model: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.jsonl").write_text('{"other": 1}\n')
    code = (
        "import sys; from pathlib import Path; from zero_tp.base.errors import UserError;"
        "from zero_tp.tools.evaluation.settings import EvaluationSettings;"
        "from zero_tp.tools.evaluation.zero_shot import evaluate, parse_data\n"
        "for model, names, data in (('none', ['lambada'], []), (sys.argv[1], ['lambada'], "
        "['lambada=wrong.jsonl']),"
        "(sys.argv[1], ['multiple_choice'], ['multiple_choice=wrong.jsonl']),"
        "(sys.argv[1], ['copa'], ['copa=none'])):\n"
        "    try: evaluate(Path(model), names, parse_data(data), EvaluationSettings())\n"
        "    except UserError as error: print(error)\n"
        "assert not {'torch', 'transformers', 'lm_eval'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second, third, fourth = done.stdout.splitlines()
    assert first == "--model none: no such directory" and fourth == "none: no such file"
    assert "wrong.jsonl:1: no key 'text'" in second and "no field query" in third


def test_the_report_has_the_figures_in_json_and_as_tables(
    model: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    wiki = tmp_path / "wiki.txt"
    wiki.write_text("some words of a text \n" * 30)
    names = [*data, "wikitext103"]
    report = evaluate(model, names, {**data, "wikitext103": wiki}, replace(SETTINGS, limit=1))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    result = report["tasks"]["perplexity"]
    assert (
        report["settings"]["sequence_length"] == result["overlap"] == 64
        and len(result["data"]["sha256"]) == 64
    )
    assert result["perplexity"] == pytest.approx(math.exp(result["nll"] / result["tokens"]))
    tasks = report["tasks"]
    assert tasks["lambada"]["examples"] == 1 and tasks["wikitext103"]["original_tokens"] > 100, (
        "the limit is for examples"
    )
    lines = [line for line in table(report).splitlines() if line]
    assert [line.split()[0] for line in lines] == [
        word for name in names for word in ("task", name)
    ]
    assert len(lines[0]) == len(lines[1]) and f"{result['perplexity']:,.3f}" in lines[1]


def test_samples_are_files_beside_the_report(tmp_path: Path) -> None:
    """One for each task, whatever its name."""
    samples = {
        "../mine/a": [{"acc": 1}, {"acc": 0}],
        "../mine a": [{"acc": 2}],
        "copa_local": [{"acc": 3}],
    }
    report: dict[str, Any] = {"tasks": {"mine": {"samples": dict(samples)}, "perplexity": {}}}
    files = write_samples(tmp_path / "results.json", report)
    assert [file.name for file in files] == [
        f"results_samples_{name}.jsonl" for name in ("..%2Fmine%2Fa", "..%2Fmine%20a", "copa_local")
    ]
    for file, records in zip(files, samples.values(), strict=True):
        assert (
            file.parent == tmp_path
            and [json.loads(line) for line in file.read_text().splitlines()] == records
        )
    assert report == {"tasks": {"mine": {}, "perplexity": {}}}


def test_texts_without_a_token(model: Path, data: dict[str, Path]) -> None:
    directory = open_directory(model)
    eval_model = directory.load("float32", "cpu")
    eval_model.tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("."), "")
    for name in data:
        (task,) = make_tasks([name], {name: data[name]}, SETTINGS)
        with pytest.raises(UserError, match="no token"):
            task.compute_metrics(eval_model)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "perplexity needs a text: --data perplexity=FILE"),
        (["perplexity=/no/such.txt"], "no such file"),
        (["perplexity"], "not TASK=PATH"),
        (["perplexity=x", "perplexity=y"], "has a file already"),
    ],
)
def test_data_that_fit_no_task_are_refused(pairs: list[str], message: str) -> None:
    names = parse_tasks("perplexity, perplexity")
    assert names == ["perplexity"]
    with pytest.raises(UserError, match=message):
        make_tasks(names, parse_data(pairs), SETTINGS)


def test_data_of_another_task_are_refused() -> None:
    """Before the model: a text would come from the hub instead."""
    with pytest.raises(
        UserError, match=r"^--data wikitext=x: 'wikitext' is not among --tasks wikitext103,lambada$"
    ):
        evaluate(Path("none"), ["wikitext103", "lambada"], {"wikitext": Path("x")}, SETTINGS)


def test_a_figure_that_is_not_finite_is_named() -> None:
    """nan of a diverged model is no overflow."""
    report = {"model": {}, "tasks": {"perplexity": {"perplexity": None, "loss": 1.5}}}
    assert table(report).splitlines()[1].split(None, 1) == ["perplexity", "not finite       1.500"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 65}, "the model has 64 positions"),
        ({"overlap": 65}, "--overlap 65: from 1 to the window's 64"),
        ({"overlap": 0}, "--overlap 0: from 1 to"),
        ({"overlap": 10**30}, "to 2147483647$"),
        ({"limit": 0}, "--limit 0: from 1 to"),
        ({"limit": 10**30}, "to 2147483647$"),
        ({"num_fewshot": -1}, "--num-fewshot -1: from 0 to"),
        ({"num_fewshot": 1}, "--num-fewshot: perplexity: for tasks of lm-eval only"),
        ({"log_samples": True}, "--log-samples: perplexity: for tasks of lm-eval only"),
        ({"tensor_parallel": 2}, "--tensor-parallel 2: it must divide the 1 rank;"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"batch_size": 10**30}, "to 2147483647$"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"device": "warp"}, "--device warp"),
    ],
)
def test_bad_settings(
    model: Path, data: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(
            model, ["perplexity"], {"perplexity": data["perplexity"]}, replace(SETTINGS, **options)
        )


def test_names_and_options_that_fit_no_task_are_refused() -> None:
    with pytest.raises(UserError, match="no task; there are"):
        parse_tasks(",")
    with pytest.raises(UserError, match="--limit 1: wikitext103 is one text; leave the limit out"):
        make_tasks(["wikitext103"], {}, replace(SETTINGS, limit=1))
    with pytest.raises(
        UserError, match="--overlap: lambada: for perplexity and wikitext103 only; leave it out"
    ):
        make_tasks(["lambada"], {}, replace(SETTINGS, overlap=16))
    with pytest.raises(
        UserError, match="--text-key: copa: for perplexity and wikitext103 and lambada only"
    ):
        make_tasks(["copa"], {}, replace(SETTINGS, text_key="prose"))


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero_tp.tools.evaluation.zero_shot.evaluate", None)
    (tmp_path / "file").touch()
    for output, message in (
        (tmp_path, f"--output {tmp_path}: not a file"),
        (tmp_path / "file" / "r.json", "(File exists)"),
    ):
        with pytest.raises(SystemExit) as ended:
            start("evaluate", ["--model", "m", "--tasks", "perplexity", "--output", str(output)])
        assert ended.value.code == BAD_INPUT
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
