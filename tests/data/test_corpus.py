"""Preparing a corpus: its files and figures, the split, resuming after a kill, replacing an output."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.corpora import TEXTS, held_out, output_of, run, texts_of, trained_tokenizer, write_jsonl
from tests.support.launched import ROOT, script
from tests.tiers import in_tiers
from zero_tp import files
from zero_tp.data import PrepareSettings, documents, prepare, spool
from zero_tp.data.corpus import Preparation
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.spool import ProcessedBlock, Spool
from zero_tp.errors import UserError
from zero_tp.files import hidden_sibling, partial_directory


def test_output(tmp_path: Path) -> None:
    prepared = run(tmp_path)
    output, report = prepared.output, prepared.report
    assert report == json.loads((output / "report.json").read_text())
    assert report["versions"].keys() >= {"tokenizers", "transformers", "ftfy", "rensa", "sentencex"}
    tokenizer = AutoTokenizer.from_pretrained(str(output / "tokenizer"))
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert len(tokenizer) == report["vocabulary_size"] == 300

    validation = held_out(output)
    train = [text for text in TEXTS if text not in validation]
    assert (len(train), len(validation)) == (36, 4)
    for split, texts in (("train", train), ("validation", validation)):
        corpus = IndexedCorpus(output / split)
        assert len(corpus) == report["splits"][split]["documents"] == len(texts)
        assert corpus.tokens == report["splits"][split]["tokens"]
        assert report["splits"][split]["characters"] == sum(map(len, texts))
        assert report["splits"][split]["bytes"] == sum(len(text.encode()) for text in texts)
        for i, text in enumerate(texts):
            ids = corpus.document(i)
            assert ids[-1] == tokenizer.eos_token_id
            # The text spells the special token, which stays text: one eos a document.
            assert (ids == tokenizer.eos_token_id).sum() == 1
            assert tokenizer.decode(ids[:-1]) == text
            assert tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) == ids[:-1].tolist()
    # Nothing is left beside the output.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.jsonl"]


def test_unigram_figures(tmp_path: Path) -> None:
    prepared = run(tmp_path)
    size = prepared.report["vocabulary_size"]
    train, validation = (
        np.bincount(
            IndexedCorpus(prepared.output / split).read(0, prepared.report["splits"][split]["tokens"]), None, size
        )
        for split in ("train", "validation")
    )
    p = train / train.sum()
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    q = (train + 1) / (train + 1).sum()
    cross = -sum(n * np.log(x) for n, x in zip(validation, q, strict=True)) / validation.sum()
    assert prepared.report["unigram"]["train_entropy"] == pytest.approx(entropy, rel=1e-12)
    assert prepared.report["unigram"]["validation_cross_entropy"] == pytest.approx(cross, rel=1e-12)


def test_split_does_not_depend_on_order_and_keeps_copies_together(tmp_path: Path) -> None:
    forward, backward = run(tmp_path, "a"), run(tmp_path, "b", texts=TEXTS[::-1])
    assert sorted(held_out(forward.output)) == sorted(held_out(backward.output))
    other = run(tmp_path, "c", seed=5)
    assert sorted(held_out(other.output)) != sorted(held_out(forward.output))
    copies = run(tmp_path, "d", texts=TEXTS + TEXTS)
    out = held_out(copies.output)
    assert all(out.count(text) == 2 for text in out)
    assert len(held_out(run(tmp_path, "e", validation=7).output)) == 7


def test_reuse_overwrite_and_refusal(tmp_path: Path) -> None:
    first = run(tmp_path)
    stamp = (first.output / "train.bin").stat().st_mtime_ns
    again = run(tmp_path)
    assert again.reused and not first.reused
    assert again.report == first.report
    assert (first.output / "train.bin").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match=r"out was made with another seed: choose another --output, .*--overwrite"):
        run(tmp_path, seed=9)
    source = tmp_path / "out.jsonl"
    (first.output / "notes.md").write_text("mine")
    (first.output / "plots").mkdir()
    (first.output / "plots" / "lengths.png").touch()
    replaced = prepare([source], first.output, PrepareSettings("bpe:300", 0.1, 9), overwrite=True)
    assert not replaced.reused
    deduplicated = PrepareSettings("bpe:300", 0.1, 9, deduplicate="exact")
    prepare([source], first.output, deduplicated, overwrite=True)
    assert (first.output / "removed.jsonl").exists()
    prepare([source], first.output, PrepareSettings("bpe:300", 0.1, 9), overwrite=True)
    assert not (first.output / "removed.jsonl").exists(), "a file of the old output"
    assert (first.output / "notes.md").read_text() == "mine" and (first.output / "plots" / "lengths.png").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.jsonl"]
    (first.output / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.bin has 0 bytes instead of .*--overwrite"):
        prepare([source], first.output, PrepareSettings("bpe:300", 0.1, 9))


def test_the_command(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    arguments = ["--input", "a.jsonl", "--tokenizer", "bpe:300", "--output", "out"]
    first = script("launch/prepare_data.py", tmp_path, *arguments)
    assert (first.returncode, first.stderr) == (0, "")
    assert "39 documents" in first.stdout and "1 documents" in first.stdout
    wrong = script("launch/prepare_data.py", tmp_path, *arguments, "--seed", "1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1


def test_documents_in_are_those_kept_and_those_dropped(tmp_path: Path) -> None:
    good = [f"document {i} of the good ones" for i in range(20)]
    lines = [json.dumps({"text": text}) for text in good]
    lines[3:3] = ['{"text": ', '{"text": " "}', '{"txt": "x"}', '"text"', "", '{"text": "\\ud800"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode())[:-20])
    inputs, given = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"], PrepareSettings("bpe:300", 0.1)
    report = prepare(inputs, tmp_path / "out", given).report["documents"]
    cut = report["dropped"].pop("unreadable")
    assert cut == 1 and report["read"] == report["kept"] + sum(report["dropped"].values()) + cut
    assert report["dropped"]["empty"] in (1, 2) and 20 <= report["kept"] < 40
    assert report["problems"][0] == {
        "where": f"{tmp_path}/a.jsonl:4",
        "reason": "malformed",
        "detail": "not valid JSON: Expecting value at line 1 column 10",
    }
    with pytest.raises(UserError, match=r"a\.jsonl:4: not valid JSON"):
        prepare(inputs, tmp_path / "strict", given, strict=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.gz", "out"]


@pytest.mark.parametrize("kind", in_tiers(["jsonl", "txt"], ["txt"]))
def test_standard_input(tmp_path: Path, kind: str) -> None:
    texts, name = [f"document {i} of the good ones" for i in range(20)], f"a.{kind}"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "a.txt").write_text("\n".join(texts))
    prepare([tmp_path / name], tmp_path / "file", PrepareSettings("bpe:300", documents="line"))
    words = ["--input", "-", "--stdin-kind", kind, "--documents", "line", "--output", str(tmp_path / "out")]
    with open(tmp_path / name, "rb") as given:
        command = [sys.executable, "launch/prepare_data.py", "--tokenizer", "bpe:300", "--processes", "1", *words]
        assert subprocess.run(command, cwd=ROOT, stdin=given).returncode == 0
    for file in ("train.bin", "train.idx", "validation.bin", "validation.jsonl", "tokenizer/tokenizer.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "file" / file).read_bytes(), file
    with pytest.raises(UserError, match=r"made with another inputs: .* --overwrite"):
        prepare(["-"], tmp_path / "out", PrepareSettings("bpe:300"))


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return trained_tokenizer(tmp_path)


STARTED = """
import os, signal, sys
from pathlib import Path
from zero_tp.data import PrepareSettings, documents, prepare, spool
spool.COMMIT_SECONDS = 0.0
documents._BLOCK_RECORDS = 50
append = spool.Spool.append
def killed(self, block):
    if len(self.blocks) == int(last):
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, block)
if __name__ == "__main__":
    source, output, tokenizer, processes, last = sys.argv[1:]
    if last != "none":
        spool.Spool.append = killed
    settings = PrepareSettings(tokenizer, 0.1, deduplicate="near")
    print(prepare([source], Path(output), settings, processes=int(processes)).resumed)
