"""Refused inputs, settings and outputs, each in one line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.corpora import TEXTS, run, write_jsonl
from tests.support.launched import ROOT
from zero_tp.base.errors import UserError
from zero_tp.data import PrepareSettings, prepare


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not valid JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"body": "b", "id": 1}\n',
            r"a\.jsonl:3: no key 'text'.*'body', 'id'.*--text-key",
        ),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: 'text' must be a string, found an integer"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: a JSON object is needed, found an array"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: unpaired surrogate"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not UTF-8 at byte 10"),
        (
            "a.jsonl",
            b'{"text": "  "}\n',
            r"no text in .*a\.jsonl \(1 dropped, the first: .*a\.jsonl:1: an empty doc",
        ),
        ("a.jsonl", b"", "no text in"),
        ("a.jsonl", b'{"text": "only one"}\n', "hold 1 document"),
        ("a.jsonl", b'{"text": "twin"}\n{"text": "twin"}\n', "all documents outside .* are copies"),
        ("a.txt", b"one file, one document", "hold 1 document"),
        ("a.jsonl.gz", b"plain", "not a whole .gz file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9], "not a whole .gz file"),
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
        ({"tokenizer": "bpe:256"}, "at least 257 and"),
        ({"tokenizer": "bpe:many"}, "neither a directory nor bpe:SIZE"),
        ({"tokenizer": "wordpiece"}, "neither a directory nor bpe:SIZE"),
        ({"tokenizer": "wordpiece:5"}, "at least 6 and"),
        (
            {"tokenizer": "wordpiece:40"},
            r"tokenizer wordpiece:40: the corpus' characters alone are \d+ tokens",
        ),
        ({"sentences": "English"}, "sentences 'English': the ISO 639 code"),
        ({"tokenizer": str(ROOT / "zero_tp")}, "holds neither tokenizer.json"),
        ({"validation": 0}, "validation 0: a fraction"),
        ({"validation": 1.5}, "validation 1.5"),
        ({"validation": 40}, "leaves none to train on"),
        ({"seed": -1}, "seed -1"),
        ({"min_tokens": 5}, "counts the tokens of an existing tokenizer: prepare without it first"),
    ],
)
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, **settings)
    assert not (tmp_path / "out").exists()


def test_a_directory_of_someone_elses_is_never_replaced(tmp_path: Path) -> None:
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("years of work")
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(UserError, match="not the output of this command"):
        prepare([source], other, PrepareSettings("bpe:300"), overwrite=True)
    assert (other / "chapter1.tex").exists()


def test_a_changed_byte_is_no_output_that_is_up_to_date(tmp_path: Path) -> None:
    first = run(tmp_path)
    for name in ("train.bin", "validation.idx", "validation.jsonl", "tokenizer/tokenizer.json"):
        path = first.output / name
        content = path.read_bytes()
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(
            UserError, match=rf"{name} has SHA-256 \w+… instead of \w+…: prepare .* --overwrite"
        ):
            run(tmp_path)
        path.write_bytes(content)
    assert run(tmp_path).reused, "restored, with other times"


@pytest.mark.parametrize(
    "damage",
    [
        {"files": []},
        {"files": {}},
        {"files": {"train.bin": {"bytes": 1}}},
        {"identity": [1]},
        {"splits": {"train": None}},
    ],
)
def test_an_odd_report_is_one_line(tmp_path: Path, damage: dict[str, Any]) -> None:
    first = run(tmp_path)
    report = json.loads((first.output / "report.json").read_text())
    (first.output / "report.json").write_text(json.dumps(report | damage))
    with pytest.raises(UserError, match=r"report\.json|out\.jsonl"):
        run(tmp_path)
    source, settings = tmp_path / "out.jsonl", PrepareSettings("bpe:300", 0.1)
    assert (
        prepare([source], first.output, settings, overwrite=True).report["files"] == report["files"]
    )


def test_what_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    for path, problem in (
        (tmp_path / "a.jsonl", "is not a regular file"),
        (Path("/dev/null"), "is not a regular file"),
        (tmp_path / ("a" * 300 + ".txt"), "no such file"),
        (Path("a\0.txt"), "no such file"),
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
