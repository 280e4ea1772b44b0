"""Documents are read of what a person names: files, directories, globs, standard input, data sets of the Hugging Face
hub.

Each is a `Source` (sources.py), which gives `Block`s of records (records.py).
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zero_tp.data.records import EVERY_STRING, Document, Problem, object_of, where
from zero_tp.data.sources import COLUMNAR, COMPRESSIONS, KINDS, Source
from zero_tp.errors import UserError

STDIN, HUB = "-", "hf:"


def document_kind(path: Path) -> str:
    """Return one of the values of `KINDS`, by the file's ending without that of a compression.

    Raises:
        UserError: there is no such ending, or it is that of a file which is compressed inside.
    """
    name = path.name
    inner = name.removesuffix(path.suffix) if path.suffix in COMPRESSIONS else name
    for ending, kind in KINDS.items():
        if inner.endswith(ending):
            if inner != name and kind in COLUMNAR:
                raise UserError(
                    f"{path}: a {ending} file is compressed inside: unpack it with {path.suffix}'s own tool"
                )
            return kind
    raise UserError(
        f"{path}: unknown kind of file: the name must end with one of {', '.join(KINDS)}, "
        f"or with one of {', '.join(COMPRESSIONS)} after it"
    )


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
    found: list[Source] = []
    for word in map(str, words):
        if word == STDIN:
            found.append(Source("standard input", stdin_kind, text_key, documents))
        elif word.startswith(HUB):
            name, config, split = [*word.removeprefix(HUB).split(":", 2), "", ""][:3]
            if not name:
                raise UserError(
                    f"{word}: name a data set: hf:NAME, hf:NAME:CONFIGURATION or hf:NAME:CONFIGURATION:SPLIT"
                )
            dataset = (name, config or None, split or "train")
            found.append(Source(word, "hub", text_key, documents, dataset))
        else:
            paths = _files(word)
            check_files(paths)
            found += [Source(_printable(path), document_kind(path), text_key, documents, path=path) for path in paths]
    for source in found if every_string else ():
        source.text_key = EVERY_STRING
    if sum(source.name == "standard input" for source in found) > 1:
        raise UserError("standard input can be read once: give - once")
    if not found:
        raise UserError("no input files")
    return found


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
    if os.path.lexists(word) if "\0" not in word else True:
        if not os.path.isdir(word):
            return [path]
        below = sorted(each for each in path.rglob("*") if each.is_file() and not _hidden(each, path))
        kept = [each for each in below if _known(each)]
        if not kept:
            raise UserError(f"{path} is a directory with no file that ends with one of {', '.join(KINDS)}")
        return kept
    if glob.has_magic(word):
        kept = sorted(Path(each) for each in glob.glob(word, recursive=True) if os.path.isfile(each))
        if not kept:
            raise UserError(f"{word}: no file has such a name")
        return kept
    return [path]


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


def _known(path: Path) -> bool:
    try:
        document_kind(path)
    except UserError:
        return False
    return True


# --- every record has to be right -------------------------------------------------------------------------------------


def read_documents(path: Path, text_key: str | None = None) -> Iterator[str]:
    """Yield the texts of one file, in order, about 1 MiB of them in memory at a time; a .txt file is one document.
    (Blank lines separate paragraphs in ordinary prose, so cutting there would put parts of one work on both sides of a
    split.)

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
        for place, content in block.records:
            found = object_of(content) if isinstance(content, bytes) else content
            if not isinstance(found, dict):
                assert isinstance(found, Problem)
                raise UserError(f"{where(block.source, place)}: {found.detail}")
            yield where(block.source, place), found
