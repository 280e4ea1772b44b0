"""Find the inputs that a person names, and read their documents.

An input is a file, a directory, a glob, standard input, or a data set of the Hugging Face hub.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zero_tp.data.formats import FORMATS, STREAMS, TABLES
from zero_tp.data.records import EVERY_STRING, HUB, Document, Problem, Source, object_of, where
from zero_tp.data.sources import COMPRESSIONS, read_blocks
from zero_tp.errors import UserError

STDIN = "-"


def _kind(path: Path) -> str | None:
    """Return the key of `FORMATS` for a file, by its ending without that of a compression; None: there is none."""
    is_compressed = path.suffix in COMPRESSIONS
    kind = Path(path.stem if is_compressed else path.name).suffix.removeprefix(".")
    return kind if kind in (STREAMS if is_compressed else FORMATS) else None


def document_kind(path: Path) -> str:
    """Return the key of `FORMATS` for a file.

    Raises:
        UserError: its name ends with none of them, or it is compressed twice.
    """
    if (kind := _kind(path)) is None:
        raise UserError(
            f"{path}: unknown kind of file: the name must end with one of .{', .'.join(FORMATS)}; all but "
            f".{' and .'.join(TABLES)}, which are compressed inside, may have {', '.join(COMPRESSIONS)} after it"
        )
    return kind


def check_files(paths: Iterable[Path]) -> None:
    """Raise a UserError for the first path that is missing, no regular file, or of an unknown kind."""
    for path in paths:
        try:
            path.stat()
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL
            raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        if not path.is_file():
            raise UserError(f"{path} is not a regular file: name one, or give its content as standard input")
        document_kind(path)


def find_sources(
    words: Sequence[str | Path], text_key: str | None = None, documents: str = "file", stdin_kind: str = "jsonl"
) -> list[Source]:
    """Return the sources that are named: files, directories (all files of a known kind below), globs, `-` (standard
    input) and `hf:NAME[:CONFIGURATION[:SPLIT]]`.

    Files of a directory or glob are in the order of their names.

    Raises:
        UserError: there is no such file, or none that can be read.
    """
    sources: list[Source] = []
    for word in map(str, words):
        if word == STDIN:
            sources.append(Source("standard input", stdin_kind, text_key, documents))
        elif word.startswith(HUB):
            if word.split(":")[1] == "":
                raise UserError(f"{word}: name a data set: hf:NAME[:CONFIGURATION[:SPLIT]]")
            sources.append(Source(word, "hub", text_key, documents))
        else:
            paths = _files(word)
            check_files(paths)
            for path in paths:
                name = os.fsencode(path).decode("utf-8", "backslashreplace")  # names of files may hold any bytes
                sources.append(Source(name, document_kind(path), text_key, documents, path=path))
    if sum(source.path is None and source.kind != "hub" for source in sources) > 1:
        raise UserError("standard input can be read once: give - once")
    if not sources:
        raise UserError("no input files")
    return sources


def _files(word: str) -> list[Path]:
    path = Path(word)
    if os.path.isdir(path):  # False for a name that no file can have
        inside = [file.relative_to(path) for file in path.rglob("*") if file.is_file() and _kind(file)]
        files = [path / file for file in inside if not any(part.startswith(".") for part in file.parts)]
    elif glob.has_magic(word) and not os.path.lexists(path):
        files = [Path(name) for name in glob.glob(word, recursive=True) if os.path.isfile(name)]
    else:
        return [path]
    if not files:
        raise UserError(f"{word}: no file is there that ends with one of .{', .'.join(FORMATS)}")
    return sorted(files)


def stream(
    inputs: Sequence[str | Path], text_key: str | None = None, documents: str = "file"
) -> Iterator[tuple[str, Document | Problem]]:
    """Yield every document of the inputs with its place, in order, and a Problem where there is none.

    Args: see `find_sources`.

    Raises:
        UserError: an input is missing or can't be read.
    """
    for source in find_sources(inputs, text_key, documents):
        for block in read_blocks(source):
            for place, document in block.documents():
                yield where(block.source, place), document


# --- for inputs without bad records -----------------------------------------------------------------------------------


def read_documents(path: Path, text_key: str | None = None) -> Iterator[str]:
    """Yield the texts of one file, in order, about 1 MiB of them in memory at a time.

    A .txt file is one document: blank lines separate paragraphs in ordinary prose, so cutting there would put parts of
    one work on both sides of a split.

    Raises:
        UserError: naming the file and line: missing file, not UTF-8, not JSON, no such key, damaged gzip.
    """
    for block in read_blocks(Source(str(path), document_kind(path), text_key, path=path)):
        for place, document in block.documents():
            if isinstance(document, Problem):
                raise UserError(f"{where(block.source, place)}: {document.detail}")
            yield document.text


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, for messages; the JSON object there) of a .jsonl file. UserError as `read_documents`."""
    for block in read_blocks(Source(str(path), "jsonl", EVERY_STRING, path=path)):
        for number, content in block.records:
            place = where(block.source, number)
            parsed = object_of(content) if isinstance(content, bytes) else content
            if isinstance(parsed, Problem):
                raise UserError(f"{place}: {parsed.detail}")
            yield place, parsed
