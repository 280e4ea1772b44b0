"""The same script of transformers' Trainer, with the plain model in one process and on
tensor-parallel ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
)

from tests.support.compare import check_close
from tests.support.pools import Pools
from tests.support.trainer_scripts import FIELDS, ROWS, deepspeed, on_ranks, save_model, script
from tests.tiers import THOROUGH, in_tiers
from zero_tp.model.huggingface import parallel_model
from zero_tp.parallel.topology import Topology


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for kind in FIELDS:
        folder = tmp_path_factory.mktemp(kind)
        # BertForPreTraining ignores the number of labels of the micro-batches, so its step is one
        # micro-batch.
        micro, accumulation = (ROWS // 2, 2) if kind == "causal" else (ROWS, 1)
        directory = str(save_model(kind, folder / "start"))
        history, trainer = script(
            Trainer, kind, directory, str(folder), micro, accumulation, per_device_eval_batch_size=4
        )
        model = trainer.model.eval()
        prompt = torch.tensor([[7, 8, 9]])
        text = (
            model.generate(prompt, max_new_tokens=5, do_sample=False)
            if kind == "causal"
            else prompt
        )
        found[kind] = history, load_file(folder / "model" / "model.safetensors"), text, directory
    return found


def check(found: tuple[Any, ...], folder: Path, reference: tuple[Any, ...]) -> None:
    history, text, _ = found
    expected, weights, sentence, _ = reference
    assert [sorted(line) for line in history] == [sorted(line) for line in expected]
    for line, wanted in zip(history, expected, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5), (line, wanted)
    check_close(load_file(folder / "model" / "model.safetensors"), weights)
    assert torch.equal(text, sentence)


def ours(model: Any, *arguments: Any, **options: Any) -> Any:
    """transformers' own Trainer around our model, which is not split."""
    return Trainer(parallel_model(model, Topology()), *arguments, **options)


def test_trainer_saves_resumes_and_recomputes_with_our_model(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    """In one process: its checkpoints are Hugging Face's, and what it loads of them is not what
    it began with.
    """
    saving: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "per_device_eval_batch_size": 4,
    }
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    for kind, micro, accumulation in (("causal", ROWS // 2, 2), ("masked", ROWS, 1)):
        _, _, text, directory = reference = plain[kind]
        folder = tmp_path / kind
        recomputing: dict[str, Any] = {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"mode": "selective"},
        }
        history, trainer = script(
            ours, kind, directory, str(folder), micro, accumulation, **saving, **recomputing
        )
        assert trainer.model.is_activation_checkpointing
        check((history, text, ""), folder, reference)
        again, trainer = script(
            ours,
            kind,
            directory,
            str(folder),
            micro,
            accumulation,
            resume=f"{folder}/checkpoint-2",
            **saving,
            **best,
        )
        assert again[-2]["eval_loss"] == pytest.approx(history[-2]["eval_loss"], rel=1e-6)
        better = trainer.state.best_model_checkpoint
        saved = load_file(folder / "model" / "model.safetensors")
        check_close(saved, load_file(Path(better) / "model.safetensors"))
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)


def trained_by_trainer(directory: str, folder: str, stage: int | None) -> list[dict[str, float]]:
    """On DP ranks, in torch's DistributedDataParallel or DeepSpeed's ZeRO."""
    AcceleratorState._reset_state(reset_partial_state=True)
    options: dict[str, Any] = {} if stage is None else {"deepspeed": deepspeed(stage)}
    try:
        history, _ = script(ours, "causal", directory, folder, 2, 2, **options)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return history


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [None, 1, 2, 3, 0])
def test_trainer_takes_our_model_on_data_parallel_ranks(
    ranks: Pools, plain: dict[str, Any], tmp_path: Path, stage: int | None
) -> None:
    reference = plain["causal"]
    for history in ranks(2).run(trained_by_trainer, reference[3], str(tmp_path), stage):
        if stage == 0:  # whose norm DeepSpeed does not tell in fp32
            history = [
                line | {"grad_norm": was["grad_norm"]} if "grad_norm" in was else line
                for line, was in zip(history, reference[0], strict=True)
            ]
        check((history, reference[2], ""), tmp_path, reference)


CASES = [("causal", 1), ("causal", 3), ("masked", 1), ("masked", 3), ("causal", 0), ("causal", 2)]


@THOROUGH
@pytest.mark.parametrize(("kind", "stage"), in_tiers(CASES, [("masked", 1)]))
def test_the_same_script_gives_the_same(
    ranks: Pools, plain: dict[str, Any], tmp_path: Path, kind: str, stage: int
) -> None:
    """TP 2 + SP × DP 2, two micro-batches of rows of other lengths on each rank."""
    for found in ranks(4).run(on_ranks, kind, plain[kind][3], str(tmp_path), 2, stage, 2, 2):
        assert found[2] == "TP 2 × DP 2, SP"
        check(found, tmp_path, plain[kind])


def resumed(
    directory: str, folder: str, before: tuple[int, int], after: tuple[int, int]
) -> tuple[Any, ...]:
    """Trained to step 2 on one grid and ZeRO stage, and on to the last on another."""

    def train(tensor: int, stage: int, **arguments: Any) -> tuple[Any, ...]:
        arguments["per_device_eval_batch_size"] = tensor
        return on_ranks("causal", directory, folder, tensor, stage, tensor, 2, **arguments)

    train(*before, save_strategy="steps", save_steps=2)
    return train(*after, resume=f"{folder}/checkpoint-2")


@THOROUGH
@pytest.mark.parametrize(
    ("before", "after"), in_tiers([((2, 1), (4, 3)), ((2, 3), (1, 2))], [((2, 1), (4, 3))])
)
def test_a_checkpoint_goes_on_on_any_topology(
    ranks: Pools,
    plain: dict[str, Any],
    tmp_path: Path,
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    reference = plain["causal"]
    for history, text, grid in ranks(4).run(resumed, reference[3], str(tmp_path), before, after):
        assert grid.startswith(f"TP {after[0]} ")
        check((history, text, grid), tmp_path, reference)


@THOROUGH
def test_a_script_with_packed_rows_gives_the_same(
    ranks: Pools, plain: dict[str, Any], tmp_path: Path
) -> None:
    """Other rows are packed together on each side, and a step's loss is the same mean over its
    tokens.
    """
    options: dict[str, Any] = {"collator": DataCollatorWithFlattening(), "eval_strategy": "no"}
    directory = plain["causal"][3]
    expected, _ = script(
        Trainer, "causal", directory, str(tmp_path / "plain"), ROWS // 2, 2, **options
    )
    weights = load_file(tmp_path / "plain" / "model" / "model.safetensors")
    for history, *_ in ranks(2).run(
        on_ranks, "causal", directory, str(tmp_path), 2, 1, ROWS // 2, 2, **options
    ):
        for line, wanted in zip(history, expected, strict=True):
            assert line == pytest.approx(wanted, rel=1e-5), (line, wanted)
    check_close(load_file(tmp_path / "model" / "model.safetensors"), weights)