"""


class Starts:
    """Starts of a preparation as processes of their own, which may be killed."""

    def __init__(self, directory: Path, texts: list[str], tokenizer: str) -> None:
        self.directory, self.tokenizer = directory, tokenizer
        self.source = write_jsonl(directory / "a.jsonl", texts)
        (directory / "started.py").write_text(STARTED)

    def __call__(self, output: str, processes: int, last: object = "none") -> subprocess.Popen[str]:
        """Start one; it kills itself before the block `last`."""
        words = [self.directory / "started.py", self.source, self.directory / output, self.tokenizer, processes, last]
        command, environment = [sys.executable, *map(str, words)], {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def left(self) -> set[str]:
        return {path.name for path in self.directory.iterdir() if path.name.startswith((".out", "out"))}


def test_killed_it_goes_on(tmp_path: Path, seed: int) -> None:
    """A SIGKILL while it reads."""
    chance = random.Random(seed)
    start = Starts(tmp_path, texts_of(chance, 500), "bpe:300")
    last = chance.randrange(1, 11)
    killed = start("out", 1, last)
    assert killed.communicate()[0] == "" and killed.returncode == -signal.SIGKILL
    assert start.left() == {".out.partial", ".out.progress"}
    again = start("out", 1)
    assert again.communicate()[0] == f"{50 * last}\n" and again.returncode == 0
    assert start.left() == {"out"}
    whole = prepare([start.source], tmp_path / "whole", PrepareSettings("bpe:300", 0.1, deduplicate="near"))
    assert output_of(tmp_path / "out") == output_of(whole.output)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["bpe:300", "given"])
def test_killed_anywhere_it_goes_on(tmp_path: Path, tokenizer: str, seed: int, kind: str) -> None:
    """20 SIGKILLs at random moments: there is nothing, or progress that the next start uses; the end is the same."""
    chance = random.Random(seed)
    start = Starts(tmp_path, texts_of(chance, 4000), tokenizer if kind == "given" else kind)
    begun = time.monotonic()
    whole = start("whole", 1)
    assert whole.communicate()[0] == "0\n" and whole.returncode == 0
    longest = time.monotonic() - begun
    killed, output, resumed = 0, tmp_path / "out", 0
    while killed < 20:
        process = start("out", chance.choice((1, 2)))
        time.sleep(chance.random() * longest)
        process.send_signal(signal.SIGKILL)
        output_line = process.communicate()[0]
        killed += process.returncode == -signal.SIGKILL
        resumed += output_line not in ("", "0\n")
        if output.exists():
            assert output_of(output) == output_of(tmp_path / "whole")
            shutil.rmtree(output)
    last = start("out", 2)
    resumed += last.communicate()[0] != "0\n"
    assert last.returncode == 0 and resumed, "no start went on from another"
    assert output_of(output) == output_of(tmp_path / "whole")
    assert start.left() == {"out"}


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str) -> None:
    """Also after a full disk; but never where an input has changed."""
    monkeypatch.setattr(spool, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(documents, "_BLOCK_RECORDS", 10)
    texts = texts_of(random.Random(1), 100)
    inputs = [write_jsonl(tmp_path / f"{i}.jsonl", texts[i::2]) for i in range(2)]
    settings, out = PrepareSettings(tokenizer, 0.1), tmp_path / "out"
    append = Spool.append

    def full(self: Spool, block: ProcessedBlock) -> None:
        if (block.source, block.number) == (1, 3):
            self._file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, block)

    def interrupted() -> None:
        with monkeypatch.context() as patch, pytest.raises(UserError, match=r"No space left .*; the progress is kept"):
            patch.setattr(Spool, "append", full)
            prepare(inputs, out, settings)
        assert not out.exists() and hidden_sibling(out, "progress").is_dir()

    interrupted()
    prepared = prepare(inputs, out, settings)
    assert prepared.resumed == 86 and not hidden_sibling(out, "progress").exists()
    whole = prepare(inputs, tmp_path / "whole", settings)
    assert whole.resumed == 0 and output_of(prepared.output) == output_of(whole.output)
    out = tmp_path / "changed"
    interrupted()
    os.utime(inputs[0], (1, 1))
    assert prepare(inputs, out, settings).resumed == 0


@pytest.mark.parametrize("method", ["open", "append"])
def test_no_progress_is_promised_that_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, method: str
) -> None:
    """Before the first block; or after some of standard input, which can't be read again."""
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def full(self: Spool, *_: object) -> None:
        if method == "append":
            self.commit()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Spool, method, full)
    with source.open() as stdin, pytest.raises(UserError, match=r"out: can't be written: No space left on device$"):
        monkeypatch.setattr(sys, "stdin", stdin)
        prepare([source if method == "open" else "-"], tmp_path / "out", PrepareSettings(tokenizer), processes=1)
    assert not list(tmp_path.glob(".*"))


