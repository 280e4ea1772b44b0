"""Files of a checkpoint: safetensors, hashed while they are written and again to see that they are whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK = 16 * 2**20
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int64: "I64"}


@dataclass(frozen=True)
class Written:
    """A file as it left the writer: bytes and SHA-256 (hexadecimal)."""

    size: int
    sha256: str


class _Hashing:
    """A SHA-256 that is updated on a thread of its own, one chunk behind: hashlib lets go of the interpreter."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._pending: Any = None

    def update(self, chunk: Any) -> None:
        """The chunk must stay as it is until the next call."""
        self.wait()
        self._pending = self._thread.submit(self._hash.update, chunk)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def hexdigest(self) -> str:
        self.wait()
        self._thread.shutdown()
        return self._hash.hexdigest()


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
        for piece in _pieces(encoded, entries):
            hashing.update(piece)
            done = 0
            while done < len(piece):
                done += file.write(piece[done:])
            total += len(piece)
        os.fsync(file.fileno())
    assert total == 8 + len(encoded) + end, f"{path}: a tensor is not as long as it said"
    return Written(total, hashing.hexdigest())


def _pieces(header: bytes, entries: Iterable[Entry]) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for entry in entries:
        data = _bytes_of(entry.read())
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]


def hash_file(path: Path) -> Written:
    """Read a file from end to end.

    Raises:
        OSError: it cannot be read.
    """
    hashing, total = _Hashing(), 0
    buffers = [bytearray(CHUNK), bytearray(CHUNK)]
    with path.open("rb", buffering=0) as file:
        turn = 0
        while count := file.readinto(buffers[turn]):
            hashing.update(memoryview(buffers[turn])[:count])
            total += count
            turn = 1 - turn
    return Written(total, hashing.hexdigest())
