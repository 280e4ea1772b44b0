"""Files of a checkpoint: safetensors, hashed while they are written and again to see that they are whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PART = 32 * 2**20
HASHING_THREADS = 2
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int64: "I64"}


@dataclass(frozen=True)
class Written:
    """A file as it left the writer: bytes, and the hexadecimal SHA-256 of the SHA-256s of its parts of 32 MiB.

    Parts are hashed beside each other, while the file is written or read: one thread hashes 1.8 GB/s, which is less
    than some disks give.
    """

    size: int
    sha256: str


class _Hashing:
    """Hashes parts on threads of its own (hashlib lets go of the interpreter), two parts behind at most."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(HASHING_THREADS)
        self._jobs: deque[Future[bytes]] = deque()
        self._parts = hashlib.sha256()

    def add(self, part: list[memoryview]) -> None:
        """The next part, in pieces. They must stay as they are until two more parts were added."""
        while len(self._jobs) >= HASHING_THREADS:
            self._parts.update(self._jobs.popleft().result())
        self._jobs.append(self._threads.submit(_digest, part))

    def hexdigest(self) -> str:
        for job in self._jobs:
            self._parts.update(job.result())
        self._threads.shutdown()
        return self._parts.hexdigest()


def _digest(part: list[memoryview]) -> bytes:
    hashed = hashlib.sha256()
    for piece in part:
        hashed.update(piece)
    return hashed.digest()


@dataclass(frozen=True)
class Entry:
    """A tensor to write: shape and dtype for the header, and where its data comes from when its turn is there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def write_tensors(path: Path, entries: Iterable[Entry], metadata: dict[str, str] | None = None) -> Written:
    """Write a safetensors file, one tensor in host memory at a time, flushed to the disk.

    Raises:
        OSError: the disk is full or gone.
    """
    entries = list(entries)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for entry in entries:
        size = torch.Size(entry.shape).numel() * entry.dtype.itemsize
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    hashing, total = _Hashing(), 0
    with path.open("wb", buffering=0) as file:
        for part in _parts(encoded, entries):
            hashing.add(part)
            for piece in part:
                done = 0
                while done < len(piece):
                    done += file.write(piece[done:])
                total += len(piece)
        os.fsync(file.fileno())
    assert total == 8 + len(encoded) + end, f"{path}: a tensor is not as long as it said"
    return Written(total, hashing.hexdigest())


def _parts(header: bytes, entries: Iterable[Entry]) -> Iterator[list[memoryview]]:
    """The file's content in parts, each in pieces."""
    part, room = [], PART
    for data in _contents(header, entries):
        at = 0
        while at < len(data):
            piece = data[at : at + room]
            part.append(piece)
            at, room = at + len(piece), room - len(piece)
            if not room:
                yield part
                part, room = [], PART
    if part:
        yield part


def _contents(header: bytes, entries: Iterable[Entry]) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for entry in entries:
        yield _bytes_of(entry.read())


def hash_file(path: Path) -> Written:
    """Read a file from end to end.

    Raises:
        OSError: it cannot be read.
    """
    hashing, total = _Hashing(), 0
    buffers = deque(memoryview(bytearray(PART)) for _ in range(HASHING_THREADS + 1))
    with path.open("rb", buffering=0) as file:
        while True:
            buffer, filled = buffers[0], 0
            while filled < PART and (count := file.readinto(buffer[filled:])):
                filled += count
            if not filled:
                return Written(total, hashing.hexdigest())
            hashing.add([buffer[:filled]])
            total += filled
            buffers.rotate(-1)
