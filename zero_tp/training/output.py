"""A run's lines on rank 0: above the progress bar; a failed write does not end the run."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NoReturn

from tqdm import tqdm

from zero_tp.errors import first_line, one_line


class RunOutput:
    """Print a run's lines and its progress bar. With `enabled` False, on other ranks, every method does nothing."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._bar: tqdm[NoReturn] = tqdm(disable=True)
        self._failures = WriteFailures(_print_error)

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
            with self._failures.tolerate("standard output"):
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()

    def close(self) -> None:
        """Remove the bar and report lost lines."""
        self._bar.close()
        self._failures.report_totals()


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


class WriteFailures:
    """Counts failed log writes; the first of each target is reported, none stops training.

    Args:
        report: prints one line.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def tolerate(self, target: str) -> Iterator[None]:
        """Count an OSError of the block as a failed write to `target`."""
        try:
            yield
        except BrokenPipeError:
            raise  # nobody reads the output
        except OSError as error:
            self.counts[target] += 1
            if self.counts[target] == 1:
                reason = one_line(error.strerror or first_line(error), 300)
                self._report(f"{target} could not be written ({reason}); the run goes on")

    def report_totals(self) -> None:
        """Report how many writes to each target were lost."""
        for target, count in self.counts.items():
            self._report(f"{target}: {count} {'writes were' if count > 1 else 'write was'} lost")
