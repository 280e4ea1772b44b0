"""What a step on a simulated accelerator asks of the host, and what it gives its process group.

Forward, backward and our part of the step run on fake tensors
(zero_tp/tools/planning/simulated_accelerator.py), and every operation is looked at. DeepSpeed's
engine does not run on fake tensors: a stub has its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from zero_tp.data.batch import AnyBatch
from zero_tp.engine import guards
from zero_tp.engine.engine import TrainingEngine
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.parallel.gradients import gradient_norm
from zero_tp.parallel.topology import Topology
from zero_tp.run.process.signals import Requests
from zero_tp.tools.planning import dryrun, simulated_accelerator
from zero_tp.tools.planning.plan_settings import Workload
from zero_tp.tools.planning.tracking import DryRunPart, measure

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
"""Operations that give the host a value of the device."""
SHAPES = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"}
"""Operations whose result's shape the host has to learn from the device."""

UNREPEATABLE = {
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *(
        "adaptive_max_pool2d_backward",
        "fractional_max_pool2d_backward",
        "fractional_max_pool3d_backward",
    ),
    *("max_unpool2d", "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward"),
    *(
        "upsample_bicubic2d_backward",
        "upsample_trilinear3d_backward",
        "_upsample_bilinear2d_aa_backward",
    ),
    *("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward"),
    *(
        "nll_loss2d_forward",
        "_ctc_loss_backward",
        "_embedding_bag_backward",
        "put",
        "put_",
        "histc",
        "bincount",
    ),
    *("median", "nanmedian", "kthvalue", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    *("cumsum", "cumsum_", "scatter_reduce", "scatter_reduce_"),
}
"""Operations that `torch.use_deterministic_algorithms` documents to raise on CUDA, all or some of
their calls.

Of NLLLoss only the kernel for images does (`NLLLoss2d.cu`), not the one for rows of classes.
"""

ENCODERS = ("bert", "megatron-bert")
ACCUMULATION = 2


class Watching(TorchDispatchMode):
    """Records operations for which host and device wait, or that NCCL refuses; counts results
    [.., s, s].
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.square = (length, length)
        self.operations, self.collectives, self.squares, self.packed = 0, 0, 0, 0
        self.found: dict[str, None] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        there = [each for each in tensors if each.device.type != "cpu"]
        space, name = function.namespace, function._schema.name.split("::")[1]
        self.squares += any(
            isinstance(each, Tensor) and each.shape[-2:] == self.square
            for each in tree_leaves(result)
        )
        self.packed += name == "_varlen_attn"
        if space == "c10d":
            self.collectives += 1
            if len(there) < len(tensors):
                self.found[f"{name} of a tensor on the host"] = None
            if not all(each.is_contiguous() for each in tensors):
                self.found[f"{name} of a tensor that is not contiguous"] = None
            if len({each.dtype for each in tensors}) > 1:
                self.found[f"{name} of two dtypes"] = None
        elif there and name in READS:
            self.found[f"{name} reads a value"] = None
        elif there and name in UNREPEATABLE and tensors[-1].is_floating_point():
            self.found[f"{name} adds in no fixed order on CUDA"] = None
        elif there and name in SHAPES:
            self.found[f"{name} waits for a shape"] = None
        elif (
            there
            and name in ("index", "index_put_")
            and any(
                isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)
                for each in args[1]
            )
        ):
            self.found[f"{name} by a mask waits for a shape"] = None
        elif len(there) < len(tensors) and there and self._moves(name, tensors, args, kwargs or {}):
            self.found[f"{name} between host and device, for which both wait"] = None
        return result

    def _moves(
        self, name: str, tensors: list[Tensor], args: Any, kwargs: Mapping[str, Any]
    ) -> bool:
        if name in ("_to_copy", "copy_"):
            return not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        # Numbers go with the launch.
        return any(each.device.type == "cpu" and each.dim() > 0 for each in tensors)


OTHER_SIZES = {
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_num_experts": 4,
    "moe_layer_start_index": 0,
}


def config_of(model_type: str, **fields: Any) -> Any:
    """A model with two layers."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "vocab_size": 96,
    }
    sizes |= {"max_position_embeddings": 64}
    sizes |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    if model_type != "gpt2":
        sizes["intermediate_size"] = 128
    if model_type not in ("gpt2", "gpt_neox", *ENCODERS):
        sizes["num_key_value_heads"] = 4
    declared = vars(AutoConfig.for_model(model_type))
    sizes |= {name: size for name, size in OTHER_SIZES.items() if name in declared}
    return AutoConfig.for_model(model_type, **sizes | fields)


