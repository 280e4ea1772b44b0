"""A run reports one aligned line a step, a progress bar on a terminal, and metrics.jsonl."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NoReturn, Protocol

from tqdm import tqdm

from zero_tp.errors import first_line, one_line
from zero_tp.files import InvalidJson, parse_json, write_atomically
from zero_tp.training.metrics import Speed, perplexity

METRICS_FILE = "metrics.jsonl"
LOGGED = (
    *("step", "consumed_samples", "loss", "learning_rate", "grad_norm"),
    *("tokens_per_second", "model_tflops", "mfu", "hfu", "memory_gib", "seconds"),
    *("loss_scale", "skipped_steps"),
)
"""What a line of it has of a step, by the fields of StepRecord and Speed."""


@dataclass(frozen=True)
class StepRecord:
    """A record is a step. Its loss is the mean over the global batch, and so is what else the objective has figures of;
    its norm is of all gradients before clipping. `skipped_steps` are those of the run until now; only fp16 has a loss
    scale."""

    step: int
    consumed_samples: int
    loss: float
    learning_rate: float
    grad_norm: float
    speed: Speed
    memory_gib: float
    loss_scale: float | None = None
    skipped_steps: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)


class Monitors(Protocol):
    """Monitors get all that metrics.jsonl gets (zero_tp/monitors/feed.py)."""

    def write(self, values: Mapping[str, float | int | None]) -> None:
        """Take one line of it, without waiting."""

    def notes(self) -> Iterable[str]:
        """Return what is to be said of them, a line each."""

    def close(self, *, failing: bool) -> Iterable[str]:
        """End, soon where the run is failing, and return what is to be said."""


# --- formatting: pure functions ---------------------------------------------------------------------------------------


def format_number(value: float, width: int = 9) -> str:
    """Format a loss or norm with four decimals, in scientific form where those would say nothing; right-aligned."""
    if not math.isfinite(value):
        text = str(value)
    elif value == 0 or 1e-2 <= abs(value) < 1e3:
        text = f"{value:.4f}"
    else:
        text = f"{value:.2e}"
    return text.rjust(width)


def format_rate(value: float) -> str:
    """Format a rate in at most 6 characters: 0.0123, 4.567, 732.1, 98765, 123.4k, 1.234M."""
    if not math.isfinite(value):
        return str(value)
    for unit, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        scaled = value / factor
        if unit == "" and abs(value) < 99999.5:
            if abs(value) >= 999.95:
                return f"{value:.0f}"
            return f"{value:.4f}" if abs(value) < 1 else f"{value:.4g}"
        if unit and abs(scaled) < 999.95:
            return f"{scaled:.4g}{unit}"
    return f"{value:.0e}"


def format_duration(seconds: float | None) -> str:
    """Format the time left in at most 6 characters: 45s, 3m20s, 2h05m, 12d03h, 123d; `-` where unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 60:
        return f"{whole}s"
    if hours < 1:
        return f"{minutes}m{whole % 60:02d}s"
    if days < 1:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{days}d{hours % 24:02d}h" if days < 100 else f"{days}d"


WIDTHS = (8, 9, 9, 8, 11, 6, 6, 8, 6)


def _columns(step: str, total_steps: int, loss: str, shares: Mapping[str, str], cells: Sequence[str]) -> str:
    first = step.rjust(max(len("step"), 2 * len(str(total_steps)) + 1))
    accuracies = (cell.rjust(len(name)) for name, cell in shares.items())
    others = (cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    return "  ".join([first, loss.rjust(9), *accuracies, *others])


def accuracies_of(figures: Iterable[str]) -> dict[str, str]:
    """Return the columns of those figures that are accuracies, and their names."""
    return {name.replace("_accuracy", " right"): name for name in figures if name.endswith("_accuracy")}


def format_header(total_steps: int, figures: Sequence[str] = ()) -> str:
    """Return the names of the columns, with units. "dev" is one device: an accelerator, or a CPU rank."""
    names = ("lr", "grad norm", "tok/s/dev", "tok/s", "TFLOP/s/dev", "MFU", "HFU", "peak GiB", "ETA")
    return _columns("step", total_steps, "loss", {name: name for name in accuracies_of(figures)}, names)


def format_line(record: StepRecord, total_steps: int) -> str:
    """Format one step, aligned below `format_header`."""
    speed = record.speed
    cells = (
        f"{record.learning_rate:.2e}",
        format_number(record.grad_norm),
        format_rate(speed.tokens_per_second_per_device),
        format_rate(speed.tokens_per_second),
        format_rate(speed.model_tflops),
        _percent(speed.mfu),
        _percent(speed.hfu),
        f"{record.memory_gib:.2f}",
        format_duration(speed.eta_seconds),
    )
    shares = {column: f"{record.figures[name]:.1%}" for column, name in accuracies_of(record.figures).items()}
    return _columns(f"{record.step}/{total_steps}", total_steps, format_number(record.loss), shares, cells)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _format_figure(name: str, value: float) -> str:
    if name.endswith("accuracy"):
        return f"{value:.1%}"
    return f"{value:.2f}" if name == "perplexity" else f"{value:.4f}"


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


def metrics_line(values: Mapping[str, float | int | None]) -> str:
    """Return one strict JSON object. A non-finite value is null, and `nonfinite` says which: `{"loss": "nan"}`."""
    odd = {key: str(value) for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    clean: dict[str, object] = {key: None if key in odd else value for key, value in values.items()}
    if odd:
        clean["nonfinite"] = odd
    return json.dumps(clean, allow_nan=False)


def cut_metrics(path: Path, last_step: int) -> tuple[int, Path | None]:
    """Keep only the lines of `path` up to step `last_step`, replacing the file atomically.

    A start that resumes from step k trains k + 1, … again, and each step stands in the file once.

    Returns:
        How many lines were unreadable and left out, and where the file that had them is now: None where there is
        nothing in it but half a line at its end, which a start that was killed can leave.

    Raises:
        OSError: it can't be read, is no regular file, or the disk is full.
    """
    if not os.path.lexists(path):
        return 0, None
    if not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    kept: list[bytes] = []
    unreadable, torn, changed = 0, False, False
    with path.open("rb") as lines:
        for line in lines:
            step, whole = _step_of(line), line.endswith(b"\n")
            if step is None:
                unreadable += 1
                torn = not whole
            keep = step is not None and step <= last_step
            changed |= not (keep and whole)
            if keep:
                kept.append(line.removesuffix(b"\n") + b"\n")
    if not changed:
        return 0, None
    aside = None
    if unreadable > torn:
        aside = next(name for n in count(1) if not os.path.lexists(name := path.with_name(f"{path.name}.damaged-{n}")))
        path.rename(aside)
    write_atomically(path, b"".join(kept).decode())
    return unreadable, aside


def _step_of(line: bytes) -> int | None:
    """Return the step of a line; None where it isn't one of ours."""
    try:
        step = parse_json(line)["step"]
    except (InvalidJson, KeyError, TypeError):  # counted, and said by the caller
        return None
    return step if isinstance(step, int) else None


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


def _append_whole(path: Path, line: bytes) -> None:
    """Append a line whole or not at all, as a later one begins where it ends.

    Raises:
        OSError: the disk is full or gone, or the path is no regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(line):
                written += file.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


# --- the reporter -----------------------------------------------------------------------------------------------------


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
        told = (f"{name.replace('_', ' ')} {_format_figure(name, value)}" for name, value in shown.items())
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
            _append_whole(self._metrics, (metrics_line(values) + "\n").encode())
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
