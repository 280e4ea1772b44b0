"""Documents and corpora are damaged at random, prepared, and read.

    python -m tests.tools.fuzz data --count 1000

What `prepare_data.py` accepts holds the ids that the tokenizer gives for the documents that a few
lines here find in the same files; each document is kept or counted as dropped, and with --strict
none is; a damaged output is never "up to date"; a damaged corpus is refused in one line, or is
known as another.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from tests.tools.fuzz.commands import Ended, attempt, scratch
from tests.tools.fuzz.damage import damage
from zero_tp.base.errors import UserError
from zero_tp.data.indexed import IndexedCorpus

WORDS = [
    *("peace", "war", "caf\u00e9", "\U0001f44b", "<|endoftext|>", "a", "union", "42"),
    *("  ", "\n", "\r\n", "\0", "\ufeff"),
]


def document(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.choice((0, 1, 5, 40))))


def line(draw: random.Random) -> bytes:
    """Return a line of a .jsonl file, mostly a right one."""
    text: Any = document(draw)
    odd = draw.randrange(600)
    if odd == 0:
        return draw.choice(
            [
                b"{",
                b"[]",
                b'"text"',
                b'{"text": NaN}',
                b'{"text": "a", "text": "b"}',
                b"\xff",
                b"[" * 5000,
            ]
        )
    if odd == 1:
        return json.dumps({draw.choice(["txt", ""]): text}).encode()
    if odd == 2:
        return json.dumps({"text": draw.choice([None, 3, [], {}])}).encode()
    if odd == 3:
        return b'{"text": "\\ud800"}'
    if odd == 4:
        return b'{"text": "a", "n": ' + b"9" * 5000 + b"}"
    if odd in (5, 6):
        return draw.choice([b"", b"   ", b"\t"])
    return json.dumps({"id": 1, "text": text}, ensure_ascii=draw.random() < 0.5).encode()


def inputs(draw: random.Random, directory: Path) -> list[Path]:
    """Write one to three files, some of them of no use, and return their paths."""
    made = []
    for number in range(draw.choice((1, 1, 2, 3))):
        kind = draw.choice([".jsonl", ".jsonl", ".jsonl.gz", ".txt", ".txt.gz"])
        path = directory / f"{number}{kind}"
        count = draw.choice((0, 3, 30, 30))
        content = (
            b"\n".join(line(draw) for _ in range(count))
            if "json" in kind
            else document(draw).encode()
        )
        if draw.random() < 0.1:
            content = b"\xef\xbb\xbf" + content
        content = gzip.compress(content) if kind.endswith(".gz") else content
        if content and draw.random() < 0.1:
            at = draw.randrange(len(content))
            content = draw.choice(
                [content[:at], content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]]
            )
        odd = draw.randrange(60)
        if odd == 0:
            os.mkfifo(path)
        elif odd == 1:
            path.mkdir()
        elif odd == 2:
            path.symlink_to(draw.choice(["/dev/zero", "absent", path.name, "/dev/null"]))
        elif odd == 3:
            path = directory / ("n" * draw.choice((240, 300)) + kind)
            if len(path.name) < 255:
                path.write_bytes(content)
        elif odd == 4:
            path = Path(os.fsdecode(os.fsencode(directory) + b"/\xff\x1b" + kind.encode()))
            path.write_bytes(content)
        elif odd != 5:
            path.write_bytes(content)
        made.append(path)
    return made


def documents(path: Path) -> list[str]:
    """Return the documents of an input as docs describe them; raises where there are none to read.

    ValueError, OSError, EOFError or zlib.error: the file is damaged."""
    if not path.is_file():
        raise OSError(path)
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode("utf-8")
    if ".txt" in path.name:
        return [text.removeprefix("\ufeff").replace("\r\n", "\n")]
    found = []
    for each in text.split("\n"):
        if each.strip(" \t\r\x0b\x0c"):
            pairs = json.loads(each.removeprefix("\ufeff"), object_pairs_hook=lambda pairs: pairs)
            keys = [key for key, _ in pairs]
            if len(set(keys)) != len(keys) or not isinstance(dict(pairs)["text"], str):
                raise ValueError(each)
            dict(pairs)["text"].encode()  # a ValueError where it has an unpaired surrogate
            found.append(dict(pairs)["text"])
    return found


def expected(paths: list[Path]) -> list[str] | None:
    """Return all documents, or None where an input is damaged."""
    try:
        return [text for path in paths for text in documents(path)]
    except (ValueError, OSError, EOFError, zlib.error, KeyError, TypeError, RecursionError):
        return None


def check(output: Path, texts: list[str]) -> None:
    """Assert that the two corpora hold these texts in their order, those of validation.jsonl
    apart.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(output / "tokenizer" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id("<|endoftext|>")
    held = [
        json.loads(each)["text"]
        for each in (output / "validation.jsonl").read_text("utf-8").split("\n")
        if each
    ]
    assert held == [text for text in texts if text in set(held)], (
        "validation.jsonl has other documents"
    )
    for split, part in (
        ("validation", held),
        ("train", [text for text in texts if text not in set(held)]),
    ):
        corpus = IndexedCorpus(output / split)
        found = [corpus.document(number).tolist() for number in range(len(corpus))]
        wanted = [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in part]
        assert found == wanted, f"{split} has other tokens than its documents"


@cache
def prepared() -> tuple[Path, list[str]]:
    """Return a directory with a prepared corpus in `out` of `a.jsonl`, and the command's
    arguments.
    """
    directory = scratch()
    texts = [f"document {number} of peace and war " * 5 for number in range(30)]
    (directory / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--input", "a.jsonl", "--tokenizer", "bpe:300", "--output", "out"]
    assert prepare("the undamaged documents", arguments, directory) is not None
    return directory, arguments


def prepare(description: str, arguments: list[str], directory: Path) -> Ended | None:
    """Run prepare_data.py → None where it refuses its input."""
    return attempt(description, "launch/prepare_data.py", arguments, directory)


def damaged_output(draw: random.Random, directory: Path) -> str:
    """Damage an output: it is not up to date then, and a corpus in it is refused or is the
    undamaged one.
    """
    source, arguments = prepared()
    shutil.copytree(source, directory, dirs_exist_ok=True)
    files = [path for path in sorted((directory / "out").rglob("*")) if path.is_file()]
    path = draw.choice(
        [*files, *(each for each in files if each.suffix in (".idx", ".bin", ".json"))]
    )
    before, description = path.read_bytes(), damage(path, draw)
    again = prepare(description, arguments, directory)
    changed = not path.is_file() or path.read_bytes() != before
    if path.name.endswith(".content.json"):
        assert again is not None, f"{description}: refused"
    elif changed and path.name != "report.json":
        assert again is None, f"{description}: up to date"
    for split in ("train", "validation"):
        if path.name.startswith(split + ".") and path.suffix in (".idx", ".bin", ".json"):
            whole = IndexedCorpus(source / "out" / split)
            try:
                corpus = IndexedCorpus(directory / "out" / split)
                found = corpus.identity()
            except UserError:
                continue
            same = found == whole.identity()
            assert same != (changed and path.suffix != ".json"), (
                f"{description}: its identity is {'the same' if same else found}"
            )
    if again is None and draw.random() < 0.3:
        mended = prepare(f"{description}, --overwrite", [*arguments, "--overwrite"], directory)
        for name in (
            ("train.bin", "train.idx", "validation.bin", "validation.jsonl") if mended else ()
        ):
            same = (directory / "out" / name).read_bytes() == (source / "out" / name).read_bytes()
            assert same, f"{description}: {name}"
    return "damaged, refused" if again is None else "damaged, accepted"


def case(draw: random.Random, directory: Path) -> str:
    if draw.random() < 0.4:
        return damaged_output(draw, directory)
    paths = inputs(draw, directory)
    arguments = ["--input", *map(str, paths), "--output", "out"]
    tokenizer = draw.choice(
        ["bpe:300", "bpe:300", "bpe:300", "bpe:256", "bpe:" + "9" * 30, "given"]
    )
    if tokenizer == "given":
        shutil.copytree(prepared()[0] / "out" / "tokenizer", directory / "given")
        if draw.random() < 0.6:
            damage(draw.choice(sorted((directory / "given").iterdir())), draw)
    arguments += ["--tokenizer", tokenizer]
    arguments += draw.choice(
        [
            [],
            [],
            [],
            ["--validation-fraction", draw.choice(["0.5", "1", "2", "nan", "1e300", "-1"])],
        ]
    )
    strict = draw.random() < 0.2
    arguments += ["--strict"] if strict else []
    arguments += draw.choice(
        [[], [], [], ["--seed", draw.choice(["0", "-1", "9" * 30, "x"])], ["--text-key", "\x1b"]]
    )
    description = f"prepare_data {arguments}"
    ended = prepare(description, arguments, directory)
    left = [path.name for path in directory.iterdir() if path.name.startswith(".")]
    assert not left, f"{description} leaves {left}"
    if ended is None:
        assert not (directory / "out").exists(), f"{description} leaves an output"
        return "refused"
    texts = expected(paths)
    counted = json.loads((directory / "out" / "report.json").read_text())["documents"]
    assert counted["read"] == counted["kept"] + sum(counted["dropped"].values()), (
        f"{description}: {counted}"
    )
    assert texts is not None or counted["dropped"] or "--text-key" in arguments, (
        f"{description} took a damaged input"
    )
    if texts is not None:
        assert counted["read"] == len(texts) and set(counted["dropped"]) <= {"empty"}, (
            f"{description}: {counted}"
        )
    assert not (strict and counted["dropped"]), f"{description} dropped documents"
    if texts is not None and tokenizer != "given":
        check(directory / "out", [text for text in texts if text.strip()])
    again = prepare(description, arguments, directory)
    assert again is not None and "up to date" in again.out, (
        f"{description}: prepared again: {again}"
    )
    return "prepared"
