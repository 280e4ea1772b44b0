"""This module is the bridge to lm-eval: its tasks as tasks here, and a model of ours that answers its requests.

`Harness` is lm-eval's own Hugging Face adapter, from which it takes how text is cut into tokens and how generated text
is finished; what it computes, and on which rank, is ours. lm-eval sees one process everywhere: every rank builds all
requests, batches are dealt to the data-parallel ranks (subject.py), and every rank gets all the answers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from zero_tp.errors import UserError, first_line, shown
from zero_tp.evaluation.subject import Report, Row, Subject, continuation_rows
from zero_tp.evaluation.task import Origin, Task, TaskOptions, digest_of
from zero_tp.parallel.agreement import from_all
from zero_tp.process.quiet import hushed
from zero_tp.weights.files import is_regular

try:
    import lm_eval.api.task
    import lm_eval.utils
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import evaluator
    from lm_eval.api.registry import metric_registry
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import Collator, normalize_gen_kwargs
    from lm_eval.models.utils_hf import stop_sequences_criteria
    from lm_eval.tasks import TaskManager, _yaml_loader
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    raise UserError(
        "tasks of lm-eval need the package lm-eval, which is not installed: pip install -c constraints.txt -e .[eval]"
    ) from error

SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
"""lm-eval's own defaults."""

BOOTSTRAP = 1000
"""Draws of the standard errors that have no formula; lm-eval's 100,000 take minutes in one process."""

OWN = Path(lm_eval.__file__).resolve().parent
_IF_TRUSTED = "--allow-task-code (in Python allow_task_code=True) allows it, if you trust the source"

NOT_METRICS = ("alias", "name", "sample_len", "sample_count")
IN_REPORT = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better")


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Run lm-eval's code with its seeds, without its output and in this process; training goes on with its own states.

    What it and datasets print goes to stderr where the block fails. Streams that were opened before are not touched:
    our own bars stay.
    """
    logger, multiprocessing = logging.getLogger("lm_eval"), os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork this process, connections to other ranks and all
    level, states = logger.level, (random.getstate(), np.random.get_state())
    logger.setLevel(logging.ERROR)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), hushed(stderr=True):
            random.seed(SEEDS["random"])
            np.random.seed(SEEDS["numpy"])
            torch.manual_seed(SEEDS["torch"])
            yield
    finally:
        if multiprocessing is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = multiprocessing
        logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def only_data(asked: bool = True) -> Iterator[None]:
    """Run lm-eval with a directory's task files as data, if `asked`: what of them would run Python is refused by name.

    That is `!function`, metrics that the package evaluate would load, and templates that reach for Python's own.
    """
    if not asked:
        yield
        return
    import_function, get_metric = _yaml_loader._import_func_in_yml, lm_eval.api.task.get_metric
    sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters |= lm_eval.utils.env.filters

    def own_function(name: str, directory: Path) -> Any:
        if OWN not in Path(directory).resolve().parents:
            raise UserError(f"{directory}: a task file there runs Python (!function {name}); {_IF_TRUSTED}")
        return import_function(name, directory)

    def own_metric(name: str, elsewhere: bool = False) -> Any:
        if elsewhere or name not in metric_registry:
            raise UserError(f"the metric {shown(name)} is none of lm-eval's own, and would run code; {_IF_TRUSTED}")
        return get_metric(name)

    replaced = [
        (_yaml_loader, "_import_func_in_yml", own_function),
        (lm_eval.api.task, "get_metric", own_metric),
        (lm_eval.utils, "env", sandbox),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for module, name, ours in replaced:
            setattr(module, name, ours)
        yield
    finally:
        for module, name, theirs in before:
            setattr(module, name, theirs)


@functools.cache
def _own_tasks() -> Any:
    """Index lm-eval's own tasks. That takes seconds, so it is done once, and not where a directory has all names."""
    return TaskManager()


