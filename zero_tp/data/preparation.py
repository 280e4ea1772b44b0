"""A preparation from its inputs to the finished output, in states that follow each other:

1. opened: `__enter__` opens the spool, with the blocks that an interrupted start has read.
2. reading: `read` appends block after block, from the first one that is missing.
3. read: the spool is complete; duplicates are removed and the split is drawn.
4. trained, if no tokenizer was given: `tokenizer/` is in the spool's directory.
5. encoded: the tokens are in the spool, or in `encoded/` below it if the tokenizer was trained.
6. finished: `prepare` has renamed the output that `write` completed; the spool is removed.

A kill in any state loses only what the spools have not committed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from zero_tp.data.collection import Documents, choose_validation, write_output
from zero_tp.data.records import Block
from zero_tp.data.settings import (
    PrepareSettings,
    differing_settings,
    output_identity,
    reading_identity,
    size_of,
    stamp_of,
)
from zero_tp.data.show import REMOVED
from zero_tp.data.similarity import EvaluationSets
from zero_tp.data.sources import Source
from zero_tp.data.spool import Spool
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.data.tokenizer_training import TokenizerSpec
from zero_tp.data.work import ENCODED, READ, DocumentEncoder, Encoding, Reading, in_order, usable_cores
from zero_tp.errors import UserError
from zero_tp.files import remove, sync

_SMALL = 4 << 20  # bytes of inputs that are read before other processes have started
_CHANGED = "it changed while it was read: run this again"


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
        self.ended = set[int]()

    def __enter__(self) -> Preparation:
        identity = reading_identity(self.sources, self.spec, self.settings)
        left = Spool(self.directory)
        if left.committed and not self.overwrite and (otherwise := differing_settings(left.identity, identity)):
            raise UserError(
                f"{self.directory} keeps {left.read:,} documents that an interrupted start read with other settings "
                f"({otherwise}): give those again to go on, or begin anew: --overwrite"
            )
        if any(source.path is None for source in self.sources):
            remove(self.directory)  # what comes from elsewhere may be something else now
        columns = READ if self.work.encoder is None else READ + ENCODED
        self.spool = Spool(self.directory, columns, identity)
        self.resumed = self.spool.read
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
        if self.strict and spool.problems:
            problem = spool.problems[0][-1]
            raise UserError(f"{problem.where}: {problem.detail}")
        reached = dict(zip(spool.sources, spool.numbers, strict=True))
        total = sum(map(size_of, self.sources)) or None
        bar: tqdm = tqdm(desc="reading", total=total, unit="B", unit_scale=True, disable=self.bar_disabled, leave=False)

        def blocks() -> Iterator[tuple[int, Block]]:
            before = 0
            for number, source in enumerate(self.sources):
                if number not in spool.done:
                    for block in source.blocks():
                        bar.update(before + source.position - bar.n)
                        if block.number > reached.get(number, -1):
                            yield number, block
                    self.ended.add(number)
                before += size_of(source)

        with bar:
            at = 0
            for made in in_order(self.work, blocks(), self.processes):
                if self.strict and made.problems:
                    raise UserError(f"{made.problems[0].where}: {made.problems[0].detail}")
                self._ended(range(at, made.source))
                at = made.source
                spool.append(*made)
                rate = (spool.read - self.resumed) / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:,.0f} documents/s", refresh=False)
            self._ended(range(at, len(self.sources)))
        if spool.committed:
            spool.commit()
        spool.flush()
        self.seconds["reading"] = time.perf_counter() - started

    def _ended(self, numbers: range) -> None:
        """Note the ends of sources."""
        for number in numbers:
            if number in self.ended:
                self.ended.remove(number)
                source = self.sources[number]
                if stamp_of(source) != self.stamps[number]:
                    raise UserError(f"{source.name}: {_CHANGED}")
                self.spool.finish(number, {"sha256": source.sha256})

    # --- the output ---------------------------------------------------------------------------------------------------

    def write(self, directory: Path) -> dict[str, Any]:
        """Write all of the output, and return the report."""
        documents = Documents(self.spool, [source.name for source in self.sources])
        removed = documents.remove_duplicates(self.settings.deduplicate) + documents.remove_contaminated()
        if self.settings.deduplicate or self.settings.decontaminate:
            with open(directory / REMOVED, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in removed)
        held_out = choose_validation(documents, self.settings.validation)
        encoder, tokens = self._tokens(documents, held_out, directory / "tokenizer")
        hashes = [self.spool.done[number]["sha256"] for number in range(len(self.sources))]
        identity = output_identity(self.sources, hashes, self.spec, self.settings)
        return write_output(directory, documents, tokens, encoder, held_out, identity, self.seconds)

    def _tokens(
        self, documents: Documents, held_out: npt.NDArray[np.bool_], saved: Path
    ) -> tuple[DocumentEncoder, Spool]:
        """Return the encoder, and the spool with the columns `ENCODED`. The tokenizer is trained on the training
        documents if it has to be, and saved."""
        started = time.perf_counter()
        if self.work.encoder is not None:
            assert self.tokenizer is not None
            self.tokenizer.save_pretrained(str(saved))
            self.seconds["tokenizer"] = time.perf_counter() - started
            return self.work.encoder, self.spool
        trained, tokenizer = self.directory / "tokenizer", None
        self.spool.commit()
        if not trained.exists():
            between = self.directory / "tokenizer.new"
            remove(between)
            which = documents.sample(~held_out, self.settings.tokenizer_documents)
            tokenizer = self.spec.train(lambda: iter(tqdm(
                documents.texts(which), "training the tokenizer", int(which.sum()), unit=" documents",
                disable=self.bar_disabled, leave=False,
            )))  # fmt: skip
            tokenizer.save_pretrained(str(between))
            sync(between)
            os.replace(between, trained)
        shutil.copytree(trained, saved)
        encoder = DocumentEncoder(tokenizer or load_tokenizer(trained), self.settings.sentences)
        self.seconds["tokenizer"] = time.perf_counter() - started
        encoded = Spool(
            self.directory / "encoded", ENCODED, {"tokenizer": TokenizerSpec(directory=trained).fingerprint()}
        )
        try:
            begun = range(len(encoded), len(self.spool))
            items = (documents.item(entry) for entry in tqdm(
                begun, "encoding", unit=" blocks", disable=self.bar_disabled, leave=False))  # fmt: skip
            for entry, columns in zip(begun, in_order(Encoding(encoder), items, self.processes), strict=True):
                encoded.append(0, entry, columns)
            encoded.flush()
        finally:
            encoded.close()
        self.seconds["encoding"] = time.perf_counter() - started - self.seconds["tokenizer"]
        return encoder, encoded
