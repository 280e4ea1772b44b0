"""The same script of transformers' Trainer, with the plain model in one process and on tensor-parallel ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from tests.support.compare import check_close
from tests.support.native import native_model, perturbed
from tests.support.pools import Pools
from tests.support.tiny_models import bert_fields
from tests.tiers import in_tiers
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.model.huggingface import parallel_model
from zero_tp.parallel.topology import Topology
from zero_tp.tools.trainer import ZeroTPTrainer

STEPS, ROWS = 4, 8  # of a step
CAUSAL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "vocab_size": 101,
    "pad_token_id": None,
}
ENCODER = bert_fields(model_type="bert", intermediate_size=48, max_position_embeddings=64, vocab_size=101)
FIELDS = {"causal": CAUSAL, "masked": ENCODER}


def saved_model(kind: str, folder: Path) -> Path:
    """A directory of Hugging Face's model, random everywhere."""
    fields = dict(FIELDS[kind])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(3)
    perturbed(native_model(config)).save_pretrained(folder)
    return folder


def opened(kind: str, directory: str) -> Any:
    return (AutoModelForCausalLM if kind == "causal" else AutoModelForPreTraining).from_pretrained(directory)


def rows_of(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of different lengths, of whose tokens different shares have labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = int(torch.randint(6, 20, (), generator=generator))
        tokens = torch.randint(5, 101, (length,), generator=generator)
        labels = tokens.clone()
        labels[torch.rand(length, generator=generator) < (0.3 if kind == "causal" else 0.7)] = IGNORE_INDEX
        labels[1] = tokens[1]
        row: dict[str, Any] = {"input_ids": tokens.tolist(), "labels": labels.tolist()}
        rows.append(row | ({"next_sentence_label": number % 2} if kind == "masked" else {}))
    return rows


def collated(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded to the longest row, whatever divides it."""
    longest = max(len(row["input_ids"]) for row in rows)

    def column(name: str, padding: int) -> Tensor:
        return torch.tensor([row[name] + [padding] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    batch = {"input_ids": column("input_ids", 0), "labels": column("labels", IGNORE_INDEX), "attention_mask": mask}
    if "next_sentence_label" in rows[0]:
        batch["next_sentence_label"] = torch.tensor([row["next_sentence_label"] for row in rows])
    return batch


def right(prediction: Any) -> dict[str, float]:
    """The share of labelled tokens whose logits are highest; of an encoder, the mean of its two shares."""
    shares = []
    logits = prediction.predictions if isinstance(prediction.predictions, tuple) else (prediction.predictions,)
    labels = prediction.label_ids if isinstance(prediction.label_ids, tuple) else (prediction.label_ids,)
    assert len(logits) == len(labels)
    for scores, wanted in zip(logits, labels, strict=True):
        if len(labels) == 1:  # causal: position i predicts the token after it
            scores, wanted = scores[:, :-1], wanted[:, 1:]
        counted = wanted != IGNORE_INDEX
        shares.append(float((scores.argmax(-1) == wanted)[counted].mean()))
    return {"right": sum(shares) / len(shares), "rows": float(len(labels[0]))}


def script(
    trainer_class: Any,
    kind: str,
    directory: str,
    folder: str,
    micro: int,
    accumulation: int,
    *,
    resume: str | None = None,
    collator: Any = collated,
    **arguments: Any,
) -> tuple[list[dict[str, float]], Any]:
    """What a person writes. `trainer_class` is a class, or one with more arguments."""
    settings = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        weight_decay=0.1,
        adam_epsilon=1e-3,
        max_grad_norm=0.5,
        warmup_steps=2,
        max_steps=STEPS,
        eval_steps=2,
        logging_steps=1,
        seed=5,
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch",
        **{"eval_strategy": "steps", "save_strategy": "no", "per_device_eval_batch_size": 2, **arguments},
    )
    trainer = trainer_class(
        opened(kind, directory),
        settings,
        data_collator=collator,
        train_dataset=rows_of(kind, 24, 1),
        eval_dataset=rows_of(kind, 16, 2),
        compute_metrics=right,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(Path(folder) / "model"))
    columns = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "eval_rows", "epoch", "step")
    return [{key: line[key] for key in columns if key in line} for line in trainer.state.log_history], trainer


def deepspeed(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def on_ranks(
    kind: str, directory: str, folder: str, tensor: int, stage: int, micro: int, accumulation: int, **arguments: Any
) -> tuple[Any, ...]:
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        history, trainer = script(
            partial(ZeroTPTrainer, tensor_parallel=tensor),
            kind,
            directory,
            folder,
            micro,
            accumulation,
            deepspeed=deepspeed(stage),
            **arguments,
        )
        prompt = torch.tensor([[7, 8, 9]])
        text = trainer.model.generate(prompt, max_new_tokens=5, do_sample=False) if kind == "causal" else prompt
        return history, text, trainer.model.topology.describe()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for kind in FIELDS:
        folder = tmp_path_factory.mktemp(kind)
        # BertForPreTraining ignores the number of labels of the micro-batches, so its step is one micro-batch.
        micro, accumulation = (ROWS // 2, 2) if kind == "causal" else (ROWS, 1)
        directory = str(saved_model(kind, folder / "start"))
        history, trainer = script(
            Trainer, kind, directory, str(folder), micro, accumulation, per_device_eval_batch_size=4
        )
        model = trainer.model.eval()
        prompt = torch.tensor([[7, 8, 9]])
        text = model.generate(prompt, max_new_tokens=5, do_sample=False) if kind == "causal" else prompt
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


def test_trainer_saves_resumes_and_recomputes_with_our_model(plain: dict[str, Any], tmp_path: Path) -> None:
    """In one process: its checkpoints are Hugging Face's, and what it loads of them is not what it began with."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "per_device_eval_batch_size": 4}
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    for kind, micro, accumulation in (("causal", ROWS // 2, 2), ("masked", ROWS, 1)):
        _, _, text, directory = reference = plain[kind]
        folder = tmp_path / kind
        recomputing: dict[str, Any] = {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"mode": "selective"},
        }
        history, trainer = script(ours, kind, directory, str(folder), micro, accumulation, **saving, **recomputing)
        assert trainer.model.is_activation_checkpointing
        check((history, text, ""), folder, reference)
        again, trainer = script(
            ours, kind, directory, str(folder), micro, accumulation, resume=f"{folder}/checkpoint-2", **saving, **best
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


@pytest.mark.parametrize(("kind", "stage"), in_tiers(CASES, [("masked", 1)]))
def test_the_same_script_gives_the_same(
    ranks: Pools, plain: dict[str, Any], tmp_path: Path, kind: str, stage: int
) -> None:
    """TP 2 + SP × DP 2, two micro-batches of rows of other lengths on each rank."""
    for found in ranks(4).run(on_ranks, kind, plain[kind][3], str(tmp_path), 2, stage, 2, 2):
        assert found[2] == "TP 2 × DP 2, SP"
        check(found, tmp_path, plain[kind])


def resumed(directory: str, folder: str, before: tuple[int, int], after: tuple[int, int]) -> tuple[Any, ...]:
    """Trained to step 2 on one grid and ZeRO stage, and on to the last on another."""

    def train(tensor: int, stage: int, **arguments: Any) -> tuple[Any, ...]:
        arguments["per_device_eval_batch_size"] = tensor
        return on_ranks("causal", directory, folder, tensor, stage, tensor, 2, **arguments)

    train(*before, save_strategy="steps", save_steps=2)
    return train(*after, resume=f"{folder}/checkpoint-2")


@pytest.mark.parametrize(("before", "after"), in_tiers([((2, 1), (4, 3)), ((2, 3), (1, 2))], [((2, 1), (4, 3))]))
def test_a_checkpoint_goes_on_on_any_topology(
    ranks: Pools, plain: dict[str, Any], tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    reference = plain["causal"]
    for history, text, grid in ranks(4).run(resumed, reference[3], str(tmp_path), before, after):
        assert grid.startswith(f"TP {after[0]} ")
        check((history, text, grid), tmp_path, reference)


def test_a_script_with_packed_rows_gives_the_same(ranks: Pools, plain: dict[str, Any], tmp_path: Path) -> None:
    """Other rows are packed together on each side, and a step's loss is the same mean over its tokens."""
    options: dict[str, Any] = {"collator": DataCollatorWithFlattening(), "eval_strategy": "no"}
    directory = plain["causal"][3]
    expected, _ = script(Trainer, "causal", directory, str(tmp_path / "plain"), ROWS // 2, 2, **options)
    weights = load_file(tmp_path / "plain" / "model" / "model.safetensors")
    for history, *_ in ranks(2).run(on_ranks, "causal", directory, str(tmp_path), 2, 1, ROWS // 2, 2, **options):
        for line, wanted in zip(history, expected, strict=True):
            assert line == pytest.approx(wanted, rel=1e-5), (line, wanted)
    check_close(load_file(tmp_path / "model" / "model.safetensors"), weights)
