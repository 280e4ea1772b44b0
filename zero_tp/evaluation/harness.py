"""lm-eval's tasks: which there are, and how a model of zero_tp answers their requests.

`Harness` is lm-eval's own Hugging Face adapter, from which it takes how text is cut into tokens and how generated text
is finished; what it computes, and on which rank, is ours. lm-eval sees one process everywhere: every rank builds all
requests, batches are dealt to the data-parallel ranks (scoring.py), and every rank gets all the answers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import logging
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zero_tp.errors import UserError, first_line
from zero_tp.evaluation.cloze import cut
from zero_tp.evaluation.scoring import Report, Row
from zero_tp.evaluation.sources import digest_of
from zero_tp.evaluation.tasks import Subject, TaskOptions

try:
    from lm_eval import evaluator as lm_evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import Collator, normalize_gen_kwargs
    from lm_eval.models.utils_hf import stop_sequences_criteria
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    raise UserError(
        "tasks of lm-eval need the package lm-eval, which is not installed: pip install -c constraints.txt -e .[eval]"
    ) from error

# lm-eval's own defaults.
SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
BOOTSTRAP = 1000
"""Draws of the standard errors that have no formula; lm-eval's 100,000 take minutes in one process."""

TEXT_METRICS = ("alias", "name", "sample_len", "sample_count")


@functools.cache
def _own_tasks() -> Any:
    """lm-eval's own tasks. Their index takes seconds, so it is made once, and not where a directory has all names."""
    return TaskManager()


class Catalogue:
    """lm-eval's tasks, with those of a directory before them."""

    def __init__(self, options: TaskOptions):
        """UserError: no such directory, or no task in it."""
        self.options = options
        self._included: Any = None
        if options.include_path is not None:
            if not options.include_path.is_dir():
                raise UserError(f"--include-path {options.include_path}: no such directory")
            self._included = TaskManager(include_path=str(options.include_path), include_defaults=False)
            if not self._included.all_tasks:
                raise UserError(f"--include-path {options.include_path}: no task file (.yaml) of lm-eval in it")

    @property
    def included(self) -> list[str]:
        """The tasks of the directory."""
        return list(self._included.all_tasks) if self._included else []

    def has(self, name: str) -> bool:
        return name in self.included or name in _own_tasks().all_tasks

    def names(self) -> list[str]:
        """All of them."""
        return [*self.included, *_own_tasks().all_tasks]

    def _manager(self, name: str) -> Any:
        if name not in self.included:
            return _own_tasks()
        if name in self._included.all_subtasks:
            return self._included
        return TaskManager(include_path=str(self.options.include_path))  # a group may name tasks of lm-eval's own

    def task(self, name: str, file: Path | None) -> HarnessTask:
        """The task, group or tag of that name, with its documents.

        Args:
            file: its evaluated split, instead of what its task file names.

        Raises:
            UserError: its data can't be had.
        """
        manager = self._manager(name)
        asked: Any = name if file is None else self._with_file(manager.task_index[name], file)
        try:
            with _seeded(), _hushed():
                loaded = manager.load([asked])
        except Exception as error:  # datasets, huggingface_hub, jinja and a task's own code raise anything
            raise UserError(
                f"{name}: its data can't be read ({type(error).__name__}: {first_line(error)}); without a network give "
                f"the evaluated split's file with --data {name}=FILE, or a task file that names it with --include-path"
            ) from error
        if file is not None:
            loaded = {"tasks": loaded["tasks"], "groups": {}, "group_map": {}}
        for task in loaded["tasks"].values():
            self._set_fewshot(task)
        return HarnessTask(name, loaded, self.options.limit)

    def _with_file(self, entry: Any, file: Path) -> dict[str, Any]:
        """The task as a group of one, which is lm-eval's way to read it with other keys than its file has."""
        config = entry.cfg or {}
        split = config.get("test_split") or config.get("validation_split")
        if not isinstance(config.get("task"), str) or split is None:
            raise UserError(f"--data {entry.name}={file}: {entry.name} is a group of tasks; give files to its tasks")
        if self.options.num_fewshot:
            raise UserError(
                f"--data {entry.name}={file}: it has no examples for --num-fewshot {self.options.num_fewshot}; use a "
                "task file with all splits and --include-path"
            )
        kind = file.name.removesuffix(".gz").rpartition(".")[2]
        other = {"training_split": None, "validation_split": None, "test_split": None, "fewshot_split": None}
        changed = other | {
            "task": entry.name,
            "dataset_path": {"jsonl": "json"}.get(kind, "text"),
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(file)}},
            "test_split" if config.get("test_split") else "validation_split": split,
            "num_fewshot": 0,
        }
        return {"group": f"{entry.name} of a file", "task": [changed]}

    def _set_fewshot(self, task: Any) -> None:
        """As lm-eval's `simple_evaluate`: a task that says 0 keeps it."""
        said = task.get_config("num_fewshot")
        asked = self.options.num_fewshot
        if asked is not None and said != 0:
            task.set_config(key="num_fewshot", value=asked)
        elif said is None:
            task.set_config(key="num_fewshot", value=0)