class Catalogue:
    """The catalogue has lm-eval's tasks, and those of a directory before them.

    Attributes:
        included: names of the directory's tasks.
    """

    def __init__(self, options: TaskOptions):
        """Read the names of the directory's tasks.

        Raises:
            UserError: no such directory, or no task in it.
        """
        self.options = options
        self.included: list[str] = []
        if options.include_path is not None:
            if not options.include_path.is_dir():
                raise UserError(f"--include-path {options.include_path}: no such directory")
            for file in options.include_path.rglob("*.yaml"):
                is_regular(file)  # a pipe would be waited for
            self._included = TaskManager(include_path=str(options.include_path), include_defaults=False)
            self.included = list(self._included.all_tasks)
            if not self.included:
                raise UserError(f"--include-path {options.include_path}: no task file (.yaml) of lm-eval in it")

    def has(self, name: str) -> bool:
        return name in self.included or name in _own_tasks().all_tasks

    @property
    def names(self) -> list[str]:
        return [*self.included, *_own_tasks().all_tasks]

    def task(self, name: str, file: Path | None) -> HarnessTask:
        """Load the task, group or tag of that name, with its documents.

        Args:
            file: its evaluated split, instead of what its task file names.

        Raises:
            UserError: its data can't be had, or its task file runs Python, which isn't allowed.
        """
        only = name in self.included and not self.options.allow_task_code
        manager = self._manager(name)
        asked: Any = name if file is None else self._with_file(manager.task_index[name], file)
        try:
            with isolated(), only_data(only):
                loaded = manager.load([asked])
                for task in loaded["tasks"].values():
                    _fill_in(task, self.options.limit)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        except Exception as error:  # datasets, huggingface_hub, jinja and a task's own code raise anything
            raise UserError(
                f"{name}: its data can't be read ({type(error).__name__}: {first_line(error)}); without a network give "
                f"the evaluated split's file with --data {name}=FILE, or a task file that names it with --include-path"
            ) from error
        if file is not None:
            loaded = {"tasks": loaded["tasks"], "groups": {}, "group_map": {}}
        for task in loaded["tasks"].values():
            self._set_fewshot(task)
        return HarnessTask(name, loaded, self.options, only_data=only)

    def _manager(self, name: str) -> Any:
        if name not in self.included:
            return _own_tasks()
        if name in self._included.all_subtasks:
            return self._included
        return TaskManager(include_path=str(self.options.include_path))  # a group may name tasks of lm-eval's own

    def _with_file(self, entry: Any, file: Path) -> dict[str, Any]:
        """Make a group of the task alone, which is lm-eval's way to read it with other keys than its file has."""
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
        changed = {
            **dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split")),
            "task": entry.name,
            "dataset_path": {"jsonl": "json"}.get(kind, "text"),
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(file)}},
            "test_split" if config.get("test_split") else "validation_split": split,
            "num_fewshot": 0,
        }
        return {"group": f"{entry.name} of a file", "task": [changed]}

    def _set_fewshot(self, task: Any) -> None:
        """Do as lm-eval's `simple_evaluate`: a task that says 0 keeps it."""
        said = task.get_config("num_fewshot")
        asked = self.options.num_fewshot
        if asked is not None and said != 0:
            task.set_config(key="num_fewshot", value=asked)
        elif said is None:
            task.set_config(key="num_fewshot", value=0)


def _fill_in(task: Any, limit: int | None) -> None:
    """Fill in every document, so that what is wrong with one is told before the model is read.

    Raises:
        UserError: a document does not fit the task file.
    """
    for number, document in enumerate(islice(task.eval_docs, limit), 1):
        try:
            scored = {"doc_to_text": task.doc_to_text(document), "doc_to_target": task.doc_to_target(document)}
            for key, value in scored.items():
                if task.OUTPUT_TYPE.startswith("loglikelihood") and not isinstance(value, str):
                    raise TypeError(f"{key} is {shown(value)}, not text")
            if task.OUTPUT_TYPE == "multiple_choice":
                task.doc_to_choice(document)
        except Exception as error:  # jinja, lm-eval's own use of the values, and a task's own code raise anything
            raise UserError(
                f"document {number} of its data doesn't fit its task file ({type(error).__name__}: "
                f"{first_line(error)}); mend either"
            ) from error


class HarnessTask(Task):
    """The task is a task, group or tag of lm-eval, as its `TaskManager` loads it.

    Args:
        only_data: nothing of its files may run Python.
    """

    def __init__(self, name: str, loaded: Any, options: TaskOptions, *, only_data: bool = False):
        self.name, self.loaded, self.options, self.only_data = name, loaded, options, only_data
        self.limit = options.limit

    def figures(self, subject: Subject) -> dict[str, Any]:
        """Compute the metrics as lm-eval names them, and its whole result under `lm_eval`, for its table."""
        chat = self.options.apply_chat_template
        if chat and not subject.tokenizer.chat_template:
            raise UserError("--apply-chat-template: the model's tokenizer has no chat template; leave it out")
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(SEEDS["fewshot"])  # it is used up: an evaluation before this one drew from it
        with subject.progress(self.name) as report, isolated(), only_data(self.only_data):
            lm = Harness(subject, report)
            try:
                results = evaluator.evaluate(
                    lm,
                    self.loaded,
                    limit=self.limit,
                    bootstrap_iters=0 if subject.quiet or subject.topology.rank else BOOTSTRAP,
                    log_samples=self.options.log_samples,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                )
            except UserError:
                raise
            except Exception as error:  # its own use of the values: jinja, metrics, filters, a task's own code
                # A RuntimeError may be a peer that is lost, which is told by the rank that failed.
                if lm.computing or (subject.topology.world > 1 and isinstance(error, RuntimeError)):
                    raise
                raise UserError(
                    f"{self.name}: lm-eval can't evaluate it ({type(error).__name__}: {first_line(error)}); look at "
                    "what its task file asks for and at its data"
                ) from error
        whole = {key: results[key] for key in IN_REPORT if key in results}
        metrics = whole["results"].get(self.name) or whole.get("groups", {}).get(self.name) or {}
        return {
            "data": {name: self._origin(task) for name, task in self.loaded["tasks"].items()},
            "metrics": {key: value for key, value in metrics.items() if key not in NOT_METRICS},
            "examples": sum(counts["effective"] for counts in results["n-samples"].values()),
            "tokens": lm.tokens,
            "tokens_computed": lm.tokens_computed,
            "truncated": lm.truncated,
            "lm_eval": whole,
            **({"samples": results["samples"]} if self.options.log_samples else {}),
        }

    def figures_to_log(self, result: Mapping[str, Any]) -> dict[str, float | None]:
        """Pick every metric but standard errors. Its `acc,none` is `acc` here; another filter stays in the name."""
        return {
            metric.removesuffix(",none"): value
            for metric, value in result["metrics"].items()
            if "_stderr" not in metric and isinstance(value, int | float)
        }

    def _origin(self, task: Any) -> Origin:
        """Describe where a task's documents are from, with a SHA-256 of those that were used."""
        found = {"dataset": task.DATASET_PATH, "name": task.DATASET_NAME}
        if files := (task.get_config("dataset_kwargs") or {}).get("data_files"):
            found["data_files"] = files
        return found | {"sha256": digest_of(islice(task.eval_docs, self.limit))}


