"""Applies a run's activation-memory settings to its model: who is recomputed, and where the checkpoints wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero_tp.activations.contiguous import Contiguous, ContiguousBuffer
from zero_tp.activations.offload import Host
from zero_tp.activations.partition import Partitioned
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.activations.recompute import Recomputed, Remade
from zero_tp.activations.store import InPlace, Store
from zero_tp.models.regions import LayerRegions
from zero_tp.models.transformer import TransformerLayer
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.topology import Topology


class ActivationMemory:
    """What backward of this model keeps and recomputes.

    Attributes:
        layers: numbers of the layers that the policy recomputes.
        notes: what a setting turned out to mean here, a line each, for the log.
    """

    def __init__(
        self,
        model: ZeroTPForCausalLM,
        policy: RecomputePolicy,
        settings: Mapping[str, Any],
        device: torch.device,
    ):
        """
        Args:
            policy: `zero_tp.recompute`.
            settings: DeepSpeed's `activation_checkpointing` block.
            device: where the model computes.
        """
        self.policy = policy
        self.notes: list[str] = []
        self.layers = policy.recomputed_layers(model.spec.layers)
        self._regions: list[tuple[LayerRegions, dict[str, Any]]] = []
        store = self._store(settings, model.topology, device) if policy.mode == "full" else InPlace()
        span, link = Recomputed(model.streams, store), Remade()
        chosen = {"none": (), "full": ("layer",), "selective": policy.chosen_modules}[policy.mode]
        recompute = {name: span if name in ("layer", "attention_core") else link for name in chosen}
        for number in self.layers:
            layer = model.transformer.layers[number]
            assert isinstance(layer, TransformerLayer)
            self._regions.append((layer.regions, recompute))
        self.begin_micro_batch(policy.keep_micro_batches)

    def begin_micro_batch(self, index: int) -> None:
        """Says which micro-batch of a step comes next: the first `keep_micro_batches` keep all their activations."""
        kept = LayerRegions()
        for regions, recompute in self._regions:
            for name, region in recompute.items():
                setattr(regions, name, region if index >= self.policy.keep_micro_batches else getattr(kept, name))

    def _store(self, settings: Mapping[str, Any], topology: Topology, device: torch.device) -> Store:
        to_host = bool(settings.get("cpu_checkpointing")) and device.type != "cpu"
        buffer = None
        if settings.get("contiguous_memory_optimization"):
            slots = settings.get("number_checkpoints") or len(self.layers)
            buffer = ContiguousBuffer(slots, torch.device("cpu") if to_host else None, pinned=to_host)
        store: Store = Host(buffer) if to_host else Contiguous(buffer) if buffer is not None else InPlace()
        if not settings.get("partition_activations"):
            return store
        if topology.sequence or topology.tensor == 1:
            why = "sequence parallelism has split the checkpoints already" if topology.sequence else "tensor is 1"
            self.notes.append(f"activation_checkpointing.partition_activations: nothing to partition, {why}")
            return store
        return Partitioned(topology.tensor_group, store)
