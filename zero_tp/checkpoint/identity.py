"""This module tells what a run is, which no resuming may change, and how it is computed, which any may."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from zero_tp.checkpoint.directory import MANIFEST, Damaged
from zero_tp.checkpoint.manifest import Manifest
from zero_tp.config import RunConfig
from zero_tp.errors import UserError, shown

UNSAID = {"zero_tp.data.document_attention": "continue"}
"""What holds for a checkpoint that was saved before there was such a key."""
SPLIT = ("zero_tp.parallel", "zero_optimization.stage", "bf16.enabled", "fp16.enabled")
"""Keys of a config that `Parallelism` says."""


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
    def saved(cls, manifest: Manifest) -> Parallelism:
        return cls(*(getattr(manifest, name) for name in cls._fields))

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


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute."""
    return {package: version(package) for package in ("torch", "deepspeed", "transformers")}


def differences(
    manifest: Manifest, config: RunConfig, before: dict[str, Any] | None, validation: dict[str, dict[str, Any]]
) -> list[str]:
    """Return a line on each key of the config, library and validation corpus that was another when it was saved.

    How the run is split over ranks has a line of its own (see `Parallelism`).

    Args:
        before: the resolved config of the start that saved it; None where that is not known.
        validation: what the validation corpora are, by prefix.
    """
    saved = f"when step {manifest.step} was saved"
    other = [prefix for prefix, was in manifest.validation.items() if validation.get(prefix, was) != was]
    known = {
        **({} if before is None else before),
        **{f"{name}'s version": was for name, was in manifest.versions.items()},
    }
    now = {
        **({} if before is None else config.resolved()),
        **{f"{name}'s version": is_ for name, is_ in versions().items()},
    }
    return [
        *(f"{key}: {is_}, was {was} {saved}" for key, is_, was in _differing("", now, known)),
        *(f"zero_tp.data.validation: {prefix} holds other documents or tokens than {saved}" for prefix in other),
    ]


def _differing(path: str, now: Any, before: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value now, value before) of what differs, at the deepest key that says it."""
    if path in SPLIT:
        return
    if isinstance(now, dict) and isinstance(before, dict):
        for key in (*before, *(key for key in now if key not in before)):
            yield from _differing(f"{path}.{key}" if path else key, now.get(key), before.get(key))
    elif now != before:
        yield path, "not set" if now is None else shown(now), "not set" if before is None else shown(before)


def check_same_run(checkpoint: Path, manifest: Manifest, config: RunConfig) -> None:
    """Check that a run of this config can go on from the checkpoint.

    Raises:
        Damaged: it does not say what run saved it.
        UserError: another run saved it, or it lacks the optimizer's states.
    """
    if "offload_optimizer" in config.nvme_paths:
        raise UserError(
            "zero_optimization.offload_optimizer.device: a run cannot be resumed with its optimizer on NVMe, where "
            'DeepSpeed does not restore its states; use "cpu"'
        )
    if len(manifest.kinds) == 1 and manifest.progress.optimizer_steps is not None:
        raise UserError(
            f"{checkpoint}: saved with the optimizer on NVMe, without its states, so it cannot be resumed; export it "
            "with launch/convert.py to-hf, or give another --output-dir"
        )
    for key, value in fixed_of(config).items():
        fixed = {**UNSAID, **manifest.fixed}
        if key not in fixed:
            raise Damaged(checkpoint / MANIFEST, f"fixed.{key}: required, but not given")
        before = fixed[key]
        if before != value:
            raise UserError(
                f"{key}: {value!r}, but the run of {checkpoint} was started with {before!r}; "
                "start it with that, or give another --output-dir"
            )
