"""Files of a checkpoint: safetensors, hashed while they are written and again to see that they are whole."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_tp.checkpoint.direct import DirectFile, page_aligned, read_blocks

PART = 8 * 2**20
BLOCK = 2**20  # read at a time: it is hashed while it is in the processor's cache
WRITING_THREADS = 4  # two wait for the disk while two hash
READING_THREADS = 4  # two wait for the disk while two hash
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int64: "I64"}


@dataclass(frozen=True)
class Written:
    """A file as it left the writer: bytes, and the hexadecimal SHA-256 of the SHA-256s of its parts of 8 MiB.

    Parts are hashed beside each other, while others are written or read: one thread hashes 1.8 GB/s, which is less
    than some disks give.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """A tensor to write: shape and dtype for the header, and where its data comes from when its turn is there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def write_tensors(path: Path, entries: Iterable[Entry], metadata: dict[str, str] | None = None) -> Written:
    """Write a safetensors file, one tensor in memory at a time, flushed to the disk.

    Raises:
        OSError: the disk is full or gone.
    """
    size, digests = _write(path, list(entries), metadata, lambda part: hashlib.sha256(part).digest())
    return Written(size, _of_parts(digests))


def write_unhashed(path: Path, entries: Iterable[Entry], metadata: dict[str, str] | None = None) -> None:
    """The same for a file whose checksum nobody keeps."""
    _write(path, list(entries), metadata, lambda part: b"")


def _write(
    path: Path, entries: list[Entry], metadata: dict[str, str] | None, digest: Callable[[memoryview], bytes]
) -> tuple[int, list[bytes]]:
    """(bytes, each part's digest). Tensors are read on this thread, one after the other; parts that are full are
    digested and written on others."""
    header, end = _header(entries, metadata)
    buffers = [page_aligned(PART) for _ in range(WRITING_THREADS + 1)]
    jobs: deque[Future[bytes]] = deque()
    digests, total = [], 0

    def store(part: memoryview, start: int) -> bytes:
        found = digest(part)
        file.write(part, start)
        return found

    with DirectFile(path) as file, ThreadPoolExecutor(WRITING_THREADS) as threads:
        for part in _parts(_contents(header, entries), cycle(buffers)):
            jobs.append(threads.submit(store, part, total))
            total += len(part)
            if len(jobs) == len(buffers):  # the next part is filled into the buffer of the oldest
                digests.append(jobs.popleft().result())
        digests += [job.result() for job in jobs]
        file.sync()
    assert total == len(header) + end, f"{path}: a tensor is not as long as it said"
    return total, digests


def _header(entries: list[Entry], metadata: dict[str, str] | None) -> tuple[bytes, int]:
    """(the file's first bytes, the length of all that follows)."""
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
    return len(encoded).to_bytes(8, "little") + encoded, end


def _contents(header: bytes, entries: Iterable[Entry]) -> Iterator[Tensor]:
    """The file's content, as uint8 tensors on any device."""
    yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for entry in entries:
        for block in _blocks(entry.read().detach()):
            yield block.view(-1).view(torch.uint8)


def _blocks(whole: Tensor) -> Iterator[Tensor]:
    """The tensor in contiguous pieces, one behind the other.

    A transposed one is laid out in blocks that stay in the processor's cache. Measured at [8192, 2048]: 0.03 s; laid
    out at once 0.06 s, most of it for getting the memory.
    """
    if whole.is_contiguous() or whole.dim() != 2:
        yield whole.contiguous()
        return
    for block in whole.split(max(1, BLOCK // (whole.shape[1] * whole.itemsize))):
        yield block.t().contiguous().t().contiguous()


def _parts(contents: Iterable[Tensor], buffers: Iterator[Tensor]) -> Iterator[memoryview]:
    """The content in parts, each in the next of `buffers`."""
    buffer, filled = next(buffers), 0
    for data in contents:
        at = 0
        while at < len(data):
            count = min(len(data) - at, PART - filled)
            buffer[filled : filled + count].copy_(data[at : at + count])
            at, filled = at + count, filled + count
            if filled == PART:
                yield buffer.numpy().data
                buffer, filled = next(buffers), 0
    if filled:
        yield buffer[:filled].numpy().data


@dataclass(frozen=True)
class Place:
    """Where bytes of a file from `start` on belong: uint8 [bytes], on any device."""

    start: int
    target: Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.target)


class Reading:
    """A file of `size` bytes that is read from end to end and hashed on `threads`, from now on; on the way its bytes
    are copied to `places`, of which no two hold the same. Without places others read the file too, so it goes through
    the page cache."""

    def __init__(self, path: Path, size: int, threads: Executor, places: Iterable[Place] = ()):
        ordered = sorted(places, key=lambda place: place.start)
        self._jobs = [threads.submit(_read_part, path, start, ordered) for start in range(0, size, PART)]

    def result(self) -> Written:
        """What was found, when all is read.

        Raises:
            OSError: it cannot be read.
        """
        found = [job.result() for job in self._jobs]
        return Written(sum(size for size, _ in found), _of_parts(digest for _, digest in found))


def _read_part(path: Path, start: int, places: list[Place]) -> tuple[int, bytes]:
    """(bytes, SHA-256) of the part that begins there."""
    hashed, at = hashlib.sha256(), start
    for block in read_blocks(path, start, start + PART, page_aligned(BLOCK), direct=bool(places)):
        hashed.update(block.numpy().data)
        _distribute(block, at, places)
        at += len(block)
    return at - start, hashed.digest()


def _distribute(block: Tensor, at: int, places: list[Place]) -> None:
    """Copy a file's bytes from `at` on to where they belong."""
    stop = at + len(block)
    for place in places[bisect_right(places, at, key=lambda place: place.stop) :]:
        if place.start >= stop:
            return
        first, last = max(at, place.start), min(stop, place.stop)
        place.target[first - place.start : last - place.start].copy_(block[first - at : last - at])


def hash_file(path: Path) -> Written:
    """Read a file from end to end.

    Raises:
        OSError: it cannot be read.
    """
    with ThreadPoolExecutor(READING_THREADS) as threads:
        return Reading(path, path.stat().st_size, threads).result()


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(tensor → dtype, shape, data_offsets, and `__metadata__`; the byte from which the offsets count).

    Raises:
        OSError, ValueError: it cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, 8 + length


def _of_parts(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()
