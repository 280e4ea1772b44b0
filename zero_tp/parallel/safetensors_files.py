"""Write and read safetensors files, hashing them on the way."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from zero_tp.parallel.agreement import tensor_bytes

PART_BYTES = 8 * 2**20
HASHING_THREADS = 2
DTYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}
"""Names of dtypes in the headers of safetensors files."""


@dataclass(frozen=True)
class FileDigest:
    """The size and hash of a file: the hexadecimal SHA-256 of the SHA-256s of its parts of 8 MiB.

    Several threads hash the parts, because one hashes 1.8 GB/s, less than some disks deliver. A
    file written without hashing has empty `sha256` and `parts`.
    """

    size: int
    sha256: str
    parts: tuple[str, ...] = ()

    @classmethod
    def of_parts(cls, size: int, digests: Sequence[bytes]) -> FileDigest:
        whole = hashlib.sha256(b"".join(digests)).hexdigest()
        return cls(size, whole, tuple(digest.hex() for digest in digests))


class _PartHasher:
    """Hashes a file's content in parts, on threads, while the next parts are written or read."""

    def __init__(self, threads: ThreadPoolExecutor):
        self._threads = threads
        self._part = bytearray()
        self._pending: deque[Future[Any]] = deque()
        self._done: list[bytes] = []

    def update(self, content: memoryview) -> None:
        while content:
            count = PART_BYTES - len(self._part)
            self._part += content[:count]
            content = content[count:]
            if len(self._part) == PART_BYTES:
                self._submit()

    def _submit(self) -> None:
        self._pending.append(self._threads.submit(hashlib.sha256, self._part))
        # A new buffer, because a thread still reads the old one.
        self._part = bytearray()
        if len(self._pending) > HASHING_THREADS + 1:  # a few parts are in memory at a time
            self._done.append(self._pending.popleft().result().digest())

    def digests(self) -> list[bytes]:
        """Return the SHA-256s of all parts, in order. The last part may be shorter."""
        if self._part:
            self._submit()
        return self._done + [sha256.result().digest() for sha256 in self._pending]


@dataclass(frozen=True)
class Entry:
    """A tensor to write: the file's header needs its shape and dtype first; `read` returns its
    data.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Return the tensor's bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path,
    entries: Iterable[Entry],
    metadata: dict[str, str] | None = None,
    *,
    hashed: bool = True,
) -> FileDigest:
    """Write a safetensors file, one tensor in memory at a time, and flush it to the disk."""
    entries = list(entries)
    header = _header(entries, metadata)
    size = len(header) + sum(entry.size for entry in entries)
    with path.open("wb") as file, ThreadPoolExecutor(HASHING_THREADS) as threads:
        hasher = _PartHasher(threads)
        for content in chain(
            [memoryview(header)], (tensor_bytes(entry.read()) for entry in entries)
        ):
            file.write(content)
            if hashed:
                hasher.update(content)
        file.flush()
        # On the disk before the caller renames it: a rename that survives a crash without its data
        # would name a damaged file.
        os.fsync(file.fileno())
        assert file.tell() == size, f"{path}: a tensor's size differs from its entry"
        return FileDigest.of_parts(size, hasher.digests()) if hashed else FileDigest(size, "")


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
    # Blanks up to a multiple of 8 bytes, as the safetensors library writes them: tensors are then
    # aligned in a memory map.
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def hash_file(path: Path) -> FileDigest:
    """Read and hash a file. One thread reads in order, which disks and readahead favour; others
    hash.
    """
    size = 0
    with path.open("rb") as file, ThreadPoolExecutor(HASHING_THREADS) as threads:
        hasher = _PartHasher(threads)
        for part in iter(partial(file.read, PART_BYTES), b""):
            hasher.update(memoryview(part))
            size += len(part)
        return FileDigest.of_parts(size, hasher.digests())
