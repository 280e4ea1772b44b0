"""The dry run of few layers against one of all, and the plan against MemTracker's peak of a real
engine's step.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, GPT2Config

from tests.support.encoders import MODEL_TYPES as ENCODERS
from tests.support.native import native_model
from tests.support.plan_configs import (
    CASES,
    CONFIGS,
    FAMILIES,
    MASKED,
    TIERS,
    WINDOWS_OF_7,
    WORLD,
    family,
    load,
)
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.data.batch import Batch
from zero_tp.model.architectures import architecture_of
from zero_tp.model.flops import layer_products
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel import loss
from zero_tp.parallel.topology import Topology
from zero_tp.tools.planning import dryrun
from zero_tp.tools.planning.dryrun import (
    LayerKind,
    dry_run,
    layer_contexts,
    layer_kinds,
    representative_layers,
    spec_of_layers,
)
from zero_tp.tools.planning.formulas import model_states
from zero_tp.tools.planning.gathered import most_gathered
from zero_tp.tools.planning.memory import model_size, run_model_size
from zero_tp.tools.planning.plan_settings import ZeroSettings, workload_of
from zero_tp.tools.planning.tracking import join_parts, measure
from zero_tp.tools.planning.zero import RankParameters, ZeroMemory


@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize(
    "cpu", [True, pytest.param(False, marks=pytest.mark.heavy)], ids=["cpu", "accelerator"]
)
def test_layers_that_differ_add_up_to_a_dry_run_of_all(number: int, cpu: bool) -> None:
    overrides = CONFIGS[number]
    layers = "num_hidden_layers" if any('"model_type"' in each for each in overrides) else "n_layer"
    config = load(
        [
            *overrides,
            f"zero_tp.model.{layers}=7",
            *([WINDOWS_OF_7] if "layer_types" in str(overrides) else []),
        ]
    )
    workload = workload_of(config, cpu=cpu)
    assert dry_run(config.hf_config(), workload) == dry_run(
        config.hf_config(), workload, all_layers=True
    )


RECOMPUTED: list[dict[str, Any]] = [
    {"mode": "full", "layers": 4},
    {"mode": "full", "every": 3},
    {"mode": "selective", "every": 2, "modules": ["norm"]},
    {"mode": "full", "keep_micro_batches": 1},
]
RECOMPUTED_CASES = [
    pytest.param(
        policy, split, id=" ".join(map(str, [*policy.values(), *["P_a+cpu"] * split])), marks=marks
    )
    for number, policy in enumerate(RECOMPUTED)
    for split in ([False, True] if policy["mode"] == "full" else [False])
    for marks in [() if split and number == 1 else THOROUGH]
]


@THOROUGH
@pytest.mark.parametrize(("policy", "split"), RECOMPUTED_CASES)
def test_layers_that_recompute_add_up_too(policy: dict[str, Any], split: bool) -> None:
    overrides = ["zero_tp.model.n_layer=7", "gradient_accumulation_steps=2"]
    overrides += [f"zero_tp.recompute={json.dumps(policy)}"]
    if split:
        blocks = {"partition_activations": True, "cpu_checkpointing": True}
        overrides += [
            f"activation_checkpointing={json.dumps(blocks)}",
            "zero_tp.parallel.sequence=false",
        ]
    config = load(overrides)
    for cpu in (True, False):
        workload = workload_of(config, cpu=cpu)
        samples = dry_run(config.hf_config(), workload)
        assert samples == dry_run(config.hf_config(), workload, all_layers=True)
        plain = dry_run(config.hf_config(), replace(workload, policy=RecomputePolicy(mode="none")))
        kept, all_kept = (max(one.activations for one in each) for each in (samples, plain))
        assert kept == all_kept if policy.get("keep_micro_batches") else kept < all_kept


@pytest.mark.parametrize(
    "cpu",
    [pytest.param(True, id="cpu", marks=THOROUGH), pytest.param(False, id="accelerator")],
)
@pytest.mark.parametrize("rows", in_tiers([7, 100], [7]))
@pytest.mark.parametrize(
    "overrides",
    [pytest.param(CONFIGS[1], id="fp32", marks=THOROUGH), pytest.param(CONFIGS[14], id="untied")],
)
def test_blocks_of_the_loss_that_differ_stand_for_all(
    overrides: list[str], rows: int, cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 256 positions, the last chunk shorter; to the byte."""
    config = load(overrides)
    workload = workload_of(config, cpu=cpu)
    monkeypatch.setattr(loss, "BLOCK_ELEMENTS", rows * workload.batch * 1000 // workload.tensor)
    samples = dry_run(config.hf_config(), workload)
    monkeypatch.setattr(dryrun, "representative_chunks", lambda starts: starts)
    every = dry_run(config.hf_config(), workload)
    assert list(dict.fromkeys(samples)) == list(dict.fromkeys(every))
    assert len(samples) < len(every) or rows == 100


@pytest.mark.parametrize("layers", [1, 2, 3, 96])
def test_few_layers_represent_many(layers: int) -> None:
    assert len(representative_layers([LayerKind(None, None, "mlp", False)] * layers)) == min(
        layers, 3
    )
    alternating = [
        LayerKind(32 if number % 2 else None, None, "mlp", number < 5) for number in range(layers)
    ]
    few = representative_layers(alternating)
    assert set(layer_contexts(few)) == set(layer_contexts(alternating))
    assert len(few) <= min(layers, 13)


@pytest.mark.parametrize("model_type", ["olmo_hybrid", "gpt_oss", "qwen3_5_moe_text"])
def test_whatever_a_spec_has_for_each_layer_is_cut(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, num_hidden_layers=11)
    spec = architecture_of(config).spec(config)
    cut = spec_of_layers(spec, layer_kinds(spec, [])[:3], documents=False)
    of_layers = [name for name, value in vars(spec).items() if length_of(value) == 11]
    assert len(of_layers) >= 4
    assert [length_of(getattr(cut, name)) for name in of_layers] == [3] * len(of_layers)


def length_of(value: Any) -> int | None:
    return len(value) if isinstance(value, tuple) else None


@pytest.mark.parametrize("stage", range(4))
def test_model_states_are_the_papers_and_padding(stage: int) -> None:
    config = load([f"zero_optimization.stage={stage}", "zero_tp.parallel.tensor=1"])
    parameters = model_size(config.hf_config(), 1, False).parameters
    states = ZeroMemory(parameters, ZeroSettings.of(config, cpu=False)).states
    papers = model_states(parameters.total, stage, WORLD)
    # Stage 3 pads each parameter to the number of ranks, stages 1 and 2 each of two groups to twice
    # that.
    padded = {
        0: 0,
        1: 4 * WORLD,
        2: 4 * WORLD,
        3: WORLD * sum(map(len, parameters.groups)),
    }[stage]
    own = padded / WORLD
    assert 0 <= states.optimizer - papers["optimizer"] <= 12 * own
    assert 0 <= states.parameters - papers["parameters"] <= 2 * (padded if stage < 3 else own)
    assert stage < 3 or 0 <= states.gradients - papers["gradients"] <= 2 * own


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        ({"type": "AdamW", "params": {"lr": 1e-3}}, 8),
        ({"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": True}}, 12),
        ({"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}, 4),
        ({"type": "SGD", "params": {"lr": 1e-3}}, 0),
    ],
)
def test_moments_are_those_that_torchs_optimizer_creates(
    optimizer: dict[str, Any], moments: int
) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    created = getattr(torch.optim, optimizer["type"])([parameter], **optimizer["params"])
    created.step()
    states = created.state[parameter].items()
    assert moments * 1000 == sum(
        value.nbytes for name, value in states if name != "step" and value is not None
    )
    settings = ZeroSettings.of(
        load(["zero_optimization.stage=0", f"optimizer={json.dumps(optimizer)}"]), cpu=False
    )
    assert settings.moments == moments and not settings.torch_optimizer


