"""DeepSpeed's `optimizer` and `scheduler` blocks in ZeroTPTrainer, against transformers' Trainer
under DeepSpeed.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from tests.support.plain_trainer import BATCH, plugin_of
from tests.support.pools import Pools
from tests.support.settings import gpt2_config
from tests.support.trainer_scripts import collate, rows_of
from tests.tiers import in_tiers
from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.parallel.topology import Topology
from zero_tp.tools.trainer import ZeroTPTrainer
from zero_tp.tools.trainer.deepspeed_arguments import fill_left_out_keys
from zero_tp.tools.trainer.tensor_parallel_accelerator import _sharded_optimizer, finalized_settings

LINEAR = {"warmup_type": "linear", "warmup_num_steps": 2, "warmup_min_lr": 0.0}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {**LINEAR, "warmup_num_steps": 4, "warmup_max_lr": "auto"},
    "WarmupDecayLR": {**LINEAR, "warmup_max_lr": "auto", "total_num_steps": "auto"},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": "auto", "warmup_min_ratio": 0.1},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 2},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
}
COLUMNS = ("loss", "learning_rate")


def logs(
    trainer_class: Any, folder: str, scheduler: dict[str, Any], micro: int, **options: Any
) -> list[Any]:
    """The rates and losses of a script's steps."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 1},
        "scheduler": scheduler,
        "gradient_clipping": "auto",
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    resume = options.pop("resume", None)
    try:
        args = TrainingArguments(
            output_dir=folder,
            deepspeed=config,
            use_cpu=True,
            per_device_train_batch_size=micro,
            max_steps=5,
            learning_rate=0.01,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            optim="adamw_torch",
            **{"save_strategy": "no", **options},
        )
        torch.manual_seed(3)
        model = GPT2LMHeadModel(gpt2_config(n_layer=1, vocab_size=101, initializer_range=0.3))
        trainer = trainer_class(
            model, args, data_collator=collate, train_dataset=rows_of("causal", 24, 1)
        )
        trainer.train(resume_from_checkpoint=resume)
        return [
            [line[name] for name in COLUMNS] for line in trainer.state.log_history if "loss" in line
        ]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def schedules(folder: str, tensor: int, name: str) -> tuple[list[Any], list[Any], list[Any]]:
    """(ours on the grid, ours resumed at step 2, plain Trainer's under DeepSpeed on DP ranks) of
    a schedule.
    """
    ours = partial(ZeroTPTrainer, tensor_parallel=tensor)
    params = SCHEDULERS[name]
    block = {"type": name, "params": params}
    # transformers refuses another warm-up than the block's
    warmup = {"warmup_steps": params.get("warmup_num_steps", 0)}
    # First, because DeepSpeed's engines without an mpu cannot follow one with it.
    plain = logs(Trainer, folder, block, 2, **warmup)
    options = {**warmup, "save_strategy": "steps", "save_steps": 2}
    whole = logs(ours, folder, block, 2 * tensor, **options)
    again = logs(ours, folder, block, 2 * tensor, **warmup, resume=f"{folder}/checkpoint-2")
    return whole, again, plain


@pytest.mark.parametrize("name", in_tiers(list(SCHEDULERS), ["WarmupLR"]))
def test_a_scheduler_block_has_the_rates_of_trainer_under_deepspeed(
    ranks: Pools, tmp_path: Path, name: str
) -> None:
    """Both the rates that it reports and those that it trains at, which the losses follow."""
    for whole, resumed, plain in ranks(2).run(schedules, str(tmp_path), 2, name):
        if name == "WarmupLR":
            expected = [0, 0.0025, 0.005, 0.0075, 0.01]
            assert [rate for _, rate in plain] == pytest.approx(expected)
        assert len(plain) == len(whole) == len(resumed) == 5
        for line, again, wanted in zip(whole, resumed, plain, strict=True):
            assert line == pytest.approx(wanted, rel=1e-5)
            assert again == pytest.approx(wanted, rel=1e-5)


def arguments(folder: Path, **options: Any) -> Any:
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        weight_decay=0.3,
        warmup_steps=2,
        adam_beta2=0.9,
        adam_epsilon=1e-3,
        learning_rate=0.02,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=3,
        **options,
    )


