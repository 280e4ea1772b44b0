"""lm-eval's tasks: loaded by its `TaskManager`, evaluated by its `evaluate`.

Task files of a user's directory (`--include-path`) may run Python only with `--allow-task-code`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import random
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import lm_eval.api.task
import lm_eval.tasks
import lm_eval.utils
import numpy as np
import torch
import yaml
from jinja2 import StrictUndefined, meta
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import evaluator
from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager, _factory, _yaml_loader
from lm_eval.tasks._index import Entry

from zero_tp.base.errors import UserError, first_line, one_line, shown
from zero_tp.data.documents import file_format
from zero_tp.run.process.quiet import suppress_output
from zero_tp.tools.evaluation.choices import check_choices, check_texts
from zero_tp.tools.evaluation.eval_model import EvalModel
from zero_tp.tools.evaluation.lm_eval_model import LMEvalModel
from zero_tp.tools.evaluation.rows import check_continuations
from zero_tp.tools.evaluation.settings import TaskOptions
from zero_tp.tools.evaluation.task import (
    CHOICE_FIELDS,
    MULTIPLE_CHOICE,
    Origin,
    Task,
    hash_records,
    require_fields,
)

logging.getLogger("lm_eval").setLevel(logging.ERROR)

BOOTSTRAP = 1000
"""Bootstrap samples for standard errors without a formula; lm-eval's 100,000 take minutes in one
process.
"""

LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent
NOT_METRICS = ("alias", "name", "sample_len", "sample_count")
MULTIPLE_CHOICE_CONFIG = {
    "task": MULTIPLE_CHOICE,
    "output_type": "multiple_choice",
    "test_split": "test",
    **dict(zip(("doc_to_text", "doc_to_choice", "doc_to_target"), CHOICE_FIELDS, strict=True)),
    "metric_list": [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ],
}
IN_REPORT = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better")


@contextlib.contextmanager
def lm_eval_settings(*, sandbox: bool = False) -> Iterator[None]:
    """Run lm-eval's code with its seeds, in this process, and restore the random states afterwards.

    Output of lm-eval and datasets is shown only if the block fails.

    Args:
        sandbox: see `task_files_as_data`.
    """
    os.environ["DISABLE_MULTIPROC"] = (
        "1"  # lm-eval's bootstrap would fork a process with open connections
    )
    # Only this rank's device: by default fork_rng takes the states of all devices and warns about
    # it.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(suppress_output(stderr=True))
        if sandbox:
            stack.enter_context(task_files_as_data())
        # lm-eval's `simple_evaluate` sets these seeds; `evaluate`, which is called here, sets none.
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        yield


@contextlib.contextmanager
def _patched(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a function of lm-eval, for which it has no argument, inside the block."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def task_files_as_data() -> Iterator[None]:
    """Patch lm-eval so that other people's task files, and the files that they include, run no
    code.

    A `!function` or a metric of another package raises a UserError. Templates run in jinja2's
    sandbox, because in lm-eval's own environment a template can reach any Python.
    """
    # Three ways in which a user's task file could run code. A template needs no more for it than
    # `{{ "".__class__.__mro__ }}`:
    #
    #     template     lm-eval's environment reaches Python    the sandbox raises
    #     !function    lm-eval imports code.py                 `refuse` names the file
    #     metric       lm-eval loads another package           `get_own_metric` names the metric
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    # lm-eval's own filters, or its own templates would fail in the sandbox.
    environment.filters |= lm_eval.utils.env.filters
    load_yaml = _factory.load_yaml
    get_metric = lm_eval.api.task.get_metric
    remedy = "--allow-task-code (in Python allow_task_code=True) allows it, if you trust the source"

    def load_as_data(file: Path, **options: Any) -> Any:
        def refuse(function: str, _: Path) -> NoReturn:
            raise UserError(f"{file}: it runs Python (!function {function}); {remedy}")

        # lm-eval's own files are code that the user has installed. The path is resolved, because a
        # link or `..` could lead out of the directory.
        if file.resolve().is_relative_to(LM_EVAL_TASKS.resolve()):
            return load_yaml(file, **options)
        with (
            # Without libyaml lm-eval takes yaml's FullLoader, which makes Python objects of tags.
            _patched(_yaml_loader, "_Base", getattr(yaml, "CSafeLoader", yaml.SafeLoader)),
            _patched(_yaml_loader, "_import_func_in_yml", refuse),
        ):
            return load_yaml(file, **options)

    def get_own_metric(name: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or name not in metric_registry:
            raise UserError(
                f"the metric {shown(name)} is not one of lm-eval's and would run code; {remedy}"
            )
        return get_metric(name)

    with (
        _patched(lm_eval.utils, "env", environment),
        _patched(_factory, "load_yaml", load_as_data),
        _patched(lm_eval.api.task, "get_metric", get_own_metric),
    ):
        yield


class LMEvalTask(Task):
    """A task, group or tag of lm-eval with its documents, or `multiple_choice`.

    Args:
        manager: an index that has the task; for `multiple_choice`, an empty one.
        file: the evaluated split; None: the data set of the task file.
    """

    def __init__(self, name: str, manager: TaskManager, options: TaskOptions, file: Path | None):
        self.name = name
        self.options = options
        self.sandbox = options.include_path is not None and not options.allow_task_code
        if file is not None and options.num_fewshot:
            raise UserError(
                f"--data {name}={file}: it has no examples for --num-fewshot "
                f"{options.num_fewshot}; use a task file "
                "with all splits and --include-path"
            )
        try:
            # Everything that can go wrong with a task file is done here, before the model is read:
            # load the data, render all documents, count tokens.
            with lm_eval_settings(sandbox=self.sandbox):
                self.loaded = (
                    manager.load([name]) if file is None else _load_with_file(name, manager, file)
                )
                if not self.loaded["tasks"]:
                    raise UserError(
                        "a group without tasks; write its tasks as a list: task: [NAME, ...]"
                    )
                self.likelihood_requests: list[tuple[str, str]] = []
                for task in self.loaded["tasks"].values():
                    self.likelihood_requests += _likelihood_requests(task, options.limit)
                    self._set_fewshot(task)
                self.generated_tokens = max(map(_generated_tokens, self.loaded["tasks"].values()))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        except (
            Exception
        ) as error:  # datasets, huggingface_hub, jinja and a task's own code raise anything
            if file is not None:
                require_fields(
                    name,
                    file,
                    _fields_of(manager.task_index.get(name), allow_code=not self.sandbox),
                )
            raise UserError(
                f"{name}: lm-eval can't load it ({first_line(error)}); correct its task file or "
                "its data; without a "
                "network give the evaluated split's file, with all its fields, with --data "
                f"{name}=FILE"
            ) from error

    def check(self, window: int, tokenizer: Any) -> None:
        check_continuations(self.name, self.likelihood_requests, window, tokenizer)
        if self.generated_tokens >= window:
            raise UserError(
                f"{self.name}: it generates {self.generated_tokens:,} tokens, and the model's "
                f"{window:,} positions "
                "leave no room for a prompt; set generation_kwargs.max_gen_toks in its task file"
            )

    def _set_fewshot(self, task: Any) -> None:
        """Set the number of examples as lm-eval's `simple_evaluate` does.

        A 0 in the task file takes precedence.
        """
        in_task_file = task.get_config("num_fewshot")
        option = self.options.num_fewshot
        if option is not None and in_task_file != 0:
            task.set_config(key="num_fewshot", value=option)
        elif in_task_file is None:
            task.set_config(key="num_fewshot", value=0)

    def compute_metrics(self, model: EvalModel) -> dict[str, Any]:
        """Compute the metrics, under lm-eval's names.

        `lm_eval` has the results for its `make_table`. Whose an error of its `evaluate` is:

            while the model computes      the model's: raise it as it is
            between, with one process     the task's: one line
            between, a RuntimeError of    perhaps a collective whose peer is gone:
            one of several ranks          raise it as it is
        """
        chat = self.options.apply_chat_template
        if chat and not model.tokenizer.chat_template:
            raise UserError(
                "--apply-chat-template: the model's tokenizer has no chat template; leave it out"
            )
        for task in self.loaded["tasks"].values():
            # An earlier evaluation advanced its generator.
            task.set_fewshot_seed(DEFAULT_OTHER_SEED)
        # The sandbox holds here too: templates are rendered once more, and filters and metrics run.
        with lm_eval_settings(sandbox=self.sandbox), _refused_documents():
            lm = LMEvalModel(model, self.name)
            try:
                results = evaluator.evaluate(
                    lm,
                    self.loaded,
                    limit=self.options.limit,
                    # A training run logs no standard errors, and only rank 0's report is written.
                    bootstrap_iters=0 if model.quiet or model.topology.rank else BOOTSTRAP,
                    log_samples=self.options.log_samples,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                )
            except (UserError, MemoryError, torch.OutOfMemoryError):
                raise
            except (
                Exception
            ) as error:  # jinja, metrics, filters and a task's own code raise anything
                # A RuntimeError may be a lost peer; the failing rank reports the cause.
                if lm.computing or (model.topology.world > 1 and isinstance(error, RuntimeError)):
                    raise
                raise UserError(
                    f"{self.name}: lm-eval can't evaluate it ({first_line(error)}); correct its "
                    "task file or its data"
                ) from error
        report = {key: results[key] for key in IN_REPORT if key in results}
        # With a mean over its tasks, a group has an entry of its own in `groups`, which replaces
        # the one of equal name.
        metrics = {
            name: {key: value for key, value in values.items() if key not in NOT_METRICS}
            for name, values in (report["results"] | report.get("groups", {})).items()
        }
        # A tag, and a group without a mean, have only the metrics of their tasks.
        task_metrics = {
            f"{name}/{key}": value
            for name, values in metrics.items()
            for key, value in values.items()
        }
        return {
            "data": {name: self._origin(task) for name, task in self.loaded["tasks"].items()},
            "metrics": metrics.get(self.name) or task_metrics,
            "examples": sum(counts["effective"] for counts in results["n-samples"].values()),
            "tokens": lm.tokens,
            "tokens_computed": lm.tokens_computed,
            "truncated": lm.truncated,
            "lm_eval": report,
            **({"samples": results["samples"]} if self.options.log_samples else {}),
        }

    def metrics_to_log(self, result: Mapping[str, Any]) -> dict[str, float | None]:
        """Return every metric but standard errors. `acc,none` becomes `acc`; other filters stay
        in the name.
        """
        return {
            metric.removesuffix(",none"): value
            for metric, value in result["metrics"].items()
            if "_stderr" not in metric and isinstance(value, int | float)
        }

    def _origin(self, task: Any) -> Origin:
        """Return a task's data set and the SHA-256 of the evaluated documents."""
        origin = {"dataset": task.DATASET_PATH, "name": task.DATASET_NAME}
        if files := (task.get_config("dataset_kwargs") or {}).get("data_files"):
            origin["data_files"] = files
        return origin | {"sha256": hash_records(islice(task.eval_docs, self.options.limit))}


