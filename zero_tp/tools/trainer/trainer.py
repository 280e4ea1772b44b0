"""transformers' Trainer on tensor-parallel ranks.

`TensorParallel` does the same for a subclass of Trainer.

Trainer keeps its loop, arguments, callbacks and metrics. This module replaces the distribution of
samples over ranks, the divisor of a step's loss, the engine, and checkpoints.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_utils import seed_worker

from zero_tp.base.errors import UserError
from zero_tp.base.settings.optimizer import OptimizerParams
from zero_tp.base.settings.param_groups import ParamGroup, parse_param_groups
from zero_tp.data.tokenizer_files import match_tokenizer
from zero_tp.engine.bias_update import BiasUpdate
from zero_tp.engine.param_groups import optimizer_groups
from zero_tp.engine.zero.build_lock import report_build_locks
from zero_tp.engine.zero.ops import disable_shared_memory_collectives
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.model.huggingface import parallel_model
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.parallel.topology import Topology
from zero_tp.run.process.quiet import ignore_deprecated_collectives
from zero_tp.tools.trainer.arguments import check_arguments, check_batch, check_degrees, refuse_trl
from zero_tp.tools.trainer.batches import (
    SampleComparison,
    count_labels,
    pad_for_sequence_parallelism,
)
from zero_tp.tools.trainer.checkpoints import (
    has_only_weights,
    load_weights,
    resume_states,
    save_states,
)
from zero_tp.tools.trainer.deepspeed_arguments import fill_left_out_keys
from zero_tp.tools.trainer.tensor_parallel_accelerator import (
    TensorParallelAccelerator,
    check_trainable,
)

# On import: TrainingArguments connect ranks, and transformers opens models for ZeRO-3, before a
# Trainer is made.
disable_shared_memory_collectives()
report_build_locks()

Base: Any = (
    object  # untyped, because the mixin uses attributes of the Trainer that follows it in the MRO
)


class TensorParallel(Base):
    """Makes a subclass of transformers' Trainer tensor-parallel: `class Mine(TensorParallel,
    TheirTrainer)`.

    Attributes:
        topology: the TP × DP grid.
        zero: the engine of the ZeRO stage, once training has begun.
    """

    zero: ZeroEngine | None = None
    accelerator: Any
    deepspeed: Any
    _evaluation: tuple[dict[str, float], int] = ({}, 0)  # metrics and steps of the last one
    is_distributed_loading_by_transformers: bool

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *arguments: Any,
        tensor_parallel: int = 1,
        sequence_parallel: bool = True,
        expert_parallel: int = 1,
        param_groups: Sequence[ParamGroup | Mapping[str, Any]] = (),
        router_bias_update_rate: float = 0.0,
        ema: float | None = None,
        z_loss: float = 0.0,
        router_z_loss: float = 0.0,
        **options: Any,
    ):
        """Take Trainer's arguments; `args` has DeepSpeed's config. Collective over all ranks.

        Args:
            model: a transformers model, whole and equal on every rank, which is split here; or a
                zero_tp model, which has its topology already.
            tensor_parallel: TP degree for a transformers model.
            sequence_parallel: also use SP.
            expert_parallel: EP degree for a transformers model.
            param_groups: as in `zero_tp.param_groups`; by default those of Trainer.
            ema: decay of an average of the weights (`averaged_weights`); by default none is kept.
            router_bias_update_rate, z_loss, router_z_loss: as in `zero_tp.training`.

        Raises:
            UserError: no DeepSpeed config; frozen parameters; an argument that is not exact here;
                an architecture or sizes that TP or EP can't split; a wrong weight of a z-loss.
        """
        refuse_trl(type(self))
        if model is None or args is None or isinstance(model, str):
            raise UserError(
                "ZeroTPTrainer: give it a model and TrainingArguments; a model_init is not built"
            )
        # `parallel_model` refuses others.
        if isinstance(model, nn.Module) and not getattr(model, "peft_config", None):
            check_trainable(model)
        if isinstance(model, ParallelModel):
            check_degrees(model.topology, tensor_parallel, expert_parallel)
        # Reading `args.device` in it connects the ranks; the topology below needs their number.
        check_arguments(args, tensor_parallel)
        ignore_deprecated_collectives()
        if isinstance(model, ParallelModel):
            model.check_config()
            self.topology = model.topology
        else:
            self.topology = Topology(tensor_parallel, sequence_parallel, expert=expert_parallel)
            model = parallel_model(model, self.topology, seed=args.seed, device=args.device)
        check_batch(args, self.topology)
        self._param_groups = parse_param_groups(param_groups)
        self._bias_update = BiasUpdate(model, self.topology, router_bias_update_rate)
        self._ema = ema
        model.set_z_losses(z_loss, router_z_loss)
        self._z_losses = model.z_losses
        self._labelled_rows: Tensor | None = None
        super().__init__(model, args, *arguments, **options)
        if self.compute_loss_func is not None:
            raise UserError(
                "compute_loss_func: it needs whole logits with gradients, which no rank forms"
            )
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise UserError(
                "optimizers: Trainer replaces them under DeepSpeed; set optim, learning_rate and "
                "lr_scheduler_type, or "
                "give optimizer_cls_and_kwargs"
            )
        self.model_accepts_loss_kwargs = True  # losses of tokens and of rows are sums here
        # By default Trainer takes every forward argument with "label" in its name for one,
        # `shift_labels` too, and without it in the rows would report no `eval_loss`.
        if args.label_names is None and not self.model.spec.sentence_head:
            self.label_names = ["labels"]
        self._announce_the_mean(args)

    def _announce_the_mean(self, args: TrainingArguments) -> None:
        """Warn where plain Trainer's loss is a sum of means.

        `args` has DeepSpeed's accumulation by now.
        """
        sums_replicas = self.topology.data > 1 and args.average_tokens_across_devices
        sums_losses = not self.model.spec.causal and (
            args.gradient_accumulation_steps > 1 or sums_replicas
        )
        if sums_losses and self.topology.rank == 0:
            warnings.warn(
                "ZeroTPTrainer: the loss is the mean over a step's labels; plain Trainer adds up "
                "the mean losses of an "
                "encoder's micro-batches on all replicas",
                stacklevel=3,
            )

    # ---- samples ---------------------------------------------------------------------------------

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        """Return the arguments of Trainer's own accelerator, and keep them for ours."""
        self._accelerator_options: dict[str, Any] = super()._build_accelerator_args(**options)
        return self._accelerator_options

    def create_accelerator_and_postprocess(self) -> None:
        """Replace Trainer's accelerator by ours."""
        # First Trainer's own: it reads DeepSpeed's config into accelerate's state, which all
        # accelerators of a process share.
        super().create_accelerator_and_postprocess()
        if not self.is_deepspeed_enabled:
            raise UserError(
                "ZeroTPTrainer: it trains in DeepSpeed's engine; give TrainingArguments a "
                "deepspeed=CONFIG, such as "
                '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto", …}'
            )
        fill_left_out_keys(self.accelerator.state.deepspeed_plugin.hf_ds_config, self.args)
        # Accelerate's state has it already.
        options = {**self._accelerator_options, "deepspeed_plugin": None}
        clipping = self.args.max_grad_norm
        on_engine = partial(setattr, self, "zero")
        self.accelerator = TensorParallelAccelerator(
            self.topology,
            clipping,
            on_engine,
            self._param_groups,
            self._bias_update,
            self._ema,
            **options,
        )
        # Trainer has stored the method of the accelerator that was just replaced.
        self.gather_function = self.accelerator.gather_for_metrics

    def get_tp_size(self) -> int:
        return self.topology.tensor

    def _get_dataloader(self, *arguments: Any, **options: Any) -> Any:
        loader = super()._get_dataloader(*arguments, **options)
        # Trainer seeds workers by num_workers · process_index + seed, other ones on each rank.
        # Random crops or masks would then differ within a TP group:
        #
        #     TP 2 × DP 2        rank 0  1  2  3
        #     Trainer's seeds         0  1  2  3
        #     by data rank            0  0  1  1
        if loader.worker_init_fn is not None:  # workers of a TP group draw the same
            workers = self.args.dataloader_num_workers
            rank = self.topology.data_rank
            loader.worker_init_fn = partial(seed_worker, num_workers=workers, rank=rank)
        return loader

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        # Trainer sums this over all ranks, and the ranks of a TP group report the same rows.
        return super().floating_point_ops(inputs) / self.topology.tensor

    # ---- the loss --------------------------------------------------------------------------------

    def _get_num_items_in_batch(
        self, batch_samples: Sequence[Mapping[str, Any]], device: Any
    ) -> Tensor | None:
        """Return the labelled tokens of a step on all data-parallel ranks.

        Its labelled rows are kept for `compute_loss`.
        """
        # Trainer's own would gather from all ranks and divide by TP, and knows no labelled rows.
        # Its `compute_loss` multiplies the loss by the replicas again, because DeepSpeed's mean
        # over DP divides by them.
        over_data = self.args.average_tokens_across_devices
        tokens, self._labelled_rows = count_labels(
            batch_samples,
            self.topology,
            device,
            shifted=self._loss_shifts_labels,
            over_data_parallel=over_data,
        )
        return tokens

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        # One micro-batch on an accelerator, in the order of enqueuing:
        #
        #     device    compare (all-reduce)   forward .....................
        #     host      enqueue, enqueue the forward, then wait for the comparison
        #
        # A host that waited first would leave the device idle meanwhile.
        comparison = SampleComparison(inputs, self.topology)
        if self.args.device.type == "cpu":
            comparison.require_same()
        arguments = dict(inputs)
        if self.model.training:
            arguments = pad_for_sequence_parallelism(
                inputs, self.topology, causal=self.model.spec.causal
            )
        if (
            self.model.training
            and self.model.spec.sentence_head
            and arguments.get("next_sentence_label") is None
        ):
            raise UserError(
                "next_sentence_label: the rows have none, and a model with a sentence head has no "
                "loss without it; "
                "add the column, or use the class without that head, such as BertForMaskedLM"
            )
        # Both were counted together.
        if "next_sentence_label" in arguments and num_items_in_batch is not None:
            arguments["num_rows_in_batch"] = self._labelled_rows
        if self.model.training:
            self._share_router_z_loss(num_items_in_batch)
        with self._bias_update.counting() if self.model.training else nullcontext():
            loss = super().compute_loss(
                model,
                arguments,
                return_outputs=return_outputs,
                num_items_in_batch=num_items_in_batch,
            )
        comparison.require_same()
        return loss

    def _share_router_z_loss(self, num_items_in_batch: Tensor | int | None) -> None:
        """Divide the routers' z-loss by the number of micro-batches whose losses are added up.

        With the number of a step's labels Trainer adds up the losses of micro-batches and replicas;
        without it, it takes the mean.
        """
        count = 1
        if num_items_in_batch is not None and self._z_losses.router:
            replicas = self.topology.data if self.args.average_tokens_across_devices else 1
            count = self.current_gradient_accumulation_steps * replicas
        self.model.z_losses = self._z_losses._replace(router=self._z_losses.router / count)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        # Logits of a vocabulary that is split would be gathered from all ranks and thrown away.
        if prediction_loss_only:
            inputs = {**inputs, "return_logits": False}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        # Trainer would call `deepspeed_init(inference=True)`, which accepts ZeRO-3 only and makes
        # an engine.
        if self.deepspeed is None:
            # Before any training the model is evaluated without an engine.
            self.deepspeed = self.model
        output = super().evaluation_loop(*arguments, **options)
        # 8 samples in batches of 2, TP 2 × DP 2: 2 steps. Trainer divides by 2 · 4 ranks and would
        # report 1.
        steps = math.ceil(output.num_samples / (self.args.eval_batch_size * self.topology.data))
        self._evaluation = output.metrics, steps
        return output

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        self._correct_speed(logs)
        super().log(logs, *arguments, **options)

    def predict(self, *arguments: Any, **options: Any) -> Any:
        output = super().predict(*arguments, **options)
        self._correct_speed(output.metrics)
        return output

    def _correct_speed(self, metrics: dict[str, float]) -> None:
        """Set the steps per second of an evaluation.

        Trainer divides the samples over all ranks and not over the replicas.

        Figures that a script logs under such a name stay.
        """
        evaluated, steps = self._evaluation
        # Only the dictionary of the last evaluation itself: Trainer logs the object that
        # `evaluation_loop` returned.
        for name in metrics if metrics is evaluated else ():
            prefix, suffix, _ = name.partition("_steps_per_second")
            if suffix and (seconds := metrics.get(f"{prefix}_runtime")):
                metrics[name] = round(steps / seconds, 3)

    # ---- checkpoints -----------------------------------------------------------------------------

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*arguments, **options)
        if is_new and self._param_groups:
            # Of an optimizer that DeepSpeed's config names, the accelerator makes the groups.
            optimizer.param_groups.clear()
            params = OptimizerParams(
                lr=self.args.learning_rate, weight_decay=self.args.weight_decay
            )
            for group in optimizer_groups(self.model, self._param_groups, params):
                optimizer.add_param_group(group)
        return optimizer

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        if self.zero is not None:
            raise UserError(
                "ZeroTPTrainer.train: it has trained already, and accelerate has destroyed its "
                "engine; make another "
                "trainer, and pass resume_from_checkpoint to its train"
            )
        folder = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        if folder is not None and has_only_weights(folder):
            load_weights(self.model, folder)  # before the engine, which copies them
            folder = None
        # None: Trainer would load DeepSpeed's own checkpoint, which needs the topology of the save.
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if folder is not None:
            resume_states(self._engine, self.lr_scheduler, folder, self.args.seed)
        return prepared

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights of `ema`, after training has
        begun: to evaluate or to save them. Collective over DP.

            with trainer.averaged_weights():
                trainer.evaluate(metric_key_prefix="ema")
                trainer.save_model("average")
        """
        if self.zero is None:
            raise UserError("averaged_weights: nothing has been trained yet; call train first")
        return self.zero.averaged_weights()

    @property
    def _engine(self) -> ZeroEngine:
        assert self.zero is not None, "nothing has been trained"
        return self.zero

    def _load_best_model(self) -> None:
        resume_states(
            self._engine, self.lr_scheduler, Path(self.state.best_model_checkpoint), self.args.seed
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        step = self.state.global_step
        minutes = self.args.ddp_timeout / 60
        save_states(
            self._engine,
            self.lr_scheduler,
            Path(output_dir),
            step,
            self.args.seed,
            timeout_minutes=minutes,
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the native Hugging Face model and the tokenizer. Collective over all ranks."""
        # Trainer's `_save` returns at once on ranks that do not write. Here each rank has a shard
        # to contribute. The flag means a model that transformers has split; then all ranks stay.
        loading = self.is_distributed_loading_by_transformers
        self.is_distributed_loading_by_transformers = True
        try:
            # The flag makes `_save` call the model's save_pretrained on every rank.
            self._save(output_dir)
        finally:
            self.is_distributed_loading_by_transformers = loading
        if self.args.should_save:
            self._match_tokenizer(Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _match_tokenizer(self, directory: Path) -> None:
        """Make transformers open the saved tokenizer with the same ids; see `match_tokenizer`."""
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            return
        if problem := match_tokenizer(directory, tokenizer):
            kind = self.model.config.model_type
            without = (
                f"{directory}: written without a tokenizer, because transformers opens it with "
                "other ids"
            )
            warnings.warn(
                f"{without} beside a {kind}: {problem}; save it to a directory of its own",
                stacklevel=3,
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore random states.

        A TP group takes its first rank's, because data collators draw from them.
        """
        super()._load_rng_state(checkpoint)
        if checkpoint is None or self.topology.tensor == 1:
            return
        # Trainer has one file for each rank of the save. On another topology a TP group would read
        # files of different replicas.
        states = [(random.getstate(), np.random.get_state(), torch.get_rng_state())]
        dist.broadcast_object_list(states, group_src=0, group=self.topology.tensor_group)
        python, numpy, cpu = states[0]
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


class ZeroTPTrainer(TensorParallel, Trainer):  # type: ignore[misc]
    """transformers' Trainer on TP × DP ranks with SP and ZeRO 0-3; see `TensorParallel`."""
