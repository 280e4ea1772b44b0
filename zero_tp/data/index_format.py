"""The format of PREFIX.idx: `MMIDIDX`, version 1, of Megatron-LM and Megatron-DeepSpeed. All is little-endian:

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    1, the version
    uint8     code of the token type (`DTYPES`)
    uint64    S, the number of sequences
    uint64    D + 1, the number of document boundaries
    int32[S]      tokens in each sequence
    int64[S]      byte at which each sequence starts in PREFIX.bin
    int64[D+1]    sequence at which each document starts; the last entry is S

A document is one sequence unless a preprocessor split it into sentences.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from zero_tp.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Megatron's codes 6 and 7 are floating-point types and never token ids.
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}.items()
}
_UINT16_VOCABULARY = 65_500  # Megatron's own threshold


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return the stored type: uint16 below a vocabulary of 65,500 tokens, else int32, as Megatron chooses."""
    return DTYPES[8] if vocabulary_size < _UINT16_VOCABULARY else DTYPES[4]


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def read_header(index: Path) -> tuple[np.dtype, int, int]:
    """Return the token type and the numbers of sequences and of document boundaries. UserError: not such an index."""
    with open(index, "rb") as file:
        header = file.read(HEADER.size)
    if not header.startswith(MAGIC):
        raise UserError(f"{index}: not a Megatron index: it begins with {header[:9]!r}, not {MAGIC!r}")
    if len(header) < HEADER.size:
        raise UserError(f"{index}: {HEADER.size} bytes of header expected, found {len(header)}")
    _, version, code, sequences, boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{index}: format version {version}, only version {VERSION} is known")
    if code not in DTYPES:
        known = ", ".join(f"{key} {value.name}" for key, value in DTYPES.items())
        raise UserError(f"{index}: token type {code} is not an integer type; known: {known}")
    return DTYPES[code], sequences, boundaries


def pack_header(dtype: np.dtype, sequences: int, boundaries: int) -> bytes:
    """Return the header of an index of so many sequences and document boundaries."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    return HEADER.pack(MAGIC, VERSION, code, sequences, boundaries)
