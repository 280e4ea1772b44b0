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
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from zero_tp.data.collection import Documents, choose_validation, counted, told_of_dropped
from zero_tp.data.documents import find_sources
from zero_tp.data.indexed import IndexedWriter, token_dtype
from zero_tp.data.pool import in_order, usable_cores
from zero_tp.data.records import Block
from zero_tp.data.settings import (
    FORMAT,
    REPORT,
    Prepared,
    PrepareSettings,
    check_settings,
    existing,
    identity_of,
    library_versions,
    memories,
    size_of,
    stamp_of,
)
from zero_tp.data.show import REMOVED, SPLITS
from zero_tp.data.similarity import EvaluationSets
from zero_tp.data.sources import Source, file_sha256
from zero_tp.data.spool import Spool
from zero_tp.data.tokenizer import DocumentEncoder, TokenizerSpec, load_tokenizer
from zero_tp.data.work import ENCODED, READ, Encoding, Reading
from zero_tp.errors import UserError
from zero_tp.files import (
    clear_partial,
    hidden_beside,
    partial_directory,
    put_in_place,
    remove,
    sync,
)

OWN_DIRECTORIES = ("tokenizer",)
_SMALL = 4 << 20  # bytes of inputs that are read before other processes have started
_CHANGED = "it changed while it was read: run this again"


