"""Find the inputs that the user names, and read their documents in blocks.

Inputs are files, directories, globs, standard input and data sets of the Hugging Face hub. Blocks
have about 1 MiB, and the same boundaries on every machine.

`RecordBlock.documents` parses records, which may happen in another process. A bad record becomes a
`Problem`: nothing is dropped silently, and no other record is lost.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from zero_tp.base.errors import UserError, json_kind
from zero_tp.base.files import open_regular
from zero_tp.data.compression import COMPRESSIONS, open_decompressed, piece_bytes
from zero_tp.data.formats import FORMATS, STREAMS, TABLES
from zero_tp.data.hub import read_hub
from zero_tp.data.records import (
    EVERY_STRING,
    HUB,
    TEXT_KEYS,
    Document,
    Problem,
    Record,
    RecordBlock,
    Source,
    choose_key,
    location,
    parse_dict,
)

STDIN = "-"
_BLOCK_BYTES = 2**20
_BLOCK_RECORDS = 10_000


def _known_format(path: Path) -> str | None:
    """Return a file's format by its name, a key of `FORMATS`; None: unknown."""
    is_compressed = path.suffix in COMPRESSIONS
    kind = Path(path.stem if is_compressed else path.name).suffix.removeprefix(".")
    return kind if kind in (STREAMS if is_compressed else FORMATS) else None


def file_format(path: Path) -> str:
    """Return a file's format by its name, a key of `FORMATS`.

    Raises:
        UserError: unknown, or compressed twice.
    """
    if (name := _known_format(path)) is None:
        raise UserError(
            f"{path}: unknown kind of file: the name must end with one of .{', .'.join(FORMATS)}; "
            "all but "
            f".{' and .'.join(TABLES)}, which are compressed inside, may have "
            f"{', '.join(COMPRESSIONS)} after it"
        )
    return name


def check_files(paths: Iterable[Path]) -> None:
    """Check that all paths are regular files of a known kind.

    Raises:
        UserError: names the first path that is not.
    """
    for path in paths:
        if not os.path.lexists(path):  # unlike Path's methods, False for a path with a NUL
            raise UserError(f"{path}: no such file")
        if not os.path.isfile(path):
            raise UserError(
                f"{path} is not a regular file: name one, or pipe its content to standard input (-)"
            )
        file_format(path)


def find_sources(
    inputs: Sequence[str | Path],
    text_key: str | None = None,
    documents: str = "file",
    stdin_kind: str = "jsonl",
) -> list[Source]:
    """Return the sources of the inputs.

    An input is a file, a directory (all files of a known kind below it), a glob, `-` (standard
    input) or `hf:NAME[:CONFIGURATION[:SPLIT]]`.

    Files of a directory or glob are sorted by path. UserError: there is no such file, or none of a
    known kind.
    """
    sources: list[Source] = []
    for name in map(str, inputs):
        if name == STDIN:
            if sys.stdin is None:  # the shell's `<&-`
                raise UserError(
                    "standard input is closed: pipe the documents to it, or name a file"
                )
            sources.append(Source("standard input", stdin_kind, text_key, documents))
        elif name.startswith(HUB):
            sources.append(Source(name, "hub", text_key, documents))
        else:
            paths = _files(name)
            check_files(paths)
            for path in paths:
                # File names may hold any bytes.
                name = os.fsencode(path).decode("utf-8", "backslashreplace")
                sources.append(
                    Source(name, file_format(path), text_key, documents, path, size_and_time(path))
                )
    if sum(source.path is None and source.kind != "hub" for source in sources) > 1:
        raise UserError("standard input can be read once: give - once")
    if not sources:
        raise UserError("no input files")
    return sources


def size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _files(name: str) -> list[Path]:
    """Return the files of a path, a directory or a glob."""
    path = Path(name)
    if os.path.isdir(path):  # unlike Path's methods, False for a path with a NUL
        inside = [
            file.relative_to(path)
            for file in path.rglob("*")
            if file.is_file() and _known_format(file)
        ]
        # Hidden below the directory that was named; a hidden directory may be named itself.
        files = [
            path / file for file in inside if not any(part.startswith(".") for part in file.parts)
        ]
    elif glob.has_magic(name) and not os.path.lexists(path):
        files = [Path(file) for file in glob.glob(name, recursive=True) if os.path.isfile(file)]
    else:
        return [path]
    if not files:
        raise UserError(f"{name}: no file is there that ends with one of .{', .'.join(FORMATS)}")
    return sorted(files)


