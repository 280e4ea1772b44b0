"""This module tells what a run is, which no resuming may change, and how it is computed, which any may."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from zero_tp.config import RunConfig
from zero_tp.errors import UserError

UNSAID = {"zero_tp.data.document_attention": "continue"}
"""What holds for a checkpoint that was saved before there was such a key."""


class Parallelism(NamedTuple):
    """A run is split over ranks like this, and has this dtype: what may change when it is resumed."""

    tensor: int
    data: int
    sequence: bool
    zero_stage: int
    dtype: str

    @classmethod
    def of(cls, config: RunConfig) -> Parallelism:
        parallel = config.zero_tp.parallel
        return cls(parallel.tensor, config.data_parallel, parallel.sequence, config.zero_stage, config.dtype)

    @classmethod
    def saved(cls, manifest: dict[str, Any]) -> Parallelism:
        return cls(*(manifest[name] for name in cls._fields))

    def __str__(self) -> str:
        """Write it as `TP 2 × DP 2, SP, ZeRO-2, bf16`."""
        sequence = ", SP" if self.sequence else ""
        return f"TP {self.tensor} × DP {self.data}{sequence}, ZeRO-{self.zero_stage}, {self.dtype}"


def fixed_of(config: RunConfig) -> dict[str, Any]:
    """Return what a run is: the keys that cannot change when it is resumed."""
    block = config.zero_tp
    optimizer = config.deepspeed_config()["optimizer"]
    # Which implementation steps may change, as offload may.
    parameters = {key: value for key, value in optimizer.get("params", {}).items() if key != "torch_adam"}
    return {
        "zero_tp.model": {key: block.model[key] for key in sorted(block.model)},
        "zero_tp.training.seed": block.training.seed,
        # Pairs: the order of the corpora decides which samples a step sees.
        "zero_tp.data.train": [[prefix, weight] for prefix, weight in block.data.train.items()],
        "zero_tp.data.sequence_length": block.data.sequence_length,
        "zero_tp.data.document_attention": block.data.document_attention,
        "train_batch_size": config.global_batch,
        "optimizer": {**optimizer, "params": parameters},
    }


def check_same_run(checkpoint: Path, manifest: dict[str, Any], config: RunConfig) -> None:
    """Check that a run of this config can go on from the checkpoint.

    Raises:
        UserError: another run saved it, or it lacks the optimizer's states.
    """
    if "offload_optimizer" in config.nvme_paths:
        raise UserError(
            "zero_optimization.offload_optimizer.device: a run cannot be resumed with its optimizer on NVMe, where "
            'DeepSpeed does not restore its states; use "cpu"'
        )
    if len(manifest["kinds"]) == 1 and manifest["progress"]["optimizer_steps"] is not None:
        raise UserError(
            f"{checkpoint}: saved with the optimizer on NVMe, without its states, so it cannot be resumed; export it "
            "with launch/convert.py to-hf, or give another --output-dir"
        )
    for key, value in fixed_of(config).items():
        before = {**UNSAID, **manifest["fixed"]}[key]
        if before != value:
            raise UserError(
                f"{key}: {value!r}, but the run of {checkpoint} was started with {before!r}; "
                "start it with that, or give another --output-dir"
            )
