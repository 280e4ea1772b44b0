"""`prepare` makes a corpus of text files: it splits by document, tokenises, writes `.bin/.idx`, and reports.

The inputs are read once, block by block, in as many processes as there are cores. The results go to a spool (spool.py)
in a hidden directory beside the output, from which an interrupted preparation resumes. Memory holds 53 bytes a
document, a few blocks of 1 MiB a process (or one document if that is longer), and nothing of the corpus itself. A
`Preparation` passes through these states:

1. opened: `__enter__` opens the spool, with the blocks that an interrupted start has read.
2. reading: `read` appends each block and each source's end, from the first one that is missing.
3. read: the spool is complete; duplicates are removed and the split is drawn.
4. trained, if no tokenizer was given: `tokenizer/` is in the spool's directory.
5. encoded: the tokens are in the spool, or in `encoded/` below it if the tokenizer was trained.
6. finished: `prepare` has renamed the output that `write` completed; the spool is removed.

A kill in any state loses only what the spools have not committed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from zero_tp.data.collection import Documents, choose_validation, write_output
from zero_tp.data.documents import find_sources
from zero_tp.data.parts import Parts
from zero_tp.data.records import RecordBatch, RecordCounts, Source
from zero_tp.data.settings import (
    Prepared,
    PrepareSettings,
    check_settings,
    check_validation,
    differing_settings,
    find_reusable,
    output_identity,
    reading_identity,
    size_of,
    stamp_of,
)
from zero_tp.data.similarity import EvaluationSets
from zero_tp.data.sources import file_sha256, read_blocks
from zero_tp.data.spool import Spool
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.data.tokenizer_training import TokenizerSpec
from zero_tp.data.work import ENCODED, READ, DocumentEncoder, Encoding, Reading, SourceEnd, in_order, usable_cores
from zero_tp.errors import UserError
from zero_tp.files import clear_partial, hidden_sibling, partial_directory, put_in_place, remove, sync

Item = TypeVar("Item")
_OWN_DIRECTORIES = ("tokenizer",)
_SMALL = 4 << 20  # bytes of inputs that are read before other processes have started


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
    progress_directory = hidden_sibling(place, "progress")

    def identity() -> dict[str, Any]:
        if not overwrite and any(source.kind != "hub" and source.path is None for source in sources):
            raise UserError(
                f"{output} exists, and standard input can't be compared with what it was made from: --overwrite"
            )
        hashes = [file_sha256(source.path) if source.path is not None else "" for source in sources]
        return output_identity(sources, hashes, spec, settings)

    with _errors_named(output, progress_directory):
        if (reused := find_reusable(output, identity, overwrite)) is not None:
            clear_partial(place, _OWN_DIRECTORIES)
            progress_left = Spool(progress_directory)
            is_same = progress_left.identity == reading_identity(sources, spec, settings)
            is_being_written = hidden_sibling(place, "partial").exists()
            if (is_same or not progress_left.committed) and not is_being_written:
                shutil.rmtree(progress_directory, ignore_errors=True)
            return reused
        with (
            partial_directory(place, _OWN_DIRECTORIES) as partial,
            Preparation(
                sources, spec, settings, progress_directory, overwrite, strict, processes, progress
            ) as preparation,
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
    output, whole = Path(output), Parts(Path(parts))
    place = Path(os.path.realpath(output))
    with _errors_named(output):
        if (reused := find_reusable(output, lambda: whole.output_identity(validation), overwrite)) is not None:
            clear_partial(place, _OWN_DIRECTORIES)
            return reused
        with partial_directory(place, _OWN_DIRECTORIES) as partial:
            report = whole.write(partial, validation)
            put_in_place(partial, place)
    return Prepared(output, report, reused=False)


@contextlib.contextmanager
def _errors_named(output: Path, progress_directory: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a UserError that names the output."""
    try:
        yield
    except OSError as error:
        can_resume = error.errno == errno.ENOSPC and progress_directory is not None and progress_directory.exists()
        remedy = "; what was read is kept: make room, and start the same command again to go on" if can_resume else ""
        raise UserError(f"{output}: can't be written: {error.strerror or error}{remedy}") from error


