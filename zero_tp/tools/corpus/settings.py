"""The settings of a prepared corpus, its report, and whether an output can be reused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from zero_tp.base.errors import UserError, shown
from zero_tp.base.options import option, options_of
from zero_tp.base.strict_json import read_json
from zero_tp.base.validation import ConfigModel, Count, Positive, validate
from zero_tp.data.documents import file_sha256
from zero_tp.data.formats import DOCUMENT_UNITS, STREAMS, import_optional
from zero_tp.data.indexed import REPORT
from zero_tp.data.records import DroppedRecord, Source
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.tools.corpus.tokenizer_training import TokenizerSpec

FORMAT = 1  # increment it when the same settings give other files
WORD_RULE = 2  # increment it when `similarity.words` changes
SPOOL_FORMAT = 7  # increment it when the format of a spool changes


TOKEN_FORMATS = ("raw", "olmo-core", "datatrove", "llm.c", "litdata", "mds", "ids", "megatron")
TOKEN_TYPES = ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64")
TOKEN_OPTIONS = ("format", "token_type", "eos_id", "eos_position", "ids_key", "vocab_size")
"""Fields of `PrepareSettings` that decide how token files are read."""
_OF_TEXTS = {
    "text_key": None,
    "documents": "file",
    "stdin": "jsonl",
    "repair": False,
    "decontaminate": (),
    "sentences": None,
    "tokenizer_documents": None,
}
"""Fields of `PrepareSettings` that only texts have, with their defaults."""


@dataclass(frozen=True)
class PrepareSettings:
    """Settings that decide the output, together with the inputs; options of `zero-tp prepare`."""

    tokenizer: str | None = option(
        MISSING,
        "a Hugging Face tokenizer directory or a name on its hub, or a tokenizer to train: a "
        "byte-level BPE of SIZE tokens, or a WordPiece vocabulary for the masked objective, "
        "uncased "
        "or cased",
        metavar="DIR|bpe:SIZE|wordpiece:SIZE|wordpiece-cased:SIZE",
    )
    validation: float = option(
        0.02,
        "documents to hold out: a fraction below 1, or a whole number of documents (default: 0.02)",
        "--validation-fraction",
        metavar="F|COUNT",
    )
    seed: int = option(1234, "seed of the split (default: 1234)")
    text_key: str | None = option(
        None, "field of the text (default: text, see docs/data.md)", metavar="KEY"
    )
    documents: str = option(
        "file",
        "what is one document in a .txt file: the file, a line, or a paragraph (default: file)",
        choices=("file", "line", "blank-line"),
    )
    stdin: str = option(
        "jsonl",
        "the format of standard input (default: jsonl)",
        "--stdin-kind",
        choices=("jsonl", "json", "txt", "csv"),
    )
    repair: bool = option(False, "mend Unicode (ftfy)", "--repair-unicode")
    min_tokens: int = option(
        0,
        "drop documents of fewer than N tokens (128 if N is omitted)",
        nargs="?",
        const=128,
        metavar="N",
    )
    deduplicate: str | None = option(
        None,
        "drop copies; near: also documents that share 0.7 of their 5-word shingles with an earlier "
        "one (MinHash)",
        choices=("exact", "near"),
    )
    decontaminate: tuple[Path, ...] = option(
        (),
        "drop documents with 13 consecutive words of these evaluation sets, and WikiText's "
        "articles by title",
        metavar="FILE",
    )
    sentences: str | None = option(
        None,
        "store where sentences begin, by the rules of a language (its ISO 639 code, such as en); "
        "the masked objective's second segments begin there",
        "--split-sentences",
        metavar="LANGUAGE",
    )
    eos: str | None = option(
        None,
        "the token that ends a document, if the tokenizer is given (default: its eos token, or its "
        "only one with a well-known name)",
        metavar="TOKEN",
    )
    tokenizer_documents: int | None = option(
        None, "train the tokenizer on N documents (default: all)", metavar="N"
    )
    format: str | None = option(
        None,
        "the inputs are token files of another trainer, see docs/token_files.md; --tokenizer is "
        "then the directory of theirs, or left out",
        choices=TOKEN_FORMATS,
    )
    token_type: str | None = option(
        None, "the type of a token, where the files do not say it", choices=TOKEN_TYPES
    )
    eos_id: int | None = option(
        None, "the id of the files' end-of-text token (default: the tokenizer's)", metavar="ID"
    )
    eos_position: str | None = option(
        None,
        "cut documents at the end-of-text token, which stands before or after each of them",
        choices=("before", "after"),
    )
    ids_key: str | None = option(
        None,
        "the column with the tokens (default: input_ids, tokens, or the only one)",
        metavar="KEY",
    )
    vocab_size: int | None = option(
        None, "all ids are below N (default: the tokenizer's vocabulary)", metavar="N"
    )
    max_document_tokens: int = option(
        1_000_000,
        "longer documents show a wrong answer, and are refused (default: 1000000)",
        metavar="N",
    )

    def enabled_options(self) -> dict[str, Any]:
        """Return the optional settings that are on, with the hashes of the evaluation sets."""
        names = (
            "repair",
            "min_tokens",
            "deduplicate",
            "decontaminate",
            "sentences",
            "eos",
            "tokenizer_documents",
            *TOKEN_OPTIONS,
        )
        hashes = {"decontaminate": [file_sha256(path) for path in self.decontaminate]}
        values = {name: hashes.get(name, getattr(self, name)) for name in names}
        # An eos id of 0 is a setting, too. A higher limit changes no output.
        return {
            name: value
            for name, value in values.items()
            if (value or name == "eos_id") and value is not None
        }


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`.

    Attributes:
        report: the content of report.json.
        reused: an earlier output has the same inputs and settings, so nothing was written.
        resumed: documents that an interrupted preparation had read.
    """

    output: Path
    report: dict[str, Any]
    reused: bool
    resumed: int = 0


