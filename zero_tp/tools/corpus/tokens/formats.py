"""The formats of token files, by name, and the files of an input."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_tp.base.errors import UserError
from zero_tp.tools.corpus.settings import PrepareSettings
from zero_tp.tools.corpus.tokens.files import TokenFile
from zero_tp.tools.corpus.tokens.flat import open_datatrove, open_llm_c, open_megatron, open_raw
from zero_tp.tools.corpus.tokens.rows import open_ids
from zero_tp.tools.corpus.tokens.samples import open_litdata, open_mds

Opener = Callable[[Path, PrepareSettings], Iterator[TokenFile]]


@dataclass(frozen=True)
class TokenFormat:
    """How the files of a format are found and read.

    Attributes:
        open: yields the token files of a path, and those whose content counts, too.
        endings: of the files in a directory.
        position: where end-of-text tokens separate documents; None: its items may be documents, or
            the user says it.
        has_items: documents or samples are stored.
        eos: id of the end-of-text token by the tokens' type, where the format fixes it.
    """

    open: Opener
    endings: tuple[str, ...]
    has_items: bool
    position: str | None = None
    eos: dict[str, int] | None = None


FORMATS = {
    "raw": TokenFormat(open_raw, (".bin", ".npy"), False),
    "olmo-core": TokenFormat(open_raw, (".npy",), False, "after"),
    "llm.c": TokenFormat(open_llm_c, (".bin",), False, "before", {"<u2": 50256, "<u4": 128000}),
    "datatrove": TokenFormat(open_datatrove, (".ds",), True),
    "litdata": TokenFormat(open_litdata, ("index.json",), True),
    "mds": TokenFormat(open_mds, ("index.json",), True),
    "ids": TokenFormat(
        open_ids, (".parquet", ".arrow", ".jsonl", ".json", ".jsonl.gz", ".jsonl.zst"), True
    ),
    "megatron": TokenFormat(open_megatron, (".idx",), True),
}


def find_token_files(inputs: Sequence[str | Path], settings: PrepareSettings) -> list[TokenFile]:
    """Return the token files of the inputs, in their order; those of a directory or glob by path.

    Raises:
        UserError: there are none, or one is damaged or has another format.
    """
    form = FORMATS[str(settings.format)]
    files = list[TokenFile]()
    for name in map(str, inputs):
        for path in _paths(name, form, str(settings.format)):
            try:
                files += form.open(path, settings)
            except OSError as error:
                raise UserError(f"{path}: {error.strerror or error}") from error
    if not files:
        raise UserError("no input files")
    return files


def _paths(name: str, form: TokenFormat, kind: str) -> list[Path]:
    path = Path(name)
    if kind == "megatron" and Path(f"{name}.idx").is_file():
        return [path]
    if path.is_file():
        return [path]
    if path.is_dir():
        paths = [file for file in path.rglob("*") if file.name.endswith(form.endings)]
        paths = [
            file
            for file in paths
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not paths:
            raise UserError(f"{name}: no file is there that ends with {' or '.join(form.endings)}")
        return sorted(paths)
    if glob.has_magic(name) and (paths := [Path(file) for file in glob.glob(name, recursive=True)]):
        return sorted(inner for file in paths for inner in _paths(str(file), form, kind))
    raise UserError(f"{name}: no such file")
