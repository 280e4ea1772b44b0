"""The ZeroEngine of each ZeRO stage; training and checkpoints do not depend on the stage.

Bytes of Ψ parameters with Adam in 16 bit on one of N replicas, and elements that a rank sends in a
step, by the paper (arXiv 1910.02054, sections 5 and 7); DeepSpeed's buffers come on top:

    stage               weights    gradients    masters, states    sent
    0                   2Ψ         2Ψ           12Ψ                2Ψ
    1 (P_os)            2Ψ         2Ψ           12Ψ/N              2Ψ
    2 (P_os+g)          2Ψ         2Ψ/N         12Ψ/N              2Ψ
    3 (P_os+g+p)        2Ψ/N       2Ψ/N         12Ψ/N              3Ψ
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors
from torch import Tensor, nn

from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.base.settings.schema import Spike
from zero_tp.engine.zero.adamw_update import AdamWUpdate, UnpartitionedAdamWUpdate, own_weights
from zero_tp.engine.zero.expert_groups import Trainable
from zero_tp.engine.zero.facts import (
    keeps_gradients_in_place,
    uses_bf16_optimizer,
    weights_are_masters,
)
from zero_tp.engine.zero.fragments import Fragment
from zero_tp.engine.zero.states import MASTER, OptimizerStates, StatesOnNVMe, partition_of
from zero_tp.engine.zero.veto import StepVeto
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.elementwise import COMPILED
from zero_tp.parallel.gradients import gradient_norm, scale_gradients, sum_of_squares
from zero_tp.parallel.layout import stored_tensors
from zero_tp.parallel.spans import Span
from zero_tp.parallel.topology import Topology

if TYPE_CHECKING:
    from zero_tp.model.parallel_model import ParallelModel


def compute_norms_in_chunks(optimizer: Any, topology: Topology) -> None:
    """Make a ZeRO optimizer of DeepSpeed compute gradient norms in chunks, instead of from whole
    fp64 copies, and see every rank's gradients that are not finite.
    """
    original = optimizer.get_grad_norm_direct

    def chunked_norm(
        gradients: Iterable[Tensor], params: Sequence[nn.Parameter], norm_type: float = 2
    ) -> Tensor:
        assert norm_type == 2, "only the 2-norm is computed"
        # DeepSpeed pairs gradients with parameters in order, after it has left padding out: so must
        # the norms.
        unpadded = (
            gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)
        )
        norms = [sum_of_squares(gradient).sqrt().reshape(1) for gradient in unpadded]
        # The norm of the norms is the norm of all gradients. Which parameters count on this TP
        # rank, and the sums over DP and TP, stay DeepSpeed's.
        norm: Tensor = original(norms, params, norm_type)
        if topology.tensor == 1:
            return norm
        # DeepSpeed counts a replicated gradient on the first TP rank only, and in fp32 the norm is
        # all that it looks at. 0 times all norms is nan if one of them is not finite.
        nothing = 0.0 * torch.cat([*norms, norm.new_zeros(1).to(torch.float64)]).sum()
        for group in (topology.data_group, topology.tensor_group):
            nothing = all_reduce(nothing, group)
        return norm + nothing.to(norm)

    optimizer.get_grad_norm_direct = chunked_norm


class ZeroStage0(ZeroEngine):
    """ZeRO-0: every DP rank holds all masters and states. `_clip` computes the gradient norm in
    fp64; in 16 bits AdamW's update clips, else `_clip` does.

    With a parameter A of 5 elements, B of 3, and two replicas:

        each rank updates    A0 A1 A2 A3 A4   B0 B1 B2
        rank 0 saves         A0 A1 A2         B0 B1          (`checkpoint_slice`)
        rank 1 saves         A3 A4            B2

    DeepSpeed's own clipping is off: see `facts.deepspeed_clips`.
    """

    def __init__(self, settings: DeepSpeedSettings, topology: Topology, veto: StepVeto):
        super().__init__(settings, topology, veto)
        self._last_norm = float("nan")
        self._update: UnpartitionedAdamWUpdate | None = None

    def initialize(self, model: ParallelModel, trainable: Trainable) -> None:
        super().initialize(model, trainable)
        # In 16 bit DeepSpeed wraps the optimizer.
        self._has_fp32_masters = hasattr(self.optimizer, "loss_scale_config")
        if self._has_fp32_masters:
            self._undo_first_step()
            if UnpartitionedAdamWUpdate.is_supported(self.optimizer):
                self._update = UnpartitionedAdamWUpdate(
                    self.optimizer, COMPILED if self.compiled else None
                )
                self.optimizer.step = self._update.step
        is_divided = self.deepspeed_engine.gradient_predivide_factor() != 1.0
        if self.topology.data == 1 and not is_divided:
            # The mean over one replica would copy all gradients to a flat tensor and back.
            self.deepspeed_engine.allreduce_no_retain = lambda *_, **__: None

    @torch.no_grad()
    def _undo_first_step(self) -> None:
        """Undo the first step of DeepSpeed's 16-bit optimizers.

        To allocate their states they step once on zero gradients, which decays the masters by
        lr·weight_decay and leaves Adam's bias correction one step ahead.
        """
        inner = self.optimizer.optimizer
        inner.state.clear()
        for group in inner.param_groups:
            group.pop("step", None)
        for fragment in self.fragments():
            fragment.master.copy_(self.model.get_parameter(fragment.name).flatten())

    def backward(self, loss: Tensor, **options: Any) -> None:
        # DeepSpeed 0.19.8 scales only the losses of its ZeRO optimizers, but ZeRO-0's divides by
        # the scale too.
        super().backward(
            loss if self.loss_scale is None else loss * self.loss_scale.value, **options
        )

    def _step(self) -> None:
        if self.deepspeed_engine.is_gradient_accumulation_boundary():
            self._clip()
        super()._step()

    def _clip(self) -> None:
        """Compute the norm; clip, or let the update clip, or skip the step. Reads the norm once."""
        parameters = list(self.model.parameters())
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        # Gradients still carry fp16's loss scale; the step divides by it.
        norm = gradient_norm(parameters, self.topology) / scale
        self._last_norm = norm.item()
        if not math.isfinite(self._last_norm):
            # All ranks have read the same. Gradients of 1e25 are finite, but not their squares.
            norm = gradient_norm(parameters, self.topology, exact=True) / scale
            self._last_norm = norm.item()
        is_spike = self.veto.finds_spike(norm)
        # The norm is the same number on all ranks, so all of them apply the step or none does.
        is_applied = not is_spike and math.isfinite(self._last_norm)
        limit = self.settings.gradient_clipping
        clip = min(1.0, limit / (self._last_norm + 1e-6)) if limit > 0 else 1.0
        if self._update is not None:
            # A square beyond fp32 would make a second moment infinite for good.
            fits = (self._last_norm * clip) ** 2 <= torch.finfo(torch.float32).max
            self._update.prepare(self._last_norm, clip / scale if is_applied and fits else None)
            return
        if is_applied and clip < 1.0:
            scale_gradients(parameters, clip)
        if not self._has_fp32_masters:
            # A plain torch optimizer checks nothing: remove its gradients, and set the engine's
            # flag.
            self.optimizer.overflow = not is_applied
            if not is_applied:
                for parameter in parameters:
                    parameter.grad = None
        elif is_spike:
            for parameter in parameters:
                if parameter.grad is not None:
                    # The wrapper looks at the gradients, and not at a flag that could be set before
                    # its step.
                    parameter.grad.fill_(float("nan"))  # DeepSpeed's wrapper skips the step

    def _norm(self) -> float:
        return self._last_norm

    def replicated_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's weights, and the masters and states, which are not partitioned."""
        yield from super().replicated_tensors()
        states = self.states()
        for kind in states.kinds():
            for fragment in states.fragments:
                if states.has(fragment, kind) and (kind != MASTER or self._has_fp32_masters):
                    yield f"{fragment.name} ({kind})", states.get(fragment, kind)

    def fragments(self) -> Iterator[Fragment]:
        masters = dict(self._masters())
        for name, parameter in self.model.named_parameters():
            flat, offset = masters[parameter]
            yield Fragment(name, Span(0, offset, parameter.numel()), flat)

    def _masters(self) -> Iterator[tuple[nn.Parameter, tuple[Tensor, int]]]:
        """Yield each parameter with its master, (flat tensor, offset): in fp32 the parameter
        itself.

        In 16 bit FP16_UnfusedOptimizer has a master for each parameter (`fp32_groups`), and
        FP16_Optimizer one flat master for each group.
        """
        wrapper = self.optimizer
        if not self._has_fp32_masters:
            yield from ((parameter, (parameter, 0)) for parameter in self.model.parameters())
        elif hasattr(wrapper, "fp32_groups"):
            for parameters, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                yield from ((p, (master, 0)) for p, master in zip(parameters, masters, strict=True))
        else:
            for parameters, flat in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
                offset = 0
                for parameter in parameters:
                    yield parameter, (flat, offset)
                    offset += parameter.numel()

    def checkpoint_slice(self, fragment: Fragment) -> Fragment:
        """Return this rank's piece: all DP ranks hold the same fragment, and each writes a part."""
        numel = fragment.span.length
        length = -(-numel // self.topology.data)
        share = Span.block(self.topology.data_rank, length, numel)
        return replace(fragment, span=fragment.span.narrow(share.whole))

    @torch.no_grad()
    def fill_module(self) -> None:
        for fragment in self.fragments():
            self.model.get_parameter(fragment.name).view(-1).copy_(fragment.master)


class ZeroStage1And2(ZeroEngine):
    """ZeRO-1 and ZeRO-2: masters and states are partitioned over DP, in flat groups of parameters.

    A group is one flat tensor, cut into as many equal pieces as there are replicas. Of a parameter
    A of 5 elements and B of 3, the masters and states are:

        rank 0    A0 A1 A2 A3      fragment of A: Span(0, 0, 4); no fragment of B
        rank 1    A4 B0 B1 B2      of A: Span(4, 0, 1); of B: Span(0, 1, 3)

    The weights are whole on every rank; each updates its piece, and an all-gather completes them.
    Of fp32 weights the masters are a part, not a copy.
    With one replica gradients stay in place (`keeps_gradients_in_place`).
    """

    _update: AdamWUpdate | None = None

    def initialize(self, model: ParallelModel, trainable: Trainable) -> None:
        super().initialize(model, trainable)
        zero = self.settings.zero_optimization
        offloaded = zero.optimizer_device != "none"
        if weights_are_masters(zero.stage, self.settings.dtype, offloaded=offloaded):
            self._drop_masters()
        if keeps_gradients_in_place(self.settings, self.topology.data):
            # DeepSpeed reduces a bucket by the first if gradients are contiguous, else by the
            # second. Over one replica both would only copy.
            for name in ("average_tensor", "buffered_reduce_fallback"):
                setattr(self.optimizer, name, lambda *_, **__: None)
        if uses_bf16_optimizer(self.settings):
            self._wrap_bf16_step(self.optimizer)
            return
        if AdamWUpdate.is_supported(self.optimizer):
            elementwise = COMPILED if self.compiled else None
            self._update = AdamWUpdate(self.optimizer, self.topology, self.veto, elementwise)
            self.optimizer.step = self._update.step
            return
        compute_norms_in_chunks(self.optimizer, self.topology)
        original = self.optimizer.scaled_global_norm

        def norm_or_veto(norm_type: int = 2) -> Tensor:
            # This is the first place of DeepSpeed's step that knows the norm. An infinite norm
            # makes it skip the update, as it does if gradients are not finite.
            norm: Tensor = original(norm_type)
            is_spike = self.veto.finds_spike(norm / self.optimizer.loss_scale)
            return torch.full_like(norm, float("inf")) if is_spike else norm

        self.optimizer.scaled_global_norm = norm_or_veto

    def _drop_masters(self) -> None:
        """Make the masters this rank's part of the weights, which are fp32, too."""
        optimizer = self.optimizer
        for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
            # The same tensor object, which the optimizer knows, with other memory.
            master.data = own_weights(optimizer, group)
        optimizer._link_all_hp_params()  # their fragments are views of the masters

    def _wrap_bf16_step(self, optimizer: Any) -> None:
        """Make BF16_Optimizer look for a spike first: its `step` computes the norm inside."""
        step = optimizer.step

        def step_unless_vetoed() -> None:
            if self.veto.is_active:
                # Only with bounds, because the step computes the same norm again.
                gradients, _ = optimizer.get_grads_for_norm()
                norm = get_global_norm_of_tensors(gradients, optimizer.norm_type, optimizer.mpu)
                if self.veto.finds_spike(norm):
                    for gradient in gradients:
                        gradient.fill_(float("nan"))  # BF16_Optimizer skips the step
            step()

        # Not a norm function as in the other classes: this one's step calls a function of its
        # module, which all BF16_Optimizers of the process share.
        optimizer.step = step_unless_vetoed

    def fragments(self) -> Iterator[Fragment]:
        optimizer = self.optimizer
        # BF16_Optimizer has the first attribute, DeepSpeedZeroOptimizer the second.
        groups = (
            getattr(optimizer, "fp32_groups_flat_partition", None)
            or optimizer.single_partition_of_fp32_groups
        )
        for name, parameter in self.model.named_parameters():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                # DeepSpeed's addresses: `lp` counts in the parameter, `hp` in this rank's piece of
                # the flat group.
                address = mapping.get_hp_fragment_address()
                flat = groups[mapping.param_group_index]
                span = Span(mapping.lp_fragment_address.start, address.start, address.numel)
                yield Fragment(name, span, flat)

    @torch.no_grad()
    def fill_module(self) -> None:
        # DeepSpeed's own end of a step: round this rank's piece, then all-gather the others.
        self.optimizer.update_lp_params()


class ZeroStage3(ZeroEngine):
    """ZeRO-3: parameters, too, are partitioned over DP, each by itself, and gathered while they
    are needed.

    Each parameter is padded to equal pieces. Of A with 5 elements and B with 3, two replicas have
    as weights, masters and states:

        rank 0    A0 A1 A2   B0 B1
        rank 1    A3 A4 .    B2 .       fragment of A: Span(3, 0, 2); of B: Span(2, 3, 1)
    """

    lock_step = True

    def initialize(self, model: ParallelModel, trainable: Trainable) -> None:
        super().initialize(model, trainable)
        compute_norms_in_chunks(self.optimizer, self.topology)
        original = self.optimizer._get_norm_groups

        def norms_or_veto() -> list[Any]:
            norms: list[Any] = original()
            if not self.veto.is_active:
                return norms
            # As DeepSpeed's step combines them; an infinite one makes it skip the update.
            norm = combine_grad_norm_groups(norms) / self.optimizer.loss_scale
            return [float("inf")] if self.veto.finds_spike(norm) else norms

        self.optimizer._get_norm_groups = norms_or_veto

    def _step(self) -> None:
        is_update = self.deepspeed_engine.is_gradient_accumulation_boundary()
        super()._step()
        accelerator = get_accelerator()
        if is_update and not accelerator.is_synchronized_device():
            # DeepSpeed 0.19.8 gathers on a side stream. Nothing orders that after the update,
            # unless its throughput timer or its gather of persistent weights synchronises with the
            # device.
            gather_stream = self.optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
            gather_stream.wait_stream(accelerator.current_stream())

    def replicated_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that stay gathered: those smaller than
        `stage3_param_persistence_threshold`, and buffers.
        """
        # All other weights are partitions, of which each element is on one DP rank only.
        resident = {id(parameter) for parameter in self.optimizer.persistent_parameters}
        for name, tensor in stored_tensors(self.model):
            if id(tensor) in resident or not isinstance(tensor, nn.Parameter):
                yield name, tensor.detach()

    def construction(self) -> AbstractContextManager[Any]:
        # zero.Init reads the DP size from deepspeed.comm before it initialises deepspeed.comm.
        deepspeed.init_distributed(verbose=False)
        return deepspeed.zero.Init(
            # With mpu= alone it ignores the DP group and overwrites the other TP ranks' shards. It
            # needs mpu= too, to read the batch sizes.
            data_parallel_group=self.topology.data_group,
            mpu=self.topology,
            # No dtype=: with one, DeepSpeed 0.19.8 uses bf16 on devices that do not support fp16.
            config_dict_or_path=self._config,
        )

    def states(self) -> OptimizerStates:
        # The states are in files between steps, so there is no tensor to take views of.
        if self.optimizer.swap_optimizer:
            return StatesOnNVMe(self.fragments(), self.optimizer, self.model)
        return super().states()

    def fragments(self) -> Iterator[Fragment]:
        for name, parameter in self.model.named_parameters():
            # `length` is that of a piece, its padding included.
            group, offset, length = self.optimizer.grad_position[
                self.optimizer.get_param_id(parameter)
            ]
            shard_numel: int = parameter.ds_numel  # type: ignore[attr-defined]
            span = Span.block(self.topology.data_rank, length, shard_numel, offset)
            yield Fragment(name, span, self.optimizer.fp32_partitioned_groups_flat[group])

    def updated_tensors(self) -> list[list[Tensor]]:
        # DeepSpeed steps each sub-group by itself.
        return [[flat] for flat in self.optimizer.fp32_partitioned_groups_flat]

    @torch.no_grad()
    def fill_module(self) -> None:
        for fragment in self.states().fragments:
            parameter = self.model.get_parameter(fragment.name)
            partition_of(parameter, self.topology.data_rank).copy_(fragment.master)
        # Weights that are gathered are a second copy, which forward reads: drop it. After an
        # evaluation they are more than the resident ones, because DeepSpeed keeps the last layers'
        # for the backward that follows in training.
        self.optimizer.parameter_offload.partition_all_parameters()
        resident: list[Any] = list(self.optimizer.persistent_parameters)
        if resident:
            resident[0].all_gather(resident)


STAGES: dict[int, type[ZeroEngine]] = {
    0: ZeroStage0,
    1: ZeroStage1And2,
    2: ZeroStage1And2,
    3: ZeroStage3,
}


def engine_of_stage(
    settings: DeepSpeedSettings, topology: Topology, spike: Spike | None = None
) -> ZeroEngine:
    """Return the engine of a config's stage; it is not initialised yet.

    Args:
        spike: bounds of the spikes that skip a step; None: there are none.
    """
    return STAGES[settings.stage](settings, topology, StepVeto(topology, spike))
