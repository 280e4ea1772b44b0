"""Train a small model by whole runs under a launcher, and by transformers' own class in one
process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from zero_tp.base.errors import UserError
from zero_tp.data.samples import PackedSamples
from zero_tp.run.config import RunConfig
from zero_tp.run.metrics_file import METRICS_FILE
from zero_tp.run.process.environment import free_port


def trained(
    config: Path, changes: Sequence[str], ranks: int, directory: Path, seconds: float = 1200.0
) -> tuple[str, list[dict[str, Any]]]:
    """Train a run on CPU ranks; return its first line, and the metrics of each step.

    Raises:
        UserError: the run failed, or took longer than `seconds`.
    """
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(ranks),
        "--master_port",
        str(free_port()),
    ]
    run = [
        "-m",
        "zero_tp.pretrain",
        "--deepspeed_config",
        str(config),
        "--output-dir",
        str(directory),
    ]
    settings = [word for change in changes for word in ("--set", change)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *run, *settings]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{directory.name}: not trained in {seconds:.0f} s; is the machine busy? Try again"
        ) from None
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    told = next(line for line in done.stdout.splitlines() if "parameters" in line)
    return told.split(", in ")[0], [line for line in metrics_of(directory) if "loss" in line]


def changes_of(model: Mapping[str, Any], corpus: Path, steps: int, warm_up: int) -> list[str]:
    """Return the overrides to train a model on a prepared corpus, and to save and evaluate it
    only at the end.
    """
    return [
        f"zero_tp.model={json.dumps(model)}",
        f"zero_tp.data.train={corpus / 'train'}",
        f"zero_tp.data.validation={corpus / 'validation'}",
        f"zero_tp.training.steps={steps}",
        f"scheduler.params.warmup_num_steps={warm_up}",
        f"zero_tp.checkpoint.interval={steps}",
        "zero_tp.evaluation.interval=null",
    ]


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]


def plainly_trained(run: RunConfig, model: Path, rates: Sequence[float]) -> list[float]:
    """Train transformers' own class by torch's AdamW on the samples of a run; return the loss of
    each step.

    Args:
        run: the config of the run.
        model: directory of the initial weights.
        rates: learning rate of each step.
    """
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = run.engine_settings.written()
    arguments = settings["optimizer"]["params"]
    flat = [weight for weight in network.parameters() if weight.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in network.parameters() if weight.ndim >= 2]},
        {"params": flat, "weight_decay": 0.0},
    ]
    decay = arguments["weight_decay"]
    betas = tuple(arguments["betas"])
    optimizer = torch.optim.AdamW(groups, betas=betas, weight_decay=decay)
    samples = PackedSamples(
        run.zero_tp.data.train, run.zero_tp.data.sequence_length, run.zero_tp.training.seed
    )
    losses = []
    for step, rate in enumerate(rates):
        (rows,) = samples.batches_from(step * run.global_batch, run.global_batch, 1, 0, 1)
        loss = nn.functional.cross_entropy(
            network(rows.input_ids).logits.flatten(0, 1), rows.labels.flatten()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), settings["gradient_clipping"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
