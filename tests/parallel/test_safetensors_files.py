"""Files of a checkpoint: safetensors reads what was written, and the hash is that of the file's
parts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from zero_tp.parallel import safetensors_files as files
from zero_tp.parallel.safetensors_files import Entry, hash_earlier_file, hash_file, write_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


def entries_of(tensors: dict[str, Tensor]) -> list[Entry]:
    return [
        Entry(name, tuple(tensor.shape), tensor.dtype, tensor.clone)
        for name, tensor in tensors.items()
    ]


@pytest.mark.parametrize("part", [64, 1000, 8192, 2**20])
def test_safetensors_reads_what_was_written(
    tmp_path: Path, seed: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PART_BYTES", part)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index in range(12):
        shape = tuple(torch.randint(0, 9, (index % 4,), generator=generator).tolist())
        values = torch.randint(0, 200, shape, generator=generator)
        tensors[f"tensor {index}"] = values.to(DTYPES[index % len(DTYPES)])
    tensors["long"] = torch.randn(9000, generator=generator)
    tensors["transposed"] = torch.randn(70, 40, generator=generator).t()
    written = write_tensors(tmp_path / "file", entries_of(tensors), {"starts": "{}"})
    content = (tmp_path / "file").read_bytes()
    assert written.size == len(content)
    assert written.xxh3_128 == xxhash.xxh3_128(content).hexdigest()
    assert hash_file(tmp_path / "file") == written.xxh3_128
    digests = [
        hashlib.sha256(content[at : at + part]).digest() for at in range(0, len(content), part)
    ]
    earlier = hashlib.sha256(b"".join(digests)).hexdigest()
    assert hash_earlier_file(tmp_path / "file") == earlier, "as format 4 has it"
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"starts": "{}"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
