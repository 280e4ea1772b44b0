"""`ZeroTPTrainer(expert_parallel=…)` against plain Trainer with transformers' own Mixtral."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import AutoConfig, Trainer, TrainingArguments

from tests.support.compare import check_close
from tests.support.experts import fields
from tests.support.native import native_model, perturbed
from tests.support.pools import Pools
from tests.support.trainer_scripts import ROWS, collate, deepspeed, open_model, rows_of, script
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.tools.trainer import ZeroTPTrainer

FIELDS: dict[str, Any] = fields(
    num_local_experts=4,
    num_hidden_layers=2,
    vocab_size=101,
    max_position_embeddings=64,
    # Each micro-batch has a load-balancing loss of its own, so it depends on the grid.
    output_router_logits=False,
)
LIMIT = 90.0
"""Seconds of an idle machine."""


def save_model(folder: Path, **changes: Any) -> str:
    fields = {**FIELDS, **changes}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(3)
    perturbed(native_model(config)).save_pretrained(folder)
    return str(folder)


def plain_run(folder: Path, **options: Any) -> tuple[str, list[dict[str, float]], Any]:
    directory = save_model(folder / "start")
    options = {"per_device_eval_batch_size": 4, **options}
    history, _ = script(Trainer, "causal", directory, str(folder), ROWS // 2, 2, **options)
    return directory, history, load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]], Any]:
    return plain_run(tmp_path_factory.mktemp("plain"))


def train(
    directory: str, folder: str, tensor: int, expert: int, stage: int, **options: Any
) -> list[dict[str, float]]:
    """One script on four ranks; its batches have as many rows as the plain one's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    blocks = options.pop("blocks", {})
    degrees: dict[str, Any] = {"tensor_parallel": tensor, "expert_parallel": expert}
    try:
        history, _ = script(
            partial(ZeroTPTrainer, **degrees, param_groups=options.pop("param_groups", ())),
            "causal",
            directory,
            folder,
            ROWS // 2 // (4 // tensor),
            2,
            deepspeed={**deepspeed(stage), **blocks},
            **{"per_device_eval_batch_size": tensor, **options},
        )
        return history
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def check(history: list[dict[str, float]], folder: Path, reference: tuple[Any, ...]) -> None:
    """The log and the weights are those of plain Trainer."""
    _, expected, weights = reference
    assert [sorted(line) for line in history] == [sorted(line) for line in expected]
    for line, wanted in zip(history, expected, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5), (line, wanted)
    check_close(load_file(folder / "model" / "model.safetensors"), weights)


CASES = [(tensor, expert, stage) for tensor, expert in ((1, 2), (1, 4), (2, 2)) for stage in (1, 2)]


@THOROUGH
@pytest.mark.parametrize(("tensor", "expert", "stage"), CASES)
def test_the_same_script_gives_the_same(
    ranks: Pools, plain: tuple[Any, ...], tmp_path: Path, tensor: int, expert: int, stage: int
) -> None:
    folder = str(tmp_path)
    for history in ranks(4).run(train, plain[0], folder, tensor, expert, stage, timeout=LIMIT):
        check(history, tmp_path, plain)


SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1}


@pytest.mark.thorough
@pytest.mark.parametrize(("tensor", "stage"), [(1, 2), (2, 1)])
def test_sgd_clips_by_the_norm_of_all_experts(
    ranks: Pools, tmp_path: Path, tensor: int, stage: int
) -> None:
    """DeepSpeed's own step, and not `AdamWUpdate`, adds up its norm."""
    reference = plain_run(tmp_path / "plain", **SGD)
    arguments = (reference[0], str(tmp_path), tensor, 2, stage)
    for history in ranks(4).run(train, *arguments, timeout=LIMIT, **SGD):
        check(history, tmp_path, reference)


RESUMED = [((1, 2, 1), (1, 1, 1)), ((1, 1, 1), (2, 2, 2)), ((2, 2, 2), (1, 4, 1))]


@THOROUGH
@THOROUGH
@pytest.mark.parametrize(("before", "after"), RESUMED)
def test_a_checkpoint_resumes_with_another_expert_size(
    ranks: Pools,
    plain: tuple[Any, ...],
    tmp_path: Path,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
) -> None:
    folder = str(tmp_path)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    ranks(4).run(train, plain[0], folder, *before, timeout=LIMIT, **saving)
    resume: dict[str, Any] = {"resume": f"{folder}/checkpoint-2"}
    for history in ranks(4).run(train, plain[0], folder, *after, timeout=LIMIT, **resume):
        check(history, tmp_path, plain)