class Harness(HFLM):
    """A harness is an lm-eval `LM` of a `Subject`. Every rank of its grid makes one and gives it the same requests.

    Attributes:
        tokens: scored or generated so far; tokens_computed: read by the model.
        truncated: requests whose context was longer than the model's positions.
        computing: the model scores; it stays so where that failed.
    """

    computing = False

    def __init__(self, subject: Subject, report: Report):
        # A stand-in, because lm-eval would tie the weights of a live model again.
        model = SimpleNamespace(config=subject.config, device=torch.device(subject.device), name_or_path="")
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(subject.tokenizer),  # it sets a padding token
            max_length=subject.positions,
            batch_size=subject.batch_size,
        )
        self.subject, self.report = subject, report
        self.tokens = self.tokens_computed = self.truncated = 0

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, arg-max) of each request's continuation (its third part) after its context (the
        second). Requests of one token after the same context share a forward."""
        rows, truncated = continuation_rows([asked[1:] for asked in requests], self.max_length)
        rows, answered_by = shared(rows)
        self._agree([(row.tokens.tolist(), row.scored, row.alternatives) for row in rows])
        self.computing = True
        found = self.subject.score(rows, self.report)
        self.computing = False
        self.tokens += sum(len(continuation) for _, _, continuation in requests)
        self.tokens_computed += sum(map(len, rows))
        self.truncated += truncated
        answers = [(-found[row][choice].nll, found[row][choice].greedy) for row, choice in answered_by]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return each text's log-likelihood, in windows that score every token once and overlap in the last alone."""
        texts = [
            get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for request in requests
        ]
        windows = [[(None, *make_disjoint_window(window)) for window in text] for text in texts]
        answers = iter(self._loglikelihood_tokens([window for text in windows for window in text]))
        return [sum(next(answers)[0] for _ in text) for text in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return each request's text, up to its stop sequences. A batch has requests with the same options.

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
        batches = list(enumerate(order.get_batched(n=self.subject.batch_size)))
        batches_texts = self.subject.map(self._generated, batches, lambda batch: len(batch[1]), self.report)
        texts = [text for each in batches_texts for text in each]
        self.tokens += sum(len(self.tok_encode(text, add_special_tokens=False)) for text in texts)
        found: list[str] = order.get_original(texts)
        return found

    def _generated(self, numbered: tuple[int, Sequence[tuple[str, dict[str, Any]]]]) -> list[str]:
        number, batch = numbered
        torch.manual_seed(SEEDS["torch"] + number)  # what is drawn depends on no rank
        texts: list[str] = super().generate_until([SimpleNamespace(args=asked) for asked in batch], disable_tqdm=True)
        return texts

    @torch.no_grad()
    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        """Continue [b, n] → [b, n + generated] by the model's own `generate`."""
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
        """Raise a RuntimeError if ranks have built different requests: what they compute would not belong together."""
        if self.subject.topology.world > 1 and len(set(from_all(hashlib.sha256(repr(asked).encode()).digest()))) > 1:
            raise RuntimeError("ranks have built different requests for a task: is its data the same on all machines?")


def shared(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[int, int]]]:
    """Make one row with alternatives of the rows with the same context and one token to score.

    Returns:
        The rows, and for each given one (row, which of its scores).
    """
    choices_after: dict[bytes | int, tuple[Row, list[int]]] = {}  # the first such row, and the last tokens of all
    answered_by: list[tuple[bytes | int, int]] = []
    for number, row in enumerate(rows):
        key = row.tokens[:-1].tobytes() if row.scored == 1 else number
        choices, token = choices_after.setdefault(key, (row, []))[1], int(row.tokens[-1])
        if token not in choices:
            choices.append(token)
        answered_by.append((key, choices.index(token)))
    index = {key: number for number, key in enumerate(choices_after)}
    distinct = [Row(row.tokens, row.scored, tuple(choices[1:])) for row, choices in choices_after.values()]
    return distinct, [(index[key], choice) for key, choice in answered_by]
