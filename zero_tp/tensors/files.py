"""Files of a checkpoint: safetensors, hashed while they are written and again to see that they are whole."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from zero_tp.tensors.direct import DirectFile, page_aligned

PART = 8 * 2**20
BLOCK = 2**20  # of a transposed tensor: it stays in the processor's cache
HASHING_THREADS = 3
VECTOR = 1024  # buffers that one call of the system may fill (IOV_MAX)
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
    written on another and digested on others at the same time.

    Measured on 1.14 GB and two cores, for each number of digesting threads: 0.76 s with one, 0.83 to 0.95 s with two;
    a writing thread more costs 0.1 s.
    """
    header, end = _header(entries, metadata)
    digesting = min(HASHING_THREADS, max(1, len(os.sched_getaffinity(0)) - 1))  # a core copies and writes
    buffers = [page_aligned(PART) for _ in range(digesting + 5)]
    jobs: deque[tuple[Future[bytes], Future[None]]] = deque()
    digests, total = [], 0

    def finish_oldest() -> None:
        digested, written = jobs.popleft()
        written.result()
        digests.append(digested.result())

    with DirectFile(path) as file, ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(digesting) as threads:
        for part in _parts(_contents(header, entries), cycle(buffers)):
            jobs.append((threads.submit(digest, part), writer.submit(file.write, part, total)))
            total += len(part)
            if len(jobs) == len(buffers):  # the next part is filled into the buffer of the oldest
                finish_oldest()
        while jobs:
            finish_oldest()
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


def read_hashed(path: Path, places: Iterable[Place] = (), given_up: Event | None = None) -> Written:
    """Read a file from end to end and hash it; its bytes go to `places`, of which no two hold the same, as they come.

    One thread reads in order, which disks and the kernel's readahead do best, straight to where the bytes belong, and
    others hash. Measured on 1.14 GB: 0.55 s, plain reading 0.46 s; four threads, each reading and hashing parts of its
    own past the page cache, 0.80 s.

    Args:
        given_up: once it is set, reading ends.

    Raises:
        OSError: it cannot be read.
    """
    ordered = sorted(places, key=lambda place: place.start)
    buffers = [page_aligned(PART) for _ in range(HASHING_THREADS + 1)]
    jobs: deque[Future[bytes]] = deque()
    digests, size = [], 0
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(HASHING_THREADS) as threads:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for buffer in cycle(buffers):
            pieces = _pieces(size, ordered, buffer)
            count = _fill([view for view, _ in pieces], file.fileno(), size)
            if count:
                jobs.append(threads.submit(_take, pieces, count))
            size += count
            if count < PART or (given_up is not None and given_up.is_set()):
                break
            if len(jobs) == len(buffers):  # the next part may be read into the buffer of the oldest
                digests.append(jobs.popleft().result())
        digests += [job.result() for job in jobs]
    return Written(size, _of_parts(digests))


def _pieces(start: int, places: list[Place], buffer: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """(where to read, where to copy it then) of the part that begins at `start`, one behind the other.

    What has no place, or one on a device, is read into `buffer`.
    """
    at, stop = start, start + PART
    found: list[tuple[Tensor, Tensor | None]] = []
    for place in places[bisect_right(places, start, key=lambda place: place.stop) :]:
        if place.start >= stop:
            break
        first, last = max(at, place.start), min(stop, place.stop)
        if at < first:
            found.append((buffer[at - start : first - start], None))
        target = place.target[first - place.start : last - place.start]
        direct = target.device.type == "cpu"
        found.append((target, None) if direct else (buffer[first - start : last - start], target))
        at = last
    if at < stop:
        found.append((buffer[at - start :], None))
    return found


def _fill(targets: list[Tensor], descriptor: int, start: int) -> int:
    """Read bytes from `start` on into one target after the other; how many there were."""
    waiting, done = deque(target.numpy().data for target in targets), 0
    while waiting:
        count = os.preadv(descriptor, list(islice(waiting, VECTOR)), start + done)
        if count == 0:
            break
        done += count
        while count:
            first = waiting.popleft()
            if len(first) > count:
                waiting.appendleft(first[count:])
            count -= min(count, len(first))
    return done


def _take(pieces: list[tuple[Tensor, Tensor | None]], count: int) -> bytes:
    """SHA-256 of the first `count` bytes, which are copied to where they belong."""
    hashed = hashlib.sha256()
    for view, target in pieces:
        read = view[:count]
        hashed.update(read.numpy().data)
        if target is not None:
            target[: len(read)].copy_(read)
        count -= len(read)
    return hashed.digest()


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