class PreparedFile(ConfigModel):
    bytes: Count
    sha256: str


PreparedFiles = Annotated[dict[str, PreparedFile], Field(min_length=1)]
"""By name. An empty table is refused, because it would pass as undamaged."""


class DocumentCounts(ConfigModel):
    """Counts of records: read = kept + the sum of dropped, by reason; and the first problems."""

    read: Count
    kept: Count
    dropped: dict[str, Positive]
    problems: list[DroppedRecord]


class Report(ConfigModel):
    """The content of report.json."""

    identity: dict[str, Any]
    inputs: list[str]
    documents: DocumentCounts
    splits: dict[str, dict[Literal["documents", "tokens", "characters", "bytes"], Positive]]
    vocabulary_size: Positive
    end_of_document: str | None
    tokenizer: TokenizerFingerprint | None = None
    unigram: dict[Literal["train_entropy", "validation_cross_entropy", "uniform"], float]
    seconds: dict[str, float]
    tokens_per_second: float
    versions: dict[str, str]
    files: PreparedFiles


def output_identity(
    sources: Sequence[Source], spec: TokenizerSpec | None, settings: PrepareSettings
) -> dict[str, Any]:
    """Return everything that decides the output; `spec` is None without a tokenizer.

    A newer setting is in it only if it is set, so older outputs stay reusable.
    """
    # A file counts by its content and not by its name, so a moved input leaves the output reusable.
    # Of a data set of the hub only the name is known without reading it.
    hashes = [
        source.sha256 or (file_sha256(source.path) if source.path is not None else "")
        for source in sources
    ]
    inputs = [
        {"kind": source.kind, "name": source.name}
        if source.kind == "hub"
        else {"kind": source.kind, "sha256": sha256}
        for source, sha256 in zip(sources, hashes, strict=True)
    ]
    return {
        "format": FORMAT,
        "inputs": inputs,
        "tokenizer": spec and spec.identity(),
        "validation": settings.validation,
        "seed": settings.seed,
        "text_key": settings.text_key or "text",
        **({"documents": settings.documents} if settings.documents != "file" else {}),
        **settings.enabled_options(),
        **(
            {"word_rule": WORD_RULE}
            if settings.deduplicate == "near" or settings.decontaminate
            else {}
        ),
    }