def test_what_was_read_with_other_settings_is_not_lost_without_a_word(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "out.jsonl", TEXTS), tmp_path / "out"
    settings, other = PrepareSettings("bpe:300", 0.1), PrepareSettings("bpe:300", 0.1, seed=9)

    def interrupted(self: Preparation, directory: Path) -> None:
        self.spool.commit()
        raise KeyboardInterrupt

    def kept() -> int:
        return Spool(hidden_sibling(out, "progress")).counts.read

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Preparation, "select", interrupted)
        prepare([source], out, settings)
    with pytest.raises(UserError, match=r"keeps 40 documents .* other settings \(seed\): give the same .* --overwrite"):
        prepare([source], out, other)
    assert kept() == 40 and not prepare([source], tmp_path / "of others", other).resumed
    os.rename(tmp_path / "of others", out)
    assert prepare([source], out, other).reused and kept() == 40
    assert prepare([source], out, settings, overwrite=True).resumed == 40 and not kept()


def test_an_output_is_on_the_disk_and_takes_its_place_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = run(tmp_path).output
    before = {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
    flushed, fsync = set[int](), os.fsync

    def noting(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def killed(new: Path, old: Path) -> None:
        assert {path.stat().st_ino for path in (new, *new.rglob("*"))} <= flushed
        assert {name: (old / name).read_bytes() for name in before} == before
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr("zero_tp.files.replace_directory", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "out.jsonl"], output, PrepareSettings("bpe:300", 0.1, 9), overwrite=True)
    assert run(tmp_path).reused, "the one before"


def test_what_a_killed_preparation_leaves_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".out.partial"
    (left / "tokenizer").mkdir(parents=True)
    (left / "tokenizer" / "a.json").touch()
    (left / "train.bin").write_bytes(b"half")
    with partial_directory(tmp_path / "out"), pytest.raises(UserError, match="another process writes it now"):
        run(tmp_path)
    assert not left.exists()
    left.mkdir()
    (left / "old").touch()
    files = {path.name for path in run(tmp_path).output.iterdir()}
    assert files == {
        *("report.json", "tokenizer", "train.bin", "train.content.json", "train.idx"),
        *("validation.bin", "validation.content.json", "validation.idx", "validation.jsonl"),
    }
    assert not left.exists()
    left.mkdir()
    (left / "old").touch()
    assert run(tmp_path).reused and not left.exists()
    left.symlink_to(tmp_path / "out")
    with pytest.raises(UserError, match="can't be written"):
        prepare([tmp_path / "out.jsonl"], tmp_path / "out", PrepareSettings("bpe:300", 0.1, 7), overwrite=True)
    assert run(tmp_path).reused, "nothing is cleared through a link"


def test_sigterm_leaves_no_part_of_an_output(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"{i} " + "word " * 50 for i in range(200_000)])
    arguments = ["--input", source, "--tokenizer", "bpe:300", "--output", tmp_path / "out"]
    process = subprocess.Popen([sys.executable, "launch/prepare_data.py", *map(str, arguments)], cwd=ROOT)
    partial = tmp_path / ".out.partial"
    while not partial.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == 143
    left = {path.name for path in tmp_path.iterdir()} - {".out.progress"}  # which is there after some seconds
    assert left == {"a.jsonl"}