def _load_with_file(name: str, manager: TaskManager, file: Path) -> dict[str, Any]:
    """Load a task of lm-eval's, or `multiple_choice`, with a file as its evaluated split."""
    entry = manager.task_index.get(name)
    config = (entry.cfg or {}) if entry else MULTIPLE_CHOICE_CONFIG
    split = next((key for key in ("test_split", "validation_split") if config.get(key)), None)
    if not isinstance(config.get("task"), str) or split is None:  # in a group, `task` is a list
        raise UserError("a group of tasks takes no file; give --data for its tasks")
    kind = file_format(file)
    loader = {"jsonl": "json", "txt": "text"}.get(kind, kind)  # of the datasets library
    data = {
        "dataset_path": loader,
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {config[split]: str(file)}},
    }
    # The file is one split. lm-eval would look for the other splits that the task file names, and
    # for few-shot examples, in the same file.
    others = dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split"))
    task = {**others, split: config[split], "task": name, "num_fewshot": 0, **data}
    # In lm-eval, only a group can override keys of a task file.
    spec = (
        {"group": f"{name} of a file", "task": [task]} if entry else MULTIPLE_CHOICE_CONFIG | task
    )
    return {"tasks": manager.load([spec])["tasks"], "groups": {}, "group_map": {}}


@contextlib.contextmanager
def _refused_documents() -> Iterator[None]:
    """Raise lm-eval's warnings about documents, whose scores would be 0."""
    logger = lm_eval.api.task.eval_logger
    level = logger.level
    logger.setLevel(logging.WARNING)
    # lm-eval warns and scores such a document as wrong, so the accuracy would be too low without a
    # word in the report. A filter may raise; a handler's errors are swallowed by logging.
    logger.addFilter(_refuse_document)
    try:
        yield
    finally:
        logger.removeFilter(_refuse_document)
        logger.setLevel(level)


