"""A launched run that evaluates the average of its weights, and exports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.support.launched import metrics_of, pretrain
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.run.checkpoint.convert import average_checkpoints, to_huggingface
from zero_tp.run.config import RunConfig
from zero_tp.run.run_inputs import RunInputs


def validation_loss(model: Any, run: Path) -> float:
    """transformers' loss of the run's validation."""
    config = RunConfig.load(run / "config.json", world_size=2)
    samples = RunInputs(config, run).validation
    assert samples is not None
    total = count = 0.0
    limit = config.zero_tp.evaluation.batches * config.global_batch
    ((_, windows),) = samples.shares(limit)
    for batch in samples.batches(windows, 1, 0, 1, 0):
        with torch.no_grad():
            logits = model(batch.input_ids).logits
        labels = batch.labels.flatten()
        total += cross_entropy(logits.flatten(0, 1), labels, reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count


@THOROUGH
def test_a_run_logs_the_loss_of_its_average(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At TP 2; it is that of the export. Training is as without an average."""
    monkeypatch.chdir(workplace)
    average = 'zero_tp.training.ema={"decay": 0.8, "evaluate": true}'
    step = 4
    for name, changes in (("plain", ()), ("averaged", (average,))):
        done = pretrain(
            2,
            workplace,
            *("--deepspeed_config", "small.json", "--output-dir", f"runs/{name}"),
            *(word for change in changes for word in ("--set", change)),
            *("--set", f"zero_tp.training.steps={step}", "--set", "zero_tp.checkpoint.interval=2"),
            launcher="launch.py",
        )
        assert done.returncode == 0, done.stdout + done.stderr
    plain, averaged = (metrics_of(Path("runs", name)) for name in ("plain", "averaged"))
    names = ("loss", "grad_norm", "validation_loss")
    assert [
        [line.get(name) for name in names] for line in averaged if any(map(line.get, names))
    ] == [[line.get(name) for name in names] for line in plain]
    run = Path("runs/averaged")
    to_huggingface(run, Path("averaged"), ema=True)
    model = AutoModelForCausalLM.from_pretrained("averaged")
    (loss,) = (line["ema/validation_loss"] for line in averaged if "ema/validation_loss" in line)
    assert loss == pytest.approx(validation_loss(model, run), rel=1e-5)
    assert f"ema/validation at step {step}: loss {loss:.4f}, perplexity" in done.stdout
    average_checkpoints(run, [2, 4], Path("mean"))
    assert AutoModelForCausalLM.from_pretrained("mean").num_parameters() == model.num_parameters()
    with pytest.raises(UserError, match="has no average of the weights; leave out --ema"):
        to_huggingface(Path("runs/plain"), Path("none"), ema=True)
