"""The true view against the dry run (fake tensors) and against MemTracker's peak of a real engine's step."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, GPT2Config

from tests.planned import BASE, FILE
from zero_tp.config import RunConfig
from zero_tp.data.batch import Batch
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.parallel import loss
from zero_tp.planning import dryrun, outside
from zero_tp.planning.memory import Point
from zero_tp.planning.views import model_of, true_view
from zero_tp.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
OFFLOAD = '={"device":"cpu"}'
WIDE = ["zero_tp.data.sequence_length=256", "train_micro_batch_size_per_gpu=4"]
# What differs from BASE (GPT-2, TP 2, SP, ZeRO-1, bf16, sdpa with dropout), and in a run of how many ranks.
CONFIGS = [
    ["zero_optimization.stage=0", "zero_tp.parallel.tensor=1"],
    ["zero_optimization.stage=0", 'bf16={"enabled":false}', *WIDE],
    ["zero_optimization.stage=1", "zero_tp.recompute=full", *WIDE],
    ["zero_optimization.stage=1", "gradient_accumulation_steps=2", "zero_tp.parallel.sequence=false"],
    ["zero_optimization.stage=1", "zero_optimization.overlap_comm=true", "zero_tp.attention=eager", *WIDE],
    ["zero_optimization.stage=2", "zero_tp.parallel.tensor=4", *WIDE],
    ["zero_optimization.stage=2", "zero_tp.recompute=selective", "zero_tp.attention=eager", *WIDE],
    ["zero_optimization.stage=2", "gradient_accumulation_steps=2", "zero_tp.model.attn_pdrop=0.0", *WIDE],
    ["zero_optimization.stage=2", f"zero_optimization.offload_optimizer{OFFLOAD}"],
    ["zero_optimization.stage=2", "zero_tp.model.tie_word_embeddings=false", "optimizer.params.torch_adam=false"],
    ["zero_optimization.stage=3", "zero_tp.recompute=full", "zero_tp.model.attn_pdrop=0.0", *WIDE],
    ["zero_optimization.stage=3", "zero_optimization.stage3_max_reuse_distance=300000", "zero_tp.parallel.tensor=1"],
    ["zero_optimization.stage=3", f"zero_optimization.offload_optimizer{OFFLOAD}", "gradient_accumulation_steps=2"],
    [
        "zero_optimization.stage=3",
        f"zero_optimization.offload_optimizer{OFFLOAD}",
        f"zero_optimization.offload_param{OFFLOAD}",
        'zero_tp.recompute={"mode":"selective","modules":["attention_core","mlp_activation","norm"]}',
        *WIDE,
    ],
]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "mistral": {"num_key_value_heads": 1, "sliding_window": None},
    "qwen2": {"num_key_value_heads": 4, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 32, "use_sliding_window": False},
    "gpt_neox": {},
}


DOCUMENTS = "zero_tp.data.document_attention=reset"
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32}
WINDOWS |= {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}


def family(name: str, *overrides: str, model: dict[str, Any] | None = None) -> list[str]:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 8}
    limits = {"vocab_size": 1000, "max_position_embeddings": 256}
    whole: dict[str, Any] = {"model_type": name, **sizes, **limits, **FAMILIES[name], **(model or {})}
    return [f"zero_tp.model={json.dumps(whole)}", *overrides, *WIDE]


CONFIGS += [
    family("llama", "zero_optimization.stage=1"),
    family("llama", "zero_optimization.stage=3", "zero_tp.attention=eager", "zero_tp.parallel.tensor=1"),
    family("mistral", "zero_optimization.stage=2", "zero_tp.recompute=full"),
    family("qwen2", "zero_optimization.stage=2", "zero_tp.recompute=selective", "zero_tp.attention=eager"),
    family("qwen3", "zero_optimization.stage=3", "zero_tp.parallel.sequence=false"),
    family("gpt_neox", "zero_optimization.stage=1"),
    family("gpt_neox", "zero_optimization.stage=2", "zero_tp.recompute=full", "zero_tp.attention=eager"),
    family("llama", "zero_optimization.stage=1", DOCUMENTS),
    ["zero_optimization.stage=2", "zero_tp.attention=eager", DOCUMENTS, *WIDE],
    ["zero_optimization.stage=3", "zero_tp.recompute=selective", DOCUMENTS, *WIDE],
    family("qwen2", "zero_optimization.stage=1", model=WINDOWS),
    family(
        "qwen3", "zero_optimization.stage=2", "zero_tp.recompute=selective", "zero_tp.attention=eager", model=WINDOWS
    ),
]
WORLD = 4
NAMES = [
    " ".join(re.sub(r'.*"model_type": "(\w+)".*', r"\1", one).split(".")[-1] for one in config) for config in CONFIGS
]


QUICK = CONFIGS[::4]  # the others are behind the mark `heavy`
CASES = [
    pytest.param(config, id=name, marks=() if config in QUICK else pytest.mark.heavy)
    for config, name in zip(CONFIGS, NAMES, strict=True)
]


def load(overrides: list[str]) -> RunConfig:
    return RunConfig.load(ROOT / FILE, BASE + overrides, WORLD)


@pytest.mark.parametrize("overrides", CASES)
def test_true_view_against_the_dry_run(overrides: list[str]) -> None:
    config = load(overrides)
    view = true_view(config, cpu=True)
    measured = dryrun.points(dryrun.dry_run(config), view.zero)

    def total(point: Point) -> float:
        return point.total + point.host

    ours, theirs = max(view.points(), key=total), max(measured, key=total)
    assert total(ours) == pytest.approx(total(theirs), rel=0.03)
    # Forward and backward may come so close that either has the peak.
    ours = max((each for each in view.points() if each.phase == theirs.phase), key=total)
    for category, size in theirs.bytes.items():
        if size > 0.01 * total(theirs):
            assert ours.bytes[category] == pytest.approx(size, rel=0.05), category
    # In each of the two phases that have activations too, wherever the peak is.
    for phase in ("forward", "backward"):
        greatest = [max(total(each) for each in found if each.phase == phase) for found in (view.points(), measured)]
        assert greatest[0] == pytest.approx(greatest[1], rel=0.05), phase
    assert view.peak.total == pytest.approx(max(point.total for point in view.points()))


@functools.cache
def engine_peaks(quick: bool) -> dict[str, dict[str, float]]:
    """Many configs in one process: importing and connecting DeepSpeed costs more than a step."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.planned", str(WORLD)],
        input=json.dumps([config for config in CONFIGS if (config in QUICK) == quick]),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {json.dumps(line["overrides"]): line for line in lines}


