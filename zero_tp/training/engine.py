"""The engine builds a training run in the one order that works, and runs its steps.

seeds → model (directly in its dtype; inside `zero.Init` for ZeRO-3; with its gradient hooks) → layouts audited →
recompute policy → compile → `deepspeed.initialize(mpu=topology)` → checks. What differs between the ZeRO stages is in
zero/stages.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from zero_tp.activations.memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.config.resolve import dtype_name
from zero_tp.config.schema import Spike
from zero_tp.constants import DTYPES, IGNORE_INDEX
from zero_tp.data.batch import AnyBatch, as_batch
from zero_tp.errors import UserError
from zero_tp.models.architectures import architecture_of
from zero_tp.models.model import ParallelModel, model_class
from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.elementwise import compile_elementwise
from zero_tp.parallel.layout import audit, whole_shape
from zero_tp.parallel.parameter import DrawnTogether, WeightSource
from zero_tp.topology import Topology
from zero_tp.training.guards import (
    NonfiniteTrace,
    SpikeBound,
    check_duplicates,
    check_hooks,
    check_repeated,
    check_replicas,
)
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


class TrainingEngine:
    """The engine builds a model in DeepSpeed's engine on a topology, and trains it.

    Attributes:
        model: the unwrapped model. dtype: of its weights.
        zero: what the ZeRO stage decides. engine: DeepSpeed's, which it has made.
        activations: what backward keeps and recomputes.
        skipped: the gradients of the last step were not finite, on some rank, and nothing was updated.
        spike: why the last step was a spike, in words, when it was skipped as one; else empty.
        mark: called with what this rank does next, in words.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        topology: Topology,
        deepspeed_config: dict[str, Any],
        *,
        seed: int,
        device: torch.device | str = "cpu",
        source: WeightSource | None = None,
        model: type[ParallelModel] | None = None,
        recompute: RecomputePolicy | None = None,
        spike: Spike | None = None,
        trace_nonfinite: bool = False,
        compiled: bool = False,
    ):
        """Build everything, in the one order that works. Collective over all ranks.

        Args:
            config: the model's Hugging Face config.
            deepspeed_config: without a `zero_tp` block and without `"auto"`.
            seed: of weights and dropout.
            source: of the initial weights instead of the seed.
            model: the model's class, by default that of its objective; `ZeroTPForCausalLM` can also generate.
            recompute: what backward computes again; by default nothing.
            spike: bounds on loss and gradient norm; by default none.
            trace_nonfinite: look at every layer's output and gradient, for `nonfinite`.
            compiled: run training's elementwise work in kernels that torch compiles.

        Raises:
            UserError: the sizes do not fit the topology, or torch can't compile here.
        """
        without_shared_memory_collectives()  # a script that calls no `connect_deepspeed` would wait for a compiler
        self.topology = topology
        self.device = torch.device(device)
        self.zero = zero_engine(deepspeed_config, topology)
        self.dtype: torch.dtype = getattr(torch, DTYPES[dtype_name(deepspeed_config)])
        # DeepSpeed sends all weights over DP from the first rank: zero.Init each as it is made, else `initialize`.
        source = source or DrawnTogether(seed, topology.data_group)
        with self.zero.construction():
            chosen = model or model_class(architecture_of(config).spec(config))
            self.model = chosen(config, topology, seed=seed, source=source, dtype=self.dtype, device=device)
        audit(self.model, topology, local_shape)
        self.activations = ActivationMemory(
            self.model,
            recompute or RecomputePolicy(mode="none"),
            deepspeed_config.get("activation_checkpointing", {}),
            self.device,
        )
        if compiled:
            compile_elementwise(self.model, self.device)
        decay = deepspeed_config.get("optimizer", {}).get("params", {}).get("weight_decay", 0.0)
        self.zero.initialize(self.model, parameter_groups(self.model, decay))
        self.engine = self.zero.engine
        self._loss: Tensor | float = float("nan")
        self._norm: Tensor | float = float("nan")
        self.skipped, self.spike = False, ""
        self._figures = torch.full((len(self.model.figures),), float("nan"))
        self._spikes = spike
        self.trace = NonfiniteTrace(self.model) if trace_nonfinite else None
        self.mark: Callable[[str], None] = lambda doing: None
        self.model.register_forward_pre_hook(lambda *_: self.mark("forward"))
        check_replicas(self.model, topology)
        self._hooks_checked = False

    @property
    def loss(self) -> float:
        """Return the loss of the last step, equal on all ranks. The host waits for the device."""
        return float(self._loss)

    @property
    def gradient_norm(self) -> float:
        """Return the norm of the last step's gradients before clipping; nan when they were not finite.

        The host waits for the device.
        """
        return float(self._norm)

    @property
    def figures(self) -> dict[str, float]:
        """Return the model's figures of the last step, equal on all ranks. The host waits for the device."""
        return dict(zip(self.model.figures, self._figures.tolist(), strict=True))

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return float(self.zero.optimizer.param_groups[0]["lr"])

    @property
    def loss_scale(self) -> float | None:
        """Return what fp16 multiplies the next step's loss by; None in another dtype."""
        return None if self.zero.loss_scale is None else self.zero.loss_scale.value

    @property
    def skipped_steps(self) -> int:
        """Return how many steps of the run updated nothing: their gradients were not finite, or a spike's."""
        return int(self.engine.skipped_steps)

    def train_step(
        self,
        micro_batches: Sequence[AnyBatch | tuple[Tensor, Tensor]],
        *,
        guarded: int | None = None,
        guard_gradients: bool = False,
    ) -> float:
        """Run a step as `run_step` does, wait for its loss and return it; nan when every label is ignored."""
        self.run_step(micro_batches, guarded=guarded, guard_gradients=guard_gradients)
        return self.loss

    def run_step(
        self,
        micro_batches: Sequence[AnyBatch | tuple[Tensor, Tensor]],
        *,
        guarded: int | None = None,
        guard_gradients: bool = False,
    ) -> None:
        """Run forward, backward and one optimizer step.

        `loss`, `gradient_norm` and `figures` tell of it: who asks for them waits for the device. The host waits in the
        step where DeepSpeed's does, before the update, to know whether the gradients are finite, and where there are
        bounds on spikes, for the two numbers that they judge.

        It minimises the mean loss over all labels of the global batch that are not ignored, however they are spread
        over micro-batches and ranks; of masked rows that of the masked tokens, and the mean over the rows of the loss
        of their order. Two all-reduces of one number over DP, and one of the model's figures, if it has any.

        Args:
            micro_batches: one batch, or (input ids [b, s], shifted labels [b, s]), for each accumulation step.
            guarded: the step's number, where what DP ranks hold alike is compared just before its update.
            guard_gradients: whether its first micro-batch is run twice then.

        Raises:
            UserError: what is held alike, or computed again, differs.
        """
        batches = [as_batch(micro_batch) for micro_batch in micro_batches]
        # DeepSpeed takes the mean over micro-batches and DP ranks. Dividing each one's sum of losses by the mean number
        # of labels makes it the mean over all labels.
        share = self._labels(batches).double() / (len(batches) * self.topology.data)
        if guarded is not None and guard_gradients:
            self._repeat(batches[0], share, guarded)
        if self.trace is not None:
            self.trace.begin()
        self.engine.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        figures = torch.zeros(len(self.model.figures), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(batches):
            self.activations.begin_micro_batch(index)
            output = self._forward(self.engine, batch, num_items_in_batch=share)
            loss: Tensor = output.loss
            self.mark("backward")
            self.zero.backward(loss)
            total += loss.detach()
            for number, name in enumerate(self.model.figures):
                figures[number] += getattr(output, name).detach()
            if index < len(batches) - 1:
                self.zero.step()
        if not self._hooks_checked:
            check_hooks(self.model.gradient_hooks)
            self._hooks_checked = True
        self.mark("update")
        mean = self._loss = all_reduce(total / len(batches), self.topology.data_group) / self.topology.data
        if self.model.figures:
            self._figures = all_reduce(figures / len(batches), self.topology.data_group) / self.topology.data
        if guarded is not None:
            check_duplicates(self.zero, guarded)
        bound = SpikeBound(self._spikes, self.zero.recent) if self._spikes is not None else None
        self.zero.step(partial(self._exceeds, bound, mean) if bound is not None else None)
        self._norm, self.skipped = self.zero.outcome()
        self.spike = bound.told if bound is not None and self.zero.vetoed is not None else ""

    def _exceeds(self, bound: SpikeBound, loss: Tensor, norm: Tensor) -> bool:
        """Judge a step by rank 0's numbers: all ranks do the same. Broadcast of two numbers, which are read at once.

        One that is not finite is DeepSpeed's to skip; it says -1 for some norms that are not.
        """
        numbers = torch.stack([loss, norm.to(loss)])
        if self.topology.world > 1:
            dist.broadcast(numbers, 0)
        judged, of_norm = numbers.tolist()
        return math.isfinite(judged) and math.isfinite(of_norm) and of_norm >= 0 and bound.exceeded(judged, of_norm)

    def _repeat(self, batch: AnyBatch, share: Tensor, step: int) -> None:
        """Run a micro-batch twice, outside DeepSpeed's engine, which would reduce its gradients."""
        self.model.train()
        self.activations.begin_micro_batch(-1)  # keeps everything: recomputation needs a whole backward
        scale = self.zero.loss_scale.value if self.zero.loss_scale is not None else 1.0

        def run() -> Tensor:
            loss: Tensor = self._forward(self.model, batch, num_items_in_batch=share).loss
            return loss * scale

        check_repeated(run, self.model, self.model.streams, step)

    def _forward(self, model: Any, batch: AnyBatch, **options: Any) -> Any:
        return model(batch.input_ids, **batch.arguments(), **options)

    def _labels(self, batches: Sequence[AnyBatch]) -> Tensor:
        """Count the labels of all DP ranks' batches that are not ignored. One all-reduce of one number over DP.

        The host does not wait for the number.
        """
        counts = [(batch.labels != IGNORE_INDEX).sum() for batch in batches]
        return all_reduce(torch.stack(counts).sum(), self.topology.data_group)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[AnyBatch | tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Return the "loss", and what else the model has figures of, over the batches of all DP ranks, which are as
        `train_step` takes them.

        Each is a mean: over the labels, or over the rows. Each rank has as many batches.

        Raises:
            UserError: no label to score in any batch.
        """
        self.engine.eval()
        sums, names = torch.zeros(2, 1, dtype=torch.float64, device=self.device), ["loss"]
        for batch in map(as_batch, batches):
            output = self._forward(self.engine, batch, reduction="none")
            totals = self.model.totals(output, batch.arguments())
            names, pairs = list(totals), list(totals.values())
            sums = sums + torch.stack([torch.stack([total, count.double()]) for total, count in pairs], 1)
        total, count = all_reduce(sums, self.topology.data_group).tolist()
        self.engine.train()
        if not all(count):
            raise UserError("validation data holds nothing to score")
        means = {name: each / of for name, each, of in zip(names, total, count, strict=True)}
        return {"loss": sum(mean for name, mean in means.items() if name.endswith("loss")), **means}
