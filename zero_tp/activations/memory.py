"""A run's activation-memory settings are applied to its model: what is recomputed, and where the checkpoints wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.activations.policy import RecomputePolicy
from zero_tp.activations.recompute import Forward, Remade, recomputed
from zero_tp.activations.stores import ContiguousBuffer, Host, InPlace, Partitioned, Store
from zero_tp.models.model import ParallelModel
from zero_tp.models.transformer import TransformerLayer
from zero_tp.topology import Topology

RECOMPUTED = {"layer": "", "attention_core": "attention.core"}
"""Which module of a layer is run again from its inputs, by what the policy names."""


def remade(layer: TransformerLayer, name: str) -> tuple[tuple[str, str], ...]:
    """Return which modules' outputs are made again, each with the module after it whose backward wants it."""
    return layer.remade_norms if name == "norm" else (("mlp.activation", "mlp.down"),)


class ActivationMemory:
    """This decides what backward of a model keeps and recomputes: it wraps the forward of modules by policy.

    Attributes:
        layers: numbers of the layers that the policy recomputes.
        notes: what a setting turned out to mean here, a line each, for the log.
    """

    def __init__(
        self,
        model: ParallelModel,
        policy: RecomputePolicy,
        settings: Mapping[str, Any],
        device: torch.device,
    ):
        """Wrap the modules that the policy chooses.

        Args:
            policy: `zero_tp.recompute`.
            settings: DeepSpeed's `activation_checkpointing` block.
            device: where the model computes.
        """
        self.policy = policy
        self.notes: list[str] = []
        self.layers = policy.recomputed_layers(model.spec.layers)
        self._streams = model.streams
        self._store = self._chosen_store(settings, model.topology, device) if policy.mode == "full" else InPlace()
        self._recomputes = True
        self._wrapped: list[nn.Module] = []
        chosen = {"none": (), "full": ("layer",), "selective": policy.chosen_modules}[policy.mode]
        for number in self.layers:
            for name in chosen:
                layer = model.transformer.layers[number]
                assert isinstance(layer, TransformerLayer)
                self._wrap_part(layer, name)
        self.begin_micro_batch(policy.keep_micro_batches)

    def begin_micro_batch(self, index: int) -> None:
        """Say which micro-batch of a step comes next: the first `keep_micro_batches` keep all their activations."""
        self._recomputes = index >= self.policy.keep_micro_batches

    def remove(self) -> None:
        """Give the modules their own forwards back."""
        for module in self._wrapped:
            del module.forward
        self._wrapped.clear()

    def _wrap_part(self, layer: TransformerLayer, name: str) -> None:
        if name in RECOMPUTED:
            module = layer.get_submodule(RECOMPUTED[name])
            self._wrap(module, recomputed(module.forward, self._streams, self._store))
            return
        for producer, consumer in remade(layer, name):
            pair = layer.get_submodule(producer), layer.get_submodule(consumer)
            both = Remade(*pair)
            for module, forward in zip(pair, (both.produce, both.consume), strict=True):
                self._wrap(module, forward)

    def _wrap(self, module: nn.Module, recomputing: Forward) -> None:
        """Let a module run `recomputing` in micro-batches that recompute.

        The wrapper is an attribute of the module itself, so that no name of a module or parameter changes.
        """
        plain: Forward = module.forward

        def forward(*inputs: Any, **options: Any) -> Tensor:
            return (recomputing if self._recomputes else plain)(*inputs, **options)

        module.forward = forward
        self._wrapped.append(module)

    def _chosen_store(self, settings: Mapping[str, Any], topology: Topology, device: torch.device) -> Store:
        to_host = bool(settings.get("cpu_checkpointing")) and device.type != "cpu"
        buffer = None
        if settings.get("contiguous_memory_optimization"):
            slots = settings.get("number_checkpoints") or len(self.layers)
            buffer = ContiguousBuffer(slots, torch.device("cpu") if to_host else None, pinned=to_host)
        store: Store = Host(buffer) if to_host else buffer or InPlace()
        if not settings.get("partition_activations"):
            return store
        if topology.sequence or topology.tensor == 1:
            why = "sequence parallelism has split the checkpoints already" if topology.sequence else "tensor is 1"
            self.notes.append(f"activation_checkpointing.partition_activations: nothing to partition, {why}")
            return store
        return Partitioned(topology.tensor_group, store)
