"""A run starts: its ranks meet and agree on what it goes on from, and its engine is new, resumed or another run's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch.distributed as dist

from zero_tp.checkpoint.directory import MANIFEST
from zero_tp.checkpoint.found import Found, agree, look, probed, take_whole
from zero_tp.checkpoint.manifest import UNHASHED, Parallelism, Parent, differences
from zero_tp.checkpoint.resume import check_all_there, resume
from zero_tp.checkpoint.run import run_directory, saved_start, write_config
from zero_tp.config.schema import Timeouts
from zero_tp.models.attention import back_ends, described
from zero_tp.parallel.agreement import most_machines
from zero_tp.parallel.parameter import Zeros
from zero_tp.process.connect import connect_deepspeed
from zero_tp.process.environment import RankEnvironment
from zero_tp.process.quiet import hushed
from zero_tp.training.engine import TrainingEngine
from zero_tp.training.prepared import FirstWeights, Prepared, Start
from zero_tp.training.tools import Forecast, Tools

SAVE_SLACK_SECONDS = 15.0


@contextmanager
def started(
    run: Prepared,
    environment: RankEnvironment,
    tools: Tools | None = None,
    *,
    verbose: bool,
    resume_from: Path | None = None,
    trace_nonfinite: bool = False,
) -> Iterator[Start]:
    """Connect the ranks, build the engine and restore what it goes on from; the directory is the run's in the block.
    Collective.

    Args:
        tools: what the start and the loop call beside their own work.
        resume_from: the checkpoint to start from, instead of the newest.
        trace_nonfinite: say of every step that is not finite which layer and rank was the first.

    Raises:
        UserError: nothing says where the ranks meet, a setting does not work here, or a checkpoint cannot be resumed.
    """
    tools = tools or Tools()
    environment.export()  # before anything is written
    config, directory, watch, first = run.config, run.directory, tools.watch, environment.rank == 0
    seed = config.zero_tp.training.seed
    if watch is not None:
        timeouts = config.zero_tp.training.timeouts
        heartbeat = None if timeouts.heartbeat is None else 60 * timeouts.heartbeat
        watch.begin(_limits(timeouts), environment.rank, environment.world, heartbeat)
    with run_directory(directory, watch.fail if watch is not None else lambda text: None) if first else nullcontext():
        if tools.keep is not None and first:
            tools.keep(directory)
        look_here = partial(look, directory, config, resume_from, run.check_resumed)
        found = look_here()
        topology, device = connect_deepspeed(config, environment, verbose)
        if watch is not None:
            watch.connect()
        with back_ends(device):
            found, origin = _agreed(run, tools, found, look_here, resume_from)
            drawn = found.checkpoint is None and origin.checkpoint is None
            pretrained = run.pretrained() if drawn else None
            with hushed(verbose):
                engine = TrainingEngine(
                    run.model_config,
                    topology,
                    config.deepspeed_config(),
                    seed=seed,
                    device=device,
                    source=pretrained if drawn else Zeros(),
                    model=tools.model,
                    recompute=config.zero_tp.recompute_policy,
                    spike=config.zero_tp.training.spike,
                    trace_nonfinite=trace_nonfinite,
                    compiled=config.zero_tp.compile,
                )
                if found.checkpoint is not None:
                    take = partial(resume, engine.zero, seed=seed)
                    found = take_whole(found, directory, config, take, resume_from)
                elif tools.origin is not None and origin.checkpoint is not None:
                    tools.origin.take(engine.zero, origin.checkpoint)
            machines = most_machines(topology)
            if first:
                print(*_description(run, engine, found, pretrained), sep="\n")
            forecast = _announced(run, tools, found, origin, device.type, machines) if first else None
            parent = None if found.manifest is None else found.manifest.parent
            if origin.checkpoint is not None and origin.manifest is not None:
                parent = Parent.of(origin.checkpoint, origin.manifest)
            yield Start(run, tools, engine, found.step, parent, forecast)
        if watch is not None:
            watch.leave()


def _agreed(
    run: Prepared, tools: Tools, found: Found, look_here: Callable[[], Found], resume_from: Path | None
) -> tuple[Found, Found]:
    """Return what all ranks have found: the checkpoint to resume, and that of another run to start from. Collective.

    The files of both are there, as long as they were written.
    """
    config, directory = run.config, run.directory
    with probed(directory) as probe:
        seen = {f"{directory}: the ranks do not see the same directory": probe}
        found = agree(found, directory, seen | run.read(), look_here)
    if tools.keep is not None and dist.get_rank() > 0:  # the first has made the directory
        tools.keep(directory)
    if found.checkpoint is not None:
        found = take_whole(found, directory, config, check_all_there, resume_from)
    origin = Found()
    if tools.origin is not None:
        look_there = partial(tools.origin.look, found, directory, config, run.model_config)
        origin = agree(look_there(), directory, again=look_there)
    if origin.checkpoint is not None:
        check_all_there(origin.checkpoint)
    return found, origin


def _limits(timeouts: Timeouts) -> dict[str, float | None]:
    """Return how long each phase may go without a mark [seconds]. A save ends by itself, after two of its limits."""
    return {
        "start": 60 * timeouts.start if timeouts.start is not None else None,
        "step": 60 * timeouts.step,
        "save": 2 * 60 * timeouts.save + SAVE_SLACK_SECONDS,
        "evaluation": 60 * timeouts.evaluation,
    }


def _announced(
    run: Prepared, tools: Tools, found: Found, origin: Found, device_type: str, machines: int
) -> Forecast | None:
    """Say what the run starts from and will take, and record its config, where steps are left; return the forecast."""
    forecast = None
    if tools.origin is not None and origin.manifest is not None:
        print(*tools.origin.told(origin, run.config, run.corpora, run.validation_corpora), sep="\n")
    if found.step < run.config.zero_tp.training.steps:
        write_config(run.directory, run.config.resolved())
        if tools.forecast is not None:
            forecast = tools.forecast(run.config, device_type)
            print(forecast.announcement())
    if machines > 1:
        cost = forecast.crossing() if forecast is not None else ""
        print(f"TP crosses machines, {machines} of them in a group{': ' if cost else ''}{cost}")
    return forecast


def _description(run: Prepared, engine: TrainingEngine, found: Found, pretrained: FirstWeights | None) -> Iterator[str]:
    """Yield lines on what will be trained, how, and from where."""
    config, manifest, step = run.config, found.manifest, found.step
    steps = config.zero_tp.training.steps
    yield from found.notes
    if pretrained is not None and pretrained.drawn:
        yield pretrained.told()
    yield (
        f"{run.model_config.model_type}: {engine.model.num_parameters():,} parameters, {config.dtype}, "
        f"{engine.topology.describe()}, ZeRO-{config.zero_stage}, "
        f"{config.global_batch} × {config.zero_tp.data.sequence_length} tokens a step, in {run.directory}"
    )
    spec, data = engine.model.spec, config.zero_tp.data
    sizes = (engine.topology.tensor, config.micro_batch, data.sequence_length)
    rows = {"documents": data.document_attention == "reset", "padded": not spec.causal}
    yield f"attention: {described(spec, *sizes, engine.dtype, engine.device, **rows)}"
    yield from (*engine.zero.notes, *engine.activations.notes)
    yield from (f"without effect: {line}" for line in config.without_effect())
    if config.zero_tp.compile:
        yield "compile: the first step waits for torch's compiler, about a minute where its cache has nothing yet"
    if step >= steps:
        yield f"the run is at step {step}, zero_tp.training.steps is {steps}: nothing to do; raise it to train on"
        return
    if manifest is not None:
        before, now = Parallelism.saved(manifest), Parallelism.of(config)
        yield f"resuming step {step}" + ("" if before == now else f" saved at {before} → {now}")
        if not manifest.hashed:
            yield f"its {MANIFEST} is {UNHASHED}"
        start = manifest.config or saved_start(run.directory)[0]
        yield from differences(manifest, config, start, run.validation_corpora)
    schedule = config.deepspeed_config().get("scheduler", {}).get("params", {}).get("total_num_steps")
    if schedule is not None and schedule < steps:
        yield f"the learning rate's schedule ends at step {schedule}; from there to step {steps} it holds its minimum"
