"""A step on an accelerator asks nothing of the host, and gives its process group what NCCL takes.

Forward, backward and our part of the step run on fake tensors of a simulated accelerator
(zero_tp/planning/accelerator.py), where mixing devices fails by itself; this looks at every operation for what would
make the device and the host wait for each other. DeepSpeed's engine does not run on fake tensors: a stub has its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from tests.decoders import MODEL_TYPES
from tests.tiers import in_tiers
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.data.batch import AnyBatch
from zero_tp.models import position, transformer
from zero_tp.models.model import ParallelModel
from zero_tp.parallel import collectives
from zero_tp.parallel.gradients import gradient_norm
from zero_tp.planning import accelerator, dryrun
from zero_tp.planning.moments import Part, measure
from zero_tp.planning.workload import Workload
from zero_tp.process.signals import Requests
from zero_tp.topology import Topology
from zero_tp.training import engine
from zero_tp.training.engine import TrainingEngine

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
"""Operations that give the host a value of the device."""
SHAPES = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"}
"""Operations whose result's shape the host has to learn from the device."""


ENCODERS = ("bert", "megatron-bert")
ACCUMULATION = 2


class Watching(TorchDispatchMode):
    """Notes every operation that waits for the other side, or that NCCL refuses, and what makes an [.., s, s]."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.square = (length, length)
        self.operations, self.collectives, self.squares, self.packed = 0, 0, 0, 0
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        there = [each for each in tensors if each.device.type != "cpu"]
        space, name = function.namespace, function._schema.name.split("::")[1]
        self.squares += any(isinstance(each, Tensor) and each.shape[-2:] == self.square for each in tree_leaves(result))
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
        elif there and name in SHAPES:
            self.found[f"{name} waits for a shape"] = None
        elif (
            there
            and name in ("index", "index_put_")
            and any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        ):
            self.found[f"{name} by a mask waits for a shape"] = None
        elif len(there) < len(tensors) and there and self._moves(name, tensors, args, kwargs or {}):
            self.found[f"{name} between host and device, for which both wait"] = None
        return result

    def _moves(self, name: str, tensors: list[Tensor], args: Any, kwargs: Mapping[str, Any]) -> bool:
        if name in ("_to_copy", "copy_"):
            waits = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            return waits
        return any(each.device.type == "cpu" and each.dim() > 0 for each in tensors)  # numbers go with the launch


def config_of(model_type: str, **fields: Any) -> Any:
    """A model with two layers."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 96}
    sizes |= {"max_position_embeddings": 64}
    sizes |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    if model_type != "gpt2":
        sizes["intermediate_size"] = 128
    if model_type not in ("gpt2", "gpt_neox", *ENCODERS):
        sizes["num_key_value_heads"] = 4
    if model_type == "qwen3":
        sizes["head_dim"] = 8
    return AutoConfig.for_model(model_type, **sizes, **fields)


def watched(model_type: str, workload: Workload, **fields: Any) -> Watching:
    """What is seen of one micro-batch."""
    seen = Watching(workload.length)

    def looking(model: ParallelModel, batch: AnyBatch) -> list[Part]:
        with torch.no_grad():
            model(batch.input_ids)  # the device keeps its copies of what never changes
        with seen:
            return measure(model, batch)

    with mock.patch.object(dryrun, "measure", looking):
        dryrun.dry_run(config_of(model_type, **fields), workload, whole=True)
    return seen


class DeepSpeeds:
    """This has the place of DeepSpeed's engine and its optimizer: it asks for the norm, and updates nothing."""

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

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_steps % ACCUMULATION == ACCUMULATION - 1

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.norm = self.scaled_global_norm()
            self.model.zero_grad(set_to_none=True)
        self.micro_steps += 1

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        return gradient_norm(self.model.parameters(), self.model.topology).float()

    def get_global_grad_norm(self) -> Tensor | None:
        return self.norm

    def fp16_enabled(self) -> bool:
        return False


