"""A corpus made by a datatrove pipeline: the same bytes as by one process, or a part is refused
by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datatrove.executor import LocalPipelineExecutor

from launch import prepare_cluster
from tests.support.corpora import content_of, texts_of, trained_tokenizer, write_jsonl
from tests.support.corpus_parts import flip_byte, make_parts
from tests.support.launched import ROOT, script
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.data import PrepareSettings, formats, prepare
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.tools.corpus.datatrove import CorpusReader, TokenizedCorpus
from zero_tp.tools.corpus.parts import merge


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def inputs(tmp_path: Path, seed: int) -> list[str | Path]:
    """Five files of three kinds, with records that are no documents; one is empty."""
    chance, paths = random.Random(seed), list[str | Path]()
    for number, name in enumerate(("b.jsonl", "a.jsonl.gz", "c.jsonl")):
        paths.append(write_jsonl(tmp_path / name, [*texts_of(chance, 30 + number), "short"]))
    with open(paths[0], "a") as file:
        file.write('{"text": \n' * 3)
    (tmp_path / "e.jsonl").touch()
    (tmp_path / "d.txt").write_text("\r\n\r\n".join(texts_of(chance, 9)), newline="")
    return [*paths, tmp_path / "e.jsonl", tmp_path / "d.txt"]


def start(*words: object) -> subprocess.CompletedProcess[str]:
    return script("launch/prepare_cluster.py", ROOT, *map(str, words))


@pytest.mark.parametrize("tasks", [1, 3, 8])
def test_merged_parts_are_what_one_process_makes(
    tmp_path: Path,
    inputs: list[str | Path],
    tokenizer: str,
    tasks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fewer files than tasks, too: a part may be empty."""
    options: dict[str, Any] = {"min_tokens": 10, "sentences": "en", "seed": 5}
    chosen = PrepareSettings(tokenizer, 0.1, documents="blank-line", **options)
    one = prepare(inputs, tmp_path / "one", chosen)
    parts = make_parts(inputs, tmp_path / "parts", tokenizer, tasks, **options)
    merged = merge(parts, tmp_path / "out", 0.1)
    assert len(content_of(merged.output)) > 6 and content_of(merged.output) == content_of(
        one.output
    )
    for key in ("splits", "unigram", "files", "inputs", "vocabulary_size", "end_of_document"):
        assert merged.report[key] == one.report[key]
    ours, theirs = merged.report["documents"], one.report["documents"]
    assert ours.pop("problems") and theirs.pop("problems") and ours == theirs
    assert ours["dropped"].keys() == {"empty", "malformed", "short"}
    with monkeypatch.context() as patch:
        patch.delattr(IndexedCorpus, "_read_content")  # the first start uses the cache
        assert (
            IndexedCorpus(merged.output / "train").content
            == IndexedCorpus(one.output / "train").content
        )
    assert merge(parts, tmp_path / "out", 0.1).reused
    with pytest.raises(UserError, match=r"made with another validation: .* --overwrite"):
        merge(parts, tmp_path / "out", 0.2)
    assert not merge(parts, tmp_path / "out", 0.2, overwrite=True).reused


def test_documents_of_datatroves_own_reader(tmp_path: Path, tokenizer: str) -> None:
    """Its tasks read other files, and what a filter drops is missing."""
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader

    texts = texts_of(random.Random(3), 40)
    (tmp_path / "raw").mkdir()
    for i in range(5):
        write_jsonl(tmp_path / f"raw/{i}.jsonl", texts[i::5])
    kept = [
        write_jsonl(tmp_path / f"{i}.jsonl", [text for text in texts[i::5] if "7" in text])
        for i in range(5)
    ]
    corpus = TokenizedCorpus(tokenizer, tmp_path / "parts")
    for rank in range(3):
        documents = LambdaFilter(lambda document: "7" in document.text).run(
            JsonlReader(str(tmp_path / "raw")).run(None, rank, 3), rank, 3
        )
        corpus.run(documents, rank, 3)
    one = prepare(kept, tmp_path / "one", PrepareSettings(tokenizer))
    assert content_of(merge(tmp_path / "parts", tmp_path / "out").output) == content_of(one.output)


def test_documents_that_a_step_adds_count_as_read(tmp_path: Path, tokenizer: str) -> None:
    """By doubling them, and by another reader before this one; a setting of the pipeline hides
    no validation size.
    """
    texts = [f"text {i}" for i in range(10)]
    reader, other = (
        CorpusReader([write_jsonl(tmp_path / f"{name}.jsonl", texts)]) for name in "ab"
    )
    corpus = TokenizedCorpus(
        tokenizer, tmp_path / "parts", reader=reader, settings={"validation": 0.2}
    )
    corpus.run(copy for document in reader.run(other.run()) for copy in (document, document))
    counts = merge(tmp_path / "parts", tmp_path / "out", 0.1).report["documents"]
    assert (counts["read"], counts["kept"], counts["dropped"]) == (40, 40, {})
    with pytest.raises(UserError, match=r"made with another validation: .* --overwrite"):
        merge(tmp_path / "parts", tmp_path / "out", 0.2)


