"""Documents are read from text files: JSON lines and plain text, gzipped or not."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from zero_tp.errors import UserError
from zero_tp.files import InvalidJson, parse_json

KINDS = {".jsonl": "jsonl", ".txt": "txt"}


def document_kind(path: Path) -> str:
    """Return `"jsonl"` or `"txt"`, by the file's ending without a final `.gz`. UserError for any other ending."""
    name = path.name.removesuffix(".gz")
    for ending, kind in KINDS.items():
        if name.endswith(ending):
            return kind
    raise UserError(f"{path}: unknown kind of file: the name must end with .jsonl or .txt, or either with .gz after it")


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
                f"{path} is not a regular file: inputs are read three times, so write a pipe to a file first"
            )
        document_kind(path)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file's bytes as stored (compressed, if it is), in hexadecimal."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def read_documents(path: Path, text_key: str = "text") -> Iterator[str]:
    """Yield the texts of one file, in order; one document is in memory at a time.

    - `.jsonl`: each line is a JSON object, and the string under `text_key` is a document. Blank lines are skipped.
    - `.txt`: the whole file is one document. (Blank lines separate paragraphs in ordinary prose, so cutting
      there would put parts of one work on both sides of the train/validation split.)

    Raises:
        UserError: naming the file and line: missing file, not UTF-8, not JSON, no such key, damaged gzip.
    """
    if document_kind(path) == "jsonl":
        for where, record in read_objects(path):
            yield text_of(record, where, text_key)
        return
    with _reading(path) as file:
        yield _decode(file.read(), str(path)).removeprefix("\ufeff").replace("\r\n", "\n")


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, for messages; the JSON object there) of a .jsonl file. UserError as `read_documents`."""
    with _reading(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _object_of_line(line, f"{path}:{number}")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    try:
        with _open(path) as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: not a whole gzip file ({error})") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}: convert it to UTF-8 first") from error


def _object_of_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = parse_json(line.removeprefix(codecs.BOM_UTF8))
    except InvalidJson as error:
        raise UserError(f"{where}: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON object is needed, found {type(record).__name__}")
    return record


def text_of(record: dict[str, Any], where: str, text_key: str) -> str:
    """Return the string under `text_key` of a line's object. UserError: there is none."""
    if text_key not in record:
        found = ", ".join(sorted(map(repr, record))) or "none"
        raise UserError(f"{where}: no key {text_key!r}; the keys found are {found}: choose one with --text-key")
    text = record[text_key]
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_key!r} must be a string, found {type(text).__name__}")
    return text