@contextmanager
def stubbed(model: ParallelModel) -> Iterator[TrainingEngine]:
    """The engine of a run at ZeRO-1 and DP 2 around a model on fake tensors, without DeepSpeed."""
    topology = copy.copy(model.topology)
    topology.world, topology.data = 2 * topology.tensor, 2
    topology.data_group = dryrun.topology_of(2, False).tensor_group
    settings = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}

    def initialize(**given: Any) -> tuple[Any, ...]:
        made = DeepSpeeds(given["model"], given["mpu"])
        return made, made, None, None

    with (
        mock.patch.object(deepspeed, "initialize", initialize),
        mock.patch.object(engine, "check_replicas", lambda *_: None),  # at the start, which reads
        mock.patch.object(dist, "all_reduce", partial(all_reduce_of, dist.all_reduce, topology.data_group)),
    ):
        made: Any = TrainingEngine
        device = next(model.parameters()).device
        yield made(model.config, topology, settings, seed=0, device=device, model=lambda *_, **__: model)


def all_reduce_of(reduce: Any, world: Any, tensor: Tensor, *arguments: Any, group: Any = None, **options: Any) -> Any:
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
        dryrun.without_numbers(config_of(model_type), workload, whole=True) as (model, batch, _),
        stubbed(model) as made,
        mock.patch.object(accelerator._Stream, "synchronize", waits, create=True),
    ):
        made.run_step([batch] * ACCUMULATION)
        requests = Requests()
        with seen:
            made.run_step([batch] * ACCUMULATION)
            assert requests.agreed(made.device) == (False, False)
            if does is not None:
                does(made)
        assert made.engine.micro_steps == 2 * ACCUMULATION and not made.skipped
        assert made._loss.device == made._norm.device == made.device  # type: ignore[union-attr]
    return seen


WORKLOAD = Workload(length=32, batch=2, tensor=2)
GRIDS: dict[str, dict[str, Any]] = {"TP 1": {"tensor": 1}, "TP 2": {}, "SP": {"sequence": True}}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "selective": {"mode": "selective", "modules": ["attention_core", "mlp_activation", "norm"]},
    "full": {"mode": "full"},
}
CASES = [
    (model_type, grid, recomputed, documents)
    for model_type in (*MODEL_TYPES, *ENCODERS)
    for grid in GRIDS
    for recomputed in RECOMPUTED
    for documents in ((False,) if model_type in ENCODERS else (False, True))
]
FIRST = [
    ("gpt2", "SP", "selective", False),
    ("megatron-bert", "SP", "full", False),
    ("llama", "SP", "full", True),
    ("gpt_neox", "TP 2", "none", False),
    ("qwen3", "TP 1", "none", True),
]


@pytest.mark.parametrize(("model_type", "grid", "recomputed", "documents"), in_tiers(CASES, FIRST))
def test_a_micro_batch_waits_for_nothing(model_type: str, grid: str, recomputed: str, documents: bool) -> None:
    policy = RecomputePolicy(**RECOMPUTED[recomputed])
    seen = watched(model_type, replace(WORKLOAD, **GRIDS[grid], policy=policy, documents=documents))
    assert not seen.found, list(seen.found)
    assert seen.operations > 200 and (seen.collectives > 8) == (grid != "TP 1")


@pytest.mark.parametrize("length", [32, 80])
def test_frequencies_that_depend_on_the_length_wait_for_no_position(length: int) -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    seen = watched("llama", replace(WORKLOAD, length=length), rope_parameters=parameters)
    assert not seen.found, list(seen.found)


WINDOWED = ("mistral", "phi3", "qwen2", "qwen3", "starcoder2")
PACKED = [(model_type, grid, True) for model_type in MODEL_TYPES for grid in GRIDS]
PACKED += [(model_type, grid, False) for model_type in WINDOWED for grid in GRIDS]


