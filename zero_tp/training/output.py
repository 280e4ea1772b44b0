"""A run's lines on rank 0: above the progress bar; a failed write does not end the run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from tqdm import tqdm

from zero_tp.errors import first_line, one_line, write_stderr


class RunOutput:
    """Print a run's lines and its progress bar. With `enabled` False, on other ranks, every method does nothing."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._bar: tqdm[NoReturn] = tqdm(disable=True)
        self._failures = WriteFailures("standard output", write_stderr)

    def open_bar(self, total_steps: int, step: int) -> None:
        """Show a progress bar if stdout and stderr are terminals."""
        hidden = not (self.enabled and sys.stdout.isatty() and sys.stderr.isatty())
        self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True, leave=False, disable=hidden)

    def advance(self, step: int) -> None:
        """Move the bar to `step`."""
        self._bar.update(step - self._bar.n)

    def print(self, text: str) -> None:
        """Print one line."""
        if self.enabled:
            with self._failures.tolerate():
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class WriteFailures:
    """Tolerate failed writes to one log: the first is reported, none stops training.

    Args:
        target: its name in the report.
        report: prints one line.
    """

    def __init__(self, target: str, report: Callable[[str], object]) -> None:
        self._target, self._report, self._has_failed = target, report, False

    @contextlib.contextmanager
    def tolerate(self) -> Iterator[None]:
        """Tolerate an OSError of the block."""
        try:
            yield
        except BrokenPipeError:
            raise  # nobody reads the output
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                reason = one_line(error.strerror or first_line(error), 300)
                self._report(f"{self._target} could not be written ({reason}); the run goes on")
