"""The settings of a config, besides the model, that determine a run's memory and time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from zero_tp.base.constants import DTYPES
from zero_tp.base.settings.deepspeed import ActivationCheckpointing, OffloadOptimizer
from zero_tp.base.settings.optimizer import SGD, Muon, Optimizer, TorchAdam
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.engine.zero import facts
from zero_tp.engine.zero.orthogonalize import NewtonSchulz, products_dtype
from zero_tp.model.architectures.spec import LatentSpec, TransformerSpec
from zero_tp.model.transformer import LAYERS, TransformerLayer
from zero_tp.parallel.elementwise import is_compiled
from zero_tp.parallel.loss import block_positions
from zero_tp.run.config import RunConfig

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def page_locked(size: int) -> int:
    """Return the bytes that torch page-locks for a tensor of `size` bytes.

    Source: ATen/core/CachingHostAllocator.h.
    """
    # 5 bytes take 8, 8 take 8, 9 take 16.
    return 1 << (size - 1).bit_length()


class CheckpointBytes(NamedTuple):
    """The bytes of activation checkpoints beside those that the dry run counts."""

    device: float = 0.0
    host: float = 0.0


@dataclass(frozen=True)
class Workload:
    """One micro-batch on one rank.

    Attributes:
        length, batch: s and b.
        tensor, sequence: the TP degree, and whether SP is on.
        dtype: "fp32", "bf16" or "fp16".
        cpu: the ranks run on CPUs, else on accelerators.
        checkpointing: where the recomputed layers' inputs are kept.
        documents: attention stays inside a document (`data.document_attention` "reset").
        label_fraction: share of the tokens that have labels.
        varlen: the accelerators support `varlen_attn`, so documents and windows need no mask, and
            `flex_attention`, which keeps no capped scores.
        compiled: training's elementwise work runs in compiled kernels.
        expert: the EP degree E.
        expert_imbalance: rows that the busiest of E ranks gets, divided by the mean of all; see
            `imbalance`.
    """

    length: int
    batch: int
    tensor: int = 1
    sequence: bool = False
    dtype: str = "bf16"
    cpu: bool = False
    policy: RecomputePolicy = field(default_factory=lambda: RecomputePolicy(mode="none"))
    checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    documents: bool = False
    label_fraction: float = 1.0
    varlen: bool = True
    compiled: bool = False
    expert: int = 1
    expert_imbalance: float = 1.0

    def stores_scores(self, spec: TransformerSpec) -> bool:
        """Return whether backward keeps the attention's probabilities."""
        return spec.stores_scores(flash=self.varlen and not self.cpu)

    @property
    def imbalance(self) -> float:
        """Return by how much the rows of this rank's experts exceed the mean of an expert group;
        1 without EP, where a rank has the rows of its own tokens.
        """
        # At most E: one rank then has the rows of all.
        return min(self.expert_imbalance, self.expert)

    def expert_rows(self, spec: TransformerSpec) -> float:
        """Return the rows that the experts of a layer have on this rank."""
        assert spec.experts is not None
        return self.imbalance * self.length * self.batch * spec.experts.per_token

    def active_width(self, spec: TransformerSpec) -> float:
        """Return the width of all MLPs that this rank computes for each of its tokens, a mean over
        layers.
        """
        if spec.experts is None:
            return spec.active_width
        chosen = spec.experts.per_token * spec.experts.size * len(spec.expert_layers) / spec.layers
        return spec.active_width + (self.imbalance - 1) * chosen

    @property
    def labels(self) -> int:
        """Return the largest number of labels of a micro-batch."""
        return math.ceil(self.label_fraction * self.length) * self.batch

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def partitions_checkpoints(self) -> bool:
        """Return whether P_a partitions activation checkpoints over TP. SP shards them anyway."""
        return self.checkpointing.partition_activations and self.tensor > 1 and not self.sequence

    @property
    def offloads_checkpoints(self) -> bool:
        """Return whether an accelerator's activation checkpoints are kept in host memory
        (P_a+cpu).
        """
        return self.checkpointing.cpu_checkpointing and not self.cpu

    def activation_checkpoint_bytes(self, hidden: int, layers: int) -> CheckpointBytes:
        """Return the permanent bytes of activation checkpoints (M_D's buffer)."""
        recomputed = len(self.policy.recomputed_layers(layers))
        # Where checkpoints are, for R recomputed layers with inputs of S bytes:
        #
        #                           on the device          on the host
        #     by default           counted by the dry run   -
        #     contiguous           R · S, all the time      -
        #     offloaded            -                        R · (S page-locked)
        #     both                 -                        R · S page-locked as one tensor
        slots = self.checkpointing.number_checkpoints or recomputed
        parts = self.tensor if self.sequence or self.partitions_checkpoints else 1
        size = self.itemsize * math.ceil(self.length * self.batch * hidden / parts)
        is_contiguous = self.checkpointing.contiguous_memory_optimization
        if self.offloads_checkpoints:
            locked = page_locked(slots * size) if is_contiguous else recomputed * page_locked(size)
            return CheckpointBytes(0.0, float(locked))
        return CheckpointBytes(float(slots * size) if is_contiguous else 0.0, 0.0)

    def fully_recomputed_layers(self, layers: int) -> range:
        """Return the numbers of the layers that backward recomputes as a whole."""
        return self.policy.recomputed_layers(layers) if self.policy.mode == "full" else range(0)

    @property
    def recompute(self) -> str | dict[str, Any]:
        """Return the policy as a value of `zero_tp.recompute`.

        It is the mode, or an object if the policy has other fields too.
        """
        fields = self.policy.model_dump(exclude_defaults=True)
        return fields if len(fields) > 1 else self.policy.mode

    def describe_recompute(self) -> str:
        """Return the policy in words: `recompute full, layers 6`."""
        fields = self.policy.model_dump(exclude_defaults=True, exclude={"mode"})
        parts = [
            f"{name} {'+'.join(value) if name == 'modules' else value}"
            for name, value in fields.items()
        ]
        return ", ".join([f"recompute {self.policy.mode}", *parts]).replace("_", " ")


