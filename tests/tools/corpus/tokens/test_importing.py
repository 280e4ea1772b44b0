"""Importing token files: splits, duplicates, restarts, processes, and a run on the corpus."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.corpora import output_of, texts_of, trained_tokenizer, write_jsonl
from tests.support.launched import ROOT, zero_tp
from tests.support.token_files import (
    corpus_sha256,
    import_tokens,
    join_after,
    write_flat,
    write_rows,
)
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.data import PrepareSettings, prepare
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.tokenizer import corpus_fingerprint
from zero_tp.tools.corpus import spool
from zero_tp.tools.corpus.spool import ProcessedBlock, Spool
from zero_tp.tools.corpus.tokens import files
from zero_tp.tools.corpus.tokens.importing import kth_smallest

RAW: dict[str, Any] = {
    "format": "raw",
    "token_type": "uint16",
    "eos_position": "after",
    "eos_id": 256,
}


def draw_stream(chance: random.Random, count: int) -> list[int]:
    documents = [
        [chance.randrange(256) for _ in range(chance.randrange(1, 60))] for _ in range(count)
    ]
    return join_after(documents, 256)


@pytest.fixture
def stream(seed: int) -> list[int]:
    return draw_stream(random.Random(seed), 400)


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path, stream: list[int]) -> None:
    first, second = (
        write_flat(tmp_path / f"{number}.bin", part)
        for number, part in enumerate((stream[:5000], stream[5000:]))
    )
    one = import_tokens([first, second], tmp_path / "one", 1, deduplicate="exact", **RAW)
    two = import_tokens([first, second], tmp_path / "two", 2, deduplicate="exact", **RAW)
    assert output_of(one.output) == output_of(two.output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.bin", "1.bin", "one", "two"]


@pytest.mark.parametrize("kind", ["flat", "rows", "packed rows"])
def test_interrupted_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, kind: str
) -> None:
    monkeypatch.setattr(spool, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(files, "WINDOW", 500)
    chance = random.Random(seed)
    streams = [draw_stream(chance, 100)[:-3] for _ in range(3)]
    settings = {**RAW, "deduplicate": "exact"}
    inputs = [write_flat(tmp_path / f"{i}.bin", part) for i, part in enumerate(streams)]
    if kind != "flat":
        monkeypatch.setattr("zero_tp.tools.corpus.tokens.rows._ROWS", 10)
        settings |= {"format": "ids", "token_type": None}
        settings |= {"eos_position": None} if kind == "rows" else {}
        rows = [[part[i : i + 50] for i in range(0, len(part), 50)] for part in streams]
        if kind == "rows":
            rows = [[[token for token in row if token != 256] for row in part] for part in rows]
        inputs = [write_rows(tmp_path / f"{i}.parquet", part) for i, part in enumerate(rows)]
    whole = import_tokens(inputs, tmp_path / "whole", **settings)
    last = chance.randrange(1, 12)
    append = Spool.append

    def stop(self: Spool, block: ProcessedBlock) -> None:
        if len(self.blocks) == last:
            raise KeyboardInterrupt
        append(self, block)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Spool, "append", stop)
        import_tokens(inputs, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.progress").is_dir()
    resumed = import_tokens(inputs, tmp_path / "out", **settings)
    assert resumed.resumed > 0 and output_of(resumed.output) == output_of(whole.output)
    assert import_tokens(inputs, tmp_path / "out", **settings).reused
    with pytest.raises(UserError, match=r"made with another seed: choose another --output"):
        import_tokens(inputs, tmp_path / "out", seed=3, **settings)


def test_a_killed_process_goes_on(tmp_path: Path, stream: list[int]) -> None:
    """SIGKILL before the third block."""
    source = write_flat(tmp_path / "a.bin", stream)
    program = f"""
import os, signal, sys
from pathlib import Path
from typing import Any
from tests.support.token_files import import_tokens
from zero_tp.tools.corpus import spool
from zero_tp.tools.corpus.tokens import files
spool.COMMIT_SECONDS = 0.0
files.WINDOW = 500
append = spool.Spool.append
def killed(self, block):
    if len(self.blocks) == 2 and sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, block)
spool.Spool.append = killed
inputs, output = [Path({str(source)!r})], Path({str(tmp_path / "out")!r})
print(import_tokens(inputs, output, **{RAW!r}).resumed)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    codes = []
    for word in ("kill", "go on"):
        command = [sys.executable, "-c", program, word]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        codes.append(done.returncode)
    assert codes == [-9, 0], done.stderr
    assert int(done.stdout) > 0
    import_tokens([source], tmp_path / "whole", **RAW)
    assert corpus_sha256(tmp_path / "out") == corpus_sha256(tmp_path / "whole")


def test_a_changed_file_is_not_mixed(tmp_path: Path, stream: list[int]) -> None:
    """Tokens are read twice: a change in between would give documents that are in no file."""
    source = write_flat(tmp_path / "a.bin", stream)
    append = Spool.append

    def change(self: Spool, block: ProcessedBlock) -> None:
        if block.sha256 is not None:
            write_flat(source, stream[:-100])
        append(self, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spool, "append", change)
        with pytest.raises(UserError, match=r"a\.bin: the file has changed since the start"):
            import_tokens([source], tmp_path / "out", **RAW)
    assert not (tmp_path / "out").exists()