ADAM = ("lr", "betas", "eps", "weight_decay")
WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
LEFT_OUT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"optimizer": {"type": "AdamW"}}, {"optimizer": ADAM}),
    (
        {"optimizer": {"type": "adam", "params": {"torch_adam": True, "lr": 0.02}}},
        {"optimizer": ADAM[1:]},
    ),
    ({"optimizer": {"type": "SGD", "params": {}}}, {"optimizer": ("lr", "weight_decay")}),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, {"scheduler": WARMUP}),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}},
        {"scheduler": WARMUP[:2]},
    ),
    ({"scheduler": {"type": "WarmupDecayLR"}}, {"scheduler": (*WARMUP, "total_num_steps")}),
    (
        {"scheduler": {"type": "WarmupCosineLR"}},
        {"scheduler": ("warmup_num_steps", "total_num_steps")},
    ),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}}}, {}),
    ({"bf16": {}}, {"bf16": "enabled"}),
]
"""Blocks of DeepSpeed's config, and the keys in them that stand for training arguments and are
left out.
"""


@pytest.mark.parametrize(("blocks", "keys"), LEFT_OUT)
def test_keys_that_are_left_out_count_as_auto(tmp_path: Path, blocks: Any, keys: Any) -> None:
    """The reference is transformers' own filling of a config with every one of them written
    "auto".
    """
    written: dict[str, Any] = {"zero_optimization": {"stage": 1}, **copy.deepcopy(blocks)}
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    auto = {**copy.deepcopy(written), **dict.fromkeys(batch, "auto")}
    for block, names in keys.items():
        target = auto[block] if block == "bf16" else auto[block].setdefault("params", {})
        target |= dict.fromkeys([names] if isinstance(names, str) else names, "auto")
    args = arguments(tmp_path, bf16="bf16" in blocks)
    expected, found = HfTrainerDeepSpeedConfig(auto), HfTrainerDeepSpeedConfig(written)
    expected.trainer_config_process(args)
    args.deepspeed = written
    found.config["gradient_accumulation_steps"] = 1  # as accelerate does
    found.trainer_config_process(args)
    fill_left_out_keys(found, args)
    for config in (expected, found):
        config.trainer_config_finalize(args, None, 10)
    assert found.config == expected.config
    assert "auto" not in str(found.config)


def test_a_written_key_that_differs_is_refused_by_transformers(tmp_path: Path) -> None:
    args, written = (
        arguments(tmp_path),
        {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}},
    )
    found = HfTrainerDeepSpeedConfig(copy.deepcopy(written))
    args.deepspeed = written
    fill_left_out_keys(found, args)
    with pytest.raises(
        ValueError, match=r"ds optimizer\.params\.weight_decay=0\.1 vs hf weight_decay=0\.3"
    ):
        found.trainer_config_finalize(args, None, 10)


@pytest.mark.parametrize(
    ("block", "argument"), [("optimizer", "optim_args"), ("scheduler", "lr_scheduler_kwargs")]
)
def test_arguments_that_a_block_replaces_are_refused(block: str, argument: str) -> None:
    args: Any = SimpleNamespace(deepspeed=None, **{argument: {"num_cycles": 2}})
    config: Any = SimpleNamespace(config={block: {"type": "WarmupLR"}})
    with pytest.raises(
        UserError, match=rf"^TrainingArguments\.{argument}: DeepSpeed's config has a block {block}"
    ):
        fill_left_out_keys(config, args)


def test_a_schedule_of_transformers_in_a_block_is_refused() -> None:
    """DeepSpeed refuses it too, in plain Trainer."""
    block = {"type": "linear", "params": {"num_warmup_steps": 1, "num_training_steps": 4}}
    with pytest.raises(
        UserError,
        match=r"^scheduler\.type: refused as a schedule of transformers .* use lr_scheduler",
    ):
        finalized_settings(plugin_of(BATCH | {"scheduler": block}), Topology(world=1), 1.0)


REASONS = {
    "RMSprop": "no run with it was compared with the plain model",
    "Adagrad": "torch's Adagrad creates its states for the model's own tensors",
}


@pytest.mark.parametrize("name", REASONS)
def test_an_optimizer_that_is_not_built_has_its_own_reason(name: str) -> None:
    """Both are element-wise."""
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(
        UserError, match=rf"^optimizer {name} of torch is refused: {REASONS[name]}.*; use one of "
    ):
        _sharded_optimizer(cast(Any, optimizer), DeepSpeedSettings())
