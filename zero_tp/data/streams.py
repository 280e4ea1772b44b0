"""Files are streams of bytes: hashed as they are read, decompressed, with what a damaged one costs."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import io
import lzma
import zlib
from types import ModuleType
from typing import IO, Any

import zstandard

from zero_tp.data.records import Problem
from zero_tp.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}


def needed(module: str, what: str) -> ModuleType:
    """Import an optional library. UserError: it is not installed; with the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{what} needs {module.partition('.')[0]}: pip install -c constraints.txt -e .[data]"
        ) from error


class Watched(io.RawIOBase):
    """A stream hashes and counts the bytes that are read of another."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw, self.digest, self.count = raw, hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.raw.read(len(buffer))
        buffer[: len(data)] = data
        self.digest.update(data)
        self.count += len(data)
        return len(data)

    def rest(self) -> str:
        """Read what is left, and return the SHA-256 of all."""
        while self.read(2**20):
            pass
        return self.digest.hexdigest()


class _Zstd(io.RawIOBase):
    """A stream decompresses zstandard frames, and raises EOFError where the last one is cut."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._made = raw, zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._given = memoryview(b"")
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._given:
            data = self._left or self._raw.read(2**17)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._frame = self._frame or self._made.decompressobj()
            self._given, self._left = memoryview(self._frame.decompress(data)), b""
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._given))
        buffer[:count], self._given = self._given[:count], self._given[count:]
        return count


def decompressed(raw: IO[bytes], compression: str | None) -> IO[bytes]:
    if compression == "zstd":
        return io.BufferedReader(_Zstd(raw), 2**17)
    opened = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
    return opened[compression](raw, "rb") if compression else raw  # type: ignore[operator]


def cut_short(error: Exception, compression: str | None) -> Problem | None:
    """Return what a damaged file costs: all from there on. None: it is no damage of a compressed file."""
    known = isinstance(error, EOFError | zlib.error | lzma.LZMAError) or type(error).__name__ == "ZstdError"
    if compression and (known or (isinstance(error, OSError) and error.errno is None)):
        return Problem("unreadable", f"not a whole {compression} file ({error}): the rest of it is lost")
    return None
