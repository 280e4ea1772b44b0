"""Build a model in DeepSpeed's engine, in the one order that works, and run its steps and
evaluations.

`zero.backward` and `zero.step` are those of engine/zero/zero_engine.py; zero_stages.py beside it
has what the ZeRO stages replace of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.base.constants import DTYPES, IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.base.settings.param_groups import ParamGroup, parse_param_groups
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.base.settings.schedule import Schedule
from zero_tp.base.settings.schema import Parallel, Spike
from zero_tp.data.batch import AnyBatch, Batch, as_batch
from zero_tp.engine import guards
from zero_tp.engine.bias_update import BiasUpdate
from zero_tp.engine.param_groups import trainable_of
from zero_tp.engine.qk_clip import QKClip, check_qk_clip
from zero_tp.engine.settings.parse import check_settings
from zero_tp.engine.settings.rule import EntryPoint
from zero_tp.engine.settings.rules import check_average, refuse_experts
from zero_tp.engine.zero.build_lock import report_build_locks
from zero_tp.engine.zero.matrix_optimizer import MatrixOptimizer
from zero_tp.engine.zero.ops import check_nvme, disable_shared_memory_collectives
from zero_tp.engine.zero.states import local_shape
from zero_tp.engine.zero.zero_stages import engine_of_stage
from zero_tp.model.architectures import architecture_of
from zero_tp.model.model_class import model_class as default_model_class
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.agreement import all_gather_object
from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.cpu.heap import return_freed_memory
from zero_tp.parallel.elementwise import compile_elementwise, is_compiled
from zero_tp.parallel.layout import audit
from zero_tp.parallel.lock_step import uneven_forwards
from zero_tp.parallel.parameter import ShardedSeededInit, WeightSource
from zero_tp.parallel.topology import Topology


class TrainingEngine:
    """A model in DeepSpeed's engine on a topology, and its training steps.

    It is built in the one order that works: the model (directly in its dtype; inside `zero.Init`
    for ZeRO-3; `ParallelModel` adds the gradient hooks of parallel/gradients.py) → layouts audited
    → recompute policy → compile → `deepspeed.initialize(mpu=topology)` → replicas compared.
    Collective over all ranks.

    Args:
        config: the model's Hugging Face config.
        settings: checked, from `RunConfig.load`; `from_dict` takes a dict.
        seed: of weights and dropout.
        source: of the initial weights instead of the seed.
        model: the model's class, by default that of its objective; `ZeroTPForCausalLM` can also
            generate.
        recompute: which layers backward recomputes; by default none.
        spike: bounds on loss and gradient norm; by default none.
        param_groups: parameters with a weight decay or a factor of the rate of their own.
        qk_clip_threshold, qk_clip_alpha: of QK-clip; None: none.
        router_bias_update_rate: of the routers' biases, see `BiasUpdate`; 0 leaves them.
        ema: decay of an average of the weights (`WeightAverage`); by default none is kept.
        z_loss, router_z_loss: weights of the z-losses (model/z_loss.py).
        compiled: run training's elementwise work in kernels that torch compiles; "auto": on CUDA.

    Attributes:
        model: the unwrapped model. dtype: of its weights.
        zero: the engine of the ZeRO stage. deepspeed_engine: DeepSpeed's, built by `zero`.
        activations: the activations that backward keeps or recomputes.
        compiled: whether training's elementwise work runs in compiled kernels.
        skipped: whether the last step updated nothing, because its gradients were not finite on
            some rank.
        on_phase: called with the phase that this rank enters: "forward", "backward" or "update".

    Raises:
        UserError: the sizes do not fit the topology, a group of `param_groups` selects nothing or
            a part of a parameter, no router has a bias to update, a weight of a z-loss is wrong,
            or torch can't compile here.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        topology: Topology,
        settings: DeepSpeedSettings,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        source: WeightSource | None = None,
        model: type[ParallelModel] | None = None,
        recompute: RecomputePolicy | None = None,
        spike: Spike | None = None,
        param_groups: Sequence[ParamGroup] = (),
        qk_clip_threshold: float | None = None,
        qk_clip_alpha: float = 0.5,
        router_bias_update_rate: float = 0.0,
        ema: float | None = None,
        z_loss: float = 0.0,
        router_z_loss: float = 0.0,
        compiled: bool | Literal["auto"] = False,
    ):
        self.topology = topology
        self.device = torch.device(device)
        disable_shared_memory_collectives()  # a script may not have called `connect_deepspeed`
        report_build_locks()
        _check_settings(settings, topology)
        check_qk_clip(qk_clip_threshold, config, settings)
        check_average(settings, ema)
        self.zero = engine_of_stage(settings, topology, spike)
        self.dtype: torch.dtype = getattr(torch, DTYPES[settings.dtype])
        self.model = self._make_model(config, model, source, seed)
        # A parameter without a layout ends the start here. Later only the norm of gradients or
        # drifting replicas would show it.
        audit(self.model, topology, local_shape)
        self._bias_update = BiasUpdate(self.model, topology, router_bias_update_rate)
        self.model.set_z_losses(z_loss, router_z_loss)
        self.activations = self._activation_memory(recompute)
        self.compiled = is_compiled(compiled, self.device)
        if self.compiled:
            compile_elementwise(self.model, self.device)
        self.zero.compiled = self.compiled
        # After everything that changes modules or hooks: DeepSpeed's optimizers copy the weights
        # into masters, and ZeRO-2 and -3 hook each parameter here.
        self._initialize_deepspeed(param_groups)
        if ema is not None:
            self.zero.start_average(ema)
        # DeepSpeed broadcasts weights over DP only: that TP ranks begin with the same replicas
        # follows from the seeds and files alone.
        guards.check_replicas(self.model, topology)
        self.deepspeed_engine = self.zero.deepspeed_engine
        self.qk_clip = QKClip.create(self.zero, qk_clip_threshold, qk_clip_alpha)
        self._norm: Tensor | float = float("nan")
        self.skipped = False
        # The loss and the model's other figures, means over DP.
        self._loss_and_figures = torch.full((1 + len(self.model.metric_names),), float("nan"))
        self.on_phase: Callable[[str], None] | None = None
        self.model.register_forward_pre_hook(lambda *_: self._enter("forward"))

    def _make_model(
        self,
        config: PretrainedConfig,
        model: type[ParallelModel] | None,
        source: WeightSource | None,
        seed: int,
    ) -> ParallelModel:
        # Only the first DP rank needs all values (`ShardedSeededInit`): DeepSpeed broadcasts its
        # weights, zero.Init as each is built, or `initialize` all of them.
        source = source or ShardedSeededInit(seed)
        with self.zero.construction():
            model = model or default_model_class(architecture_of(config).spec(config))
            return model(
                config,
                self.topology,
                seed=seed,
                source=source,
                dtype=self.dtype,
                device=self.device,
            )

    def _activation_memory(self, recompute: RecomputePolicy | None) -> ActivationMemory:
        policy = recompute or RecomputePolicy(mode="none")
        checkpointing = self.zero.settings.activation_checkpointing
        return ActivationMemory(self.model, policy, checkpointing, self.device)

    def _initialize_deepspeed(self, param_groups: Sequence[ParamGroup]) -> None:
        optimizer = self.zero.settings.optimizer
        assert optimizer is not None, "only a Trainer's settings have none"
        # AdamW's groups have no learning rate: DeepSpeed's dict has it (`deepspeed_dict`).
        trainable = trainable_of(self.model, param_groups, optimizer, self.dtype)
        self.zero.initialize(self.model, trainable)
        if isinstance(trainable, MatrixOptimizer):
            trainable.bind(self.model, self.zero.fragments(), self.zero.updated_tensors())

    @classmethod
    def from_dict(
        cls,
        config: PretrainedConfig,
        topology: Topology,
        deepspeed_config: dict[str, Any],
        *,
        recompute: RecomputePolicy | None = None,
        param_groups: Sequence[ParamGroup | Mapping[str, Any]] = (),
        **options: Any,
    ) -> TrainingEngine:
        """Return the engine of a DeepSpeed config without a `zero_tp` block and without "auto".

        Args:
            param_groups: the constructor's, or as in a run's file.
            options: the constructor's.

        Raises:
            ConfigError: a key that a run's file may not have, or a refused combination.
        """
        parallel = Parallel(
            tensor=topology.tensor, sequence=topology.sequence, expert=topology.expert
        )
        layers = config.num_hidden_layers
        checked = check_settings(deepspeed_config, parallel, EntryPoint.ENGINE, recompute, layers)
        options |= {"recompute": recompute, "param_groups": parse_param_groups(param_groups)}
        return cls(config, topology, checked.settings, **options)

    def set_batch(self, micro_batch: int, accumulation: int) -> None:
        """Take steps of `accumulation` micro-batches of `micro_batch` rows from now on.

        Call it between steps, on all ranks.
        """
        self.zero.set_batch(micro_batch, accumulation)

    def begin_stage(
        self,
        *,
        micro_batch: int,
        accumulation: int,
        recompute: RecomputePolicy,
        schedule: Schedule | None,
        lr_scale: float = 1.0,
        schedule_start: int | None = None,
        config: PretrainedConfig | None = None,
    ) -> None:
        """Change what a stage of a run may change; call it between steps, on all ranks.

        Args:
            micro_batch, accumulation: samples of a micro-batch, and micro-batches of a step.
            recompute: which layers backward recomputes.
            schedule: of the rate; None: it is constant.
            lr_scale: factor of the optimizer's rate.
            schedule_start: number of updates before the schedule's first step; by default the
                schedule begins now.
            config: the model's, with other `rope_parameters`.
        """
        self.set_batch(micro_batch, accumulation)
        start = self.zero.updates if schedule_start is None else schedule_start
        self.zero.replace_schedule(schedule, lr_scale, start)
        if config is not None:
            self.model.set_rope(config)
        # Always made anew: its buffer has the size of the stage's micro-batches.
        self.activations.remove()
        self.activations = self._activation_memory(recompute)

    @property
    def loss(self) -> float:
        """Return the loss of the last step, without z-losses, equal on all ranks.

        The host waits for the device, unless the step has read it with the norm (`AdamWUpdate`).
        """
        return float(self._loss_and_figures[0])

    @property
    def gradient_norm(self) -> float:
        """Return the norm of the last step's gradients before clipping; nan when they were not
        finite.

        The host waits for the device.
        """
        return float(self._norm)

    @property
    def spike(self) -> str:
        """Return why the last step was skipped as a spike; else an empty string."""
        return self.zero.veto.spike

    @property
    def figures(self) -> dict[str, float]:
        """Return the last step's other losses and accuracies, equal on all ranks.

        `aux_loss`, `z_loss` and `router_z_loss` are without their weights. The host waits as for
        `loss`.
        """
        return dict(zip(self.model.metric_names, self._loss_and_figures[1:].tolist(), strict=True))

    @property
    def attention_figures(self) -> dict[str, float | None]:
        """Return the largest attention score of the last step, None if it is at most the
        threshold, and the number of heads that the step clipped; without QK-clip nothing.
        """
        if self.qk_clip is None:
            return {}
        is_applied = not (self.skipped or self.spike)
        return {
            "max_attention_score": self.qk_clip.largest_score,
            "clipped_heads": self.qk_clip.clipped_heads if is_applied else 0,
        }

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step, without a group's factor."""
        group = self.zero.optimizer.param_groups[0]
        return float(group["lr"]) / float(group.get("lr_scale", 1.0))

    @property
    def loss_scale(self) -> float | None:
        """Return the factor of the next step's loss in fp16; None in another dtype."""
        return None if self.zero.loss_scale is None else self.zero.loss_scale.value

    @property
    def skipped_steps(self) -> int:
        """Return how many steps of the run updated nothing: their gradients were not finite, or
        they were spikes.
        """
        return int(self.deepspeed_engine.skipped_steps)

    def train_step(
        self,
        micro_batches: Sequence[AnyBatch | tuple[Tensor, Tensor]],
        *,
        guarded: int | None = None,
        guard_gradients: bool = False,
    ) -> float:
        """Run a step as `run_step` does, wait for its loss and return it; 0 when every label is
        ignored.
        """
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

        Reading `loss`, `gradient_norm` or `figures` synchronises with the device. The step itself
        synchronises where DeepSpeed does. Before the update it asks whether the gradients are
        finite. It waits for gradients that are reduced during backward or copied to the host, and
        under ZeRO-3 for gathers and reductions. With `timers.throughput` it waits at each
        micro-batch. Bounds on spikes wait for the two numbers they judge.

        It minimises the mean loss over all labels of the global batch that are not ignored, however
        they are spread over micro-batches and ranks. For masked rows that is the loss of the masked
        tokens, plus the rows' mean loss of sentence order. Without a label the loss is 0. Losses
        of routers are means over micro-batches and replicas of theirs.
        All-reduces over DP: the numbers of labels, the loss, and the model's figures, such as
        accuracies, if it has any.

        Args:
            micro_batches: one batch, or (input ids [b, s], shifted labels [b, s]), for each
                accumulation step.
            guarded: number of a guarded step, else None. It runs `guards.check_expert_choices` in
                its first micro-batch and `guards.check_duplicates` before its update.
            guard_gradients: a guarded step also runs its first micro-batch twice. On CUDA a script
                without `connect_deepspeed` calls
                `zero_tp.run.process.connect.use_deterministic_cublas` first.

        Raises:
            UserError: batches of the other objective; another number of micro-batches than
                `gradient_accumulation_steps`; choices, duplicates or repeated gradients differ.
        """
        batches = self._as_batches(micro_batches)
        accumulation = self.deepspeed_engine.gradient_accumulation_steps()
        if len(batches) != accumulation:
            raise UserError(
                f"a step was given {len(batches)} micro-batches, and gradient_accumulation_steps "
                f"is {accumulation}: "
                "DeepSpeed would update in the middle of a global batch; give as many"
            )
        divisors = self._mean_label_counts(batches)
        if guarded is not None and guard_gradients:
            self._check_reproducible(batches[0], divisors, guarded)
        with self.qk_clip.scores.recording() if self.qk_clip is not None else nullcontext():
            self._accumulate(batches, divisors, guarded)
        guards.check_hooks(self.model)
        if guarded is not None:
            # Before the update, which would overwrite a damaged copy of a weight after its
            # gradients have entered the step.
            guards.check_duplicates(self.zero, guarded)
        self._update()
        # Gradients are gone, and the next forward's activations come to lie elsewhere.
        return_freed_memory()

    def _as_batches(self, batches: Sequence[AnyBatch | tuple[Tensor, Tensor]]) -> list[AnyBatch]:
        """Return batches of the model's objective; a causal model's labels are shifted already,
        an encoder's never.
        """
        converted = [as_batch(batch) for batch in batches]
        for batch in converted:
            if self.model.causal and not isinstance(batch, Batch):
                raise UserError(
                    "a causal model was given a mapping, of whose labels the first would count as "
                    "a target; give "
                    "(input ids, labels) or a Batch, where labels hold the token after each input"
                )
            if not self.model.causal and isinstance(batch, Batch):
                raise UserError(
                    "an encoder was given a pair, whose labels are the next tokens; give a mapping "
                    "of input_ids, "
                    "labels and the other arguments of its forward"
                )
        return converted

    def _accumulate(
        self, batches: Sequence[AnyBatch], divisors: Mapping[str, Tensor], guarded: int | None
    ) -> None:
        """Run the forward and backward of all micro-batches; set the step's loss and figures,
        means over DP.
        """
        self.deepspeed_engine.train()
        names = self.model.metric_names
        # On the device and in fp64: a step of many micro-batches does not round its loss, and the
        # host does not wait for it.
        figures = torch.zeros(1 + len(names), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(batches):
            self.activations.begin_micro_batch(index)
            guarding = guarded is not None and index == 0
            with (
                self._bias_update.counting(),
                guards.check_expert_choices(self.model, self.topology, guarded or 0)
                if guarding
                else nullcontext(),
            ):
                # Through DeepSpeed's engine: ZeRO-3 gathers parameters in hooks of its forward.
                output = self._forward(self.deepspeed_engine, batch, **divisors)
            self._backward(output.loss)
            reported = output.loss if output.reported_loss is None else output.reported_loss
            values = (reported, *(getattr(output, name) for name in names))
            for number, value in enumerate(values):
                figures[number] += value.detach()
            # Its graph would hold what layers keep beside saved tensors, such as experts' routes.
            del output
            if index < len(batches) - 1:
                # Only counts the micro-batch: backward has added the gradients.
                self.zero.step()
        self._enter("update")
        self._loss_and_figures = self._mean(figures, len(batches))

    def _forward(self, model: Any, batch: AnyBatch, **options: Any) -> Any:
        """Run the model's forward: model/causal_lm.py, of an encoder model/masked_lm.py.

        A batch's labels are shifted already, so they are its `shift_labels`.
        """
        return model(batch.input_ids, **batch.arguments(), **options)

    def _backward(self, loss: Tensor) -> None:
        """Run backward, in which norms and hooks sum partial gradients over TP
        (parallel/gradients.py).
        """
        self._enter("backward")
        self.zero.backward(loss)

    def _update(self) -> None:
        """Compute the norm, veto a spike, clip, and update the weights; `ZeroEngine.step`
        (engine/zero/zero_engine.py) says who does what.
        """
        if self.qk_clip is not None:
            self.qk_clip.prepare()
        self.zero.step(self._loss_and_figures)
        self._norm, self.skipped = self.zero.norm_and_skipped()
        self._bias_update.apply(self.zero)
        # The fused update has read them together with the norm.
        if self.zero.veto.read_figures is not None:
            self._loss_and_figures = torch.tensor(self.zero.veto.read_figures, dtype=torch.float64)

    def _mean(self, total: Tensor, micro_batches: int) -> Tensor:
        """Return the mean over micro-batches and replicas. All-reduce over DP."""
        group = self.topology.data_group
        replicas = self.topology.data
        # A forward has divided by the mean number of labels, so the plain mean is the mean over all
        # labels (`_mean_label_counts`).
        return all_reduce(total / micro_batches, group) / replicas

    def _enter(self, phase: str) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    def _check_reproducible(
        self, batch: AnyBatch, divisors: Mapping[str, Tensor], step: int
    ) -> None:
        """Run a micro-batch twice, outside DeepSpeed's engine, which would reduce its gradients."""
        self.model.train()
        # -1 keeps everything, because recomputation needs a whole backward.
        self.activations.begin_micro_batch(-1)
        scale = self.zero.loss_scale.value if self.zero.loss_scale is not None else 1.0

        def run() -> Tensor:
            loss: Tensor = self._forward(self.model, batch, **divisors).loss
            return loss * scale

        guards.check_reproducible(run, self.model, self.model.streams, step)

    def _mean_label_counts(self, batches: Sequence[AnyBatch]) -> dict[str, Tensor]:
        """Return the mean number of labels of a micro-batch [fp64, 0-d], by the name of the
        forward's argument.

        A forward divides its summed loss by it. DeepSpeed then takes the mean over micro-batches
        and DP ranks: together that is the mean over all labels. With 2 ranks of 2 micro-batches:

            labels           rank 0: 5, 3    rank 1: 2, 0      mean 10 / 4 = 2.5
            losses           sum5/2.5, sum3/2.5, sum2/2.5, 0   their mean is sum10 / 10

        One all-reduce over DP of the numbers of labels, and of labelled rows; the host does not
        wait for them.
        """
        # In integers: fp32 counts tokens exactly only up to 2^24.
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        for batch in batches:
            for kind, labels in enumerate(
                (batch.labels, batch.arguments().get("next_sentence_label"))
            ):
                if labels is not None:
                    counts[kind] += (labels != IGNORE_INDEX).sum()
        tokens, rows = all_reduce(counts, self.topology.data_group).double() / (
            len(batches) * self.topology.data
        )
        divisors = {"num_items_in_batch": tokens}
        return divisors | ({"num_rows_in_batch": rows} if self.model.spec.sentence_head else {})

    @torch.no_grad()
    def evaluate(self, batches: Sequence[AnyBatch | tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Return the "loss" and the model's other figures.

        Each is a mean over the labels or rows of all DP ranks. All-reduce over DP, and the host
        waits for it.

        Args:
            batches: as `train_step` takes them; ranks may have different numbers of them.

        Raises:
            UserError: no label to score in any batch.
        """
        self.deepspeed_engine.eval()
        # Sums and counts, and not means: batches and ranks have different numbers of labels. In
        # fp64, because a validation adds up many tokens.
        sums: Tensor | None = None
        names: list[str] = []
        with self._uneven_forwards():
            for batch in self._as_batches(batches):
                output = self._forward(self.deepspeed_engine, batch, reduction="none")
                totals = self.model.metric_sums(output, batch.arguments())
                names = list(totals)
                pairs = list(totals.values())
                part = torch.stack(
                    [torch.stack([total, count.double()]) for total, count in pairs], 1
                )
                sums = part if sums is None else sums + part
        if self.zero.lock_step:
            # A rank without a batch learns here which metrics the others have summed.
            names = max(all_gather_object(names), key=len)
        names = names or ["loss"]
        if sums is None:
            sums = torch.zeros(2, len(names), dtype=torch.float64, device=self.device)
        total, count = all_reduce(sums, self.topology.data_group).tolist()
        self.deepspeed_engine.train()
        if not all(count):
            raise UserError("validation data holds nothing to score")
        means = {
            name: figure / number for name, figure, number in zip(names, total, count, strict=True)
        }
        return {"loss": sum(mean for name, mean in means.items() if name.endswith("loss")), **means}

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights of `ema`:
        `ZeroEngine.averaged_weights`. Collective over DP.
        """
        return self.zero.averaged_weights()

    def _uneven_forwards(self) -> AbstractContextManager[None]:
        """Let ranks evaluate different numbers of batches in this block."""
        if not self.zero.lock_step:
            return nullcontext()
        group = self.topology.data_group
        return uneven_forwards(self.model, group, self.device, self._join_forward)

    def _join_forward(self) -> None:
        """Take part in a forward of other DP ranks, with one row whose output is dropped."""
        # As long as sequence parallelism needs it.
        ids = torch.zeros(1, self.topology.tensor, dtype=torch.long, device=self.device)
        labels = torch.full_like(ids, IGNORE_INDEX)
        arguments = {"input_ids": ids, "labels": labels}
        if self.model.spec.sentence_head:
            # Without one its head would not run, and under ZeRO-3 not be gathered.
            arguments["next_sentence_label"] = labels[:, 0]
        batch = as_batch((ids, labels) if self.model.causal else arguments)
        self._forward(self.deepspeed_engine, batch, reduction="none")


def _check_settings(settings: DeepSpeedSettings, topology: Topology) -> None:
    """Check what a script may have given, before the model is built."""
    if isinstance(settings, Mapping):
        raise UserError(
            "TrainingEngine takes checked settings; for a dict use TrainingEngine.from_dict"
        )
    refuse_experts(settings, topology.expert)
    # A missing directory or header is found at once.
    check_nvme(settings.zero_optimization.nvme_paths)