@pytest.mark.parametrize(
    ("model_type", "grid", "documents"), in_tiers(PACKED, [("llama", "TP 1", True), ("qwen3", "SP", True)])
)
def test_documents_and_windows_make_no_mask(model_type: str, grid: str, documents: bool) -> None:
    """Where `varlen_attn` runs; where it does not, the mask is seen."""
    fields: dict[str, Any] = {"attn_pdrop" if model_type == "gpt2" else "attention_dropout": 0.0}
    if model_type in WINDOWED:
        fields["sliding_window"] = 7
    if model_type in ("qwen2", "qwen3"):
        fields |= {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    policy = RecomputePolicy(**RECOMPUTED["full"])
    workload = replace(WORKLOAD, length=40, **GRIDS[grid], policy=policy, documents=documents)
    seen = watched(model_type, workload, **fields)
    assert not seen.found, list(seen.found)
    # Two layers, once more in backward; of the Qwens without documents one is causal alone.
    assert (seen.squares, seen.packed) == (0, 4 if documents or "qwen" not in model_type else 2)
    masked = watched(model_type, replace(workload, varlen=False), **fields)
    assert masked.squares and not masked.packed and not masked.found


STEPS = [(model_type, grid) for model_type in (*MODEL_TYPES, *ENCODERS) for grid in GRIDS]


@pytest.mark.parametrize(("model_type", "grid"), in_tiers(STEPS, [("llama", "SP"), ("bert", "TP 2")]))
def test_our_part_of_a_step_waits_for_nothing(model_type: str, grid: str) -> None:
    """Counting labels, sums over micro-batches, the loss over DP, figures, the norm: none is read."""
    seen = watched_step(model_type, replace(WORKLOAD, **GRIDS[grid]))
    assert not seen.found, list(seen.found)
    assert seen.collectives >= 3, "labels and loss over DP, signals"


@pytest.mark.parametrize("checkpointing", [{"cpu_checkpointing": True}, {"partition_activations": True}])
def test_checkpoints_elsewhere_wait_for_nothing(checkpointing: dict[str, bool]) -> None:
    seen = watched("llama", replace(WORKLOAD, policy=RecomputePolicy(mode="full"), checkpointing=checkpointing))
    assert not seen.found, list(seen.found)


@contextmanager
def planted(kind: str) -> Iterator[None]:
    """A mistake in the model's code."""
    rotate, gather = position.rotation, collectives.start_all_reduce

    def before(positions: Tensor) -> Tensor:
        if kind == "value":
            assert positions[0, 0] >= 0
        elif kind == "copy":
            positions = positions.cpu().to(positions.device)
        elif kind == "table":
            positions = positions + torch.zeros(1, dtype=torch.long).to(positions.device)
        elif kind == "item":
            positions.max().item()
        elif kind == "devices":
            positions = positions + torch.ones(positions.shape[1], dtype=torch.long)
        elif kind == "shape":
            positions[positions >= 0]
        return positions

    def reduced(tensor: Tensor, group: Any) -> Any:
        if kind == "strided":
            dist.all_reduce(tensor.new_empty(4, 3).t(), group=group)
        elif kind == "host":
            dist.all_reduce(torch.empty(4), group=group)
        elif kind == "dtypes":
            collectives._all_gather(tensor.new_empty(8, dtype=torch.float32), tensor.new_empty(4), group=group)
        return gather(tensor, group)

    def turned(rotary: Any, positions: Tensor, *others: Any) -> Any:
        return rotate(rotary, before(positions), *others)

    with (
        mock.patch.object(transformer, "rotation", turned),
        mock.patch.object(collectives, "start_all_reduce", reduced),
    ):
        yield


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("value", "reads a value"),
        ("copy", "between host and device"),
        ("table", "between host and device"),
        ("shape", "waits for a shape"),
        ("item", "reads a value"),
        ("devices", "between host and device"),
        ("dtypes", "of two dtypes"),
        ("strided", "not contiguous"),
        ("host", "of a tensor on the host"),
    ],
)
def test_what_waits_is_seen(kind: str, words: str) -> None:
    with planted(kind):
        found = found_by(lambda: watched("llama", WORKLOAD))
    assert any(words in one for one in found), found


def found_by(watch: Callable[[], Watching]) -> list[str]:
    """What was found, also where fake tensors don't go on from there."""
    try:
        return list(watch().found)
    except fake_tensor.DataDependentOutputException as error:
        return [f"{error}: reads a value"]
    except fake_tensor.DynamicOutputShapeException as error:
        return [f"{error}: waits for a shape"]
    except fake_tensor.FakeTensorDeviceMismatchError as error:
        return [f"{error}: between host and device"]


def asked_at_once(engine: TrainingEngine) -> object:
    return Requests(late=False).agreed(engine.device)


def blocking_sum(engine: TrainingEngine) -> object:
    return torch.zeros(()).to(engine.device)


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (lambda engine: engine.loss, "reads a value"),
        (lambda engine: engine.gradient_norm, "reads a value"),
        (asked_at_once, "reads a value"),
        (blocking_sum, "between host and device"),
    ],
)
def test_what_waits_after_a_step_is_seen(does: Does, words: str) -> None:
    found = found_by(lambda: watched_step("llama", WORKLOAD, does))
    assert any(words in one for one in found), found
