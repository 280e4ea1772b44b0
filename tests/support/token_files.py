"""Small token files of other trainers, written byte by byte as `docs/token_files.md` has them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from zero_tp.data import Prepared, PrepareSettings, prepare

Documents = Sequence[Sequence[int]]


def join_after(documents: Documents, eos: int) -> list[int]:
    return [token for document in documents for token in (*document, eos)]


def join_before(documents: Documents, eos: int) -> list[int]:
    return [token for document in documents for token in (eos, *document)]


def write_flat(path: Path, tokens: Iterable[int], dtype: str = "<u2") -> Path:
    np.array(list(tokens), dtype).tofile(path)
    return path


def write_llm_c(path: Path, tokens: Sequence[int], llama: bool = False) -> Path:
    magic, version, dtype = (20240801, 7, "<u4") if llama else (20240520, 1, "<u2")
    header = struct.pack("<3i", magic, version, len(tokens)).ljust(1024, b"\0")
    path.write_bytes(header + np.array(tokens, dtype).tobytes())
    return path


def write_datatrove(path: Path, documents: Documents, dtype: str = "<u2") -> Path:
    write_flat(path, [token for document in documents for token in document], dtype)
    ends = np.cumsum([len(document) for document in documents])
    write_flat(path.with_name(f"{path.name}.index"), ends.tolist(), "<u8")
    return path


def write_samples(samples: Sequence[bytes], middle: bytes = b"") -> bytes:
    """A chunk of litdata, or a shard of MDS with its JSON in the middle."""
    start = 4 * (len(samples) + 2) + len(middle)
    ends = start + np.cumsum([0, *map(len, samples)])
    offsets = np.array([len(samples), *ends], "<u4").tobytes()
    return offsets + middle + b"".join(samples)


def write_litdata(
    folder: Path,
    documents: Documents,
    dtype: str = "<i4",
    form: str = "no_header_tensor:16",
    chunk: int = 100,
    **config: Any,
) -> Path:
    folder.mkdir(parents=True)
    chunks = []
    has_sizes = config.get("item_loader", "TokensLoader") != "TokensLoader"
    for number, first in enumerate(range(0, len(documents), chunk)):
        samples = [np.array(ids, dtype).tobytes() for ids in documents[first : first + chunk]]
        if has_sizes:
            samples = [struct.pack("<I", len(sample)) + sample for sample in samples]
        data = write_samples(samples)
        name = f"chunk-0-{number}.bin"
        if config.get("compression"):
            name, data = f"chunk-0-{number}.zstd.bin", zstandard.compress(data)
        (folder / name).write_bytes(data)
        chunks.append({"filename": name, "chunk_size": len(samples), "chunk_bytes": len(data)})
    config = {"data_format": [form], "item_loader": "TokensLoader", **config}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return folder


def mds_value(ids: Sequence[int], encoding: str) -> bytes:
    kind, *details = encoding.split(":")
    dtype = np.dtype(details[0] if details else "uint16")
    data = np.array(ids, dtype).tobytes()
    if kind == "bytes" or len(details) > 1:
        return data
    width = 0 if len(ids) < 256 else 1
    shape = bytes([1 << 2 | width]) + len(ids).to_bytes(1 << width, "little")
    return (b"" if details else bytes([16])) + shape + data


def write_mds(
    folder: Path,
    documents: Documents,
    encoding: str = "ndarray:uint16",
    compression: str | None = None,
) -> Path:
    folder.mkdir(parents=True)
    shards = []
    for number, first in enumerate(range(0, len(documents), 100)):
        samples = []
        for ids in documents[first : first + 100]:
            value, text = mds_value(ids, encoding), b"name"
            samples.append(struct.pack("<2I", len(text), len(value)) + text + bytes(8) + value)
        data = write_samples(samples, b"{}")
        name = f"shard.{number:05}.mds"
        files = {"raw_data": {"basename": name, "bytes": len(data), "hashes": {}}, "zip_data": None}
        if compression is None:
            (folder / name).write_bytes(data)
        else:
            packed = zstandard.compress(data)
            (folder / f"{name}.zstd").write_bytes(packed)
            files["zip_data"] = {"basename": f"{name}.zstd", "bytes": len(packed), "hashes": {}}
        shards.append(
            {
                **files,
                "format": "mds",
                "compression": compression,
                "column_names": ["a", "n", "tokens"],
                "column_encodings": ["str", "int", encoding],
                "column_sizes": [None, 8, None],
                "samples": len(samples),
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def write_rows(path: Path, documents: Documents, kind: Any = None, key: str = "input_ids") -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({key: list(ids)}) + "\n" for ids in documents))
        return path
    column = pa.array([list(ids) for ids in documents], kind or pa.list_(pa.int32()))
    table = pa.table({key: column, "number": list(range(len(documents)))})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=77)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    return path


def import_tokens(
    inputs: Sequence[Path], output: Path, processes: int | None = 1, **settings: Any
) -> Prepared:
    chosen = {"tokenizer": None, "validation": 0.1} | settings
    return prepare(inputs, output, PrepareSettings(**chosen), processes=processes)


def corpus_sha256(output: Path) -> str:
    """A hash of the four files of both splits."""
    names = ("train.bin", "train.idx", "validation.bin", "validation.idx")
    return hashlib.sha256(b"".join((output / name).read_bytes() for name in names)).hexdigest()


Write = Callable[[Path, Documents], Path]
