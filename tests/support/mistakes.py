"""Mistakes that people make in a config: what is changed, and what the one line has to say.

`RIGHT` is a config without one. Each mistake names the key that the message starts with and words
of its remedy, so that the same table serves the unit tests and the commands.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

RIGHT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2},
    "zero_tp": {
        "model": {
            "model_type": "gpt2",
            "n_layer": 2,
            "n_embd": 64,
            "n_head": 4,
            "n_positions": 128,
            "vocab_size": 512,
        },
        "parallel": {"tensor": 2},
        "data": {"train": "data/quickstart/train", "sequence_length": 128},
        "training": {"steps": 100},
    },
}
WORLD_SIZE = 4
FROM = "from_pretrained"


class Missing:
    """In place of a value: the key is taken out."""


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One change of RIGHT, or several at once.

    Attributes:
        changes: dotted path -> value, or Missing.
        key: what the message starts with.
        words: what the message holds besides.
    """

    changes: dict[str, Any]
    key: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """A short name for the test's report."""
        return ",".join(
            f"{path}={'-' if value is Missing else value}" for path, value in self.changes.items()
        )[:70]

    def config(self) -> dict[str, Any]:
        """RIGHT with the changes."""
        return with_changes(RIGHT, self.changes)


def with_changes(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with values at dotted paths."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *blocks, name = path.split(".")
        block = config
        for part in blocks:
            block = block.setdefault(part, {})
        block[name] = copy.deepcopy(value)
        if value is Missing:
            del block[name]
    return config


def changed(changes: Mapping[str, Any] = MappingProxyType({}), **others: Any) -> dict[str, Any]:
    """RIGHT with values at dotted paths; in a keyword `__` stands for the dot."""
    return with_changes(
        RIGHT, {**changes, **{path.replace("__", "."): value for path, value in others.items()}}
    )


def written(folder: Path, config: dict[str, Any] = RIGHT, name: str = "run.json") -> Path:
    """The file of a config."""
    (folder / name).write_text(json.dumps(config))
    return folder / name


def mistake(key: str, words: str | tuple[str, ...], *, value: Any) -> Mistake:
    """A mistake at one key: the value that stands there instead."""
    return Mistake({key: value}, key, (words,) if isinstance(words, str) else words)


MISTAKES: tuple[Mistake, ...] = (
    # Names
    mistake(
        "zero_optimisation",
        ("unknown key", 'did you mean "zero_optimization"?'),
        value={"stage": 1},
    ),
    mistake("zero_tp.paralel", 'did you mean "parallel"?', value={"tensor": 2}),
    mistake("zero_tp.parallel.tensors", 'did you mean "tensor"?', value=2),
    mistake("zero_tp.training.step", 'did you mean "steps"?', value=100),
    mistake("zero_tp.tensor", 'did you mean "parallel.tensor"?', value=2),
    mistake("micro_batch_size", 'did you mean "train_micro_batch_size_per_gpu"?', value=4),
    mistake("zero_tp.model.attn_implementation", "use zero_tp.attention", value="eager"),
    mistake("zero_tp.model.torch_dtype", "use bf16.enabled or fp16.enabled", value="bfloat16"),
    mistake("zero_tp.model.n_layers", 'did you mean "n_layer"?', value=2),
    mistake(
        "zero_optimization.reduce_buckets_size", 'did you mean "reduce_bucket_size"?', value=5e8
    ),
    mistake(
        "zero_optimization.offload_optimizer.pin_memroy", 'did you mean "pin_memory"?', value=True
    ),
    mistake("optimizer.params.weight_decey", 'did you mean "weight_decay"?', value=0.1),
    mistake("scheduler.params.warmup_steps", 'did you mean "warmup_num_steps"?', value=10),
    mistake(
        "activation_checkpointing.partitioned_activations",
        'did you mean "partition_activations"?',
        value=False,
    ),
    mistake("data_types.grad_accumulation_dtype", 'did you mean "grad_accum_dtype"?', value="fp32"),
    mistake("checkpoint", "use zero_tp.checkpoint", value={"load_universal": False}),
    mistake("flops_profiler.enable", 'did you mean "enabled"?', value=True),
    mistake("aio.block_sise", 'did you mean "block_size"?', value=4096),
    mistake("tensorboard.jobname", 'did you mean "job_name"?', value="run"),
    mistake("optimizer.type", 'did you mean "AdamW"?', value="AdmW"),
    mistake("scheduler.type", 'did you mean "WarmupCosineLR"?', value="WarmupCosinLR"),
    mistake("zero_tp.model.model_type", 'did you mean "gpt2"?', value="gpt-2"),
    mistake("zero_tp.attention", 'did you mean "sdpa"?', value="spda"),
    # Types and values
    mistake("zero_tp.parallel.tensor", "expected an integer", value="2"),
    mistake("zero_tp.training.steps", "must be greater than 0", value=0),
    mistake("zero_tp.training.seed", "expected an integer", value=1.5),
    mistake("bf16.enabled", "expected true or false", value="yes"),
    mistake("train_micro_batch_size_per_gpu", "expected an integer", value=True),
    mistake("zero_optimization.stage", "0, 1, 2", value=4),
    mistake("zero_optimization", "expected an object", value=2),
    Mistake(
        {"optimizer.params.betas": ["a", 0.9]}, "optimizer.params.betas.0", ("expected a number",)
    ),
    Mistake({"optimizer.params.betas": 0.9}, "optimizer.params.betas", ("expected a list",)),
    mistake("optimizer.params.lr", '"auto" is not known for this key', value="auto"),
    mistake("zero_tp.model.n_head", "expected an integer", value="four"),
    mistake("zero_tp.model.activation_function", 'did you mean "gelu_new"?', value="gelu_nev"),
    mistake("zero_tp.model.attn_pdrop", "probability", value=1.5),
    mistake("zero_tp.model.bos_token_id", "vocabulary of 512", value=512),
    mistake("zero_tp.data.train", "is empty", value=""),
    # Missing
    mistake("zero_tp", "required", value=Missing),
    mistake("zero_tp.training.steps", "required", value=Missing),
    Mistake(
        {"zero_tp.training.tokens": 10**9},
        "zero_tp.training.steps",
        ("given with zero_tp.training.tokens",),
    ),
    mistake("zero_tp.model.model_type", ("required", "gpt2"), value=Missing),
    mistake("optimizer", "required", value=Missing),
    mistake("optimizer.params.lr", "required", value=Missing),
    mistake("train_micro_batch_size_per_gpu", ("required", "train_batch_size"), value=Missing),
    # Sums
    mistake(
        "zero_tp.parallel.tensor", ("tensor 3 × data 1.333 ≠ world 4", "multiple of 3"), value=3
    ),
    mistake(
        "train_batch_size", ("64 ≠ micro 4 × accumulation 2 × data 2 (= 16)", "auto"), value=64
    ),
    Mistake(
        {"train_batch_size": 20, "gradient_accumulation_steps": "auto"},
        "train_batch_size",
        ("20 ≠ micro 4 × data 2 × accumulation 2.5", "multiple of 8"),
    ),
    Mistake(
        {"zero_tp.model.n_head": 5, "zero_tp.model.n_embd": 80},
        "zero_tp.parallel.tensor",
        ("heads 5 ≠ tensor 2 × 2.5", "divides 5"),
    ),
    mistake("zero_tp.model.n_embd", "hidden size 66 ≠ heads 4 × head size 16.5", value=66),
    mistake("zero_tp.data.sequence_length", ("129 tokens", "n_positions"), value=129),
    mistake(
        "zero_tp.data.sequence_length",
        ("127 ≠ tensor 2 × 63.5", "zero_tp.parallel.sequence"),
        value=127,
    ),
    mistake(
        "scheduler.params.total_num_steps", "refused below the steps of warm-up and decay", value=5
    ),
    # Removed, renamed, refused, not built
    mistake("elasticity", ("DeepSpeed has removed it", "batch size"), value={"enabled": True}),
    mistake("zero_optimization.mics_shard_size", "DeepSpeed has removed it", value=8),
    mistake("bfloat16", "use bf16", value={"enabled": True}),
    mistake("zero_optimization.cpu_offload", "offload_optimizer", value=True),
    mistake("tensor_parallel", "use zero_tp.parallel.tensor", value={"autotp_size": 2}),
    mistake("optimizer.type", "removed the 1-bit optimizers", value="OneBitAdam"),
    mistake("sequence_parallel_size", "use zero_tp.parallel.sequence", value=2),
    mistake("zero_optimization.offload_param", "use stage 3", value={"device": "cpu"}),
    mistake("data_efficiency", "zero_tp.data decides", value={"enabled": True}),
    mistake("zero_tp.model.model_type", ("is not supported", "gpt2"), value="roberta"),
    Mistake(
        {"zero_tp.model": {"model_type": "bert"}},
        "zero_tp.objective",
        ("bert is no causal decoder", 'set it to "masked"'),
    ),
    mistake(
        "zero_tp.objective",
        ("gpt2 is a causal decoder", "train another model"),
        value={"type": "masked"},
    ),
    mistake("zero_tp.model.scale_attn_weights", "gpt2 does not read it", value=False),
    # Weights from a directory
    *(
        Mistake({"zero_tp.model": {**model, name: value}}, f"zero_tp.model.{key}", words)
        for name, value, model, key, words in (
            (
                FROM,
                "models/nowhere",
                {},
                FROM,
                ("no directory models/nowhere", "Hugging Face model directory"),
            ),
            (FROM, 7, {}, FROM, ("expected a string", "directory")),
            (FROM, "/", {}, FROM, ("no config.json in /", "give")),
            (
                FROM,
                "models/gpt2",
                {"n_layer": 2},
                "n_layer",
                ("models/gpt2 decides it", "leave it out", "attn_pdrop"),
            ),
            ("from_pretraind", "models/gpt2", {}, "model_type", ("required", "from_pretrained")),
        )
    ),
)
