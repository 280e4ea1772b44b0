"""Formats whose files hold all tokens without gaps: raw, OLMo-core, llm.c, datatrove, Megatron."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError, first_line
from zero_tp.data.documents import size_and_time
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.tools.corpus.settings import PrepareSettings
from zero_tp.tools.corpus.tokens.files import FlatFile, TokenFile, TokenRange

LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Magic and version → type: llm.c's dataloader.h, for GPT-2 and for Llama 3."""
_LLM_C_EVALUATION = 20240522
_LLM_C_HEADER = 256 * 4
_NPY = b"\x93NUMPY"


def dtype_of(path: Path, settings: PrepareSettings) -> str:
    """Return the type that the user names.

    Raises:
        UserError: he names none.
    """
    if settings.token_type is None:
        raise UserError(
            f"{path}: --format {settings.format} does not say the type of a token: give "
            "--token-type, such as uint16 (a vocabulary of at most 65,536) or uint32"
        )
    return np.dtype(settings.token_type).newbyteorder("<").str


def _flat_file(path: Path, kind: str, tokens: TokenRange) -> FlatFile:
    return FlatFile(str(path), kind, path=path, size_and_time=size_and_time(path), tokens=tokens)


def _whole_tokens(path: Path, dtype: str, offset: int = 0) -> TokenRange:
    """Return all tokens from a byte on."""
    width = np.dtype(dtype).itemsize
    size = path.stat().st_size - offset
    if size % width:
        raise UserError(
            f"{path}: {size:,} bytes are no whole number of {np.dtype(dtype).name} tokens: it is "
            "cut, or has another --token-type"
        )
    return TokenRange(dtype, size // width, str(path), offset)


def open_raw(path: Path, settings: PrepareSettings) -> Iterator[TokenFile]:
    """Yield a file of bare integers, such as nanoGPT's, or NumPy's own with a header."""
    with open(path, "rb") as file:
        has_header = file.read(len(_NPY)) == _NPY
    tokens = (
        _npy_tokens(path, settings) if has_header else _whole_tokens(path, dtype_of(path, settings))
    )
    yield _flat_file(path, str(settings.format), tokens)


def _npy_tokens(path: Path, settings: PrepareSettings) -> TokenRange:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path}: a damaged .npy file ({first_line(error)})") from error
    named = settings.token_type
    if array.dtype.kind not in "iu" or array.dtype.byteorder == ">" or np.isfortran(array):
        raise UserError(
            f"{path}: a .npy file of {array.dtype.str}; integers are needed, in C order"
        )
    if named is not None and array.dtype.name != named:
        raise UserError(
            f"{path}: --token-type {named}, and its own header says {array.dtype.name}: leave the "
            "option out"
        )
    assert isinstance(array, np.memmap)
    return TokenRange(array.dtype.str, array.size, str(path), array.offset)


def open_llm_c(path: Path, settings: PrepareSettings) -> Iterator[TokenFile]:
    """Yield a shard of llm.c or modded-nanogpt: 256 int32, then tokens."""
    with open(path, "rb") as file:
        header = file.read(_LLM_C_HEADER)
    magic, version, count = struct.unpack("<3i", header[:12].ljust(12, b"\0"))
    if magic == _LLM_C_EVALUATION:
        raise UserError(f"{path}: an evaluation set of llm.c, not a shard of tokens: leave it out")
    if (magic, version) not in LLM_C or len(header) < _LLM_C_HEADER:
        known = " or ".join(f"{known[0]}, {known[1]}" for known in LLM_C)
        raise UserError(
            f"{path}: not a shard of llm.c: it begins with {magic}, {version} instead of {known}"
        )
    tokens = _whole_tokens(path, LLM_C[magic, version], _LLM_C_HEADER)
    if tokens.count != count:
        raise UserError(
            f"{path}: its header counts {count:,} tokens, and {tokens.count:,} are there: it is "
            "damaged"
        )
    yield _flat_file(path, "llm.c", tokens)


def open_datatrove(path: Path, settings: PrepareSettings) -> Iterator[TokenFile]:
    """Yield a .ds file of datatrove's DocumentTokenizer, and its index."""
    index = path.with_name(f"{path.name}.index")
    if not index.is_file():
        raise UserError(f"{path}: {index.name} is missing beside it")
    ends = np.memmap(index, "<u8", "r") if index.stat().st_size >= 8 else np.zeros(0, "<u8")
    size = path.stat().st_size
    count = int(ends[-1]) if len(ends) else 0
    # The width is nowhere in the files, but follows from the number of tokens.
    width = size // count if count else 2
    if index.stat().st_size % 8 or width not in (2, 4) or width * count != size:
        raise UserError(
            f"{path}: {size:,} bytes for the {count:,} tokens of {index.name}, instead of 2 or 4 "
            "each: one of the two is damaged"
        )
    data = _flat_file(path, "datatrove", TokenRange(f"<u{width}", count, str(path)))
    yield replace(data, ends=ends)
    yield companion(index, "datatrove")


def companion(path: Path, kind: str) -> TokenFile:
    """Return a file whose hash counts, and which has no tokens itself."""
    return TokenFile(str(path), kind, path=path, size_and_time=size_and_time(path))


@dataclass
class MegatronFile(FlatFile):
    """A .bin file; `corpus` reads its index."""

    corpus: IndexedCorpus | None = None

    def sentences(self, start: int, count: int) -> npt.NDArray[np.int64] | None:
        assert self.corpus is not None
        if self.corpus.has_one_sequence_a_document:
            return None
        return self.corpus.sequence_starts(start, count)


class _DocumentEnds:
    """The ends of a corpus's documents, read when they are asked for."""

    def __init__(self, corpus: IndexedCorpus) -> None:
        self._corpus = corpus

    def __len__(self) -> int:
        return len(self._corpus)

    def __getitem__(self, wanted: slice) -> npt.NDArray[np.int64]:
        return self._corpus.document_starts(wanted.start + 1, wanted.stop + 1)


def open_megatron(path: Path, settings: PrepareSettings) -> Iterator[TokenFile]:
    """Yield a .bin file of Megatron-LM or GPT-NeoX, and its .idx."""
    corpus = IndexedCorpus(path.with_suffix("") if path.suffix in (".bin", ".idx") else path)
    # Opening looks at some blocks of the index.
    corpus.check_index()
    data, index = Path(f"{corpus.prefix}.bin"), Path(f"{corpus.prefix}.idx")
    flat = _flat_file(data, "megatron", TokenRange(corpus.dtype.str, corpus.tokens, str(data)))
    yield MegatronFile(**{**vars(flat), "ends": _DocumentEnds(corpus), "corpus": corpus})
    yield companion(index, "megatron")