def prepare(
    inputs: Sequence[str | Path],
    output: Path,
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
        overwrite: replace an output of other inputs or settings.
        strict: stop at the first record that is no document, instead of counting it.
        processes: that read and tokenise; None: one a core.
        shard: (i, n): do the i-th of n parts of the work, i from 0, into `shard_path`; other processes or machines that
            see the same inputs do the others.
        merge: put together what n shards made, which is what one process would have.
        progress: show progress bars when stderr is a terminal.

    Raises:
        UserError: bad input, bad settings, or an output that is something else.
    """
    spec = TokenizerSpec.parse(settings.tokenizer)
    check_settings(settings)
    sources = find_sources(inputs, settings.text_key, settings.documents, settings.stdin)
    if processes is not None and processes < 1:
        raise UserError(f"processes {processes}: at least 1")
    if shard is not None and merge:
        raise UserError("a shard is prepared or the shards are merged: give --shard or --merge")
    shards = _shards(output) if merge else []
    if shard is not None:
        return _prepare_shard(sources, output, spec, settings, overwrite, strict, processes, shard, progress)
    reading = hidden_beside(output, "progress")
    try:
        if (reused := existing(output, sources, spec, settings, overwrite)) is not None:
            clear_partial(output, OWN_DIRECTORIES)
            if not hidden_beside(output, "partial").exists():  # nobody writes there
                shutil.rmtree(reading, ignore_errors=True)
            return reused
        with (
            partial_directory(output, OWN_DIRECTORIES) as partial,
            _Preparation(sources, spec, settings, reading, strict, processes, progress) as preparation,
        ):
            if shards:
                preparation.take(shards)
            else:
                preparation.read()
            report = preparation.write(partial)
            put_in_place(partial, output)
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
    reading = hidden_beside(path, "progress")
    try:
        with (
            partial_directory(path),
            _Preparation(sources, spec, settings, reading, strict, processes, progress, shard) as preparation,
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


class _Preparation:
    """A preparation reads its inputs into a spool, and makes the output of it.

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
        strict: bool,
        processes: int | None,
        progress: bool,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self.shard = shard
        self.sources, self.spec, self.settings, self.directory, self.strict = sources, spec, settings, directory, strict
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

    def __enter__(self) -> _Preparation:
        if any(source.path is None for source in self.sources):
            remove(self.directory)  # what comes from elsewhere may be something else now
        identity = {
            "format": FORMAT,
            "inputs": [[source.name, *stamp] for source, stamp in zip(self.sources, self.stamps, strict=True)],
            "settings": self.settings.of_documents(),
            "tokenizer": self.spec.fingerprint(),
            "versions": library_versions(),
            "shard": list(self.shard),
            # A tokenizer is trained on what is not held out.
            **({"validation": self.settings.validation} if self.spec.directory is None else {}),
        }
        columns = READ if self.work.encoder is None else READ + ENCODED
        self.spool = Spool(self.directory, columns, identity)
        self.spools = [self.spool]
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
        i, n = self.shard
        whole = len(self.sources) >= 4 * n  # a shard reads its files alone
        total = sum(map(size_of, self.sources)) or None
        bar: tqdm = tqdm(desc="reading", total=total, unit="B", unit_scale=True, disable=self.bar_disabled, leave=False)

        def blocks() -> Iterator[tuple[int, Block]]:
            before = 0
            for number, source in enumerate(self.sources):
                if number not in spool.done and (not whole or number % n == i):
                    for block in source.blocks():
                        bar.update(before + source.position - bar.n)
                        if block.number > reached.get(number, -1) and (whole or block.number % n == i):
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

    def take(self, shards: Sequence[Spool]) -> None:
        """Take what shards have read instead.

        Raises:
            UserError: they are of other inputs or settings, or saw other bytes in the same file.
        """
        self.spools, self.seconds["reading"] = list(shards), 0.0
        for number, spool in enumerate(shards):
            for key, value in spool.identity.items() if spool.identity else [("journal", None)]:
                mine = [number, len(shards)] if key == "shard" else self.spool.identity.get(key)
                if mine != value:
                    raise UserError(f"{spool.directory}: made with another {key}: prepare this shard again")
            for source, about in spool.done.items():
                if self.done.setdefault(source, about) != about:
                    raise UserError(f"{self.sources[source].name} was another file where {spool.directory} was made")
        assert len(self.done) == len(self.sources)

    @property
    def done(self) -> dict[int, dict[str, Any]]:
        """Return what is known of each source."""
        return self.spool.done

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
        spools = self.spools
        documents = Documents(spools, [source.name for source in self.sources])
        removed = documents.remove_duplicates(self.settings.deduplicate) + documents.remove_contaminated()
        if self.settings.deduplicate or self.settings.decontaminate:
            with open(directory / REMOVED, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in removed)
        if not len(documents):
            names = ", ".join(source.name for source in self.sources)
            raise UserError(f"no text in {names}{told_of_dropped(spools)}")
        held_out = choose_validation(documents, self.settings.validation, told_of_dropped(spools))
        trained = time.perf_counter()
        encoder, tokens = self._tokens(documents, held_out, directory / "tokenizer")
        encoded = time.perf_counter()
        counts, splits = _assemble(documents, tokens, encoder, held_out, directory)
        finished = time.perf_counter()
        self.seconds["tokenizer"] = self.seconds.get("tokenizer", encoded - trained)
        self.seconds["encoding"] = self.seconds.get("encoding", 0.0) + finished - encoded
        encoding = self.seconds["reading"] if self.work.encoder is not None else 0.0
        hashes = [self.done[number]["sha256"] for number in range(len(self.sources))]
        total = sum(figures["tokens"] for figures in splits.values())
        report = {
            "identity": identity_of(self.sources, hashes, self.spec, self.settings),
            "inputs": [source.name for source in self.sources],
            "documents": counted(spools, documents),
            "splits": splits,
            "vocabulary_size": encoder.vocabulary_size,
            "unigram": _unigram(counts["train"], counts["validation"]),
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "tokens_per_second": round(total / (encoding + self.seconds["encoding"])),
            "versions": library_versions(),
        }
        report["files"] = {
            str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path not in memories(directory)
        }
        (directory / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        return report

    def _tokens(
        self, documents: Documents, held_out: npt.NDArray[np.bool_], saved: Path
    ) -> tuple[DocumentEncoder, Callable[[int, str], bytes]]:
        """Return the encoder, and what gives a column of `ENCODED` of an entry. The tokenizer is trained on the
        training documents if it has to be, and saved."""
        if self.work.encoder is not None:
            assert self.tokenizer is not None
            self.tokenizer.save_pretrained(str(saved))
            return self.work.encoder, documents.part
        started, trained, tokenizer = time.perf_counter(), self.directory / "tokenizer", None
        self.spool.commit()
        if not trained.exists():
            between = self.directory / "tokenizer.new"
            remove(between)
            which = documents.drawn(~held_out, self.settings.tokenizer_documents)
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
            begun = range(len(encoded), len(documents.entries))
            items = (documents.item(entry) for entry in tqdm(
                begun, "encoding", unit=" blocks", disable=self.bar_disabled, leave=False))  # fmt: skip
            for entry, columns in zip(begun, in_order(Encoding(encoder), items, self.processes), strict=True):
                encoded.append(0, entry, columns)
            encoded.flush()
        finally:
            encoded.close()
        self.seconds["encoding"] = time.perf_counter() - started - self.seconds["tokenizer"]
        return encoder, encoded.part


def _assemble(
    documents: Documents,
    part: Callable[[int, str], bytes],
    encoder: DocumentEncoder,
    held_out: npt.NDArray[np.bool_],
    directory: Path,
) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, dict[str, int]]]:
    """Write both corpora and the texts of the documents that are held out."""
    size, dtype = encoder.vocabulary_size, token_dtype(encoder.vocabulary_size)
    counts = {split: np.zeros(size, np.int64) for split in SPLITS}
    splits = {split: dict.fromkeys(("documents", "tokens", "characters", "bytes"), 0) for split in SPLITS}
    with ExitStack() as stack:
        writers = {split: stack.enter_context(IndexedWriter(directory / split, size)) for split in SPLITS}
        texts_out = stack.enter_context(open(directory / "validation.jsonl", "w", encoding="utf-8"))
        for entry in range(len(documents.entries)):
            here = documents.of(entry)
            sizes, ids = np.frombuffer(part(entry, "sizes"), np.int64), np.frombuffer(part(entry, "tokens"), dtype)
            begins = np.frombuffer(part(entry, "sentences"), np.bool_) if encoder.language is not None else None
            of_document = np.repeat(held_out[here], sizes)
            of_kept = np.repeat(documents.kept[here], sizes)
            for split, out in (("train", False), ("validation", True)):
                chosen = documents.kept[here] & (held_out[here] == out)
                if not chosen.any():
                    continue
                written = of_kept & (of_document == out)
                its = ids[written]
                writers[split].add_documents(its, sizes[chosen], None if begins is None else begins[written])
                counts[split] += np.bincount(its, minlength=size)
                total, about = splits[split], documents.about[here][chosen]
                total["documents"] += len(about)
                total["tokens"] += len(its)
                total["characters"] += int(about["characters"].sum())
                total["bytes"] += int(about["bytes"].sum())
                if split == "validation":
                    for text in documents.stored(entry, chosen):
                        texts_out.write(json.dumps({"text": text.decode("utf-8")}, ensure_ascii=False) + "\n")
    return counts, splits


def _unigram(train: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the loss of a model that knows only token frequencies, nats a token.

    `train_entropy`: the entropy of the training tokens' frequencies. `validation_cross_entropy`: the validation tokens
    under those frequencies, one added to each count so that an unseen token has a probability.
    """
    seen = train[train > 0] / train.sum()
    smoothed = (train + 1) / (train.sum() + len(train))
    return {
        "train_entropy": float(-(seen * np.log(seen)).sum()),
        "validation_cross_entropy": float(-(validation * np.log(smoothed)).sum() / validation.sum()),
        "uniform": math.log(len(train)),
    }
