"""The fp32 masters and the optimizer's states, whoever holds them: DeepSpeed's seven places behind one face.

Every rank holds, of each parameter's TP shard, one run of consecutive elements: all of it under ZeRO-0, its DP
partition under ZeRO-1 to 3. The run's master is a piece of a flat fp32 tensor, and the optimizer's states (moments) are
tensors of the same length beside it. What is found here are views: writing into them restores a run.

DeepSpeed's own tools are not used for this. Its checkpoints are pickled, load at another DP size with an error and at
another TP size by guessing from names; `ds_to_universal` takes patterns of names where the layouts know, and cannot be
loaded under ZeRO-3 with a foreign TP group; `safe_set_full_*` change the masters and leave the module as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from zero_tp.training.engine import TrainingEngine

MASTER = "master"


@dataclass(frozen=True)
class Held:
    """A run of one parameter's flattened TP shard on this rank.

    Attributes:
        name: the parameter's.
        start: the run's first element in the flattened shard.
        flat: the optimizer's own fp32 tensor, the key of its states.
        offset, numel: where the run is in it.
    """

    name: str
    start: int
    flat: Tensor
    offset: int
    numel: int

    def view(self, whole: Tensor) -> Tensor:
        """The run's elements of `flat` or of a state as long. [numel]"""
        return whole.detach().view(-1).narrow(0, self.offset, self.numel)


def unpartitioned_masters(optimizer: Any, parameters: list[nn.Parameter]) -> dict[int, tuple[Tensor, int]]:
    """Masters of ZeRO-0 by id of the parameter: (flat tensor, offset). In fp32 the parameter itself, else a copy in
    DeepSpeed's wrapper."""
    if not hasattr(optimizer, "loss_scale_config"):
        return {id(parameter): (parameter, 0) for parameter in parameters}
    masters: dict[int, tuple[Tensor, int]] = {}
    if hasattr(optimizer, "fp32_groups"):
        for halves, fulls in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            masters.update((id(half), (full, 0)) for half, full in zip(halves, fulls, strict=True))
        return masters
    for halves, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        offset = 0
        for half in halves:
            masters[id(half)] = (flat, offset)
            offset += half.numel()
    return masters


def _flat_groups(optimizer: Any) -> list[Tensor]:
    """The flat fp32 partition of each parameter group under ZeRO-1 and 2."""
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            groups: list[Tensor] = getattr(optimizer, name)
            return groups
    raise RuntimeError(f"{type(optimizer).__name__}: this version of DeepSpeed keeps its masters elsewhere")


