"""Start a run: connect its ranks, find its checkpoint, build its engine and restore it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from zero_tp.base.errors import show
from zero_tp.base.files import wait_until_visible
from zero_tp.base.settings.schema import Timeouts
from zero_tp.engine.engine import TrainingEngine
from zero_tp.model.attention_kernel import describe_attention
from zero_tp.model.gated_delta import describe_linear_attention
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.model.weights.load import PretrainedSource
from zero_tp.parallel.agreement import on_rank_zero, require_same_on_all_ranks
from zero_tp.parallel.devices import describe_devices
from zero_tp.parallel.parameter import Zeros
from zero_tp.parallel.topology import Topology
from zero_tp.run.callback import TrainState
from zero_tp.run.checkpoint.directory import set_aside_newer
from zero_tp.run.checkpoint.find import RunCheckpoint
from zero_tp.run.checkpoint.run_directory import RunOwner, read_owner, run_directory, write_config
from zero_tp.run.checkpoint.start_point import Branch, New, Resume, find_start
from zero_tp.run.process.connect import connect_deepspeed
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.quiet import suppress_output
from zero_tp.run.process.watch import Watchdog
from zero_tp.run.run_inputs import RunInputs

SAVE_SLACK_SECONDS = 15.0


@contextmanager
def start_training(
    inputs: RunInputs,
    environment: RankEnvironment,
    watch: Watchdog,
    *,
    verbose: bool = False,
    init_from: Path | None = None,
    model: type[ParallelModel] | None = None,
    resume_from: Path | None = None,
    known: RunCheckpoint | None = None,
) -> Iterator[TrainState]:
    """Connect the ranks, build the engine and restore its checkpoint. Collective.

    The run directory belongs to this run while the block runs.

    Args:
        watch: ends this rank when it hangs.
        init_from: another run or its checkpoint, which a new run starts from.
        model: class of the model; by default that of the objective.
        resume_from: the checkpoint to resume from, instead of the newest.
        known: a checkpoint that this rank has read already (`peek_checkpoint`).

    Raises:
        UserError: MASTER_ADDR or MASTER_PORT is unset, a setting does not work here, or a
            checkpoint cannot be resumed.
    """
    # Again, for callers other than the command; before anything is written.
    environment.export()
    is_rank_zero = environment.rank == 0
    config = inputs.config
    block = config.zero_tp
    # Before ranks connect, because a rank may hang there, too.
    _start_watchdog(watch, block.training.timeouts, environment)
    with run_directory(inputs.directory) if is_rank_zero else nullcontext() as owner:
        # It makes the TP and DP groups, too (parallel/topology.py).
        topology, device = connect_deepspeed(config, environment)
        # A second client of the store. That of the start is idle from here on, so the watchdog may
        # use it alone.
        if environment.world > 1:
            watch.connect(environment.store.join())
        _check_shared_directory(inputs.directory, owner)
        fingerprints = inputs.fingerprints().items()
        require_same_on_all_ranks(
            {f"the ranks do not read the same {name}": value for name, value in fingerprints}
        )
        check_owner = owner.check if owner is not None else lambda: None
        start_point = find_start(
            inputs,
            init_from=init_from,
            resume_from=resume_from,
            known=known,
            check_owner=check_owner,
        )
        # A run that resumes draws no weights: they would be overwritten (`Zeros`).
        source = start_point.weights(inputs)
        # `deepspeed.initialize` prints instead of logging.
        with suppress_output(verbose):
            engine = _build_engine(inputs, topology, device, source, model)
            start_point.restore(engine.zero, block.training.seed)
        if is_rank_zero:
            show(*_describe_run(inputs, engine, start_point, source))
            if start_point.step < block.training.steps:
                check_owner()  # reading a checkpoint may have taken minutes
                write_config(inputs.directory, config.resolved())
                # Before logs are cut at that step.
                for line in set_aside_newer(inputs.directory, start_point.step):
                    show(line)
        # Inside the directory's block: the lock and `rank0.pid` last as long as training.
        yield TrainState(inputs, engine, start_point.step, start_point.parent, check_owner)
        watch.leave()


def _build_engine(
    inputs: RunInputs,
    topology: Topology,
    device: torch.device,
    source: PretrainedSource | Zeros | None,
    model: type[ParallelModel] | None,
) -> TrainingEngine:
    config = inputs.config
    block = config.zero_tp
    return TrainingEngine(
        inputs.model_config,
        topology,
        config.engine_settings,
        seed=block.training.seed,
        device=device,
        source=source,
        model=model,
        recompute=block.recompute_policy,
        spike=block.training.spike,
        param_groups=block.param_groups,
        qk_clip_threshold=block.training.qk_clip_threshold,
        qk_clip_alpha=block.training.qk_clip_alpha,
        router_bias_update_rate=block.training.router_bias_update_rate,
        ema=None if block.training.ema is None else block.training.ema.decay,
        z_loss=block.training.z_loss,
        router_z_loss=block.training.router_z_loss,
        compiled=block.compile,
    )


def _start_watchdog(watch: Watchdog, timeouts: Timeouts, environment: RankEnvironment) -> None:
    """Start the watchdog.

    A save fails by itself within twice its limit, so the watchdog allows it more.
    """
    limits = {
        "start": 60 * timeouts.start if timeouts.start is not None else None,
        "step": 60 * timeouts.step,
        "save": 2 * 60 * timeouts.save + SAVE_SLACK_SECONDS,
        "evaluation": 60 * timeouts.evaluation,
    }
    heartbeat = None if timeouts.heartbeat is None else 60 * timeouts.heartbeat
    watch.begin(limits, environment.rank, environment.world, heartbeat)


def _check_shared_directory(directory: Path, owner: RunOwner | None) -> None:
    """Check that all ranks see rank 0's run directory. Collective.

    Each machine may have one of that name.

    Args:
        owner: of the directory, on rank 0.
    """
    token = on_rank_zero(lambda: owner.token if owner is not None else "")

    def is_visible() -> bool:
        seen = read_owner(directory)
        return seen is not None and seen.get("token") == token

    seen = token if wait_until_visible(is_visible, directory) else "nothing"
    require_same_on_all_ranks({f"{directory}: the ranks do not see the same directory": seen})


def _describe_run(
    inputs: RunInputs,
    engine: TrainingEngine,
    start: New | Resume | Branch,
    source: PretrainedSource | Zeros | None,
) -> Iterator[str]:
    """Yield lines on what will be trained, how, and from where.

    Args:
        source: of the weights; None if they are drawn, `Zeros` if a checkpoint has them.
    """
    config = inputs.config
    step = start.step
    steps = config.zero_tp.training.steps
    yield from start.notes
    yield (
        f"{inputs.model_config.model_type}: {engine.model.num_parameters():,} parameters, "
        f"{config.dtype}, "
        f"{engine.topology.describe()}, ZeRO-{config.zero_stage}, "
        f"{config.global_batch} × {config.zero_tp.data.sequence_length} tokens a step, in "
        f"{inputs.directory}"
    )
    if isinstance(source, PretrainedSource):
        yield f"weights: loaded from {config.pretrained}"
        yield from source.notes()
    elif source is None:
        yield f"weights: drawn from the seed {config.zero_tp.training.seed}"
    yield f"devices: {describe_devices(engine.device, engine.topology.world)}"
    if engine.device.type == "cpu" and os.path.exists("/dev/nvidia0"):
        causes = (
            f"DS_ACCELERATOR is {os.environ.get('DS_ACCELERATOR', 'not set')}, torch is "
            f"{torch.__version__}"
        )
        yield (
            f"warning: this machine has /dev/nvidia0, but the run is on CPU: {causes}; look at "
            "nvidia-smi, too"
        )
    if engine.model.spec.gated_delta is not None:
        yield describe_linear_attention(engine.device)
    yield from describe_attention(
        engine.model.spec,
        engine.device,
        next(engine.model.parameters()).dtype,
        config.zero_tp.data.sequence_length,
        engine.topology.tensor,
        documents=config.zero_tp.data.document_attention == "reset",
    )
    yield from engine.activations.notes
    yield from (f"without effect: {line}" for line in config.without_effect())
    yield from (f"note: {line}" for line in (*config.cautions(), *inputs.notes))
    auto = ' ("auto")' if config.zero_tp.compile == "auto" else ""
    if engine.compiled:
        yield (
            f"compile: on{auto}; the first step waits for torch's compiler, about a minute with an "
            "empty cache"
        )
    else:
        yield f"compile: off{auto}"
    if step >= steps:
        yield (
            f"the run is at step {step}, zero_tp.training.steps is {steps}: nothing to do; raise "
            "it to train on"
        )
    else:
        yield from start.describe(inputs)
