"""Cases of transformers' Trainer by seed: schedules, collators, columns, evaluation and
resuming, on one grid each.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import AutoConfig, DataCollatorWithFlattening, TrainingArguments

from tests.support.native import native_model, perturbed
from tests.support.tiny_configs import general_fields
from tests.support.tiny_models import bert_fields
from zero_tp.base.constants import IGNORE_INDEX

VOCABULARY, ROWS = 61, 4  # rows of a micro-batch of one replica in the plain run
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        **{
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
        },
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
        **{"vocab_size": VOCABULARY, "pad_token_id": None},
    },
    "gpt2": {
        **{
            "model_type": "gpt2",
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "n_positions": 64,
            "vocab_size": VOCABULARY,
        },
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "sentences": bert_fields(
        **{
            "model_type": "bert",
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 2,
        },
        **{"intermediate_size": 24, "max_position_embeddings": 64, "vocab_size": VOCABULARY},
    ),
}
for _kind, _type in (("linear attention", "qwen3_5_text"), ("latents", "youtu")):
    MODELS[_kind] = general_fields(_type) | {"vocab_size": VOCABULARY, "pad_token_id": None}
MODELS["masked"] = MODELS["sentences"] | {"architectures": ["BertForMaskedLM"]}
GRIDS = {"TP 1": (1, 1), "TP 2 + SP": (2, 2), "DP 2": (2, 1)}
"""Grid → (ranks, TP degree)."""
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("cosine_with_restarts", {"num_cycles": 2}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-4}),
    ("cosine_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-3, "warmup_lr_rate": 0.3}),
    ("warmup_stable_decay", {"num_decay_steps": 1}),
    ("reduce_lr_on_plateau", {"patience": 0}),
]
CYCLE = {
    "cycle_min_lr": 1e-3,
    "cycle_max_lr": 1e-2,
    "cycle_first_step_size": 2,
    "cycle_momentum": True,
}
BLOCKS: list[dict[str, Any]] = [
    {"type": "WarmupLR", "params": {}},
    {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_num_steps": 3}},
    {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}},
    {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "cos_min_ratio": 0.1}},
    {"type": "OneCycle", "params": CYCLE},
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2}},
]
"""DeepSpeed's schedules, some without the keys that stand for training arguments."""


@dataclasses.dataclass(frozen=True)
class TrainerCase:
    """One script: the same for both trainers but for the ranks, and the rows of a rank.

    Attributes:
        grid: a key of `GRIDS`. kind: a key of `MODELS`.
        arguments: of TrainingArguments, without batch sizes.
        rows: per micro-batch and evaluation batch of the plain run.
        columns: of the rows beside `input_ids` and `labels`.
        stage: of ZeRO. blocks: of DeepSpeed's config, optimizer and schedule.
        resume: the step that a second trainer resumes at; 0: none does.
        metrics: compute metrics.
        flattened: rows are packed by DataCollatorWithFlattening. multiple: padded rows are as long
            as a multiple of it.
        unlabelled: rows of the evaluation without labels, at its end.
    """

    grid: str
    kind: str
    arguments: dict[str, Any]
    train_rows: int = 4 * ROWS
    eval_rows: int = 12
    eval_batch: int = 4
    columns: tuple[str, ...] = ()
    stage: int = 1
    blocks: dict[str, Any] = dataclasses.field(default_factory=dict)
    resume: int = 0
    metrics: bool = False
    flattened: bool = False
    multiple: int = 1
    unlabelled: int = 0

    def __str__(self) -> str:
        changed = {
            key: value
            for key, value in dataclasses.asdict(self).items()
            if value not in ((), {}, 0, False)
        }
        return ", ".join(f"{key} {value}" for key, value in changed.items())


