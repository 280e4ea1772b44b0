"""Records of inputs, and the documents or problems that they are parsed to."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zero_tp.base.errors import UserError, json_kind, one_line
from zero_tp.base.files import MAX_FILE_BYTES
from zero_tp.base.strict_json import InvalidJson, InvalidUnicode, parse_json
from zero_tp.base.validation import ConfigModel

TEXT_KEYS = ("text", "content", "body", "document", "raw_content", "article")
"""Default names of the text's field, in order of preference."""
TITLE = "title"
HUB = "hf:"
EVERY_STRING = "\0"
"""In place of a field's name: all strings of a record are its text."""
MAX_LINE_BYTES = MAX_FILE_BYTES
MAX_CHARACTERS = 2**25
"""The longest document, in characters. To encode it, tokenizers needs about 130 bytes of memory
a character.
"""
MAX_PROBLEMS = 10
RecordContent = bytes | dict[str, Any]


@dataclass
class Source:
    """A file, standard input, or a data set of the Hugging Face hub.

    Attributes:
        name: the path or "standard input", for messages; on the hub
            hf:NAME[:CONFIGURATION[:SPLIT]].
        kind: a key of `formats.FORMATS`, or "hub".
        text_key, document_unit: `text_key` and `documents` of `PrepareSettings`.
        path: the file; None for standard input and the hub.
        size_and_time: the file's bytes and time of change [ns] before it was read; zeros without a
            file.
        key: the field of the text, set before the first record of a table or block; None for plain
            text.
        position: bytes of the file that have been read.
        sha256: hash of the bytes as stored, set after all blocks were read.
    """

    name: str
    kind: str
    text_key: str | None = None
    document_unit: str = "file"
    path: Path | None = None
    size_and_time: tuple[int, int] = (0, 0)
    key: str | None = None
    position: int = 0
    sha256: str = ""


class Problem(NamedTuple):
    """Why a record is no document: a reason, by which it is counted, and the details."""

    reason: str
    detail: str


class Document(NamedTuple):
    """A text, and the title of its record, if it has one."""

    text: str
    title: str | None = None


class Record(NamedTuple):
    """The content of an input at `place` (a line or row, from 1; 0: the whole file)."""

    place: int
    content: RecordContent | Problem


@dataclass(frozen=True)
class RecordBlock:
    """Consecutive records of a source.

    Attributes:
        number: the block's number in its source, from 0.
        key: the field of the text, if records have fields.
    """

    source: str
    number: int
    key: str | None
    records: Sequence[Record]

    def documents(self) -> Iterator[tuple[int, Document | Problem]]:
        """Yield the place and the document of each record, in order."""
        for place, content in self.records:
            yield place, document_of(content, self.key)


class DroppedRecord(ConfigModel):
    """A record that is no document: its file and line or row, the reason and the details."""

    where: str
    reason: str
    detail: str


@dataclass
class RecordCounts:
    """Counts of records.

    Attributes:
        dropped: records that are not in the output, by reason.
        problems: the first records that are no documents.
    """

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    problems: list[DroppedRecord] = field(default_factory=list)

    def drop(self, location: str, problem: Problem) -> None:
        """Count a record that is no document."""
        self.add(0, {problem.reason: 1}, [DroppedRecord(where=location, **problem._asdict())])

    def add(self, read: int, dropped: Mapping[str, int], problems: Sequence[DroppedRecord]) -> None:
        self.read += read
        self.dropped.update(dropped)
        # The first ones are enough to see what is wrong; a report of millions would not be read.
        self.problems += problems[: MAX_PROBLEMS - len(self.problems)]

    @property
    def kept(self) -> int:
        """Return the records that no step has dropped so far."""
        return self.read - self.dropped.total()

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as report.json has them."""
        dropped = dict(sorted((+self.dropped).items()))
        problems = [problem.model_dump() for problem in self.problems]
        return {"read": self.read, "kept": self.kept, "dropped": dropped, "problems": problems}


def location(source: str, place: int) -> str:
    """Return a record's file and line or row, for messages."""
    return f"{source}:{place}" if place else source


def document_of(content: RecordContent | Problem, key: str | None) -> Document | Problem:
    """Return the document of a record. Bytes are JSON if there is a `key`, else a text."""
    if isinstance(content, bytes) and key is not None:
        content = parse_dict(content)
    if isinstance(content, Problem):
        return content
    if isinstance(content, bytes):
        text: Any = content
    elif key == EVERY_STRING:
        # Surrogates are replaced here, because these texts are only compared with
        # (`--decontaminate`).
        text = "\n".join(_strings(content)).encode("utf-8", "replace")
    elif key in content:
        text = content[key]
    else:
        return Problem(
            "no text",
            f"no key {key!r}; the keys found are {_names(dict.fromkeys(content))}: choose one with "
            "--text-key",
        )
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        elif isinstance(text, str):
            text.encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:  # the second: an unpaired surrogate
        return Problem(
            "not UTF-8", f"not UTF-8 at position {error.start}: convert it to UTF-8 first"
        )
    if not isinstance(text, str):
        return Problem(
            "no text", f"{key!r} must be a string, found {json_kind(type(text).__name__)}"
        )
    title = None
    if isinstance(content, bytes):
        # A text file may come from Windows. JSON strings stay as they were written.
        text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    elif isinstance(content.get(TITLE), str | bytes):
        title = next(_strings(content[TITLE]))
    # After decoding, because the tokenizer's memory grows with characters, not with bytes.
    if len(text) > MAX_CHARACTERS:
        return Problem(
            "too long",
            f"a document of {len(text):,} characters, at most {MAX_CHARACTERS:,} are read",
        )
    return Document(text, title)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str | bytes):
        yield value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def parse_dict(line: bytes) -> dict[str, Any] | Problem:
    """Parse the JSON object of a line."""
    try:
        record = parse_json(line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n"))
    except InvalidJson as error:
        return Problem(
            "not UTF-8" if isinstance(error, InvalidUnicode) else "malformed", str(error)
        )
    if isinstance(record, dict):
        return record
    return Problem(
        "malformed", f"a JSON object is needed, found {json_kind(type(record).__name__)}"
    )


def _names(fields: Mapping[str, str | None]) -> str:
    """Return the names of fields, with the types of those that are no strings."""
    names = sorted(repr(name) + (f" ({kind})" if kind else "") for name, kind in fields.items())
    return one_line(", ".join(names), 500) or "none"


def text_of(record: dict[str, Any], location: str, text_key: str) -> str:
    """Return the string under `text_key` of a JSON object. UserError: there is none."""
    document = document_of(record, text_key)
    if isinstance(document, Problem):
        raise UserError(f"{location}: {document.detail}")
    return document.text


def choose_key(fields: Mapping[str, str | None], source: Source) -> str:
    """Return the field of the text.

    It is the `text_key`, or the first of `TEXT_KEYS`, or the only field that is a string.

    `fields`: name → None for strings, else the name of its type. UserError: there is no such field.
    """
    if source.text_key == EVERY_STRING:
        return EVERY_STRING
    texts = [name for name, kind in fields.items() if kind is None]
    # The only string field may have any name. Of several, guessing could train on the wrong one.
    candidates = (*TEXT_KEYS, *(texts if len(texts) == 1 else ()))
    for name in candidates if source.text_key is None else (source.text_key,):
        if name in texts:
            return name
    raise UserError(
        f"{source.name}: no key {source.text_key or TEXT_KEYS[0]!r} with a text; the keys found "
        f"are {_names(fields)}: "
        "choose one with --text-key"
    )
