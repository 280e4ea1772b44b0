"""Every row of the refusals stops a config that has it, and no other."""

from __future__ import annotations

import copy
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.support.mistakes import RIGHT, changed, written
from tests.tools.fuzz.commands import LONGEST_REFUSAL
from tests.tools.fuzz.configs import BASE, LLAMA
from tests.tools.fuzz.damage import ODD, at, places
from zero_tp.base.errors import shown
from zero_tp.base.settings.keys import leaves
from zero_tp.base.settings.optimizer import REFUSED_OPTIMIZERS, choose_implementation
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.base.settings.refused import FIXED, REFUSED_KEYS
from zero_tp.base.settings.schema import Parallel, ZeroTP
from zero_tp.commands.check import describe
from zero_tp.engine.settings.parse import check_settings, parse_settings
from zero_tp.engine.settings.rule import Combination, EntryPoint
from zero_tp.engine.settings.rules import notes, rules
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import ConfigError, RunConfig

ACTIVATIONS = "activation_checkpointing"
LENGTHS = {"num_warmup_steps": 1, "num_training_steps": 9}
SGD: dict[str, Any] = {"optimizer.type": "SGD", "zero_allow_untested_optimizer": True}
MUON: dict[str, Any] = {"optimizer.type": "Muon", "optimizer.params": {"lr": 0.1}}
OTHER_VALUES: dict[str, Any] = {
    "gradient_allreduce_op": "sum",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "scheduler.params.decay_mom_rate": 0.1,
}
"""Of keys that may have one value and whose other values are not `not value` or `value + 1`."""
CONTEXTS: dict[str, dict[str, Any]] = {
    "optimizer.params.bias_correction": {"optimizer.params": {"lr": 0.1}},
    "optimizer.params.fp32_optimizer_states": {
        "optimizer.params": {"lr": 0.1},
        "zero_optimization.offload_optimizer": {"device": "cpu"},
    },
    "scheduler.params.decay_mom_rate": {
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}
    },
    "zero_optimization.offload_optimizer.ratio": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    },
    "zero_optimization.offload_optimizer.super_offload": {"zero_optimization.stage": 3},
}
"""What a file needs so that such a key is one of its optimizer, schedule or stage."""


def other_value(key: str, value: Any) -> Any:
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    return not value if isinstance(value, bool) else value + 1


EXPERTS = {"zero_tp.parallel.expert": 2, "zero_tp.model": {"model_type": "mixtral"}}


REFUSED: tuple[dict[str, Any], ...] = (
    *({**CONTEXTS.get(key, {}), key: other_value(key, value)} for key, (value, _) in FIXED.items()),
    {"fp16.enabled": True},
    {"data_types.param_dtype": "fp32"},
    {"communication_data_type": "fp16"},
    {"data_types.grad_accum_dtype": "fp16"},
    {"bf16.enabled": False, "fp16.enabled": True, "data_types.grad_accum_dtype": "fp32"},
    {"bf16.enabled": False, "fp16.enabled": True, "communication_data_type": "fp32"},
    {"zero_optimization.allgather_bucket_size": 2001},
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 2.0},
    {"data_types.grad_accum_dtype": "fp32", "zero_optimization.stage": 0},
    {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    {**SGD, "optimizer.params": {"lr": 0.1, "nesterov": True}},
    {"optimizer.params": {"lr": 0.1, "foreach": True, "fused": True}},
    {**MUON, "zero_optimization.offload_optimizer": {"device": "cpu"}},
    {**MUON, "optimizer.params": {"lr": 0.0, "adamw": {"lr": 0.1}}},
    {
        "zero_tp.training.qk_clip_threshold": 100.0,
        "zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
        "zero_optimization.stage": 3,
    },
    {
        "zero_tp.training.ema": {"decay": 0.999},
        "zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
        "zero_optimization.stage": 3,
    },
    {"scheduler": {"type": "linear", "params": {"num_warmup_steps": 10, "num_training_steps": 9}}},
    {
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 101, "total_num_steps": 100},
        }
    },
    {"scheduler": {"type": "polynomial", "params": {**LENGTHS, "lr_end": 1.0}}},
    {"scheduler": {"type": "cosine_with_min_lr", "params": {**LENGTHS, "min_lr": 1.0}}},
    {
        "zero_tp.model": {"model_type": "bert"},
        "zero_tp.objective": "masked",
        "zero_tp.evaluation.tasks": ["lambada"],
    },
    {"zero_tp.recompute": {"mode": "full", "layers": 3}},
    {"zero_tp.recompute": {"mode": "full", "every": 3}},
    {"zero_tp.recompute": {"mode": "full", "keep_micro_batches": 2}},
    {
        "zero_tp.recompute": "full",
        "zero_tp.parallel.sequence": False,
        f"{ACTIVATIONS}.partition_activations": True,
        f"{ACTIVATIONS}.contiguous_memory_optimization": True,
        f"{ACTIVATIONS}.number_checkpoints": 1,
    },
    {"zero_optimization.offload_param": {"device": "cpu"}},
    {"zero_optimization.offload_optimizer": {"device": "cpu"}, "zero_optimization.stage": 0},
    {"zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
    {"zero_optimization.offload_optimizer": {"device": "nvme"}, "zero_optimization.stage": 3},
    {"zero_optimization.offload_param": {"device": "nvme"}, "zero_optimization.stage": 3},
    {f"{ACTIVATIONS}.partition_activations": True},
    {f"{ACTIVATIONS}.cpu_checkpointing": True},
    {f"{ACTIVATIONS}.contiguous_memory_optimization": True},
    {**EXPERTS, "zero_optimization.stage": 0},
    {**EXPERTS, "zero_optimization.stage": 3},
    {**EXPERTS, **MUON},
    {**EXPERTS, "data_types.grad_accum_dtype": "fp32", "zero_optimization.stage": 1},
    {**EXPERTS, "zero_optimization.contiguous_gradients": False},
    {**EXPERTS, "zero_optimization.reduce_scatter": False},
)


