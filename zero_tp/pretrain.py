"""One rank of a training run, as launchers start it: `deepspeed --module zero_tp.pretrain …`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from zero_tp.commands import start

if TYPE_CHECKING:
    from zero_tp.run.callback import Callback


def main(callbacks: Sequence[Callback] = ()) -> NoReturn:
    """Parse this process's command line, train with your own callbacks, and exit with the run's
    status.

    Call it in the main thread of a script that a launcher starts on every rank. With
    `DS_ACCELERATOR=cpu` the script begins once more at this call, unless it has imported torch.
    """
    start("pretrain", callbacks=callbacks)


if __name__ == "__main__":
    start("pretrain", prog="python -m zero_tp.pretrain")
