"""Run the project's own model forward and backward as one rank of the real run, on fake tensors and without data.

Fake tensors have shapes but no memory, and collectives of the fake groups return at once. Every storage is followed
from its allocation to its end, which gives the bytes of real tensors. Model states and ZeRO's buffers come from
planning/zero.py, because DeepSpeed's engine does not run on fake tensors.

Layers with the same window, MLP and recomputation, between neighbours that have the same, take the same bytes. So a
model of few layers runs, and all L layers are their sum.

What is planned for a CPU runs on fake "cpu" tensors, not on the meta device, which decomposes attention and counts its
scores. What is planned for an accelerator runs on tensors of a simulated one (planning/accelerator.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from zero_tp.activations.activation_memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.activations.stores import LEAVING
from zero_tp.architectures import architecture_of
from zero_tp.architectures.spec import TransformerSpec
from zero_tp.constants import DTYPES
from zero_tp.data.batch import AnyBatch, Batch, MaskedBatch
from zero_tp.models.causal_lm import CausalLM
from zero_tp.models.context import Pieces
from zero_tp.models.masked_lm import MaskedLM
from zero_tp.models.parallel_model import ParallelModel
from zero_tp.parallel.elementwise import ElementwiseOps, set_training_elementwise
from zero_tp.planning.accelerator import accelerator
from zero_tp.planning.plan_settings import Workload
from zero_tp.planning.tracking import Moment, joined, measure
from zero_tp.topology import Topology


def dry_run(config: PretrainedConfig, workload: Workload, *, whole: bool = False) -> list[Moment]:
    """Return every moment of one micro-batch at which something is allocated, forward and backward, in order.

    M_D's buffer, which outlives the micro-batch, is not counted (`Workload.stored`).

    Args:
        config: of the model.
        whole: run all layers, instead of those of each kind that differ.
    """
    with without_numbers(config, workload, whole=whole) as (model, batch, order):
        parts = measure(model, batch)
    return joined(parts, order)


@contextmanager
def without_numbers(
    config: PretrainedConfig, workload: Workload, *, whole: bool
) -> Iterator[tuple[ParallelModel, AnyBatch, list[int]]]:
    """Yield one rank's model and micro-batch of fake tensors, and for each layer the number of the one that runs.

    Args:
        whole: run every layer itself.
    """
    with ExitStack() as stack:
        device = torch.device("cpu")
        if not workload.cpu:
            device = stack.enter_context(accelerator(varlen=workload.varlen))
        stack.enter_context(torch.random.fork_rng([]))
        # Backward in this thread: a device registered after the process's first backward has no thread of its own.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeTensorMode())
        spec = architecture_of(config).spec(config)
        recomputed = workload.policy.recomputed_layers(spec.layers)
        if workload.policy.keep_micro_batches:  # a micro-batch that keeps all its activations has the peak
            recomputed = range(0)
        kinds = enumerate(zip(spec.windows, spec.mlps, strict=True))
        every = [Kind(window, mlp, number in recomputed) for number, (window, mlp) in kinds]
        reach = LEAVING if workload.to_host else 1
        measured = every if whole else shortened(every, reach)
        numbers = {context: number for number, context in enumerate(contexts(measured, reach))}
        order = [number if whole else numbers[context] for number, context in enumerate(contexts(every, reach))]
        rotary = spec.rotary
        if rotary is not None and workload.documents:  # fake position numbers have no maximum
            rotary = replace(rotary, by_length=False)
        windows, mlps = tuple(kind.window for kind in measured), tuple(kind.mlp for kind in measured)
        model_class: type[ParallelModel] = PlannedCausalLM if spec.causal else MaskedLM
        model = model_class(
            config,
            topology_of(workload.tensor, workload.sequence),
            source=Unfilled(),
            dtype=getattr(torch, DTYPES[workload.dtype]),
            device=device,
            spec=replace(spec, layers=len(measured), windows=windows, mlps=mlps, rotary=rotary),
        )
        model.train()
        set_training_elementwise(model, DifferingPieces())
        again = tuple(number for number, kind in enumerate(measured) if kind.recomputes)
        policy = _Numbered(**workload.policy.model_dump(), numbers=again)
        ActivationMemory(model, policy, workload.checkpointing, device)
        yield model, batch_of(workload, spec, device), order


def batch_of(workload: Workload, spec: TransformerSpec, device: torch.device) -> AnyBatch:
    """Return a micro-batch of the workload, without any data."""
    tokens = torch.zeros(workload.batch, workload.length, dtype=torch.long, device=device)
    if spec.causal:
        documents = torch.zeros(workload.batch, workload.length, dtype=torch.long)
        return Batch(tokens, tokens, *([tokens, documents] if workload.documents else []))
    names = ("input_ids", "token_type_ids", "attention_mask", "labels")
    batch = MaskedBatch(dict.fromkeys(names, tokens))
    batch["label_places"] = torch.zeros(workload.labels, dtype=torch.long, device=device)
    if spec.sentence_head:
        batch["next_sentence_label"] = tokens[:, 0]
    return batch


class DifferingPieces(ElementwiseOps):
    """Compute only the first, second and last piece.

    Every later piece takes the same bytes as the second: both run while another whole piece's tensors exist.
    """

    def starts(self, stop: int, step: int) -> Sequence[int]:
        starts = super().starts(stop, step)
        return [*starts[:2], *starts[2:][-1:]]


class PlannedCausalLM(CausalLM):
    """A causal model of fake tensors, which hold no document numbers: each token is a document.

    That takes the most bytes.
    """

    def _pieces(self, document_ids: Tensor, device: torch.device) -> Pieces:
        starts = np.arange(document_ids.numel() + 1, dtype=np.int32)
        return Pieces.from_starts(starts, document_ids.shape, device)


class Unfilled:
    """This source leaves new parameters as they are."""

    def fill(self, *_: Any) -> None:
        pass


class _Numbered(RecomputePolicy):
    """This policy recomputes the layers that have these numbers."""

    numbers: tuple[int, ...]

    def recomputed_layers(self, layers: int) -> Any:
        return self.numbers


def topology_of(tensor: int, sequence: bool) -> Topology:
    """Return the topology of rank 0 in a TP group whose other ranks do not exist. It needs no process group."""
    topology = Topology(tensor, sequence, world=tensor)
    if tensor > 1:
        backend = torch._C._distributed_c10d.FakeProcessGroup._create_internal(0, tensor)
        group = dist.ProcessGroup(FakeStore(), 0, tensor)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(kind)
        for device_type in ("cpu", "cuda", "privateuseone"):
            group._register_backend(torch.device(device_type), kind, backend)
        topology.tensor_group = group
    return topology


# ---- layers by their kind --------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind tells the layers of a model apart: by the window of their attention, their MLP, and whether they
    recompute."""

    window: int | None
    mlp: str
    recomputes: bool


