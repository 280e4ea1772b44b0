"""`run_rank` is the life of one rank process, from its first line to its exit status, under every launcher.

- Wrong input ends every rank with status 2 and one line. Before the ranks have joined the job's store, local rank 0
  prints it, because every rank makes the same checks; later, the first rank that refuses.
- A failing rank prints its traceback, and as its last line `rank R (host): Type: message`. A rank that fails because
  another one is gone prints nothing; if that one was killed, a survivor on its machine names it.
- SIGTERM ends a rank at once, except in training, where the first one is a request (signals.py). After another rank's
  end it ends this one at once: launchers send SIGTERM after any rank's end.

Ranks leave by `os._exit`: with a thread in a collective, destructors can abort or hang. The kernel closes their
connections, which the others notice at once.
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

from zero_tp.errors import (
    BAD_INPUT,
    INTERRUPTED,
    UserError,
    as_user_error,
    error_line,
    escape_unencodable_output,
    one_line,
    write_stderr,
)
from zero_tp.process.environment import RankEnvironment
from zero_tp.process.job_store import PeerRefused
from zero_tp.process.node import NodeWatch, die_with
from zero_tp.process.signals import Requests, listen
from zero_tp.process.watch import Watchdog

FAILED, TERMINATED = 1, 143

LAUNCHER_SECONDS = 10.0  # from local rank 0's end to the launcher's SIGTERM
STORE_SECONDS = 10.0  # rank 0 may serve the store, where ranks of other machines read why the job ends
REFUSAL_SECONDS = 60.0  # to find the store and to post there, if a machine does not answer
PEER_SECONDS = 5.0  # from a broken connection to the end of the rank that broke it
EXIT_SECONDS = 20.0  # exit functions after success, such as a tracker's upload
MESSAGE_LIMIT = 600  # characters of an error in its last line; its traceback has them all

_BROKEN_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|\bgloo\b|\bnccl\b|remote process|"
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
    """Run `main` as the whole life of this process and exit with its status (None means 0).

    Call it first thing in the main thread, before torch is imported: `main` imports what it needs.

    Args:
        main: the work; raises `UserError` for wrong input.
        verbose: also print tracebacks of wrong input and of ranks that lost another one.
        requests: where SIGTERM and SIGUSR1 set flags while `main` has it accept them.
        watch: ends this rank, with status 1, when it hangs.

    Exit status: main's own; 2 wrong input; 1 an error or a lost rank; 130 Ctrl-C; 143 SIGTERM.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed's launcher numbers devices for CPU ranks too
    rank = _Rank(environment or RankEnvironment.of_this_process(), verbose, requests or Requests())
    if watch is not None:
        watch.end = rank.end
    rank.run(main)


