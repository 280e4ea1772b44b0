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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from zero_tp.data.records import DroppedRecord, RecordCounts
from zero_tp.errors import UserError
from zero_tp.files import remove

COMMIT_SECONDS = 5.0
"""A kill loses at most this much work."""
JOURNAL = "journal.jsonl"


class Spool:
    """A list of entries, one for each block, each with its bytes of every column.

    Attributes:
        sources, numbers: source and number of each entry's block.
        counts: of the records that were read so far.
        sha256: source → hash of a source that was read to its end.
        committed: something would be lost with it.

    Raises:
        OSError: the disk is full or the directory cannot be written.
    """

    def __init__(self, directory: Path, columns: Sequence[str] = (), identity: Mapping[str, Any] | None = None) -> None:
        """Open `directory` and resume from it. It is emptied first if it has another identity.

        Args:
            identity: a JSON object of all that decides the entries; None: open read-only.
        """
        self.directory, self.columns = directory, tuple(columns)
        self.sources, self.numbers = array("q"), array("q")
        self._ends = {name: array("q", [0]) for name in columns}
        self.counts, self.sha256 = RecordCounts(), dict[int, str]()
        self.identity: dict[str, Any] = {}
        self._files: dict[str, IO[bytes]] = {}
        self._pending: list[str] = []
        valid_bytes = self._load(identity)
        self.committed = len(self.sources) + len(self.sha256) > 0
        if identity is None:
            return
        if valid_bytes == 0:
            self.identity = dict(identity)
            self._pending.append(json.dumps({"identity": identity}))
            for path in directory.iterdir() if directory.is_dir() else ():
                remove(path)
        directory.mkdir(parents=True, exist_ok=True)
        sizes = {f"{name}.bin": self._ends[name][-1] for name in columns} | {JOURNAL: valid_bytes}
        for name, size in sizes.items():
            file = self._files[name] = open(directory / name, "ab")  # noqa: SIM115
            file.truncate(size)
        self._next_commit = time.monotonic() + COMMIT_SECONDS

    def _load(self, identity: Mapping[str, Any] | None) -> int:
        """Read the journal; return the length of its valid part in bytes."""
        valid_bytes = 0
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            open(self.directory / JOURNAL, "rb") as file,
        ):
            for line in file:
                if not line.endswith(b"\n"):
                    break
                entry = json.loads(line)
                if valid_bytes:
                    self._take(entry)
                elif identity is not None and entry["identity"] != identity:
                    return 0
                else:
                    self.identity = entry["identity"]
                valid_bytes += len(line)
        for name in self.columns:
            path = self.directory / f"{name}.bin"
            if self._ends[name][-1] > (path.stat().st_size if path.is_file() else 0):
                raise UserError(f"{path} is shorter than {self.directory / JOURNAL} says: remove {self.directory}")
        return valid_bytes

    def _take(self, entry: dict[str, Any]) -> None:
        if "ended" in entry:
            self.sha256[entry["ended"]] = entry["sha256"]
            return
        ends = entry["ends"]
        for name in self.columns:
            self._ends[name].append(ends[name])
        self.sources.append(entry["source"])
        self.numbers.append(entry["number"])
        self.counts.add(entry["read"], entry["dropped"], [DroppedRecord(*problem) for problem in entry["problems"]])

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.sources)

    def append(
        self, source: int, number: int, columns: Mapping[str, bytes], counts: RecordCounts | None = None
    ) -> None:
        """Append the columns of a block, and the counts of its records."""
        for name in self.columns:
            self._files[f"{name}.bin"].write(columns[name])
        ends = {name: self._ends[name][-1] + len(columns[name]) for name in self.columns}
        counted = vars(counts or RecordCounts())
        self._note({"source": source, "number": number, "ends": ends, **counted})

    def finish(self, source: int, sha256: str) -> None:
        """Note that a source was read to its end."""
        self._note({"ended": source, "sha256": sha256})

    def _note(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        self._pending.append(json.dumps(entry))
        if time.monotonic() >= self._next_commit:
            self.commit()

    def commit(self) -> None:
        """Write all to the disk, then the journal's lines."""
        for name, file in self._files.items():
            if name == JOURNAL:  # the last one
                file.write("".join(f"{line}\n" for line in self._pending).encode())
            file.flush()
            os.fsync(file.fileno())
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
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk: what is buffered is not committed
                file.close()
        self._files = {}
