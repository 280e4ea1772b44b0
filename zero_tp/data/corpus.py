"""`prepare` makes a corpus of text files. Its stages, in the order of this module:

1. `Preparation.read`: the inputs are read once, block by block, in as many processes as there are cores. Each process
   checks, repairs, hashes and (with a finished tokenizer) tokenizes documents. The results go to a `Spool`.
2. `Preparation.select`: duplicates and contaminated documents are removed, and the validation set is drawn.
3. `Preparation.encode`: a tokenizer is trained, unless it was given, and then the documents are tokenized.
4. `write_output`: both corpora, the validation texts and the report; then the output takes its place.

Spools and the trained tokenizer are in a hidden directory beside the output, from which an interrupted preparation
resumes: a kill loses only what no spool has committed. Memory holds 53 bytes a document, a few blocks of 1 MiB a
process (or one document if that is longer), and nothing of the corpus itself.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, islice, starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard
from tqdm import tqdm

from zero_tp.data.content import REPORT
from zero_tp.data.documents import find_sources
from zero_tp.data.encoder import DocumentEncoder
from zero_tp.data.formats import needed
from zero_tp.data.indexed import IndexedWriter, token_dtype
from zero_tp.data.records import Document, DroppedRecord, Problem, RecordBatch, RecordCounts, Source, where
from zero_tp.data.settings import (
    Prepared,
    PrepareSettings,
    check_settings,
    describe_files,
    differing_settings,
    find_reusable,
    library_versions,
    output_identity,
    reading_identity,
    size_of,
    stamp_of,
)
from zero_tp.data.show import SPLITS
from zero_tp.data.similarity import EvaluationSets, exact_duplicates, near_duplicates, sketches
from zero_tp.data.sources import file_sha256, read_blocks
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.data.tokenizer_training import TokenizerSpec
from zero_tp.errors import UserError
from zero_tp.files import clear_partial, hidden_sibling, partial_directory, put_in_place, remove, sync, write_atomically

Result = TypeVar("Result")
Mask = npt.NDArray[np.bool_]
TOKENIZER = "tokenizer"
COMMIT_SECONDS = 5.0
"""A kill loses at most this much work."""
_ITEMS_AHEAD = 3  # of each process: they are read and not yet done
_SMALL = 4 << 20  # bytes of inputs that are read before other processes have started
DOCUMENT = np.dtype(
    [
        *(("split", "<u8"), ("place", "<i8"), ("characters", "<i8"), ("bytes", "<i8")),
        *(("content", "V16"), ("sketch", "<i4"), ("contaminated", "?")),
    ]
)
"""What is stored of each document: 64 bits by which the split is drawn, its place in the input, its sizes, 128 bits of
its content if duplicates are removed, the bytes of its sketch, and whether it overlaps with an evaluation set."""
BLOCKS, COMMITTED = "blocks", "committed"
COLUMNS = ("documents", "texts", "sketches", "sizes", "tokens", "sentences")
"""What is stored of a block: its documents (`DOCUMENT`), their compressed texts and their sketches; once they are
tokenized the tokens of each (int64), all tokens, and whether a sentence begins with each token (bool)."""


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
    directory = hidden_sibling(place, "progress")

    def current_identity() -> dict[str, Any]:
        hashes = [file_sha256(source.path) if source.path is not None else "" for source in sources]
        return output_identity(sources, hashes, spec, settings)

    with errors_named(output, directory):
        reading = reading_identity(sources, spec, settings)
        if (reused := find_reusable(output, current_identity, overwrite)) is not None:
            clear_partial(place, (TOKENIZER,))
            is_being_written = hidden_sibling(place, "partial").exists()
            if not is_being_written and Spool(directory).identity in (None, reading):
                shutil.rmtree(directory, ignore_errors=True)
            return reused
        # Standard input and the hub may give other documents at another start.
        can_resume = all(source.path is not None for source in sources)
        with (
            partial_directory(place, (TOKENIZER,)) as written,
            _open_spool(directory, reading, overwrite, can_resume) as spool,
        ):
            resumed = spool.counts.read
            preparation = Preparation(sources, spec, settings, spool, strict, processes, progress)
            preparation.read()
            documents = preparation.select(written)
            encoder, tokens = preparation.encode(documents, written / TOKENIZER)
            hashes = [spool.sha256[number] for number in range(len(sources))]
            identity = output_identity(sources, hashes, spec, settings)
            report = write_output(written, documents, tokens, encoder, identity, preparation.seconds)
            put_in_place(written, place)
            (directory / COMMITTED).unlink(missing_ok=True)  # the spool is of no more use
    return Prepared(output, report, reused=False, resumed=resumed)


@contextlib.contextmanager
def errors_named(output: Path, directory: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a UserError that names the output; `directory` may keep what was read."""
    try:
        yield
    except OSError as error:
        can_resume = error.errno == errno.ENOSPC and directory is not None and directory.exists()
        remedy = "; what was read is kept: make room, and start the same command again to go on" if can_resume else ""
        raise UserError(f"{output}: can't be written: {error.strerror or error}{remedy}") from error


