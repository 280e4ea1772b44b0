"""Preparing a corpus: the split, the tokenizer, the files, and every way in which the input can be wrong."""

import gzip
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencex import segment
from transformers import AutoTokenizer, BertTokenizer

from tests.tiers import in_tiers
from zero_tp.data.documents import read_documents
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.prepare import Prepared, PrepareSettings, prepare
from zero_tp.errors import UserError
from zero_tp.files import partial_directory

ROOT = Path(__file__).parents[2]
TEXTS = [f"Document {i}: the café at number {i * i}\n\tcosts {i} €. 你好 👋 <|endoftext|> 'tis  so" for i in range(40)]


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    data = "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts))
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    return path


def run(tmp_path: Path, name: str = "out", texts: list[str] = TEXTS, **settings: object) -> Prepared:
    source = write_jsonl(tmp_path / f"{name}.jsonl", texts)
    chosen = PrepareSettings(**({"tokenizer": "bpe:300", "validation": 0.1} | settings))  # type: ignore[arg-type]
    return prepare([source], tmp_path / name, chosen)


def held_out(output: Path) -> list[str]:
    lines = (output / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_output(tmp_path: Path) -> None:
    prepared = run(tmp_path)
    output, report = prepared.output, prepared.report
    assert report == json.loads((output / "report.json").read_text())
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


def test_the_tokenizer_sees_no_validation_text(tmp_path: Path) -> None:
    base = run(tmp_path, "base")
    held = held_out(base.output)
    # Trained on the training documents alone, it is the same tokenizer.
    from zero_tp.data.tokenizer import train_bpe

    alone = train_bpe(iter([text for text in TEXTS if text not in held]), 300)
    saved = json.loads((base.output / "tokenizer" / "tokenizer.json").read_text())
    assert saved["model"] == json.loads(alone.backend_tokenizer.to_str())["model"]


def test_split_does_not_depend_on_order_and_keeps_copies_together(tmp_path: Path) -> None:
    forward, backward = run(tmp_path, "a"), run(tmp_path, "b", texts=TEXTS[::-1])
    assert sorted(held_out(forward.output)) == sorted(held_out(backward.output))
    other = run(tmp_path, "c", seed=5)
    assert sorted(held_out(other.output)) != sorted(held_out(forward.output))
    copies = run(tmp_path, "d", texts=TEXTS + TEXTS)
    out = held_out(copies.output)
    assert all(out.count(text) == 2 for text in out)
    assert len(held_out(run(tmp_path, "e", validation=7).output)) == 7


def test_kinds_of_input_agree(tmp_path: Path) -> None:
    plain = run(tmp_path, "plain", texts=[*TEXTS, "   "])
    zipped = write_jsonl(tmp_path / "z.jsonl.gz", TEXTS, key="body")
    settings = PrepareSettings("bpe:300", 0.1, text_key="body")
    assert prepare([zipped], tmp_path / "zipped", settings).report["splits"] == plain.report["splits"]
    files = []
    for i, text in enumerate(TEXTS):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_text(text, encoding="utf-8")
    texts = prepare(files, tmp_path / "texts", PrepareSettings("bpe:300", 0.1))
    assert texts.report["splits"] == plain.report["splits"]
    assert (texts.output / "train.bin").read_bytes() == (plain.output / "train.bin").read_bytes()


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
    assert (first.output / "notes.md").read_text() == "mine" and (first.output / "plots" / "lengths.png").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.jsonl"]
    (first.output / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.bin has 0 bytes instead of .*--overwrite"):
        prepare([source], first.output, PrepareSettings("bpe:300", 0.1, 9))


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
    monkeypatch.setattr("zero_tp.files.exchange", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "out.jsonl"], output, PrepareSettings("bpe:300", 0.1, 9), overwrite=True)
    assert run(tmp_path).reused, "the one before"


def test_a_directory_of_someone_elses_is_never_replaced(tmp_path: Path) -> None:
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("years of work")
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(UserError, match="not the output of this command"):
        prepare([source], other, PrepareSettings("bpe:300"), overwrite=True)
    assert (other / "chapter1.tex").exists()


def test_a_given_tokenizer(tmp_path: Path) -> None:
    first = run(tmp_path, "first")
    second = run(tmp_path, "second", tokenizer=str(first.output / "tokenizer"))
    assert second.report["splits"] == first.report["splits"]
    assert (second.output / "train.bin").read_bytes() == (first.output / "train.bin").read_bytes()
    ids = AutoTokenizer.from_pretrained(str(second.output / "tokenizer"))("the café").input_ids
    assert ids == AutoTokenizer.from_pretrained(str(first.output / "tokenizer"))("the café").input_ids
    config = first.output / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": None, "bos_token": None}))
    with pytest.raises(UserError, match="no eos token"):
        run(tmp_path, "third", tokenizer=str(first.output / "tokenizer"))


SPEECHES = [text[:20_000] for text in itertools.islice(read_documents(ROOT / "launch/corpus/sotu.jsonl.gz"), 12)]


@pytest.mark.parametrize("cased", in_tiers([False, True], [False]))
def test_a_wordpiece_vocabulary_is_that_of_tokenizers_and_the_same_each_time(tmp_path: Path, cased: bool) -> None:
    kind = "wordpiece-cased:400" if cased else "wordpiece:400"
    texts = [*SPEECHES, "Ünïcode \u4f60\u597d €"]
    first, second = (run(tmp_path, name, texts=texts, tokenizer=kind, validation=2) for name in ("a", "b"))
    assert first.report["files"] == second.report["files"], "tokenizers alone gives other ids each time"
    tokenizer = AutoTokenizer.from_pretrained(str(first.output / "tokenizer"))
    assert isinstance(tokenizer, BertTokenizer) and len(tokenizer) == 400
    assert tokenizer.convert_ids_to_tokens(list(range(5))) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert ("The" in tokenizer.get_vocab()) == cased

    # Which merge comes first of several that are as frequent is chance in tokenizers, so a few pieces may differ.
    held = held_out(first.output)
    other = BertTokenizer(do_lower_case=not cased).train_new_from_iterator(
        iter([text for text in texts if text not in held]), 400, show_progress=False
    )
    assert len(other.get_vocab().keys() ^ tokenizer.get_vocab().keys()) <= 8
    corpus = IndexedCorpus(first.output / "validation")
    for i, text in enumerate(held):
        assert corpus.document(i).tolist() == tokenizer.encode(text, add_special_tokens=False), "no token ends it"


def test_sentences_are_kept_as_sequences_and_the_tokens_stay_the_same(tmp_path: Path) -> None:
    for name, kind in (("wordpiece", "wordpiece:400"), ("bpe", "bpe:400")):
        plain = run(tmp_path, f"{name}-plain", texts=SPEECHES, tokenizer=kind).output
        split = run(tmp_path, f"{name}-split", texts=SPEECHES, tokenizer=kind, sentences="en").output
        assert (plain / "train.bin").read_bytes() == (split / "train.bin").read_bytes()
        tokenizer = AutoTokenizer.from_pretrained(str(split / "tokenizer"))
        held = held_out(split)
        corpus, number = IndexedCorpus(split / "train"), 0
        assert len(corpus) == len(SPEECHES) - len(held)
        for i, text in enumerate(text for text in SPEECHES if text not in held):
            expected = [sentence.strip() for sentence in segment("en", text) if sentence.strip()]
            begins = corpus.sequences(*corpus.extent(i))
            assert begins[0] == 0
            found = [part.tolist() for part in np.split(corpus.document(i), begins[1:])]
            number += len(found)
            if name == "wordpiece":
                assert found == [tokenizer.encode(sentence, add_special_tokens=False) for sentence in expected]
            else:
                told = [str(tokenizer.decode(sentence, skip_special_tokens=True)).strip() for sentence in found]
                assert told == expected and found[-1][-1] == tokenizer.eos_token_id
        assert number > 20 * len(corpus)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not valid JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"body": "b", "id": 1}\n',
            r"a\.jsonl:3: no key 'text'.*'body', 'id'.*--text-key",
        ),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: 'text' must be a string, found int"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: a JSON object is needed, found list"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: unpaired surrogate"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not UTF-8 at byte 10"),
        ("a.jsonl", b'{"text": "  "}\n', r"no text in .*a\.jsonl \(1 dropped, the first: .*a\.jsonl:1: an empty doc"),
        ("a.jsonl", b"", "no text in"),
        ("a.jsonl", b'{"text": "only one"}\n', "hold 1 document"),
        ("a.jsonl", b'{"text": "twin"}\n{"text": "twin"}\n', "copies"),
        ("a.txt", b"one file, one document", "hold 1 document"),
        ("a.jsonl.gz", b"plain", "not a whole gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9], "not a whole gzip file"),
        ("a.csv", b"text\n", "no text in"),
        ("a.doc", b"text\n", "unknown kind of file"),
    ],
)
def test_bad_input(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare([path], tmp_path / "out", PrepareSettings("bpe:300"), strict="empty" not in message)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "bpe:256"}, "at least 257"),
        ({"tokenizer": "bpe:many"}, "neither a directory nor bpe:SIZE"),
        ({"tokenizer": "wordpiece"}, "neither a directory nor bpe:SIZE"),
        ({"tokenizer": "wordpiece:5"}, r"at least 6 \(special tokens and one other\)"),
        ({"tokenizer": "wordpiece:40"}, r"tokenizer wordpiece:40: the corpus' characters alone are \d+ tokens"),
        ({"sentences": "English"}, "language 'English': its ISO 639 code"),
        ({"tokenizer": str(ROOT / "zero_tp")}, "holds neither tokenizer.json"),
        ({"validation": 0}, "validation 0: a fraction"),
        ({"validation": 1.5}, "validation 1.5"),
        ({"validation": 40}, "leaves none to train on"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, **settings)
    assert not (tmp_path / "out").exists()


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launch/prepare_data.py", *map(str, arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )


