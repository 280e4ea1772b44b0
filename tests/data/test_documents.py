"""Reading documents: every kind of file, compressed and not, and everything that can be wrong in
one.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.documents import ROWS, TEXTS, as_parquet
from tests.support.launched import ROOT
from zero_tp.base.errors import UserError
from zero_tp.data import formats, json_array, records, stream
from zero_tp.data.compression import COMPRESSIONS
from zero_tp.data.documents import file_sha256, find_sources, read_blocks, read_documents
from zero_tp.data.formats import DOCUMENT_UNITS
from zero_tp.data.records import Document, Problem, Source


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def as_arrow(rows: list[dict[str, Any]], new: Callable[..., Any] = pa.ipc.new_stream) -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    with new(out, table.schema) as writer:
        writer.write_table(table, 3)
    return out.getvalue()


WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "jsonl": lambda rows: "\n".join(map(json.dumps, rows)).encode(),
    "json": lambda rows: json.dumps(rows, indent=1).encode(),
    "json lines.json": lambda rows: "\n".join(map(json.dumps, rows)).encode(),
    "csv": as_csv,
    "parquet": as_parquet,
    "arrow": as_arrow,
    "file.arrow": lambda rows: as_arrow(rows, pa.ipc.new_file),
}

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": lambda data: (
        gzip.compress(data[:50]) + gzip.compress(data[50:]) + bytes(3)
    ),  # members and padding
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: (
        zstandard.compress(data[:50]) + zstandard.compress(data[50:])
    ),  # two frames
}


def source(path: Path) -> Source:
    (found,) = find_sources([path])
    return found


def documents(path: Path, key: str | None = None, split: str = "file") -> list[Document | Problem]:
    return [document for _, document in stream([path], key, split)]


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    data = WRITERS[name](ROWS)
    wanted = [Document(text, f"Title {i}") for i, text in enumerate(TEXTS)]
    for ending, pack in PACKERS.items():
        path = tmp_path / f"a.{name}{ending}"
        path.write_bytes(pack(data))
        if ending and path.name.split(".")[-2] in ("parquet", "arrow"):
            with pytest.raises(UserError, match="compressed inside"):
                source(path)
            continue
        assert documents(path) == wanted, path.name
        reader = source(path)
        assert list(read_blocks(reader)) and reader.sha256 == file_sha256(path)
        assert reader.position in (0, path.stat().st_size)


def test_plain_text_is_split_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(
        zstandard.compress("\ufeffone\r\ntwo\r\n\r\n \r\nthree\n\n\n\nfour \n".encode())
    )
    texts = {}
    for split in DOCUMENT_UNITS:
        records = documents(path, None, split)
        texts[split] = [record.text for record in records if isinstance(record, Document)]
    assert texts["file"] == ["one\ntwo\n\n \nthree\n\n\n\nfour \n"]
    assert texts["line"] == ["one", "two", "three", "four "]
    assert texts["blank-line"] == ["one\ntwo", "three", "four "]


def test_a_long_window_of_zstandard_is_read_or_refused(tmp_path: Path) -> None:
    """zstandard's own limit is 2^27 bytes; windows of more than 2^31 are beyond its library."""
    path, texts = tmp_path / "a.jsonl.zst", [f"text {i}" for i in range(2000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(
        compression_params=parameters
    ).compressobj()  # does not know the size
    data = compressor.compress(lines) + compressor.flush()
    assert zstandard.get_frame_parameters(data).window_size == 2**31
    path.write_bytes(data)
    assert [each.text for each in documents(path)] == texts  # type: ignore[union-attr]
    # The exponent of the window in the frame's header.
    path.write_bytes(data[:5] + bytes([data[5] + 8]) + data[6:])
    with pytest.raises(
        UserError,
        match=r"a\.jsonl\.zst: can't be decompressed in memory .*: compress it with a wind",
    ):
        documents(path)


@pytest.mark.parametrize(
    ("rows", "key", "text"),
    [
        ([{"id": "a", "content": "x"}], None, "x"),
        ([{"n": 1, "prose": "x"}], None, "x"),
        ([{"body": "x", "text": "y"}], None, "y"),
        ([{"body": "x", "text": "y"}], "body", "x"),
    ],
)
def test_the_field_of_the_text_is_found(
    tmp_path: Path, rows: list[dict[str, Any]], key: str | None, text: str
) -> None:
    for kind in ("jsonl", "json", "parquet", "arrow"):
        path = tmp_path / f"a.{kind}"
        path.write_bytes(WRITERS[kind](rows))
        assert [each.text for each in documents(path, key)] == [text], kind  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_a_field_that_is_not_there_lists_those_that_are(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes(WRITERS[kind]([{"one": "x", "two": "y"}]))
    for key, named in ((None, "'text'"), ("tow", "'tow'")):
        with pytest.raises(
            UserError, match=rf"a\.{kind}: no key {named}.*'one', 'two': choose one with --text-key"
        ):
            documents(path, key)


@pytest.mark.parametrize("content", [b"\n\nn,text\n1,a\n\n2,b\n", b"\r\nn,text\r\n1,a\r\n2,b\r\n"])
def test_a_header_may_follow_blank_lines(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    assert list(read_documents(tmp_path / "a.csv")) == ["a", "b"]


def test_an_object_may_follow_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(' \n\n{\n "text": "x"\n}\n')
    assert documents(tmp_path / "a.json") == [Document("x")]


ELEMENTS = [
    *(
        '{"text": "\\ud800"}',
        '{"text": "a", "text": "b"}',
        '{"n": 1e400, "text": "x"}',
        '{"n": NaN, "text": "x"}',
    ),
    *(
        '{"id": 18446744073709551615, "text": "a [{,}] \\" \\\\"}',
        '["text"]',
        '{"x": [{"y": "]"}], "text": "\\n\\u00e9é"}',
    ),
    *(
        '{"text": 1.5}',
        '{"text": "x"} {}',
        "{}}",
        f'{{"n": {"[" * 9999}{"]" * 9999}}}',
        '{"text": "last"}',
    ),
]


@pytest.mark.parametrize("chunk", [1, 7, 2**20])
def test_an_array_and_lines_of_json_give_the_same_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(json_array, "_CHUNK", chunk)
    (tmp_path / "lines.jsonl").write_text("\n".join(ELEMENTS))
    (tmp_path / "array.json").write_text(f"\ufeff \n[{' , '.join(ELEMENTS)} ]\n", encoding="utf-8")
    wanted, elements = (
        documents(tmp_path / "lines.jsonl", "text"),
        documents(tmp_path / "array.json", "text"),
    )
    without_places = [
        each._replace(detail="") if isinstance(each, Problem) else each for each in elements
    ]
    assert without_places == [
        each._replace(detail="") if isinstance(each, Problem) else each for each in wanted
    ]
    reasons = [each.reason if isinstance(each, Problem) else "" for each in wanted]
    assert reasons[:5] == ["not UTF-8", *["malformed"] * 3, ""]
    texts = [each.text for each in wanted if isinstance(each, Document)]
    assert texts == [json.loads(ELEMENTS[i])["text"] for i in (4, 6, -1)]
    for array, count in (
        ("[]", 0),
        ("[ ]", 0),
        ("[{}] {}", 2),
        ("[1,]", 2),
        ("[1", 1),
        ('["\\', 1),
        ("[", 1),
    ):
        (tmp_path / "array.json").write_text(array)
        found = documents(tmp_path / "array.json")
        assert len(found) == count and all(isinstance(each, Problem) for each in found), array


def test_directories_globs_and_what_is_no_input(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/1.txt", "a.csv.gz", "notes.md", ".hidden/x.txt", "b/.y.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")

    def names(*words: str) -> list[str]:
        sources = find_sources([str(tmp_path / word) for word in words])
        return [Path(source.name).name for source in sources]

    assert names("") == ["a.csv.gz", "1.txt", "2.jsonl"]
    assert names("b", "a.csv.gz") == ["1.txt", "2.jsonl", "a.csv.gz"]
    assert names("*/*.txt") == ["1.txt"] and names("**/*.jsonl") == ["2.jsonl"]
    for word, problem in (
        ("*.parquet", "no file is there"),
        ("notes.md", "unknown kind"),
        ("x.txt", "no such"),
    ):
        with pytest.raises(UserError, match=problem):
            names(word)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no file is there that ends with"):
        names("empty")
    with pytest.raises(UserError, match="standard input can be read once"):
        find_sources(["-", "-"])


BAD: list[tuple[str, bytes, str, list[str]]] = [
    ("a.jsonl", b'{"text": "a"}\n{"text": \n{"text": "b"}', "malformed", ["a", "b"]),
    ("a.jsonl", b'{"text": "a"}\n["text"]\n{"text": "b"}', "malformed", ["a", "b"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n{"text": "b"}', "not UTF-8", ["a", "b"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n{"text": "b"}', "no text", ["a", "b"]),
    ("a.jsonl", b'{"text": "a"}\n{"x": "y"}\n{"text": "b"}', "no text", ["a", "b"]),
    ("a.jsonl", b'{"text": "a"}\n' + b"x" * 500 + b'\n{"text": "b"}', "too long", ["a", "b"]),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9], "unreadable", ["a"] * 99),
    ("a.jsonl.bz2", bz2.compress(b'{"text": "a"}\n' * 9)[:-25], "unreadable", []),
    ("a.jsonl.xz", lzma.compress(b'{"text": "a"}\n' * 99)[:-9], "unreadable", ["a"] * 99),
    (
        "a.jsonl.zst",
        zstandard.compress(b'{"text": "a"}\n') + zstandard.compress(b"x" * 999)[:-3],
        "unreadable",
        ["a"],
    ),
    ("a.jsonl.gz", b"plain", "unreadable", []),
    *(
        (f"a.jsonl{ending}", content, "unreadable", [])
        for ending in COMPRESSIONS
        for content in (b"", bytes(500))
    ),
    ("a.json", b'[{"text": "a"}, 3, {"text": "b"}]', "malformed", ["a", "b"]),
    ("a.json", b'[{"text": "a"}, {"text": "b"}, {"te', "unreadable", ["a", "b"]),
    ("a.json", b'[{"text": 1.5}, {"text": "b"}]', "no text", ["b"]),
    ("a.json", b'[{"text": "%s"}, {"text": "b"}]' % (b"x" * 500), "too long", ["b"]),
    (
        "a.json",
        b'[{"text": "a", "n": ' + b"[" * 150 + b"]" * 150 + b'}, {"text": "b"}]',
        "malformed",
        ["b"],
    ),
    ("a.json", b'{"text": "a"}\n{"te\n{"text": "b"}', "malformed", ["a", "b"]),
    ("a.json", b'\n{"te\n{"text": "b"}', "malformed", ["b"]),
    ("a.csv", b"n,text\n1,a\n2,b,c\n3,d", "malformed", ["a", "d"]),
    ("a.csv", b'n,text\n1,a\n2,"x"y\n3,b', "malformed", ["a", "b"]),
    ("a.csv", b"n,text\n1,a\n2,\xff\n3,b", "not UTF-8", ["a", "b"]),
    (
        "a.parquet",
        as_parquet([{"text": "a"}, {"text": None}, {"text": "b"}]),
        "no text",
        ["a", "b"],
    ),
    ("a.parquet", as_parquet(ROWS)[:-20], "unreadable", []),
    ("a.arrow", as_arrow(ROWS)[:-200], "unreadable", TEXTS[:6]),
    ("a.txt", b"caf\xe9", "not UTF-8", []),
    ("a.txt", b"a line\n" * 99, "too long", []),
    ("a.json", b"{\n" + b'"a": 1,\n' * 99 + b'"text": "b"}\n{"text": "c"}\n', "too long", []),
    (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "%s"}\n{"text": "b"}' % (b"b" * 301),
        "too long",
        ["a", "b"],
    ),
    (
        "a.parquet",
        as_parquet([{"text": "a"}, {"text": "c" * 301}, {"text": "b"}]),
        "too long",
        ["a", "b"],
    ),
]


@pytest.mark.parametrize(("name", "content", "reason", "texts"), BAD)
def test_one_bad_record_costs_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    reason: str,
    texts: list[str],
) -> None:
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 400)
    monkeypatch.setattr(records, "MAX_CHARACTERS", 300)
    path = tmp_path / name
    path.write_bytes(content)
    found = documents(path)
    assert [each.text for each in found if isinstance(each, Document)] == texts
    assert [each.reason for each in found if isinstance(each, Problem)] == [reason]
    with pytest.raises(UserError, match=r"a\.\w+(\.\w+)?(:\d+)?: "):
        list(read_documents(path))


def test_a_null_and_a_text_that_is_not_utf8_in_a_table(tmp_path: Path) -> None:
    array = pa.array([b"a", b"\xff", None, b"b"], pa.binary()).cast(pa.string(), safe=False)
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": array}))
    found = documents(tmp_path / "a.arrow")
    assert [each.reason if isinstance(each, Problem) else each.text for each in found] == [
        *("a", "not UTF-8", "no text", "b")
    ]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_damage_ends_the_reading(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes are changed, cut and doubled: a document more or less, or a problem, and never
    another exception.
    """
    kind = data.draw(
        st.sampled_from(["jsonl", "json", "csv", "parquet", "arrow", "file.arrow", "txt"])
    )
    ending = (
        data.draw(st.sampled_from(sorted(PACKERS)))
        if kind not in ("parquet", "arrow", "file.arrow")
        else ""
    )
    whole = PACKERS[ending]("\n\n".join(TEXTS).encode() if kind == "txt" else WRITERS[kind](ROWS))
    at = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.sampled_from(["cut", "flip", "double", "insert"]))
    damaged = {
        "cut": whole[:at],
        "flip": whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :],
        "double": whole[:at] + whole,
        "insert": whole[:at] + data.draw(st.binary(min_size=1, max_size=5)) + whole[at:],
    }[change]
    path = tmp_path_factory.mktemp("damaged") / f"a.{kind}{ending}"
    path.write_bytes(damaged)
    split = data.draw(st.sampled_from(DOCUMENT_UNITS))
    try:
        found = documents(path, "text" if data.draw(st.booleans()) else None, split)
    except UserError as error:
        assert "choose one with --text-key" in str(error)
    else:
        assert all(isinstance(each, Document | Problem) for each in found)
        assert all(each.text.encode() is not None for each in found if isinstance(each, Document))


def test_a_library_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.parquet.* needs pyarrow: pip install .*\[data\]"):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "values", [pa.array([b"text"]), pa.nulls(1), pa.array([["text"]]), pa.array([{"a": "text"}])]
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_that_is_no_text_is_named_with_its_type(
    tmp_path: Path, kind: str, values: pa.Array
) -> None:
    table, path = pa.table({"text": values, "id": ["a"], "name": ["b"]}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    name = re.escape(str(values.type)).replace("item", "(item|element)")
    for key in ("text", None):
        with pytest.raises(
            UserError,
            match=rf"no key 'text' with a text; .* 'id', 'name', 'text' \({name}\): choose",
        ):
            documents(path, key)


def test_a_closed_standard_input_is_one_line(tmp_path: Path) -> None:
    words = (
        "-m",
        "zero_tp",
        "prepare",
        "--input",
        "-",
        "--tokenizer",
        "bpe:300",
        "--output",
        str(tmp_path / "out"),
    )
    command = " ".join(map(shlex.quote, (sys.executable, *words)))
    done = subprocess.run(f"{command} <&-", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "error: standard input is closed: pipe the documents to it, or name a file\n"
    )
