"""Find the inputs that a person names: files, directories, globs, standard input, data sets of the Hugging Face hub.

Each is a `Source` (sources.py), which gives `RecordBatch`s of records (records.py).
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zero_tp.data.formats import FORMATS
from zero_tp.data.records import EVERY_STRING, Document, Problem, object_of, where
from zero_tp.data.sources import COMPRESSIONS, Source
from zero_tp.errors import UserError

STDIN, HUB = "-", "hf:"
_ENDINGS = ", ".join(f".{kind}" for kind in FORMATS)


def document_kind(path: Path) -> str:
    """Return the key of `FORMATS` for a file, by its ending without that of a compression.

    Raises:
        UserError: there is no such ending, or it is that of a file which is compressed inside.
    """
    is_compressed = path.suffix in COMPRESSIONS
    stem = path.name.removesuffix(path.suffix) if is_compressed else path.name
    kind = stem.rpartition(".")[2] if "." in stem else ""
    if kind not in FORMATS:
        raise UserError(
            f"{path}: unknown kind of file: the name must end with one of {_ENDINGS}, "
            f"or with one of {', '.join(COMPRESSIONS)} after it"
        )
    if is_compressed and FORMATS[kind].is_columnar:
        raise UserError(f"{path}: a .{kind} file is compressed inside: unpack it with {path.suffix}'s own tool")
    return kind


def check_files(paths: Iterable[Path]) -> None:
    """Raise a UserError for the first path that is missing, no regular file, or of an unknown kind."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL
            raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        if stat.S_ISDIR(mode):
            raise UserError(f"{path} is a directory: name the files in it")
        if not stat.S_ISREG(mode):
            raise UserError(
                f"{path} is not a regular file: write what it gives to a file, or give it as standard input"
            )
        document_kind(path)


def find_sources(
    words: Sequence[str | Path],
    text_key: str | None = None,
    documents: str = "file",
    stdin_kind: str = "jsonl",
    *,
    every_string: bool = False,
) -> list[Source]:
    """Return the sources that are named: files, directories (all files of a known kind below), globs, `-` (standard
    input) and `hf:NAME[:CONFIGURATION[:SPLIT]]`.

    Files of a directory or glob are in the order of their names.

    Args:
        every_string: the text of a record is all its strings, also those in lists, instead of one field.

    Raises:
        UserError: there is no such file, or none that can be read.
    """
    sources: list[Source] = []
    for word in map(str, words):
        if word == STDIN:
            sources.append(Source("standard input", stdin_kind, text_key, documents))
        elif word.startswith(HUB):
            name, config, split = [*word.removeprefix(HUB).split(":", 2), "", ""][:3]
            if not name:
                raise UserError(
                    f"{word}: name a data set: hf:NAME, hf:NAME:CONFIGURATION or hf:NAME:CONFIGURATION:SPLIT"
                )
            sources.append(Source(word, "hub", text_key, documents, (name, config or None, split or "train")))
        else:
            paths = _files(word)
            check_files(paths)
            sources += [Source(_printable(path), document_kind(path), text_key, documents, path=path) for path in paths]
    for source in sources if every_string else ():
        source.text_key = EVERY_STRING
    if sum(source.name == "standard input" for source in sources) > 1:
        raise UserError("standard input can be read once: give - once")
    if not sources:
        raise UserError("no input files")
    return sources


def stream(
    inputs: Sequence[str | Path], text_key: str | None = None, documents: str = "file"
) -> Iterator[tuple[str, Document | Problem]]:
    """Yield every document of the inputs with its place, in order, and a Problem where there is none.

    Args: see `find_sources`.

    Raises:
        UserError: an input is missing or can't be read.
    """
    for source in find_sources(inputs, text_key, documents):
        for block in source.blocks():
            for place, document in block.documents():
                yield where(block.source, place), document


def _printable(path: Path) -> str:
    """Return a path as reports may have it: names of files may hold any bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _files(word: str) -> list[Path]:
    path = Path(word)
    if os.path.isdir(path):  # False for a name that no file can have
        inside = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        files = sorted(path / file for file in inside if not _is_hidden(file) and _is_known(file))
        if not files:
            raise UserError(f"{path} is a directory with no file that ends with one of {_ENDINGS}")
        return files
    if glob.has_magic(word) and not os.path.lexists(path):
        files = sorted(Path(name) for name in glob.glob(word, recursive=True) if os.path.isfile(name))
        if not files:
            raise UserError(f"{word}: no file has such a name")
        return files
    return [path]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_known(path: Path) -> bool:
    try:
        return bool(document_kind(path))
    except UserError:
        return False


# --- for inputs without bad records -----------------------------------------------------------------------------------


def read_documents(path: Path, text_key: str | None = None) -> Iterator[str]:
    """Yield the texts of one file, in order, about 1 MiB of them in memory at a time.

    A .txt file is one document: blank lines separate paragraphs in ordinary prose, so cutting there would put parts of
    one work on both sides of a split.

    Raises:
        UserError: naming the file and line: missing file, not UTF-8, not JSON, no such key, damaged gzip.
    """
    for block in Source(str(path), document_kind(path), text_key, path=path).blocks():
        for place, document in block.documents():
            if isinstance(document, Problem):
                raise UserError(f"{where(block.source, place)}: {document.detail}")
            yield document.text


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, for messages; the JSON object there) of a .jsonl file. UserError as `read_documents`."""
    for block in Source(str(path), "jsonl", EVERY_STRING, path=path).blocks():
        for number, content in block.records:
            place = where(block.source, number)
            parsed = object_of(content) if isinstance(content, bytes) else content
            if not isinstance(parsed, dict):
                assert isinstance(parsed, Problem)
                raise UserError(f"{place}: {parsed.detail}")
            yield place, parsed
