"""Drawn scripts of transformers' Trainer, with the plain model and on TP 1, TP 2 + SP and DP 2
ranks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoConfig, Trainer

from tests.support import trainer_cases
from tests.support.compare import check_close
from tests.support.pools import Pools
from tests.support.trainer_cases import GRIDS, MODELS, TrainerCase, deepspeed_config, draw
from tests.tiers import in_tiers, seeds_in_tiers
from zero_tp.model.architectures import native_class_of
from zero_tp.tools.trainer import ZeroTPTrainer

FIRST = (0, 4, 7)
TIED = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: trainer_cases.save_model(kind, tmp_path_factory.mktemp(kind)) for kind in MODELS}


def opened(directory: str) -> Any:
    config = AutoConfig.from_pretrained(directory)
    return getattr(transformers, native_class_of(config)).from_pretrained(directory)


def outcome(case: TrainerCase, directory: str, folder: str, *, plain: bool) -> Any:
    """The log of plain Trainer, or of ours on this pool's ranks."""
    replicas, deepspeed = 1, None
    trainer_class: Any = Trainer
    if not plain:
        world, tensor = GRIDS[case.grid]
        replicas, trainer_class = world // tensor, partial(ZeroTPTrainer, tensor_parallel=tensor)
        deepspeed = deepspeed_config(case, auto=False)
    elif case.blocks:
        deepspeed = deepspeed_config(case, auto=True)
    try:
        return trainer_cases.run(
            trainer_class, partial(opened, directory), case, Path(folder), replicas, deepspeed
        )
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def check(ranks: Pools, directory: str, folder: Path, case: TrainerCase) -> None:
    arguments = (case, directory, str(folder / "plain"))
    expected = (
        ranks(1).run(outcome, *arguments, plain=True)[0]
        if case.blocks
        else outcome(*arguments, plain=True)
    )
    world, _ = GRIDS[case.grid]
    for history in ranks(world).run(outcome, *arguments[:2], str(folder / "ours"), plain=False):
        assert [sorted(line) for line in history] == [sorted(line) for line in expected], case
        for line, wanted in zip(history, expected, strict=True):
            assert line == pytest.approx(wanted, rel=1e-5, abs=1e-8, nan_ok=True), (
                f"{case}\n{line}\n{wanted}"
            )
    weights, trained = (
        load_file(folder / name / "model" / "model.safetensors") for name in ("plain", "ours")
    )
    # Under DeepSpeed transformers writes them too.
    assert weights.keys() - trained.keys() <= TIED, case
    assert all(tensor.isfinite().all() for tensor in trained.values()), case
    check_close(trained, {name: weights[name] for name in trained})


STEPS: dict[str, Any] = {
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "adam_epsilon": 1e-3,
}
EVALUATION = STEPS | {"eval_strategy": "steps", "eval_steps": 3}
SPLIT = partial(TrainerCase, "TP 2 + SP")
NAMED: dict[str, TrainerCase] = {
    "an evaluation batch without labels": SPLIT("llama", EVALUATION, unlabelled=4, metrics=True),
    "an evaluation without labels": SPLIT("masked", EVALUATION, unlabelled=12),
    "token types of GPT-2": SPLIT("gpt2", EVALUATION, columns=("token_type_ids",)),
    "weights alone resume": SPLIT("llama", STEPS | {"save_only_model": True}, resume=2),
    "weights alone resume at ZeRO-3": SPLIT(
        "gpt2", STEPS | {"save_only_model": True}, resume=1, stage=3
    ),
    "a schedule that reads the optimizer's rate": SPLIT(
        "llama", STEPS | {"lr_scheduler_type": "polynomial"}
    ),
    "linear attention": SPLIT(
        "linear attention",
        EVALUATION | {"weight_decay": 0.1},
        resume=2,
        stage=3,
        columns=("attention_mask",),
    ),
    "latents": SPLIT("latents", EVALUATION | {"weight_decay": 0.1}, resume=1, stage=2),
}
SECOND = (
    "weights alone resume",
    "weights alone resume at ZeRO-3",
    "an evaluation without labels",
    "linear attention",
    "latents",
)


@pytest.mark.parametrize(
    "name", in_tiers(list(NAMED), [name for name in NAMED if name not in SECOND])
)
def test_a_script_gives_the_same(
    ranks: Pools, directories: dict[str, str], tmp_path: Path, name: str
) -> None:
    case = NAMED[name]
    check(ranks, directories[case.kind], tmp_path, case)


@pytest.mark.parametrize("seed", seeds_in_tiers(FIRST, 60, 200))
def test_a_drawn_script_gives_the_same(
    ranks: Pools, directories: dict[str, str], tmp_path: Path, seed: int
) -> None:
    """A case with a scheduler of DeepSpeed equals plain Trainer under DeepSpeed, the others
    Trainer in one process.
    """
    case = draw(seed)
    check(ranks, directories[case.kind], tmp_path, case)