@contextlib.contextmanager
def _open_spool(directory: Path, identity: dict[str, Any], overwrite: bool, can_resume: bool) -> Iterator[Spool]:
    """Open the spool in `directory`, with what an interrupted start has read; see `prepare`."""
    spool = Spool(directory)
    if spool.identity and not overwrite and (different := differing_settings(spool.identity, identity)):
        raise UserError(
            f"{directory} keeps {spool.counts.read:,} documents that an interrupted start read with other settings "
            f"({different}): give those again to go on, or start over: --overwrite"
        )
    if spool.identity != identity or not can_resume:
        remove(directory)
        spool = Spool(directory)
    try:
        yield spool.open(identity)
    finally:
        spool.close()
        if not (directory / COMMITTED).exists():
            shutil.rmtree(directory, ignore_errors=True)


# --- the work on one block, in several processes ----------------------------------------------------------------------


class ProcessedBlock(NamedTuple):
    """What is stored of a block of a source: its columns, and the counts of its records.

    Attributes:
        sha256: of the source, in a last block without records that says that the source has been read to its end.
    """

    source: int
    number: int
    sha256: str | None
    columns: dict[str, bytes]
    counts: RecordCounts


@dataclass(frozen=True)
class Reading:
    """Processes a block of records, with tokens if the tokenizer is finished.

    Attributes:
        seed: of the split.
        repair: mend Unicode with ftfy.
        min_tokens: shorter documents are dropped; their end is not counted.
        deduplicate: None, "exact" or "near": what is needed to find duplicates.
        sets: the evaluation sets that documents must not overlap with.
    """

    seed: int
    encoder: DocumentEncoder | None = None
    repair: bool = False
    min_tokens: int = 0
    deduplicate: str | None = None
    sets: EvaluationSets | None = None

    def __call__(self, source: int, block: RecordBatch, sha256: str | None = None) -> ProcessedBlock:
        counts, documents, places = RecordCounts(), list[Document](), list[int]()
        for place, document in block.documents():
            counts.read += 1
            if isinstance(document, Problem):
                counts.drop(where(block.source, place), *document)
            elif not document.text.strip():
                counts.drop(where(block.source, place), "empty", "an empty document")
            else:
                documents.append(self._repair(document))
                places.append(place)
        columns = {}
        if self.encoder is not None:
            encodings = self.encoder.encode([document.text for document in documents])
            long = [len(ids) - self.encoder.ends >= self.min_tokens for ids, _ in encodings]
            if short := long.count(False):
                counts.dropped["short"] += short
            documents, places = list(compress(documents, long)), list(compress(places, long))
            columns = self.encoder.columns(list(compress(encodings, long)))
        texts = [document.text.encode("utf-8") for document in documents]
        sketched = sketches([document.text for document in documents]) if self.deduplicate == "near" else []
        described = self._describe(documents, texts, places)
        described["sketch"] = [len(sketch) for sketch in sketched] if sketched else 0
        columns |= {"documents": described.tobytes(), "sketches": b"".join(sketched)}
        columns["texts"] = zstandard.compress(b"".join(texts), 1)
        return ProcessedBlock(source, block.number, sha256, columns, counts)

    def _repair(self, document: Document) -> Document:
        if not self.repair:
            return document
        fix: Callable[[str], str] = needed("ftfy", "--repair-unicode").fix_text
        return Document(fix(document.text), document.title)

    def _describe(
        self, documents: Sequence[Document], texts: Sequence[bytes], places: Sequence[int]
    ) -> npt.NDArray[Any]:
        described, key = np.zeros(len(documents), DOCUMENT), self.seed.to_bytes(8, "little")
        hashes = b"".join(hashlib.blake2b(text, digest_size=8, key=key).digest() for text in texts)
        described["split"] = np.frombuffer(hashes, "<u8")
        described["place"] = places
        described["characters"] = [len(document.text) for document in documents]
        described["bytes"] = [len(text) for text in texts]
        if self.deduplicate is not None:
            contents = b"".join(hashlib.blake2b(text, digest_size=16).digest() for text in texts)
            described["content"] = np.frombuffer(contents, "V16")
        if self.sets is not None:
            described["contaminated"] = [self.sets.has(document) for document in documents]
        return described


