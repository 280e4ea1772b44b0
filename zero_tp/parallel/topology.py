"""The TP × DP grid of ranks, with its process groups, coordinates and seeds: DeepSpeed's `mpu`.

Ranks are laid out as in Megatron-LM (arXiv 1909.08053, section 3): t consecutive ranks form a
tensor-parallel (TP) group. Ranks at the same position in those groups form a data-parallel (DP)
group. Rank r has TP rank r mod t and DP rank r // t. With TP 2 × DP 3:

                 TP rank 0    TP rank 1
    DP rank 0        0            1         a line is a TP group: consecutive ranks
    DP rank 1        2            3
    DP rank 2        4            5         a column is a DP group, over which ZeRO partitions

With expert parallelism (EP), E consecutive DP ranks form an expert group, each with an E-th of the
experts. DP ranks at the same position in those groups have the same experts, and form an
expert-data group. With TP 1 × DP 4 and E 2:

                      expert rank 0    expert rank 1
    expert group 0          0                1         a line exchanges tokens
    expert group 1          2                3         a column sums the gradients of its experts
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from zero_tp.base.errors import ConfigError, UserError, shown

if TYPE_CHECKING:
    import torch
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


def describe_grid(tensor: int, data: int, sequence: bool, expert: int) -> str:
    """Return a grid in words: `TP 2 × DP 4, SP, EP 2`."""
    words = [f"TP {tensor} × DP {data}"]
    if sequence:
        words.append("SP")
    if expert > 1:
        words.append(f"EP {expert}")
    return ", ".join(words)


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


def check_expert_size(expert: int, data: int) -> None:
    """Check that the expert-parallel size divides the DP degree.

    Raises:
        ConfigError: with the sizes nearest to it that divide.
        UserError: it is not positive.
    """
    if expert < 1:
        raise UserError(f"zero_tp.parallel.expert: {expert} is not positive")
    if data % expert:
        near = nearest_divisors(expert, data)
        inequality = f"expert {expert} does not divide data {data}"
        raise ConfigError("zero_tp.parallel.expert", inequality, f"use {near}")


def nearest_divisors(number: int, *of: int) -> str:
    """Return in words the common divisors of some numbers nearest to `number`, as in `4 or 8`."""
    common = math.gcd(*of)
    divisors = [size for size in range(1, common + 1) if common % size == 0]
    below = [size for size in divisors if size < number][-1:]
    above = [size for size in divisors if size > number][:1]
    return " or ".join(str(size) for size in (*below, *above))


class Topology:
    """One rank's coordinates and process groups in the TP × DP grid.

    It is the `mpu` of `deepspeed.initialize`; the `get_*` methods are exactly those that DeepSpeed
    needs. It must not have `get_sequence_*` or `initialize_sequence_parallel`, by which DeepSpeed
    enables Ulysses and changes ZeRO's groups.

    Attributes:
        tensor, data: TP degree t and DP degree.
        expert: EP degree E: the ranks that share one set of all experts.
        tensor_rank, data_rank, expert_rank: this rank's coordinates.
        sequence: sequence parallelism (SP) in the model code, over the TP group.
        tensor_group, data_group: process groups, None when no process group exists (one process).
        expert_group: the ranks that exchange tokens; None without EP.
        expert_data_group: the ranks with the same experts; without EP the DP group.
    """

    def __init__(
        self,
        tensor: int = 1,
        sequence: bool = False,
        *,
        expert: int = 1,
        world: int | None = None,
        rank: int | None = None,
        timeout: timedelta | None = None,
    ):
        """Find this rank's coordinates and make the groups. Collective over all ranks: every rank
        makes every group.

        Args:
            tensor: TP degree t; world must be a multiple of it.
            sequence: enable SP; has no effect without TP.
            expert: EP degree E; the DP degree must be a multiple of it.
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
        check_expert_size(expert, self.data)
        self.expert = expert
        assert 0 <= self.rank < self.world, f"rank {self.rank} is not in a world of {self.world}"
        # Without TP there is nothing to shard over, and layers then skip every collective.
        self.sequence = sequence and tensor > 1
        self.tensor_rank = self.rank % tensor
        self.data_rank = self.rank // tensor
        self.expert_rank = self.data_rank % expert
        self.tensor_group: ProcessGroup | None = None
        self.data_group: ProcessGroup | None = None
        self.expert_group: ProcessGroup | None = None
        if connected:
            self.tensor_group = self._group(self.tensor_members(), timeout)
            self.data_group = self._group(self.data_members(), timeout)
        self.expert_data_group = self.data_group
        if connected and expert > 1:
            self.expert_group = self._group(self.expert_members(), timeout)
            self.expert_data_group = self._group(self.expert_data_members(), timeout)

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

    def check_backend(self, device: torch.device) -> None:
        """Refuse to send an accelerator's tensors over gloo.

        Raises:
            UserError: several ranks, a model on an accelerator, and groups that use gloo for it.
        """
        import torch.distributed as dist

        if device.type in ("cpu", "meta") or self.world == 1 or not dist.is_initialized():
            return
        # The world's, which all groups have, as in "cpu:gloo,cuda:nccl".
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        if backends.get(device.type) == "gloo":
            raise UserError(
                f"process group: its backend for {device.type} is gloo, over which no parallel "
                "run on an accelerator was compared with the plain one; call init_process_group "
                "without a backend, and leave ddp_backend out of TrainingArguments"
            )

    def tensor_members(self) -> list[list[int]]:
        """Return the global ranks of every TP group."""
        return [list(range(d * self.tensor, (d + 1) * self.tensor)) for d in range(self.data)]

    def data_members(self) -> list[list[int]]:
        """Return the global ranks of every DP group."""
        return [list(range(t, self.world, self.tensor)) for t in range(self.tensor)]

    def expert_members(self) -> list[list[int]]:
        """Return the global ranks of every expert group: ranks of one TP rank and E DP ranks."""
        size = self.expert
        return [
            ranks[first : first + size]
            for ranks in self.data_members()
            for first in range(0, self.data, size)
        ]

    def expert_data_members(self) -> list[list[int]]:
        """Return the global ranks of every expert-data group, which have the same experts."""
        return [
            ranks[rank :: self.expert]
            for ranks in self.data_members()
            for rank in range(self.expert)
        ]

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
        """Return the grid in words: `TP 2 × DP 4, SP, EP 2`."""
        return describe_grid(self.tensor, self.data, self.sequence, self.expert)

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
