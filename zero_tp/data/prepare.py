"""`prepare` makes a corpus of text files: it splits by document, tokenises, writes `.bin/.idx`, and reports.

The inputs are read once. What is made of them, block by block, in as many processes as there are cores, goes to a spool
(spool.py) in a hidden directory beside the output: texts, and tokens where the tokenizer is finished. From it a
preparation that was interrupted goes on. Once all is read, the split is drawn, a tokenizer is trained if it has to be,
and the output is put together, which then takes its place at once: it is whole or it isn't there. Memory holds 54 bytes
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from tqdm import tqdm

from zero_tp.data.documents import find_sources
from zero_tp.data.indexed import IndexedWriter, content_path, token_dtype
from zero_tp.data.pool import in_order, usable_cores
from zero_tp.data.records import Block, where
from zero_tp.data.show import REMOVED, SPLITS
from zero_tp.data.similarity import EvaluationSets, exact_duplicates, near_duplicates
from zero_tp.data.sources import COLUMNAR, DOCUMENTS, KINDS, Source, file_sha256
from zero_tp.data.spool import MOST_PROBLEMS, Found, Spool, merged
from zero_tp.data.streams import needed
from zero_tp.data.tokenizer import DocumentEncoder, TokenizerSpec, load_tokenizer
from zero_tp.data.work import DOCUMENT, ENCODED, READ, Encoding, Reading, unpacked
from zero_tp.errors import UserError, shown
from zero_tp.files import (
    InvalidJson,
    clear_partial,
    hidden_beside,
    partial_directory,
    put_in_place,
    read_object,
    remove,
    sync,
)
from zero_tp.validation import Block as Record
from zero_tp.validation import Count, Positive, validate

REPORT = "report.json"
FORMAT = 1  # raised when the same settings would give other files
OWN_DIRECTORIES = ("tokenizer",)
_SMALL = 4 << 20  # bytes of inputs that are read before other processes have started
_CHANGED = "it changed while it was read: run this again"


@dataclass(frozen=True)
class PrepareSettings:
    """These settings and the inputs decide the output.

    Attributes:
        tokenizer: `bpe:SIZE`, `wordpiece:SIZE`, `wordpiece-cased:SIZE` or a directory.
        validation: below 1, the fraction of the documents held out (at least one document); from 1, their number.
        seed: of the split.
        text_key: field of the text, where documents have fields; None: it is found.
        documents: what a document of a .txt file is: the whole "file", a "line", or what a "blank-line" ends.
        stdin: kind of standard input, one of `KINDS`.
        repair: mend Unicode with ftfy.
        min_tokens: drop shorter documents; 0: none.
        deduplicate: drop "exact" copies, or "near" ones too; the first one stays.
        decontaminate: files of evaluation sets: documents that overlap with one are dropped.
        eos: the token that ends documents, of a given tokenizer; None: its own eos token.
        tokenizer_documents: train the tokenizer on so many of the training documents; None: all.
        sentences: split documents into sentences, by the rules of the language of this ISO 639 code.
    """

    tokenizer: str
    validation: float = 0.02
    seed: int = 1234
    text_key: str | None = None
    documents: str = "file"
    stdin: str = "jsonl"
    repair: bool = False
    min_tokens: int = 0
    deduplicate: str | None = None
    decontaminate: tuple[Path, ...] = ()
    sentences: str | None = None
    eos: str | None = None
    tokenizer_documents: int | None = None

    def steps(self) -> dict[str, Any]:
        """Return the steps that are taken beyond reading, tokenising and splitting, those alone."""
        steps = {
            **{"repair": self.repair, "min_tokens": self.min_tokens, "deduplicate": self.deduplicate},
            "decontaminate": [file_sha256(path) for path in self.decontaminate],
            "sentences": self.sentences,
            **{"eos": self.eos, "tokenizer_documents": self.tokenizer_documents},
        }
        return {name: value for name, value in steps.items() if value}

    def of_documents(self) -> dict[str, Any]:
        """Return the settings that decide what is made of each document by itself."""
        return {"seed": self.seed, "text_key": self.text_key, "documents": self.documents, **self.steps()}


@dataclass(frozen=True)
class Prepared:
    """This is what `prepare` returns.

    Attributes:
        report: the content of report.json.
        reused: the output was there already.
        compared: what of its files was then compared: their "content", or their "sizes" where an earlier version made
            it and recorded nothing else.
        resumed: documents that an earlier start, which was interrupted, had read.
    """

    output: Path
    report: dict[str, Any]
    reused: bool
    compared: str = "content"
    resumed: int = 0


class PreparedFile(Record):
    bytes: Count
    sha256: str


class Split(Record):
    documents: Positive
    tokens: Positive
    characters: Positive
    bytes: Positive


class Splits(Record):
    train: Split
    validation: Split


class Unigram(Record):
    train_entropy: float
    validation_cross_entropy: float
    uniform: float


class DroppedDocument(Record):
    where: str
    reason: str
    detail: str


class Counted(Record):
    """read = kept + the sum of dropped, by reason; the first problems are told."""

    read: Count
    kept: Count
    dropped: dict[str, Positive]
    problems: list[DroppedDocument]


class Report(Record):
    """This is report.json."""

    identity: dict[str, Any]
    inputs: list[str]
    documents: Counted | None = Field(None, description="None: of an earlier version.")
    splits: Splits
    vocabulary_size: Positive
    unigram: Unigram
    seconds: dict[str, float]
    tokens_per_second: float
    versions: dict[str, str]
    files: dict[str, PreparedFile | Count] = Field(description="By path. A size alone is of an earlier version.")


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
    _check_settings(settings)
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
        if (reused := _existing(output, sources, spec, settings, overwrite)) is not None:
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


def _identity(
    sources: Sequence[Source], hashes: Sequence[str], spec: TokenizerSpec, settings: PrepareSettings
) -> dict[str, Any]:
    """Return what decides the output. What is as by default and was not always there is left out."""
    inputs = [
        {"kind": source.kind, "name": source.name} if source.kind == "hub" else {"kind": source.kind, "sha256": sha256}
        for source, sha256 in zip(sources, hashes, strict=True)
    ]
    return {
        "format": FORMAT,
        "inputs": inputs,
        "tokenizer": spec.fingerprint(),
        "validation": settings.validation,
        "seed": settings.seed,
        "text_key": settings.text_key or "text",
        **({"documents": settings.documents} if settings.documents != "file" else {}),
        **settings.steps(),
    }


def _memories(directory: Path) -> list[Path]:
    """Return the files that may differ between two equal outputs: they hold times."""
    return [content_path(directory / split) for split in SPLITS]


def _check_settings(settings: PrepareSettings) -> None:
    if not 0 <= settings.seed < 1 << 64:
        raise UserError(f"seed {settings.seed}: from 0 to 2^64 - 1")
    if settings.documents not in DOCUMENTS:
        raise UserError(f"documents {settings.documents!r}: one of {', '.join(DOCUMENTS)}")
    if settings.stdin not in KINDS.values() or settings.stdin in COLUMNAR:
        raise UserError(f"standard input of kind {settings.stdin!r}: one of jsonl, json, txt, csv")
    if settings.deduplicate not in (None, "exact", "near"):
        raise UserError(f"deduplicate {settings.deduplicate!r}: exact or near")
    if settings.min_tokens and TokenizerSpec.parse(settings.tokenizer).directory is None:
        raise UserError(
            f"min_tokens {settings.min_tokens} counts the tokens of a finished tokenizer: prepare without it first, "
            "and then give that output's tokenizer directory"
        )
    if settings.min_tokens < 0:
        raise UserError(f"min_tokens {settings.min_tokens}: at least 0")
    validation = settings.validation
    whole = validation >= 1 and float(validation).is_integer()
    if not whole and not 0 < validation < 1:
        raise UserError(f"validation {validation:g}: a fraction between 0 and 1, or a whole number of documents from 1")
    trained = TokenizerSpec.parse(settings.tokenizer).directory is None
    if settings.eos is not None and trained:
        raise UserError(f"eos {settings.eos!r}: {settings.tokenizer} has its own; it is for a given tokenizer")
    if settings.tokenizer_documents is not None and (not trained or settings.tokenizer_documents < 1):
        raise UserError(
            f"tokenizer_documents {settings.tokenizer_documents}: at least 1, for a tokenizer that is trained"
        )
    if settings.sentences is not None:
        if not re.fullmatch("[a-z]{2,3}", settings.sentences):
            raise UserError(f"language {settings.sentences!r}: its ISO 639 code is needed, such as en")
        needed("sentencex", "splitting sentences")


def _existing(
    output: Path, sources: Sequence[Source], spec: TokenizerSpec, settings: PrepareSettings, overwrite: bool
) -> Prepared | None:
    """Return an output made from the same inputs and settings; None when there is nothing to reuse."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not overwrite and any(source.kind != "hub" and source.path is None for source in sources):
        raise UserError(
            f"{output} exists, and standard input can't be compared with what it was made from: --overwrite"
        )
    hashes = [file_sha256(source.path) if source.path is not None else "" for source in sources]
    identity = _identity(sources, hashes, spec, settings)
    try:
        raw = read_object(output / REPORT)
        report = validate(Report, raw, str(output / REPORT))
    except (OSError, InvalidJson, UserError) as error:
        if isinstance(error, UserError) and overwrite and {"identity", "files"} <= raw.keys():
            return None
        why = f"{REPORT}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise UserError(
            f"{output} exists and is not the output of this command: choose another --output ({why})"
        ) from None
    if overwrite and report.identity != identity:
        return None
    if report.identity != identity:
        changed = ", ".join(key for key in identity if report.identity.get(key) != identity[key]) or "settings"
        raise UserError(
            f"{output} was made with another {changed}: choose another --output, or replace it: --overwrite"
        )
    sizes_alone = False
    for name, recorded in report.files.items():
        expected = recorded if isinstance(recorded, PreparedFile) else PreparedFile(bytes=recorded, sha256="")
        sizes_alone |= not expected.sha256
        if problem := _difference(output, name, expected):
            if overwrite:
                return None
            raise UserError(f"{output / name} {problem}: make the corpus again with --overwrite")
    missing = {f"{split}.{ending}" for split in SPLITS for ending in ("bin", "idx")} - report.files.keys()
    if missing and not overwrite:
        raise UserError(f"{output / REPORT} names no {min(missing)}: make the corpus again with --overwrite")
    return None if missing else Prepared(output, raw, reused=True, compared="sizes" if sizes_alone else "content")


