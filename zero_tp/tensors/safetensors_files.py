"""Write and read safetensors files, hashing them on the way."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from zero_tp.files import MOST_BYTES
from zero_tp.strict_json import parse_json

PART = 8 * 2**20
BLOCK = 2**20  # of a transposed tensor: it stays in the processor's cache
HASHING_THREADS = 2
DTYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}
"""As safetensors' headers write them."""


@dataclass(frozen=True)
class Written:
    """The size and hash of a file: the hexadecimal SHA-256 of the SHA-256s of its parts of 8 MiB.

    Parts are hashed by several threads: one hashes 1.8 GB/s, which is less than some disks give. `parts` are the
    hashes one by one. Without hashing both are empty.
    """

    size: int
    sha256: str
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, size: int, digests: Sequence[bytes]) -> Written:
        """Make it from the SHA-256s of the parts."""
        whole = hashlib.sha256(b"".join(digests)).hexdigest()
        return cls(size, whole, tuple(digest.hex() for digest in digests))


class _Digests:
    """Digests of a file's parts, in order; `work` runs on threads while the next parts are written or read.

    A part's buffer lives until its digest is done, so a few parts exist at a time.
    """

    def __init__(self, threads: ThreadPoolExecutor):
        self._threads = threads
        self._waiting: deque[Future[bytes]] = deque()
        self._done: list[bytes] = []

    def add(self, work: Callable[[], bytes]) -> None:
        self._waiting.append(self._threads.submit(work))
        if len(self._waiting) > HASHING_THREADS + 1:
            self._done.append(self._waiting.popleft().result())

    def all(self) -> list[bytes]:
        return self._done + [digest.result() for digest in self._waiting]


@dataclass(frozen=True)
class Entry:
    """A tensor to write: the header needs its shape and dtype; `read` returns the data when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Return the tensor's bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, entries: Iterable[Entry], metadata: dict[str, str] | None = None, *, hashed: bool = True
) -> Written:
    """Write a safetensors file, one tensor in memory at a time, and flush it to the disk.

    Raises:
        OSError: the disk is full or gone.
    """
    entries = list(entries)
    header = _header(entries, metadata)
    total = 0
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(HASHING_THREADS) as threads:
        digests = _Digests(threads)
        for part in _parts(_contents(header, entries)):
            if hashed:
                digests.add(partial(_sha256, part))
            _write_all(part.numpy().data, file)
            total += len(part)
        os.fsync(file.fileno())
        expected = len(header) + sum(entry.size for entry in entries)
        assert total == expected, f"{path}: a tensor is not as long as it said"
        return Written.of(total, digests.all()) if hashed else Written(total, "")


def _write_all(data: memoryview, file: FileIO) -> None:
    while data:
        data = data[file.write(data) :]


def _sha256(part: Tensor) -> bytes:
    return hashlib.sha256(part.numpy().data).digest()


def _header(entries: list[Entry], metadata: dict[str, str] | None) -> bytes:
    """Return the file's first bytes."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for entry in entries:
        stop = start + entry.size
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _contents(header: bytes, entries: Iterable[Entry]) -> Iterator[Tensor]:
    """Yield the file's content as uint8 tensors on any device."""
    yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for entry in entries:
        for block in _contiguous_blocks(entry.read().detach()):
            yield block.view(-1).view(torch.uint8)


def _contiguous_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor in contiguous blocks of rows.

    Blocks of a transposed tensor stay in the processor's cache: 0.03 s at [8192, 2048], 0.06 s in one piece.
    """
    if tensor.is_contiguous() or tensor.dim() != 2:
        yield tensor.contiguous()
        return
    for block in tensor.split(max(1, BLOCK // (tensor.shape[1] * tensor.itemsize))):
        yield block.t().contiguous().t().contiguous()


def _buffer() -> Tensor:
    # With a device: a background thread may read while `deepspeed.zero.Init` changes torch's default.
    return torch.empty(PART, dtype=torch.uint8, device="cpu")


def _parts(contents: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the content in parts of `PART` bytes, each in memory of its own; the last is shorter."""
    buffer, filled = _buffer(), 0
    for data in contents:
        start = 0
        while start < len(data):
            count = min(len(data) - start, PART - filled)
            buffer[filled : filled + count].copy_(data[start : start + count])
            start, filled = start + count, filled + count
            if filled == PART:
                yield buffer
                buffer, filled = _buffer(), 0
    if filled:
        yield buffer[:filled]


def read_hashed(path: Path) -> Written:
    """Read and hash a file. One thread reads in order, as disks and the kernel's readahead do best; others hash.

    Raises:
        OSError: it cannot be read.
    """
    size = 0
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(HASHING_THREADS) as threads:
        digests = _Digests(threads)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while True:
            part = _buffer()
            count = _read_into(part.numpy().data, file)
            if count:
                digests.add(partial(_sha256, part[:count]))
            size += count
            if count < PART:
                break
        return Written.of(size, digests.all())


def _read_into(buffer: memoryview, file: FileIO) -> int:
    """Fill `buffer`, up to the file's end; return the number of bytes."""
    count = 0
    while count < len(buffer) and (read := file.readinto(buffer[count:])):
        count += read
    return count


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return (tensor → dtype, shape, data_offsets, and `__metadata__`; the byte from which the offsets count).

    Raises:
        OSError, ValueError: it cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(path.stat().st_size, MOST_BYTES):
            raise ValueError("its header is longer than the file")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, 8 + length
