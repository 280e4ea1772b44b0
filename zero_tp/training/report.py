"""A run reports on the console, in metrics.jsonl and to its monitors; what cannot be told ends nothing."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from tqdm import tqdm

from zero_tp.errors import first_line, one_line
from zero_tp.training.lines import StepRecord, format_figure, format_header, format_line, format_number
from zero_tp.training.metrics import perplexity
from zero_tp.training.metrics_file import METRICS_FILE, append_whole, cut_metrics, metrics_line

LOGGED = (
    *("step", "consumed_samples", "loss", "learning_rate", "grad_norm"),
    *("tokens_per_second", "model_tflops", "mfu", "hfu", "memory_gib", "seconds"),
    *("loss_scale", "skipped_steps"),
)
"""What a line of it has of a step, by the fields of StepRecord and Speed."""


class Monitors(Protocol):
    """Monitors get all that metrics.jsonl gets (zero_tp/monitors/feed.py)."""

    def write(self, values: Mapping[str, float | int | None]) -> None:
        """Take one line of it, without waiting."""

    def notes(self) -> Iterable[str]:
        """Return what is to be said of them, a line each."""

    def close(self, *, failing: bool) -> Iterable[str]:
        """End, soon where the run is failing, and return what is to be said."""


class Loss:
    """A loss is of what a run says and cannot say: it is told once, counted, and never a reason to end.

    Args:
        say: prints one line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.lost: Counter[str] = Counter()

    @contextlib.contextmanager
    def of(self, what: str, errors: type[Exception] = OSError) -> Iterator[None]:
        """Let these errors of the block end nothing but the block.

        Args:
            what: is lost, as a name that is counted.
        """
        try:
            yield
        except errors as error:
            self.lost[what] += 1
            if self.lost[what] == 1:
                why = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
                self._say(f"{what} could not be written ({one_line(why, 300)}); the run goes on")


class Reporter:
    """A reporter prints and logs all that a run says. On ranks other than 0 every method does nothing.

    Args:
        run_dir: where metrics.jsonl is; made if missing.
        rank0: whether this is the rank that speaks.
        total_steps: the run's last step.
        interval: steps a log line.
        terminal: show a progress bar; None: if stdout and stderr are terminals.
        figures: names of what the objective tells of a step beside its loss.
        monitors: get all that metrics.jsonl gets, and are closed with the reporter.
        start_step: the step that this start resumes from, 0 for a new run. Later lines of metrics.jsonl are cut off.

    A disk that is full, or whatever else keeps a line from being written, is told once and counted at the end.
    """

    def __init__(
        self,
        run_dir: Path,
        rank0: bool,
        total_steps: int,
        interval: int,
        terminal: bool | None = None,
        start_step: int = 0,
        figures: Sequence[str] = (),
        monitors: Monitors | None = None,
    ) -> None:
        self.rank0 = rank0
        self._monitors = monitors
        self.total_steps = total_steps
        self.interval = interval
        self._bar: tqdm[NoReturn] | None = None
        self._metrics = run_dir / METRICS_FILE
        self.loss = Loss(self.say)
        self._first, self._is_cut = start_step, False
        if not rank0:
            return
        if terminal is None:
            terminal = sys.stdout.isatty() and sys.stderr.isatty()
        if terminal:
            self._bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True, leave=False)
        with self.loss.of(str(self._metrics)):
            self._cut()
        self.say(format_header(total_steps, figures))

    def due(self, step: int) -> bool:
        """Return whether `step` is logged, alike on every rank, so that what a line needs may be a collective."""
        return step % self.interval == 0 or step == self.total_steps

    def advance(self, step: int) -> None:
        """Move the bar: the steps up to `step` are done."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log(self, record: StepRecord) -> None:
        """Print the step's line and append it to metrics.jsonl."""
        self.say(format_line(record, self.total_steps))
        values = {**vars(record), **vars(record.speed)}
        self._append({name: values[name] for name in LOGGED} | dict(record.figures))

    def validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Print and append a validation "loss" [nats], with the other figures or, where there are none, its
        perplexity."""
        shown = dict(figures) if len(figures) > 1 else {**figures, "perplexity": perplexity(figures["loss"])}
        told = (f"{name.replace('_', ' ')} {format_figure(name, value)}" for name, value in shown.items())
        self.say(f"validation at step {step}: {', '.join(told)}")
        self._append({"step": step, **{f"validation_{name}": value for name, value in shown.items()}})

    def tasks(self, step: int, figures: Mapping[str, Mapping[str, float | None]]) -> None:
        """Print and append the zero-shot figures of each task by their names, `task/figure` in metrics.jsonl."""
        for task, of_task in figures.items():
            shown = ", ".join(
                f"{name} {format_number(value, 0)}" for name, value in of_task.items() if value is not None
            )
            self.say(f"{task} at step {step}: {shown}")
        flat = {f"{task}/{name}": value for task, each in figures.items() for name, value in each.items()}
        self._append({"step": step, **flat})

    def say(self, text: str) -> None:
        """Print one line, above the bar if there is one. A line that standard output cannot take is lost, which is said
        once on stderr."""
        if not self.rank0:
            return
        try:
            if self._bar is None:
                print(text, flush=True)
            else:
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()
        except BrokenPipeError:
            raise  # nobody is there to read, which ends a command
        except OSError as error:
            self.loss.lost["standard output"] += 1
            if self.loss.lost["standard output"] == 1:
                with contextlib.suppress(OSError):
                    print(f"standard output: {error.strerror}; lines are lost, the run goes on", file=sys.stderr)

    def _append(self, values: Mapping[str, float | int | None]) -> None:
        if not self.rank0:
            return
        with self.loss.of(str(self._metrics)):
            self._cut()
            append_whole(self._metrics, (metrics_line(values) + "\n").encode())
        if self._monitors is not None:
            self._monitors.write(values)
            for note in self._monitors.notes():
                self.say(note)

    def _cut(self) -> None:
        if self._is_cut:
            return
        self._metrics.parent.mkdir(parents=True, exist_ok=True)
        unreadable, aside = cut_metrics(self._metrics, self._first)
        self._is_cut = True
        if unreadable:
            where = f"; the file that has them is {aside}" if aside else ""
            lines = "lines" if unreadable > 1 else "line"
            self.say(f"{self._metrics}: left out {unreadable} unreadable {lines}{where}")

    def close(self, *, failing: bool = False) -> None:
        """Take the bar away and tell what was lost.

        Args:
            failing: an error waits to be told, so don't let it wait long.
        """
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for note in () if self._monitors is None else self._monitors.close(failing=failing):
            self.say(note)
        for what, lost in self.loss.lost.items() if self.rank0 else ():
            self.say(f"{what}: {lost} {'writes were' if lost > 1 else 'write was'} lost")
        self.loss.lost.clear()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(failing=error[0] is not None)
