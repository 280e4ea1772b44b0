"""Perplexity against transformers' own loss, one token at a time, and the zero-shot command around it."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from tests.tiers import THOROUGH
from zero_tp.commands import start
from zero_tp.constants import IGNORE_INDEX
from zero_tp.data.tokenizer_training import train_bpe
from zero_tp.errors import BAD_INPUT, UserError
from zero_tp.evaluation.eval_model import EvalModel, HuggingFaceScorer
from zero_tp.evaluation.evaluation_report import table
from zero_tp.evaluation.perplexity import perplexity, sliding_windows
from zero_tp.evaluation.task import TaskOptions, as_json
from zero_tp.evaluation.zero_shot import EvaluationSettings, evaluate, make_tasks, parse_data, parse_tasks
from zero_tp.parallel.scores import TokenScores

ROOT = Path(__file__).parents[2]
POSITIONS = 16
DOCUMENTS = [
    "The state of the union is strong, my fellow citizens. " * 3,
    "Né en 1790.",
    "x",
    "A café — 👋!\n\n<|endoftext|>",
]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = train_bpe(iter(DOCUMENTS), 280)
    torch.manual_seed(0)
    # initializer_range: weights large enough that tokens and positions matter.
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, n_positions=POSITIONS, vocab_size=288, initializer_range=0.5,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    return path


def reference(model: GPT2LMHeadModel, ids: list[int], s: int, o: int) -> float:
    """Summed NLL of ids[1:]: for each target the window that scores it, by transformers' loss of that target alone."""
    total = 0.0
    for target in range(1, len(ids)):
        k = 0 if target <= s else math.ceil((target - s) / o)
        context = ids[k * o : target]
        labels = torch.full((1, len(context) + 1), IGNORE_INDEX)
        labels[0, -1] = ids[target]
        inputs = torch.tensor([[*context, 0]])  # the last input's output is not scored
        inputs = inputs[:, :POSITIONS] if len(context) == POSITIONS else inputs
        if inputs.shape[1] == len(context):
            # A full window: no room for the target as input, so shift by hand.
            loss = model(input_ids=inputs, labels=inputs, shift_labels=labels[:, 1:]).loss
        else:
            loss = model(input_ids=inputs, labels=labels).loss
        total += loss.item()
    return total


@pytest.mark.parametrize(("s", "o"), [(16, 16), (16, 5), (8, 8), (8, 1), (7, 3)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_brute_force(model_directory: Path, s: int, o: int, batch_size: int) -> None:
    model = GPT2LMHeadModel.from_pretrained(str(model_directory)).eval()
    tokenizer = train_bpe(iter(DOCUMENTS), 280)

    # Room for two rows' logits: batches of three are split.
    scorer = HuggingFaceScorer(model, logits_bytes=2 * s * 288 * 4)
    eval_model = EvalModel(scorer, model, tokenizer, model.config, positions=s, batch_size=batch_size)
    result = perplexity([*DOCUMENTS, ""], eval_model, overlap=o)
    ids = [tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) for text in DOCUMENTS]
    with torch.no_grad():
        expected = sum(reference(model, [0, *each], s, o) for each in ids)
    assert result["nll"] == pytest.approx(expected, rel=1e-5)
    assert result["tokens"] == sum(map(len, ids))
    assert result["documents"] == len(DOCUMENTS)
    assert result["bytes"] == sum(len(text.encode()) for text in DOCUMENTS)
    assert result["characters"] == sum(map(len, DOCUMENTS))
    assert result["words"] == sum(len(text.split()) for text in DOCUMENTS)
    assert result["windows"] == sum(-(-max(0, len(each) - s) // o) + 1 for each in ids)


@given(st.integers(0, 60), st.integers(1, 20), st.data())
def test_windows_score_each_target_once(targets: int, s: int, data: st.DataObject) -> None:
    o = data.draw(st.integers(1, s))
    tokens = np.arange(targets + 1)
    scored: list[int] = []
    for number, row in enumerate(sliding_windows(tokens, s, o)):
        assert 1 <= len(row) <= s, "a window that scores nothing, or is too long"
        assert row.tokens.tolist() == list(range(row.tokens[0], row.tokens[0] + len(row) + 1))
        assert 1 <= row.scored <= (s if number == 0 else o)
        assert number == 0 or len(row) == s or row.tokens[-1] == targets
        scored += row.tokens[-row.scored :].tolist()
    assert scored == tokens[1:].tolist()


def test_figures() -> None:
    tokenizer = train_bpe(iter(DOCUMENTS), 280)

    def figures(nats_a_token: float) -> dict[str, Any]:
        def score(input_ids: torch.Tensor, labels: torch.Tensor) -> TokenScores:
            scored = labels != IGNORE_INDEX
            return TokenScores(scored * nats_a_token, scored)

        model = EvalModel(score, None, tokenizer, GPT2Config(), positions=POSITIONS)
        return perplexity(["four words of é"], model)

    result = figures(math.log(16))
    bits = 4 * result["tokens"]
    assert (result["words"], result["characters"], result["bytes"]) == (4, 15, 16)
    assert result["loss"] == pytest.approx(math.log(16))
    assert result["perplexity"] == pytest.approx(16)
    assert result["word_perplexity"] == pytest.approx(2 ** (bits / 4))
    assert result["bits_per_byte"] == pytest.approx(bits / 16)
    assert result["bits_per_character"] == pytest.approx(bits / 15)
    assert as_json(figures(1e6))["perplexity"] is None


def test_evaluate_reports(model_directory: Path, text_file: Path, tmp_path: Path) -> None:
    settings = EvaluationSettings(device="cpu", batch_size=2)
    report = evaluate(model_directory, ["perplexity"], {"perplexity": text_file}, settings)
    result = report["tasks"]["perplexity"]
    assert report["settings"]["sequence_length"] == result["overlap"] == POSITIONS
    assert len(result["data"]["sha256"]) == 64
    assert result["tokens"] > 50 and result["documents"] == 4
    # The special token's spelling is text: no eos id is scored.
    assert result["perplexity"] == pytest.approx(math.exp(result["nll"] / result["tokens"]))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    heading, row = table(report).splitlines()
    assert len(heading) == len(row) and f"{result['perplexity']:,.3f}" in row


def test_tasks_and_data_arguments(text_file: Path) -> None:
    assert parse_tasks("perplexity, perplexity") == ["perplexity"]
    with pytest.raises(UserError, match="no task named"):
        parse_tasks(",")
    assert parse_data([f"perplexity={text_file}"], ["perplexity"]) == {"perplexity": text_file}
    for data, message in [
        ({}, "perplexity needs a text: --data perplexity=FILE"),
        ({"perplexity": Path("/no/such.txt")}, "no such file"),
    ]:
        with pytest.raises(UserError, match=message):
            make_tasks(["perplexity"], data, TaskOptions())
    for pairs, message in [
        (["perplexity"], "TASK=PATH"),
        (["other=x"], "not among --tasks"),
        ([f"perplexity={text_file}"] * 2, "has a file already"),
    ]:
        with pytest.raises(UserError, match=message):
            parse_data(pairs, ["perplexity"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 17}, "the model has 16 positions"),
        ({"overlap": 17}, "--overlap 17: from 1 to the window's 16"),
        ({"overlap": 0}, "--overlap 0: from 1 to"),
        ({"limit": 0}, "--limit 0: from 1 to"),
        ({"num_fewshot": -1}, "--num-fewshot -1: from 0 to"),
        ({"num_fewshot": 1}, "for tasks of lm-eval only"),
        ({"tensor_parallel": 2}, "--tensor-parallel 2: it must divide the 1 rank;"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"device": "warp"}, "--device warp"),
    ],
)
def test_bad_settings(model_directory: Path, text_file: Path, options: dict[str, object], message: str) -> None:
    settings = EvaluationSettings(**({"device": "cpu"} | options))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        evaluate(model_directory, ["perplexity"], {"perplexity": text_file}, settings)


