"""`run_rank` is the life of one rank process, from its first line to its exit status, whoever started it.

It keeps these promises under deepspeed, torchrun, `accelerate launch`, srun, and alone:

- Wrong input ends every rank with status 2 and one line, printed by exactly one of them.
- Any other error ends with the failing rank's own traceback as the last text that isn't the launcher's, its last line
  `rank R failed: Type: message`. Ranks that fail only because that one is gone are silent. A rank that was killed is
  named by a survivor in one line.
- Ctrl-C ends a rank promptly, also while it waits inside a collective. SIGTERM does too, except while training listens
  (see signals.py): then the first one only asks for a save and an end at the next step boundary, unless it comes
  because another rank has failed; a second one ends the rank at once. SIGUSR1 asks for a save.
- On several machines one of them speaks, and names itself (across.py).
- Ranks end when a launcher above them is gone (measured: within 1.1 s; 10 s, without a word, where C code holds the
  interpreter's lock). SIGTERM to the `deepspeed` command reaches no one else, so this is what ends them.
- The process groups are destroyed on the way out (a process that leaves them can abort with status 250), for a
  bounded time.

A launcher terminates the other ranks at the first exit, one after another with up to 30 s for each, so a rank says its
word before it leaves and is quick about it.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import NoReturn

import psutil

from zero_tp.errors import (
    BAD_INPUT,
    INTERRUPTED,
    UserError,
    error_line,
    escape_unencodable_output,
    of_a_file,
    one_line,
)
from zero_tp.process.across import MEET_SECONDS, Across
from zero_tp.process.environment import RankEnvironment, Siblings, describe_end, is_alive
from zero_tp.process.first_word import FirstWord, write_stderr
from zero_tp.process.signals import Requests, listen
from zero_tp.process.stuck import kill_if_stuck
from zero_tp.process.watch import Watch

FAILED, TERMINATED = 1, 143

POLL_SECONDS = 1.0
STUCK_SECONDS = 10.0  # of a rank whose launcher is gone: more than `POLL_SECONDS` and its way out after a failure
# How long a rank whose connection broke waits for the first word of the one that broke it. The failing rank speaks
# before it closes its connections, so this is for a loaded machine.
HOLD_BACK_SECONDS = 5.0
PROMPT_SECONDS = 2.0  # to look for the store of other machines when the end is a signal's
MESSAGE_LIMIT = 600  # characters of an error in its last line; its traceback has them all
LEAVE_SECONDS = {True: 20.0, False: 5.0}  # after success: exit functions (a logger's upload) may take a while

_BROKEN_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|\bgloo\b|\bnccl\b|remote process|"
    r"socket|timed? ?out",
    re.IGNORECASE,
)


def run_rank(
    main: Callable[[], int | None], verbose: bool, requests: Requests | None = None, watch: Watch | None = None
) -> NoReturn:
    """Run `main` as the whole life of this process and exit with its status (None means 0).

    Call it first thing in the main thread, before torch is imported: `main` imports what it needs.

    Args:
        main: the work; raises `UserError` for what a person can mend.
        verbose: also print tracebacks of wrong input and of the ranks that failed second.
        requests: where SIGTERM and SIGUSR1 raise flags while `main` has it accept them.
        watch: what ends this rank, with status 1, when it hangs.

    Exit status: main's own; 2 wrong input; 1 an error, a lost peer or a lost launcher; 130 Ctrl-C; 143 SIGTERM.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed's launcher numbers devices for CPU ranks too
    rank = _Rank(RankEnvironment.of_this_process(), verbose, requests or Requests())
    if watch is not None:
        watch.end = rank.end_hung
    rank.run(main)


