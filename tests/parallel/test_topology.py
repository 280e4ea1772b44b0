"""The TP × DP grid without process groups, and what DeepSpeed asks of its mpu."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from zero_tp.base.errors import UserError
from zero_tp.parallel.topology import Topology

SIZES = st.integers(1, 9)

PROVIDED = {
    f"get_{kind}_parallel_{what}"
    for kind in ("model", "tensor_model", "data")
    for what in ("group", "rank", "world_size")
}

MEMBERS = ("group", "rank", "world_size")
# The other names that DeepSpeed 0.19.8 reads from an mpu, and why zero_tp has no such method.
REVIEWED = {
    # Ulysses: each is behind hasattr, and its presence changes ZeRO's groups.
    *(f"get_sequence{data}_parallel_{what}" for data in ("", "_data") for what in MEMBERS),
    # Older names, read only if the tensor_model ones are missing.
    *(f"get_slice_parallel_{what}" for what in MEMBERS),
    # Pipeline parallelism: behind hasattr, world size 1 without them.
    *(
        f"get_{pipe}_parallel_{what}"
        for pipe in ("pipe", "pipeline_model")
        for what in ("group", "world_size")
    ),
    # AutoTP replaces the mpu by DeepSpeed's own module before it calls these two.
    *("_init_tp_mesh_device", "get_tensor_model_parallel_src_rank"),
    # Only mixture-of-experts groups read the list of ranks.
    "get_data_parallel_group_ranks",
}


def grid(tensor: int, data: int) -> list[Topology]:
    return [Topology(tensor, True, world=tensor * data, rank=rank) for rank in range(tensor * data)]


@given(tensor=SIZES, data=SIZES)
def test_groups(tensor: int, data: int) -> None:
    ranks = grid(tensor, data)
    world = tensor * data
    for rank, topology in enumerate(ranks):
        assert (topology.world, topology.rank, topology.tensor, topology.data) == (
            world,
            rank,
            tensor,
            data,
        )
        mine = [members for members in topology.tensor_members() if rank in members]
        # t consecutive ranks, starting at a multiple of t; the place in the group is the TP rank.
        start = rank - rank % tensor
        assert mine == [list(range(start, start + tensor))]
        assert (
            mine[0].index(rank)
            == topology.get_tensor_model_parallel_rank()
            == topology.get_model_parallel_rank()
        )
        across = [members for members in topology.data_members() if rank in members]
        assert len(across) == 1
        assert across[0].index(rank) == topology.get_data_parallel_rank()
        assert {ranks[other].tensor_rank for other in across[0]} == {topology.tensor_rank}
        assert len(across[0]) == topology.get_data_parallel_world_size() == data
        assert (
            topology.get_model_parallel_world_size()
            == topology.get_tensor_model_parallel_world_size()
            == tensor
        )
        assert topology.get_model_parallel_group() is None
        assert topology.sequence == (tensor > 1), "SP needs TP"
        assert topology.describe() == f"TP {tensor} × DP {data}" + (", SP" if tensor > 1 else "")
        for members in (topology.tensor_members(), topology.data_members()):
            assert sorted(rank for group in members for rank in group) == list(range(world))
    assert len({(topology.tensor_rank, topology.data_rank) for topology in ranks}) == world


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(
    ("tensor", "kinds"), [(1, ["tensor"]), (8, ["tensor", "data"]), (512, ["data"])]
)
def test_groups_of_512_ranks(tensor: int, kinds: list[str], splits: bool) -> None:
    """NCCL creates all groups of a kind in one call, gloo one by one; no group is created for
    the whole world.
    """
    rank, calls = 11, list[list[list[int]]]()
    world = SimpleNamespace(
        supports_splitting=splits, bound_device_id=torch.device("cuda:3") if splits else None
    )
    world._get_backend = lambda _: world

    def split_group(*, split_ranks: list[list[int]], timeout: object) -> object:
        calls.append(split_ranks)
        return tuple(next(members for members in split_ranks if rank in members))

    def new_group(members: list[int], *, timeout: object) -> object:
        calls.append([members])
        return tuple(members) if rank in members else dist.GroupMember.NON_GROUP_MEMBER

    functions: dict[str, Any] = {
        "split_group": split_group,
        "new_group": new_group,
        "is_initialized": lambda: True,
    }
    with (
        mock.patch.multiple(dist, **functions, get_world_size=lambda: 512, get_rank=lambda: rank),
        mock.patch.object(dist.distributed_c10d, "_get_default_group", lambda: world),
    ):
        topology = Topology(tensor)
    members = {"tensor": topology.tensor_members(), "data": topology.data_members()}
    for kind, group in (("tensor", topology.tensor_group), ("data", topology.data_group)):
        own = tuple(next(ranks for ranks in members[kind] if rank in ranks))
        assert group == (own if kind in kinds else world)
    created = [members[kind] for kind in kinds]
    assert calls == (created if splits else [[ranks] for kind in created for ranks in kind])


@given(tensor=SIZES, world=st.integers(1, 81))
def test_wrong_sizes_show_every_factor(tensor: int, world: int) -> None:
    if world % tensor == 0:
        assert Topology(tensor, world=world, rank=world - 1).data == world // tensor
        return
    with pytest.raises(UserError) as caught:
        Topology(tensor, world=world)
    assert f"tensor {tensor} × data {world / tensor:.4g} ≠ world {world}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("tensor", "world"), [(0, 4), (-2, 4), (1, 0), (2, 0), (1, -1)])
def test_sizes_below_one_are_refused(tensor: int, world: int) -> None:
    with pytest.raises(UserError):
        Topology(tensor, world=world, rank=0)


@given(tensor=SIZES, data=SIZES, base=st.integers(0, 2**31))
def test_seeds(tensor: int, data: int, base: int) -> None:
    ranks = grid(tensor, data)
    shared = {(r.data_rank, r.seed(base, per_rank=False)) for r in ranks}
    assert len(shared) == data  # one a TP group
    assert len({seed for _, seed in shared}) == data  # and another in each
    own = {r.seed(base, per_rank=True) for r in ranks}
    assert len(own) == len(ranks)
    assert not own & {seed for _, seed in shared}
    assert not own & {r.seed(base + 1, per_rank=True) for r in ranks}
    assert all(0 <= seed < 2**63 for seed in own)  # what torch.Generator takes


def test_the_mpu_has_what_deepspeed_needs_and_nothing_forbidden() -> None:
    topology = Topology(2, True, world=4, rank=3)
    public = {name for name in dir(topology) if not name.startswith("__")}
    assert {name for name in public if name.startswith("get_")} == PROVIDED
    assert not [
        name for name in public if "sequence_parallel" in name or name.startswith("get_sequence")
    ]
    assert not public & REVIEWED


def test_deepspeed_asks_its_mpu_for_nothing_new() -> None:
    """A new name in DeepSpeed's source has to be reviewed: a missing method can mean world size
    1 without an error.
    """
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    runtime = root / "runtime"
    files = [
        runtime / name
        for name in ("engine.py", "config.py", "utils.py", "bf16_optimizer.py", "base_optimizer.py")
    ]
    files += [root / "utils" / name for name in ("bwc.py", "groups.py")]
    files += sorted((runtime / "zero").glob("*.py")) + sorted((runtime / "fp16").glob("*.py"))
    used_names: set[str] = set()
    for file in files:
        source = file.read_text()
        used_names |= set(re.findall(r"\bmpu\.(\w+)", source))
        used_names |= set(re.findall(r"(?:has|get)attr\((?:self\.)?mpu,\s*['\"](\w+)['\"]", source))
    # A Megatron module's way of saying that it is Ulysses.
    used_names -= {"initialize_sequence_parallel"}
    assert used_names - PROVIDED == REVIEWED
    assert used_names >= PROVIDED - {"get_tensor_model_parallel_group"}
