"""The table of commands, which `zero-tp` and the scripts of launch/ and eval/ start.

Each command is a module of its name with `add_arguments(parser)` and `main(options)`. A command
that may run as one of several ranks has `start(parse, verbose)` instead of `main`; it ends the
process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from zero_tp.base import cli
from zero_tp.parallel.cpu.heap import restart_without_caches
from zero_tp.run.process.quiet import quiet_libraries


@dataclass(frozen=True)
class Command:
    """A command's line in `zero-tp --help` and how it starts.

    Attributes:
        ranks: a launcher may start it as one of several ranks.
        quiet: suppress the output of libraries.
        trains: on CPUs its process is started anew, with a heap for training.
    """

    summary: str
    ranks: bool = False
    quiet: bool = True
    trains: bool = False


COMMANDS = {
    "prepare": Command("turn texts into a corpus with its tokenizer", quiet=False),
    "check": Command("check a config without ranks, and describe its run"),
    "pretrain": Command(
        "train from one JSON file, as one rank or under a launcher", ranks=True, trains=True
    ),
    "plan": Command("estimate memory and time of a run, and find better settings"),
    "convert": Command("write a run's checkpoint as a Hugging Face model"),
    "inspect": Command("describe a checkpoint"),
    "evaluate": Command(
        "evaluate a model on zero-shot tasks, as one rank or under a launcher", ranks=True
    ),
    "sample": Command("continue a prompt with an exported model"),
    "report": Command("plot the metrics of runs, as a page and a picture"),
    "schema": Command("print the JSON schema of the config file, for editors"),
    "path": Command("print where the scripts for launchers, the configs and the corpus are"),
}


def command_module(name: str) -> Any:
    """Return the module of a command."""
    return importlib.import_module(f"{__name__}.{name}")


def start(
    name: str, arguments: Sequence[str] | None = None, prog: str | None = None, **options: Any
) -> NoReturn:
    """Run a command and end this process.

    Args:
        arguments: of the command line; by default those of this process.
        prog: the command's name in messages; by default the script's.
        options: arguments of the module's own `start`.
    """
    command = COMMANDS[name]
    if command.trains:
        restart_without_caches()
    arguments = sys.argv[1:] if arguments is None else arguments
    # Looked up before arguments are parsed, because the parser's module may import the libraries
    # that are to be quiet.
    verbose = "--verbose" in arguments
    if command.quiet:
        quiet_libraries(verbose)
    # Only the command's own module: `zero-tp path` must not wait for torch.
    module = command_module(name)

    def parse() -> Any:
        parser = cli.Parser(prog, description=module.__doc__)
        module.add_arguments(parser)
        return parser.parse_args(arguments)

    if command.ranks:
        module.start(parse, verbose, **options)  # ends the process
    cli.run(lambda: module.main(parse()))