def test_gradients_in_fp32_count_while_they_are_sent_and_while_an_offloaded_optimizer_updates() -> (
    None
):
    def zero_memory(*overrides: str) -> ZeroMemory:
        config = load([*overrides, "zero_tp.parallel.tensor=1"])
        return ZeroMemory(
            model_size(config.hf_config(), 1, False).parameters, ZeroSettings.of(config, cpu=False)
        )

    wider, sent = "data_types.grad_accum_dtype=fp32", "communication_data_type=fp32"
    offloaded = zero_memory(
        "zero_optimization.stage=2", 'zero_optimization.offload_optimizer={"device":"cpu"}', wider
    )
    assert offloaded.in_update().gradients == 4 * offloaded.partition_numel
    plain = zero_memory("zero_optimization.stage=0", sent)
    assert plain.in_last_reduction().buffers == (2 + 4) * plain.parameters.total
    accumulated = zero_memory("zero_optimization.stage=1", wider, sent)
    kept = accumulated.states.buffers
    assert accumulated.in_last_reduction().buffers - kept == 4 * accumulated.parameters.total
    bucketed = [
        zero_memory("zero_optimization.stage=2", *each).in_last_reduction().buffers
        for each in ([], [sent])
    ]
    assert bucketed[1] - bucketed[0] == 4 * 400_000, "a bucket's copy in fp32"