class Preparation:
    """Reads the inputs into a spool and writes the output from it.

    Attributes:
        resumed: documents that an earlier start had read.
        finished: the spool is of no more use.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        spec: TokenizerSpec,
        settings: PrepareSettings,
        directory: Path,
        overwrite: bool,
        strict: bool,
        processes: int | None,
        progress: bool,
    ) -> None:
        self.sources, self.spec, self.settings, self.directory = sources, spec, settings, directory
        self.overwrite, self.strict = overwrite, strict
        self.bar_disabled = None if progress else True  # None: tqdm shows a bar on a terminal only
        self.stamps = [stamp_of(source) for source in sources]
        small = all(source.path is not None for source in sources) and sum(map(size_of, sources)) < _SMALL
        self.processes = processes or (1 if small else usable_cores())
        self.tokenizer = load_tokenizer(spec.directory, settings.eos) if spec.directory is not None else None
        encoder = None if self.tokenizer is None else DocumentEncoder(self.tokenizer, settings.sentences)
        sets = EvaluationSets.read(settings.decontaminate) if settings.decontaminate else None
        self.work = Reading(settings.seed, encoder, settings.repair, settings.min_tokens, settings.deduplicate, sets)
        self.seconds: dict[str, float] = {}
        self.finished = False

    def __enter__(self) -> Preparation:
        identity = reading_identity(self.sources, self.spec, self.settings)
        left = Spool(self.directory)
        if left.committed and not self.overwrite and (different := differing_settings(left.identity, identity)):
            raise UserError(
                f"{self.directory} keeps {left.counts.read:,} documents that an interrupted start read with other "
                f"settings ({different}): give those again to go on, or begin anew: --overwrite"
            )
        if any(source.path is None for source in self.sources):
            remove(self.directory)  # standard input and the hub may give other documents now
        columns = READ if self.work.encoder is None else READ + ENCODED
        self.spool = Spool(self.directory, columns, identity)
        self.resumed = self.spool.counts.read
        return self

    def __exit__(self, *error: object) -> None:
        self.spool.close()
        if self.finished or not self.spool.committed:
            shutil.rmtree(self.directory, ignore_errors=True)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read all sources from where an earlier start left off.

        Raises:
            UserError: see `prepare`.
        """
        started, spool = time.perf_counter(), self.spool
        self._check_strict(spool.counts)
        total = sum(map(size_of, self.sources)) or None
        bar: tqdm = tqdm(desc="reading", total=total, unit="B", unit_scale=True, disable=self.bar_disabled, leave=False)
        with bar:
            for result in in_order(self.work, self._unread(bar), self.processes):
                if isinstance(result, SourceEnd):
                    spool.finish(*result)
                    continue
                self._check_strict(result.counts)
                spool.append(*result)
                rate = (spool.counts.read - self.resumed) / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:,.0f} documents/s", refresh=False)
        if spool.committed:
            spool.commit()
        spool.flush()
        self.seconds["reading"] = time.perf_counter() - started

    def _unread(self, bar: tqdm) -> Iterator[tuple[int, RecordBatch] | SourceEnd]:
        """Yield the blocks that no earlier start has read, each with its source's number, and the ends of sources."""
        last_numbers = dict(zip(self.spool.sources, self.spool.numbers, strict=True))
        bytes_before = 0
        for number, source in enumerate(self.sources):
            if number not in self.spool.sha256:
                for block in read_blocks(source):
                    bar.update(bytes_before + source.position - bar.n)
                    if block.number > last_numbers.get(number, -1):
                        yield number, block
                if stamp_of(source) != self.stamps[number]:
                    raise UserError(f"{source.name}: it changed while it was read: run this again")
                yield SourceEnd(number, source.sha256)
            bytes_before += size_of(source)

    def _check_strict(self, counts: RecordCounts) -> None:
        if self.strict and counts.problems:
            problem = counts.problems[0]
            raise UserError(f"{problem.where}: {problem.detail}")

    # --- the output ---------------------------------------------------------------------------------------------------

    def write(self, directory: Path) -> dict[str, Any]:
        """Write all of the output, and return the report."""
        documents = Documents(self.spool, [source.name for source in self.sources])
        removed = documents.remove_duplicates(self.settings.deduplicate) + documents.remove_contaminated()
        if self.settings.deduplicate or self.settings.decontaminate:
            with open(directory / "removed.jsonl", "w", encoding="utf-8") as file:
                file.writelines(json.dumps(document, ensure_ascii=False) + "\n" for document in removed)
        held_out = choose_validation(documents, self.settings.validation)
        encoder, tokens = self._tokens(documents, held_out, directory / "tokenizer")
        hashes = [self.spool.sha256[number] for number in range(len(self.sources))]
        identity = output_identity(self.sources, hashes, self.spec, self.settings)
        return write_output(directory, documents, tokens, encoder, held_out, identity, self.seconds)

    def _tokens(
        self, documents: Documents, held_out: npt.NDArray[np.bool_], saved: Path
    ) -> tuple[DocumentEncoder, Spool]:
        """Return the encoder, and the spool with the columns `ENCODED`; save the tokenizer."""
        started = time.perf_counter()
        if self.work.encoder is not None:
            assert self.tokenizer is not None
            self.tokenizer.save_pretrained(str(saved))
            self.seconds["tokenizer"] = time.perf_counter() - started
            return self.work.encoder, self.spool
        trained = self._train(documents, held_out)
        shutil.copytree(trained, saved)
        encoder = DocumentEncoder(load_tokenizer(trained), self.settings.sentences)
        self.seconds["tokenizer"] = time.perf_counter() - started
        encoded = self._encode(documents, encoder, TokenizerSpec(directory=trained).fingerprint())
        self.seconds["encoding"] = time.perf_counter() - started - self.seconds["tokenizer"]
        return encoder, encoded

    def _train(self, documents: Documents, held_out: npt.NDArray[np.bool_]) -> Path:
        """Train the tokenizer on the training documents, unless an earlier start has; return its directory."""
        self.spool.commit()
        trained, unfinished = self.directory / "tokenizer", self.directory / "tokenizer.new"
        if not trained.exists():
            remove(unfinished)
            chosen = documents.sample(~held_out, self.settings.tokenizer_documents)
            tokenizer = self.spec.train(
                lambda: iter(self._bar(documents.texts(chosen), "training the tokenizer", " documents", chosen.sum()))
            )
            tokenizer.save_pretrained(str(unfinished))
            sync(unfinished)
            os.replace(unfinished, trained)
        return trained

    def _encode(self, documents: Documents, encoder: DocumentEncoder, fingerprint: str) -> Spool:
        """Tokenize all documents, from where an earlier start left off; return the spool with the columns `ENCODED`."""
        encoded = Spool(self.directory / "encoded", ENCODED, {"tokenizer": fingerprint})
        with contextlib.closing(encoded):
            missing = range(len(encoded), len(self.spool))
            items = map(documents.packed_texts, self._bar(missing, "encoding", " blocks", len(missing)))
            for entry, columns in zip(missing, in_order(Encoding(encoder), items, self.processes), strict=True):
                encoded.append(0, entry, columns)
            encoded.flush()
        return encoded

    def _bar(self, items: Iterable[Item], purpose: str, unit: str, total: int) -> Iterable[Item]:
        bar: tqdm = tqdm(items, purpose, int(total), unit=unit, disable=self.bar_disabled, leave=False)
        return bar