def spool_identity(
    sources: Sequence[Source], spec: TokenizerSpec | None, settings: PrepareSettings
) -> dict[str, Any]:
    """Return everything that decides the content of a spool, as a JSON object."""
    identity: dict[str, Any] = {
        "format": [FORMAT, SPOOL_FORMAT],
        "inputs": [source.name for source in sources],
        # Not hashes: hashing the inputs would read them once more before the first block.
        "sizes and times": [list(source.size_and_time) for source in sources],
        "versions": library_versions(),
        **asdict(settings) | {"decontaminate": []} | settings.enabled_options(),
        "tokenizer": spec and spec.identity(),
    }
    # A higher limit changes no block.
    del identity["max_document_tokens"]
    return identity


def differing_settings(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the names of the settings that differ between two spool identities.

    It is "" if none differs.
    """
    # These three are not settings. If one of them changed, the inputs are read again; different
    # settings are refused.
    settings = (before.keys() | now.keys()) - {"format", "versions", "sizes and times"}
    return ", ".join(sorted(name for name in settings if before.get(name) != now.get(name)))


def describe_files(
    directory: Path, hashes: Mapping[str, str] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """Return the size and the SHA-256 of each file below a directory.

    `hashes` has those that are known already.
    """
    names = {
        str(path.relative_to(directory)): path
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    return {
        name: {"bytes": path.stat().st_size, "sha256": hashes.get(name) or file_sha256(path)}
        for name, path in names.items()
    }


def check_settings(settings: PrepareSettings) -> None:
    """Raise a UserError for the first setting that is out of its range."""
    if settings.format is not None:
        _check_token_settings(settings)
    elif settings.tokenizer is None:
        raise UserError("tokenizer: give one, because texts have none")
    elif names := [name for name in TOKEN_OPTIONS if getattr(settings, name) is not None]:
        raise UserError(f"{_flag(names[0])} is for token files: give their --format, too")
    trains_tokenizer = (
        settings.tokenizer is not None and TokenizerSpec.parse(settings.tokenizer).directory is None
    )
    check_validation_size(settings.validation)
    checks: dict[str, tuple[object, str]] = {
        "seed": (0 <= settings.seed < 1 << 64, "from 0 to 2^64 - 1"),
        "documents": (settings.documents in DOCUMENT_UNITS, f"one of {', '.join(DOCUMENT_UNITS)}"),
        "stdin": (settings.stdin in STREAMS, f"one of {', '.join(STREAMS)}"),
        "deduplicate": (settings.deduplicate in (None, "exact", "near"), "exact or near"),
        "min_tokens": (
            settings.min_tokens == 0 or (settings.min_tokens > 0 and not trains_tokenizer),
            "at least 0; it counts the tokens of an existing tokenizer: prepare without it first, "
            "and then give that "
            "output's tokenizer directory",
        ),
        "eos": (
            settings.eos is None or not trains_tokenizer,
            f"{settings.tokenizer} has its own; give a directory to choose",
        ),
        "tokenizer_documents": (
            settings.tokenizer_documents is None
            or (settings.tokenizer_documents > 0 and trains_tokenizer),
            "at least 1, for a tokenizer that is trained",
        ),
        "sentences": (
            settings.sentences is None or re.fullmatch("[a-z]{2,3}", settings.sentences),
            "the ISO 639 code of a language is needed, such as en",
        ),
    }
    for name, (valid, remedy) in checks.items():
        if not valid:
            raise UserError(f"{name} {getattr(settings, name)!r}: {remedy}")
    if settings.sentences is not None:
        import_optional("sentencex", "splitting sentences")


def _check_token_settings(settings: PrepareSettings) -> None:
    for name, default in _OF_TEXTS.items():
        if getattr(settings, name) != default:
            raise UserError(
                f"{_flag(name)} is for texts: leave it out, because --format {settings.format} "
                "reads tokens"
            )
    if settings.tokenizer and TokenizerSpec.parse(settings.tokenizer).directory is None:
        raise UserError(
            f"--tokenizer {settings.tokenizer}: token files have one already: give its directory, "
            "or leave it out"
        )
    checks: dict[str, tuple[object, str]] = {
        "format": (settings.format in TOKEN_FORMATS, f"one of {', '.join(TOKEN_FORMATS)}"),
        "token_type": (
            settings.token_type in (None, *TOKEN_TYPES),
            f"one of {', '.join(TOKEN_TYPES)}",
        ),
        "eos": (
            settings.eos is None or settings.tokenizer,
            "a token's text; without --tokenizer give --eos-id",
        ),
        "eos_id": (settings.eos_id is None or settings.eos_id >= 0, "at least 0"),
        "eos_position": (settings.eos_position in (None, "before", "after"), "before or after"),
        "vocab_size": (settings.vocab_size is None or settings.vocab_size > 0, "at least 1"),
        "max_document_tokens": (
            0 < settings.max_document_tokens < 2**31,
            "from 1 to 2,147,483,647, the format's limit",
        ),
        "deduplicate": (
            settings.deduplicate in (None, "exact"),
            "exact; near duplicates are found by words, and tokens have none",
        ),
    }
    for name, (valid, remedy) in checks.items():
        if not valid:
            raise UserError(f"{_flag(name)} {getattr(settings, name)}: {remedy}")


def _flag(name: str) -> str:
    return options_of(PrepareSettings)[name].all_flags(name)[0]


def check_validation_size(validation: float) -> None:
    is_count = validation >= 1 and float(validation).is_integer()
    if not is_count and not 0 < validation < 1:
        raise UserError(
            f"validation {validation:g}: a fraction between 0 and 1, or a whole number of "
            "documents from 1"
        )


def find_reusable(
    output: Path, compute_identity: Callable[[], dict[str, Any]], overwrite: bool
) -> Prepared | None:
    """Return the existing output if its identity is that of `compute_identity`.

    None: nothing can be reused.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    # It hashes the inputs, so it is computed only where there is an output to compare.
    identity = compute_identity()
    raw: dict[str, Any] = {}
    try:
        raw = read_json(output / REPORT, "")
        report = validate(Report, raw, str(output / REPORT))
    except UserError as error:
        # A report of an older version may be invalid now and may still be replaced. Any other
        # directory is not ours.
        if overwrite and {"identity", "files"} <= raw.keys():
            return None
        raise UserError(
            f"{output} exists and is not the output of this command: choose another --output "
            f"({error})"
        ) from None
    if report.identity != identity:
        if overwrite:
            return None
        changed = (
            ", ".join(key for key in identity if report.identity.get(key) != identity[key])
            or "settings"
        )
        raise UserError(
            f"{output} was made with another {changed}: choose another --output, or replace it: "
            "--overwrite"
        )
    problem = find_damage(output, report.files)
    if problem and not overwrite:
        raise UserError(f"{problem}: prepare the corpus again with --overwrite")
    return None if problem else Prepared(output, raw, reused=True)


def find_damage(directory: Path, files: Mapping[str, PreparedFile]) -> str | None:
    """Describe the first file that differs from its record; None: none differs.

    `describe_files` made the records.
    """
    for name, recorded in files.items():
        path = directory / name
        if not path.is_file():
            return f"{path} is missing"
        # The cheap comparison first: half a copy shows without hashing.
        if (size := path.stat().st_size) != recorded.bytes:
            return f"{path} has {size:,} bytes instead of {recorded.bytes:,}"
        if (sha256 := file_sha256(path)) != recorded.sha256:
            return f"{path} has SHA-256 {sha256[:12]}… instead of {shown(recorded.sha256)[1:13]}…"
    return None


def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries that decide an output."""
    libraries = ("tokenizers", "transformers", "ftfy", "rensa", "sentencex")
    return {name: version(name) for name in libraries if find_spec(name)}