def _difference(output: Path, name: str, expected: PreparedFile) -> str | None:
    """Return what is wrong with a file of an output, or None."""
    path = output / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return f"is named by {REPORT}, but lies elsewhere"
    actual = path.stat().st_size if path.is_file() else None
    if actual is None:
        return "is missing"
    if actual != expected.bytes:
        return f"has {actual:,} bytes instead of {expected.bytes:,}"
    if expected.sha256 and (found := file_sha256(path)) != expected.sha256:
        return f"has SHA-256 {found[:12]}… instead of {shown(expected.sha256)[1:13]}…"
    return None


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
        self.stamps = [_stamp(source) for source in sources]
        small = all(source.path is not None for source in sources) and sum(map(_size, sources)) < _SMALL
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
            "versions": _versions(),
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
        total = sum(map(_size, self.sources)) or None
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
                before += _size(source)

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
                if _stamp(source) != self.stamps[number]:
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
            raise UserError(f"no text in {names}{_dropped(spools)}")
        held_out = _choose_validation(documents, self.settings.validation, _dropped(spools))
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
            "identity": _identity(self.sources, hashes, self.spec, self.settings),
            "inputs": [source.name for source in self.sources],
            "documents": _counted(spools, documents),
            "splits": splits,
            "vocabulary_size": encoder.vocabulary_size,
            "unigram": _unigram(counts["train"], counts["validation"]),
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "tokens_per_second": round(total / (encoding + self.seconds["encoding"])),
            "versions": _versions(),
        }
        report["files"] = {
            str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path not in _memories(directory)
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


class Documents:
    """These are the documents of some spools, in the order of the inputs.

    Memory: 54 bytes a document, and while near duplicates are looked for about 1.5 KB for each that is kept.

    Attributes:
        entries: (spool, its entry) of each block.
        about: of each document (`DOCUMENT`).
        kept: which of them are in the output. dropped: how many are not, by reason.
        names: of the sources.
    """

    def __init__(self, spools: Sequence[Spool], names: Sequence[str]) -> None:
        self.entries, self.names, self.dropped = list(merged(spools)), names, Counter[str]()
        parts = [np.frombuffer(spool.part(entry, "documents"), DOCUMENT) for spool, entry in self.entries]
        self.about = np.concatenate([np.zeros(0, DOCUMENT), *parts])
        self.firsts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        self.kept = np.ones(len(self.about), np.bool_)

    def __len__(self) -> int:
        """Return how many are kept."""
        return int(self.kept.sum())

    def of(self, entry: int) -> slice:
        """Return which documents an entry holds."""
        return slice(int(self.firsts[entry]), int(self.firsts[entry + 1]))

    def part(self, entry: int, column: str) -> bytes:
        """Return the bytes of a column that belong to an entry."""
        spool, its = self.entries[entry]
        return spool.part(its, column)

    def item(self, entry: int) -> tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the packed texts of an entry, their lengths, and which are kept."""
        return self.part(entry, "texts"), self.about["bytes"][self.of(entry)], self.kept[self.of(entry)]

    def stored(self, entry: int, which: npt.NDArray[np.bool_]) -> list[bytes]:
        """Return the texts of those documents of an entry that `which` says, in UTF-8."""
        if not which.any():
            return []
        texts = unpacked(self.part(entry, "texts"), self.about["bytes"][self.of(entry)])
        return [text for text, wanted in zip(texts, which, strict=True) if wanted]

    def where(self, number: int) -> str:
        """Return the place of a document in the inputs."""
        spool, entry = self.entries[int(np.searchsorted(self.firsts, number, side="right")) - 1]
        return where(self.names[spool.sources[entry]], int(self.about["place"][number]))

    def remove_duplicates(self, kind: str | None) -> list[dict[str, Any]]:
        """Leave out copies, and near ones too where `kind` is "near" → what was removed, and what it is a copy of."""
        removed = list[dict[str, Any]]()
        if kind is None:
            return removed
        firsts = exact_duplicates(self.about["content"].copy())
        for number in np.flatnonzero(firsts != np.arange(len(firsts))).tolist():
            removed.append(self._removed(number, "duplicate", int(firsts[number])))
        if kind == "near":
            for near in near_duplicates(self._sketches(), self._sketch):
                removed.append(self._removed(near.document, "near-duplicate", near.earlier, near.similarity))
        return removed

    def remove_contaminated(self) -> list[dict[str, Any]]:
        """Leave out documents that overlap with an evaluation set → what was removed."""
        found = np.flatnonzero(self.kept & self.about["contaminated"]).tolist()
        return [self._removed(number, "contaminated") for number in found]

    def _removed(
        self, number: int, reason: str, earlier: int | None = None, similarity: float | None = None
    ) -> dict[str, Any]:
        self.kept[number] = False
        self.dropped[reason] += 1
        of = {} if earlier is None else {"copy_of": self.where(earlier)}
        return {
            "removed": self.where(number),
            "reason": reason,
            **of,
            **({"similarity": similarity} if similarity else {}),
        }

    def _sketches(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the sketch of each document that is kept."""
        for entry in range(len(self.entries)):
            here, data, at = self.of(entry), self.part(entry, "sketches"), 0
            for number, length in zip(range(here.start, here.stop), self.about["sketch"][here].tolist(), strict=True):
                if self.kept[number]:
                    yield number, data[at : at + length]
                at += length

    def _sketch(self, number: int) -> bytes:
        entry = int(np.searchsorted(self.firsts, number, side="right")) - 1
        at = int(self.about["sketch"][self.firsts[entry] : number].sum())
        return self.part(entry, "sketches")[at : at + int(self.about["sketch"][number])]

    def drawn(self, which: npt.NDArray[np.bool_], most: int | None) -> npt.NDArray[np.bool_]:
        """Return `most` of those kept documents that `which` says, bool [documents]: those with the largest hashes, so
        that their order plays no part. None: all."""
        numbers = np.flatnonzero(which & self.kept)
        if most is not None and most < len(numbers):
            order = np.argsort(self.about["split"][numbers], kind="stable")
            numbers = numbers[order[-most:]]
        found = np.zeros(len(which), np.bool_)
        found[numbers] = True
        return found

    def texts(self, which: npt.NDArray[np.bool_]) -> Iterator[str]:
        """Yield the kept texts that `which`, bool [documents], says."""
        for entry in range(len(self.entries)):
            here = self.of(entry)
            yield from (text.decode("utf-8") for text in self.stored(entry, which[here] & self.kept[here]))


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


def _counted(spools: Sequence[Spool], documents: Documents) -> dict[str, Any]:
    """Return how many documents there were, how many are kept, and why the others are not."""
    dropped = sum((spool.dropped for spool in spools), documents.dropped)
    read = sum(spool.read for spool in spools)
    problems = [problem._asdict() for problem in _problems(spools)]
    counted = {"read": read, "kept": len(documents), "dropped": dict(sorted(dropped.items())), "problems": problems}
    assert read == len(documents) + dropped.total(), counted
    return counted


def _problems(spools: Sequence[Spool]) -> list[Found]:
    """Return the first problems, in the order of the inputs."""
    found = sorted((each for spool in spools for each in spool.problems), key=lambda each: each[:2])
    return [problem for _, _, problem in found][:MOST_PROBLEMS]


def _dropped(spools: Sequence[Spool]) -> str:
    """Return what a message adds where documents were dropped."""
    count, problems = sum(spool.dropped.total() for spool in spools), _problems(spools)
    return f" ({count:,} dropped, the first: {problems[0].where}: {problems[0].detail})" if problems else ""


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("tokenizers", "transformers")}


