"""Pretrain a transformer language model from one JSON file.

    deepspeed --num_accelerators 4 $(zero-tp path pretrain) --deepspeed_config quickstart
    deepspeed --num_accelerators 4 --module zero_tp.pretrain --deepspeed_config quickstart

The same command resumes the run. It also runs under torchrun, or alone as one rank.
SIGTERM to a rank saves and ends the run at the next step, SIGUSR1 saves and continues: kill -USR1
$(cat RUN/rank0.pid).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zero_tp.commands.options import FILE, add_config, add_parent, add_settings
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.lifecycle import run_rank
from zero_tp.run.process.signals import Requests
from zero_tp.run.process.watch import Watchdog

if TYPE_CHECKING:
    from zero_tp.model.parallel_model import ParallelModel
    from zero_tp.run.callback import Callback
    from zero_tp.run.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(
        parser, "--deepspeed_config", f"{FILE}; docs/config.md lists its keys", required=True
    )
    add_settings(parser)  # --output-dir, --set, --allow-pickle
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--resume-from",
        type=Path,
        metavar="CHECKPOINT",
        help="resume from this checkpoint instead of the run's newest, such as "
        "RUN/checkpoints/step_00000500",
    )
    add_parent(begin)  # --from
    parser.add_argument(
        "--profile-steps",
        metavar="FIRST:LAST",
        help="profile these steps of rank 0 with torch's profiler, in RUN/profile: operators and "
        "memory",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show what the libraries print, and every traceback"
    )
    # Launchers add it.
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)


def start(
    parse: Callable[[], argparse.Namespace], verbose: bool, callbacks: Sequence[Callback] = ()
) -> NoReturn:
    """Run one rank and exit the process.

    Args:
        callbacks: called by the training loop, besides those of the config.
    """
    environment = RankEnvironment.of_this_process()
    requests = Requests()
    watch = Watchdog()
    run_rank(
        lambda: pretrain(parse(), environment, requests, watch, callbacks),
        verbose,
        environment,
        requests,
        watch,
    )


def pretrain(
    options: argparse.Namespace,
    environment: RankEnvironment,
    requests: Requests,
    watch: Watchdog,
    callbacks: Sequence[Callback],
) -> None:
    from zero_tp.run.checkpoint.find import peek_checkpoint
    from zero_tp.run.config import RunConfig
    from zero_tp.tools.monitors.trackers import check_installed

    file = options.deepspeed_config
    output = options.output_dir or Path("runs") / file.stem
    # The config of a resumed run depends on its checkpoint ("auto" lengths, commits of hub names),
    # so this rank looks for it first; `find_start` decides on all ranks. Both come before heavy
    # imports, so that a mistake in the file ends the rank early.
    checkpoint = peek_checkpoint(output, options.resume_from)
    saved = None if checkpoint is None else checkpoint.saved_start()
    config = RunConfig.load(file, options.set, environment.world, saved)
    config = config.with_pinned_tokenizer()
    check_installed(config)

    from zero_tp.run.loop import train
    from zero_tp.run.run_callbacks import run_callbacks
    from zero_tp.run.run_inputs import RunInputs
    from zero_tp.run.start import start_training

    environment.export()
    if environment.world > 1:
        # Reading the inputs may take long; the first rank to refuse them tells the others.
        environment.store.join()
    chosen = _chosen_callbacks(options, config, environment)
    inputs = RunInputs(
        config,
        output,
        allow_pickle=options.allow_pickle,
        hash_tokens=environment.is_local_rank_zero,  # it may take minutes
    )
    model: type[ParallelModel] | None = None
    if config.zero_tp.evaluation.tasks:
        from zero_tp.model.huggingface import ZeroTPForCausalLM
        from zero_tp.tools.evaluation.live_tasks import LiveTasks

        model = ZeroTPForCausalLM  # it can generate
        block = config.zero_tp
        length = block.data.sequence_length
        tasks = LiveTasks(block.evaluation, inputs.tokenizer, inputs.model_config, length)
        chosen.append(tasks)
    with start_training(
        inputs,
        environment,
        watch,
        verbose=options.verbose,
        init_from=options.parent,
        model=model,
        resume_from=options.resume_from,
        known=checkpoint,
    ) as state:
        train(state, run_callbacks(state, watch, [*chosen, *callbacks]), requests)


def _chosen_callbacks(
    options: argparse.Namespace, config: RunConfig, environment: RankEnvironment
) -> list[Callback]:
    """Return the trackers and the callbacks of the options, importing only what this rank needs."""
    from zero_tp.tools.monitors.trackers import Trackers

    chosen: list[Callback] = [Trackers()]
    if environment.rank == 0:
        from zero_tp.tools.planning.forecast import MemoryForecast

        chosen.insert(0, MemoryForecast())
    if options.profile_steps:
        from zero_tp.run.profiler import StepProfiler, step_range

        chosen.append(
            StepProfiler(*step_range(options.profile_steps, config.zero_tp.training.steps))
        )
    return chosen
