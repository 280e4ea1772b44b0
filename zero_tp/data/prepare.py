"""`prepare` makes a corpus of text files: it splits by document, tokenises, writes `.bin/.idx`, and reports.

The output directory is whole or it isn't there: everything is written to a hidden directory beside it, which takes its
place once the disk has it. A preparation that was killed leaves that directory, and the next one clears it. The inputs
are read three times (hash and count; train the tokenizer; encode), so memory holds 8 bytes a document, one batch of
texts (4 Mi characters, or one document if that is longer), and nothing of the corpus itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from tqdm import tqdm

from zero_tp.data.documents import check_files, document_kind, file_sha256, read_documents
from zero_tp.data.indexed import IndexedWriter, content_path
from zero_tp.data.tokenizer import DocumentEncoder, TokenizerSpec, load_tokenizer, train_bpe
from zero_tp.errors import UserError, shown
from zero_tp.files import InvalidJson, clear_partial, partial_directory, put_in_place, read_object
from zero_tp.validation import Block, Count, Positive, validate

REPORT = "report.json"
FORMAT = 1  # raised when the same settings would give other files
SPLITS = ("train", "validation")
OWN_DIRECTORIES = ("tokenizer",)
_BATCH_CHARACTERS = 4 << 20
_CHANGED = "the inputs changed while they were read: run this again"


@dataclass(frozen=True)
class PrepareSettings:
    """These settings and the inputs decide the output.

    Attributes:
        tokenizer: `bpe:SIZE` or a directory.
        validation: below 1, the fraction of the documents held out (at least one document); from 1, their number.
        seed: of the split.
        text_key: key of the text in JSON lines.
    """

    tokenizer: str
    validation: float = 0.02
    seed: int = 1234
    text_key: str = "text"


@dataclass(frozen=True)
class Prepared:
    """This is what `prepare` returns.

    Attributes:
        report: the content of report.json.
        reused: the output was there already.
        compared: what of its files was then compared: their "content", or their "sizes" where an earlier version made
            it and recorded nothing else.
    """

    output: Path
    report: dict[str, Any]
    reused: bool
    compared: str = "content"


class PreparedFile(Block):
    bytes: Count
    sha256: str


class Split(Block):
    documents: Positive
    tokens: Positive
    characters: Positive
    bytes: Positive


class Splits(Block):
    train: Split
    validation: Split


class Unigram(Block):
    train_entropy: float
    validation_cross_entropy: float
    uniform: float


class Report(Block):
    """This is report.json."""

    identity: dict[str, Any]
    inputs: list[str]
    splits: Splits
    vocabulary_size: Positive
    unigram: Unigram
    seconds: dict[str, float]
    tokens_per_second: float
    versions: dict[str, str]
    files: dict[str, PreparedFile | Count] = Field(description="By path. A size alone is of an earlier version.")


def prepare(
    inputs: Sequence[Path], output: Path, settings: PrepareSettings, *, overwrite: bool = False, progress: bool = True
) -> Prepared:
    """Write `output/{train,validation}.{bin,idx}`, `output/tokenizer/`, `output/validation.jsonl` and
    `output/report.json`.

    Args:
        inputs: `.jsonl` or `.txt`, each also `.gz`; see `documents.read_documents` for what is a document.
        output: made here; when it holds the result of the same inputs and settings, that is reused.
        overwrite: replace an output of other inputs or settings.
        progress: show progress bars when stderr is a terminal.

    Raises:
        UserError: bad input, bad settings, or an output that is something else.
    """
    if not inputs:
        raise UserError("no input files")
    spec = TokenizerSpec.parse(settings.tokenizer)
    _check_settings(settings)
    check_files(inputs)
    identity = {
        "format": FORMAT,
        "inputs": [{"kind": document_kind(path), "sha256": file_sha256(path)} for path in inputs],
        "tokenizer": spec.fingerprint(),
        "validation": settings.validation,
        "seed": settings.seed,
        "text_key": settings.text_key,
    }
    try:
        if (reused := _existing(output, identity, overwrite)) is not None:
            clear_partial(output, OWN_DIRECTORIES)
            return reused
        with partial_directory(output, OWN_DIRECTORIES) as partial:
            report = _Preparation(inputs, spec, settings, progress).write(partial)
            names = [os.fsencode(path).decode("utf-8", "backslashreplace") for path in inputs]
            report = {"identity": identity, "inputs": names, **report}
            report["versions"] = {name: version(name) for name in ("tokenizers", "transformers")}
            report["files"] = {
                str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
                for path in sorted(partial.rglob("*"))
                if path.is_file() and path not in _memories(partial)
            }
            (partial / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            put_in_place(partial, output)
    except OSError as error:
        raise UserError(f"{output}: can't be written: {error.strerror or error}") from error
    return Prepared(output, report, reused=False)


def _memories(directory: Path) -> list[Path]:
    """Return the files that may differ between two equal outputs: they hold times."""
    return [content_path(directory / split) for split in SPLITS]


def _check_settings(settings: PrepareSettings) -> None:
    if not 0 <= settings.seed < 1 << 64:
        raise UserError(f"seed {settings.seed}: from 0 to 2^64 - 1")
    validation = settings.validation
    whole = validation >= 1 and float(validation).is_integer()
    if not whole and not 0 < validation < 1:
        raise UserError(f"validation {validation:g}: a fraction between 0 and 1, or a whole number of documents from 1")


def _existing(output: Path, identity: dict[str, Any], overwrite: bool) -> Prepared | None:
    """Return an output made from the same inputs and settings; None when there is nothing to reuse."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
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
    """A preparation goes over the inputs three times."""

    def __init__(self, inputs: Sequence[Path], spec: TokenizerSpec, settings: PrepareSettings, progress: bool) -> None:
        self.inputs, self.spec, self.settings = inputs, spec, settings
        self.bar_disabled = None if progress else True  # None: tqdm shows a bar on a terminal only

    def documents(self, label: str, total: int | None = None) -> Iterator[str]:
        """Yield every document that isn't empty, in the order of the inputs."""
        texts = (text for path in self.inputs for text in read_documents(path, self.settings.text_key) if text.strip())
        return iter(tqdm(texts, desc=label, total=total, unit=" documents", disable=self.bar_disabled, leave=False))

    def write(self, directory: Path) -> dict[str, Any]:
        """Write all of the output except the report, which is returned."""
        started = time.perf_counter()
        hashes = self._hash_documents()
        held_out = _choose_validation(hashes, self.settings.validation)
        trained = time.perf_counter()
        if self.spec.bpe_size is not None:
            texts = self.documents("training the tokenizer", len(hashes))
            train_texts = (text for text, out in zip(texts, held_out, strict=False) if not out)
            tokenizer = train_bpe(train_texts, self.spec.bpe_size)
        else:
            assert self.spec.directory is not None
            tokenizer = load_tokenizer(self.spec.directory)
        tokenizer.save_pretrained(str(directory / "tokenizer"))
        encoded = time.perf_counter()
        encoder = DocumentEncoder(tokenizer)
        counts, splits = self._encode(encoder, held_out, directory)
        finished = time.perf_counter()
        tokens = splits["train"]["tokens"] + splits["validation"]["tokens"]
        return {
            "splits": splits,
            "vocabulary_size": encoder.vocabulary_size,
            "unigram": _unigram(counts["train"], counts["validation"]),
            "seconds": {
                "reading": round(trained - started, 3),
                "tokenizer": round(encoded - trained, 3),
                "encoding": round(finished - encoded, 3),
            },
            "tokens_per_second": round(tokens / (finished - encoded)),
        }

    def _hash_documents(self) -> npt.NDArray[np.uint64]:
        """Return 64 bits a document that depend on its content and the seed, not on its position."""
        key = self.settings.seed.to_bytes(8, "little")
        hashes = array("Q")
        for text in self.documents("reading"):
            digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=key).digest()
            hashes.append(int.from_bytes(digest, "little"))
        if not hashes:
            names = ", ".join(map(str, self.inputs))
            raise UserError(f"no text in {names}")
        return np.frombuffer(hashes, dtype=np.uint64)

    def _encode(
        self, encoder: DocumentEncoder, held_out: npt.NDArray[np.bool_], directory: Path
    ) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, dict[str, int]]]:
        size = encoder.vocabulary_size
        counts = {split: np.zeros(size, np.int64) for split in SPLITS}
        splits = {split: dict.fromkeys(("documents", "tokens", "characters", "bytes"), 0) for split in SPLITS}
        with ExitStack() as stack:
            writers = {split: stack.enter_context(IndexedWriter(directory / split, size)) for split in SPLITS}
            texts_out = stack.enter_context(open(directory / "validation.jsonl", "w", encoding="utf-8"))
            at = 0
            for batch in _batches(self.documents("encoding", len(held_out))):
                if at + len(batch) > len(held_out):
                    raise UserError(_CHANGED)
                for text, ids in zip(batch, encoder.encode(batch), strict=True):
                    split = "validation" if held_out[at] else "train"
                    at += 1
                    writers[split].add_document(ids)
                    counts[split] += np.bincount(ids, minlength=size)
                    total = splits[split]
                    total["documents"] += 1
                    total["tokens"] += len(ids)
                    total["characters"] += len(text)
                    total["bytes"] += len(text.encode("utf-8"))
                    if split == "validation":
                        texts_out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        if at != len(held_out):
            raise UserError(_CHANGED)
        return counts, splits


def _choose_validation(hashes: npt.NDArray[np.uint64], validation: float) -> npt.NDArray[np.bool_]:
    """Return which documents are held out: those with the smallest hashes, bool [documents].

    Equal documents have equal hashes, so they are on the same side. A new document moves at most a few others across.
    """
    documents = len(hashes)
    count = int(validation) if validation >= 1 else max(1, round(validation * documents))
    if documents < 2:
        raise UserError("the inputs hold 1 document: the split is by document, so give at least 2 (a .txt file is one)")
    if count >= documents:
        raise UserError(f"validation {validation:g} of {documents:,} documents leaves none to train on")
    held_out: npt.NDArray[np.bool_] = hashes <= np.partition(hashes, count - 1)[count - 1]
    if held_out.all():
        raise UserError(f"all {documents:,} documents outside the validation set are copies of documents in it")
    return held_out


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


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