_work: Callable[..., Any]
"""The work of this worker process: concurrent.futures has no other place where an initializer can leave it."""


def in_order(work: Callable[..., Result], items: Iterable[tuple[Any, ...]], processes: int) -> Iterator[Result]:
    """Yield `work(*item)` for each item, in order; with one process all is done in this one.

    Args:
        work: is pickled once for each process; items and results are pickled each time.
    """
    if processes <= 1:
        yield from starmap(work, items)
        return
    # Forks of a process with threads may hang: tokenizers, torch and pyarrow have some.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker, initargs=(work,)) as pool:
        items, pending = iter(items), deque[Future[Result]]()
        try:
            while True:
                ahead = islice(items, _ITEMS_AHEAD * processes - len(pending))
                pending.extend(pool.submit(_run, *item) for item in ahead)
                if not pending:
                    return
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that prepares documents was killed, perhaps for want of memory: "
                "start again, with fewer --processes"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(work: Callable[..., Any]) -> None:
    global _work
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    _work = work


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(*item: Any) -> Any:
    return _work(*item)


# --- stored blocks ----------------------------------------------------------------------------------------------------


class StoredBlock(NamedTuple):
    """A block in a spool: the number of its source, where it starts in the file, and the length of each column."""

    path: Path
    source: int
    start: int
    lengths: Sequence[int]

    def read(self, column: str) -> bytes:
        index = COLUMNS.index(column)
        with open(self.path, "rb") as file:
            file.seek(self.start + sum(self.lengths[:index]))
            return file.read(self.lengths[index])

    def texts(self, lengths: npt.NDArray[np.int64], chosen: Mask) -> list[str]:
        """Return the texts of the chosen documents, bool [documents]; `lengths` of each text in bytes."""
        texts = pieces(zstandard.decompress(self.read("texts")), lengths) if chosen.any() else []
        return [text.decode("utf-8") for text in compress(texts, chosen)]