def draw(seed: int) -> TrainerCase:
    """Draw a case that plain Trainer and ours both accept."""
    pick = random.Random(seed)
    grid = pick.choice(list(GRIDS))
    kind = pick.choice(["llama", "llama", "gpt2", "masked", "sentences"])
    in_blocks = grid == "TP 1" and pick.random() < 0.4
    evaluates = pick.choice(["no", "steps", "steps", "epoch"])
    # DP ranks fill up an incomplete batch with other rows, in plain Trainer too.
    even = grid == "DP 2"
    # Plain Trainer adds up the micro-batches' mean losses of an encoder, which ours divides by a
    # step's labels.
    accumulation = 1 if kind in ("sentences", "masked") else pick.choice([1, 1, 2, 3])
    train_rows = ROWS * accumulation * pick.choice([2, 3]) + (
        0 if even else pick.choice([0, 1, ROWS])
    )
    eval_batch = pick.choice([2, 4])
    steps = pick.choice([3, 4])
    flattened = kind == "llama" and evaluates == "no" and pick.random() < 0.3
    arguments: dict[str, Any] = {
        "max_steps": steps,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 1e-2,
        "weight_decay": pick.choice([0.0, 0.1]),
        "adam_beta2": pick.choice([0.999, 0.9]),
        "adam_epsilon": 1e-3,
        "max_grad_norm": pick.choice([0.5, 1.0, 100.0]),
        "warmup_steps": pick.choice([0, 1, 2, 0.5]),
        "logging_steps": 1
        if even
        else pick.choice([1, 1, 2]),  # a rank's own loss of steps that are not logged
        "logging_first_step": pick.random() < 0.3,
        "dataloader_drop_last": pick.random() < 0.2,
        "optim": "adamw_torch" if in_blocks else pick.choice(["adamw_torch", "adamw_torch", "sgd"]),
        "train_sampling_strategy": pick.choice(
            ["random", "sequential", "random" if even else "group_by_length"]
        ),
        "gradient_checkpointing": pick.random() < 0.2,
        "include_num_input_tokens_seen": "no"
        if even
        else pick.choice(["no", "non_padding", "all"]),
        "seed": seed,
        "data_seed": pick.choice([None, 3]),
    }
    if not in_blocks:
        schedule, options = pick.choice(SCHEDULES)
        arguments |= {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": options}
    if flattened:
        arguments["train_sampling_strategy"] = "random"
    resume = pick.choice([0, 0, 1, 2])
    if arguments.get("lr_scheduler_type") == "reduce_lr_on_plateau":
        evaluates, resume, flattened = "steps", 0, False
        arguments["metric_for_best_model"] = "eval_loss"
    if evaluates != "no":
        arguments |= {
            "eval_strategy": evaluates,
            "eval_steps": pick.choice([1, 2]) if evaluates == "steps" else None,
            "eval_on_start": pick.random() < 0.2,
            "eval_accumulation_steps": pick.choice([None, 1]),
            "eval_do_concat_batches": pick.random() < 0.8,
            "batch_eval_metrics": pick.random() < 0.2,
            "include_for_metrics": pick.choice([[], [], ["loss"] if even else ["loss", "inputs"]]),
        }
    if resume and not in_blocks and pick.random() < 0.3:
        arguments["save_only_model"] = True
    if resume and pick.random() < 0.3:
        arguments["ignore_data_skip"] = True
    if (
        resume
        and evaluates == "steps"
        and "save_only_model" not in arguments
        and pick.random() < 0.5
    ):
        arguments |= {
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "eval_steps": 1,
        }
    columns = [
        name
        for name in ("extra", "attention_mask", "token_type_ids", "position_ids")
        if pick.random() < 0.4
    ]
    if flattened:
        columns = [name for name in columns if name == "extra"]
    if even and kind in ("sentences", "masked") and "attention_mask" not in columns:
        # Without it tokens see the padding, which differs between replicas.
        columns.append("attention_mask")
    if kind in ("llama", "gpt2") and "extra" not in columns and pick.random() < 0.3:
        arguments["remove_unused_columns"] = False
    blocks: dict[str, Any] = {}
    if in_blocks:
        blocks["scheduler"] = pick.choice(BLOCKS)
        written = blocks["scheduler"]["params"].get("warmup_num_steps")
        arguments["warmup_steps"] = arguments["warmup_steps"] if written is None else written
        if pick.random() < 0.5:
            blocks["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
    return TrainerCase(
        grid=grid,
        kind=kind,
        arguments=arguments,
        train_rows=train_rows,
        eval_rows=eval_batch * pick.choice([2, 3]) + (0 if even else pick.choice([0, 1])),
        eval_batch=eval_batch,
        columns=tuple(columns),
        stage=pick.choice([1, 1, 2, 3, 0]),
        blocks=blocks,
        resume=resume,
        metrics=evaluates != "no" and pick.random() < 0.6,
        flattened=flattened,
        multiple=pick.choice([1, 1, 8]),
        unlabelled=pick.choice([0, 0, 0, eval_batch])
        if evaluates != "no" and kind != "sentences"
        else 0,
    )


def save_model(kind: str, folder: Path) -> str:
    """Save Hugging Face's model of a kind, random everywhere, and return its directory."""
    fields = dict(MODELS[kind])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(3)
    perturbed(native_model(config)).save_pretrained(folder)
    return str(folder)


def rows_of(case: TrainerCase, count: int, seed: int, unlabelled: int = 0) -> list[dict[str, Any]]:
    """Return rows of different lengths, of whose tokens different shares have labels."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for number in range(count):
        length = int(torch.randint(6, 14, (), generator=generator))
        tokens = torch.randint(5, VOCABULARY, (length,), generator=generator)
        labels = tokens.clone()
        labels[torch.rand(length, generator=generator) < 0.3] = IGNORE_INDEX
        labels[1] = tokens[1]
        if number >= count - unlabelled:
            labels[:] = IGNORE_INDEX
        row: dict[str, Any] = {"input_ids": tokens.tolist(), "labels": labels.tolist()}
        types = [
            (number + place) % (VOCABULARY if case.kind == "gpt2" else 2) for place in range(length)
        ]
        extra = {
            "extra": [number] * length,
            "token_type_ids": types,
            "position_ids": list(range(length)),
        }
        extra["attention_mask"] = [1] * length
        row |= {name: extra[name] for name in case.columns}
        if case.kind in ("sentences", "masked"):  # plain Trainer drops it for BertForMaskedLM
            row["next_sentence_label"] = number % 2
        rows.append(row)
    return rows


@dataclasses.dataclass(frozen=True)
class Padded:
    """A collator that pads every column of a row, to the longest row or to a multiple."""

    multiple: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        longest = -(-longest // self.multiple) * self.multiple
        batch = {}
        for name, first in rows[0].items():
            if isinstance(first, list):
                padding = IGNORE_INDEX if name == "labels" else 0
                batch[name] = torch.tensor(
                    [row[name] + [padding] * (longest - len(row[name])) for row in rows]
                )
            else:
                batch[name] = torch.tensor([row[name] for row in rows])
        return batch


class Accuracy:
    """Share of labelled tokens whose logits are highest, of whole sets and batch by batch."""

    def __init__(self) -> None:
        self.right = self.labelled = 0

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        predictions, labels = prediction.predictions, prediction.label_ids
        pairs = (
            zip(predictions, labels, strict=True)
            if isinstance(predictions, list)
            else [(predictions, labels)]
        )
        figures = {}
        for scores, wanted in pairs:
            for logits, targets in zip(_as_tuple(scores), _as_tuple(wanted), strict=True):
                logits, targets = torch.as_tensor(logits), torch.as_tensor(targets)
                counted = targets != IGNORE_INDEX
                self.right += int((logits.argmax(-1) == targets)[counted].sum())
                self.labelled += int(counted.sum())
        for name in ("losses", "inputs"):
            values = getattr(prediction, name, None)
            # The whole batch, where metrics are computed batch by batch.
            if isinstance(values, dict):
                values = values["input_ids"]
            if values is not None and not isinstance(values, list):
                figures[name] = float(torch.as_tensor(values).double().nanmean())
        if not compute_result:
            return {}
        figures["right"] = self.right / max(self.labelled, 1)
        figures["labelled"] = float(self.labelled)
        self.right = self.labelled = 0
        return figures


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def deepspeed_config(case: TrainerCase, *, auto: bool) -> dict[str, Any]:
    """Return the case's DeepSpeed config.

    Args:
        auto: write "auto" for each key that stands for a training argument; ours leaves most of
            them out.
    """
    stage = 1 if auto else case.stage  # DeepSpeed has no gradient norm at stage 0 in fp32
    config: dict[str, Any] = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}
    }
    blocks = {
        name: {**block, "params": dict(block["params"])} for name, block in case.blocks.items()
    }
    # Where transformers opens a model under ZeRO-3, it requires batch sizes.
    if auto or case.stage == 3:
        batch = (
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "train_batch_size",
        )
        config |= dict.fromkeys((*batch, "gradient_clipping"), "auto")
    if auto:
        names: dict[str, tuple[str, ...]] = {"optimizer": ("lr", "betas", "eps", "weight_decay")}
        keys = ("warmup_num_steps", "warmup_min_lr", "warmup_max_lr", "total_num_steps")
        kind = case.blocks.get("scheduler", {}).get("type")
        of_type = {
            "WarmupLR": keys[:3],
            "WarmupDecayLR": keys,
            "WarmupCosineLR": (keys[0], keys[3]),
        }
        names["scheduler"] = of_type.get(kind, ())
        for name, block in blocks.items():
            block["params"] = dict.fromkeys(names[name], "auto") | block["params"]
    return config | blocks


def run(
    trainer_class: Any, model: Any, case: TrainerCase, folder: Path, replicas: int, deepspeed: Any
) -> list[dict[str, Any]]:
    """Run the script of a case, save the model in the folder's `model`, and return its log without
    times.

    Args:
        replicas: DP ranks, which share the rows of the plain run's batches.
        model: makes the model.
    """
    options: dict[str, Any] = {}
    if "eval_strategy" in case.arguments:
        options["eval_dataset"] = rows_of(case, case.eval_rows, 2, case.unlabelled)
    if case.metrics:
        options["compute_metrics"] = Accuracy()
    for start in (None, case.resume) if case.resume else (None,):
        AcceleratorState._reset_state(reset_partial_state=True)
        settings = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=ROWS // replicas,
            per_device_eval_batch_size=case.eval_batch // replicas,
            report_to=[],
            disable_tqdm=True,
            deepspeed=deepspeed,
            **{
                "save_strategy": "steps" if case.resume else "no",
                "save_steps": max(case.resume, 1),
                **case.arguments,
            },
        )
        trainer = trainer_class(
            model(),
            settings,
            data_collator=DataCollatorWithFlattening() if case.flattened else Padded(case.multiple),
            train_dataset=rows_of(case, case.train_rows, 1),
            **options,
        )
        trainer.train(
            resume_from_checkpoint=None if start is None else str(folder / f"checkpoint-{start}")
        )
    trainer.save_model(str(folder / "model"))
    return [_without_times(line, case) for line in trainer.state.log_history]


def _without_times(line: dict[str, Any], case: TrainerCase) -> dict[str, Any]:
    """Return a line of the log with an evaluation's number of steps, and without what a clock or
    padding changes.
    """
    varying = (
        "runtime",
        "per_second",
        "preparation_time",
        *(("total_flos",) if case.grid == "DP 2" else ()),
    )
    steps = {}
    if line.get("eval_steps_per_second"):
        steps["eval_steps"] = round(line["eval_steps_per_second"] * line["eval_runtime"])
    return {
        key: value for key, value in line.items() if not any(part in key for part in varying)
    } | steps