def watched(model_type: str, workload: Workload, **fields: Any) -> Watching:
    """What is seen of one micro-batch."""
    seen = Watching(workload.length)

    def looking(model: ParallelModel, batch: AnyBatch) -> list[DryRunPart]:
        with torch.no_grad():
            model(batch.input_ids)  # the device keeps its copies of what never changes
        with seen:
            return measure(model, batch)

    with mock.patch.object(dryrun, "measure", looking):
        dryrun.dry_run(config_of(model_type, **fields), workload, all_layers=True)
    return seen


class StubDeepSpeedEngine:
    """Stands in for DeepSpeed's engine and its optimizer: computes the norm and updates nothing."""

    overflow, loss_scale, skipped_steps = False, 1.0, 0

    def __init__(self, model: Any, mpu: Topology, **_: Any):
        self.model, self.dp_world_size, self.param_groups = model, mpu.data, [{"lr": 1.0}]
        self.micro_steps = 0
        self.norm: Tensor | None = None
        self.train, self.eval = model.train, model.eval

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.model(*arguments, **options)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradient_accumulation_steps(self) -> int:
        return ACCUMULATION

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_steps % ACCUMULATION == ACCUMULATION - 1

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.norm = self.scaled_global_norm()
            self.model.zero_grad(set_to_none=True)
        self.micro_steps += 1

    def get_grad_norm_direct(self, *_: Any, **__: Any) -> Tensor:
        """DeepSpeed's norm of a group, which `scaled_global_norm` below does not call."""
        raise AssertionError("`scaled_global_norm` computes the norm of all groups")

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        return gradient_norm(list(self.model.parameters()), self.model.topology).float()

    def get_global_grad_norm(self) -> Tensor | None:
        return self.norm

    def fp16_enabled(self) -> bool:
        return False


@contextmanager
def stubbed(model: ParallelModel) -> Iterator[TrainingEngine]:
    """The engine of a run at ZeRO-1 and DP 2 around a model on fake tensors, without DeepSpeed."""
    topology = copy.copy(model.topology)
    topology.world, topology.data = 2 * topology.tensor, 2
    topology.data_group = dryrun.fake_topology(2, False).tensor_group
    settings: dict[str, Any] = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}

    def initialize(**given: Any) -> tuple[Any, ...]:
        stub = StubDeepSpeedEngine(given["model"], given["mpu"])
        return stub, stub, None, None

    # Fake tensors have no values.
    with (
        mock.patch.object(deepspeed, "initialize", initialize),
        mock.patch.object(guards, "_to_host", lambda pairs: [[0.0, 0.0]] * len(pairs)),
        mock.patch.object(
            dist, "all_reduce", partial(all_reduce_of, dist.all_reduce, topology.data_group)
        ),
    ):
        build: Any = TrainingEngine.from_dict
        device = next(model.parameters()).device
        yield build(
            model.config, topology, settings, seed=0, device=device, model=lambda *_, **__: model
        )


def all_reduce_of(
    reduce: Any, world: Any, tensor: Tensor, *arguments: Any, group: Any = None, **options: Any
) -> Any:
    """torch's all-reduce; that over the world is one over `world`."""
    return reduce(tensor, *arguments, group=group or world, **options)


Does = Callable[[TrainingEngine], object]


def watched_step(model_type: str, workload: Workload, does: Does | None = None) -> Watching:
    """What is seen of a step of two micro-batches, and of asking the ranks for signals after it.

    Args:
        does: something more after the step.
    """
    seen = Watching(workload.length)

    def waits(_: Any) -> None:
        seen.found["an event is waited for"] = None

    with (
        dryrun.fake_micro_batch(config_of(model_type), workload, all_layers=True) as (
            model,
            batch,
            _,
        ),
        stubbed(model) as made,
        mock.patch.object(simulated_accelerator._Stream, "synchronize", waits, create=True),
    ):
        made.run_step([batch] * ACCUMULATION)
        requests = Requests()
        with seen:
            made.run_step([batch] * ACCUMULATION)
            assert requests.all_reduce(made.device) == (False, False)
            if does is not None:
                does(made)
        assert made.deepspeed_engine.micro_steps == 2 * ACCUMULATION and not made.skipped
        assert made._loss_and_figures.device == made._norm.device == made.device  # type: ignore[union-attr]
    return seen