def _refuse_document(record: logging.LogRecord) -> bool:
    if record.levelno == logging.WARNING:
        warning = one_line(record.getMessage(), 300)
        raise UserError(f"a document doesn't fit its task file ({warning}); correct either")
    return True


def _generated_tokens(task: Any) -> int:
    """Return how many tokens a request of the task generates at most."""
    if task.OUTPUT_TYPE != "generate_until":
        return 0
    return int(normalize_gen_kwargs(task.get_config("generation_kwargs") or {})["max_gen_toks"])


def _fields_of(entry: Entry | None, *, allow_code: bool) -> list[str]:
    """Return the document fields that a task file reads, sorted.

    Its templates are read, and with `allow_code` its functions too.
    """
    if entry is None:
        return list(CHOICE_FIELDS)
    config = _yaml_loader.load_yaml(entry.yaml_path, resolve_func=allow_code)
    parts = (
        ("process_docs",)
        if config.get("process_docs")
        else ("doc_to_text", "doc_to_target", "doc_to_choice")
    )
    fields = set[str]()
    # "{{question}} {{a}}" gives question and a; the bare name `question` is a field too; a function
    # reads the names in doc["…"].
    for value in (config.get(part) for part in parts):
        if callable(value):  # fields as in `doc["question"]`
            fields |= set(re.findall(r"""\w\[["'](\w+)["']\]""", inspect.getsource(value)))
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text.isidentifier():
                fields.add(text)
            elif isinstance(text, str):
                fields |= meta.find_undeclared_variables(lm_eval.utils.env.parse(text))
    return sorted(fields)