class OptimizerStates:
    """What this rank holds of the masters and of the optimizer's states.

    Attributes:
        held: the runs, in the order of the model's parameters.
        optimizer: the innermost one, torch's or DeepSpeed's.
    """

    def __init__(self, engine: TrainingEngine):
        self.engine = engine
        self.optimizer = engine.optimizer
        while isinstance(getattr(self.optimizer, "optimizer", None), torch.optim.Optimizer):
            self.optimizer = self.optimizer.optimizer
        self._on_nvme = engine.stage == 3 and bool(self.engine.optimizer.swap_optimizer)
        find = {0: self._unpartitioned, 3: self._partitioned_parameters}.get(engine.stage, self._partitioned)
        self.held = [run for run in find(dict(engine.model.named_parameters())) if run.numel]

    def _unpartitioned(self, named: dict[str, nn.Parameter]) -> Iterator[Held]:
        masters = unpartitioned_masters(self.engine.optimizer, list(named.values()))
        for name, parameter in named.items():
            flat, offset = masters[id(parameter)]
            yield Held(name, 0, flat, offset, parameter.numel())

    def _partitioned(self, named: dict[str, nn.Parameter]) -> Iterator[Held]:
        groups = _flat_groups(self.engine.optimizer)
        for name, parameter in named.items():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                address = mapping.get_hp_fragment_address()
                flat = groups[mapping.param_group_index]
                yield Held(name, mapping.lp_fragment_address.start, flat, address.start, address.numel)

    def _partitioned_parameters(self, named: dict[str, nn.Parameter]) -> Iterator[Held]:
        zero3: Any = self.engine.optimizer
        for name, parameter in named.items():
            group, offset, length = zero3.grad_position[zero3.get_param_id(parameter)]
            start = self.engine.topology.data_rank * length
            whole: int = parameter.ds_numel  # type: ignore[attr-defined]
            numel = max(0, min(length, whole - start))
            yield Held(name, start, zero3.fp32_partitioned_groups_flat[group], offset, numel)

    def kinds(self) -> list[str]:
        """`master` and the names of the optimizer's states that are as long as it. The masters alone while the states
        are on NVMe, from where DeepSpeed does not restore them."""
        return [MASTER] if self._on_nvme or not self.held else [MASTER, *self._state_kinds(self.held[0])]

    def _state_kinds(self, run: Held) -> list[str]:
        state = self.optimizer.state.get(run.flat, {})
        tensors = {key: value for key, value in state.items() if key != "step" and torch.is_tensor(value)}
        return [key for key, value in tensors.items() if value.numel() == run.flat.numel()]

    def get(self, run: Held, kind: str) -> Tensor:
        """A view of the run's master or state, fp32 [numel]; a state that is not there yet is made, of zeros."""
        if self._on_nvme:
            from deepspeed.utils import safe_get_local_fp32_param

            parameter = self.engine.model.get_parameter(run.name)
            return safe_get_local_fp32_param(parameter).detach().flatten()[: run.numel].clone()
        if kind == MASTER:
            return run.view(run.flat)
        state = self.optimizer.state[run.flat]
        if kind not in state:
            state[kind] = torch.zeros_like(run.flat, requires_grad=False)
        return run.view(state[kind])

    @property
    def steps(self) -> int | None:
        """Updates that the optimizer counts; None when it counts none (SGD)."""
        counted = {int(state["step"]) for state in self.optimizer.state.values() if "step" in state}
        assert len(counted) <= 1, f"the optimizer's states were updated {counted} times"
        return counted.pop() if counted else None

    def set_steps(self, steps: int | None) -> None:
        """Bring every state's count to `steps`: torch's optimizers count in a tensor, DeepSpeed's in a number."""
        if steps is None:
            return
        by_torch = type(self.optimizer).__module__.startswith("torch.")
        for flat in {id(run.flat): run.flat for run in self.held}.values():
            self.optimizer.state[flat]["step"] = torch.tensor(float(steps)) if by_torch else steps
        _replay_cpu_adam(self.optimizer, steps)

    @torch.no_grad()
    def fill_module(self) -> None:
        """Bring the module's weights to the masters, as an optimizer step does. Collective over DP."""
        named = dict(self.engine.model.named_parameters())
        if self.engine.stage == 0:
            for run in self.held:
                named[run.name].view(-1).copy_(run.view(run.flat))
        elif self.engine.stage == 3:
            for run in self.held:
                partition: Tensor = named[run.name].ds_tensor  # type: ignore[attr-defined]
                partition.data.view(-1).narrow(0, 0, run.numel).copy_(run.view(run.flat))
            resident: list[Any] = list(self.engine.optimizer.persistent_parameters)
            if resident:
                resident[0].partition(resident)
                resident[0].all_gather(resident)
        else:
            self.engine.optimizer.update_lp_params()


def _replay_cpu_adam(adam: Any, steps: int) -> None:
    """Bring DeepSpeedCPUAdam's β^t to where an unbroken run has them.

    It multiplies them up in fp32, step by step, but a fresh one that starts at step t takes pow(β, t): another
    rounding, which 1 - β₂^t magnifies to 1e-5 of an update. Stepping one number through the same steps mends it.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if not isinstance(adam, DeepSpeedCPUAdam):
        return
    beta1, beta2 = adam.param_groups[0]["betas"]
    value, gradient, first, second = (torch.zeros(1) for _ in range(4))
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, value, gradient, first, second
        )