@dataclass(frozen=True)
class HarnessTask:
    """A task, group or tag of lm-eval, as its `TaskManager` loads it."""

    name: str
    loaded: Any
    limit: int | None

    def check(self, positions: int) -> None:
        """Nothing that depends on the model can be wrong yet."""

    def run(self, subject: Subject) -> dict[str, Any]:
        """The metrics as lm-eval names them, and its whole result under `lm_eval`, for its table."""
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(SEEDS["fewshot"])  # it is used up: an evaluation before this one drew from it
        with subject.progress(self.name) as report, _seeded(), _hushed(), _in_one_process():
            lm = Harness(subject, report)
            results = lm_evaluator.evaluate(
                lm,
                self.loaded,
                limit=self.limit,
                bootstrap_iters=0 if subject.quiet or subject.evaluator.topology.rank else BOOTSTRAP,
                log_samples=False,
            )
        kept = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better")
        whole = {key: _plain(results[key]) for key in kept if key in results}
        metrics = whole["results"].get(self.name) or whole.get("groups", {}).get(self.name) or {}
        samples = {task: counts["effective"] for task, counts in results["n-samples"].items()}
        return {
            "data": {name: self._origin(task) for name, task in self.loaded["tasks"].items()},
            "metrics": {key: value for key, value in metrics.items() if key not in TEXT_METRICS},
            "examples": sum(samples.values()),
            "tokens": lm.tokens,
            "tokens_computed": lm.tokens_computed,
            "truncated": lm.truncated,
            "lm_eval": whole,
        }

    def _origin(self, task: Any) -> dict[str, Any]:
        """Where a task's documents are from, and a SHA-256 of those that were used."""
        found = {"dataset": task.DATASET_PATH, "name": task.DATASET_NAME}
        files = (task.get_config("dataset_kwargs") or {}).get("data_files")
        if files:
            found["data_files"] = _plain(files)
        return found | {"sha256": digest_of(islice(task.eval_docs, self.limit))}


