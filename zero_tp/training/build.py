"""Build a model in DeepSpeed's engine, in the one order that works.

seeds → model (directly in its dtype; inside `zero.Init` for ZeRO-3; with its gradient hooks) → layouts audited →
recompute policy → compile → `deepspeed.initialize(mpu=topology)` → checks. What differs between the ZeRO stages is in
zero/stages.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from zero_tp.activations.memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.architectures import architecture_of
from zero_tp.config.refusals import check_deepspeed
from zero_tp.config.resolve import dtype_name
from zero_tp.config.typed import Door
from zero_tp.constants import DTYPES
from zero_tp.models.model import ParallelModel
from zero_tp.models.model import model_class as default_model_class
from zero_tp.parallel.elementwise import compile_elementwise, is_compiled
from zero_tp.parallel.layout import audit, whole_shape
from zero_tp.parallel.parameter import DrawnTogether, WeightSource
from zero_tp.topology import Topology
from zero_tp.training.guards import check_replicas
from zero_tp.zero.engine import ZeroEngine
from zero_tp.zero.ops import without_shared_memory_collectives
from zero_tp.zero.stages import zero_engine
from zero_tp.zero.states import local_shape


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Group the parameters for the optimizer: weight decay skips biases and norms, which have one dimension."""
    named = list(model.named_parameters())
    flat = [parameter for _, parameter in named if len(whole_shape(parameter)) < 2]
    matrices = [parameter for _, parameter in named if len(whole_shape(parameter)) >= 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": flat, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class BuiltEngine:
    """The parts of a training engine.

    Attributes:
        model: the unwrapped model. dtype: of its weights.
        zero: the engine of the ZeRO stage.
        activations: what backward keeps and recomputes.
        compiled: whether training's elementwise work runs in compiled kernels.
    """

    model: ParallelModel
    dtype: torch.dtype
    zero: ZeroEngine
    activations: ActivationMemory
    compiled: bool


def build(
    config: PretrainedConfig,
    topology: Topology,
    deepspeed_config: dict[str, Any],
    *,
    seed: int,
    device: torch.device,
    source: WeightSource | None,
    model_class: type[ParallelModel] | None,
    recompute: RecomputePolicy | None,
    compiled: bool | Literal["auto"],
) -> BuiltEngine:
    """Build the model and DeepSpeed's engine. Collective over all ranks. Arguments and errors: see `TrainingEngine`."""
    without_shared_memory_collectives()  # a script that calls no `connect_deepspeed` would wait for a compiler
    check_deepspeed(deepspeed_config, topology, Door.ENGINE, recompute)
    zero = zero_engine(deepspeed_config, topology)
    dtype: torch.dtype = getattr(torch, DTYPES[dtype_name(deepspeed_config)])
    # DeepSpeed sends all weights over DP from the first rank: zero.Init each as it is made, else `initialize`.
    source = source or DrawnTogether(seed, topology.data_group)
    with zero.construction():
        chosen = model_class or default_model_class(architecture_of(config).spec(config))
        model = chosen(config, topology, seed=seed, source=source, dtype=dtype, device=device)
    audit(model, topology, local_shape)
    activations = ActivationMemory(
        model,
        recompute or RecomputePolicy(mode="none"),
        deepspeed_config.get("activation_checkpointing", {}),
        device,
    )
    compiles = is_compiled(compiled, device)
    if compiles:
        compile_elementwise(model, device)
    decay = deepspeed_config.get("optimizer", {}).get("params", {}).get("weight_decay", 0.0)
    zero.initialize(model, parameter_groups(model, decay))
    check_replicas(model, topology)
    return BuiltEngine(model, dtype, zero, activations, compiles)