def line(changes: dict[str, Any], tmp_path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(written(tmp_path, changed(changes)), world_size=4)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def typed(config: dict[str, Any], entry_point: EntryPoint = EntryPoint.RUN) -> Combination:
    """The typed sections of a config that is valid but for the rules."""
    config = copy.deepcopy(config)
    zero_tp = ZeroTP(**config.pop("zero_tp", RIGHT["zero_tp"]))
    if "total_num_steps" in config.get("scheduler", {}).get("params", {}):
        config["scheduler"]["params"]["total_num_steps"] = 100
    choose_implementation(config)
    layers = RIGHT["zero_tp"]["model"]["n_layer"]
    run = Combination.of_run(parse_settings(config, entry_point), zero_tp, layers)
    return dataclasses.replace(run, entry_point=entry_point)


def texts(config: Combination, *, applies: bool = True) -> set[tuple[str, str]]:
    """The key and the text of each refusal that is true of a config, or of each one."""
    return {
        (rule.keys, rule.reason)
        for rule in rules(config)
        if rule.kind == "refused" and rule.applies >= applies
    }


def refused_texts(changes: dict[str, Any]) -> set[tuple[str, str]]:
    """The same of a file with changes, and of each key of it that may have one value."""
    config = changed(changes)
    fixed = {
        (key, f"unless it is {shown(value)}: {reason}")
        for key, (value, reason) in FIXED.items()
        if key in keys_of(changes)
    }
    return fixed or texts(typed(config))


def keys_of(changes: dict[str, Any]) -> set[str]:
    """The dotted keys of changes, some of which are objects."""
    return {
        key
        for path, value in changes.items()
        for key in (path, *(f"{path}.{inner}" for inner, _ in leaves(value)))
    }


IN_TRAINER: dict[str, dict[str, Any]] = {
    "activation_checkpointing": {"partition_activations": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}},
    "scheduler": {"type": "constant"},
    "optimizer": {"type": "Muon", "params": {"lr": 0.1}},
}
"""Blocks that a run's file may have and a Trainer's config may not."""


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_a_refused_combination_is_named_with_its_reason(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    found = line(changes, tmp_path)
    assert any(
        found.startswith(f"{key}: refused {text}") for key, text in refused_texts(changes)
    ), found


@pytest.mark.parametrize("entry_point", [EntryPoint.ENGINE, EntryPoint.TRAINER])
def test_other_doors_refuse_what_a_file_is_refused_for(
    entry_point: EntryPoint, tmp_path: Path
) -> None:
    """In the same words, but for what is refused in a Trainer alone."""
    compared = 0
    for changes in REFUSED:
        if any(key.startswith("zero_tp") for key in changes):
            continue
        config = changed(changes)
        parallel = Parallel(**config.pop("zero_tp")["parallel"])
        if "total_num_steps" in config["scheduler"]["params"]:
            config["scheduler"]["params"]["total_num_steps"] = 100
        choose_implementation(config)
        with pytest.raises(ConfigError) as caught:
            check_settings(config, parallel, entry_point)
        if "in ZeroTPTrainer" not in str(caught.value):
            assert str(caught.value) == line(changes, tmp_path)
            compared += 1
    assert compared > 40


def test_the_engine_refuses_before_it_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And `optimizer.type` as the command line does."""
    from zero_tp.engine.engine import TrainingEngine

    monkeypatch.setattr(
        "zero_tp.engine.engine.engine_of_stage", lambda *_: pytest.fail("the engine is built")
    )
    settings = {"train_batch_size": 1, "optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}
    with pytest.raises(ConfigError, match=r'^optimizer\.type: "Lamb" is refused: its trust ratio'):
        TrainingEngine.from_dict(LlamaConfig(), Topology(world=1), settings, seed=1)
    with pytest.raises(
        ConfigError, match=r"^gradient_acumulation_steps: unknown key; did you mean"
    ):
        TrainingEngine.from_dict(
            LlamaConfig(), Topology(world=1), {"gradient_acumulation_steps": 2}, seed=1
        )
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    for name in ("layers", "every"):
        policy = RecomputePolicy(mode="full", **{name: 33})
        with pytest.raises(
            ConfigError, match=rf"^zero_tp\.recompute\.{name}: refused above the model's layers"
        ):
            TrainingEngine.from_dict(
                LlamaConfig(), Topology(world=1), settings, seed=1, recompute=policy
            )


def test_every_refusal_has_a_config_here_and_the_right_config_has_none() -> None:
    every = texts(typed(RIGHT | {"scheduler": {"type": "WarmupLR"}}), applies=False)
    every |= {
        (key, f"unless it is {shown(value)}: {reason}") for key, (value, reason) in FIXED.items()
    }
    in_trainer = [
        texts(typed({"train_batch_size": 1, key: block}, EntryPoint.TRAINER))
        for key, block in IN_TRAINER.items()
    ]
    assert refused_texts({}) == set()
    assert set().union(*in_trainer, *map(refused_texts, REFUSED)) == every


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_refused_keys(key: str, tmp_path: Path) -> None:
    assert line({key: True}, tmp_path).startswith(f"{key}: refused: {REFUSED_KEYS[key]}")


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_refused_optimizers(name: str, tmp_path: Path) -> None:
    found = line({"optimizer.type": name}, tmp_path)
    assert found.startswith(f'optimizer.type: "{name}" is refused: {REFUSED_OPTIMIZERS[name]}')


def test_an_optimizer_of_a_trainer_s_own_may_be_untested() -> None:
    """transformers then sets the key itself: a note that it has no effect would be wrong."""
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    assert not notes(check_settings(config, Parallel(), EntryPoint.TRAINER), "no effect")


MODEL, OBJECTIVE = "zero_tp.model", "zero_tp.objective"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"optimizer.params.lr": 1e300}, "optimizer.params.lr: 1e+300 is beyond 2^53"),
        (
            {"zero_tp.training.steps": 10**30},
            "zero_tp.training.steps: 1000000000000000000000000000000 is beyond 2^53",
        ),
        (
            {"zero_tp.data.train": {"a": -(10.0**200)}},
            "zero_tp.data.train.a: -1e+200 is beyond 2^53",
        ),
        (
            {f"{MODEL}.vocab_size": 2**53},
            f"{MODEL}.vocab_size: 9007199254740992 is more than 2147483647: sizes and",
        ),
        (
            {f"{MODEL}.n_layer": 2**31},
            f"{MODEL}.n_layer: 2147483648 is more than 10000: each one is built separately",
        ),
        (
            {f"{MODEL}.vocab_size": 2**31 - 1, f"{MODEL}.n_embd": 2**20},
            f"{MODEL}.hidden_size: a matrix of 2147483647",
        ),
        (
            {"train_micro_batch_size_per_gpu": 2**31},
            "train_micro_batch_size_per_gpu: 2147483648: must be less than",
        ),
        (
            {"zero_tp.training.timeout_minutes": 1e9},
            "zero_tp.training.timeout_minutes: 1000000000.0: must be less than or",
        ),
        (
            {"zero_tp.training.timeout_minutes": {"save": 1e9}},
            "zero_tp.training.timeout_minutes.save: 1000000000.0: must",
        ),
        (
            {OBJECTIVE: {"type": "masked", "max_ngram": 10**9}},
            f"{OBJECTIVE}.max_ngram: 1000000000: must be less than or",
        ),
        ({"zero_tp.tokenizer": "a\0b"}, 'zero_tp.tokenizer: "a\\u0000b" has a NUL character'),
        (
            {"zero_tp.data.train": {"a\0b": 1.0}},
            'zero_tp.data.train: "a\\u0000b" has a NUL character',
        ),
    ],
)
def test_numbers_beyond_reason_are_refused(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    config = changed({**changes, "train_batch_size": None})
    del config["train_batch_size"]
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(written(tmp_path, config))
    assert str(caught.value).startswith(line), caught.value


@pytest.mark.parametrize(
    ("world", "problem"), [(0, "0 is not positive"), (10**30, f"{10**30} is too many ranks")]
)
def test_wrong_world_sizes(world: int, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^world size: {problem}"):
        RunConfig.load(written(tmp_path), world_size=world)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero_tp.evaluation": {"interval": 5}}, "zero_tp.evaluation.interval"),
        ({"zero_tp.evaluation": {"batches": 5}}, "zero_tp.evaluation.batches"),
        ({"zero_tp.evaluation": {"task_limit": 5}}, "zero_tp.evaluation.task_limit"),
        (
            {"zero_tp.evaluation": {"task_include_path": "x"}},
            "zero_tp.evaluation.task_include_path",
        ),
        (
            {"zero_tp.evaluation": {"task_data": {"lambada": "x"}}},
            "zero_tp.evaluation.task_data.lambada",
        ),
        (
            {
                "zero_tp.evaluation": {
                    "interval": 5,
                    "tasks": ["a"],
                    "task_data": {"a": "x"},
                    "task_limit": 3,
                }
            },
            None,
        ),
        (
            {"zero_tp.evaluation": {"interval": 5, "batches": 2}, "zero_tp.data.validation": "v"},
            None,
        ),
        ({}, None),
    ],
)
def test_what_has_no_effect_is_said(
    changes: dict[str, Any], key: str | None, tmp_path: Path
) -> None:
    config = RunConfig.load(written(tmp_path, changed(changes)))
    said = [line.partition(": ")[0] for line in config.without_effect()]
    assert said == ([key] if key else [])
    assert [
        line.split()[2]
        for line in describe(config, tmp_path).splitlines()
        if line.startswith("no effect")
    ] == [f"{each}:" for each in said]


def test_what_a_run_reads_and_is_absent_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout in which the quickstart ran has its data
    changes = {"zero_tp.data.validation": str(tmp_path / "v"), "zero_tp.tokenizer": str(tmp_path)}
    path = written(tmp_path, changed(changes))
    (tmp_path / "v.bin").touch()
    absent = [str(each) for each in RunConfig.load(path).missing_files()]
    assert absent == ["data/quickstart/train.bin", "data/quickstart/train.idx", f"{tmp_path}/v.idx"]


def test_a_check_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path of two parts that is not here may be a name there: a run asks, a check or
    a plan does not.
    """

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.HfApi.repo_info", never)
    path = written(tmp_path, changed({"zero_tp.tokenizer": "data/tokenizer"}))
    notes = [
        line
        for line in describe(RunConfig.load(path), tmp_path).splitlines()
        if "tokenizer" in line
    ]
    assert notes == [
        "not here   data/tokenizer, which a run needs and asks the Hugging Face hub for"
    ]
    with pytest.raises(
        ConfigError,
        match=r"^zero_tp.tokenizer: no directory data/tokenizer, .* \(the hub was asked\)",
    ):
        RunConfig.load(path).with_pinned_tokenizer()


def refusal_of(
    tmp_path: Path, place: tuple[Any, ...], value: Any, base: dict[str, Any] = BASE
) -> str:
    """What a config is refused with that has this value there; "" where it is accepted."""
    config = copy.deepcopy(base)
    at(config, place[:-1])[place[-1]] = copy.deepcopy(value)
    try:
        RunConfig.load(written(tmp_path, config), world_size=1)
    except ConfigError as error:
        return str(error)
    return ""


def test_refusals_are_short_and_in_json_s_words(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    cases: list[tuple[tuple[Any, ...], Any, dict[str, Any]]] = [
        (place, value, BASE) for place in places(BASE)[1:] for value in chance.sample(ODD, 3)
    ]
    llama = copy.deepcopy(BASE)
    llama["zero_tp"]["model"] = LLAMA
    cases += [
        (("zero_optimization",), {"a": 1}, BASE),
        (("fp16",), {"enabled": True, "loss_scale": True}, BASE),
        (("zero_tp", "x" * 300), 1, BASE),
        (("zero_tp", "model", "y"), 1, BASE),
        (("zero_tp", "model", "hidden_size"), 1, llama),
    ]
    refused = [(case, refusal_of(tmp_path, *case)) for case in cases]
    assert all(text for _, text in refused[-5:])
    for case, text in refused:
        assert len(text) <= LONGEST_REFUSAL, (case[:2], text)