class _Rank:
    def __init__(self, environment: RankEnvironment, verbose: bool, requests: Requests) -> None:
        self.environment = environment
        self.requests = requests
        self.verbose = verbose
        self.first_word = FirstWord(environment.job, time.time())
        self.across = Across(environment)
        self.siblings = Siblings(environment)
        self.leaving = False

    def run(self, main: Callable[[], int | None]) -> NoReturn:
        escape_unencodable_output()
        faulthandler.enable()  # a crash in C++ shows where
        launchers = self.environment.launchers()
        if launchers:
            _kill_after(launchers)
            watch = threading.Thread(target=self._watch, args=(launchers,), name="launcher watch", daemon=True)
            watch.start()
        listen(self._act_on_signals)
        self.across.listen(self._end_heard, self._end_lost)
        try:
            status = main() or 0
        except KeyboardInterrupt:
            self._end_interrupted()
        except SystemExit as exit_:
            status = self._exited(exit_)
        except UserError as error:
            status = self._refused(error)
        except OSError as error:
            told = of_a_file(error)
            status = self._failed(error) if told is None else self._refused(told)
        except BaseException as error:
            status = self._failed(error)
        self._leave(status)

    # --- how main ended ---------------------------------------------------------------------------------------------

    def _say(self, text: str, status: int, seconds: float = MEET_SECONDS) -> bool:
        """Say why the job ends unless a rank of any machine has; return whether it was us."""
        if self.first_word.said():
            return False
        ours = self.across.claim(status, seconds)
        return self.first_word.say(text if ours else "") and ours

    def _exited(self, exit_: SystemExit) -> int:
        if exit_.code is None or exit_.code == 0:
            return 0
        if isinstance(exit_.code, int):
            self._say("", exit_.code)  # who exits with a status has said why
            return exit_.code
        self._say(self.across.named(error_line(exit_.code, MESSAGE_LIMIT)), FAILED)
        return FAILED

    def _refused(self, error: UserError) -> int:
        text = self.across.named(error_line(error, MESSAGE_LIMIT))
        if self.verbose:
            text = f"{''.join(traceback.format_exception(error)).rstrip()}\n{text}"
        self._say(text, BAD_INPUT)
        self.across.linger(MEET_SECONDS)  # others may be late: nobody is connected
        return BAD_INPUT

    def _failed(self, error: BaseException) -> int:
        rank = self.environment.rank
        lines = traceback.format_exception(type(error), error, _own_part(error))
        report = "".join(f"rank {rank}: {line}\n" for line in "".join(lines).rstrip().split("\n"))
        what = f"{type(error).__name__}: {one_line(str(error), MESSAGE_LIMIT)}"
        report += f"rank {rank}{self.across.place} failed: {what}"
        gone = ""
        if _looks_like_a_lost_peer(error):
            deadline = time.monotonic() + HOLD_BACK_SECONDS
            while not self.first_word.said() and time.monotonic() < deadline:
                if self._name_lost_peer():
                    break
                time.sleep(0.05)
            if not self.first_word.said():
                gone = self.across.lost_store()
        said = self._say(gone or report, FAILED)
        if self.verbose and (gone or not said):
            write_stderr(report)
        return FAILED

    def _name_lost_peer(self) -> bool:
        """Say that ranks of this node ended without a word, unless someone has; return whether there are any."""
        gone = self.siblings.gone()
        if not gone:
            return False
        ended = ", ".join(describe_end(rank, status) for rank, status in gone.items())
        self._say(self.across.named(f"error: {ended}"), FAILED, PROMPT_SECONDS)
        return True

    # --- signals ----------------------------------------------------------------------------------------------------

    def _act_on_signals(self, numbers: set[int]) -> None:
        if self.leaving:
            return  # bounded already, and with the right status
        if signal.SIGINT in numbers:
            self._end_interrupted()
        if signal.SIGTERM in numbers and not self._stops_at_the_next_step():
            self._end_terminated()
        if signal.SIGUSR1 in numbers and self.requests.accepted:
            self.requests.save = True

    def _stops_at_the_next_step(self) -> bool:
        """Take SIGTERM as a request, if it is the first, and not the launcher's after another rank's end."""
        if not self.requests.accepted or self.requests.stop or self.first_word.said() or self.siblings.gone():
            return False
        self.requests.stop = True
        return True

    def _end_interrupted(self) -> NoReturn:
        self._arm(INTERRUPTED, LEAVE_SECONDS[False])
        self._say("interrupted", INTERRUPTED, PROMPT_SECONDS)
        self._exit_now(INTERRUPTED)

    def _end_terminated(self) -> NoReturn:
        """End after SIGTERM, which is the launcher's after another rank's end (be silent, or name it), or is for us."""
        self._arm(TERMINATED, LEAVE_SECONDS[False])
        if not self.first_word.said() and not self._name_lost_peer():
            ended = f"rank {self.environment.rank}{self.across.place}: ended by SIGTERM"
            self._say(self.across.lost_store() or ended, TERMINATED, PROMPT_SECONDS)  # torchrun's, after it
        self._exit_now(TERMINATED)

    def end_hung(self, text: str) -> NoReturn:
        """End because nothing goes on any more; `text` says who waits for whom."""
        self._arm(FAILED, LEAVE_SECONDS[False])
        self.leaving = True
        self._say(text, FAILED, PROMPT_SECONDS)
        self._exit_now(FAILED)

    # --- the other machines -----------------------------------------------------------------------------------------

    def _end_heard(self, status: int) -> None:
        """End because the job does: another machine has said why."""
        if not self.leaving:
            self._arm(status, LEAVE_SECONDS[False])
            self.first_word.say("")
            self._exit_now(status)

    def _end_lost(self, text: str) -> None:
        if not self.leaving:
            self.end_hung(text)

    # --- the launchers above ----------------------------------------------------------------------------------------

    def _watch(self, launchers: dict[psutil.Process, str]) -> None:
        while True:
            for launcher, name in launchers.items():
                if not is_alive(launcher) and not self.leaving:
                    self._arm(FAILED, LEAVE_SECONDS[False])
                    gone = f"error: the launcher above rank {self.environment.rank} ({name}) is gone"
                    self._say(self.across.named(gone), FAILED, PROMPT_SECONDS)
                    self._exit_now(FAILED)
            if not self.siblings.complete:
                self.siblings.observe()
            if self.requests.stop and not self.leaving and self.siblings.gone():
                self._end_terminated()  # no step boundary will come
            time.sleep(POLL_SECONDS)

    # --- the way out ------------------------------------------------------------------------------------------------

    def _leave(self, status: int) -> NoReturn:
        """Take the main thread's way out."""
        self.leaving = True
        self._arm(status, LEAVE_SECONDS[status == 0])
        self._linger()
        try:
            _destroy_process_groups()
        except (RuntimeError, OSError, ValueError):  # what torch raises for a connection or a group that is broken
            # The work is done or its error is told: what a broken connection says while it is torn down is noise.
            if self.verbose:
                write_stderr(traceback.format_exc())
        if status == 0:
            atexit._run_exitfuncs()  # loggers and worker pools end here; `os._exit` below would skip them
        self._exit_now(status)

    def _arm(self, status: int, seconds: float) -> None:
        """See to it that this process is gone after `seconds`, whatever happens on the way out."""

        def end() -> None:
            time.sleep(seconds)
            os._exit(status)

        threading.Thread(target=end, name="last exit", daemon=True).start()

    def _linger(self) -> None:
        """Let the other machines hear why the job ends, also where another rank of this one has told them."""
        self.across.ended = self.across.ended or self.first_word.said()
        self.across.linger()

    def _exit_now(self, status: int) -> NoReturn:
        """Leave without the interpreter's and C++'s destructors: with a thread in a collective they can abort or hang.

        The kernel closes the connections, so peers notice at once.
        """
        self._linger()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # the reader is gone, or the stream is closed
                continue
        os._exit(status)


def _kill_after(launchers: Iterable[psutil.Process]) -> None:
    """Have this process killed if it is still there 10 s after a launcher's end: the watching thread needs the
    interpreter's lock."""
    try:
        above = [os.pidfd_open(launcher.pid) for launcher in launchers]
        kill_if_stuck(lambda launcher: True, above, STUCK_SECONDS)
    except (AttributeError, OSError):  # no such call here, or the launcher is gone: the thread will see that
        return
    for descriptor in above:
        os.close(descriptor)


def _destroy_process_groups() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _looks_like_a_lost_peer(error: BaseException) -> bool:
    """Tell whether `error` may be only the echo of another rank's end. A wrong yes costs a wait, no text."""
    for each in _chain(error):
        if any(base.__name__.startswith("Dist") and base.__module__.startswith("torch") for base in type(each).__mro__):
            return True
        if isinstance(each, (ConnectionError, TimeoutError)):
            return True
        if isinstance(each, RuntimeError) and _BROKEN_PEER.search(str(each)):
            return True
    return False


def _own_part(error: BaseException) -> TracebackType | None:
    """Return the traceback from `main` on, without this module's frame."""
    own = error.__traceback__
    return own.tb_next if own is not None and own.tb_next is not None else own
