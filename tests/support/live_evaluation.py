"""A live model on each grid of ranks, for evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.pool_rank import cached
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.topology import Topology
from zero_tp.tools.evaluation.eval_model import EvalModel
from zero_tp.tools.evaluation.model_directory import open_directory

BATCH = 3
GRIDS = [(2, 2), (2, 1), (4, 2), (4, 4)]  # world, TP


def grid(tensor: int, expert: int = 1) -> Topology:
    key = "evaluation", tensor, expert
    return cached(key, lambda: Topology(tensor, sequence=tensor == 2, expert=expert))


def deepspeed_settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


def live_model(
    directory: Path, tensor: int, stage: int, scorer: Callable[[Any], Any], expert: int = 1
) -> EvalModel:
    """Return the model of a DeepSpeed engine before its first step; `scorer` takes the engine."""
    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.model.weights.load import PretrainedSource

    opened, topology = open_directory(directory), grid(tensor, expert)
    source, settings = PretrainedSource(directory, opened.config), deepspeed_settings(stage)
    engine = TrainingEngine.from_dict(
        opened.config, topology, settings, seed=1, source=source, model=ZeroTPForCausalLM
    )
    engine.deepspeed_engine.eval()
    return EvalModel(
        scorer(engine),
        engine.model,
        opened.tokenizer,
        opened.config,
        64,
        batch_size=BATCH,
        topology=topology,
        lock_step=engine.zero.lock_step,
        quiet=True,
    )
