"""Parts of a corpus: one for each task of a datatrove pipeline (datatrove.py), which `zero-tp prepare --merge` joins.

`PARTS/00003` is the part of task 3: a spool of its documents, their texts and tokens, and `part.json`, which records
the settings and the SHA-256 of every file. The split depends on the hashes of all documents, so it is drawn when the
parts are merged. A part gets its name once it is complete. Part 0 also holds the tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zero_tp.data.collection import Documents, choose_validation, write_output
from zero_tp.data.records import DroppedRecord, RecordCounts
from zero_tp.data.settings import FORMAT, Counted, PreparedFile, damage, describe_files
from zero_tp.data.spool import JOURNAL, Spool
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.data.work import ENCODED, READ, DocumentEncoder
from zero_tp.errors import UserError
from zero_tp.files import partial_directory, put_in_place
from zero_tp.strict_json import InvalidJson, read_object
from zero_tp.validation import ConfigModel, Count, Positive, validate

MANIFEST, TOKENIZER = "part.json", "tokenizer"
COLUMNS = (*READ[:2], *ENCODED)
_AGAIN = "remove it and run its task again"


class PartSource(ConfigModel):
    """An input, of which several parts may hold documents. Inputs are in the order of their numbers, then names."""

    number: Count
    name: str


class Part(ConfigModel):
    """The manifest of a part."""

    part: Count
    tasks: Positive
    settings: dict[str, Any]
    sources: list[PartSource]
    documents: Counted
    files: dict[str, PreparedFile]


@contextlib.contextmanager
def new_part(directory: Path) -> Iterator[tuple[Path, Spool]]:
    """Give a hidden directory and the spool in it, which become the part `directory` at the end of the block."""
    with (
        partial_directory(directory, (TOKENIZER,)) as partial,
        contextlib.closing(Spool(partial, COLUMNS, {})) as spool,
    ):
        yield partial, spool
        put_in_place(partial, directory, stale=lambda name: True)


class Parts(Spool):
    """All parts of a directory as one spool, in the order of their inputs.

    Raises:
        UserError: a part is missing or damaged, or was made with other settings than the first.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        paths = sorted(path for path in directory.glob("*") if path.name.isdecimal())
        if not paths:
            raise UserError(f"{directory}: there are no parts of a corpus; launch/prepare_cluster.py makes them")
        self.manifests = [_read_manifest(path) for path in paths]
        first = self.manifests[0]
        for path, part in zip(paths, self.manifests, strict=True):
            keys = sorted(first.settings.keys() | part.settings.keys())
            different = [key for key in keys if first.settings.get(key) != part.settings.get(key)]
            different += ["number of tasks"] if part.tasks != first.tasks else []
            if different:
                raise UserError(f"{path}: made with another {', '.join(different)} than {paths[0].name}: {_AGAIN}")
            if int(path.name) != part.part:
                raise UserError(f"{path}: it is part {part.part} of {part.tasks}: {_AGAIN}")
        if missing := sorted(set(range(first.tasks)) - {part.part for part in self.manifests}):
            raise UserError(f"{directory}: part {missing[0]:05d} of {first.tasks} tasks is missing: run its task again")
        started = time.perf_counter()
        for path, part in zip(paths, self.manifests, strict=True):
            tokenizer = [f"{TOKENIZER}/tokenizer.json"] if part.part == 0 else []
            required = [JOURNAL, *(f"{column}.bin" for column in COLUMNS), *tokenizer]
            if problem := damage(path, part.files, MANIFEST, required):
                raise UserError(f"{problem}: {path} is damaged: {_AGAIN}")
        self.checking = time.perf_counter() - started
        self._tokenizer = paths[0] / TOKENIZER
        self._join([Spool(path, COLUMNS) for path in paths])

    def _join(self, spools: Sequence[Spool]) -> None:
        keys = [
            [(source.number, Path(source.name).parts, source.name) for source in part.sources]
            for part in self.manifests
        ]
        inputs = sorted({key for part in keys for key in part})
        self.names = [name for _, _, name in inputs]
        numbers = {key: number for number, key in enumerate(inputs)}
        order = sorted(
            (numbers[keys[part][source]], part, entry)
            for part, spool in enumerate(spools)
            for entry, source in enumerate(spool.sources)
        )
        self.sources = array("q", [source for source, _, _ in order])
        self._entries = [(spools[part], entry) for _, part, entry in order]
        self.counts = RecordCounts()
        for part in self.manifests:
            problems = [DroppedRecord(**problem.model_dump()) for problem in part.documents.problems]
            self.counts.add(part.documents.read, part.documents.dropped, problems)

    def part(self, entry: int, column: str) -> bytes:
        """Return the bytes of a column that belong to an entry."""
        spool, own_entry = self._entries[entry]
        return spool.part(own_entry, column)

    def output_identity(self, validation: float) -> dict[str, Any]:
        """Return what decides the output."""
        parts = hashlib.sha256(json.dumps([part.model_dump() for part in self.manifests]).encode()).hexdigest()
        return {"format": FORMAT, "parts": parts, "validation": validation, **self.manifests[0].settings}

    def write(self, directory: Path, validation: float) -> dict[str, Any]:
        """Write the output, and return the report."""
        documents = Documents(self, self.names)
        held_out = choose_validation(documents, validation)
        shutil.copytree(self._tokenizer, directory / TOKENIZER)
        sentences = self.manifests[0].settings.get("sentences")
        encoder = DocumentEncoder(load_tokenizer(directory / TOKENIZER), sentences)
        seconds = {"reading": self.checking, "tokenizer": 0.0}
        return write_output(directory, documents, self, encoder, held_out, self.output_identity(validation), seconds)


def _read_manifest(path: Path) -> Part:
    try:
        return validate(Part, read_object(path / MANIFEST), str(path / MANIFEST))
    except (OSError, InvalidJson) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path / MANIFEST}: {why}: {_AGAIN}") from error
    except UserError as error:  # it names the file
        raise UserError(f"{error}: {_AGAIN}") from error


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write `part.json` beside the files of a part, which it records."""
    manifest["files"] = describe_files(directory)
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
