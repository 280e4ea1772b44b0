"""A reader gives any piece of a checkpoint as any other topology holds it, from the files that
have some of it.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from zero_tp.engine.zero.states import MASTER
from zero_tp.parallel.layout import Layout, Replicated, Sharded
from zero_tp.run.checkpoint.directory import Damaged
from zero_tp.run.checkpoint.manifest import (
    Manifest,
    ReplicatedParameter,
    ShardedParameter,
    states_file,
)
from zero_tp.run.checkpoint.reader import (
    STARTS,
    CheckpointReader,
    ParameterLayout,
    Place,
    tensor_name,
)

NAME = "layers.0.weight"


def reader_of(folder: Path, parameter: ParameterLayout, tensor: int, data: int) -> CheckpointReader:
    entry = (ShardedParameter if isinstance(parameter.layout, Sharded) else ReplicatedParameter)(
        **parameter.to_json()
    )
    fields: dict[str, Any] = {
        "parameters": {NAME: entry},
        "tensor": tensor,
        "data": data,
        "files": {},
    }
    return CheckpointReader(folder, Manifest.model_construct(**fields))


def saved(folder: Path, whole: Tensor, layout: Layout, tensor: int, data: int) -> CheckpointReader:
    """Write a parameter as `tensor` × `data` ranks hold it, in runs of each shard → a reader."""
    for tensor_rank, expert_rank in itertools.product(range(tensor), range(layout.experts)):
        start = 0
        shard = layout.shard(whole, tensor_rank, tensor, expert_rank).flatten()
        for number, fragment in enumerate(shard.tensor_split(data // layout.experts)):
            data_rank = number * layout.experts + expert_rank
            tensors = {tensor_name(NAME, MASTER): fragment.clone()} if len(fragment) else {}
            starts = {NAME: start} if len(fragment) else {}
            save_file(
                tensors, folder / states_file(tensor_rank, data_rank), {STARTS: json.dumps(starts)}
            )
            start += len(fragment)
    return reader_of(folder, ParameterLayout(layout, tuple(whole.shape)), tensor, data)


@given(st.data())
def test_any_piece_is_what_another_topology_holds(data: st.DataObject) -> None:
    old, new = (data.draw(st.integers(1, 6), size) for size in ("old", "new"))
    padded = data.draw(st.booleans(), "padded")
    part = (
        st.integers(1, 20)
        if padded
        else st.integers(1, 2).map(lambda count: count * math.lcm(old, new))
    )
    parts = tuple(data.draw(st.lists(part, min_size=1, max_size=3), "parts"))
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3), "shape")
    dim = data.draw(st.integers(0, len(shape) - 1), "dim")
    shape[dim] = sum(parts)
    # No element is zero, as padding is.
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    layouts: tuple[Layout, ...] = (Sharded(dim, parts, padded), Replicated())
    before, after = (data.draw(st.sampled_from(layouts), which) for which in ("before", "after"))
    rank = data.draw(st.integers(0, new - 1), "rank")
    expected = after.shard(whole, rank, new).flatten()
    start = data.draw(st.integers(0, len(expected) - 1), "start")
    numel = data.draw(st.integers(1, len(expected) - start), "numel")
    with tempfile.TemporaryDirectory() as folder:
        reader = saved(Path(folder), whole, before, old, data.draw(st.integers(1, 4), "replicas"))
        elements = slice(start, start + numel)
        wanted = ParameterLayout(after, tuple(shape))
        found = reader.piece(NAME, MASTER, wanted, Place(rank, new), elements)
        assert torch.equal(found, expected[elements])
        assert torch.equal(reader.piece(NAME, MASTER, wanted, Place(rank, new)), expected)


@given(st.data())
def test_a_layout_may_split_another_dimension(data: st.DataObject) -> None:
    """As experts are split where a TP layout split their rows, and over any expert ranks."""
    whole = torch.arange(1.0, 1 + 4 * 6 * 2).reshape(4, 6, 2)
    divided = [Sharded(1, (4, 2), experts=experts) for experts in (1, 2, 4)]
    layouts = (Sharded(0, (4,)), *divided, Sharded(2, (2,), experts=2))
    before, after = (data.draw(st.sampled_from(layouts), which) for which in ("before", "after"))
    expert_rank = data.draw(st.integers(0, after.experts - 1), "expert rank")
    expected = after.shard(whole, 1, 2, expert_rank).flatten()
    start = data.draw(st.integers(0, len(expected) - 1), "start")
    elements = slice(start, data.draw(st.integers(start + 1, len(expected)), "stop"))
    with tempfile.TemporaryDirectory() as folder:
        replicas = before.experts * data.draw(st.integers(1, 3), "replicas")
        reader = saved(Path(folder), whole, before, 2, replicas)
        wanted = ParameterLayout(after, (4, 6, 2))
        found = reader.piece(NAME, MASTER, wanted, Place(1, 2, expert_rank), elements)
        assert torch.equal(found, expected[elements])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("rank", "size", "holders"), [(1, 8, {0}), (1, 2, {2, 3}), (0, 1, {0, 1, 2, 3})]
)
def test_only_files_that_hold_some_of_a_piece_are_read(
    tmp_path: Path, dim: int, rank: int, size: int, holders: set[int]
) -> None:
    whole, layout = torch.rand(16, 16), Sharded(dim, (8, 8))
    reader = saved(tmp_path, whole, layout, 4, 2)
    for tensor_rank in set(range(4)) - holders:
        for data_rank in range(2):
            (tmp_path / states_file(tensor_rank, data_rank)).unlink()
    wanted = ParameterLayout(layout, (16, 16))
    found = reader.piece(NAME, MASTER, wanted, Place(rank, size))
    assert torch.equal(found, layout.shard(whole, rank, size).flatten())
    (tmp_path / states_file(max(holders), 1)).unlink()
    with pytest.raises(Damaged):
        reader_of(tmp_path, wanted, 4, 2).piece(NAME, MASTER, wanted, Place(rank, size))
