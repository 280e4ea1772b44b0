"""The one build order of a training run, and a step of it.

seeds → model (directly in its dtype; inside `zero.Init` for ZeRO-3; with its gradient hooks) → layouts audited →
recompute policy → `deepspeed.initialize(mpu=topology)` → checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from torch import Tensor, nn
from transformers import PretrainedConfig

from zero_tp.activations.memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.constants import IGNORE_INDEX
from zero_tp.data.batch import Batch
from zero_tp.errors import UserError
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.layout import audit, whole_shape
from zero_tp.parallel.parameter import WeightSource
from zero_tp.topology import Topology
from zero_tp.training.guards import check_hooks, check_replicas
from zero_tp.zero.clipping import clip_gradients, gradient_norm
from zero_tp.zero.states import unpartitioned_masters


def run_dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype of the module's weights under a DeepSpeed config."""
    if config.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    if config.get("fp16", {}).get("enabled"):
        return torch.float16
    return torch.float32


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay skips biases and norms: every parameter of one dimension."""
    named = list(model.named_parameters())
    flat = [parameter for _, parameter in named if len(whole_shape(parameter)) < 2]
    matrices = [parameter for _, parameter in named if len(whole_shape(parameter)) >= 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": flat, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class TrainingEngine:
    """A model in a DeepSpeed engine on a topology.

    Attributes:
        engine: DeepSpeed's engine. model: the unwrapped model. dtype: of its weights.
        activations: what backward keeps and recomputes.
        gradient_norm: of the last step, before clipping; nan when that step was skipped.
        skipped: the gradients of the last step were not finite, on some rank, and nothing was updated.
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
        recompute: RecomputePolicy | None = None,
    ):
        """Build everything, in the one order that works. Collective over all ranks.

        Args:
            config: the model's Hugging Face config.
            deepspeed_config: without a `zero_tp` block and without `"auto"`.
            seed: of weights and dropout.
            source: of the initial weights instead of the seed.
            recompute: what backward computes again; by default nothing.

        Raises:
            UserError: the sizes do not fit the topology.
        """
        self.topology = topology
        self.device = torch.device(device)
        self.stage = int(deepspeed_config.get("zero_optimization", {}).get("stage", 0))
        settings = {"gradient_clipping": GRADIENT_CLIPPING_DEFAULT, **deepspeed_config}
        self.clipping = float(settings["gradient_clipping"])
        if self.stage == 0:
            settings["gradient_clipping"] = 0.0  # see clipping.py
        self.dtype = run_dtype(settings)
        with self._construction(settings):
            self.model = ZeroTPForCausalLM(config, topology, seed=seed, source=source, dtype=self.dtype, device=device)
        audit(self.model, topology)
        self.activations = ActivationMemory(
            self.model,
            recompute or RecomputePolicy(mode="none"),
            settings.get("activation_checkpointing", {}),
            self.device,
        )
        decay = settings.get("optimizer", {}).get("params", {}).get("weight_decay", 0.0)
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=self.model,
            model_parameters=parameter_groups(self.model, decay),
            config=settings,
            mpu=topology,
        )
        if self.stage == 0:
            self._undo_first_step()
        self.gradient_norm = float("nan")
        self.skipped = False
        self._check_world()
        check_replicas(self.model, topology)
        self._hooks_checked = False

    def _construction(self, settings: dict[str, Any]) -> AbstractContextManager[Any]:
        if self.stage < 3:
            return nullcontext()
        return deepspeed.zero.Init(
            # With mpu= alone it ignores the DP group and overwrites the other TP ranks' shards; mpu= is for its reading
            # of the batch sizes.
            data_parallel_group=self.topology.data_group,
            mpu=self.topology,
            # Without dtype=: given one, DeepSpeed 0.19.8 takes bf16 instead wherever fp16 is not supported.
            config_dict_or_path=settings,
            mem_efficient_linear=False,
        )

    @torch.no_grad()
    def _undo_first_step(self) -> None:
        """Take back what DeepSpeed's 16-bit optimizers without ZeRO do when they are made.

        To allocate their states they step once on zero gradients, which decays the masters by lr·weight_decay and
        leaves Adam's bias correction one step ahead for good.
        """
        wrapped = getattr(self.optimizer, "optimizer", None)
        if wrapped is None:
            return
        wrapped.state.clear()
        for group in wrapped.param_groups:
            group.pop("step", None)
        parameters = list(self.model.parameters())
        masters = unpartitioned_masters(self.optimizer, parameters)
        for parameter in parameters:
            flat, offset = masters[id(parameter)]
            flat.view(-1).narrow(0, offset, parameter.numel()).copy_(parameter.flatten())

    def _check_world(self) -> None:
        found = self.engine.dp_world_size
        if found != self.topology.data:
            raise RuntimeError(f"DeepSpeed sees {found} data-parallel ranks, the topology {self.topology.data}")

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def train_step(self, micro_batches: Sequence[Batch | tuple[Tensor, Tensor]]) -> float:
        """Forward, backward and one optimizer step. What is minimised is the mean loss over all labels of the global
        batch that are not ignored, however they are spread over micro-batches and ranks.

        Args:
            micro_batches: one Batch, or (input ids [b, s], shifted labels [b, s]), for each accumulation step.

        Returns:
            That mean, equal on all ranks; nan when every label is ignored. Two all-reduces of one number over DP.
        """
        batches = [Batch(*micro_batch) for micro_batch in micro_batches]
        # DeepSpeed takes the mean over micro-batches and DP ranks. Dividing each one's sum of losses by the mean number
        # of labels makes it the mean over all labels.
        share = self._labels(batches) / (len(batches) * self.topology.data)
        self.engine.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(batches):
            self.activations.begin_micro_batch(index)
            loss = self._loss(batch, num_items_in_batch=share)
            self.engine.backward(loss)
            total += loss.detach()
            if self.engine.is_gradient_accumulation_boundary():
                self._before_step()
            self.engine.step()
        if not self._hooks_checked:
            check_hooks(self.model.gradient_hooks)
            self._hooks_checked = True
        mean = all_reduce(total / len(batches), self.topology.data_group).item() / self.topology.data
        self._after_step()
        return float(mean)

    def _loss(self, batch: Batch, **options: Any) -> Tensor:
        loss: Tensor = self.engine(
            batch.input_ids,
            shift_labels=batch.labels,
            position_ids=batch.position_ids,
            document_ids=batch.document_ids,
            **options,
        ).loss
        return loss

    def _labels(self, batches: Sequence[Batch]) -> int:
        """Labels of all DP ranks' batches that are not ignored. All-reduce of one number over DP."""
        counts = [(batch.labels != IGNORE_INDEX).sum() for batch in batches]
        return int(all_reduce(torch.stack(counts).sum(), self.topology.data_group).item())

    def _before_step(self) -> None:
        if self.stage > 0:
            return
        parameters = list(self.model.parameters())
        scale = getattr(getattr(self.optimizer, "loss_scale_config", None), "cur_scale", 1.0)
        norm = gradient_norm(parameters, self.topology) / scale
        self.gradient_norm = norm.item()
        finite = bool(norm.isfinite())
        if finite and self.clipping > 0:
            clip_gradients(parameters, norm, self.clipping)
        if not hasattr(self.optimizer, "loss_scale_config"):
            # A plain torch optimizer checks nothing: leave it no gradients, and tell the engine that it skipped.
            self.optimizer.overflow = not finite
            if not finite:
                for parameter in parameters:
                    parameter.grad = None

    def _after_step(self) -> None:
        if self.stage > 0:
            norm = self.engine.get_global_grad_norm()
            self.gradient_norm = float(norm) if norm is not None else float("nan")
        self.skipped = bool(getattr(self.optimizer, "overflow", False))
        if self.skipped:
            self.gradient_norm = float("nan")

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch | tuple[Tensor, Tensor]]) -> float:
        """Mean loss a token over the batches of all DP ranks, which are as `train_step` takes them; each rank has as
        many.

        Raises:
            UserError: no label to score in any batch.
        """
        self.engine.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in (Batch(*given) for given in batches):
            sums[0] += self._loss(batch, reduction="none").double().sum()
            sums[1] += (batch.labels != IGNORE_INDEX).sum()
        total, count = all_reduce(sums, self.topology.data_group).tolist()
        self.engine.train()
        if count == 0:
            raise UserError("validation data holds nothing to score")
        return total / count
