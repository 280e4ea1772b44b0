"""Apply a run's activation-memory settings to its model: recomputation, and the store of
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.model.recompute.recompute import Forward, RecomputedOutput, current_forward, recompute
from zero_tp.model.recompute.stores import (
    ContiguousBuffer,
    HostStore,
    InPlaceStore,
    PartitionedStore,
    Store,
)
from zero_tp.model.transformer import TransformerLayer
from zero_tp.parallel.topology import Topology

RUN_AGAIN = {"layer": "", "attention_core": "attention.core"}
"""Parts of a layer that backward runs again from their inputs → their submodule."""


class ActivationMemory:
    """Wrap the forward of the modules that the policy recomputes.

    In each chosen layer:

        full                         the layer runs again, from its input in the store
        selective: attention_core    attention.core runs again, from Q, K and V
        selective: norm              attention drops the output of attention_norm, mlp that of
                                     mlp_norm; both compute it again
        selective: mlp_activation    mlp.down drops mlp.activation's output, and computes it again

    Args:
        policy: `zero_tp.recompute`.
        checkpointing: where the recomputed layers' inputs are kept.
        device: where the model computes.
        layers: indices of the recomputed layers; by default those of the policy.

    Attributes:
        layers: indices of the recomputed layers.
        notes: lines for the log.
    """

    def __init__(
        self,
        model: ParallelModel,
        policy: RecomputePolicy,
        checkpointing: ActivationCheckpointing,
        device: torch.device,
        layers: Sequence[int] | None = None,
    ):
        self.policy = policy
        self.notes: list[str] = []
        self.layers = policy.recomputed_layers(model.spec.layers) if layers is None else layers
        # A run's file is checked already; a script may pass any policy.
        if self.layers and self.layers[-1] >= model.spec.layers:
            problem = f"{policy.layers}, but the model has {model.spec.layers}"
            raise UserError(f"zero_tp.recompute.layers: {problem}; use a smaller one")
        self._streams = model.streams
        self._store: Store = InPlaceStore()
        if policy.mode == "full":
            self._store = self._make_store(checkpointing, model.topology, device)
        # `TrainingEngine` changes it for each micro-batch; a Hugging Face model and the planner
        # never do.
        self._recomputes = True
        # Each module with its own forward before, if it had one instead of its class's.
        self._wrapped: list[tuple[nn.Module, Forward | None]] = []
        modules = {"none": (), "full": ("layer",), "selective": policy.chosen_modules}[policy.mode]
        for index in self.layers:
            for name in modules:
                layer = model.transformer.layers[index]
                assert isinstance(layer, TransformerLayer)
                self._wrap_module(layer, name)

    def begin_micro_batch(self, index: int) -> None:
        """Begin micro-batch `index` of a step.

        The first `keep_micro_batches` keep all their activations; so does an index of -1, whatever
        the policy.
        """
        self._recomputes = index >= self.policy.keep_micro_batches

    def remove(self) -> None:
        """Restore the modules' own forwards."""
        for module, before in self._wrapped:
            del module.forward
            if before is not None:
                module.forward = before
        self._wrapped.clear()

    def _wrap_module(self, layer: TransformerLayer, name: str) -> None:
        if name in RUN_AGAIN:
            # The plain forward: `recompute` would call itself if it called the module's.
            module = layer.get_submodule(RUN_AGAIN[name])
            self._wrap(
                module, partial(recompute, current_forward(module), self._streams, self._store)
            )
            return
        # A shared expert is an MLP inside the MLP, with an activation of its own.
        mlps = ["mlp"] if getattr(layer.mlp, "shared", None) is None else ["mlp", "mlp.shared"]
        activations = [(f"{mlp}.activation", f"{mlp}.down") for mlp in mlps]
        for names in layer.recomputed_norms if name == "norm" else activations:
            producer, consumer = map(layer.get_submodule, names)
            output = RecomputedOutput(producer, consumer)
            self._wrap(producer, output.produce)
            self._wrap(consumer, output.consume)

    def _wrap(self, module: nn.Module, recomputing: Forward) -> None:
        """Replace a module's forward in micro-batches that recompute. Modules and parameters
        keep their names.
        """
        self._wrapped.append((module, vars(module).get("forward")))
        module.forward = partial(self._run, recomputing, current_forward(module))

    def _run(self, recomputing: Forward, plain: Forward, *inputs: Any, **options: Any) -> Tensor:
        return (recomputing if self._recomputes else plain)(*inputs, **options)

    def _make_store(
        self, checkpointing: ActivationCheckpointing, topology: Topology, device: torch.device
    ) -> Store:
        # On CPUs checkpoints are in host memory already.
        to_host = checkpointing.cpu_checkpointing and device.type != "cpu"
        buffer = None
        if checkpointing.contiguous_memory_optimization:
            # One forward, whose backward follows, needs one slot a recomputed layer.
            slots = checkpointing.number_checkpoints or len(self.layers)
            buffer = ContiguousBuffer(
                slots, torch.device("cpu") if to_host else None, pinned=to_host
            )
        # The innermost store. PartitionedStore hands it pieces, so the host and the buffer keep 1/t
        # of each.
        store: Store = HostStore(buffer) if to_host else buffer or InPlaceStore()
        if not checkpointing.partition_activations:
            return store
        # Under SP ranks have different shards. DeepSpeed's own checkpointing slices and gathers
        # them as if they were equal, and trains wrongly without an error (gradient norm 1.49
        # instead of 1.75).
        if topology.sequence or topology.tensor == 1:
            reason = (
                "sequence parallelism has split the checkpoints already"
                if topology.sequence
                else "tensor is 1"
            )
            self.notes.append(
                f"activation_checkpointing.partition_activations: nothing to partition, {reason}"
            )
            return store
        return PartitionedStore(topology.tensor_group, store)
