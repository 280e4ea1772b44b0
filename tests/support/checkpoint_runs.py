"""Small runs that save and resume: their configs, their batches, and their steps on the ranks of
a pool.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.settings import engine_of, fp16_supported
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.config import RunConfig

VOCABULARY, SEQUENCE, BATCH = 101, 16, 24
MODEL = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 48,
    "n_head": 4,
    "n_positions": SEQUENCE,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "parameters": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def write_config(
    path: Path, stage: int, dtype: str, tensor: int = 2, offload: str = "none", seed: int = 7
) -> Path:
    """A run with dropout on, accumulation and a schedule."""
    optimizer = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        **({"torch_adam": True} if offload == "none" else {}),
    }
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, **OFFLOADS[offload]},
        "zero_tp": {
            "model": MODEL,
            "parallel": {"tensor": tensor},
            "data": {"train": "nowhere/train", "sequence_length": SEQUENCE},
            "training": {"steps": 4, "seed": seed},
            "checkpoint": {"keep": 2},
        },
    }
    if dtype.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10}
    if dtype == "bf16_fp32_accumulation":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    path.write_text(json.dumps(config))
    return path


def write_changed(path: Path, **checkpoint: Any) -> Path:
    config = json.loads(path.read_text())
    config["zero_tp"]["checkpoint"] |= {key.rstrip("_"): value for key, value in checkpoint.items()}
    write_changed = path.with_name("changed.json")
    write_changed.write_text(json.dumps(config))
    return write_changed


def batch_of(step: int) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step)
    )


def build(path: str | Path) -> tuple[Any, RunConfig]:
    import torch.distributed as dist

    config = RunConfig.load(path, world_size=dist.get_world_size())
    return engine_of(config), config


def steps_of(engine: Any, first: int, last: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the steps first … last."""
    done = []
    for step in range(first, last + 1):
        own = batch_of(step).chunk(engine.topology.data)[engine.topology.data_rank]
        micro_batches = own.chunk(engine.deepspeed_engine.gradient_accumulation_steps())
        done.append(
            (
                engine.train_step([(w[:, :-1], w[:, 1:]) for w in micro_batches]),
                engine.gradient_norm,
            )
        )
    return done


def masters_of(engine: Any) -> dict[str, Tensor]:
    from zero_tp.engine.zero.states import MASTER

    states = engine.zero.states()
    return {each.name: states.get(each, MASTER).clone() for each in states.fragments}


@fp16_supported()
def train_and_save(path: str, run: str, save_at: list[int], last: int) -> dict[str, Any]:
    """Train, saving on the way; returns the losses, this rank's masters and the evaluation
    logits of the last save.
    """
    from zero_tp.run.checkpoint.save import run_saver

    engine, config = build(path)
    saver = run_saver(engine.zero, config, Path(run))
    done, logits = [], None
    for step in range(1, last + 1):
        done += steps_of(engine, step, step)
        if step in save_at:
            saver.save(step)
            assert saver.outcome() == (step, "")
            engine.deepspeed_engine.eval()
            with torch.no_grad():
                logits = engine.deepspeed_engine(batch_of(0)[:2, :-1]).logits.float().clone()
    return {"steps": done, "masters": masters_of(engine), "logits": logits}


@fp16_supported()
def resume_and_train(path: str, run: str, last: int) -> dict[str, Any]:
    """Resume in a fresh engine and train to `last`."""
    from zero_tp.run.checkpoint.start_point import Resume

    engine, config = build(path)
    start = Resume(find_checkpoint(Path(run)))
    start.restore(engine.zero, config.zero_tp.training.seed)
    step = start.step
    scale = None if engine.zero.loss_scale is None else engine.zero.loss_scale.value
    return {
        "steps": steps_of(engine, step + 1, last),
        "masters": masters_of(engine),
        "from": step,
        "scale": scale,
    }
