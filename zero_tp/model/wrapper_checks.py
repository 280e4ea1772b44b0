"""Refuse wrappers of other libraries that would silently train a split model wrongly.

They are DeepSpeed's engine without our groups, DDP, FSDP and PEFT.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero_tp.base.errors import UserError
from zero_tp.parallel.topology import Topology


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

        if groups.mpu is not self.topology:
            self._refuse_averaging("a DeepSpeed engine without `mpu=topology`")

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
        if name == "peft_config" and self.topology.tensor > 1:
            raise UserError(
                f"PEFT on a model of tensor parallel size {self.topology.tensor}: an adapter would "
                "take a rank's "
                "shards for whole weights; use tensor parallel size 1, or transformers' own class"
            )
        super().__setattr__(name, value)

    def _refuse_averaging(self, engine: str) -> None:
        if self.topology.tensor > 1:
            raise UserError(
                f"{engine}, such as Accelerator.prepare and Trainer make, does not know this "
                "model's topology: it "
                "would average gradients of different shards (tensor parallel size "
                f"{self.topology.tensor}); train "
                "with zero-tp pretrain, call deepspeed.initialize(mpu=topology), or use tensor "
                "parallel size 1"
            )
