"""`run_rank` runs a rank's process from its first line to its exit status, under every launcher.

- Wrong input ends every rank with status 2 and one line. Before the ranks have joined the job's
  store, local rank 0 prints it, because every rank makes the same checks. After that, the first
  rank to refuse prints it.
- A failing rank prints its traceback, and as its last line `rank R (host): Type: message`. A rank
  that fails because it lost a peer prints nothing. If the peer was killed, another rank of its
  machine prints that.
- SIGTERM ends a rank at once. In training the first SIGTERM is a request (signals.py), unless
  another rank has ended: launchers send SIGTERM to all ranks after any rank's end.

Ranks exit by `os._exit`, because destructors can abort or hang while a thread is in a collective.
The kernel closes their connections, so the other ranks notice at once.

Rank 1 of one machine runs out of memory and is killed in step 17:

    rank 1      SIGKILL; prints nothing
    rank 0      its all-reduce raises "connection closed by peer"; waits up to 5 s for rank 1's end,
                prints "error: rank 1 (node1) was killed by SIGKILL; out of memory?", exits with 1
    launcher    sends SIGTERM to the others: rank 2 sees that rank 1 has ended, so it does not save
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from zero_tp.base.errors import (
    BAD_INPUT,
    INTERRUPTED,
    UserError,
    as_user_error,
    error_line,
    escape_unencodable_output,
    one_line,
    write_stderr,
)
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.job_store import PeerRefused
from zero_tp.run.process.node import NodeWatch, die_with
from zero_tp.run.process.signals import Requests, listen
from zero_tp.run.process.watch import Watchdog

FAILED = 1
TERMINATED = 143

LAUNCHER_SECONDS = (
    10.0  # limit of the wait for the launcher's SIGTERM, after local rank 0 has ended
)
STORE_SECONDS = (
    10.0  # rank 0 keeps its store open that long, for refusals that other machines still read
)
REFUSAL_SECONDS = 60.0  # limit of posting a refusal, if another machine does not answer
PEER_SECONDS = 5.0  # limit of the wait for a peer's process to end, after its connection has broken
# limit of exit functions after success, such as a tracker's upload, and of the report of an error
EXIT_SECONDS = 20.0
MESSAGE_LIMIT = 600  # characters of an error in its last line; the traceback above has all

# Words of gloo, NCCL, torch's store and the kernel for a connection that the other side has ended.
# They raise RuntimeError for it, as for everything else, so only the text tells.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|\bgloo\b|\bnccl\b|remote "
    "process|"
    r"socket|timed? ?out",
    re.IGNORECASE,
)


def run_rank(
    main: Callable[[], int | None],
    verbose: bool,
    environment: RankEnvironment | None = None,
    requests: Requests | None = None,
    watch: Watchdog | None = None,
) -> NoReturn:
    """Run `main` and exit the process with its status (None means 0).

    Call it first in the main thread, before torch is imported: `main` imports what it needs.

    Args:
        main: the work; raises `UserError` for wrong input.
        verbose: also print tracebacks of wrong input and of ranks that lost a peer.
        requests: SIGTERM and SIGUSR1 set its flags while it accepts requests.
        watch: ends this rank, with status 1, when it hangs.

    Exit status: main's own; 2 wrong input; 1 an error or a lost rank; 130 Ctrl-C; 143 SIGTERM.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed's launcher sets it for CPU ranks too
    rank = _Rank(environment or RankEnvironment.of_this_process(), verbose, requests or Requests())
    if watch is not None:
        watch.on_end = rank.end
    rank.run(main)


