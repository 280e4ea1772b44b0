"""Configs are changed at random, checked, and planned for; a small one that is accepted has to
train a step.

    python -m tests.tools.fuzz configs --count 1000

A tiny config with a corpus is the base. Values of every kind go to places of its tree; keys go,
come and are mistyped. What `check` accepts without naming an absent file trains a step in one
process, where it asks for one rank and for no more than a million parameters.
"""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.mistakes import with_changes
from tests.support.tiny_models import write_corpus
from tests.tools.fuzz.commands import attempt, scratch
from tests.tools.fuzz.damage import ODD, edit_json

VOCABULARY, TRAINED_SHARE = 64, 0.15
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    "zero_tp": {
        "model": {
            **{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16},
            "vocab_size": VOCABULARY,
        },
        "parallel": {"tensor": 1},
        "data": {"train": "data/train", "validation": "data/train", "sequence_length": 8},
        "training": {"steps": 1},
        "evaluation": {"interval": 1, "batches": 1},
    },
}
LLAMA = {
    **{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
        "vocab_size": VOCABULARY,
    },
}
ADDED: tuple[tuple[str, Any], ...] = (
    ("train_batch_size", 2),
    ("bf16", {"enabled": True}),
    ("fp16", {"enabled": True, "loss_scale": 0}),
    ("aio", {"use_gds": True}),
    ("zero_optimization.stage", 3),
    ("zero_optimization.offload_optimizer", {"device": "cpu"}),
    ("zero_optimization.offload_optimizer", {"device": "nvme", "nvme_path": "absent"}),
    ("zero_optimization.overlap_comm", True),
    ("zero_optimization.contiguous_gradients", False),
    ("activation_checkpointing", {"partition_activations": True}),
    *(
        ("zero_tp.recompute", value)
        for value in ("full", {"mode": "full", "layers": 1}, "selective")
    ),
    ("zero_tp.attention", "eager"),
    ("zero_tp.data.document_attention", "reset"),
    ("zero_tp.checkpoint", {"interval": 1, "keep": 1, "async": True}),
    ("zero_tp.evaluation.task_data", {"lambada": "x"}),
    ("zero_tp.training.on_nonfinite", "stop"),
    ("zero_tp.training.timeout_minutes", 1e-3),
    ("zero_tp.model", LLAMA),
    ("zero_tp.model.rope_parameters", {"rope_type": "linear", "factor": 2.0}),
    ("zero_tp.model.tie_word_embeddings", False),
    *(("optimizer.type", name) for name in ("Lion", "SGD", "Adagrad")),
    *(("scheduler.type", name) for name in ("WarmupCosineLR", "OneCycle")),
    ("data_types", {"grad_accum_dtype": "fp32"}),
    ("csv_monitor", {"enabled": True, "output_path": "csv"}),
    ("flops_profiler", {"enabled": True}),
    ("wall_clock_breakdown", True),
    ("comms_logger", {"enabled": True}),
)


@cache
def base() -> Path:
    """Return a directory with a corpus of `VOCABULARY` tokens."""
    directory = scratch()
    write_corpus(
        directory / "data" / "train",
        [np.arange(size) % VOCABULARY for size in (5, 40, 60)],
        VOCABULARY,
    )
    return directory


def change(config: dict[str, Any], draw: random.Random) -> str:
    """Change one thing, and tell what."""
    if draw.random() > 3 / 8:
        return edit_json(config, draw)
    path, value = draw.choice(ADDED)
    try:
        config |= with_changes(config, {path: value})
    except (AttributeError, TypeError):  # a block is no object any more
        return f"not {path}"
    return f"{path}={value!r:.80}"


def parameters(config: dict[str, Any]) -> float:
    """Return about how many parameters a config that was accepted has at most."""
    model = config["zero_tp"]["model"]
    sizes = [
        value
        for value in model.values()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    layers = max(model.get("n_layer") or 1, model.get("num_hidden_layers") or 1, 1)
    widest = max([16, *sizes])
    defaults = 0 if {"n_embd", "hidden_size"} & model.keys() and "vocab_size" in model else 1e9
    return float(layers * widest * widest) + defaults


def case(draw: random.Random, directory: Path) -> str:
    """Change a config, check it, plan for it, and train it where it is small."""
    config = copy.deepcopy(BASE)
    if draw.random() < 0.3:
        config["zero_tp"]["model"] = dict(LLAMA)
    changes = [change(config, draw) for _ in range(draw.choice((1, 1, 2, 3)))]
    (directory / "data").symlink_to(base() / "data")
    text = json.dumps(config)
    if draw.random() < 0.03:
        cut = draw.randrange(len(text))
        text = draw.choice([text[:cut], text[:cut] + draw.choice('{}[]",:\0\x1b') + text[cut:]])
        changes.append("text")
    (directory / "run.json").write_text(text)
    world = (
        []
        if (drawn := draw.random()) < 0.3
        else ["--world-size", "1" if drawn < 0.9 else str(draw.choice(ODD))]
    )
    description = f"{changes} {' '.join(world)}"
    checked = attempt(
        description, "zero_tp/__main__.py", ["check", "run.json", *world], directory, check=True
    )
    if draw.random() < 0.2:
        options = [*(world or ["--world-size", "1"]), "--device", draw.choice(["cpu", "h100-80gb"])]
        options += draw.choice([[], [], ["--search", "--top", "2"], ["--json"]])
        attempt(description, "launch/plan.py", ["run.json", *options], directory)
    if checked is None:
        return "refused"
    absent = "not here" in checked.out
    assert absent or not checked.status, description
    if (
        absent
        or world != ["--world-size", "1"]
        or parameters(config) > 1e6
        or draw.random() > TRAINED_SHARE
    ):
        return "absent" if absent else "accepted"
    trained = attempt(
        description, "launch/pretrain.py", ["--deepspeed_config", "run.json"], directory
    )
    assert trained is not None, f"accepted by check, and cannot start: {description}"
    return "trained"
