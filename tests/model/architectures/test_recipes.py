"""The papers' recipes (arXiv 1909.08053, sections 4 and 5), read where they take effect."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch import nn

from zero_tp.base.settings.optimizer import OptimizerParams
from zero_tp.engine.param_groups import optimizer_groups
from zero_tp.model.architectures import architecture_of
from zero_tp.model.attention import AttentionCore
from zero_tp.model.model_class import model_class
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.parallel.random import Dropout
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig

CONFIGS = Path(__file__).resolve().parents[3] / "ds_configs"
GPT2 = {
    "gpt2_355m": 8,
    "gpt2_2.5b": 16,
    "gpt2_8.3b": 512,
    "papers/gpt2_1.2b": 64,
    "papers/gpt2_4.2b": 256,
}
BERT = {"bert_336m": 8, "bert_1.3b": 8, "bert_3.9b": 8}
SMALL = {
    "gpt2": ("n_embd=64", "n_head=4", "vocab_size=1000"),
    "bert": ("hidden_size=64", "num_attention_heads=4", "intermediate_size=256", "vocab_size=1000"),
}


def loaded(name: str, *changes: str) -> RunConfig:
    return RunConfig.load(CONFIGS / f"{name}.json", changes, (GPT2 | BERT)[name])


def narrow(name: str) -> ParallelModel:
    """The config's model with all its layers and little width, its weights drawn."""
    sizes = SMALL["bert" if name in BERT else "gpt2"]
    changes = [*(f"zero_tp.model.{size}" for size in sizes), "zero_tp.parallel.tensor=1"]
    config = RunConfig.load(CONFIGS / f"{name}.json", changes, 1).hf_config()
    return model_class(architecture_of(config).spec(config))(
        config, Topology(world=1), device="cpu"
    )


def rates(config: RunConfig, steps: range) -> list[float]:
    """The learning rates of these steps, the first is 0, from DeepSpeed's own schedule."""
    given = config.engine_settings.written()
    optimizer = torch.optim.SGD(
        [nn.Parameter(torch.zeros(1))], lr=given["optimizer"]["params"]["lr"]
    )
    block = given["scheduler"]
    schedule: Any = getattr(lr_schedules, block["type"])(optimizer, **block["params"])
    found = []
    for step in steps:
        schedule.step(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", GPT2)
def test_gpt2s_schedule(name: str) -> None:
    """3,000 steps of warm-up to 1.5e-4, then a cosine that is at 1e-5 after 300,000; 512
    sequences of 1,024 tokens.
    """
    config, peak, end, warm, steps = loaded(name), 1.5e-4, 1e-5, 3000, 300_000
    assert (config.global_batch, config.zero_tp.data.sequence_length) == (512, 1024)
    assert config.zero_tp.training.steps == steps
    assert rates(config, range(warm)) == pytest.approx([peak * step / warm for step in range(warm)])
    later = range(warm, steps, 997)
    cosine = [
        end + (peak - end) * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2
        for step in later
    ]
    assert rates(config, later) == pytest.approx(cosine, rel=1e-4)
    assert rates(config, range(steps - 1, steps)) == pytest.approx([end], rel=1e-5)


@pytest.mark.parametrize("name", BERT)
def test_berts_schedule(name: str) -> None:
    """10,000 steps of warm-up to 1e-4, then a line that would be at 0 after the last of two
    million steps.
    """
    config, peak, warm, steps = loaded(name), 1e-4, 10_000, 2_000_000
    end = steps + 1
    assert (config.global_batch, config.zero_tp.training.steps) == (1024, steps)
    assert rates(config, range(warm)) == pytest.approx([peak * step / warm for step in range(warm)])
    later = range(warm, steps, 9973)
    assert rates(config, later) == pytest.approx(
        [peak * (end - step) / (end - warm) for step in later]
    )


@pytest.mark.parametrize("name", [*GPT2, *BERT])
def test_weights_decay_clipping_and_dropout(name: str) -> None:
    """N(0, 0.02); at the end of GPT-2's residual branches 0.02/√(2L), of BERT's as transformers
    draws them, 0.02.

    Decay 0.01, decoupled, clip 1.0, dropout 0.1 everywhere.
    """
    given, model = loaded(name).engine_settings.written(), narrow(name)
    assert given["optimizer"]["type"] == "AdamW" and given["gradient_clipping"] == 1.0
    decays = optimizer_groups(
        model,
        (),
        OptimizerParams(lr=0.0, weight_decay=given["optimizer"]["params"]["weight_decay"]),
    )
    assert [group["weight_decay"] for group in decays] == [0.01, 0.0]
    assert {parameter.dim() for parameter in decays[1]["params"]} == {1}, "biases and norms"
    modules = list(model.modules())
    dropped = {module.p for module in modules if isinstance(module, (Dropout, AttentionCore))}
    assert dropped == {0.1} and sum(isinstance(module, AttentionCore) for module in modules) > 20
    layers: Any = model.transformer.layers
    ends = [
        weight
        for layer in layers
        for weight in (layer.attention.output.weight, layer.mlp.down.weight)
    ]
    starts = [
        weight for layer in layers for weight in (layer.attention.qkv.weight, layer.mlp.up.weight)
    ]
    end = 0.02 if name in BERT else 0.02 / math.sqrt(2 * len(layers))
    for weights, deviation in ((ends, end), (starts, 0.02)):
        drawn = torch.cat([weight.detach().float().flatten() for weight in weights])
        assert drawn.mean().abs() < 0.02 * deviation and float(drawn.std()) == pytest.approx(
            deviation, rel=0.01
        )
    biases = [parameter for key, parameter in model.named_parameters() if key.endswith("bias")]
    assert biases and not any(bias.any() for bias in biases)