def stream(
    inputs: Sequence[str | Path], text_key: str | None = None, documents: str = "file"
) -> Iterator[tuple[str, Document | Problem]]:
    """Yield (file and line, Document or Problem) of each record of the inputs.

    Inputs are those of `find_sources`; in a table the line is a row.
    """
    for source in find_sources(inputs, text_key, documents):
        for block in read_blocks(source):
            for place, document in block.documents():
                yield location(block.source, place), document


def read_documents(
    path: Path, text_key: str | None = None, documents: str = "file"
) -> Iterator[str]:
    """Yield the texts of one file, in order.

    Raises:
        UserError: a record is no document (with file and line).
    """
    for where, document in stream([path], text_key, documents):
        if isinstance(document, Problem):
            raise UserError(f"{where}: {document.detail}")
        yield document.text


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, JSON object) of a .jsonl file. UserError: a line holds no object."""
    for block in read_blocks(Source(str(path), "jsonl", EVERY_STRING, path=path)):
        for number, content in block.records:
            where = location(block.source, number)
            parsed = parse_dict(content) if isinstance(content, bytes) else content
            if isinstance(parsed, Problem):
                raise UserError(f"{where}: {parsed.detail}")
            yield where, parsed


# --- blocks ---------------------------------------------------------------------------------------


def _choose_json_key(source: Source, records: Sequence[Record]) -> None:
    """Choose the field of the text from the objects of the first block.

    Raises:
        UserError: they have no such field.
    """
    fields: dict[str, str | None] = {}
    for _, content in records:
        parsed = parse_dict(content) if isinstance(content, bytes) else content
        if isinstance(parsed, dict):
            for name, value in parsed.items():
                kind = None if isinstance(value, str) else json_kind(type(value).__name__)
                fields[name] = kind if fields.get(name, "") is not None else None
    # Without any object in the first block there is nothing to choose from: each record is then
    # judged by itself. With fields and no text among them, the error lists them.
    preferred = source.text_key or TEXT_KEYS[0]
    source.key = preferred if preferred in fields or not fields else choose_key(fields, source)


def read_blocks(source: Source) -> Iterator[RecordBlock]:
    """Yield all records of a source in blocks.

    Raises:
        UserError: it can't be read or has changed, or no field holds a text.
    """
    # Both are set by this reading, and a source may be read again.
    source.key = None
    source.position = 0
    try:
        for number, records in enumerate(
            group_records(read_hub(source) if source.kind == "hub" else _records(source))
        ):
            if number == 0 and source.key is None and source.kind in ("jsonl", "json", "hub"):
                _choose_json_key(source, records)
            yield RecordBlock(source.name, number, source.key, records)
        # After the last record: a file that grows while it is read would give another corpus the
        # next time.
        if source.path is not None and source.size_and_time not in (
            (0, 0),
            size_and_time(source.path),
        ):
            raise UserError(
                f"{source.name}: the file has changed since the start: run the command again"
            )
    except OSError as error:
        raise UserError(f"{source.name}: {error.strerror or error}") from error


def _records(source: Source) -> Iterator[Record]:
    """Yield the records of a file or of standard input, then set its hash."""
    with (
        open_regular(source.path)
        if source.path is not None
        else os.fdopen(os.dup(sys.stdin.fileno()), "rb") as raw
    ):
        if source.path is not None and source.kind in TABLES:
            # Tables are read at random places, so their bytes are hashed in a second pass.
            yield from TABLES[source.kind](source, raw)
            source.sha256 = file_sha256(source.path)
            return
        ending = source.path.suffix if source.path is not None else ""
        place = 0
        stored = _stored_bytes(source, raw, piece_bytes(ending))
        try:
            for record in STREAMS[source.kind](
                source, open_decompressed(source.name, ending, stored)
            ):
                place = record.place
                yield record
        except EOFError as error:
            yield Record(
                place + 1,
                Problem("unreadable", f"not a whole {ending} file ({error}): the rest is lost"),
            )
        for _ in stored:  # hash the rest
            pass


def group_records(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Group records into blocks of about 1 MiB, of at most 10,000 records."""
    block: list[Record] = []
    size = 0
    for record in records:
        block.append(record)
        content = record.content
        size += (
            sum(map(len, map(str, content.values()))) if isinstance(content, dict) else len(content)
        )
        # By content and number, not by processes or time: a resumed preparation finds the same
        # blocks.
        if size >= _BLOCK_BYTES or len(block) == _BLOCK_RECORDS:
            yield block
            block = []
            size = 0
    if block:
        yield block


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file's bytes as stored (compressed, if it is), in hexadecimal."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def _stored_bytes(source: Source, raw: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield a file's bytes as stored.

    It counts them in `source.position`, and sets `source.sha256` at the end.
    """
    digest = hashlib.sha256()
    while data := raw.read(size):
        digest.update(data)
        source.position += len(data)
        yield data
    source.sha256 = digest.hexdigest()
