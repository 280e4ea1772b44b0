"""accelerate prepares a model by our engine, and sees data-parallel ranks where it would see all of them.

accelerate hands a topology to DeepSpeed for Ulysses alone. So three of an Accelerator's own points are used: the mesh
by which it deals samples to DeepSpeed's AutoTP, what it gathers, and what it prepares a model with.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import (
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    map_pytorch_optim_to_deepspeed,
    recursively_apply,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zero_tp.config.deepspeed import refuse_auto
from zero_tp.config.optimizer import OPTIMIZERS
from zero_tp.config.resolve import look_up
from zero_tp.errors import UserError, shown
from zero_tp.parallel.layout import audit
from zero_tp.topology import Topology
from zero_tp.training.guards import check_hooks, check_replicas
from zero_tp.zero.engine import ZeroEngine
from zero_tp.zero.stages import zero_engine

ELEMENTWISE = {*OPTIMIZERS, "FusedAdam", "FusedLion", *(f"DeepSpeedCPU{name}" for name in ("Adam", "Adagrad", "Lion"))}
"""Classes of optimizers that do on a shard what they do on the whole tensor."""


NO_GROUPS = "ZeRO++ takes its groups from the world, not from the topology"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel.autotp_size": ((0, 1), "DeepSpeed's AutoTP would replace zero_tp's tensor parallelism"),
    "zero_optimization.zero_hpz_partition_size": ((1,), NO_GROUPS),
    "zero_optimization.zero_quantized_weights": ((False,), NO_GROUPS),
    "zero_optimization.zero_quantized_gradients": ((False,), NO_GROUPS),
    "zero_optimization.offload_optimizer.device": (("none", "cpu"), "a checkpoint could not hold its states"),
}
"""Keys of DeepSpeed's config that may only have these values, and why."""


class SteppedEngine:
    """This has the place of accelerate's own wrapper of a DeepSpeed engine: backward, and at a step's end its update.

    Attributes:
        zero: what the ZeRO stage decides; norm and clipping are its. engine: DeepSpeed's.
    """

    def __init__(self, zero: ZeroEngine):
        self.zero, self.engine = zero, zero.engine
        self._hooks_checked = False

    def backward(self, loss: Tensor, sync_gradients: bool = True, **options: Any) -> None:
        """Run a micro-batch's backward; after the last one of a step clip the gradients and update the weights."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.zero.backward(loss, **options)
        if not self._hooks_checked:
            check_hooks(self.zero.model.gradient_hooks)
            self._hooks_checked = True
        if sync_gradients:
            self.zero.step()

    def get_global_grad_norm(self) -> Tensor | float:
        """Return the last step's norm before clipping; nan when its gradients were not finite and it was skipped."""
        return self.zero.outcome()[0]


def see_data_parallel_ranks(accelerator: Any, topology: Topology) -> None:
    """Let an accelerator deal samples to data-parallel ranks, and gather from one rank of each TP group.

    Raises:
        UserError: no ranks are connected.
    """
    if topology.tensor_group is None:
        raise UserError(
            "ZeroTPTrainer: no ranks are connected; start the script with deepspeed or torchrun, for one rank with "
            "torchrun --nproc_per_node 1"
        )
    accelerator.state.ds_device_mesh = DeviceMesh.from_group(
        topology.tensor_group, accelerator.device.type, mesh_dim_names=("tp",)
    )
    gather = accelerator.gather

    def first_of_group(gathered: Tensor) -> Tensor:
        return gathered.unflatten(0, (topology.data, topology.tensor, -1))[:, 0].flatten(0, 1)

    vars(accelerator)["gather"] = lambda tensor: recursively_apply(first_of_group, gather(tensor))


def prepare_by_zero(accelerator: Any, topology: Topology, clipping: float, made: Callable[[ZeroEngine], None]) -> None:
    """Let an accelerator prepare a model and its optimizer by the engine of the config's ZeRO stage.

    Args:
        clipping: of gradients, where DeepSpeed's config does not say it.
        made: gets each engine.
    """
    prepare = accelerator._prepare_deepspeed

    def prepared(*objects: Any) -> tuple[Any, ...]:
        if not any(isinstance(each, nn.Module) for each in objects):
            return tuple(prepare(*objects))
        if len(objects) == 1:  # an evaluation before any training needs no engine
            accelerator._models.append(objects[0])
            return objects
        model, optimizer, *rest = objects
        settings = settled(accelerator.deepspeed_plugin, topology, clipping)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = _on_shards(optimizer, settings)
        zero = zero_engine(settings, topology)
        audit(model, topology)
        zero.initialize(model, optimizer.params if isinstance(optimizer, DummyOptim) else optimizer)
        check_replicas(model, topology)
        if not hasattr(zero.optimizer, "overflow"):
            zero.optimizer.overflow = False  # accelerate looks once whether there is one, which ZeRO-0 sets later
        wrapped = DeepSpeedOptimizerWrapper(zero.optimizer)
        result = [zero.engine, wrapped, *(_scheduler(each, zero, wrapped) for each in rest)]
        accelerator.deepspeed_engine_wrapped = SteppedEngine(zero)
        accelerator._models.append(zero.engine)
        accelerator._optimizers.append(wrapped)
        made(zero)
        return tuple(result)

    vars(accelerator)["_prepare_deepspeed"] = prepared


def settled(plugin: Any, topology: Topology, clipping: float) -> dict[str, Any]:
    """Return DeepSpeed's config with what accelerate fills in, and the batch of data-parallel ranks.

    Raises:
        UserError: what would train another model, or could not go on from its checkpoints.
    """
    plugin.deepspeed_config_process(
        must_match=False,
        **{"gradient_clipping": clipping, "zero_optimization.stage3_gather_16bit_weights_on_model_save": False},
    )
    settings: dict[str, Any] = copy.deepcopy(plugin.deepspeed_config)
    settings.setdefault("gradient_clipping", clipping)
    micro, accumulation = settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
    settings["train_batch_size"] = micro * accumulation * topology.data
    if settings.get("steps_per_print") == float("inf"):  # accelerate's "never", which no JSON can say
        settings["steps_per_print"] = sys.maxsize
    refuse_auto(settings)
    for key, (fine, why) in REFUSED.items():
        value = look_up(settings, key)
        if value is not None and value not in fine:
            raise UserError(f"{key}: {shown(value)} is refused: {why}; leave it out")
    return settings


def _on_shards(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer, or DeepSpeed's of its kind for states that are offloaded, as accelerate does.

    Raises:
        UserError: its update needs whole tensors.
    """
    name = type(optimizer).__name__
    if name not in ELEMENTWISE:
        raise UserError(
            f"optimizer {name}: a rank holds shards of tensors, on which only element-wise optimizers do what they do "
            f'on the whole; use one of {", ".join(OPTIMIZERS)}, such as optim="adamw_torch"'
        )
    offload = settings.get("zero_optimization", {}).get("offload_optimizer") or {}
    if offload.get("device", "none") == "none" or not settings.get("zero_force_ds_cpu_optimizer", True):
        return optimizer
    mapped: torch.optim.Optimizer = map_pytorch_optim_to_deepspeed(optimizer)
    return mapped


def _scheduler(given: Any, zero: ZeroEngine, optimizer: Any) -> Any:
    """Return the scheduler that Trainer steps, or the wrapper of DeepSpeed's own, which its engine steps."""
    if zero.scheduler is not None:
        return DeepSpeedSchedulerWrapper(zero.scheduler, optimizer)
    return given.lr_scheduler_callable(optimizer)
