"""A script of transformers' Trainer that plain Trainer and ours both run: its model, its rows
and its arguments.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    TrainingArguments,
)

from tests.support.native import native_model, perturbed
from tests.support.tiny_models import bert_fields
from zero_tp.base.constants import IGNORE_INDEX
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
ENCODER = bert_fields(
    model_type="bert", intermediate_size=48, max_position_embeddings=64, vocab_size=101
)
FIELDS = {"causal": CAUSAL, "masked": ENCODER}


def save_model(kind: str, folder: Path) -> Path:
    """A directory of Hugging Face's model, random everywhere."""
    fields = dict(FIELDS[kind])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(3)
    perturbed(native_model(config)).save_pretrained(folder)
    return folder


def open_model(kind: str, directory: str) -> Any:
    return (AutoModelForCausalLM if kind == "causal" else AutoModelForPreTraining).from_pretrained(
        directory
    )


def rows_of(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of different lengths, of whose tokens different shares have labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = int(torch.randint(6, 20, (), generator=generator))
        tokens = torch.randint(5, 101, (length,), generator=generator)
        labels = tokens.clone()
        labels[torch.rand(length, generator=generator) < (0.3 if kind == "causal" else 0.7)] = (
            IGNORE_INDEX
        )
        labels[1] = tokens[1]
        row: dict[str, Any] = {"input_ids": tokens.tolist(), "labels": labels.tolist()}
        rows.append(row | ({"next_sentence_label": number % 2} if kind == "masked" else {}))
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded to the longest row, whatever divides it."""
    longest = max(len(row["input_ids"]) for row in rows)

    def column(name: str, padding: int) -> Tensor:
        return torch.tensor([row[name] + [padding] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor(
        [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    )
    batch = {
        "input_ids": column("input_ids", 0),
        "labels": column("labels", IGNORE_INDEX),
        "attention_mask": mask,
    }
    if "next_sentence_label" in rows[0]:
        batch["next_sentence_label"] = torch.tensor([row["next_sentence_label"] for row in rows])
    return batch


def right(prediction: Any) -> dict[str, float]:
    """The share of labelled tokens whose logits are highest; of an encoder, the mean of its two
    shares.
    """
    shares = []
    logits = (
        prediction.predictions
        if isinstance(prediction.predictions, tuple)
        else (prediction.predictions,)
    )
    labels = (
        prediction.label_ids if isinstance(prediction.label_ids, tuple) else (prediction.label_ids,)
    )
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
    collator: Any = collate,
    **arguments: Any,
) -> tuple[list[dict[str, float]], Any]:
    """What a person writes. `trainer_class` is a class, or one with more arguments."""
    settings = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
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
        **{
            "learning_rate": 1e-2,
            "optim": "adamw_torch",
            "eval_strategy": "steps",
            "save_strategy": "no",
            "per_device_eval_batch_size": 2,
            **arguments,
        },
    )
    trainer = trainer_class(
        open_model(kind, directory),
        settings,
        data_collator=collator,
        train_dataset=rows_of(kind, 24, 1),
        eval_dataset=rows_of(kind, 16, 2),
        compute_metrics=right,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(Path(folder) / "model"))
    columns = (
        "loss",
        "grad_norm",
        "learning_rate",
        "eval_loss",
        "eval_right",
        "eval_rows",
        "epoch",
        "step",
    )
    return [
        {key: line[key] for key in columns if key in line} for line in trainer.state.log_history
    ], trainer


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
    kind: str,
    directory: str,
    folder: str,
    tensor: int,
    stage: int,
    micro: int,
    accumulation: int,
    **arguments: Any,
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
        text = (
            trainer.model.generate(prompt, max_new_tokens=5, do_sample=False)
            if kind == "causal"
            else prompt
        )
        return history, text, trainer.model.topology.describe()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