def test_a_task_that_is_killed_or_fails_leaves_no_part(
    tmp_path: Path, inputs: list[str | Path], tokenizer: str
) -> None:
    reader = CorpusReader(inputs)
    corpus = TokenizedCorpus(tokenizer, tmp_path / "parts", reader=reader)

    def failing() -> Iterator[Any]:
        yield from reader.run(None, 0, 1)
        raise RuntimeError("the network is gone")

    with pytest.raises(RuntimeError):
        corpus.run(failing())
    assert not list((tmp_path / "parts").iterdir())
    left = tmp_path / "parts/.00000.partial"  # of a SIGKILL
    left.mkdir()
    (left / "blocks").write_bytes(b"half")
    for _ in range(2):  # a task that has ended may run again
        corpus.run(reader.run(None, 0, 1))
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["00000"]
    one = prepare(inputs, tmp_path / "one", PrepareSettings(tokenizer))
    assert content_of(merge(tmp_path / "parts", tmp_path / "out").output) == content_of(one.output)


def test_refusals(
    tmp_path: Path, inputs: list[str | Path], tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="a cluster takes an existing tokenizer: prepare some"):
        TokenizedCorpus("bpe:300", tmp_path)
    with pytest.raises(UserError, match="standard input can't be read by several tasks"):
        CorpusReader(["-"])
    with pytest.raises(UserError, match="it has no token 'no'"):
        TokenizedCorpus(tokenizer, tmp_path, eos="no")
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="a saved copy of it with other ids: its model"),
    ):
        patch.setattr(
            "zero_tp.data.tokenizer.match_tokenizer", lambda *arguments: "its model differ"
        )
        TokenizedCorpus(tokenizer, tmp_path)
    reader = CorpusReader(inputs)
    os.utime(inputs[0], (1, 1))
    with pytest.raises(UserError, match=r"b.jsonl: the file has changed since the start"):
        list(reader.run(None, 0, 1))
    monkeypatch.setitem(sys.modules, "datatrove", None)
    with pytest.raises(
        UserError, match=r"needs datatrove: pip install -c constraints.txt -e .\[datatrove\]"
    ):
        formats.import_optional("datatrove", "this", "datatrove")


@THOROUGH
def test_the_script_makes_what_one_process_makes(
    tmp_path: Path, inputs: list[str | Path], tokenizer: str
) -> None:
    words = (
        "--input",
        *inputs,
        "--tokenizer",
        tokenizer,
        "--no-deduplicate",
        "--repair-unicode",
        "--min-tokens",
        5,
    )
    made = start(*words, "--output", tmp_path / "out", "--tasks", 3)
    assert made.returncode == 0, made.stderr
    one = prepare(inputs, tmp_path / "one", PrepareSettings(tokenizer, repair=True, min_tokens=5))
    assert content_of(tmp_path / "out") == content_of(one.output)


@THOROUGH
@pytest.mark.parametrize(
    "refusal", in_tiers(["taken", "list", "tasks", "slurm"], ["taken", "slurm"])
)
def test_the_script_refuses_in_one_line_before_any_task(
    tmp_path: Path, inputs: list[str | Path], tokenizer: str, refusal: str
) -> None:
    (tmp_path / "taken").write_text("a person's file")
    words = (
        "--input",
        *inputs,
        "--tokenizer",
        tokenizer,
        "--output",
        tmp_path / "out",
        "--tasks",
        2,
    )
    refusals: dict[str, tuple[tuple[object, ...], str]] = {
        "taken": (
            ("--output", tmp_path / "taken"),
            f"error: {tmp_path}/taken exists and is not the output of this",
        ),
        "list": (
            ("--executor-arguments", "[1]"),
            r"error: argument --executor-arguments: holds \[1\], not an obj",
        ),
        "tasks": (
            ("--executor-arguments", '{"tasks": 3}'),
            "error: --executor-arguments: .*'tasks'",
        ),
        "slurm": (("--executor", "slurm"), "error: --executor-arguments: .*partition"),
    }
    more, message = refusals[refusal]
    refused = start(*words, *more)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert re.match(message, refused.stderr), refused.stderr
    assert not list(tmp_path.glob("*.work"))


class QuietExecutor(LocalPipelineExecutor):
    """Behaves as Ray's executor: a task that raises ends, `run` returns, and the next stage
    would wait for it.
    """

    def run(self) -> Any:
        with contextlib.suppress(ValueError, RuntimeError):
            return super().run()


