"""Saving a run and resuming it on the topology that saved it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from zero_tp.checkpoint import directory
from zero_tp.checkpoint.masters import describe_layouts, masters_file, save_masters
from zero_tp.config import RunConfig
from zero_tp.errors import UserError

if TYPE_CHECKING:
    from zero_tp.topology import Topology
    from zero_tp.training.engine import TrainingEngine

DEEPSPEED_TAG = "deepspeed"
# DeepSpeed adds these to every save; they do not work with tensor parallelism. convert.py to-hf does.
_RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.safetensors"


def _place(config: RunConfig) -> dict[str, Any]:
    """What has to be equal for a checkpoint to be resumed as it is."""
    parallel = config.zero_tp.parallel
    return {
        "tensor": parallel.tensor,
        "data": config.data_parallel,
        "sequence": parallel.sequence,
        "zero_stage": config.zero_stage,
        "dtype": config.dtype,
    }


def _describe(place: dict[str, Any]) -> str:
    sequence = ", SP" if place["sequence"] else ""
    return f"TP {place['tensor']} × DP {place['data']}{sequence}, ZeRO-{place['zero_stage']}, {place['dtype']}"


def _on_nvme(config: RunConfig) -> bool:
    return "offload_optimizer" in config.nvme_paths


def _fixed(config: RunConfig) -> dict[str, Any]:
    """What a run is: the keys that cannot change when it is resumed."""
    block = config.zero_tp
    return {
        "zero_tp.model": {key: block.model[key] for key in sorted(block.model)},
        "zero_tp.training.seed": block.training.seed,
        # Pairs: the order of the corpora decides which samples a step sees.
        "zero_tp.data.train": [[prefix, weight] for prefix, weight in block.data.train.items()],
        "zero_tp.data.sequence_length": block.data.sequence_length,
        "train_batch_size": config.global_batch,
        # DeepSpeed restores the saved ones, whatever the file says.
        "optimizer": config.deepspeed_config().get("optimizer"),
    }


def save(engine: TrainingEngine, config: RunConfig, run: Path, step: int, tokenizer: Path | None = None) -> Path:
    """Write the checkpoint of `step`. Collective over all ranks; returns when it is complete.

    Args:
        tokenizer: the directory that an export copies, noted in the manifest.

    Returns:
        Its directory.
    """
    first = engine.topology.rank == 0
    temporary = directory.checkpoints_of(run) / directory.TEMPORARY
    if first:
        directory.begin(run)
    dist.barrier()
    engine.engine.save_checkpoint(str(temporary), tag=DEEPSPEED_TAG, client_state={"step": step}, save_latest=False)
    save_masters(engine, temporary)
    save_file(engine.model.streams.state_dict(), temporary / _random_file(engine.topology.rank))
    dist.barrier()
    if first:
        for script in _RECOVERY_SCRIPTS:
            (temporary / script).unlink(missing_ok=True)
        manifest = {
            **_place(config),
            "model": engine.model.config.to_dict(),
            "parameters": describe_layouts(engine.model),
            "fixed": _fixed(config),
            "on_nvme": _on_nvme(config),
            "tokenizer": str(tokenizer) if tokenizer else None,
            "versions": {package: version(package) for package in ("torch", "deepspeed", "transformers")},
        }
        _verify(temporary, engine.topology)
        directory.commit(run, temporary, step, manifest)
        directory.prune(run, config.zero_tp.checkpoint.keep)
    dist.barrier()
    return directory.step_directory(run, step)


def _verify(temporary: Path, topology: Topology) -> None:
    """Every rank's own files are there; DeepSpeed's go into the manifest as they are."""
    expected = {_random_file(rank) for rank in range(topology.world)}
    expected |= {masters_file(t, d) for t in range(topology.tensor) for d in range(topology.data)}
    missing = sorted(name for name in expected if not (temporary / name).is_file())
    if missing:
        raise RuntimeError(f"{temporary}: {missing[0]} was not written; is the run directory shared by all nodes?")


def check_resumable(run: Path, config: RunConfig) -> int | None:
    """The step that the run would resume from; None to start from nothing. No communication.

    Raises:
        UserError: the newest checkpoint is damaged, or was saved on another topology or by another model.
    """
    steps = directory.complete_steps(run)
    if not steps:
        return None
    checkpoint = directory.step_directory(run, steps[-1])
    manifest = directory.read_manifest(checkpoint)
    if manifest["on_nvme"] or _on_nvme(config):
        raise UserError(
            f"{checkpoint}: a run with zero_optimization.offload_optimizer on NVMe cannot be resumed exactly, because "
            "DeepSpeed restores other optimizer states; export it with launch/convert.py to-hf, or give another "
            "--output-dir"
        )
    place = _place(config)
    saved = {key: manifest[key] for key in place}
    if saved != place:
        raise UserError(
            f"{checkpoint}: saved at {_describe(saved)}, this run is {_describe(place)}; resuming on another "
            "topology is not built yet: start it as it was saved, or give another --output-dir"
        )
    for key, value in _fixed(config).items():
        before = manifest["fixed"][key]
        if before != value:
            raise UserError(
                f"{key}: {value!r}, but the run in {run} was started with {before!r}; "
                "start it with that, or give another --output-dir"
            )
    return steps[-1]


def resume(engine: TrainingEngine, run: Path, step: int) -> None:
    """Restore weights, masters, moments, step counts, schedule, loss scale and random streams. Collective.

    Raises:
        UserError: DeepSpeed finds nothing to load, or a damaged file.
    """
    checkpoint = directory.step_directory(run, step)
    try:
        path, state = engine.engine.load_checkpoint(str(checkpoint), tag=DEEPSPEED_TAG)
    except (UnpicklingError, EOFError) as error:
        raise UserError(f"{checkpoint}: damaged ({error}); remove it to use the one before") from error
    if path is None or state["step"] != step:
        raise UserError(f"{checkpoint}: DeepSpeed cannot load it; remove it to use the one before")
    _replay_cpu_adam(engine.optimizer)
    engine.model.streams.load_state_dict(load_file(checkpoint / _random_file(engine.topology.rank)))


def _replay_cpu_adam(optimizer: Any) -> None:
    """Bring DeepSpeedCPUAdam's β^t to where an unbroken run has them.

    It multiplies them up in fp32, step by step, but a fresh one that starts at step t takes pow(β, t): another
    rounding, which 1 - β₂^t magnifies to 1e-5 of an update. Stepping one number through the same steps mends it.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adam = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(adam, DeepSpeedCPUAdam):
        return
    last = max((int(state["step"]) for state in adam.state.values() if "step" in state), default=0)
    beta1, beta2 = adam.param_groups[0]["betas"]
    value, gradient, first, second = (torch.zeros(1) for _ in range(4))
    for step in range(1, last + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, value, gradient, first, second
        )