def pieces(data: bytes, lengths: npt.NDArray[np.int64]) -> list[bytes]:
    """Cut data into pieces of these lengths."""
    ends = np.cumsum(lengths).tolist()
    return [data[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def encode_stored(
    encoder: DocumentEncoder, block: StoredBlock, lengths: npt.NDArray[np.int64], kept: Mask
) -> dict[str, bytes]:
    """Return the token columns of a block: `lengths` of its texts in bytes; those that are not kept have 0 tokens."""
    columns = encoder.columns(encoder.encode(block.texts(lengths, kept)))
    sizes = np.zeros(len(kept), np.int64)
    sizes[kept] = np.frombuffer(columns["sizes"], np.int64)
    return columns | {"sizes": sizes.tobytes()}


class Spool:
    """Processed blocks in an append-only file of a directory.

    A block is a line of JSON and its columns. The file `committed` holds the length that is on the disk for certain.
    Bytes beyond it are of blocks that were being written when the process died: the next start cuts them off.

    Attributes:
        identity: what decides the content of blocks, a JSON object; None: nothing was committed.
        blocks, counts: all blocks in order, and the counts of their records.
        last_blocks: source → number of its last block.
        sha256: source → hash of a source that was read to its end.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.blocks, self.counts = directory, list[StoredBlock](), RecordCounts()
        self.identity: dict[str, Any] | None = None
        self.last_blocks, self.sha256 = dict[int, int](), dict[int, str]()
        self.path, self._committed, self._length = directory / BLOCKS, directory / COMMITTED, 0
        try:
            if self._committed.is_file() and self.path.is_file():
                self._load(int(self._committed.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} is damaged ({error}): remove {directory}") from error

    def _load(self, length: int) -> None:
        with open(self.path, "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) < length:
                raise ValueError(f"{size:,} bytes instead of {length:,}")
            line = file.readline()
            self.identity, self._length = json.loads(line), len(line)
            while self._length < length:
                file.seek(self._length)
                self._add(file.readline())

    def open(self, identity: Mapping[str, Any]) -> Spool:
        """Open the file to append blocks of this identity, which is that of the committed ones."""
        assert self.identity in (None, identity)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()
        self._file.truncate(self._length)
        if self.identity is None:
            self._length = self._file.write(json.dumps(identity).encode() + b"\n")
        self._next_commit = time.monotonic() + COMMIT_SECONDS
        return self

    def _add(self, line: bytes) -> None:
        header = json.loads(line)
        source, lengths = header["source"], tuple(header["lengths"])
        start = self._length + len(line)
        self.blocks.append(StoredBlock(self.path, source, start, lengths))
        self._length = start + sum(lengths)
        self.last_blocks[source] = header["number"]
        if header["sha256"] is not None:
            self.sha256[source] = header["sha256"]
        self.counts.add(header["read"], header["dropped"], [DroppedRecord(*problem) for problem in header["problems"]])

    def append(self, block: ProcessedBlock) -> None:
        columns = [block.columns.get(name, b"") for name in COLUMNS]
        header = {"source": block.source, "number": block.number, "sha256": block.sha256}
        line = json.dumps({**header, "lengths": list(map(len, columns)), **vars(block.counts)}).encode() + b"\n"
        self._file.writelines([line, *columns])
        self._add(line)
        if time.monotonic() >= self._next_commit:
            self.commit()

    def commit(self) -> None:
        """Wait until all blocks are on the disk, and note it."""
        self.flush()
        os.fsync(self._file.fileno())
        write_atomically(self._committed, str(self._length))
        self._next_commit = time.monotonic() + COMMIT_SECONDS

    def flush(self) -> None:
        """Flush the file, for blocks to be read from it."""
        self._file.flush()

    def close(self) -> None:
        """Close the file. What was not committed is lost to the next start, as by a kill."""
        with contextlib.suppress(OSError):  # a full disk: what is buffered is not committed
            self._file.close()


# --- the stages -------------------------------------------------------------------------------------------------------


class Preparation:
    """The stages of `prepare` before the output is written, each from where an earlier start left off.

    Attributes:
        seconds: that stages took.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        spec: TokenizerSpec,
        settings: PrepareSettings,
        spool: Spool,
        strict: bool,
        processes: int | None,
        progress: bool,
    ) -> None:
        self.sources, self.spec, self.settings, self.spool, self.strict = sources, spec, settings, spool, strict
        # disable=None: a bar on a terminal only.
        self.bar: Callable[..., tqdm] = partial(tqdm, leave=False, disable=None if progress else True)
        self.stamps = [stamp_of(source) for source in sources]
        small = all(source.path is not None for source in sources) and sum(map(size_of, sources)) < _SMALL
        self.processes = processes or (1 if small else len(os.sched_getaffinity(0)))
        self.tokenizer = load_tokenizer(spec.directory, settings.eos) if spec.directory is not None else None
        encoder = None if self.tokenizer is None else DocumentEncoder(self.tokenizer, settings.sentences)
        sets = EvaluationSets.read(settings.decontaminate) if settings.decontaminate else None
        self.work = Reading(settings.seed, encoder, settings.repair, settings.min_tokens, settings.deduplicate, sets)
        self.seconds: dict[str, float] = {}

    def read(self) -> None:
        """Read all sources into the spool. UserError: see `prepare`."""
        started, spool = time.perf_counter(), self.spool
        total = sum(map(size_of, self.sources)) or None
        with self.bar(desc="reading", total=total, unit="B", unit_scale=True) as bar:
            self._check_strict()
            for block in in_order(self.work, self._unread(bar), self.processes):
                spool.append(block)
                self._check_strict()
        spool.flush()
        self.seconds["reading"] = time.perf_counter() - started

    def _unread(self, bar: tqdm) -> Iterator[tuple[int, RecordBatch, str | None]]:
        """Yield what no earlier start has read: each block, and an empty one with the hash at the end of a source."""
        bytes_before = 0
        for number, source in enumerate(self.sources):
            if number not in self.spool.sha256:
                last = self.spool.last_blocks.get(number, -1)
                for block in read_blocks(source):
                    bar.update(bytes_before + source.position - bar.n)
                    if block.number > last:
                        yield number, block, None
                if stamp_of(source) != self.stamps[number]:
                    raise UserError(f"{source.name}: it changed while it was read: run this again")
                yield number, RecordBatch(source.name, 0, None, []), source.sha256
            bytes_before += size_of(source)

    def _check_strict(self) -> None:
        if self.strict and self.spool.counts.problems:
            problem = self.spool.counts.problems[0]
            raise UserError(f"{problem.where}: {problem.detail}")

    def select(self, written: Path) -> Documents:
        """Return the documents of the output, and write `removed.jsonl`."""
        documents = Documents(self.spool.blocks, [source.name for source in self.sources], self.spool.counts)
        removed = documents.remove_duplicates(self.settings.deduplicate) + documents.remove_contaminated()
        if self.settings.deduplicate or self.settings.decontaminate:
            with open(written / "removed.jsonl", "w", encoding="utf-8") as file:
                file.writelines(json.dumps(document, ensure_ascii=False) + "\n" for document in removed)
        documents.hold_out(self.settings.validation)
        return documents

    def encode(self, documents: Documents, saved: Path) -> tuple[DocumentEncoder, Sequence[StoredBlock]]:
        """Return the encoder, and the blocks that hold the documents' tokens; save the tokenizer."""
        started = time.perf_counter()
        if self.work.encoder is not None:
            assert self.tokenizer is not None
            self.tokenizer.save_pretrained(str(saved))
            self.seconds["tokenizer"] = time.perf_counter() - started
            return self.work.encoder, self.spool.blocks
        trained = self._train(documents)
        shutil.copytree(trained, saved)
        encoder = DocumentEncoder(load_tokenizer(trained), self.settings.sentences)
        self.seconds["tokenizer"] = time.perf_counter() - started
        with contextlib.closing(Spool(self.spool.directory / "encoded").open({})) as encoded:
            numbers = range(len(encoded.blocks), len(documents.blocks))
            items = map(documents.stored, self.bar(numbers, "encoding", unit=" blocks"))
            results = in_order(partial(encode_stored, encoder), items, self.processes)
            for number, columns in zip(numbers, results, strict=True):
                encoded.append(ProcessedBlock(0, number, None, columns, RecordCounts()))
            encoded.flush()
        self.seconds["encoding"] = time.perf_counter() - started - self.seconds["tokenizer"]
        return encoder, encoded.blocks

    def _train(self, documents: Documents) -> Path:
        """Train the tokenizer on the training documents, unless an earlier start has; return its directory."""
        self.spool.commit()
        trained, unfinished = self.spool.directory / TOKENIZER, self.spool.directory / "tokenizer.new"
        if not trained.exists():
            remove(unfinished)
            chosen = documents.training_sample(self.settings.tokenizer_documents)
            bar = partial(self.bar, desc="training the tokenizer", total=int(chosen.sum()), unit=" documents")
            tokenizer = self.spec.train(lambda: iter(bar(documents.texts(chosen))))
            tokenizer.save_pretrained(str(unfinished))
            sync(unfinished)
            os.replace(unfinished, trained)
        return trained


# --- all documents together -------------------------------------------------------------------------------------------


class Documents:
    """Stored documents, in the order of the inputs.

    Memory: 53 bytes a document. The search for near duplicates needs another 0.7 to 1.4 KB for each kept document
    (measured with 40,000).

    Attributes:
        facts: what is stored of each document (`DOCUMENT`).
        in_output, held_out: which documents are in the output, and in its validation set, bool [documents].
        names: of the sources.
        counts: of the records of all sources.
    """

    def __init__(self, blocks: Sequence[StoredBlock], names: Sequence[str], counts: RecordCounts) -> None:
        self.blocks, self.names, self.counts = blocks, names, copy.deepcopy(counts)
        parts = [np.frombuffer(block.read("documents"), DOCUMENT) for block in blocks]
        self.facts = np.concatenate([np.zeros(0, DOCUMENT), *parts])
        self.firsts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        self.in_output = np.ones(len(self.facts), np.bool_)
        self.held_out = np.zeros(len(self.facts), np.bool_)

    def slice_of(self, block: int) -> slice:
        """Return the numbers of a block's documents."""
        return slice(int(self.firsts[block]), int(self.firsts[block + 1]))

    def stored(self, block: int) -> tuple[StoredBlock, npt.NDArray[np.int64], Mask]:
        """Return a block, the lengths of its texts in bytes, and which of its documents are in the output."""
        numbers = self.slice_of(block)
        return self.blocks[block], self.facts["bytes"][numbers], self.in_output[numbers]

    def texts(self, chosen: Mask) -> Iterator[str]:
        """Yield the texts of the chosen documents, bool [documents]."""
        for number, block in enumerate(self.blocks):
            numbers = self.slice_of(number)
            yield from block.texts(self.facts["bytes"][numbers], chosen[numbers])

    def _block_of(self, document: int) -> int:
        return int(np.searchsorted(self.firsts, document, side="right")) - 1

    def remove_duplicates(self, kind: str | None) -> list[dict[str, Any]]:
        """Drop exact copies, and near ones if `kind` is "near"; return each with the document that it copies."""
        removed = list[dict[str, Any]]()
        if kind is None:
            return removed
        firsts = exact_duplicates(self.facts["content"].copy())
        for number in np.flatnonzero(firsts != np.arange(len(firsts))).tolist():
            removed.append(self._remove(number, "duplicate", {"copy_of": self._where(int(firsts[number]))}))
        if kind == "near":
            all_sketches = chain.from_iterable(map(self._sketches, range(len(self.blocks))))
            numbered = ((n, sketch) for n, sketch in enumerate(all_sketches) if self.in_output[n])
            for near in near_duplicates(numbered, self._sketch):
                similar = {"similarity": near.similarity} if near.similarity else {}
                about = {"copy_of": self._where(near.earlier), **similar}
                removed.append(self._remove(near.document, "near-duplicate", about))
        return removed

    def remove_contaminated(self) -> list[dict[str, Any]]:
        """Drop documents that overlap with an evaluation set, and return them."""
        numbers = np.flatnonzero(self.in_output & self.facts["contaminated"]).tolist()
        return [self._remove(number, "contaminated", {}) for number in numbers]

    def _remove(self, document: int, reason: str, about: dict[str, Any]) -> dict[str, Any]:
        self.in_output[document] = False
        self.counts.dropped[reason] += 1
        return {"removed": self._where(document), "reason": reason, **about}

    def _where(self, document: int) -> str:
        """Return the place of a document in the inputs."""
        return where(self.names[self.blocks[self._block_of(document)].source], int(self.facts["place"][document]))

    def _sketches(self, block: int) -> list[bytes]:
        return pieces(self.blocks[block].read("sketches"), self.facts["sketch"][self.slice_of(block)])

    def _sketch(self, document: int) -> bytes:
        block = self._block_of(document)
        return self._sketches(block)[document - int(self.firsts[block])]

    def hold_out(self, validation: float) -> None:
        """Choose the validation set: the documents of the output with the smallest hashes.

        Equal documents have equal hashes, so they are on the same side. A new document moves at most a few others
        across.

        Args:
            validation: see `PrepareSettings`.
        """
        total, hashes, dropped = int(self.in_output.sum()), self.facts["split"], ""
        count = int(validation) if validation >= 1 else max(1, round(validation * total))
        if self.counts.problems:
            problem = self.counts.problems[0]
            dropped = f" ({self.counts.dropped.total():,} dropped, the first: {problem.where}: {problem.detail})"
        if not total:
            raise UserError(f"no text in {', '.join(self.names)}{dropped}")
        if total < 2:
            raise UserError(
                "the inputs hold 1 document: the split is by document, so give at least 2 (a .txt file is one, unless "
                f"--documents says otherwise){dropped}"
            )
        if count >= total:
            raise UserError(f"validation {validation:g} of {total:,} documents leaves none to train on")
        largest = np.partition(hashes[self.in_output], count - 1)[count - 1]
        self.held_out = self.in_output & (hashes <= largest)
        if self.held_out.sum() == total:
            raise UserError(f"all {total:,} documents outside the validation set are copies of documents in it")

    def training_sample(self, most: int | None) -> Mask:
        """Choose at most `most` training documents, bool [documents]; None: all.

        Those with the largest hashes are chosen, so the documents' order does not matter.
        """
        training = self.in_output & ~self.held_out
        if most is None or most >= training.sum():
            return training
        numbers = np.flatnonzero(training)
        order = np.argsort(self.facts["split"][numbers], kind="stable")
        chosen = np.zeros(len(training), np.bool_)
        chosen[numbers[order[-most:]]] = True
        return chosen


# --- the output -------------------------------------------------------------------------------------------------------


def write_output(
    directory: Path,
    documents: Documents,
    tokens: Sequence[StoredBlock],
    encoder: DocumentEncoder,
    identity: dict[str, Any],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Write both corpora, the texts of the validation documents and the report beside `tokenizer/`; return the report.

    Args:
        tokens: the blocks that hold the documents' tokens.
        identity: what decides the output.
        seconds: of the stages before; those of "encoding" (and of "reading" if it gave the tokens) make tokens/s.
    """
    started = time.perf_counter()
    counts, splits = _write_corpora(documents, tokens, encoder, directory)
    seconds["encoding"] = seconds.get("encoding", 0.0) + time.perf_counter() - started
    encoding = seconds["encoding"] + (seconds["reading"] if tokens is documents.blocks else 0.0)
    report = {
        "identity": identity,
        "inputs": list(documents.names),
        "documents": documents.counts.as_dict(),
        "splits": splits,
        "vocabulary_size": encoder.vocabulary_size,
        "end_of_document": encoder.end_of_document,
        "unigram": unigram(counts["train"], counts["validation"]),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "tokens_per_second": round(sum(figures["tokens"] for figures in splits.values()) / encoding),
        "versions": library_versions(),
        "files": describe_files(directory),
    }
    (directory / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _write_corpora(
    documents: Documents, tokens: Sequence[StoredBlock], encoder: DocumentEncoder, directory: Path
) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, dict[str, int]]]:
    """Return, by split, how often each token occurs [vocabulary], and the documents, tokens, characters and bytes."""
    size, dtype = encoder.vocabulary_size, token_dtype(encoder.vocabulary_size)
    counts = {split: np.zeros(size, np.int64) for split in SPLITS}
    splits = {split: dict.fromkeys(("documents", "tokens", "characters", "bytes"), 0) for split in SPLITS}
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(IndexedWriter(directory / split, size)) for split in SPLITS}
        texts_file = stack.enter_context(open(directory / "validation.jsonl", "w", encoding="utf-8"))
        for number, block in enumerate(tokens):
            numbers, sizes = documents.slice_of(number), np.frombuffer(block.read("sizes"), np.int64)
            ids = np.frombuffer(block.read("tokens"), dtype)
            starts = np.frombuffer(block.read("sentences"), np.bool_) if encoder.language is not None else None
            in_output, held_out = documents.in_output[numbers], documents.held_out[numbers]
            facts = documents.facts[numbers]
            for split, chosen in (("train", in_output & ~held_out), ("validation", held_out)):
                of_chosen = np.repeat(chosen, sizes)
                chosen_ids = ids[of_chosen]
                writers[split].add_documents(chosen_ids, sizes[chosen], None if starts is None else starts[of_chosen])
                counts[split] += np.bincount(chosen_ids, minlength=size)
                total = splits[split]
                total["documents"] += int(chosen.sum())
                total["tokens"] += len(chosen_ids)
                total["characters"] += int(facts["characters"][chosen].sum())
                total["bytes"] += int(facts["bytes"][chosen].sum())
            for text in documents.blocks[number].texts(facts["bytes"], held_out):
                texts_file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return counts, splits


def unigram(train: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]) -> dict[str, float]:
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
