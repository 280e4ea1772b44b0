"""Parts of a corpus: one for each task of a datatrove pipeline (datatrove.py), which `zero-tp prepare --merge` joins.

`PARTS/00003` is the part of task 3: a spool of its documents, their texts and tokens, and `part.json`, which records
the settings and the SHA-256 of every file. The split depends on the hashes of all documents, so it is drawn when the
parts are merged. A part gets its name once it is complete. Part 0 also holds the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_tp.data.corpus import BLOCKS, COMMITTED, TOKENIZER, Documents, Spool, errors_named, write_output
from zero_tp.data.encoder import DocumentEncoder
from zero_tp.data.records import DroppedRecord, RecordCounts
from zero_tp.data.settings import (
    FORMAT,
    Counted,
    Prepared,
    PreparedFile,
    PrepareSettings,
    check_validation,
    damage,
    find_reusable,
)
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.errors import UserError
from zero_tp.files import clear_partial, partial_directory, put_in_place
from zero_tp.strict_json import InvalidJson, read_object
from zero_tp.validation import ConfigModel, Count, Positive, validate

MANIFEST = "part.json"
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


def merge(
    parts: str | Path, output: str | Path, validation: float = PrepareSettings.validation, *, overwrite: bool = False
) -> Prepared:
    """Write the output that `prepare` would have written of the documents of all parts.

    Args:
        parts: the directory that the tasks' parts are in.
        validation: as in `PrepareSettings`.
        overwrite: replace an output of other parts.

    Raises:
        UserError: a part is missing, damaged, or made with other settings than the first; or as `prepare`.
    """
    check_validation(validation)
    output, started = Path(output), time.perf_counter()
    paths, manifests = _read_manifests(Path(parts))
    for path, part in zip(paths, manifests, strict=True):
        required = [BLOCKS, COMMITTED, *([f"{TOKENIZER}/tokenizer.json"] if part.part == 0 else [])]
        if problem := damage(path, part.files, MANIFEST, required):
            raise UserError(f"{problem}: {path} is damaged: {_AGAIN}")
    seconds = {"reading": time.perf_counter() - started, "tokenizer": 0.0}
    settings = manifests[0].settings
    sha256 = hashlib.sha256(json.dumps([part.model_dump() for part in manifests]).encode()).hexdigest()
    identity = {"format": FORMAT, "parts": sha256, "validation": validation, **settings}
    place = Path(os.path.realpath(output))
    with errors_named(output):
        if (reused := find_reusable(output, lambda: identity, overwrite)) is not None:
            clear_partial(place, (TOKENIZER,))
            return reused
        with partial_directory(place, (TOKENIZER,)) as written:
            documents = _join(paths, manifests)
            documents.hold_out(validation)
            shutil.copytree(paths[0] / TOKENIZER, written / TOKENIZER)
            encoder = DocumentEncoder(load_tokenizer(written / TOKENIZER), settings.get("sentences"))
            report = write_output(written, documents, documents.blocks, encoder, identity, seconds)
            put_in_place(written, place)
    return Prepared(output, report, reused=False)


def _read_manifests(directory: Path) -> tuple[list[Path], list[Part]]:
    """Return all parts of a directory and their manifests, which belong to one pipeline."""
    paths = sorted(path for path in directory.glob("*") if path.name.isdecimal())
    if not paths:
        raise UserError(f"{directory}: there are no parts of a corpus; launch/prepare_cluster.py makes them")
    manifests = [_read_manifest(path / MANIFEST) for path in paths]
    first = manifests[0]
    for path, part in zip(paths, manifests, strict=True):
        ours, theirs = ({**manifest.settings, "number of tasks": manifest.tasks} for manifest in (part, first))
        different = sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))
        if different:
            raise UserError(f"{path}: made with another {', '.join(different)} than {paths[0].name}: {_AGAIN}")
        if int(path.name) != part.part:
            raise UserError(f"{path}: it is part {part.part} of {part.tasks}: {_AGAIN}")
    if missing := sorted(set(range(first.tasks)) - {part.part for part in manifests}):
        raise UserError(f"{directory}: part {missing[0]:05d} of {first.tasks} tasks is missing: run its task again")
    return paths, manifests


def _read_manifest(path: Path) -> Part:
    try:
        return validate(Part, read_object(path), str(path))
    except (OSError, InvalidJson, UserError) as error:
        problem = str(error) if isinstance(error, UserError) else f"{path}: {getattr(error, 'strerror', None) or error}"
        raise UserError(f"{problem}: {_AGAIN}") from error


def _join(paths: Sequence[Path], manifests: Sequence[Part]) -> Documents:
    """Return the documents of all parts in the order of their inputs, which are those of a single preparation."""
    keys = [[(source.number, Path(source.name).parts, source.name) for source in part.sources] for part in manifests]
    inputs = sorted({key for part in keys for key in part})
    numbers, counts = {key: number for number, key in enumerate(inputs)}, RecordCounts()
    blocks = [
        block._replace(source=numbers[part[block.source]])
        for path, part in zip(paths, keys, strict=True)
        for block in Spool(path).blocks
    ]
    for part in manifests:
        problems = [DroppedRecord(**problem.model_dump()) for problem in part.documents.problems]
        counts.add(part.documents.read, part.documents.dropped, problems)
    in_order = sorted(blocks, key=lambda block: block.source)  # of an input: by part, then as they were written
    return Documents(in_order, [name for *_, name in inputs], counts)
