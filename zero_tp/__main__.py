"""`zero-tp COMMAND …`, or `python -m zero_tp COMMAND …`, starts one of the commands of
zero_tp/commands.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import zero_tp
from zero_tp.base import cli
from zero_tp.base.errors import UserError, did_you_mean, shown
from zero_tp.commands import COMMANDS, command_module, start

DESCRIPTION = """\
Pretrain transformers with tensor and sequence parallelism on DeepSpeed ZeRO.

The ranks of a run are started by a launcher:
  deepspeed --num_accelerators 4 $(zero-tp path pretrain) --deepspeed_config quickstart
"""


def parser(prog: str) -> cli.Parser:
    """Return the parser of all commands."""
    top = cli.Parser(prog, description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"zero-tp {zero_tp.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        module = command_module(name)
        module.add_arguments(
            commands.add_parser(name, help=command.summary, description=module.__doc__)
        )
    return top


def main() -> NoReturn:
    """Start the command that this process's arguments name."""
    prog = "python -m zero_tp" if os.path.basename(sys.argv[0]) == "__main__.py" else "zero-tp"
    name = next(iter(sys.argv[1:]), "--help")
    if name in COMMANDS:
        start(name, sys.argv[2:], f"{prog} {name}")

    def help_or_error() -> None:
        if not name.startswith("-"):
            raise UserError(
                f"{shown(name)} is no command of {prog}: {did_you_mean(name, COMMANDS)}"
            )
        parser(prog).parse_args([name])

    cli.run(help_or_error)


if __name__ == "__main__":
    main()