GROUPS: list[dict[str, Any]] = [
    {"pattern": "q_proj", "lr_scale": 0.5},
    # Of these DeepSpeed gets two groups: experts are a part of the first, and all of the second.
    {"pattern": r"layers\.0\.", "lr_scale": 2.0, "weight_decay": 0.0},
    {"pattern": "experts", "lr_scale": 0.25},
]
ADAMW = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
BLOCKS: dict[str, Any] = {"none": {}, "AdamW": ADAMW, "both": WARMUP | ADAMW, "offload": OFFLOAD}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BLOCKS)
def test_groups_with_rates_of_their_own_resume_with_another_expert_size(
    ranks: Pools, plain: tuple[Any, ...], tmp_path: Path, name: str
) -> None:
    """A run of the same groups without expert parallelism is test_trainer_groups.py's."""
    options: dict[str, Any] = {"param_groups": GROUPS, "blocks": BLOCKS[name], "timeout": LIMIT}
    pool, whole = ranks(4), tmp_path / "whole"
    history = pool.run(train, plain[0], str(whole), 1, 1, 1, **options)[0]
    reference = plain[0], history, load_file(whole / "model" / "model.safetensors")
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    for before, after in (((1, 2, 1), (1, 1, 2)), ((1, 1, 1), (2, 2, 1))):
        folder = tmp_path / f"{before[1]}"
        pool.run(train, plain[0], str(folder), *before, **saving, **options)
        resume: dict[str, Any] = {"resume": f"{folder}/checkpoint-2"}
        for found in pool.run(train, plain[0], str(folder), *after, **resume, **options):
            check(found, folder, reference)


# --- uneven data ----------------------------------------------------------------------------------


class Stream(IterableDataset[dict[str, Any]]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from rows_of("causal", 7, 2)


def uneven(directory: str, folder: str, tensor: int, expert: int) -> list[Any]:
    """Evaluate and predict rows that no number of ranks divides, before and after an epoch with a
    short last batch. Save the model before.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        settings = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            per_device_eval_batch_size=2,
            num_train_epochs=1,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            deepspeed=deepspeed(1),
        )
        trainer = ZeroTPTrainer(
            open_model("causal", directory),
            settings,
            tensor_parallel=tensor,
            expert_parallel=expert,
            data_collator=collate,
            train_dataset=rows_of("causal", 11, 1),
            eval_dataset=rows_of("causal", 7, 2),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.save_model(f"{folder}/untrained")
        trainer.train()
        predicted = trainer.predict(rows_of("causal", 5, 2))
        streamed = trainer.evaluate(Stream())["eval_loss"]
        return [before, trainer.state.global_step, len(predicted.label_ids), streamed]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@THOROUGH
@pytest.mark.parametrize(("tensor", "expert"), [(1, 4), (1, 2), (2, 2)])
def test_short_batches_leave_no_rank_waiting(
    ranks: Pools, plain: tuple[Any, ...], tmp_path: Path, tensor: int, expert: int
) -> None:
    runs = {
        degree: ranks(4).run(uneven, plain[0], str(tmp_path), tensor, degree, timeout=LIMIT)
        for degree in (1, expert)
    }
    for without, found in zip(runs[1], runs[expert], strict=True):
        assert found == pytest.approx(without, rel=1e-5)
        assert found[2] == 5
    # The last run is that with divided experts.
    written, read = (
        load_file(Path(folder, "model.safetensors"))
        for folder in (tmp_path / "untrained", plain[0])
    )
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in read)


# --- refusals -------------------------------------------------------------------------------------


def refusal(directory: str, folder: str, *grid: int, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        train(directory, folder, *grid, **options)
    return str(refused.value)


def test_a_degree_of_zero_is_refused(ranks: Pools, plain: tuple[Any, ...], tmp_path: Path) -> None:
    for found in ranks(4).run(refusal, plain[0], str(tmp_path), 1, 0, 1, timeout=LIMIT):
        assert found == "zero_tp.parallel.expert: 0 is not positive"


def test_uneven_batches_are_refused(ranks: Pools, plain: tuple[Any, ...], tmp_path: Path) -> None:
    options: dict[str, Any] = {"accelerator_config": {"even_batches": False}}
    for found in ranks(4).run(refusal, plain[0], str(tmp_path), 1, 2, 1, timeout=LIMIT, **options):
        assert found.startswith("TrainingArguments.accelerator_config: even_batches is false")
