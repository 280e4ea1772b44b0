"""The JSON schema of the config file: what RunConfig accepts is valid, and what is mistyped is not.

The validator is the reference implementation of JSON Schema for Python.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.launched import ROOT
from tests.support.mistakes import MISTAKES, changed
from zero_tp.base.settings.resolve import AUTO
from zero_tp.base.settings.schedule import SCHEDULES
from zero_tp.run.config.json_schema import json_schema

SUMS_AND_COMBINATIONS = {
    "scheduler.params.total_num_steps",
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
    *("zero_optimization.offload_param", "sequence_parallel_size"),
    "zero_tp.training.steps",
    *("zero_tp.parallel.tensor", "zero_tp.data.sequence_length", "zero_tp.objective"),
}


@cache
def validator() -> Draft202012Validator:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(json.loads(json.dumps(schema)))


def problems(config: Any) -> list[str]:
    return [error.json_path + ": " + error.message for error in validator().iter_errors(config)]


@pytest.mark.slow
def test_the_configs_that_are_shipped_and_shown_are_valid() -> None:
    shown = re.findall(r"```json\n(\{.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    texts = [path.read_text() for path in sorted((ROOT / "ds_configs").glob("*.json"))] + shown
    assert len(texts) > 15
    for text in texts:
        assert not problems(json.loads(text) | {"$schema": "zero_tp.schema.json"})


@pytest.mark.slow
def test_auto_is_valid_where_the_run_decides_and_nowhere_else() -> None:
    for path in AUTO:
        name, config = path.rpartition(".")[2], changed({path: "auto"})
        if path.startswith("scheduler.params."):
            kind = next(
                kind for kind, schedule in SCHEDULES.items() if name in schedule.model_fields
            )
            needed = {
                field for field, info in SCHEDULES[kind].model_fields.items() if info.is_required()
            }
            config["scheduler"] = {
                "type": kind,
                "params": dict.fromkeys(needed, 1) | {name: "auto"},
            }
        assert not problems(config), path
    assert problems(changed({"zero_tp.training.steps": "auto"}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (
            "optimizer",
            {"type": "adamw", "params": {"lr": 1, "torch_adam": False, "bias_correction": True}},
        ),
        ("optimizer", {"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}),
        ("optimizer.type", "ADAMW"),
        (
            "scheduler",
            {
                "type": "OneCycle",
                "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": False},
            },
        ),
        ("zero_optimization.reduce_bucket_size", 5e8),
        ("zero_optimization.offload_optimizer", {"device": "cpu", "pin_memory": True}),
        ("zero_tp.data.train", {"a": 1, "b": 0.5}),
        ("zero_tp.training.timeout_minutes", {"step": 4}),
    ],
)
def test_what_runs_may_say_is_valid(path: str, value: Any) -> None:
    assert not problems(changed({path: value}))


def test_a_mistake_of_one_key_is_not_valid() -> None:
    """All but those that are about several keys, the run's sizes, files, or the values of a
    model's fields.
    """
    unseen = {mistake.key for mistake in MISTAKES if not problems(mistake.config())}
    assert {key for key in unseen if not key.startswith("zero_tp.model.")} == SUMS_AND_COMBINATIONS
    assert sum(bool(problems(mistake.config())) for mistake in MISTAKES) > 30


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("optimizer.params.weight_decey", 0.1, "$.optimizer.params"),
        ("optimizer.params.lr", "high", "$.optimizer.params.lr"),
        ("optimizer.type", "AdmW", "$.optimizer.type"),
        ("scheduler.type", "WarmupCosinLR", "$.scheduler.type"),
        ("scheduler.params.warmup_steps", 10, "$.scheduler.params"),
        ("scheduler.params.warmup_num_steps", -1, "$.scheduler.params.warmup_num_steps"),
        ("zero_tp.model.n_layers", 2, "$.zero_tp.model"),
        ("zero_tp.model.attn_implementation", "eager", "$.zero_tp.model"),
        ("zero_tp.model.model_type", "gpt-2", "$.zero_tp.model.model_type"),
        ("zero_tp.training.seed", 2**60, "$.zero_tp.training.seed"),
    ],
)
def test_a_mistake_is_reported_at_its_key_alone(path: str, value: Any, place: str) -> None:
    """What `params` and a model hold depends on their types; an error names the place, and no
    other type's keys.
    """
    assert [problem.partition(": ")[0] for problem in problems(changed({path: value}))] == [place]