def workload_of(
    config: RunConfig, *, cpu: bool, varlen: bool = True, expert_imbalance: float = 1.0
) -> Workload:
    """Return the workload of a run's micro-batch on one rank."""
    block = config.zero_tp
    parallel = config.zero_tp.parallel
    return Workload(
        length=block.data.sequence_length,
        batch=config.micro_batch,
        tensor=parallel.tensor,
        sequence=parallel.sequence and parallel.tensor > 1,
        expert=parallel.expert,
        expert_imbalance=expert_imbalance,
        dtype=config.dtype,
        cpu=cpu,
        policy=block.recompute_policy,
        checkpointing=config.settings.activation_checkpointing,
        documents=block.data.document_attention == "reset" and block.masked is None,
        label_fraction=config.label_fraction,
        varlen=varlen,
        compiled=is_compiled(block.compile, torch.device("cpu" if cpu else "cuda")),
    )


# ---- ZeRO ----------------------------------------------------------------------------------------


class LossBlocks(NamedTuple):
    """The blocks of the loss of one micro-batch (parallel/loss.py).

    Attributes:
        length, batch: of the hidden states.
        rows: of this rank's part of the output layer.
        positions: of one block.
    """

    length: int
    batch: int
    rows: int
    positions: int

    @classmethod
    def of(cls, spec: TransformerSpec, workload: Workload) -> LossBlocks:
        rows = -(-spec.vocabulary // workload.tensor)
        dtype = getattr(torch, DTYPES[workload.dtype])
        # A masked model's loss has its labelled positions as one row.
        shape = (workload.length, workload.batch) if spec.causal else (workload.labels, 1)
        return cls(*shape, rows, block_positions(*shape, rows, spec.hidden, dtype))

    @property
    def number(self) -> int:
        return -(-self.length // self.positions)


def mean_over_layers(
    spec: TransformerSpec, count: Callable[[type[TransformerLayer]], float]
) -> float:
    """Return the mean of a number of a layer's class."""
    return statistics.fmean(count(LAYERS[name]) for name in spec.layer_names)


@dataclass(frozen=True)
class Layer:
    """The sizes of one rank's part of a layer, from which formulas.py and timing.py compute.

    The defaults are the papers': 16 bits, mlp_size = 4h, kv_heads = a, dropout.

    Attributes:
        s, b, h, a: sequence, batch of one micro-batch, hidden, attention heads.
        t: TP size.
        sequence: SP is on.
        itemsize: e, bytes of an element.
        head_size, kv_heads, mlp_size: d, k and f; None: h/a, a and 4h.
        latent: of latent attention.
        gated: the MLP multiplies its activation's output by a second product of its input.
        residual_dropout, attention_dropout: whether there is any.
        soft_cap: of the attention's scores.
        sinks: each head has a learnt score besides.
        recomputed_norms: number of norms whose outputs `selective` recomputes if its modules
            include "norm", a mean over layers.
    """

    s: int
    b: int
    h: int
    a: int
    t: int = 1
    sequence: bool = False
    itemsize: int = 2
    head_size: int | None = None
    kv_heads: int | None = None
    mlp_size: float | None = None
    latent: LatentSpec | None = None
    gated: bool = False
    residual_dropout: bool = True
    attention_dropout: bool = True
    recomputed_norms: float = 2
    soft_cap: bool = False
    sinks: bool = False

    @classmethod
    def of(cls, spec: TransformerSpec, workload: Workload) -> Layer:
        """Return a layer of a model at a run's micro-batch."""
        return cls(
            workload.length,
            workload.batch,
            spec.hidden,
            spec.heads,
            workload.tensor,
            workload.sequence,
            itemsize=workload.itemsize,
            head_size=spec.head_size,
            kv_heads=spec.kv_heads,
            mlp_size=workload.active_width(spec),
            latent=spec.latent,
            gated=spec.mlp_matrices == 3,
            residual_dropout=spec.dropouts.residual > 0,
            attention_dropout=spec.dropouts.attention > 0,
            recomputed_norms=mean_over_layers(spec, lambda kind: len(kind.recomputed_norms)),
            soft_cap=spec.score_cap is not None,
            sinks=spec.sinks,
        )

    @property
    def sbh(self) -> int:
        return self.s * self.b * self.h

    @property
    def residual(self) -> float:
        """Return the elements of the residual stream on this rank: sbh, under SP sbh/t."""
        return self.sbh / self.t if self.sequence else self.sbh

    @property
    def queries(self) -> float:
        """Return the elements of the queries on this rank: sbad/t, with the papers' sizes sbh/t."""
        return self.s * self.b * self.a * (self.head_size or self.h / self.a) / self.t

    @property
    def keys(self) -> float:
        """Return the elements of the keys on this rank, sbkd/t; the values have as many."""
        return self.queries * (self.kv_heads or self.a) / self.a

    @property
    def attention(self) -> float:
        """Return the elements of Q, K, V and the core's output, and of what backward needs to make
        them besides the layer's input.
        """
        if self.latent is None:
            return 2 * self.queries + 2 * self.keys
        # Keys are copies of a product's features and of the shared ones. Latents are kept before
        # their norms and after them, where under SP they are whole.
        rank_heads = self.s * self.b * self.a / self.t
        size = self.queries / rank_heads
        heads = 3 * size - self.latent.rotated + 2 * self.latent.value
        latents = self.s * self.b * self.latent.width
        return rank_heads * heads + latents * (1 + (1 / self.t if self.sequence else 1))

    @property
    def mlp(self) -> float:
        """Return the elements of the MLP's activation on this rank: sbf/t, with the papers'
        sizes 4sbh/t.
        """
        return self.s * self.b * (self.mlp_size or 4 * self.h) / self.t

    @property
    def scores(self) -> float:
        """Return the attention scores on this rank: as²b/t."""
        return self.a * self.s**2 * self.b / self.t


@dataclass(frozen=True)
class ZeroSettings:
    """The settings that ZeRO's and the optimizer's memory and communication depend on.

    Attributes:
        stage, data: ZeRO's stage, and the DP size N_d.
        expert: the EP degree E.
        cpu: the device is the CPU, and its memory is the host's.
        accumulation: micro-batches of a step.
        grad_accum_itemsize: bytes of an element of accumulated gradients (`grad_accum_dtype`).
        communication_itemsize: bytes of an element of gradients sent over DP
            (`communication_data_type`).
        moments: bytes of the optimizer's states for one parameter, without the fp32 master.
        matrix_moments: of a parameter that Muon updates; `moments` are of the others.
        average: bytes of the average of the weights for one parameter, 0 or 4.
        iteration: Newton-Schulz's, under Muon.
        torch_optimizer: the optimizer is an unfused class of torch whose update allocates
            temporaries.
        fused_adamw: it is torch's fused AdamW.
        clips_gradients: `gradient_clipping` is above 0.
        copies_gradients: a key makes DeepSpeed copy gradients (`contiguous_gradients`,
            `grad_accum_dtype`).
        overlap: `overlap_comm`.
        requests_owner_reduction: the config asks for reductions to the gradients' owners; see
            `reduces_to_owners`.
        pins_optimizer: the offloaded optimizer's buffers are page-locked; those of offloaded
            parameters always are.
        reduce_bucket, prefetch_bucket, persistence_threshold, max_live, max_reuse, sub_group: in
            elements.
    """

    stage: int
    data: int
    expert: int
    dtype: str
    cpu: bool
    accumulation: int
    grad_accum_itemsize: int
    communication_itemsize: int
    moments: int
    matrix_moments: int
    average: int
    iteration: NewtonSchulz | None
    torch_optimizer: bool
    fused_adamw: bool
    clips_gradients: bool
    copies_gradients: bool
    overlap: bool
    requests_owner_reduction: bool
    offload_optimizer: bool
    offload_param: bool
    pins_optimizer: bool
    reduce_bucket: int
    prefetch_bucket: int
    persistence_threshold: int
    max_live: int
    max_reuse: int
    sub_group: int

    @classmethod
    def of(cls, config: RunConfig, *, cpu: bool) -> ZeroSettings:
        """Return the settings of a run's config, which has a world size."""
        settings = config.settings
        zero = config.settings.zero_optimization
        optimizer = settings.optimizer
        offload = zero.offload_optimizer or OffloadOptimizer()
        assert optimizer is not None, "a run's config has one"
        return cls(
            stage=config.zero_stage,
            data=config.data_parallel,
            expert=config.zero_tp.parallel.expert,
            dtype=config.dtype,
            cpu=cpu,
            accumulation=config.accumulation,
            grad_accum_itemsize=ELEMENT_BYTES[settings.data_types.grad_accum_dtype or config.dtype],
            communication_itemsize=ELEMENT_BYTES[settings.communication_data_type or config.dtype],
            moments=_moment_bytes(optimizer),
            matrix_moments=4 if isinstance(optimizer.params, Muon) else 0,
            average=0 if config.zero_tp.training.ema is None else 4,
            iteration=_iteration(optimizer, config.dtype),
            torch_optimizer=_allocates_temporaries(optimizer),
            fused_adamw=facts.is_fused_adamw(optimizer),
            clips_gradients=settings.gradient_clipping > 0,
            copies_gradients=facts.copies_gradients(settings),
            overlap=zero.overlaps,
            requests_owner_reduction=not zero.use_multi_rank_bucket_allreduce
            and zero.reduce_scatter,
            offload_optimizer=zero.optimizer_device != "none",
            offload_param=zero.param_device != "none",
            pins_optimizer=offload.pin_memory and zero.optimizer_device != "nvme",
            reduce_bucket=zero.reduce_bucket_size,
            prefetch_bucket=zero.stage3_prefetch_bucket_size,
            persistence_threshold=zero.stage3_param_persistence_threshold,
            max_live=zero.stage3_max_live_parameters,
            max_reuse=zero.stage3_max_reuse_distance,
            sub_group=zero.sub_group_size,
        )

    @property
    def expert_data(self) -> int:
        """Return the number of ranks that have the same experts, N_d/E."""
        return self.data // self.expert

    @property
    def itemsize(self) -> int:
        """Return e, the bytes of an element of the run's dtype."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def keeps_gradients_in_place(self) -> bool:
        """Return whether gradients stay in `parameter.grad`."""
        return facts.in_place_gradients(
            self.stage, self.data, copied=self.copies_gradients, offloaded=self.offload_optimizer
        )

    @property
    def accumulates_wider(self) -> bool:
        """Return whether gradients are accumulated in a wider dtype than the run's."""
        return self.grad_accum_itemsize > self.itemsize

    @property
    def runs_bf16_optimizer(self) -> bool:
        """Return whether DeepSpeed's BF16_Optimizer runs.

        It accumulates all gradients in a permanent tensor.
        """
        wider = self.dtype == "bf16" and self.accumulates_wider
        return facts.is_bf16_optimizer(
            self.stage, sums_in_fp32=wider, offloaded=self.offload_optimizer
        )

    @property
    def weights_are_masters(self) -> bool:
        """Return whether the optimizer updates the weights themselves: they are fp32."""
        return facts.weights_are_masters(self.stage, self.dtype, offloaded=self.offload_optimizer)

    @property
    def runs_adamw_update(self) -> bool:
        """Return whether one pass over each gradient updates masters, moments and weights."""
        return facts.runs_adamw_update(
            self.stage,
            self.dtype,
            fused_adamw=self.fused_adamw,
            bf16_optimizer=self.runs_bf16_optimizer,
            offloaded=self.offload_optimizer,
        )

    @property
    def reduces_in_buckets(self) -> bool:
        """Return whether gradients are reduced in buckets of `reduce_bucket_size`, which may
        overlap with backward.
        """
        return self.stage > 0 and not self.runs_bf16_optimizer

    @property
    def reduces_to_owners(self) -> bool:
        """Return whether stages 1 and 2 reduce each part of a gradient to its owner, as in the
        paper.

        By default DeepSpeed all-reduces, which sends twice as much. Its BF16_Optimizer always
        all-reduces.
        """
        return (
            self.requests_owner_reduction
            and self.stage in (1, 2)
            and self.reduces_in_buckets
            and self.data > 1
        )

    @property
    def volumes(self) -> tuple[int, int]:
        """Return the volumes that a rank sends over DP in a step, as (gathers, reductions).

        The unit is Ψ(N_d-1)/N_d elements.

        An all-reduce counts twice. ZeRO-1 has (1, 2), and (1, 1) with `reduces_to_owners`
        (1910.02054, section 7.1).
        """
        if self.stage == 3:
            # Each micro-batch gathers in forward and once more in backward, and reduces.
            return 2 * self.accumulation, self.accumulation
        # Stage 2 keeps gradients of its partition only, so it must reduce those of each micro-batch
        # at once. Stages 0 and 1 sum them up locally and reduce once.
        reductions = self.accumulation if self.stage == 2 else 1
        return min(self.stage, 1), (1 if self.reduces_to_owners else 2) * reductions

    def with_stage(self, stage: int, **changes: Any) -> ZeroSettings:
        """Return these settings at another stage, and with other changes.

        A change to or from stage 3 sets `overlap_comm` to its default at the new stage.
        """
        overlap = stage == 3 if stage != self.stage and 3 in (stage, self.stage) else self.overlap
        return replace(self, stage=stage, overlap=overlap, **changes)


def _allocates_temporaries(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is an unfused class of torch whose update allocates
    temporaries.
    """
    params = optimizer.params
    if isinstance(params, SGD):
        return not params.fused and bool(params.weight_decay or params.nesterov)
    return isinstance(params, TorchAdam) and not params.fused


def _iteration(optimizer: Optimizer, dtype: str) -> NewtonSchulz | None:
    """Return the iteration by which the optimizer orthogonalises matrices, if it is Muon."""
    params = optimizer.params
    if not isinstance(params, Muon):
        return None
    steps, coefficients = params.ns_steps, params.ns_coefficients
    return NewtonSchulz(steps, coefficients, params.eps, products_dtype(dtype == "fp32"))


def _moment_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's fp32 states for one parameter.

    torch's SGD has none without momentum.
    """
    params = optimizer.params
    if isinstance(params, SGD):
        return 4 if params.momentum else 0
    return 12 if isinstance(params, TorchAdam) and params.amsgrad else 8