@pytest.mark.slow
@pytest.mark.parametrize("deduplicate", in_tiers([True, False], [True]))
def test_a_stage_whose_task_fails_ends_the_command_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, deduplicate: bool
) -> None:
    inputs = [
        write_jsonl(tmp_path / f"{i}.jsonl", [f"text {i} {j} of some words" for j in range(9)])
        for i in range(3)
    ]
    inputs[1].write_text(json.dumps({"words": "text", "others": "text"}))
    words = [
        "--input",
        *inputs,
        "--tokenizer",
        tokenizer,
        "--output",
        tmp_path / "out",
        "--tasks",
        3,
    ]
    words += [*(() if deduplicate else ("--no-deduplicate",)), "--executor", "ray"]
    words += ["--executor-arguments", '{"workers": 1}']
    monkeypatch.setattr(sys, "argv", ["prepare_cluster.py", *map(str, words)])
    monkeypatch.setitem(prepare_cluster.EXECUTORS, "ray", QuietExecutor)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    stage = "signatures" if deduplicate else "tokenize"
    reason = (
        rf"stage {stage}: 2 of 3 tasks failed, the first with: {inputs[1]}: "
        "no key 'text' with a text"
    )
    with pytest.raises(UserError, match=rf"{reason}; .* --text-key \(.*/task_00001\.log\)$"):
        prepare_cluster.main()
    write_jsonl(inputs[1], ["text of some words"])
    prepare_cluster.main()
    assert json.loads((tmp_path / "out/report.json").read_text())["documents"]["read"] == 19


@pytest.mark.thorough
@pytest.mark.parametrize("tasks", [1, 3, 4])
def test_a_start_that_was_killed_goes_on(
    tmp_path: Path, inputs: list[str | Path], tokenizer: str, seed: int, tasks: int
) -> None:
    """The completed tasks are not run again; a part that was removed is."""
    out, words = (
        tmp_path / "out",
        ("--input", *inputs, "--tokenizer", tokenizer, "--no-deduplicate"),
    )
    killed = tmp_path / "killed.py"
    last = random.Random(seed).randrange(tasks)
    killed.write_text(
        "import os, signal, sys\n"
        "from zero_tp.base import cli\n"
        "from zero_tp.data import datatrove\n"
        "from launch import prepare_cluster\n"
        "run = datatrove.TokenizedCorpus.run\n"
        "def killing(self, data, rank=0, world_size=1):\n"
        f"    if rank == {last}:\n"
        "        os.killpg(0, signal.SIGKILL)\n"  # with the process that datatrove starts
        "    return run(self, data, rank, world_size)\n"
        "datatrove.TokenizedCorpus.run = killing\n"
        "prepare_cluster.main()\n"
    )
    arguments = [
        *words,
        "--output",
        out,
        "--tasks",
        tasks,
        "--executor-arguments",
        '{"workers": 1}',
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, killed, *arguments]
    first = subprocess.Popen(list(map(str, command)), env=environment, start_new_session=True)
    assert first.wait() == -signal.SIGKILL
    (work,) = tmp_path.glob("out.work/*")
    assert not out.exists() and len(list((work / "parts").glob("0*"))) == last
    assert start(*arguments).returncode == 0
    times = {path.name: path.stat().st_mtime_ns for path in (work / "parts").glob("0*")}
    one = prepare(inputs, tmp_path / "one", PrepareSettings(tokenizer))
    assert content_of(out) == content_of(one.output)
    flip_byte(work / "parts/00000/blocks")
    refused = start(*arguments)
    assert refused.returncode == 2 and "00000/blocks has SHA-256" in refused.stderr
    shutil.rmtree(work / "parts/00000")
    assert start(*arguments).returncode == 0
    after = {path.name: path.stat().st_mtime_ns for path in (work / "parts").glob("0*")}
    assert {name for name in times if times[name] != after[name]} == {"00000"}


@pytest.mark.thorough
@pytest.mark.parametrize("tasks", [1, 4])
def test_the_script_removes_near_copies(
    tmp_path: Path, tokenizer: str, seed: int, tasks: int
) -> None:
    chance = random.Random(seed)
    words = [f"word{i}" for i in range(3000)]
    texts = [" ".join(chance.choices(words, k=200)) for _ in range(40)]
    copies = [f"{text} and more" for text in texts[:20]]
    mixed = chance.sample([*texts, *copies], 60)
    inputs = [write_jsonl(tmp_path / f"{i}.jsonl", mixed[i::4]) for i in range(4)]
    options = (
        "--tokenizer",
        tokenizer,
        "--output",
        tmp_path / "out",
        "--tasks",
        tasks,
        "--min-tokens",
        5,
    )
    made = start("--input", *inputs, *options)
    assert made.returncode == 0, made.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["documents"]["kept"] == 40 and report["documents"]["dropped"] == {"filtered": 20}