def test_bad_model_directories(model_directory: Path, text_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"

    def refuses(message: str, model: Path = copy) -> None:
        with pytest.raises(UserError, match=message):
            evaluate(model, ["perplexity"], {"perplexity": text_file}, EvaluationSettings(device="cpu"))

    refuses("no such directory")
    shutil.copytree(model_directory, copy)
    config = json.loads((copy / "config.json").read_text())

    def with_config(**changes: object) -> None:
        (copy / "config.json").write_text(json.dumps(config | changes))

    with_config(vocab_size=279)
    refuses("tokenizer has 280 tokens with ids up to 279, the model only 279")
    with_config(model_type="no-such-type")
    refuses("no-such-type")
    with_config(model_type="t5")
    refuses("t5 is not a causal language model")
    with_config(n_layer=3)
    refuses(r"weights missing in the files: transformer\.h\.2\.")
    with_config()
    (copy / "model.safetensors").write_bytes(b"\0" * 100)
    refuses("weights can't be read")
    (copy / "model.safetensors").unlink()
    refuses("no weights")
    (copy / "config.json").unlink()
    refuses("no config.json")
    (copy / "checkpoints" / "step_00000500").mkdir(parents=True)
    refuses("no complete checkpoint there")
    refuses("no complete checkpoint there", copy / "checkpoints" / "step_00000500")


def command(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "eval/zero_shot.py", "--tasks", "perplexity", *map(str, arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(home)},
        capture_output=True,
        text=True,
    )


@pytest.mark.thorough
def test_the_command(model_directory: Path, text_file: Path, tmp_path: Path) -> None:
    data = f"perplexity={text_file}"
    done = command(tmp_path, "--model", model_directory, "--data", data, "--output", tmp_path / "r.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split()[:2] == ["task", "perplexity"]
    assert json.loads((tmp_path / "r.json").read_text())["model"]["model_type"] == "gpt2"


@THOROUGH
def test_a_mistake_of_the_command_is_one_line(text_file: Path, tmp_path: Path) -> None:
    wrong = command(tmp_path, "--model", tmp_path / "none", "--data", f"perplexity={text_file}")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == f"error: --model {tmp_path / 'none'}: no such directory\n"


def test_an_output_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero_tp.evaluation.zero_shot.evaluate", None)
    (tmp_path / "file").touch()
    for output, told in (
        (tmp_path, f"--output {tmp_path}: not a file"),
        (tmp_path / "file" / "r.json", "(File exists)"),
    ):
        with pytest.raises(SystemExit) as ended:
            start("evaluate", ["--model", "m", "--tasks", "perplexity", "--output", str(output)])
        assert ended.value.code == BAD_INPUT
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1
