"""A record of an input becomes a document, or a problem that says why it is none."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zero_tp.errors import UserError, json_kind, one_line
from zero_tp.files import MOST_BYTES
from zero_tp.strict_json import InvalidJson, parse_json

TEXT_KEYS = ("text", "content", "body", "document", "raw_content", "article")
"""Fields in which the text is searched if none is named."""
TITLE = "title"
HUB = "hf:"
EVERY_STRING = "\0"
"""Stands for a field: all strings of a record are its text."""
MOST_LINE = MOST_BYTES
MOST_TEXT = 2**25
"""Characters of a document that are encoded at once: tokenizers takes about 130 bytes of memory for each."""
MOST_PROBLEMS = 10
Content = bytes | dict[str, Any]


@dataclass
class Source:
    """A file, standard input, or a data set of the Hugging Face hub.

    Attributes:
        name: as messages name it; of the hub, hf:NAME[:CONFIGURATION[:SPLIT]].
        kind: of `formats.FORMATS`, or "hub".
        text_key: field of the text; None: it is found.
        documents: what a document of plain text is: the whole "file", a "line", or what a "blank-line" ends.
        path: of the file; None: there is none.
        key: the field that the text is read from, once it is chosen; None for plain text.
        position: bytes of the file that have been read.
        sha256: of the bytes as stored, after all blocks were read.
    """

    name: str
    kind: str
    text_key: str | None = None
    documents: str = "file"
    path: Path | None = None
    key: str | None = None
    position: int = 0
    sha256: str = ""


class Problem(NamedTuple):
    """Why a record is no document: one of a few reasons, which are counted, and the details."""

    reason: str
    detail: str


class Document(NamedTuple):
    """A text, with the title that its record has, if any."""

    text: str
    title: str | None = None


class Record(NamedTuple):
    """The content of an input at `place` (a line or row, from 1; 0: the whole file)."""

    place: int
    content: Content | Problem


@dataclass(frozen=True)
class RecordBatch:
    """Consecutive records of a source.

    Attributes:
        number: of the block in its source, from 0.
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


class DroppedRecord(NamedTuple):
    """A record that is no document: its place, the reason and the details."""

    where: str
    reason: str
    detail: str


@dataclass
class RecordCounts:
    """Counts of records.

    Attributes:
        read: all of them.
        dropped: those that are not in the output, by reason.
        problems: the first records that are no documents.
    """

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    problems: list[DroppedRecord] = field(default_factory=list)

    def drop(self, place: str, reason: str, detail: str) -> None:
        """Count a record that is no document."""
        self.add(0, {reason: 1}, [DroppedRecord(place, reason, detail)])

    def add(self, read: int, dropped: Mapping[str, int], problems: Sequence[DroppedRecord]) -> None:
        """Add other counts."""
        self.read += read
        self.dropped.update(dropped)
        self.problems += problems[: MOST_PROBLEMS - len(self.problems)]

    @property
    def kept(self) -> int:
        return self.read - self.dropped.total()

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as report.json has them."""
        dropped = dict(sorted((+self.dropped).items()))
        problems = [problem._asdict() for problem in self.problems]
        return {"read": self.read, "kept": self.kept, "dropped": dropped, "problems": problems}


def where(source: str, place: int) -> str:
    """Return the place of a record as a message names it: file and line."""
    return f"{source}:{place}" if place else source


def document_of(content: Content | Problem, key: str | None) -> Document | Problem:
    """Return the document of a record: bytes are a line of JSON if there is a `key`, else a text."""
    if isinstance(content, bytes) and key is not None:
        content = object_of(content)
    if isinstance(content, Problem):
        return content
    if isinstance(content, bytes):
        text: Any = content
    elif key == EVERY_STRING:
        text = "\n".join(_strings(content)).encode("utf-8", "replace")
    elif key in content:
        text = content[key]
    else:
        return Problem("no text", f"no key {key!r}; the keys found are {_names(content)}: choose one with --text-key")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        elif isinstance(text, str):
            text.encode("utf-8")
    except UnicodeDecodeError as error:
        return Problem("not UTF-8", f"not UTF-8 at byte {error.start}: convert it to UTF-8 first")
    except UnicodeEncodeError as error:  # an unpaired surrogate
        return Problem("not UTF-8", f"not UTF-8 at character {error.start}")
    if not isinstance(text, str):
        return Problem("no text", f"{key!r} must be a string, found {json_kind(type(text).__name__)}")
    title = None
    if isinstance(content, bytes):
        text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    elif isinstance(content.get(TITLE), str | bytes):
        title = next(_strings(content[TITLE]))
    if len(text) > MOST_TEXT:
        return Problem("too long", f"a document of {len(text):,} characters, at most {MOST_TEXT:,} are read")
    return Document(text, title)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str | bytes):
        yield value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def object_of(line: bytes) -> dict[str, Any] | Problem:
    """Parse the JSON object of a line."""
    try:
        record = parse_json(line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n"))
    except InvalidJson as error:
        return Problem("not UTF-8" if "UTF-8" in str(error) else "malformed", str(error))
    if not isinstance(record, dict):
        return Problem("malformed", f"a JSON object is needed, found {json_kind(type(record).__name__)}")
    return record


def _names(fields: Iterable[str]) -> str:
    return one_line(", ".join(sorted(map(repr, fields))), 500) or "none"


def text_of(record: dict[str, Any], place: str, text_key: str) -> str:
    """Return the string under `text_key` of a line's object. UserError: there is none."""
    document = document_of(record, text_key)
    if isinstance(document, Problem):
        raise UserError(f"{place}: {document.detail}")
    return document.text


def choose_key(fields: Mapping[str, bool], source: Source) -> str:
    """Return the field that holds the text: the `text_key`, or one of `TEXT_KEYS`, or the only one that is a string.

    `fields`: name → whether it is a string. UserError: there is no such field; names those of the source.
    """
    if source.text_key == EVERY_STRING:
        return EVERY_STRING
    texts = [name for name, is_text in fields.items() if is_text]
    usual = (*TEXT_KEYS, *(texts if len(texts) == 1 else ()))
    for name in usual if source.text_key is None else (source.text_key,):
        if name in texts:
            return name
    raise UserError(
        f"{source.name}: no key {source.text_key or TEXT_KEYS[0]!r} with a text; the keys found are {_names(fields)}: "
        "choose one with --text-key"
    )