def _stamp(source: Source) -> tuple[int, int]:
    """Return what differs once a file was written to."""
    try:
        status = source.path.stat() if source.path is not None else None
    except OSError as error:
        raise UserError(f"{source.name}: {error.strerror or error}") from error
    return (status.st_size, status.st_mtime_ns) if status is not None else (0, 0)


def _size(source: Source) -> int:
    return _stamp(source)[0]


def _choose_validation(documents: Documents, validation: float, dropped: str) -> npt.NDArray[np.bool_]:
    """Return which documents are held out: those of the kept with the smallest hashes, bool [documents].

    Equal documents have equal hashes, so they are on the same side. A new document moves at most a few others across.
    """
    hashes = documents.about["split"][documents.kept]
    chosen = _smallest(hashes, validation, dropped)
    held_out = np.zeros(len(documents.kept), np.bool_)
    held_out[documents.kept] = chosen
    return held_out


def _smallest(hashes: npt.NDArray[np.uint64], validation: float, dropped: str) -> npt.NDArray[np.bool_]:
    documents = len(hashes)
    count = int(validation) if validation >= 1 else max(1, round(validation * documents))
    if documents < 2:
        raise UserError(
            "the inputs hold 1 document: the split is by document, so give at least 2 (a .txt file is one, unless "
            f"--documents says otherwise){dropped}"
        )
    if count >= documents:
        raise UserError(f"validation {validation:g} of {documents:,} documents leaves none to train on")
    held_out: npt.NDArray[np.bool_] = hashes <= np.partition(hashes, count - 1)[count - 1]
    if held_out.all():
        raise UserError(f"all {documents:,} documents outside the validation set are copies of documents in it")
    return held_out


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