def test_the_parameter_that_fills_a_sub_group_belongs_to_it() -> None:
    overrides = [
        "zero_optimization.stage=3",
        "zero_optimization.sub_group_size=10",
        "zero_tp.parallel.tensor=1",
    ]
    settings = replace(ZeroSettings.of(load(overrides), cpu=False), data=1)
    parameters = RankParameters(((6, 6, 6), (2,)), ((6,), (6,), (6,), (2,)), (0, 0, 0, 0), False)
    memory = ZeroMemory(parameters, settings)
    assert memory.in_grad_conversion().gradients - memory.states.gradients == 4 * (6 + 6), (
        "the update's fp32 gradients"
    )


def test_a_recomputed_layer_is_gathered_as_a_whole() -> None:
    """The modules of a layer run again before the backward of the last of them; no prefetch, all
    used again soon.
    """
    modules, layers = ((100,), (10,), (20,), (10,), (20,), (50,)), (-1, 0, 0, 1, 1, 2)

    def most(recomputed: range, max_reuse: int) -> list[float]:
        gathered = most_gathered(modules, layers, False, recomputed, 0, 0, 10**9, max_reuse)
        return [gathered["backward", layer] for layer in (1, 0)]

    assert most(range(0), 45) == [20, 20]
    assert most(range(2), 45) == [30, 30]
    assert most(range(1), 45) == [20, 30]


def rank_of(overrides: list[str]) -> int:
    """Return the rank that holds the most: at stages 1 and 2 the last, which owns the gradients
    that come first.

    ZeRO-3's ranks hold the same. There DeepSpeed compares with rank 0, which has to exist.
    """
    return 0 if "zero_optimization.stage=3" in overrides else WORLD - 1


@functools.cache
def engine_peaks(tier: str, rank: int) -> dict[str, dict[str, Any]]:
    """Many configs in one process: importing and connecting DeepSpeed costs more than a step."""
    mine = [number for number, one in enumerate(CONFIGS) if rank_of(one) == rank]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.planned", str(WORLD), str(rank)],
        input=json.dumps(
            [CONFIGS[number] for number in mine if TIERS.get(number, "heavy") == tier]
        ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    return {json.dumps(line["overrides"]): line for line in lines}


@pytest.mark.parametrize("number", CASES)
def test_the_plan_against_a_real_step(number: int) -> None:
    overrides = CONFIGS[number]
    engine = engine_peaks(TIERS.get(number, "heavy"), rank_of(overrides))[json.dumps(overrides)]
    model = run_model_size(load(overrides))
    assert engine["parameters"] == model.parameters.total
    assert engine["planned"] == pytest.approx(engine["measured"], rel=0.03)
    # MemTracker misses half of ZeRO-3's first step; test_papers_zero.py has it.
    if load(overrides).zero_stage < 3:
        measured, planned = engine["first"]
        assert planned == pytest.approx(measured, rel=0.03)
    before, after = engine["moments"]  # the first step creates them
    assert before == 0 < after == engine["planned_moments"]


def test_the_dry_run_counts_what_memtracker_counts() -> None:
    """The same forward and backward, fake and real, with gradients that stay."""
    config = GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        n_positions=64,
        vocab_size=200,
        bos_token_id=0,
        eos_token_id=0,
    )

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
        samples = join_parts(measure(model, Batch(tokens, tokens)), range(2))
    parameters = 2 * sum(parameter.numel() for parameter in model.parameters())
    ours = (
        max(one.activations + one.transients + 2 * one.finished_elements for one in samples)
        + parameters
    )
    assert peak(fake=True) == peak(fake=False)
    assert ours == pytest.approx(peak(fake=True), rel=0.002)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_every_architecture_are_those_of_transformers(name: str) -> None:
    encoder = name in ENCODERS
    config = load(family(name, "zero_tp.parallel.tensor=1", *([MASKED] if encoder else [])))
    hf_config = config.hf_config()
    with torch.device("meta"):
        theirs = native_model(hf_config, attn_implementation="eager")
    spec, parameters, whole = model_size(hf_config, 1, False)
    assert whole == parameters.total == theirs.num_parameters()
    assert layer_products(spec) * spec.layers < whole