def test_the_command(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    arguments = ["--input", source, "--tokenizer", "bpe:300", "--output", tmp_path / "out"]
    first = command(*arguments)
    assert (first.returncode, first.stderr) == (0, "")
    assert "39 documents" in first.stdout and "1 documents" in first.stdout
    wrong = command(*arguments, "--seed", "1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1
    unknown = command(*arguments, "--sede", "1")
    assert unknown.returncode == 2
    assert "--sede" in unknown.stderr and unknown.stderr.count("\n") == 1


def test_the_shipped_corpus() -> None:
    texts = list(read_documents(ROOT / "launch/corpus/sotu.jsonl.gz"))
    assert (len(texts), sum(map(len, texts))) == (233, 10_760_041)


def test_a_changed_byte_is_no_output_that_is_up_to_date(tmp_path: Path) -> None:
    first = run(tmp_path)
    for name in ("train.bin", "validation.idx", "validation.jsonl", "tokenizer/tokenizer.json"):
        path = first.output / name
        content = path.read_bytes()
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(UserError, match=rf"{name} has SHA-256 \w+… instead of \w+…: make .* --overwrite"):
            run(tmp_path)
        path.write_bytes(content)
    assert run(tmp_path).reused, "restored, with other times"
    report = json.loads((first.output / "report.json").read_text())
    report["files"] = {name: described["bytes"] for name, described in report["files"].items()}
    (first.output / "report.json").write_text(json.dumps(report))  # as an earlier version wrote it
    assert run(tmp_path).compared == "sizes"


@pytest.mark.parametrize(
    "damage",
    [
        {"files": {}},
        {"files": []},
        {"files": {"../out.jsonl": 5}},
        {"files": {"train.bin": -1}},
        {"files": {"train.bin": {"bytes": 1}}},
        {"identity": [1]},
        {"splits": {"train": None}},
        {"unigram": {"train_entropy": "much"}},
        {"vocabulary_size": None},
    ],
)
def test_an_odd_report_is_one_line(tmp_path: Path, damage: dict[str, Any]) -> None:
    first = run(tmp_path)
    report = json.loads((first.output / "report.json").read_text())
    (first.output / "report.json").write_text(json.dumps(report | damage))
    with pytest.raises(UserError, match=r"report\.json|out\.jsonl"):
        run(tmp_path)
    source, settings = tmp_path / "out.jsonl", PrepareSettings("bpe:300", 0.1)
    assert prepare([source], first.output, settings, overwrite=True).report["files"] == report["files"]


def test_what_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    for path, problem in (
        (tmp_path / "a.jsonl", "is not a regular file"),
        (Path("/dev/null"), "is not a regular file"),
        (tmp_path / ("a" * 300 + ".txt"), "File name too long"),
        (Path("a\0.txt"), "embedded null byte"),
    ):
        with pytest.raises(UserError, match=problem):
            prepare([path], tmp_path / "out", PrepareSettings("bpe:300"))
    source = write_jsonl(tmp_path / "b.jsonl", TEXTS)
    with pytest.raises(UserError, match="File name too long"):
        prepare([source], tmp_path / ("o" * 300), PrepareSettings("bpe:300"))
    for tokenizer in ("t" * 300, "bpe:" + "9" * 5000):
        with pytest.raises(UserError, match=r"^tokenizer "):
            prepare([source], tmp_path / "out", PrepareSettings(tokenizer))
    assert not prepare([source], tmp_path / ("o" * 250), PrepareSettings("bpe:300")).reused
    assert {path.name[:3] for path in tmp_path.iterdir()} == {"a.j", "b.j", "ooo"}


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
        *("report.json", "tokenizer", "train.bin", "train.idx", "train.content.json"),
        *("validation.bin", "validation.idx", "validation.content.json", "validation.jsonl"),
    }
    assert not left.exists()
    left.mkdir()
    (left / "old").touch()
    assert run(tmp_path).reused and not left.exists()
    left.symlink_to(tmp_path / "out")
    with pytest.raises(UserError, match="can't be written"):
        prepare([tmp_path / "out.jsonl"], tmp_path / "out", PrepareSettings("bpe:300", 0.1, 7), overwrite=True)
    assert run(tmp_path).reused, "nothing is cleared through a link"


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"{i} " + "word " * 50 for i in range(200_000)])
    arguments = ["--input", source, "--tokenizer", "bpe:300", "--output", tmp_path / "out"]
    process = subprocess.Popen([sys.executable, "launch/prepare_data.py", *map(str, arguments)], cwd=ROOT)
    partial = tmp_path / ".out.partial"
    while not partial.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == 143
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
