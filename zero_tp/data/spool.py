"""An append-only store of processed blocks, from which an interrupted preparation resumes.

A spool is a directory with one file a column and a journal. Each line of the journal says where the bytes of one block
end, and is written after they are on the disk. Bytes beyond the last line belong to a block that was being written when
the process died; they are cut off at the next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from zero_tp.errors import UserError
from zero_tp.files import remove

COMMIT_SECONDS = 5.0
"""A kill loses at most this much work."""
JOURNAL = "journal.jsonl"
MOST_PROBLEMS = 10


class DroppedRecord(NamedTuple):
    """A record that is no document: its place, the reason and the details."""

    where: str
    reason: str
    detail: str


class Spool:
    """A list of entries, one for each block, each with its bytes of every column.

    Attributes:
        sources, numbers: of each entry: which block of which source it is.
        read: documents that were read so far. dropped: how many of them were dropped, by reason.
        problems: the first of them, each with its source and block.
        done: source → what is known of it once it was read to its end.
        committed: something would be lost with it.

    Raises:
        OSError: the disk is full or the directory cannot be written.
    """

    def __init__(self, directory: Path, columns: Sequence[str] = (), identity: Mapping[str, Any] | None = None) -> None:
        """Open `directory` and resume from it. One with another identity is emptied first. None: open read-only."""
        self.directory, self.columns = directory, tuple(columns)
        self.sources, self.numbers = array("q"), array("q")
        self._ends = {name: array("q", [0]) for name in columns}
        self.read, self.dropped, self.problems = 0, Counter[str](), list[tuple[int, int, DroppedRecord]]()
        self.identity: dict[str, Any] = {}
        self.done: dict[int, dict[str, Any]] = {}
        self._files: dict[str, IO[bytes]] = {}
        self._pending: list[str] = []
        whole = self._load(identity)
        self.committed = whole > 0 and len(self.sources) + len(self.done) > 0
        if identity is None:
            return
        self.identity = json.loads(json.dumps(identity))
        if whole == 0:
            for path in directory.iterdir() if directory.is_dir() else ():
                remove(path)
        directory.mkdir(parents=True, exist_ok=True)
        for name in columns:
            file = self._files[name] = open(directory / f"{name}.bin", "ab")  # noqa: SIM115
            file.truncate(self._ends[name][-1])
        self._journal = open(directory / JOURNAL, "ab")  # noqa: SIM115
        self._journal.truncate(whole)
        if whole == 0:
            self._pending.append(json.dumps({"identity": identity}))
        self._next_commit = time.monotonic() + COMMIT_SECONDS

    def _load(self, identity: Mapping[str, Any] | None) -> int:
        """Read the journal; return the length of its valid part in bytes."""
        whole = 0
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            open(self.directory / JOURNAL, "rb") as file,
        ):
            for line in file:
                if not line.endswith(b"\n"):
                    break
                entry = json.loads(line)
                if whole == 0 and identity is not None and entry["identity"] != json.loads(json.dumps(identity)):
                    return 0
                if whole:
                    self._take(entry)
                else:
                    self.identity = entry["identity"]
                whole += len(line)
        sizes = {name: self._ends[name][-1] for name in self.columns}
        for name, size in sizes.items():
            path = self.directory / f"{name}.bin"
            if size > (path.stat().st_size if path.is_file() else 0):
                raise UserError(f"{path} is shorter than {self.directory / JOURNAL} says: remove {self.directory}")
        return whole

    def _take(self, entry: dict[str, Any]) -> None:
        if "done" in entry:
            self.done[entry["done"]] = entry["about"]
            return
        ends = entry["ends"]
        for name in self.columns:
            self._ends[name].append(ends[name])
        self.sources.append(entry["source"])
        self.numbers.append(entry["number"])
        self.read += entry["read"]
        self.dropped.update(entry["dropped"])
        at = entry["source"], entry["number"]
        self.problems += [
            (*at, DroppedRecord(*each)) for each in entry["problems"][: MOST_PROBLEMS - len(self.problems)]
        ]

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.sources)

    def append(
        self,
        source: int,
        number: int,
        columns: Mapping[str, bytes],
        read: int = 0,
        dropped: Mapping[str, int] | None = None,
        problems: Sequence[DroppedRecord] = (),
    ) -> None:
        """Append the columns of a block."""
        for name in self.columns:
            self._files[name].write(columns[name])
        entry = {
            "source": source,
            "number": number,
            "ends": {name: self._ends[name][-1] + len(columns[name]) for name in self.columns},
            "read": read,
            "dropped": dict(dropped or {}),
            "problems": list(problems[: MOST_PROBLEMS - len(self.problems)]),
        }
        self._note(entry)

    def finish(self, source: int, about: Mapping[str, Any]) -> None:
        """Note that a source was read to its end, and what is known of it now."""
        self._note({"done": source, "about": dict(about)})

    def _note(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        self._pending.append(json.dumps(entry))
        if time.monotonic() >= self._next_commit:
            self.commit()

    def commit(self) -> None:
        """Write all to the disk, then the journal's lines."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._journal.write("".join(f"{line}\n" for line in self._pending).encode())
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._pending.clear()
        self.committed = True
        self._next_commit = time.monotonic() + COMMIT_SECONDS

    def flush(self) -> None:
        """Flush the files, for `part` to read them."""
        for file in self._files.values():
            file.flush()

    def part(self, entry: int, column: str) -> bytes:
        """Return the bytes of a column that belong to an entry."""
        start, end = self._ends[column][entry], self._ends[column][entry + 1]
        with open(self.directory / f"{column}.bin", "rb") as file:
            file.seek(start)
            return file.read(end - start)

    def close(self) -> None:
        """Close the files. What was not committed is lost to the next start, as by a kill."""
        for file in (*self._files.values(), *([self._journal] if self._files else [])):
            with contextlib.suppress(OSError):  # a full disk: what is buffered is not committed
                file.close()
        self._files = {}
