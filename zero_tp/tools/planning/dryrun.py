"""Dry run: one rank's forward and backward of the real model code on fake tensors, without data.

Fake tensors have shapes but no memory, and collectives of fake groups return at once. tracking.py
records when each storage is allocated and freed, which gives the bytes of real tensors. Model
states and ZeRO's buffers come from zero.py, because DeepSpeed's engine does not run on fake
tensors.

With expert parallelism, where a token's rows go is unknown: `AssumedExchange` assumes it.

Layers take the same bytes if they and their neighbours have the same mixer, window, MLP and
recomputation.
So the dry run executes a few representative layers and repeats their bytes for all L layers.

A plan for a CPU uses fake "cpu" tensors: the meta device would decompose attention and count its
scores. A plan for an accelerator uses tensors of a simulated one
(tools/planning/simulated_accelerator.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from zero_tp.base.constants import DTYPES
from zero_tp.data.batch import AnyBatch, Batch, MaskedBatch
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import Rotary, TransformerSpec
from zero_tp.model.context import PackedSequences
from zero_tp.model.model_class import model_class
from zero_tp.model.moe import Experts
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.model.recompute.stores import MAX_COPIES_OUT
from zero_tp.parallel.collectives import Group, Pending, group_size
from zero_tp.parallel.elementwise import ElementwiseOps, set_training_elementwise
from zero_tp.parallel.expert_exchange import AllToAllExperts
from zero_tp.parallel.topology import Topology
from zero_tp.tools.planning.plan_settings import Workload
from zero_tp.tools.planning.simulated_accelerator import (
    has_real_device,
    run_isolated,
    simulated_accelerator,
)
from zero_tp.tools.planning.tracking import MemorySample, join_parts, measure


def dry_run(
    config: PretrainedConfig, workload: Workload, *, all_layers: bool = False
) -> list[MemorySample]:
    """Return the bytes after each allocation of one micro-batch, forward and backward, in order.

    They leave out the buffer of `contiguous_memory_optimization` (M_D), which outlives the
    micro-batch: it is in `Workload.activation_checkpoint_bytes`.

    Args:
        all_layers: run all layers instead of representative ones.
    """
    # Without a real device there is none that the simulated one could displace, and a new process
    # would import torch and transformers once more.
    if not workload.cpu and has_real_device():
        return run_isolated(_dry_run_here, config, workload, all_layers)
    return _dry_run_here(config, workload, all_layers)


def _dry_run_here(
    config: PretrainedConfig, workload: Workload, all_layers: bool
) -> list[MemorySample]:
    """Run in this process, which for a plan of an accelerator must not use a real one."""
    with fake_micro_batch(config, workload, all_layers=all_layers) as (
        model,
        batch,
        representatives,
    ):
        parts = measure(model, batch)
    return join_parts(parts, representatives)


@contextmanager
def fake_micro_batch(
    config: PretrainedConfig, workload: Workload, *, all_layers: bool
) -> Iterator[tuple[ParallelModel, AnyBatch, list[int]]]:
    """Yield one rank's model and micro-batch of fake tensors, and the representatives.

    These are, for each layer, the number of the executed layer that takes the same bytes.

    Args:
        all_layers: each layer represents itself.
    """
    with ExitStack() as stack:
        # The order counts: the device must be registered before fake tensors of it are made, and
        # everything below, model and batch, must be made inside FakeTensorMode.
        device = torch.device("cpu")
        if not workload.cpu:
            device = stack.enter_context(simulated_accelerator(varlen=workload.varlen))
        # A run forecasts its memory before its first step, so the dry run must leave the CPU's
        # random state as it was. The list of devices is empty: the simulated one has no generator.
        stack.enter_context(torch.random.fork_rng([]))
        # Run backward in this thread: autograd starts no thread for a device registered after the
        # first backward.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeTensorMode())
        spec = architecture_of(config).spec(config)
        recomputed = workload.policy.recomputed_layers(spec.layers)
        # The micro-batch that keeps all its activations has the peak.
        if workload.policy.keep_micro_batches:
            recomputed = range(0)
        kinds = layer_kinds(spec, recomputed)
        # A checkpoint on its way to the host is freed up to MAX_COPIES_OUT layers later, so a
        # layer's bytes depend on that many recomputing neighbours.
        reach = MAX_COPIES_OUT if workload.offloads_checkpoints else 1
        executed = kinds if all_layers else representative_layers(kinds, reach)
        numbers = {
            context: number for number, context in enumerate(layer_contexts(executed, reach))
        }
        contexts = enumerate(layer_contexts(kinds, reach))
        representatives = [
            number if all_layers else numbers[context] for number, context in contexts
        ]
        options: dict[str, Any] = {"pack": pack_single_tokens} if spec.causal else {}
        model = model_class(spec)(
            config,
            fake_topology(workload.tensor, workload.sequence, workload.expert),
            **options,
            source=UninitializedSource(),
            dtype=getattr(torch, DTYPES[workload.dtype]),
            device=device,
            # A generator of the simulated device cannot be made.
            random_device="cpu",
            spec=spec_of_layers(spec, executed, documents=workload.documents),
        )
        # Dropout's masks are activations: in evaluation mode there are none.
        model.train()
        set_training_elementwise(model, ElementwiseOps(representative_chunks))
        assume_exchange(model, workload)
        recomputing = tuple(number for number, kind in enumerate(executed) if kind.recomputes)
        # Wraps the layers' forward.
        ActivationMemory(model, workload.policy, workload.checkpointing, device, recomputing)
        yield model, fake_batch(workload, spec, device), representatives


def fake_batch(workload: Workload, spec: TransformerSpec, device: torch.device) -> AnyBatch:
    """Return a fake micro-batch of the workload."""
    tokens = torch.zeros(workload.batch, workload.length, dtype=torch.long, device=device)
    if spec.causal:
        # Document numbers are on the host, as in a real batch: packing them reads their values.
        documents = torch.zeros(workload.batch, workload.length, dtype=torch.long)
        return Batch(tokens, tokens, *([tokens, documents] if workload.documents else []))
    names = ("input_ids", "token_type_ids", "attention_mask", "labels")
    batch = MaskedBatch(dict.fromkeys(names, tokens))
    batch["label_places"] = torch.zeros(workload.labels, dtype=torch.long, device=device)
    if spec.sentence_head:
        batch["next_sentence_label"] = tokens[:, 0]
    return batch


def representative_chunks(starts: Sequence[int]) -> Sequence[int]:
    """Return the first, second and last chunk. The others take the same bytes as the second.

    The first chunk differs because it follows no other chunk, the last because it may be shorter.
    """
    return [*starts[:2], *starts[2:][-1:]]


def pack_single_tokens(document_ids: Tensor, device: torch.device) -> PackedSequences:
    """Make each token a document, because fake tensors have no document numbers.

    One document for each token takes the most bytes.
    """
    cu_seqlens = np.arange(document_ids.numel() + 1, dtype=np.int32)
    return PackedSequences.from_cu_seqlens(cu_seqlens, document_ids.shape, device)


class UninitializedSource:
    """A source of initial weights that leaves parameters uninitialised."""

    def fill(self, *_: Any) -> None:
        pass


class AssumedExchange(AllToAllExperts):
    """An exchange of fake rows. Each rank of the group sends this one as many as any other does.

    Args:
        ends, group: as of `AllToAllExperts`.
        imbalance: rows that this rank gets, divided by those that it sends.
    """

    def __init__(self, ends: Tensor, group: Group = None, *, imbalance: float):
        super().__init__(ends, group)
        self._imbalance = imbalance

    def start_dispatch(self, rows: Tensor) -> Pending:
        # The first rows have their number, which no fake tensor has as a value.
        if "splits" not in vars(self):
            sizes = len(rows), math.ceil(self._imbalance * len(rows))
            sent, received = (even_parts(size, group_size(self.exchange_group)) for size in sizes)
            self.splits = sent, received
        return super().start_dispatch(rows)


def assume_exchange(model: ParallelModel, workload: Workload) -> None:
    """Make experts that are divided over ranks exchange rows by `AssumedExchange`."""
    for module in model.modules():
        if isinstance(module, Experts) and workload.expert > 1:
            module.exchange = partial(AssumedExchange, imbalance=workload.imbalance)


def even_parts(number: int, count: int) -> list[int]:
    """Divide a number into `count` parts that differ by at most 1: 7 into 3, 2 and 2."""
    return [number // count + (place < number % count) for place in range(count)]


def fake_topology(tensor: int, sequence: bool, expert: int = 1) -> Topology:
    """Return the topology of rank 0 with a fake TP group and a fake expert group. It needs no
    process group.
    """
    topology = Topology(tensor, sequence, expert=expert, world=tensor * expert)
    topology.tensor_group = _fake_group(tensor)
    topology.expert_group = _fake_group(expert)
    return topology


def _fake_group(size: int) -> Group:
    """Return a group whose collectives return at once; None of one rank."""
    if size == 1:
        return None
    # A group looks its backend up by the type of a tensor's device. "privateuseone" is the
    # simulated one, which `rename_privateuse1_backend` renames.
    backend = torch._C._distributed_c10d.FakeProcessGroup._create_internal(0, size)
    group = dist.ProcessGroup(FakeStore(), 0, size)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    for device_type in ("cpu", "cuda", "privateuseone"):
        group._register_backend(torch.device(device_type), kind, backend)
    return group


# ---- representative layers -----------------------------------------------------------------------


class LayerKind(NamedTuple):
    """The properties of a layer that change its bytes.

    They are its attention window, its rotation, its MLP, whether it recomputes, its mixer, and its
    name in LAYERS.
    """

    window: int | None
    rotary: Rotary | None
    mlp: str
    recomputes: bool
    mixer: str = "attention"
    layer: str = "sequential"


def layer_kinds(spec: TransformerSpec, recomputed: Sequence[int]) -> list[LayerKind]:
    """Return each layer's kind.

    Args:
        recomputed: numbers of the layers that recompute.
    """
    recomputes = tuple(number in recomputed for number in range(spec.layers))
    parts = (spec.windows, spec.rotaries, spec.mlps, recomputes, spec.mixers, spec.layer_names)
    return [LayerKind(*of_layer) for of_layer in zip(*parts, strict=True)]


def spec_of_layers(
    spec: TransformerSpec, kinds: Sequence[LayerKind], *, documents: bool
) -> TransformerSpec:
    """Return the spec of a model of these layers.

    Args:
        documents: rows have packed documents, whose fake positions have no maximum.
    """
    rotaries = tuple(kind.rotary for kind in kinds)
    if documents:
        rotaries = tuple(one and replace(one, by_length=False) for one in rotaries)
    return replace(
        spec,
        layers=len(kinds),
        windows=tuple(kind.window for kind in kinds),
        mlps=tuple(kind.mlp for kind in kinds),
        rotaries=rotaries,
        mixers=tuple(kind.mixer for kind in kinds),
        mixed_layers=tuple(kind.layer for kind in kinds),
    )


def layer_contexts(kinds: Sequence[LayerKind], reach: int = 1) -> list[tuple[Any, ...]]:
    """Return for each layer everything that its bytes depend on.

    This is its kind and its neighbours' kinds; whether it is the first layer with its
    window: in backward that layer is the last to free the window's mask.

    Args:
        reach: a recomputing layer depends on at most so many recomputing layers before and after
            it. With `cpu_checkpointing` its checkpoint is copied to the host while the next layers
            run, and is fetched one layer ahead in backward.
    """
    # Drawn for six layers of one kind: first, middle and last differ by their neighbours.
    #
    #     layer      0        1        2        3        4        5
    #     context    - A A    A A A    A A A    A A A    A A A    A A -
    #     executed   0        1        1        1        1        2
    #
    # Three layers run, and layer 1's bytes are repeated for layers 1 to 4.
    neighbours: list[LayerKind | None] = [None, *kinds, None]
    masks = [(kind.mixer, kind.window) for kind in kinds]
    recomputes = [kind.recomputes for kind in kinds]
    return [
        (
            tuple(neighbours[number : number + 3]),
            masks.index((kind.mixer, kind.window)) == number,
            min(reach, sum(recomputes[:number])) * kind.recomputes,
            min(reach, sum(recomputes[number + 1 :])) * kind.recomputes,
        )
        for number, kind in enumerate(kinds)
    ]


def representative_layers(kinds: Sequence[LayerKind], reach: int = 1) -> list[LayerKind]:
    """Return a short list of layers with the same set of contexts.

    Of equal layers three remain, of recomputing ones 1 + 2 · `reach`.
    """
    # Remove the longest run of layers whose removal loses no context, and start again with the
    # rest. The order stays, because a context has the neighbours in it.
    contexts = set(layer_contexts(kinds, reach))
    for length in range(len(kinds) - 1, 0, -1):
        for start in range(len(kinds) - length + 1):
            fewer = [*kinds[:start], *kinds[start + length :]]
            if set(layer_contexts(fewer, reach)) == contexts:
                return representative_layers(fewer, reach)
    return list(kinds)
