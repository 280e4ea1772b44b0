"""Write and read token files with the formats' own packages, in a process of its own.

    python -m tests.support.token_writers FORMAT DOCUMENTS.json FOLDER

The packages are installed without their requirements; what they import and do not need here, such
as clients of clouds, is replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

EOS = 256


class Absent(types.ModuleType):
    """A module that is imported and never used: any name of it is a class."""

    __path__ = []  # noqa: RUF012 - as the import system has it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {"recoverable_errors": ()})


def replace_modules(*names: str) -> None:
    sys.modules |= {name: Absent(name) for name in names}


def skip_init(package: str, *inner: str) -> None:
    """Import modules of a package without running these packages' own `__init__`."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    (root,) = spec.submodule_search_locations
    for name in ("", *inner):
        module = types.ModuleType(f"{package}.{name}".rstrip("."))
        module.__path__ = [str(Path(root, *name.split(".")))]
        sys.modules[module.__name__] = module


def litdata(documents: list[list[int]], folder: Path) -> None:
    replace_modules("boto3", "botocore", "botocore.credentials", "botocore.utils")
    import torch

    token_loader = importlib.import_module("litdata.streaming.item_loader").TokensLoader
    new_writer = importlib.import_module("litdata.streaming.writer").BinaryWriter

    def write(name: str, make: Any, **options: Any) -> None:
        writer = new_writer(str(folder / name), chunk_size=3000, **options)
        for number, ids in enumerate(documents):
            writer.add_item(number, make([*ids, EOS]))
        writer.done()
        writer.merge(1)

    for dtype in (torch.int16, torch.int32, torch.int64, torch.uint16):
        write(
            str(dtype), lambda ids, t=dtype: torch.tensor(ids, dtype=t), item_loader=token_loader()
        )
    for name in ("int32", "int64", "uint16", "uint32", "uint64"):
        write(name, lambda ids, n=name: np.array(ids, n), item_loader=token_loader())
    loader = token_loader()
    packed = {"compression": "zstd:3", "compression_level": "chunk"}
    write("zstd", lambda ids: np.array(ids, "u2"), item_loader=loader, **packed)
    write("trees", lambda ids: torch.tensor(ids))


def mds(documents: list[list[int]], folder: Path) -> None:
    skip_init("streaming", "base", "base.format", "base.format.mds")
    writer = importlib.import_module("streaming.base.format.mds.writer").MDSWriter

    def write(name: str, encoding: str, dtype: str, compression: str | None) -> None:
        columns = {"a": "str", "z": "int", "tokens": encoding}
        options = {"columns": columns, "compression": compression, "size_limit": 1 << 14}
        with writer(out=str(folder / name), hashes=["sha1", "xxh64"], **options) as out:
            for number, ids in enumerate(documents):
                value: Any = np.array([*ids, EOS], dtype)
                value = value.tobytes() if encoding == "bytes" else value
                out.write({"a": "é" * (number % 3), "z": number, "tokens": value})

    for name in ("uint16", "int32", "int64", "uint32"):
        write(name, f"ndarray:{name}", name, None)
    write("dynamic", "ndarray", "uint16", "zstd:7")
    write("bytes", "bytes", "uint16", "gz")
    write("bz2", "ndarray:uint64", "uint64", "bz2:9")
    write("br", "ndarray:uint16", "uint16", "br")


def olmo_core(documents: list[list[int]], folder: Path) -> None:
    """Its files have no writer of their own; its reader finds the documents."""
    skip_init("olmo_core", "data")
    replace_modules("cached_path", "cached_path.schemes")
    utils = importlib.import_module("olmo_core.data.utils")
    for name in ("uint16", "uint32"):
        dtype = getattr(np, name)
        path = folder / f"{name}.npy"
        np.array([token for ids in documents for token in [*ids, EOS]], dtype).tofile(path)
        bounds = list(utils.iter_document_indices(path, eos_token_id=EOS, dtype=dtype))
        read = np.fromfile(path, dtype)
        print(json.dumps([read[start:end].tolist() for start, end in bounds]))


def datatrove(documents: list[list[int]], folder: Path) -> None:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    for size in (2, 4):
        file = TokenizedFile(
            str(folder), f"{size}.ds", save_index=True, save_loss_metadata=False, token_size=size
        )
        for ids in documents:
            file.write([*ids, EOS], None)
        file.close()


def megatron(documents: list[list[int]], folder: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name in ("int16", "int32", "int64", "uint16"):
        for has_modes in (False, True):
            prefix = str(folder / f"{name}{'-modes' * has_modes}")
            dtype = getattr(np, name)
            builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=has_modes)
            for ids in documents:
                builder.add_document(ids, [len(ids)], [0] if has_modes else None)
            builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    form, source, target = sys.argv[1:]
    with open(source) as file:
        globals()[form.replace("-", "_")](json.load(file), Path(target))
