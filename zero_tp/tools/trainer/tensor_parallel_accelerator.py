"""An Accelerator for TP × DP ranks, and the wrapper of its DeepSpeed engine.

accelerate itself passes a topology to DeepSpeed only for Ulysses.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    map_pytorch_optim_to_deepspeed,
    recursively_apply,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.base.settings.optimizer import ELEMENTWISE, REFUSED_OPTIMIZERS
from zero_tp.base.settings.param_groups import ParamGroup
from zero_tp.base.settings.schema import Parallel
from zero_tp.engine.bias_update import BiasUpdate
from zero_tp.engine.guards import check_hooks, check_replicas
from zero_tp.engine.param_groups import optimizer_groups
from zero_tp.engine.settings.parse import check_settings
from zero_tp.engine.settings.rule import EntryPoint
from zero_tp.engine.settings.rules import check_average, notes
from zero_tp.engine.zero.ops import check_nvme
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.engine.zero.zero_stages import engine_of_stage
from zero_tp.model.architectures import ARCHITECTURES, weights_of
from zero_tp.parallel.layout import audit
from zero_tp.parallel.topology import Topology

TRAINABLE_OPTIMIZERS = {*ELEMENTWISE, "FusedAdam", "DeepSpeedCPUAdam"}
"""Classes of optimizers that were compared with the plain model: they update a shard as they
update the tensor.
"""


class SteppedEngine:
    """Replaces accelerate's wrapper of a DeepSpeed engine.

    It runs backward and, at a step's end, the update.

    Attributes:
        zero: the engine of the ZeRO stage; it computes the norm and clips.
        bias_update: moves the routers' biases after each update; None leaves them.
        engine: DeepSpeed's. accelerate's `free_memory` destroys it by this name.
    """

    def __init__(self, zero: ZeroEngine, bias_update: BiasUpdate | None = None):
        self.zero = zero
        self.bias_update = bias_update
        self.engine = zero.deepspeed_engine

    def backward(self, loss: Tensor, sync_gradients: bool = True, **options: Any) -> None:
        """Run a micro-batch's backward.

        After the last one of a step, clip the gradients and update the weights.
        """
        # Trainer decides what a step is, also where an epoch ends with fewer micro-batches;
        # DeepSpeed would count to its own accumulation.
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.zero.backward(loss, **options)
        # Between backward and update: a partial gradient that no hook has summed over TP must not
        # reach the weights.
        check_hooks(self.zero.model)
        if sync_gradients:
            self.zero.step()
            if self.bias_update is not None:
                self.bias_update.apply(self.zero)

    def get_global_grad_norm(self) -> Tensor | float:
        """Return the last step's norm before clipping.

        It is nan if the gradients were not finite and the step was skipped.
        """
        # Not DeepSpeed's, which is None at stage 0 in fp32 and a tensor or a float elsewhere.
        return self.zero.norm_and_skipped()[0]


class TensorParallelAccelerator(Accelerator):
    """An Accelerator that distributes samples over DP ranks and prepares a model with the engine
    of its ZeRO stage.
    """

    def __init__(
        self,
        topology: Topology,
        clipping: float | None,
        on_engine: Callable[[ZeroEngine], None],
        param_groups: Sequence[ParamGroup] = (),
        bias_update: BiasUpdate | None = None,
        ema: float | None = None,
        **options: Any,
    ) -> None:
        """Take Accelerator's arguments.

        Args:
            clipping: the bound on the gradient norm, unless DeepSpeed's config has one.
            on_engine: called with each engine.
            param_groups: of an optimizer that DeepSpeed's config names; by default it has one group
                of all parameters, as under plain Trainer.
            bias_update: of the model's routers; by default none.
            ema: decay of an average of the weights; by default none is kept.

        Raises:
            UserError: no ranks are connected, or ranks may get different numbers of batches.
        """
        if topology.tensor_group is None:
            raise UserError(
                "ZeroTPTrainer: no ranks are connected; start the script with deepspeed or "
                "torchrun, for one rank with "
                "torchrun --nproc_per_node 1"
            )
        super().__init__(**options)
        if topology.data > 1 and not self.even_batches:
            raise UserError(
                "TrainingArguments.accelerator_config: even_batches is false, and data parallel "
                "ranks with fewer batches would leave the others waiting; leave it out"
            )
        self.topology = topology
        self.clipping = clipping
        self.on_engine = on_engine
        self.bias_update = bias_update
        self.ema = ema
        self.param_groups = param_groups
        # By default accelerate reads an iterable data set on rank 0 only and slices each batch for
        # all ranks.
        self.dataloader_config.dispatch_batches = (
            False  # accelerate dispatches to all ranks, so every rank reads
        )
        # The mesh by which accelerate distributes samples under DeepSpeed's AutoTP.
        self.state.ds_device_mesh = DeviceMesh.from_group(
            topology.tensor_group, self.device.type, mesh_dim_names=("tp",)
        )

    def gather(self, tensor: Any) -> Any:
        """Gather tensors from the first rank of each TP group."""

        def first_of_group(gathered: Tensor) -> Tensor:
            # TP 2 × DP 2, one row a rank; a TP group has the same row twice:
            #
            #     gathered      a a b b       [4]
            #     unflattened   a a / b b     [2, 2, 1]
            #     first ranks   a / b         [2, 1], then [2]
            return gathered.unflatten(0, (self.topology.data, self.topology.tensor, -1))[
                :, 0
            ].flatten(0, 1)

        return recursively_apply(first_of_group, super().gather(tensor))

    def _prepare_deepspeed(self, *objects: Any) -> tuple[Any, ...]:
        if not any(isinstance(item, nn.Module) for item in objects):
            return tuple(super()._prepare_deepspeed(*objects))
        if len(objects) == 1:  # an evaluation before any training needs no engine
            self._models.append(objects[0].to(self.device))
            return objects
        model, optimizer, *rest = objects
        settings = finalized_settings(self.deepspeed_plugin, self.topology, self.clipping)
        check_average(settings, self.ema)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = _sharded_optimizer(optimizer, settings)
        zero = engine_of_stage(settings, self.topology)
        # Under plain Trainer a schedule of DeepSpeed's config starts where DeepSpeed starts it;
        # `pretrain` corrects its first steps.
        zero.native_schedule_start = True
        # The order counts: layouts and frozen parameters are checked before DeepSpeed partitions
        # the model, replicas after it has broadcast weights over DP.
        audit(model, self.topology)
        check_trainable(model)
        zero.initialize(model, self._trainable(model, optimizer, settings))
        if self.ema is not None:
            zero.start_average(self.ema)
        check_replicas(model, self.topology)
        if not hasattr(zero.optimizer, "overflow"):
            zero.optimizer.overflow = False  # accelerate checks once for it, before ZeRO-0 sets it
        if not hasattr(zero.optimizer, "defaults"):
            # Some schedules read the rate there.
            zero.optimizer.defaults = zero.deepspeed_engine.basic_optimizer.defaults
        # accelerate's wrapper: its `step` and `zero_grad` do nothing, because `backward` above has
        # done both.
        wrapped = DeepSpeedOptimizerWrapper(zero.optimizer)
        result = [
            zero.deepspeed_engine,
            wrapped,
            *(_scheduler(dummy, zero, wrapped) for dummy in rest),
        ]
        self.deepspeed_engine_wrapped = SteppedEngine(zero, self.bias_update)
        self._models.append(zero.deepspeed_engine)
        self._optimizers.append(wrapped)
        self.on_engine(zero)
        return tuple(result)

    def _trainable(
        self, model: Any, optimizer: Any, settings: DeepSpeedSettings
    ) -> list[Any] | torch.optim.Optimizer:
        """Return the optimizer, or the parameters of one that DeepSpeed makes."""
        if not isinstance(optimizer, DummyOptim):
            assert isinstance(optimizer, torch.optim.Optimizer)
            return optimizer
        if not self.param_groups:
            parameters: list[Any] = optimizer.params
            return parameters
        assert settings.optimizer is not None, "its block made accelerate's dummy"
        return optimizer_groups(model, self.param_groups, settings.optimizer.params)


def check_trainable(model: nn.Module) -> None:
    """Refuse a model with frozen parameters: a checkpoint has optimizer states of all.

    Routers' biases, which some of transformers' classes freeze, are no parameters here.
    """
    config: Any = getattr(model, "config", None)
    is_known = getattr(config, "model_type", None) in ARCHITECTURES
    weights = weights_of(config) if is_known else []
    buffers = {weight.native_name for weight in weights if not weight.is_parameter}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name not in buffers:
            raise UserError(
                f"ZeroTPTrainer: {name} is frozen, and every parameter is trained here; set its "
                "requires_grad to True, "
                "or use transformers' own Trainer"
            )


def finalized_settings(
    plugin: Any, topology: Topology, clipping: float | None
) -> DeepSpeedSettings:
    """Return DeepSpeed's settings with accelerate's values and the batch of data-parallel ranks
    filled in.
    """
    # It fills in what is "auto". ZeRO-3's gathering on save must be off: it would join the pieces
    # of one TP rank, and zero_tp writes whole weights by itself.
    plugin.deepspeed_config_process(
        must_match=False,
        **{
            "gradient_clipping": clipping,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        },
    )
    values: dict[str, Any] = copy.deepcopy(plugin.deepspeed_config)
    # Trainer's None clips nothing.
    values["gradient_clipping"] = values.get("gradient_clipping", clipping) or 0.0
    micro = values["train_micro_batch_size_per_gpu"]
    accumulation = values["gradient_accumulation_steps"]
    # accelerate multiplies by all ranks; those of a TP group have the same samples.
    values["train_batch_size"] = micro * accumulation * topology.data
    if values.get("steps_per_print") == float("inf"):  # accelerate's "never", which no JSON can say
        values["steps_per_print"] = sys.maxsize
    parallel = Parallel(tensor=topology.tensor, sequence=topology.sequence, expert=topology.expert)
    checked = check_settings(values, parallel, EntryPoint.TRAINER)
    settings = checked.settings
    check_nvme(settings.zero_optimization.nvme_paths)
    # Without an `optimizer` block Trainer makes the optimizer, and DeepSpeed takes torch's SGD only
    # with this key.
    unused = () if settings.optimizer is not None else ("zero_allow_untested_optimizer: ",)
    for line in notes(checked, "no effect", "note") if topology.rank == 0 else ():
        if not line.startswith(unused):
            warnings.warn(f"DeepSpeed's config: {line}", stacklevel=2)
    return settings


def _sharded_optimizer(
    optimizer: torch.optim.Optimizer, settings: DeepSpeedSettings
) -> torch.optim.Optimizer:
    """Return the optimizer that updates a rank's shards.

    For states that are offloaded it is DeepSpeed's of the same kind, as with accelerate.
    """
    name = type(optimizer).__name__
    # Bitsandbytes has an AdamW too, with states in blocks.
    library = type(optimizer).__module__.partition(".")[0]
    if name not in TRAINABLE_OPTIMIZERS or library not in ("torch", "deepspeed"):
        reason = "its update of a tensor may need the whole tensor, and a rank holds a shard"
        if library in ("torch", "deepspeed", "transformers"):
            reason = REFUSED_OPTIMIZERS.get(
                name, "no run with it was compared with the plain model"
            )
        raise UserError(
            f"optimizer {name} of {library} is refused: {reason}; use one of "
            f"{', '.join(ELEMENTWISE)}, such as "
            'optim="adamw_torch"'
        )
    offloaded = settings.zero_optimization.optimizer_device != "none"
    if not offloaded or not settings.zero_force_ds_cpu_optimizer:
        return optimizer
    # DeepSpeedCPUAdam for an Adam: it updates states in host memory on the host.
    mapped: torch.optim.Optimizer = map_pytorch_optim_to_deepspeed(optimizer)
    return mapped


def _scheduler(dummy: Any, zero: ZeroEngine, optimizer: Any) -> Any:
    """Return the scheduler that Trainer steps.

    It is that of accelerate's `dummy`, or a wrapper of DeepSpeed's own, which its engine steps.
    """
    if zero.scheduler is not None:
        return DeepSpeedSchedulerWrapper(zero.scheduler, optimizer)
    return dummy.lr_scheduler_callable(optimizer)
