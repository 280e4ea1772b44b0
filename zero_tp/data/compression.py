"""Decompress files as they are read, in bounded memory; a damaged one never ends silently."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import zstandard

from zero_tp.base.errors import UserError, first_line

# Compressed data is read in small pieces: 2 KiB may decompress to 64 MiB, and an error loses all of
# its piece.
_READ_BYTES = 2**20
_COMPRESSED_BYTES = 2**11
# Bytes; zstd --long=31, the largest window that zstd compresses with. It needs as much memory.
_MAX_WINDOW = 2**31
COMPRESSIONS: dict[str, Callable[[], Any]] = {
    # 16 more means gzip: its header is read and its checksum compared (zlib's documentation).
    ".gz": partial(zlib.decompressobj, 16 + zlib.MAX_WBITS),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": partial(
        lzma.LZMADecompressor, lzma.FORMAT_XZ
    ),  # by default it takes zeros for an empty file
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj(),
}
"""Ending of a file → a decompressor of one frame."""


def piece_bytes(ending: str) -> int:
    """Return how many bytes of a file with this ending to read at once."""
    return _COMPRESSED_BYTES if ending in COMPRESSIONS else _READ_BYTES


def open_decompressed(name: str, ending: str, stored: Iterator[bytes]) -> io.BufferedReader:
    """Return the content of a file, whose bytes `stored` yields in pieces.

    Reading raises what `_decompress` does.
    """
    pieces = _decompress(name, stored, COMPRESSIONS[ending]) if ending in COMPRESSIONS else stored
    return io.BufferedReader(_ByteStream(pieces), _READ_BYTES)


class _ByteStream(io.RawIOBase):
    """Pieces of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # A piece may be empty, and 0 bytes would mean the end of the file.
        while not self._rest and (piece := next(self._pieces, None)) is not None:
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _decompress(
    name: str, stored: Iterator[bytes], new_decompressor: Callable[[], Any]
) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, which may have several frames, with zeros after each.

    Frames of A, B and zeros, in pieces whose borders (|) are anywhere:

        A A A | A B B | B 0 | 0 0     A's frame ends inside a piece, whose rest begins B's frame
        A A A | A B B                 EOFError, after all that could be decompressed: B is cut
        0 0 0                         EOFError: zeros are no first frame

    Raises:
        EOFError: a frame is damaged or cut, or there is none, as in a file that a crash has filled
            with zeros; the readers of zstandard and fsspec end silently there.
        UserError: the file is valid, but this machine or zstandard can't decompress it.
    """
    # Made before the first byte, so that an empty file, and one of zeros, is no whole file.
    frame: Any = new_decompressor()
    for data in stored:
        # Between frames zeros are skipped: tapes and block devices fill their last block with them.
        while data := data if frame else data.lstrip(b"\0"):
            frame = frame or new_decompressor()
            try:
                piece = frame.decompress(data)
            except (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError, MemoryError) as error:
                # Zstandard has one class of errors.
                if isinstance(error, MemoryError) or "memory" in str(error):
                    problem = f"{name}: can't be decompressed in memory ({first_line(error)})"
                    raise UserError(
                        f"{problem}: compress it with a window of at most 2 GiB (--long=31)"
                    ) from error
                raise EOFError(str(error)) from error
            # Before the next piece is read: what was decompressed before damage is not lost.
            yield piece
            # The bytes after a frame are of the next one. Inside a frame, the decompressor has
            # taken all.
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("it ends inside a frame")