class Harness(HFLM):
    """An lm-eval `LM` of a `Subject`. Every rank of its grid makes one and calls it with the same requests.

    Attributes:
        tokens: scored or generated so far; tokens_computed: read by the model.
        truncated: requests whose context was longer than the model's positions.
    """

    def __init__(self, subject: Subject, report: Report):
        evaluator = subject.evaluator
        # A stand-in, because lm-eval would tie the weights of a live model again.
        model = SimpleNamespace(config=subject.config, device=torch.device(evaluator.device), name_or_path="")
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(subject.tokenizer),  # it sets a padding token
            max_length=subject.positions,
            batch_size=evaluator.batch_size,
        )
        self.subject, self.report = subject, report
        self.tokens = self.tokens_computed = self.truncated = 0

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, arg-max) of each request's continuation (its third part) after its context (the second).

        Requests of one token after the same context share a forward.
        """
        rows, places = _shared([cut(context, continuation, self.max_length) for _, context, continuation in requests])
        self._agree([(row.tokens.tolist(), row.scored, row.alternatives) for row in rows])
        found = self.subject.evaluator.score(rows, self.report)
        self.tokens += sum(len(continuation) for _, _, continuation in requests)
        self.tokens_computed += sum(map(len, rows))
        self.truncated += sum(len(context) + len(after) > self.max_length + 1 for _, context, after in requests)
        answers = [(-found[row][alternative].nll, found[row][alternative].greedy) for row, alternative in places]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Each text's log-likelihood, in windows that score every token once and don't overlap but for the last."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            (text,) = request.args
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [(None, *make_disjoint_window(window)) for window in rolling]
            counts.append(len(windows) - before)
        answers = iter(self._loglikelihood_tokens(windows))
        return [sum(next(answers)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Each request's text, up to its stop sequences. A batch has requests with the same options.

        Raises:
            UserError: the model can't generate, or its positions leave no room for the context.
        """
        if not callable(getattr(self.subject.module, "generate", None)):
            raise UserError(f"{type(self.subject.module).__name__} can't generate text, which a task asks for")
        arguments = [request.args for request in requests]
        for _, options in arguments:
            length = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            if length >= self.max_length:
                raise UserError(
                    f"a task generates {length:,} tokens, and the model's {self.max_length:,} positions leave no room "
                    "for a question; set generation_kwargs.max_gen_toks in its task file"
                )
        self._agree(arguments)
        order = Collator(
            arguments,
            sort_fn=lambda asked: (-len(self.tok_encode(asked[0])), asked[0]),
            group_by="gen_kwargs",
            group_fn=lambda asked: asked[1],
        )
        batches = list(enumerate(order.get_batched(n=self.subject.evaluator.batch_size)))
        done = 0

        def after(computed: Sequence[tuple[int, Any]]) -> None:
            nonlocal done
            done += sum(len(batch) for _, batch in computed)
            self.report(done, len(requests))

        texts = self.subject.evaluator.map(self._generated, batches, after)
        self.tokens += sum(len(self.tok_encode(text, add_special_tokens=False)) for each in texts for text in each)
        found: list[str] = order.get_original([text for each in texts for text in each])
        return found

    def _generated(self, numbered: tuple[int, Sequence[tuple[str, dict[str, Any]]]]) -> list[str]:
        number, batch = numbered
        torch.manual_seed(SEEDS["torch"] + number)  # what is drawn depends on no rank
        texts: list[str] = super().generate_until([SimpleNamespace(args=asked) for asked in batch], disable_tqdm=True)
        return texts

    @torch.no_grad()
    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        """[b, n] → [b, n + generated], by the model's own `generate`."""
        # lm-eval's rule: temperature 0 is greedy decoding.
        temperature = options.pop("temperature", 0.0)
        options.setdefault("do_sample", temperature != 0.0)
        if options["do_sample"]:
            options["temperature"] = temperature
        if self.subject.lock_step:
            options["synced_gpus"] = True
        self.tokens_computed += context.numel()
        generated: torch.Tensor = self.subject.module.generate(
            input_ids=context,
            max_new_tokens=max_length - context.shape[1],
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0]),
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            **options,
        )
        return generated

    def _agree(self, asked: Any) -> None:
        """RuntimeError: ranks have built different requests, and would compute what doesn't belong together."""
        topology = self.subject.evaluator.topology
        if topology.world == 1:
            return
        digests: list[Any] = [None] * topology.world
        dist.all_gather_object(digests, hashlib.sha256(repr(asked).encode()).hexdigest())
        if len(set(digests)) > 1:
            raise RuntimeError("ranks have built different requests for a task: is its data the same on all machines?")


def _shared(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[int, int]]]:
    """Rows with the same context and one token to score become one with alternatives.

    Returns:
        The rows, and for each given one (row, place among its scores).
    """
    shared: list[Row] = []
    places: list[tuple[int, int]] = []
    by_context: dict[bytes, int] = {}
    for row in rows:
        context = row.tokens[:-1].tobytes()
        at = by_context.get(context) if row.scored == 1 else None
        if at is None:
            if row.scored == 1:
                by_context[context] = len(shared)
            places.append((len(shared), 0))
            shared.append(row)
            continue
        first = shared[at]
        choices = (int(first.tokens[-1]), *first.alternatives)
        token = int(row.tokens[-1])
        if token not in choices:
            shared[at] = Row(first.tokens, 1, (*first.alternatives, token))
            choices += (token,)
        places.append((at, choices.index(token)))
    return shared, places


def _plain(value: Any) -> Any:
    """The value as JSON has it; a number that isn't finite is None, and what JSON has no form for its text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """lm-eval's seeds inside, and the random states as they were after: training goes on with its own."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        random.seed(SEEDS["random"])
        np.random.seed(SEEDS["numpy"])
        torch.manual_seed(SEEDS["torch"])
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Drop what lm-eval and datasets print, their bars and warnings; when the block fails, it goes to stderr.

    Not what is written to streams that were opened before: our own bars stay.
    """
    said = io.StringIO()
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except UserError:
        raise
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _in_one_process() -> Iterator[None]:
    """lm-eval's bootstrap would fork this process, connections to other ranks and all."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
