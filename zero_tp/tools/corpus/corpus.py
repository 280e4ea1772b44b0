"""`prepare` makes a corpus from documents. Its stages (stages.py):

1. `Stages.read` reads the inputs once, block by block, in several processes. Each checks,
   repairs and hashes documents, and tokenizes them if the tokenizer exists. Results go to a
   `Spool`.
2. `Preparation.select` removes duplicates and contaminated documents, and selects the validation
   set.
3. `Preparation.encode` trains the tokenizer unless it exists, and then tokenizes the documents.
4. `write_output` writes both corpora, the validation texts and the report. Then the output
   replaces an older one.

`TokenPreparation` has the stages of token files instead of 2 and 3.

An interrupted preparation resumes from a hidden directory next to the output, which holds spools
and the trained tokenizer: a kill loses only blocks that were not committed. Memory holds 53 bytes a
document, a few blocks of 1 MiB a process (or one document if that is longer), and nothing of the
corpus itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zero_tp.base.errors import UserError
from zero_tp.base.files import (
    clear_partial,
    hidden_sibling,
    partial_directory,
    put_in_place,
    remove,
)
from zero_tp.data.documents import find_sources
from zero_tp.data.records import Source
from zero_tp.tools.corpus.settings import (
    Prepared,
    PrepareSettings,
    check_settings,
    differing_settings,
    find_reusable,
    output_identity,
    spool_identity,
)
from zero_tp.tools.corpus.spool import COMMITTED, Spool
from zero_tp.tools.corpus.stages import REMOVED, TOKENIZER, Preparation, Stages
from zero_tp.tools.corpus.tokenizer_training import TokenizerSpec
from zero_tp.tools.corpus.tokens.formats import find_token_files
from zero_tp.tools.corpus.tokens.importing import TokenPreparation


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
    """Write `output/{train,validation}.{bin,idx,content.json}`, `output/tokenizer/`,
    `output/validation.jsonl` and `output/report.json`.

    What is on disk meanwhile, for an output `corpus`:

        .corpus.progress/   blocks, committed     the spool; survives a kill
                            tokenizer/            trained, complete
                            encoded/              a second spool, of tokens
        .corpus.partial/    what is written; locked, emptied by the next start
        corpus/             the output, by a rename at the end

    Args:
        inputs: files, directories, globs, `-` or `hf:NAME`; see `documents.find_sources`.
        output: directory to write. An output of the same inputs and settings is reused.
        overwrite: replace an output or an interrupted preparation of other inputs or settings, or
            of the hub.
        strict: stop at the first record that is no document, instead of counting it.
        processes: number of processes that read and tokenise; None: one per core.
        progress: show progress bars when stderr is a terminal.

    Raises:
        UserError: bad input or settings, or an output or interrupted preparation of other ones.
    """
    output = Path(output)
    check_settings(settings)
    spec = None if settings.tokenizer is None else TokenizerSpec.parse(settings.tokenizer)
    sources: Sequence[Source]
    stages: type[Stages]
    if settings.format is None:
        sources = find_sources(inputs, settings.text_key, settings.documents, settings.stdin)
        stages = Preparation
    else:
        sources = find_token_files(inputs, settings)
        stages = TokenPreparation
    if processes is not None and processes < 1:
        raise UserError(f"processes {processes}: at least 1")
    # Of a symbolic link, the directory is replaced and not the link.
    real_output = Path(os.path.realpath(output))
    spool_directory = hidden_sibling(real_output, "progress")
    # Standard input and the hub may give other documents the next time.
    can_resume = all(source.path is not None for source in sources)
    compute_identity = partial(output_identity, sources, spec, settings)
    with name_output_in_errors(output, spool_directory):
        identity = spool_identity(sources, spec, settings)
        # --overwrite reads standard input and the hub again: no output has the empty identity that
        # `dict` returns.
        reusable: Callable[[], dict[str, Any]] = (
            compute_identity if can_resume or not overwrite else dict
        )
        if (reused := find_reusable(output, reusable, overwrite)) is not None:
            clear_partial(real_output, (TOKENIZER,))
            _clear_finished(spool_directory, identity, real_output)
            if strict and (problems := reused.report["documents"]["problems"]):
                raise UserError("{where}: {detail}".format(**problems[0]))
            return reused
        with (
            # First the lock of the output, then the spool: two processes never append to one spool.
            partial_directory(real_output, (TOKENIZER,)) as staging,
            _open_spool(spool_directory, identity, overwrite, can_resume) as spool,
        ):
            resumed = spool.counts.read
            preparation = stages(sources, spec, settings, spool, strict, processes, progress)
            # Before the first document is read, because a tokenizer that cannot be saved would be
            # refused only after all of them.
            preparation.save_existing_tokenizer(staging / TOKENIZER)
            preparation.read()
            for number, source in enumerate(sources):
                # A resumed start does not read a finished source, so its hash comes from the spool.
                source.sha256 = spool.sha256[number]
            report = preparation.write(staging, compute_identity)
            put_in_place(staging, real_output, is_stale=lambda name: name == REMOVED)
            # The spool is not needed any more.
            (spool_directory / COMMITTED).unlink(missing_ok=True)
    return Prepared(output, report, reused=False, resumed=resumed)


@contextlib.contextmanager
def name_output_in_errors(output: Path, spool_directory: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a UserError that names the output.

    After a full disk it says that the same command resumes, if there is a spool.
    """
    try:
        yield
    except OSError as error:
        can_resume = (
            # After a full disk the same command can resume; other errors would only come again.
            error.errno == errno.ENOSPC and spool_directory is not None and spool_directory.exists()
        )
        remedy = (
            "; the progress is kept: free some space and rerun the same command to resume"
            if can_resume
            else ""
        )
        raise UserError(f"{output}: can't be written: {error.strerror or error}{remedy}") from error


@contextlib.contextmanager
def _open_spool(
    directory: Path, identity: dict[str, Any], overwrite: bool, can_resume: bool
) -> Iterator[Spool]:
    """Open the spool in `directory`, with the blocks of an interrupted preparation.

    See `prepare` for the arguments. The end of the block removes a spool that cannot be resumed.
    """
    spool = Spool(directory)
    if (
        spool.identity
        and not overwrite
        and (different := differing_settings(spool.identity, identity))
    ):
        raise UserError(
            f"{directory} keeps {spool.counts.read:,} documents of an interrupted preparation with "
            "other settings "
            f"({different}): give the same settings to resume, or start over: --overwrite"
        )
    # Other settings were refused above, unless --overwrite is given. Here an input or a library may
    # have changed, and with it the blocks: all are made again.
    if spool.identity != identity or not can_resume:
        remove(directory)
        spool = Spool(directory)
    try:
        with contextlib.closing(spool.open(identity)):
            yield spool
    finally:
        # Nothing was committed or can be resumed, or the output is complete and `prepare` has
        # removed the file.
        if not (can_resume and (directory / COMMITTED).exists()):
            shutil.rmtree(directory, ignore_errors=True)


def _clear_finished(directory: Path, identity: dict[str, Any], output: Path) -> None:
    """Remove the spool of a process that was killed after it had written the output.

    A spool that another process uses stays.
    """
    if directory.exists():
        # Another process that holds the lock raises a UserError: then the spool is in use.
        with contextlib.suppress(UserError), partial_directory(output, (TOKENIZER,)):
            committed = Spool(directory).identity
            if committed is None or not differing_settings(committed, identity):
                shutil.rmtree(directory, ignore_errors=True)
