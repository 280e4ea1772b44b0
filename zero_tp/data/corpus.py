"""`prepare` makes a corpus of text files: it splits by document, tokenises, writes `.bin/.idx`, and reports.

The inputs are read once. What is made of them, block by block, in as many processes as there are cores, goes to a spool
(spool.py) in a hidden directory beside the output: texts, and tokens where the tokenizer is finished. From it a
preparation that was interrupted goes on. Once all is read, the split is drawn, a tokenizer is trained if it has to be,
and the output is put together, which then takes its place at once: it is whole or it isn't there. Memory holds 53 bytes
a document, a few blocks of 1 MiB a process (or one document if that is longer), and nothing of the corpus itself.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from zero_tp.data.documents import find_sources
from zero_tp.data.preparation import Preparation
from zero_tp.data.settings import (
    Prepared,
    PrepareSettings,
    check_settings,
    find_reusable,
    reading_identity,
)
from zero_tp.data.sources import Source
from zero_tp.data.spool import Spool
from zero_tp.data.tokenizer_training import TokenizerSpec
from zero_tp.data.work import ENCODED, READ
from zero_tp.errors import UserError
from zero_tp.files import (
    clear_partial,
    hidden_sibling,
    partial_directory,
    put_in_place,
    remove,
    sync,
)

_OWN_DIRECTORIES = ("tokenizer",)


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    settings: PrepareSettings,
    *,
    overwrite: bool = False,
    strict: bool = False,
    processes: int | None = None,
    shard: tuple[int, int] | None = None,
    merge: bool = False,
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
        shard: (i, n): do the i-th of n parts of the work, i from 0, into `shard_path`; other processes or machines that
            see the same inputs do the others.
        merge: put together what n shards made, which is what one process would have.
        progress: show progress bars when stderr is a terminal.

    Raises:
        UserError: bad input, bad settings, or an output or interrupted start of something else.
    """
    output, spec = Path(output), TokenizerSpec.parse(settings.tokenizer)
    check_settings(settings)
    sources = find_sources(inputs, settings.text_key, settings.documents, settings.stdin)
    if processes is not None and processes < 1:
        raise UserError(f"processes {processes}: at least 1")
    if shard is not None and merge:
        raise UserError("a shard is prepared or the shards are merged: give --shard or --merge")
    shards = _shards(output) if merge else []
    if shard is not None:
        return _prepare_shard(sources, output, spec, settings, overwrite, strict, processes, shard, progress)
    place = Path(os.path.realpath(output))  # of a link's output: the link stays
    reading = hidden_sibling(place, "progress")
    try:
        if (reused := find_reusable(output, sources, spec, settings, overwrite)) is not None:
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
            if shards:
                preparation.take(shards)
            else:
                preparation.read()
            report = preparation.write(partial)
            put_in_place(partial, place)
            preparation.finished = True
    except OSError as error:
        raise UserError(f"{output}: can't be written: {error.strerror or error}{_kept(error, reading)}") from error
    return Prepared(output, report, reused=False, resumed=preparation.resumed)


def shard_path(output: Path, shard: tuple[int, int]) -> Path:
    """Return where shard i of n of an output is written: beside it."""
    return output.absolute().parent / f"{output.absolute().name}.shard-{shard[0]}-of-{shard[1]}"


def _prepare_shard(
    sources: Sequence[Source],
    output: Path,
    spec: TokenizerSpec,
    settings: PrepareSettings,
    overwrite: bool,
    strict: bool,
    processes: int | None,
    shard: tuple[int, int],
    progress: bool,
) -> Prepared:
    i, n = shard
    if not 0 <= i < n:
        raise UserError(f"shard {i}/{n}: from 0/{n} to {n - 1}/{n}")
    if spec.directory is None:
        raise UserError(
            f"tokenizer {settings.tokenizer}: a shard takes a finished tokenizer: prepare some of the documents "
            "without --shard first, and then give that output's tokenizer directory"
        )
    if any(source.path is None and source.kind != "hub" for source in sources):
        raise UserError("standard input can't be read by several shards: write it to a file first")
    path = shard_path(output, shard)
    reading = hidden_sibling(path, "progress")
    try:
        with (
            partial_directory(path),
            Preparation(sources, spec, settings, reading, overwrite, strict, processes, progress, shard) as preparation,
        ):
            there = Spool(path, READ + ENCODED) if path.exists() else None
            if reused := there is not None and there.identity == preparation.spool.identity:
                preparation.finished = True
                assert there is not None
            elif path.exists() and not (overwrite and there is not None and there.identity):
                raise UserError(
                    f"{path} is there, and of other inputs or settings: remove it, or replace it: --overwrite"
                )
            else:
                preparation.read()
                preparation.spool.commit()
                preparation.spool.close()
                remove(path)
                os.replace(reading, path)
                sync(path.parent, below=False)
                there = preparation.spool
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror or error}{_kept(error, reading)}") from error
    found = [problem._asdict() for _, _, problem in there.problems]
    kept = there.read - there.dropped.total()
    counted = {"read": there.read, "kept": kept, "dropped": dict(sorted(there.dropped.items())), "problems": found}
    return Prepared(path, {"documents": counted}, reused=reused, resumed=preparation.resumed)


def _shards(output: Path) -> list[Spool]:
    """Return the shards of an output, all of them.

    Raises:
        UserError: one is missing, or there are none or those of several numbers.
    """
    found: dict[int, dict[int, Path]] = {}
    for path in output.absolute().parent.glob(f"{glob.escape(output.absolute().name)}.shard-*-of-*"):
        if match := re.fullmatch(r".*\.shard-([0-9]+)-of-([0-9]+)", path.name):
            found.setdefault(int(match[2]), {})[int(match[1])] = path
    if len(found) != 1:
        several = ", ".join(f"of {n}" for n in sorted(found))
        what = f"there are shards {several}: remove those that are too many" if found else "there are no shards of it"
        raise UserError(f"{output}: {what}")
    ((n, paths),) = found.items()
    if missing := sorted(set(range(n)) - paths.keys()):
        raise UserError(f"{output}: shard {missing[0]} of {n} is missing: prepare it with --shard {missing[0]}/{n}")
    return [Spool(paths[i], READ + ENCODED) for i in range(n)]


def _kept(error: OSError, reading: Path) -> str:
    full = error.errno == errno.ENOSPC and reading.exists()
    return "; what was read is kept: make room, and start the same command again to go on" if full else ""
