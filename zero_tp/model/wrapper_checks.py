"""Refuse wrappers of other libraries that would silently train a split model wrongly.

They are DeepSpeed's engine without our groups, DDP, FSDP and PEFT.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero_tp.base.errors import UserError
from zero_tp.parallel.topology import Topology

DEEPSPEED_MARKER = "deepspeed_marker"
"""Name of the module by which DeepSpeed's engine knows that a model has divided experts."""


class WrapperChecks(nn.Module):
    """A module that checks its topology when another library wraps it.

    DeepSpeed's engine calls `set_deepspeed_parallelism`. torch's DistributedDataParallel reads
    `_ddp_params_and_buffers_to_ignore`. FSDP sets `_is_fsdp_managed_module`, PEFT sets
    `peft_config`.
    """

    topology: Topology

    def set_deepspeed_parallelism(self, *_: Any) -> None:
        """Check the process groups of the DeepSpeed engine that is built around the model.

        `Accelerator.prepare` and `Trainer` call `deepspeed.initialize` without an mpu. The engine's
        data-parallel group is then the whole world.
        """
        from deepspeed.utils import groups  # the caller has imported it

        # Experts need more than the mpu (engine/zero/expert_groups.py).
        knows_experts = self.topology.expert == 1 or DEEPSPEED_MARKER in self._modules
        if groups.mpu is not self.topology or not knows_experts:
            self._refuse_averaging("a DeepSpeed engine that TrainingEngine has not made")

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> tuple[str, ...]:
        """Refuse torch's DistributedDataParallel around a split model; otherwise return no
        names.
        """
        self._refuse_averaging("torch's DistributedDataParallel")
        return ()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse those that FSDP and PEFT set on a split model."""
        if name == "_is_fsdp_managed_module":
            self._refuse_averaging("torch's FSDP")
        if name == "peft_config" and self._split is not None:
            raise UserError(
                f"PEFT on a model of {self._split}: an adapter would take a rank's "
                "shards for whole weights; use size 1, or transformers' own class"
            )
        super().__setattr__(name, value)

    @property
    def _split(self) -> str | None:
        """Return in words the size by which the weights are split; None: a rank has all of them."""
        topology = self.topology
        if topology.tensor > 1:
            return f"tensor parallel size {topology.tensor}"
        return f"expert parallel size {topology.expert}" if topology.expert > 1 else None

    def _refuse_averaging(self, engine: str) -> None:
        if self._split is not None:
            raise UserError(
                f"{engine}, such as Accelerator.prepare and Trainer make, does not know this "
                "model's topology: it "
                f"would average gradients of different shards ({self._split}); train with zero-tp "
                "pretrain, TrainingEngine or ZeroTPTrainer, or use size 1"
            )
