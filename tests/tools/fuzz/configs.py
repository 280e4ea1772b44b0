"""Configs are changed at random, checked, and planned for; a small one that is accepted has to train a step.

    python -m tests.tools.fuzz configs --count 1000

A tiny config with a corpus is the base. Values of every kind go to places of its tree; keys go, come and are mistyped.
What `check` accepts without naming an absent file trains a step in one process, where it asks for one rank and for no
more than a million parameters.
"""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.tools.fuzz.commands import Ended, broken_promise, run
from tests.tools.fuzz.fuzzing import scratch
from zero_tp.data.indexed import IndexedWriter
from zero_tp.errors import BAD_INPUT

VOCABULARY, TRAINED_SHARE = 64, 0.15
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    "zero_tp": {
        "model": {
            "model_type": "gpt2",
            "n_layer": 1,
            "n_embd": 8,
            "n_head": 2,
            "n_positions": 16,
            "vocab_size": VOCABULARY,
        },
        "parallel": {"tensor": 1},
        "data": {"train": "data/train", "validation": "data/train", "sequence_length": 8},
        "training": {"steps": 1},
        "evaluation": {"interval": 1, "batches": 1},
    },
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "vocab_size": VOCABULARY,
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
    ("zero_tp.recompute", "full"),
    ("zero_tp.recompute", {"mode": "full", "layers": 1}),
    ("zero_tp.recompute", "selective"),
    ("zero_tp.attention", "eager"),
    ("zero_tp.data.document_attention", "reset"),
    ("zero_tp.checkpoint", {"interval": 1, "keep": 1, "async": True}),
    ("zero_tp.evaluation.task_data", {"lambada": "x"}),
    ("zero_tp.training.on_nonfinite", "stop"),
    ("zero_tp.training.timeout_minutes", 1e-3),
    ("zero_tp.model", LLAMA),
    ("zero_tp.model.rope_parameters", {"rope_type": "linear", "factor": 2.0}),
    ("zero_tp.model.tie_word_embeddings", False),
    ("optimizer.type", "Lion"),
    ("optimizer.type", "SGD"),
    ("optimizer.type", "Adagrad"),
    ("scheduler.type", "WarmupCosineLR"),
    ("scheduler.type", "OneCycle"),
    ("data_types", {"grad_accum_dtype": "fp32"}),
    ("csv_monitor", {"enabled": True, "output_path": "csv"}),
    ("flops_profiler", {"enabled": True}),
    ("wall_clock_breakdown", True),
    ("comms_logger", {"enabled": True}),
)
ODD: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, 8, 16, 64, 100, 999, -1, 0.5, 1.5, 1e-300, 1e-7, 1e5, 1e20, 1e300, -0.0),
    *(2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63, 10**30, 10**99, 10**400),
    *(True, False, None, "", "auto", "8", "nan", "x" * 300, "a\0b", "\x1b[31m", "é…\u202e", "../..", "data/absent"),
    *([], {}, [1], [0.9, 0.95], [[]], {"": 1}, {"a": {"b": 1}}, ["auto"], "fp32", "bf16", "cpu", "none"),
)


@cache
def base() -> Path:
    """Return a directory with a corpus of `VOCABULARY` tokens."""
    directory = scratch()
    (directory / "data").mkdir()
    with IndexedWriter(directory / "data" / "train", VOCABULARY) as writer:
        for size in (5, 40, 60):
            writer.add_document(np.arange(size) % VOCABULARY)
    return directory


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of everything within."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def change(config: dict[str, Any], draw: random.Random) -> str:
    """Change one thing, and tell what."""
    *parents, key = draw.choice(places(config)[1:])
    parent, kind = at(config, tuple(parents)), draw.randrange(8)
    named = ".".join(map(str, (*parents, key)))
    if kind == 0:
        del parent[key]
        return f"without {named}"
    if kind == 1 and isinstance(parent, dict):
        letters = list(key) or ["x"]
        letters[draw.randrange(len(letters))] = draw.choice("abz_.\0é")
        parent["".join(letters)] = parent.pop(key)
        return f"{named} mistyped"
    if kind in (2, 3, 4):
        path, value = draw.choice(ADDED)
        *blocks, last = path.split(".")
        block = config
        for each in blocks:
            inner = block.setdefault(each, {})
            if not isinstance(inner, dict):
                return f"not {path}"
            block = inner
        block[last] = copy.deepcopy(value)
        return f"{path}={value!r:.80}"
    if kind == 5 and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
        parent[key] = draw.choice(
            [parent[key] * 2, parent[key] + 1, parent[key] - 1, -parent[key], parent[key] * 10**6]
        )
    else:
        parent[key] = copy.deepcopy(draw.choice(ODD))
    return f"{named}={parent[key]!r:.80}"


def parameters(config: dict[str, Any]) -> float:
    """Return about how many parameters a config that was accepted has at most."""
    model = config["zero_tp"]["model"]
    sizes = [value for value in model.values() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    layers = max(model.get("n_layer") or 1, model.get("num_hidden_layers") or 1, 1)
    widest = max([16, *sizes])
    defaults = 0 if {"n_embd", "hidden_size"} & model.keys() and "vocab_size" in model else 1e9
    return float(layers * widest * widest) + defaults


def plain(ended: Ended, told: str, *, check: bool = False) -> None:
    assert (problem := broken_promise(ended, check=check)) is None, f"{told}: {problem}"


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
    world = [] if (drawn := draw.random()) < 0.3 else ["--world-size", "1" if drawn < 0.9 else str(draw.choice(ODD))]
    told = f"{changes} {' '.join(world)}"
    checked = run("zero_tp/__main__.py", ["check", "run.json", *world], directory)
    plain(checked, f"check of {told}", check=True)
    if draw.random() < 0.2:
        options = [*(world or ["--world-size", "1"]), "--device", draw.choice(["cpu", "h100-80gb"])]
        options += draw.choice([[], [], ["--search", "--top", "2"], ["--json"]])
        plain(run("launch/plan.py", ["run.json", *options], directory), f"plan of {told}")
    if checked.status == BAD_INPUT:
        return "refused"
    told_absent = "not here" in checked.out
    assert told_absent or not checked.status, told
    if told_absent or world != ["--world-size", "1"] or parameters(config) > 1e6 or draw.random() > TRAINED_SHARE:
        return "absent" if told_absent else "accepted"
    trained = run("launch/pretrain.py", ["--deepspeed_config", "run.json"], directory)
    plain(trained, f"training of {told}")
    assert trained.status == 0, f"accepted by check, and cannot start: {told}: {trained.err[-500:]}"
    return "trained"
