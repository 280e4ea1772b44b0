"""`prepare` makes a corpus of text files: it splits by document, tokenises, writes `.bin/.idx`, and reports.

The inputs are read once. What is made of them, block by block, in as many processes as there are cores, goes to a spool
(spool.py) in a hidden directory beside the output: texts, and tokens where the tokenizer is finished. From it a
preparation that was interrupted goes on. Once all is read, the split is drawn, a tokenizer is trained if it has to be,
and the output is put together, which then takes its place at once: it is whole or it isn't there. Memory holds 53 bytes
a document, a few blocks of 1 MiB a process (or one document if that is longer), and nothing of the corpus itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zero_tp.data.documents import find_sources
from zero_tp.data.parts import Parts
from zero_tp.data.preparation import Preparation
from zero_tp.data.settings import (
    Prepared,
    PrepareSettings,
    check_settings,
    check_validation,
    find_reusable,
    output_identity,
    reading_identity,
)
from zero_tp.data.sources import file_sha256
from zero_tp.data.spool import Spool
from zero_tp.data.tokenizer_training import TokenizerSpec
from zero_tp.errors import UserError
from zero_tp.files import clear_partial, hidden_sibling, partial_directory, put_in_place

_OWN_DIRECTORIES = ("tokenizer",)


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    settings: PrepareSettings,
    *,
    overwrite: bool = False,
    strict: bool = False,
    processes: int | None = None,
    progress: bool = True,
) -> Prepared:
    """Write `output/{train,validation}.{bin,idx}`, `output/tokenizer/`, `output/validation.jsonl` and
    `output/report.json`.

    Args:
        inputs: files, directories, globs, `-` or `hf:NAME`; see `documents.find_sources`.
        output: made here; when it holds the result of the same inputs and settings, that is reused.
        overwrite: replace an output of other inputs or settings, and what an interrupted start with others has read.
        strict: stop at the first record that is no document, instead of counting it.
        processes: that read and tokenise; None: one a core.
        progress: show progress bars when stderr is a terminal.

    Raises:
        UserError: bad input, bad settings, or an output or interrupted start of something else.
    """
    output, spec = Path(output), TokenizerSpec.parse(settings.tokenizer)
    check_settings(settings)
    sources = find_sources(inputs, settings.text_key, settings.documents, settings.stdin)
    if processes is not None and processes < 1:
        raise UserError(f"processes {processes}: at least 1")
    place = Path(os.path.realpath(output))  # of a link's output: the link stays
    reading = hidden_sibling(place, "progress")

    def identity() -> dict[str, Any]:
        if not overwrite and any(source.kind != "hub" and source.path is None for source in sources):
            raise UserError(
                f"{output} exists, and standard input can't be compared with what it was made from: --overwrite"
            )
        hashes = [file_sha256(source.path) if source.path is not None else "" for source in sources]
        return output_identity(sources, hashes, spec, settings)

    with _errors_named(output, reading):
        if (reused := find_reusable(output, identity, overwrite)) is not None:
            clear_partial(place, _OWN_DIRECTORIES)
            left = Spool(reading)
            of_this = not left.committed or left.identity == reading_identity(sources, spec, settings)
            if of_this and not hidden_sibling(place, "partial").exists():  # nobody writes there
                shutil.rmtree(reading, ignore_errors=True)
            return reused
        with (
            partial_directory(place, _OWN_DIRECTORIES) as partial,
            Preparation(sources, spec, settings, reading, overwrite, strict, processes, progress) as preparation,
        ):
            preparation.read()
            report = preparation.write(partial)
            put_in_place(partial, place)
            preparation.finished = True
    return Prepared(output, report, reused=False, resumed=preparation.resumed)


def merge(
    parts: str | Path, output: str | Path, validation: float = PrepareSettings.validation, *, overwrite: bool = False
) -> Prepared:
    """Write the output that `prepare` would have written of the documents of all parts (parts.py).

    Args:
        parts: the directory that the tasks' parts are in.
        validation: as in `PrepareSettings`.
        overwrite: replace an output of other parts.

    Raises:
        UserError: a part is missing, damaged, or made with other settings than the first; or as `prepare`.
    """
    check_validation(validation)
    output, found = Path(output), Parts(Path(parts))
    place = Path(os.path.realpath(output))
    with _errors_named(output):
        if (reused := find_reusable(output, lambda: found.output_identity(validation), overwrite)) is not None:
            clear_partial(place, _OWN_DIRECTORIES)
            return reused
        with partial_directory(place, _OWN_DIRECTORIES) as partial:
            report = found.write(partial, validation)
            put_in_place(partial, place)
    return Prepared(output, report, reused=False)


@contextlib.contextmanager
def _errors_named(output: Path, reading: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a UserError that names the output."""
    try:
        yield
    except OSError as error:
        full = error.errno == errno.ENOSPC and reading is not None and reading.exists()
        kept = "; what was read is kept: make room, and start the same command again to go on" if full else ""
        raise UserError(f"{output}: can't be written: {error.strerror or error}{kept}") from error