class _Rank:
    def __init__(self, environment: RankEnvironment, verbose: bool, requests: Requests) -> None:
        self._environment = environment
        self._verbose = verbose
        self._requests = requests
        self._node = NodeWatch(environment, self._end_with_deepspeed)
        # Set by the first thread that ends the process. Later signals and the watchdog then leave
        # it alone.
        self._is_exiting = False
        self._terminated = threading.Event()

    def run(self, main: Callable[[], int | None]) -> NoReturn:
        # Before anything is printed: a file name or a path in a message may have any characters.
        escape_unencodable_output()
        faulthandler.enable()  # prints a traceback if C++ code crashes
        if self._environment.parent is not None:
            # Before `main`, which may load libraries for a minute, in which the launcher may end.
            die_with(self._environment.parent)
            self._node.start()
        listen(self._act_on_signals)
        status = self._run_main(main)
        if status == 0:
            self._clean_up()
        self._exit(status)

    def _run_main(self, main: Callable[[], int | None]) -> int:
        """Run `main`, report how it failed, and return the exit status."""
        try:
            return main() or 0
        except KeyboardInterrupt:
            self._interrupt()
        except SystemExit as exit_:
            # As Python does: `sys.exit(text)` prints the text and means status 1. argparse's errors
            # are integers.
            if isinstance(exit_.code, int | None):
                return exit_.code or 0
            write_stderr(error_line(exit_.code, MESSAGE_LIMIT))
            return FAILED
        except UserError as error:
            return self._refuse(error)
        except OSError as error:
            # A file that is missing or not readable is wrong input. Other errors of the system are
            # failures.
            file_error = as_user_error(error)
            return self._fail(error) if file_error is None else self._refuse(file_error)
        except BaseException as error:
            return self._fail(error)

    # --- how main ended ---------------------------------------------------------------------------

    def _clean_up(self) -> None:
        """Destroy the process groups and call exit functions, which `os._exit` would skip.

        Bounded in time: a tracker's upload may hang.
        """
        self._is_exiting = True
        self._exit_after(EXIT_SECONDS, 0)
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            # Another rank has exited before this one.
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                distributed.destroy_process_group()
        atexit._run_exitfuncs()

    def _refuse(self, error: UserError) -> int:
        """Print wrong input, unless another rank prints it."""
        self._is_exiting = True
        # Posting the refusal waits for the store, whose machine may not answer.
        self._exit_after(REFUSAL_SECONDS, BAD_INPUT)
        text = error_line(error, MESSAGE_LIMIT)
        if self._environment.is_multi_node:  # one machine may lack a file that the others have
            text = f"{socket.gethostname()}: {text}"
        if self._verbose:
            text = f"{''.join(traceback.format_exception(error)).rstrip()}\n{text}"
        if (not isinstance(error, PeerRefused) and self._prints_refusal()) or self._verbose:
            write_stderr(text)
        if self._environment.is_multi_node and self._environment.rank == 0:
            time.sleep(STORE_SECONDS)
        return BAD_INPUT

    def _prints_refusal(self) -> bool:
        """Return whether this rank prints its refusal.

        With a store the first rank to refuse does, else local rank 0.

        Without a store all ranks make the same checks. The other ranks then wait for the SIGTERM
        that the launcher sends after local rank 0's end.
        """
        is_first = self._environment.store.refuse(self._environment.name)
        if is_first is not None:
            return is_first
        if self._environment.is_local_rank_zero:
            return True
        # No SIGTERM in time, and nobody has ended: only this rank has found the mistake, so it
        # prints it.
        return not self._terminated.wait(LAUNCHER_SECONDS) and not self._node.exit_statuses()

    def _fail(self, error: BaseException) -> int:
        """Report an error of this rank, unless it only follows from another rank's end."""
        self._is_exiting = True
        self._exit_after(EXIT_SECONDS, FAILED)
        # An error that may follow from another rank's end is printed only if no rank has ended:
        # several tracebacks would hide the one that counts.
        lost_peer = _may_be_lost_peer(error)
        if not (lost_peer and self._peer_has_ended()) or self._verbose:
            write_stderr(self._describe(error))
        # torchrun prints the earliest of these files as the root cause. A rank that lost a peer
        # must not be it.
        if not lost_peer and "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        return FAILED

    def _describe(self, error: BaseException) -> str:
        frames = error.__traceback__
        # Skip `_run_main`.
        frames = frames.tb_next if frames is not None and frames.tb_next is not None else frames
        lines = "".join(traceback.format_exception(type(error), error, frames)).rstrip().split("\n")
        report = "".join(f"rank {self._environment.rank}: {line}\n" for line in lines)
        return (
            f"{report}{self._environment.name}: {type(error).__name__}: "
            f"{one_line(str(error), MESSAGE_LIMIT)}"
        )

    # --- other ranks of this machine --------------------------------------------------------------

    def _peer_has_ended(self) -> bool:
        """Wait up to PEER_SECONDS for another rank of this machine to end.

        It is reported if it was killed.
        """
        deadline = time.monotonic() + PEER_SECONDS
        while (
            not self._node.exit_statuses()
            and not self._terminated.is_set()
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        # Before this rank exits: then it is no longer a survivor, and nobody is left to print it.
        self._node.report_killed(include_unknown=True)
        return bool(self._node.exit_statuses()) or self._terminated.wait(0.2)

    def _end_with_deepspeed(self) -> None:
        """End this rank, because the `deepspeed` command has ended.

        Local rank 0 does so first and prints the reason; launch.py then terminates the others.
        """
        # Else all ranks of the machine would print the same reason.
        if not self._environment.is_local_rank_zero:
            time.sleep(LAUNCHER_SECONDS)
        self.end(f"error: the deepspeed command that started {self._environment.name} has ended")

    # --- signals ----------------------------------------------------------------------------------

    def _act_on_signals(self, numbers: set[int]) -> None:
        if signal.SIGTERM in numbers:
            # In any case: `_prints_refusal` and `_peer_has_ended` wait for it.
            self._terminated.set()
        if self._is_exiting:
            return  # the process exits with its status already, within the limit of a timer
        if signal.SIGINT in numbers:
            self._interrupt()
        if signal.SIGTERM in numbers:
            if not self._requests.accepted or self._requests.stop or self._node.exit_statuses():
                self._terminate()
            # The first SIGTERM in training: the loop saves at the next step and ends.
            self._requests.stop = True
        if signal.SIGUSR1 in numbers and self._requests.accepted:
            self._requests.save = True

    def _interrupt(self) -> NoReturn:
        if self._environment.is_local_rank_zero:  # a terminal sends Ctrl-C to all ranks
            write_stderr("interrupted")
        self._exit(INTERRUPTED)

    def _terminate(self) -> NoReturn:
        if self._requests.accepted:
            self._node.report_killed(include_unknown=True)
        if self._node.all_running():  # else the launcher has sent it after another rank's end
            write_stderr(f"{self._environment.name}: ended by SIGTERM")
        self._exit(TERMINATED)

    # --- exit -------------------------------------------------------------------------------------

    def end(self, text: str) -> None:
        """End this rank from a thread, unless it is exiting.

        `text` is the reason, "" if another rank prints it.
        """
        if not self._is_exiting:
            self._is_exiting = True
            self._exit_after(LAUNCHER_SECONDS, FAILED)
            write_stderr(text)
            self._exit(FAILED)

    def _exit_after(self, seconds: float, status: int) -> None:
        timer = threading.Timer(seconds, os._exit, [status])
        # A thread, because the main thread may be in C code for ever; `os._exit` ends it there.
        timer.daemon = True
        timer.start()

    def _exit(self, status: int) -> NoReturn:
        # The pipe is broken, or the stream is closed.
        with contextlib.suppress(OSError, ValueError):
            # `os._exit` flushes nothing.
            sys.stdout.flush()
        os._exit(status)


def _may_be_lost_peer(error: BaseException | None) -> bool:
    """Return whether `error` may come from another rank's end.

    A false positive delays the report by PEER_SECONDS.
    """
    if error is None:
        return False
    # By name, because torch may not be loaded.
    bases = {base.__name__ for base in type(error).__mro__}
    by_type = "DistError" in bases or isinstance(error, (ConnectionError, TimeoutError))
    by_text = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
    # The error of the connection may be the cause of a library's own exception.
    return by_type or by_text or _may_be_lost_peer(error.__cause__ or error.__context__)
