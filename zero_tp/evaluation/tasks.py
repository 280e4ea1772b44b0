"""The tasks: what each is asked with, reads before the model is there, computes, and shows."""

from __future__ import annotations

import contextlib
import difflib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zero_tp.data.documents import check_files
from zero_tp.errors import UserError
from zero_tp.evaluation import sources
from zero_tp.evaluation.cloze import Passage, cloze
from zero_tp.evaluation.perplexity import perplexity
from zero_tp.evaluation.scoring import Evaluator, Report
from zero_tp.evaluation.text import TextEncoder
from zero_tp.evaluation.wikitext import OVERLAP, check_detokeniser, wikitext103

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zero_tp.evaluation.catalogue import Catalogue

NEEDS_FILE = ("perplexity",)


@dataclass(frozen=True)
class TaskOptions:
    """What tasks are asked with.

    Attributes:
        text_key: key of the text in JSON lines.
        overlap: tokens a window advances by; None: the task's own.
        limit: examples (documents) of a task; None: all.
        num_fewshot: of lm-eval's tasks; None: what the task says.
        include_path: a directory of lm-eval task files.
    """

    text_key: str = "text"
    overlap: int | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None


@dataclass(frozen=True)
class Subject:
    """A model ready for tasks.

    Attributes:
        module: what has `generate`, for tasks that generate text.
        positions: tokens of a window, and of the longest context.
        lock_step: ranks must run equally many forwards (ZeRO-3), also while they generate.
        quiet: no progress bar.
    """

    evaluator: Evaluator
    tokenizer: Any
    config: PretrainedConfig
    module: Any
    positions: int
    lock_step: bool = False
    quiet: bool = False

    @property
    def encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer)

    @contextlib.contextmanager
    def progress(self, name: str) -> Iterator[Report]:
        """A bar with the time left, on rank 0's terminal."""
        from tqdm import tqdm

        disable = True if self.quiet or self.evaluator.topology.rank else None  # None: where stderr is no terminal
        with tqdm(desc=name, unit=" tokens", unit_scale=True, disable=disable, leave=False) as bar:

            def report(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield report


class Task(Protocol):
    """One of `--tasks`, its data read and checked."""

    @property
    def name(self) -> str:
        """As it was asked for."""

    def check(self, positions: int) -> None:
        """UserError: what was asked doesn't fit a model that reads so many tokens."""

    def run(self, subject: Subject) -> dict[str, Any]:
        """The figures, for JSON. Collective; all ranks get the same. `tokens` are those scored, `tokens_computed` those
        that the model read."""


@dataclass(frozen=True)
class WindowsTask:
    """A text, or several, in overlapping windows.

    Attributes:
        figures: `perplexity` or `wikitext103`.
        overlap: tokens a window advances by; None: all.
    """

    name: str
    text: sources.Sourced[Any]
    figures: Callable[..., Mapping[str, Any]]
    overlap: int | None

    def check(self, positions: int) -> None:
        if self.overlap is not None and not 1 <= self.overlap <= positions:
            raise UserError(f"--overlap {self.overlap}: from 1 to the window's {positions:,} tokens")

    def run(self, subject: Subject) -> dict[str, Any]:
        encoder = subject.encoder
        with subject.progress(self.name) as report:
            result = self.figures(
                self.text.value,
                encoder.plain,
                subject.evaluator,
                prefix_token=encoder.prefix_token,
                sequence_length=subject.positions,
                overlap=self.overlap,
                report=report,
            )
        return {"data": self.text.origin, "overlap": self.overlap or subject.positions, **result}


@dataclass(frozen=True)
class LambadaTask:
    name: str
    passages: sources.Sourced[list[Passage]]

    def check(self, positions: int) -> None:
        """Nothing that depends on the model can be wrong yet."""

    def run(self, subject: Subject) -> dict[str, Any]:
        with subject.progress(self.name) as report:
            result = cloze(
                self.passages.value, subject.encoder, subject.evaluator, positions=subject.positions, report=report
            )
        return {"data": self.passages.origin, **result}


def _perplexity(name: str, path: Path | None, options: TaskOptions) -> Task:
    assert path is not None
    return WindowsTask(
        name,
        sources.documents(path, options.text_key, options.limit),
        lambda *given, **options: perplexity(*given, **options).as_dict(),
        options.overlap,
    )


def _wikitext103(name: str, path: Path | None, options: TaskOptions) -> Task:
    if options.limit is not None:
        raise UserError(f"--limit {options.limit}: wikitext103 is one text; leave the limit out, or the task")
    check_detokeniser()
    return WindowsTask(name, sources.wikitext_split(path, options.text_key), wikitext103, options.overlap or OVERLAP)


def _lambada(name: str, path: Path | None, options: TaskOptions) -> Task:
    return LambadaTask(name, sources.lambada_passages(path, options.text_key, options.limit))


MAKERS: dict[str, Callable[[str, Path | None, TaskOptions], Task]] = {
    "perplexity": _perplexity,
    "wikitext103": _wikitext103,
    "lambada": _lambada,
}


def parse_tasks(text: str) -> list[str]:
    """Task names from `a,b`. UserError: none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UserError(f"--tasks {text!r}: no task named; there are {', '.join(MAKERS)} and all of lm-eval's")
    return names


def parse_data(pairs: Iterable[str], tasks: Sequence[str]) -> dict[str, Path]:
    """TASK=PATH pairs as a mapping. UserError: not such a pair, a task that isn't run, or no such file."""
    data: dict[str, Path] = {}
    for pair in pairs:
        task, equals, path = pair.partition("=")
        if not equals or not path:
            raise UserError(f"--data {pair}: TASK=PATH is needed, such as lambada=data/lambada.jsonl")
        if task in data:
            raise UserError(f"--data {pair}: {task} has a file already, {data[task]}")
        data[task] = Path(path)
    check_data(data, tasks)
    return data


def check_data(data: Mapping[str, Path], tasks: Sequence[str]) -> None:
    """UserError: a file of a task that isn't run, a file that is missing, or none where a task needs one."""
    for task, path in data.items():
        if task not in tasks:
            raise UserError(f"--data {task}={path}: {task!r} is not among --tasks {','.join(tasks)}")
    for task in NEEDS_FILE:
        if task in tasks and task not in data:
            raise UserError(f"{task} needs a text: --data {task}=FILE (.txt or .jsonl, each also .gz)")
    check_files(data.values())


def make_tasks(names: Sequence[str], data: Mapping[str, Path], options: TaskOptions) -> list[Task]:
    """The tasks with their data, in order. Reads the data; the model isn't needed yet.

    A task file under `include_path` wins over a task of the same name here, and both over lm-eval's own.

    Raises:
        UserError: an unknown task (names the nearest), options that don't fit it, or data that can't be read.
    """
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit {options.limit}: at least 1")
    if options.overlap is not None and options.overlap < 1:
        raise UserError(f"--overlap {options.overlap}: at least 1")
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise UserError(f"--num-fewshot {options.num_fewshot}: at least 0")
    catalogue = _catalogue(names, options)
    own = [name for name in names if name in MAKERS and (catalogue is None or name not in catalogue.included)]
    if options.num_fewshot is not None and len(own) == len(names):
        raise UserError(f"--num-fewshot: {', '.join(names)}: for tasks of lm-eval only; leave it out")
    for name in names:
        if name not in own and (catalogue is None or not catalogue.has(name)):
            raise UserError(f"{name}: unknown task; {_near(name, catalogue)}")
    check_data({name: path for name, path in data.items() if name in own}, own)
    made: list[Task] = []
    for name in names:
        if name in own:
            made.append(MAKERS[name](name, data.get(name), options))
        else:
            assert catalogue is not None
            made.append(catalogue.task(name, data.get(name)))
    return made


def _catalogue(names: Sequence[str], options: TaskOptions) -> Catalogue | None:
    """lm-eval's tasks; None where none can be meant."""
    if options.include_path is None and all(name in MAKERS for name in names):
        return None
    from zero_tp.evaluation.catalogue import Catalogue

    return Catalogue(options)


def _near(name: str, catalogue: Catalogue | None) -> str:
    known = list(dict.fromkeys([*MAKERS, *(catalogue.names() if catalogue else ())]))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(MAKERS)} and all of lm-eval's"


def timed(task: Task, subject: Subject) -> dict[str, Any]:
    """The task's figures with `seconds`, and tokens scored and computed a second."""
    started = time.perf_counter()
    result = task.run(subject)
    seconds = time.perf_counter() - started
    return result | {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(result["tokens"] / seconds, 1),
        "tokens_computed_per_second": round(result["tokens_computed"] / seconds, 1),
    }