def test_copies_are_dropped_and_named(tmp_path: Path) -> None:
    """By tokens, whatever their width in the file; the first one stays."""
    first = write_flat(tmp_path / "a.bin", join_after([[1, 2], [3], [1, 2]], 256))
    second = write_flat(tmp_path / "b.bin", join_after([[3, 4], [3]], 256))
    report = import_tokens(
        [first, second], tmp_path / "out", deduplicate="exact", **RAW | {"validation": 1}
    ).report
    assert report["documents"]["dropped"] == {"duplicate": 2} and report["documents"]["kept"] == 3
    lines = (tmp_path / "out/removed.jsonl").read_text().splitlines()
    assert [(json.loads(line)["removed"], json.loads(line)["copy_of"]) for line in lines] == [
        (f"{first}:6", f"{first}:1"),
        (f"{second}:4", f"{first}:4"),
    ]
    with pytest.raises(UserError, match=r"all documents outside .* are copies"):
        import_tokens([write_flat(tmp_path / "c.bin", [1, 256, 1, 256])], tmp_path / "c", **RAW)


def test_the_split_depends_on_documents_and_seed(tmp_path: Path, stream: list[int]) -> None:
    documents = [row.split() for row in " ".join(map(str, stream)).split("256")[:-1]]
    turned = join_after([list(map(int, row)) for row in documents[::-1]], 256)

    def held_out(tokens: list[int], **settings: Any) -> list[list[int]]:
        name = f"{len(list(tmp_path.iterdir()))}"
        path = write_flat(tmp_path / f"{name}.bin", tokens)
        output = import_tokens([path], tmp_path / name, **RAW | settings).output
        corpus = IndexedCorpus(output / "validation")
        return sorted(corpus.document(i).tolist() for i in range(len(corpus)))

    first = held_out(stream)
    assert held_out(turned) == first and held_out(stream, seed=5) != first
    assert len(held_out(stream, validation=7)) == 7 and len(held_out(stream, min_tokens=30)) < 40


def test_the_kth_smallest_of_many(seed: int) -> None:
    drawn = np.random.default_rng(seed).integers(0, 2**64, 500, np.uint64)
    drawn[::3] >>= np.uint64(40)
    drawn[::7] = drawn[0]
    parts = np.array_split(drawn, 9)
    for k in (1, 2, 100, 499, 500):
        assert kth_smallest(lambda: parts, k) == np.sort(drawn)[k - 1]


@pytest.mark.slow
def test_a_run_equals_that_on_prepared_text(tmp_path: Path, seed: int) -> None:
    """The same documents, once as text and once as tokens, give the same files and fingerprint."""
    tokenizer = trained_tokenizer(tmp_path)
    texts = texts_of(random.Random(seed), 8)[:8]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    settings = PrepareSettings(tokenizer, 1)
    text = prepare([source], tmp_path / "text", settings)
    splits = [IndexedCorpus(text.output / name) for name in ("train", "validation")]
    documents = [splits[0].document(i).tolist() for i in range(7)]
    documents.insert(0, splits[1].document(0).tolist())
    stream = [token for document in documents for token in document]
    path = write_flat(tmp_path / "a.bin", stream)
    raw = {**RAW, "eos_id": None, "validation": 1, "tokenizer": tokenizer}
    # Both hold out one document of eight, by hashes of other bytes: some seed agrees.
    for number in range(200):
        done = import_tokens([path], tmp_path / f"out{number}", **raw, seed=number)
        if corpus_sha256(done.output) == corpus_sha256(text.output):
            break
    else:
        pytest.fail("no seed of 200 holds out the same document")
    for key in ("vocabulary_size", "end_of_document", "tokenizer", "unigram"):
        assert done.report[key] == text.report[key], key
    assert corpus_fingerprint(f"{done.output}/train") == corpus_fingerprint(f"{text.output}/train")
    for name in ("train", "validation"):
        imported, prepared = (IndexedCorpus(path / name) for path in (done.output, text.output))
        assert imported.identity() == prepared.identity()
        assert imported.content == prepared.content


@THOROUGH
def test_the_command(tmp_path: Path) -> None:
    tokenizer = trained_tokenizer(tmp_path)
    write_flat(tmp_path / "a.bin", join_after([[50, 51], [52], [53, 54, 55]], 0))
    words = ["--format", "raw", "--token-type", "uint16", "--eos-position", "after"]
    shown = zero_tp(tmp_path, "prepare", "--show", "a.bin", *words, "--tokenizer", tokenizer)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--- a.bin:1: 2 tokens" in shown.stdout and "--- a.bin:6: 3 tokens" in shown.stdout
    done = zero_tp(
        tmp_path, "prepare", "--input", "a.bin", *words, "--eos-id", "0", "--output", "o"
    )
    assert (done.returncode, done.stderr) == (0, "") and "2 documents, 5 tokens" in done.stdout
    shown = zero_tp(tmp_path, "prepare", "--show", "o", "--tokenizer", tokenizer)
    assert shown.returncode == 0 and "--- train, document 1:" in shown.stdout