@pytest.mark.parametrize("overrides", CASES)
def test_true_view_against_a_real_step(overrides: list[str]) -> None:
    found = engine_peaks(overrides in QUICK)[json.dumps(overrides)]
    assert found["parameters"] == true_view(load(overrides), cpu=True).zero.parameters.total
    assert found["true_view"] == pytest.approx(found["measured"], rel=0.03)


def test_the_dry_run_counts_what_memtracker_counts() -> None:
    """The same forward and backward, fake and real, with gradients that stay."""
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=200, bos_token_id=0, eos_token_id=0)

    def peak(*, fake: bool) -> int:
        with FakeTensorMode() if fake else torch.random.fork_rng():
            model = ZeroTPForCausalLM(config, Topology(world=1), dtype=torch.bfloat16).train()
            tokens = torch.zeros(2, 64, dtype=torch.long)
            tracker = MemTracker()
            tracker.track_external(model, tokens)
            with tracker:
                model(tokens, shift_labels=tokens).loss.backward()
            return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])

    with FakeTensorMode():
        model = ZeroTPForCausalLM(config, Topology(world=1), dtype=torch.bfloat16).train()
        tokens = torch.zeros(2, 64, dtype=torch.long)
        moments = dryrun.measure(model, Batch(tokens, tokens))
    parameters = 2 * sum(parameter.numel() for parameter in model.parameters())
    ours = max(one.activations + one.transients + 2 * one.gradients for one in moments) + parameters
    assert peak(fake=True) == peak(fake=False)
    assert ours == pytest.approx(peak(fake=True), rel=0.002)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_every_architecture_are_those_of_transformers(name: str) -> None:
    config = load(family(name, "zero_tp.parallel.tensor=1"))
    hf_config = config.hf_config()
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(hf_config)
    shape, parameters, whole = model_of(hf_config, 1, False)
    assert whole == parameters.total == theirs.num_parameters()
    assert shape.layer_products() * shape.layers < whole


def test_facts_that_are_written_twice() -> None:
    """planning does not import torch for them."""
    assert outside.CHUNK_ELEMENTS == loss.CHUNK_ELEMENTS