def _check_question(task: Any, document: Any) -> None:
    """Raise a ValueError if lm-eval's accuracy of a multiple-choice question would always be 0."""
    if task.OUTPUT_TYPE != "multiple_choice" or not isinstance(task, ConfigurableTask):
        return
    choices = task.doc_to_choice(document)
    if callable(task.config.process_results):  # it may read the right answer from anywhere
        gold: Any = 0
    else:
        gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    check_choices(choices, gold)
    # In lm-eval's own data sets, as lm-eval does.
    if (task.get_config("dataset_kwargs") or {}).get("data_files"):
        check_texts(choices)


def _likelihood_requests(task: Any, limit: int | None) -> Iterator[tuple[str, str]]:
    """Yield (context, continuation) of each request for a likelihood.

    Contexts have no few-shot examples.

    All requests are built, so that a wrong document is reported before the model is loaded.
    """
    for number, document in enumerate(islice(task.eval_docs, limit), 1):
        try:
            _check_question(task, document)
            # Without examples: a context that is too long loses its beginning, so only
            # continuations must fit.
            context = task.fewshot_context(document, num_fewshot=0)
            requests = task.construct_requests(
                document, context, metadata=(task.task_name, number, 1)
            )
            for request in requests if isinstance(requests, list) else [requests]:
                if not all(isinstance(argument, str | dict) for argument in request.args):
                    raise TypeError(f"a request is {shown(request.args)}, not text")
                if request.request_type == "loglikelihood":
                    yield request.args
        except (
            Exception
        ) as error:  # jinja, lm-eval's own use of the values, and a task's own code raise anything
            raise UserError(
                f"document {number} of its data doesn't fit its task file ({first_line(error)}); "
                "correct either"
            ) from error