def contexts(kinds: Sequence[Kind], reach: int = 1) -> list[tuple[Any, ...]]:
    """Return the facts on which the bytes of each layer depend.

    They are its kind, between those of its neighbours, and whether it is the first layer with its window: in backward
    that layer is the last to free the window's mask. If it recomputes, the number of layers before and after it that
    recompute counts too, up to `reach`: checkpoints in host memory leave that many layers later, and return one ahead.
    """
    neighbours: list[Kind | None] = [None, *kinds, None]
    windows = [kind.window for kind in kinds]
    recomputes = [kind.recomputes for kind in kinds]
    return [
        (
            tuple(neighbours[number : number + 3]),
            windows.index(kind.window) == number,
            min(reach, sum(recomputes[:number])) * kind.recomputes,
            min(reach, sum(recomputes[number + 1 :])) * kind.recomputes,
        )
        for number, kind in enumerate(kinds)
    ]


def shortened(kinds: Sequence[Kind], reach: int = 1) -> list[Kind]:
    """Return fewer layers that have every context of the given ones and no other.

    Of equal layers that is three, or two more for each layer that `reach` is greater than 1.
    """
    wanted = set(contexts(kinds, reach))
    for length in range(len(kinds) - 1, 0, -1):
        for start in range(len(kinds) - length + 1):
            cut = [*kinds[:start], *kinds[start + length :]]
            if set(contexts(cut, reach)) == wanted:
                return shortened(cut, reach)
    return list(kinds)
