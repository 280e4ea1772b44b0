"""The TP × DP grid of ranks, with its process groups, coordinates and seeds: DeepSpeed's `mpu`.

Ranks are laid out as in Megatron-LM (arXiv 1909.08053, section 3): t consecutive ranks form a
tensor-parallel (TP) group. Ranks at the same position in those groups form a data-parallel (DP)
group. Rank r has TP rank r mod t and DP rank r // t. With TP 2 × DP 3:

                 TP rank 0    TP rank 1
    DP rank 0        0            1         a line is a TP group: consecutive ranks
    DP rank 1        2            3
    DP rank 2        4            5         a column is a DP group, over which ZeRO partitions
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from zero_tp.base.errors import ConfigError, UserError, shown

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_RANKS = 2**20
MAX_NAMED = 4


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words.

    As in `rank 3`, `ranks 0 and 2`, or, of many, `ranks 0, 1, 2 and 509 more`.
    """
    words = [str(rank) for rank in ranks]
    if len(words) == 1:
        return f"rank {words[0]}"
    if len(words) > MAX_NAMED:
        words = [*words[: MAX_NAMED - 1], f"{len(words) - MAX_NAMED + 1} more"]
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def data_parallel_size(world: int, tensor: int) -> int:
    """Return the DP degree, world / tensor."""
    if world < 1:
        raise ConfigError("world size", f"{world} is not positive", "start at least one rank")
    if world > MAX_RANKS:
        raise ConfigError(
            "world size", f"{shown(world)} is too many ranks", f"use at most {MAX_RANKS}"
        )
    if world % tensor:
        remedy = f"start a multiple of {tensor} ranks, or use a tensor degree that divides {world}"
        inequality = f"tensor {tensor} × data {world / tensor:.4g} ≠ world {world}"
        raise ConfigError("zero_tp.parallel.tensor", inequality, remedy)
    return world // tensor


class Topology:
    """One rank's coordinates and process groups in the TP × DP grid.

    It is the `mpu` of `deepspeed.initialize`; the `get_*` methods are exactly those that DeepSpeed
    needs. It must not have `get_sequence_*` or `initialize_sequence_parallel`, by which DeepSpeed
    enables Ulysses and changes ZeRO's groups.

    Attributes:
        tensor, data: TP degree t and DP degree.
        tensor_rank, data_rank: this rank's coordinates.
        sequence: sequence parallelism (SP) in the model code, over the TP group.
        tensor_group, data_group: process groups, None when no process group exists (one process).
    """

    def __init__(
        self,
        tensor: int = 1,
        sequence: bool = False,
        *,
        world: int | None = None,
        rank: int | None = None,
        timeout: timedelta | None = None,
    ):
        """Find this rank's coordinates and make the groups. Collective over all ranks: every rank
        makes every group.

        Args:
            tensor: TP degree t; world must be a multiple of it.
            sequence: enable SP; has no effect without TP.
            world, rank: for a description of the grid without process groups (planning, tests); by
                default those of `torch.distributed`, or one process.
            timeout: limit of one collective in the new groups.
        """
        import torch.distributed as dist  # here, so that a config is read without loading torch

        connected = world is None and dist.is_initialized()
        self.world = dist.get_world_size() if connected else 1 if world is None else world
        self.rank = dist.get_rank() if connected else rank or 0
        self.tensor = tensor
        if tensor < 1:
            raise UserError(f"zero_tp.parallel.tensor: {tensor} is not positive")
        self.data = data_parallel_size(self.world, tensor)
        assert 0 <= self.rank < self.world, f"rank {self.rank} is not in a world of {self.world}"
        # Without TP there is nothing to shard over, and layers then skip every collective.
        self.sequence = sequence and tensor > 1
        self.tensor_rank = self.rank % tensor
        self.data_rank = self.rank // tensor
        self.tensor_group: ProcessGroup | None = None
        self.data_group: ProcessGroup | None = None
        if connected:
            self.tensor_group = self._group(self.tensor_members(), timeout)
            self.data_group = self._group(self.data_members(), timeout)

    def _group(self, members: list[list[int]], timeout: timedelta | None) -> ProcessGroup:
        """Make every group of `members`, which partition the world; return this rank's. Collective
        over all ranks.

        If one group holds all ranks, it is the world's own. NCCL makes all groups by one split of
        the world's communicator; `new_group` would split once per group, each time with all ranks.
        A group of one rank is made too, because DeepSpeed takes None for the world.
        """
        import torch.distributed as dist

        world = dist.distributed_c10d._get_default_group()
        if len(members) == 1:
            return world
        device = world.bound_device_id
        # Without a bound device NCCL has no communicator yet that could be split.
        if device is not None and world._get_backend(device).supports_splitting:
            groups: list[Any] = [dist.split_group(split_ranks=members, timeout=timeout)]
        else:
            groups = [dist.new_group(ranks, timeout=timeout) for ranks in members]
        own: ProcessGroup = next(
            group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER
        )
        return own

    def tensor_members(self) -> list[list[int]]:
        """Return the global ranks of every TP group."""
        return [list(range(d * self.tensor, (d + 1) * self.tensor)) for d in range(self.data)]

    def data_members(self) -> list[list[int]]:
        """Return the global ranks of every DP group."""
        return [list(range(t, self.world, self.tensor)) for t in range(self.tensor)]

    def seed(self, base: int, *, per_rank: bool) -> int:
        """Return the seed of one of the two random streams of dropout.

        Ranks of a TP group share a stream in replicated regions (`per_rank=False`) and have one
        each in sharded regions (`per_rank=True`). DP ranks never share a stream, because they train
        on other samples.
        """
        # Hashed: sums of seed and rank would give rank 1 the stream that rank 0 has in a run whose
        # seed is one higher.
        stream = f"{base}/{self.data_rank}/{self.tensor_rank if per_rank else 'shared'}"
        return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little") >> 1

    def describe(self) -> str:
        """Return the grid in words: `TP 2 × DP 2, SP`."""
        return f"TP {self.tensor} × DP {self.data}" + (", SP" if self.sequence else "")

    # Methods that DeepSpeed calls. Without one of them it falls back to world size 1 silently.
    def get_model_parallel_group(self) -> ProcessGroup | None:
        return self.tensor_group

    def get_model_parallel_rank(self) -> int:
        return self.tensor_rank

    def get_model_parallel_world_size(self) -> int:
        return self.tensor

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> ProcessGroup | None:
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_data_parallel_world_size(self) -> int:
        return self.data