class _Rank:
    def __init__(self, environment: RankEnvironment, verbose: bool, requests: Requests) -> None:
        self._environment, self._verbose, self._requests = environment, verbose, requests
        self._node = NodeWatch(environment, self._end_with_runner)
        self._leaving = False
        self._terminated = threading.Event()

    def run(self, main: Callable[[], int | None]) -> NoReturn:
        escape_unencodable_output()
        faulthandler.enable()  # a crash in C++ shows where
        if self._environment.parent is not None:
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
            if isinstance(exit_.code, int | None):
                return exit_.code or 0
            write_stderr(error_line(exit_.code, MESSAGE_LIMIT))
            return FAILED
        except UserError as error:
            return self._refuse(error)
        except OSError as error:
            file_error = as_user_error(error)
            return self._fail(error) if file_error is None else self._refuse(file_error)
        except BaseException as error:
            return self._fail(error)

    # --- how main ended ---------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        """Destroy the process groups and call exit functions, which `os._exit` would skip. Bounded in time."""
        self._leaving = True
        self._exit_after(EXIT_SECONDS, 0)
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            with contextlib.suppress(RuntimeError, OSError, ValueError):  # another rank left first; the work is done
                distributed.destroy_process_group()
        atexit._run_exitfuncs()

    def _refuse(self, error: UserError) -> int:
        """Print wrong input if no other rank does, and end with the others."""
        self._leaving = True
        self._exit_after(REFUSAL_SECONDS, BAD_INPUT)
        text = error_line(error, MESSAGE_LIMIT)
        if self._environment.several_nodes:  # one machine may lack a file that the others have
            text = f"{socket.gethostname()}: {text}"
        if self._verbose:
            text = f"{''.join(traceback.format_exception(error)).rstrip()}\n{text}"
        if (not isinstance(error, PeerRefused) and self._prints_refusal()) or self._verbose:
            write_stderr(text)
        if self._environment.several_nodes and self._environment.rank == 0:
            time.sleep(STORE_SECONDS)
        return BAD_INPUT

    def _prints_refusal(self) -> bool:
        """Return whether this rank prints why it refuses: the first that does, or local rank 0 where there is no store.

        Without a store all ranks make the same checks. The others wait for the SIGTERM that follows local rank 0's end.
        """
        first = self._environment.store.refuse(self._environment.name)
        if first is None and not self._environment.is_local_rank_zero:
            return not self._terminated.wait(LAUNCHER_SECONDS) and not self._node.ended()
        return first is not False

    def _fail(self, error: BaseException) -> int:
        """Report an error of this rank, but not the mere echo of another rank's end."""
        self._leaving = True
        echo = _looks_like_a_lost_peer(error)
        if not (echo and self._peer_has_ended()) or self._verbose:
            write_stderr(self._describe(error))
        if not echo and "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        return FAILED

    def _describe(self, error: BaseException) -> str:
        own = error.__traceback__
        own = own.tb_next if own is not None and own.tb_next is not None else own  # without this module's frame
        lines = "".join(traceback.format_exception(type(error), error, own)).rstrip().split("\n")
        report = "".join(f"rank {self._environment.rank}: {line}\n" for line in lines)
        return f"{report}{self._environment.name}: {type(error).__name__}: {one_line(str(error), MESSAGE_LIMIT)}"

    # --- other ranks of this machine --------------------------------------------------------------------------------

    def _peer_has_ended(self) -> bool:
        """Wait a bounded time until another rank of this machine has ended, and see that it is named if need be."""
        deadline = time.monotonic() + PEER_SECONDS
        while not self._node.ended() and not self._terminated.is_set() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._node.report_killed(unseen=True)
        return bool(self._node.ended()) or self._terminated.wait(0.2)

    def _end_with_runner(self) -> None:
        """Local rank 0 says why and ends; its launcher then ends the others, before their own limit."""
        if not self._environment.is_local_rank_zero:
            time.sleep(LAUNCHER_SECONDS)
        self.end(f"error: the deepspeed command above {self._environment.name} has ended")

    # --- signals ----------------------------------------------------------------------------------------------------

    def _act_on_signals(self, numbers: set[int]) -> None:
        if signal.SIGTERM in numbers:
            self._terminated.set()
        if self._leaving:
            return  # bounded already, and with the right status
        if signal.SIGINT in numbers:
            self._interrupt()
        if signal.SIGTERM in numbers:
            if not self._requests.accepted or self._requests.stop or self._node.ended():
                self._terminate()
            self._requests.stop = True
        if signal.SIGUSR1 in numbers and self._requests.accepted:
            self._requests.save = True

    def _interrupt(self) -> NoReturn:
        if self._environment.is_local_rank_zero:  # a terminal's Ctrl-C goes to all
            write_stderr("interrupted")
        self._exit(INTERRUPTED)

    def _terminate(self) -> NoReturn:
        if self._requests.accepted:
            self._node.report_killed(unseen=True)
        if self._node.all_running():  # else it is the launcher's, after another rank's end
            write_stderr(f"{self._environment.name}: ended by SIGTERM")
        self._exit(TERMINATED)

    # --- the way out ------------------------------------------------------------------------------------------------

    def end(self, text: str) -> None:
        """End this rank from a thread, unless it is ending; `text` is the reason, or "" where another rank has it."""
        if not self._leaving:
            self._leaving = True
            self._exit_after(LAUNCHER_SECONDS, FAILED)
            write_stderr(text)
            self._exit(FAILED)

    def _exit_after(self, seconds: float, status: int) -> None:
        timer = threading.Timer(seconds, os._exit, [status])
        timer.daemon = True
        timer.start()

    def _exit(self, status: int) -> NoReturn:
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
            sys.stdout.flush()
        os._exit(status)


def _looks_like_a_lost_peer(error: BaseException | None) -> bool:
    """Return whether `error` may be only the echo of another rank's end. A wrong yes costs a wait, no report."""
    if error is None:
        return False
    bases = {base.__name__ for base in type(error).__mro__}  # by name, because torch may not be loaded
    by_type = "DistError" in bases or isinstance(error, (ConnectionError, TimeoutError))
    by_text = isinstance(error, RuntimeError) and _BROKEN_PEER.search(str(error)) is not None
    return by_type or by_text or _looks_like_a_lost_peer(error.__cause__ or error.__context__)
