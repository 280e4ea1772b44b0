"""Parts of a corpus, which the tasks of a datatrove pipeline write.

datatrove.py writes them, and `zero-tp prepare --merge` joins them.

`PARTS/00003` is the part of task 3: a spool of its documents, and `part.json`, which records the
settings and the SHA-256 of every file. The split depends on the hashes of all documents, so merging
selects it. A part is renamed to its final name when it is complete. Part 0 also holds the
tokenizer.
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

from zero_tp.base.errors import UserError
from zero_tp.base.files import clear_partial, partial_directory, put_in_place
from zero_tp.base.strict_json import read_json
from zero_tp.base.validation import ConfigModel, Count, Positive, validate
from zero_tp.data.records import RecordCounts
from zero_tp.data.tokenizer import DocumentEncoder, load_tokenizer
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.tools.corpus.corpus import name_output_in_errors
from zero_tp.tools.corpus.output import DocumentTable, write_output
from zero_tp.tools.corpus.settings import (
    FORMAT,
    DocumentCounts,
    Prepared,
    PreparedFiles,
    PrepareSettings,
    check_validation_size,
    find_damage,
    find_reusable,
)
from zero_tp.tools.corpus.spool import Spool
from zero_tp.tools.corpus.stages import TOKENIZER

MANIFEST = "part.json"
_REMEDY = "remove this part and run its task again"


class PartSource(ConfigModel):
    """An input; several parts may hold documents of it. Inputs are sorted by number, then name."""

    number: Count
    name: str


class Part(ConfigModel):
    """The manifest of a part."""

    part: Count
    tasks: Positive
    settings: dict[str, Any]
    sources: list[PartSource]
    documents: DocumentCounts
    tokenizer: TokenizerFingerprint | None = None
    files: PreparedFiles


def merge(
    parts: str | Path,
    output: str | Path,
    validation: float = PrepareSettings.validation,
    *,
    overwrite: bool = False,
) -> Prepared:
    """Write the output that `prepare` would have written of the documents of all parts.

    Args:
        parts: the directory of the tasks' parts.
        validation: as in `PrepareSettings`.
        overwrite: replace an output of other parts.

    Raises:
        UserError: a part is missing, damaged, or made with other settings than the first; or as
            `prepare`.
    """
    check_validation_size(validation)
    output = Path(output)
    started = time.perf_counter()
    paths, manifests = _read_manifests(Path(parts))
    for path, part in zip(paths, manifests, strict=True):
        if problem := find_damage(path, part.files):
            raise UserError(f"{problem}: {path} is damaged: {_REMEDY}")
    seconds = {"reading": time.perf_counter() - started, "tokenizer": 0.0}
    settings = manifests[0].settings
    # `settings` has its files' hash.
    described = [part.model_dump(exclude={"tokenizer"}) for part in manifests]
    sha256 = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    # The manifests have the hash of each file, so a hash of the manifests covers the whole content.
    identity = {**settings, "format": FORMAT, "parts": sha256, "validation": validation}
    real_output = Path(os.path.realpath(output))
    with name_output_in_errors(output):
        if (reused := find_reusable(output, lambda: identity, overwrite)) is not None:
            clear_partial(real_output, (TOKENIZER,))
            return reused
        with partial_directory(real_output, (TOKENIZER,)) as staging:
            documents = _join(paths, manifests)
            documents.select_validation(validation)
            # Only part 0 has the tokenizer's files; the others have its fingerprint, compared
            # above.
            shutil.copytree(paths[0] / TOKENIZER, staging / TOKENIZER)
            tokenizer = load_tokenizer(staging / TOKENIZER)
            if (recorded := manifests[0].tokenizer) is not None:
                recorded.check(
                    tokenizer, f"the tokenizer in {paths[0]}", "the one of its documents", _REMEDY
                )
            encoder = DocumentEncoder(tokenizer, settings.get("sentences"))
            report = write_output(staging, documents, documents.blocks, encoder, identity, seconds)
            put_in_place(staging, real_output)
    return Prepared(output, report, reused=False)


def _read_manifests(directory: Path) -> tuple[list[Path], list[Part]]:
    """Return the parts of a directory and their manifests. UserError: they are not all the parts
    of one pipeline.
    """
    paths = sorted(path for path in directory.glob("*") if path.name.isdecimal())
    if not paths:
        raise UserError(
            f"{directory}: there are no parts of a corpus; launch/prepare_cluster.py makes them"
        )
    manifests = [
        validate(Part, read_json(path / MANIFEST, _REMEDY), str(path / MANIFEST)) for path in paths
    ]
    first = manifests[0]
    for path, part in zip(paths, manifests, strict=True):
        ours, theirs = (
            {**manifest.settings, "number of tasks": manifest.tasks} for manifest in (part, first)
        )
        if different := sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key)):
            raise UserError(
                f"{path}: made with another {', '.join(different)} than {paths[0].name}: {_REMEDY}"
            )
        if part.tokenizer is not None and first.tokenizer is not None:
            part.tokenizer.require_same(
                first.tokenizer, f"the tokenizer of {path}", f"that of {paths[0].name}", _REMEDY
            )
        # A part that was copied under another number would be merged twice.
        if path.name != f"{part.part:05d}":
            raise UserError(f"{path}: it is part {part.part} of {part.tasks}: {_REMEDY}")
    if missing := sorted(set(range(first.tasks)) - {part.part for part in manifests}):
        raise UserError(
            f"{directory}: part {missing[0]:05d} of {first.tasks} tasks is missing: run its task "
            "again"
        )
    return paths, manifests


def _join(paths: Sequence[Path], manifests: Sequence[Part]) -> DocumentTable:
    """Return the documents of all parts, in the order in which a single preparation would have
    read them.
    """
    # Three inputs a, b, c and two tasks; each spool numbers its own sources from 0:
    #
    #     part 0    0 → a, 1 → c        of all inputs  a 0, c 2
    #     part 1    0 → b               of all inputs  b 1
    #     joined    blocks of a, b, c
    #
    # The order decides the order of documents, and so the bytes of the output.
    keys = [
        [(source.number, Path(source.name).parts, source.name) for source in part.sources]
        for part in manifests
    ]
    inputs = sorted({key for part in keys for key in part})
    numbers = {key: number for number, key in enumerate(inputs)}
    counts = RecordCounts()
    blocks = [
        block._replace(source=numbers[part[block.source]])
        for path, part in zip(paths, keys, strict=True)
        for block in Spool(path).blocks
    ]
    for part in manifests:
        # From the manifests and not from the spools: a reader has dropped records that no spool has
        # seen.
        counts.add(part.documents.read, part.documents.dropped, part.documents.problems)
    # Stable: by part, then as they were written.
    in_order = sorted(blocks, key=lambda block: block.source)
    return DocumentTable(in_order, [name for *_, name in inputs], counts)