@pytest.mark.parametrize("when", ["made", "locked"])
def test_a_signal_before_the_first_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    take, locked = files.lock, []

    def lock(file: int, kind: int) -> bool:
        locked.append(file)
        if when == "locked" or len(locked) > 1:
            take(file, kind)
        if len(locked) == 1:
            raise SystemExit(143)
        return True

    monkeypatch.setattr(files, "lock", lock)
    with pytest.raises(SystemExit), partial_directory(tmp_path / "out"):
        pytest.fail("the block is not entered")
    assert len(locked) == 2 and not list(tmp_path.iterdir())


def test_links_in_an_output_stay_and_an_output_may_be_one(tmp_path: Path) -> None:
    output, target = run(tmp_path).output, tmp_path / "target"
    sources, other = [tmp_path / "out.jsonl"], PrepareSettings("bpe:300", 0.1, 9)
    output.rename(target)
    output.symlink_to(target.name)
    links = {"link": "report.json", "dangling": "nowhere", "folder": str(tmp_path)}
    for name, destination in links.items():
        (target / name).symlink_to(destination)
    socket.socket(socket.AF_UNIX).bind(str(target / "socket"))
    prepare(sources, output, other, overwrite=True)
    assert {path.name: os.readlink(path) for path in target.iterdir() if path.is_symlink()} == links
    assert output.is_symlink() and (target / "socket").is_socket() and prepare(sources, target, other).reused
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    output.unlink()
    output.symlink_to(output.name)
    with pytest.raises(UserError, match=r"out: can't be written: Not a directory$"):
        prepare(sources, output, other, overwrite=True)
