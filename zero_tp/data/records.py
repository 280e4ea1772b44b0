"""A record of a file becomes a document, or a problem that says why it is none."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zero_tp.errors import UserError, did_you_mean, json_kind, one_line
from zero_tp.files import MOST_BYTES
from zero_tp.strict_json import InvalidJson, parse_json

TEXT_KEYS = ("text", "content", "body", "document", "raw_content", "article")
"""Fields in which a text is looked for, where none is named."""
TITLE = "title"
EVERY_STRING = "\0"
"""Instead of a field: all strings of a record."""
MOST_LINE = MOST_BYTES
MOST_TEXT = 2**25
"""Characters of a document that are encoded at once: tokenizers takes about 130 bytes of memory for each."""
Content = bytes | dict[str, Any]


class Problem(NamedTuple):
    """A problem says why a record is no document: one of a few reasons, by which they are counted, and what exactly."""

    reason: str
    detail: str


class Document(NamedTuple):
    """A document is a text, with the title that its record gives it, if any."""

    text: str
    title: str | None = None


class Record(NamedTuple):
    """A record is what a file holds at `place` (a line or row, from 1; 0: the whole file)."""

    place: int
    content: Content | Document | Problem


@dataclass(frozen=True)
class Block:
    """A block holds some records of a source that follow each other.

    Attributes:
        number: of the block in its source, from 0.
        key: the field of the text, where records have fields.
    """

    source: str
    number: int
    key: str | None
    records: Sequence[Record]

    def documents(self) -> Iterator[tuple[int, Document | Problem]]:
        """Yield the place and the document of each record, in order."""
        for place, content in self.records:
            found = document_of(content, self.key)
            if isinstance(found, Document) and len(found.text) > MOST_TEXT:
                found = Problem(
                    "too long", f"a document of {len(found.text):,} characters, at most {MOST_TEXT:,} are read"
                )
            yield place, found


def where(source: str, place: int) -> str:
    """Return the place of a record as a message names it: file and line."""
    return f"{source}:{place}" if place else source


def document_of(content: Content | Document | Problem, key: str | None) -> Document | Problem:
    """Return the document of a record: bytes with a `key` are a line of JSON, without one a text."""
    if isinstance(content, Document | Problem):
        return content
    if isinstance(content, bytes) and key is not None:
        found = object_of(content)
        return found if isinstance(found, Problem) else _document_of_object(found, key)
    if isinstance(content, dict):
        assert key is not None
        return _document_of_object(content, key)
    assert isinstance(content, bytes)
    text = _decoded(content)
    return text if isinstance(text, Problem) else Document(text.removeprefix("\ufeff").replace("\r\n", "\n"))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str | bytes):
        yield value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _document_of_object(record: Mapping[str, Any], key: str) -> Document | Problem:
    if key == EVERY_STRING:
        return Document("\n".join(_strings(record)).encode("utf-8", "replace").decode())
    if key not in record:
        return Problem("no text", f"no key {key!r}; the keys found are {_named(record)}: choose one with --text-key")
    text, title = record[key], record.get(TITLE)
    if isinstance(text, bytes):
        text = _decoded(text)
        if isinstance(text, Problem):
            return text
    if not isinstance(text, str):
        return Problem("no text", f"{key!r} must be a string, found {json_kind(type(text).__name__)}")
    if not text.isascii() and (bad := _surrogate(text)) is not None:
        return bad
    title = title.decode("utf-8", "replace") if isinstance(title, bytes) else title
    return Document(text, title if isinstance(title, str) else None)


def _surrogate(text: str) -> Problem | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Problem("not UTF-8", f"not UTF-8 at character {error.start}")
    return None


def _decoded(data: bytes) -> str | Problem:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return Problem("not UTF-8", f"not UTF-8 at byte {error.start}: convert it to UTF-8 first")


def object_of(line: bytes) -> dict[str, Any] | Problem:
    try:
        record = parse_json(line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n"))
    except InvalidJson as error:
        return Problem("not UTF-8" if "UTF-8" in str(error) else "malformed", str(error))
    if not isinstance(record, dict):
        return Problem("malformed", f"a JSON object is needed, found {json_kind(type(record).__name__)}")
    return record


def _named(fields: Iterable[str]) -> str:
    return one_line(", ".join(sorted(map(repr, fields))), 500) or "none"


def text_of(record: dict[str, Any], place: str, text_key: str) -> str:
    """Return the string under `text_key` of a line's object. UserError: there is none."""
    found = _document_of_object(record, text_key)
    if isinstance(found, Problem):
        raise UserError(f"{place}: {found.detail}")
    return found.text


def choose_key(fields: Mapping[str, bool], wanted: str | None, source: str) -> str:
    """Return the field that holds the text: `wanted`, or one of `TEXT_KEYS`, or the only one that is a string.

    Args:
        fields: name → whether it is a string.

    Raises:
        UserError: there is no such field; names those seen.
    """
    if wanted == EVERY_STRING:
        return wanted
    if wanted is not None:
        if fields.get(wanted):
            return wanted
        what = "is not a string" if wanted in fields else "is not there"
        near = f" ({did_you_mean(wanted, fields)})" if fields and wanted not in fields else ""
        raise UserError(
            f"{source}: no key {wanted!r} with a text ({what}); the keys found are {_named(fields)}: "
            f"choose one with --text-key{near}"
        )
    texts = [name for name, is_text in fields.items() if is_text]
    for name in (*TEXT_KEYS, *(texts if len(texts) == 1 else ())):
        if name in texts:
            return name
    raise UserError(f"{source}: no key 'text'; the keys found are {_named(fields)}: choose one with --text-key")
