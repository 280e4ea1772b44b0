"""A checkpoint as a run writes it, made in one process: for tests of what reads one, on any
topology.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.layout import stored_tensors, whole_shape
from zero_tp.parallel.safetensors_files import Entry, write_tensors
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint import directory
from zero_tp.run.checkpoint.manifest import OWN_HASH, content_hash, states_file
from zero_tp.run.checkpoint.reader import STARTS, ParameterLayout, tensor_name
from zero_tp.run.checkpoint.save import describe_tokenizer

KINDS = ("master", "exp_avg", "exp_avg_sq")
Whole = Callable[[str, str, Sequence[int]], Tensor]


def drawn(name: str, kind: str, shape: Sequence[int]) -> Tensor:
    """The same for the same name, kind and shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {kind}".encode()))
    return torch.randn(tuple(shape), generator=generator)


def write_checkpoint(
    run: Path,
    config: PretrainedConfig,
    *,
    tensor: int = 1,
    data: int = 1,
    step: int = 1,
    kinds: Sequence[str] = KINDS,
    whole: Whole = drawn,
    tokenizer: Path | None = None,
    fingerprint: TokenizerFingerprint | None = None,
    old: bool = False,
) -> Path:
    """Write `run`'s checkpoint of `step`; DP ranks hold equal runs of each TP shard.

    Args:
        old: record the tokenizer's path as it is, as older versions did.
    """
    model = ZeroTPForCausalLM(config, Topology(tensor, tensor > 1, world=tensor), device="meta")
    described = {name: ParameterLayout.of(stored) for name, stored in stored_tensors(model)}
    shapes = {name: whole_shape(stored) for name, stored in stored_tensors(model)}
    temporary, files = directory.begin(run), {}

    def read(name: str, kind: str, start: int, stop: int, tensor_rank: int) -> Tensor:
        shard = described[name].layout.shard(whole(name, kind, shapes[name]), tensor_rank, tensor)
        return shard.flatten()[start:stop]

    for tensor_rank in range(tensor):
        for data_rank in range(data):
            starts, entries = {}, []
            for name, stored in stored_tensors(model):
                share = -(-stored.numel() // data)
                start, stop = (
                    min(stored.numel(), share * rank) for rank in (data_rank, data_rank + 1)
                )
                if start == stop:
                    continue
                starts[name] = start
                # A buffer of the weights has no moments.
                for kind in kinds if isinstance(stored, nn.Parameter) else kinds[:1]:
                    lazily = partial(read, name, kind, start, stop, tensor_rank)
                    entries.append(
                        Entry(tensor_name(name, kind), (stop - start,), torch.float32, lazily)
                    )
            file = states_file(tensor_rank, data_rank)
            files[file] = write_tensors(temporary / file, entries, {STARTS: json.dumps(starts)})
    manifest: dict[str, Any] = {
        "tensor": tensor,
        "data": data,
        "sequence": tensor > 1,
        "zero_stage": 2,
        "dtype": "fp32",
        "model": config.to_dict(),
        "generation": GenerationConfig.from_model_config(config).to_dict(),
        "parameters": {name: one.to_json() for name, one in described.items()},
        "kinds": list(kinds),
        **({"ema": 0.999} if "ema" in kinds else {}),
        "progress": {
            "optimizer_steps": 1,
            "counters": {},
            "schedule": None,
            "learning_rates": [],
            "loss_scale": {},
        },
        "fixed": {},
        "corpora": {},
        **(
            {"tokenizer": str(tokenizer) if tokenizer else None}
            if old
            else describe_tokenizer(str(tokenizer) if tokenizer else None, fingerprint, run)
        ),
        "versions": {"torch": str(torch.__version__)},
        "config": {},
    }
    assert directory.commit(run, temporary, step, manifest, files) == []
    return directory.step_directory(run, step)


def flip_bit(file: Path, at: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


def flip_master(file: Path) -> None:
    """Flip a bit of the first master in a rank's file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    name = next(name for name in header if name.endswith("/master"))
    flip_bit(file, 8 + length + header[name]["data_offsets"][0])


@contextmanager
def rewritten(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """Yield a checkpoint's manifest; write it back, changed, with its own hash."""
    path = checkpoint / directory.MANIFEST
    manifest = json.loads(path.read_text())
    yield manifest
    manifest[OWN_HASH] = content_hash(manifest)
    path.write_text(json.dumps(manifest, indent=1))
