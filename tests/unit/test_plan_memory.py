"""The dry run of few layers against one of all, and the plan against MemTracker's peak of a real engine's step."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import GPT2Config

from tests.encoders import MODEL_TYPES as ENCODERS
from tests.native import native_model
from tests.planned import BASE, FILE
from tests.tiers import THOROUGH, in_tiers
from zero_tp import devices
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.config import RunConfig
from zero_tp.data.batch import Batch
from zero_tp.models import norm
from zero_tp.models.flops import layer_products
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.parallel import elementwise, loss
from zero_tp.planning import dryrun, pictures
from zero_tp.planning.dryrun import Kind, contexts, dry_run, shortened
from zero_tp.planning.formulas import (
    Layer,
    eager_core,
    kept,
    kept_full,
    kept_outside_layers,
    kept_selective,
    model_states,
    sdpa_fused_core,
)
from zero_tp.planning.memory import model_of, rank_memory
from zero_tp.planning.moments import joined, measure
from zero_tp.planning.workload import Workload, workload_of
from zero_tp.planning.zero import ZeroMemory
from zero_tp.planning.zero_settings import ZeroSettings
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
    "bert": {"hidden_act": "gelu"},
    "megatron-bert": {},
}


DOCUMENTS = "zero_tp.data.document_attention=reset"
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32}
WINDOWS |= {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
WINDOWS_OF_7 = f"zero_tp.model.layer_types={json.dumps([WINDOWS['layer_types'][number % 2] for number in range(7)])}"


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
    ["zero_optimization.stage=2", "zero_optimization.contiguous_gradients=true", "zero_tp.parallel.tensor=4", *WIDE],
]
MASKED = 'zero_tp.objective={"type": "masked", "mask_probability": 0.15}'
CONFIGS += [
    family("megatron-bert", "zero_optimization.stage=1", MASKED),
    family("bert", "zero_optimization.stage=2", 'zero_tp.recompute={"mode":"selective","modules":["norm"]}', MASKED),
]
WIDER = ["data_types.grad_accum_dtype=fp32", "gradient_accumulation_steps=2", "zero_tp.parallel.tensor=1"]
CONFIGS += [
    ["zero_optimization.stage=1", *WIDER],
    ["zero_optimization.stage=2", *WIDER, *WIDE],
    ["zero_optimization.stage=3", *WIDER],
    ["zero_optimization.stage=3", "zero_tp.parallel.tensor=1"],
    ["zero_optimization.stage=1", "zero_tp.parallel.tensor=1", "optimizer.params.fused=false"],
]
WORLD = 4
NAMES = [
    " ".join(re.sub(r'.*"model_type": "([\w-]+)".*', r"\1", one).split(".")[-1] for one in config) for config in CONFIGS
]


# ZeRO-3 with offload; then full recomputation with ZeRO-2, windows, and every fourth; then all.
TIERS = {number: "thorough" for number in (*range(0, len(CONFIGS), 4), 20, 24, 29)} | {12: "first"}
MARKS: dict[str, Any] = {"first": (), "thorough": THOROUGH, "heavy": pytest.mark.heavy}
CASES = [pytest.param(number, id=name, marks=MARKS[TIERS.get(number, "heavy")]) for number, name in enumerate(NAMES)]


def load(overrides: list[str]) -> RunConfig:
    return RunConfig.load(ROOT / FILE, BASE + overrides, WORLD)


@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "accelerator"])
def test_layers_that_differ_add_up_to_a_dry_run_of_all(number: int, cpu: bool) -> None:
    overrides = CONFIGS[number]
    layers = "num_hidden_layers" if any('"model_type"' in each for each in overrides) else "n_layer"
    config = load(
        [*overrides, f"zero_tp.model.{layers}=7", *([WINDOWS_OF_7] if "layer_types" in str(overrides) else [])]
    )
    assert dry_run(config.hf_config(), workload_of(config, cpu=cpu)) == dry_run(
        config.hf_config(), workload_of(config, cpu=cpu), whole=True
    )


RECOMPUTED: list[dict[str, Any]] = [
    {"mode": "full", "layers": 4},
    {"mode": "full", "every": 3},
    {"mode": "selective", "every": 2, "modules": ["norm"]},
    {"mode": "full", "keep_micro_batches": 1},
]


RECOMPUTED_CASES = [
    pytest.param(policy, split, id=" ".join(map(str, [*policy.values(), *["P_a+cpu"] * split])), marks=marks)
    for number, policy in enumerate(RECOMPUTED)
    for split in ([False, True] if policy["mode"] == "full" else [False])
    for marks in [() if split and number == 1 else THOROUGH]
]


@pytest.mark.parametrize(("policy", "split"), RECOMPUTED_CASES)
def test_layers_that_recompute_add_up_too(policy: dict[str, Any], split: bool) -> None:
    overrides = ["zero_tp.model.n_layer=11", "gradient_accumulation_steps=2"]
    overrides += [f"zero_tp.recompute={json.dumps(policy)}"]
    if split:
        blocks = {"partition_activations": True, "cpu_checkpointing": True}
        overrides += [f"activation_checkpointing={json.dumps(blocks)}", "zero_tp.parallel.sequence=false"]
    config = load(overrides)
    for cpu in (True, False):
        workload = workload_of(config, cpu=cpu)
        found = dry_run(config.hf_config(), workload)
        assert found == dry_run(config.hf_config(), workload, whole=True)
        kept = max(one.activations for one in found)
        none = dry_run(config.hf_config(), replace(workload, policy=RecomputePolicy(mode="none")))
        nothing = max(one.activations for one in none)
        assert kept == nothing if policy.get("keep_micro_batches") else kept < nothing


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "accelerator"])
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
    found = dry_run(config.hf_config(), workload)
    monkeypatch.setattr(dryrun, "pieces_that_differ", range)
    every = dry_run(config.hf_config(), workload)
    assert list(dict.fromkeys(found)) == list(dict.fromkeys(every))
    assert len(found) < len(every) or rows == 100
    assert not hasattr(loss, "range")


@pytest.mark.parametrize("layers", [1, 2, 3, 96])
def test_few_layers_stand_for_many(layers: int) -> None:
    alike = [Kind(None, False)] * layers
    assert len(shortened(alike)) == min(layers, 3)
    alternating = [Kind(32 if number % 2 else None, number < 5) for number in range(layers)]
    assert set(contexts(shortened(alternating))) == set(contexts(alternating))
    assert len(shortened(alternating)) <= min(layers, 13)


def test_an_accelerator_keeps_what_the_cpu_keeps_where_the_code_does_not_branch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without attention's dropout, which sends the CPU's kernel down another path, or its own backward, without
    collectives, and with pieces of one size."""
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(elementwise, "CACHE_ELEMENTS", 10**9)
    monkeypatch.setattr(loss, "SLICE_ELEMENTS", 10**9)
    for recompute in ("none", "full"):
        config = load(
            ["zero_tp.parallel.tensor=1", "zero_tp.model.attn_pdrop=0.0", f"zero_tp.recompute={recompute}", *WIDE]
        )
        cpu, other = (dry_run(config.hf_config(), workload_of(config, cpu=cpu)) for cpu in (True, False))
        for phase in ("forward", "backward"):
            sizes = [[(one.activations, one.transients, one.gradients) for one in found if one.phase == phase]
                     for found in (cpu, other)]  # fmt: skip
            for at in range(3):
                assert max(one[at] for one in sizes[0]) == pytest.approx(max(one[at] for one in sizes[1]), rel=0.005)


def test_a_dry_run_computes_the_pieces_that_differ_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces of one row, of which there are 4 × 256."""
    monkeypatch.setattr(elementwise, "CACHE_ELEMENTS", 1)
    config = load(family("llama", "zero_tp.parallel.tensor=1"))
    with mock.patch.object(norm, "_rms_norm", wraps=norm._rms_norm) as normed:
        dry_run(config.hf_config(), workload_of(config, cpu=True))
    assert normed.call_count % 3 == 0 and 3 <= normed.call_count <= 60


def test_an_accelerator_takes_the_branches_of_its_type() -> None:
    """Keys and values repeated beside a mask, checkpoints in host memory, no mask of attention's dropout."""

    def kept(overrides: list[str], cpu: bool) -> float:
        config = load(overrides)
        workload = workload_of(config, cpu=cpu, varlen=False)
        return max(one.activations for one in dry_run(config.hf_config(), workload))

    grouped = family("llama", DOCUMENTS, "zero_tp.parallel.tensor=1")
    # K and V of 8 heads instead of 4, [b, 4, s, d] in bf16 more, of 3 layers.
    assert kept(grouped, False) - kept(grouped, True) == pytest.approx(3 * 2 * 4 * 256 * 128 * 2, rel=0.01)
    checkpoints = ["zero_tp.recompute=full", "zero_tp.parallel.tensor=1", *WIDE]
    on_host = [*checkpoints, 'activation_checkpointing={"cpu_checkpointing":true}']
    stream = 4 * 256 * 256 * 2
    assert kept(checkpoints, False) - kept(on_host, False) == pytest.approx(3 * stream, rel=0.01)
    assert kept(checkpoints, True) == kept(on_host, True)
    assert kept(WIDE, False) < 0.7 * kept(WIDE, True)


@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=THOROUGH)])
def test_documents_and_windows_cost_no_mask_on_an_accelerator(rows: int) -> None:
    """Of 3 layers, of which 2 have a window: two masks with documents, one mask without, by their formulas."""
    s, bf16 = 256, 2
    model = {**WINDOWS, "num_key_value_heads": 8}

    def most(*overrides: str, varlen: bool) -> float:
        sizes = ["zero_tp.parallel.tensor=1", f"train_micro_batch_size_per_gpu={rows}"]
        config = load([*family("qwen2", *overrides, model=model), *sizes])
        found = dry_run(config.hf_config(), workload_of(config, cpu=False, varlen=varlen))
        return max(one.activations for one in found)

    # Several rows are copied to lie end to end: copies stay instead of Q, K and the product that V is part of.
    less = 2 * bf16 * rows * s * 256 if rows > 1 else 0
    state = 16  # of dropout that there is not
    masks = 2 * bf16 * rows * s * s
    starts = 4 * (rows * s + 1)
    assert most(DOCUMENTS, varlen=False) - most(DOCUMENTS, varlen=True) == masks - starts + 3 * (less - state)
    mask = bf16 * s * s
    starts = 4 * (rows + 1)
    assert most(varlen=False) - most(varlen=True) == mask - starts + 2 * (less - state)


EVERYTHING = ["attention_core", "mlp_activation", "norm"]
CORES: dict[str, Callable[[Layer], float]] = {"eager": eager_core, "sdpa": sdpa_fused_core}


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=THOROUGH)])
@pytest.mark.parametrize(
    ("tensor", "sequence"), in_tiers([(1, False), (2, False), (2, True), (4, True)], [(1, False), (2, True)])
)
def test_an_accelerator_keeps_what_the_papers_count(tensor: int, sequence: bool, dtype: str) -> None:
    """To the byte, with what table 2 leaves out written down here."""
    s, b, h, v, count = 128, 2, 192, 1000, 4
    layer = Layer(s, b, h, 8, tensor, sequence)
    policies: list[tuple[dict[str, Any], dict[str, Any], Callable[[Callable[[Layer], float]], float]]] = [
        ({"mode": "none"}, {}, lambda core: kept(layer, core)),
        ({"mode": "full"}, {}, lambda core: kept_full(layer)),
        ({"mode": "selective", "modules": EVERYTHING}, {}, lambda core: kept_selective(layer, core, EVERYTHING)),
    ]
    if tensor > 1 and not sequence:
        split = {"partition_activations": True}
        policies.append(({"mode": "full"}, split, lambda core: kept_full(layer, partitioned=True)))
    shards = tensor if sequence else 1
    # The loss of parallel/loss.py keeps the head's gradient in place of the logits, in bf16 that of one block.
    outside = kept_outside_layers(layer, v) - 4 * s * b * v / tensor + (2 if dtype == "bf16" else 4) * v * h / tensor
    # The final norm's statistics; token and position numbers, and which tokens are of other ranks; two figures.
    outside += 8 * s * b / shards + 8 * s * b + 8 * s + (s * b if tensor > 1 else 0) + 2 * 4
    for attention, core in CORES.items():
        config = GPT2Config(n_layer=count, n_embd=h, n_head=8, n_positions=s, vocab_size=v)
        config._attn_implementation = attention
        for policy, checkpointing, formula in policies:
            again = policy["mode"] != "none"
            workload = Workload(s, b, tensor, sequence, dtype, policy=RecomputePolicy(**policy))
            moments = dry_run(config, replace(workload, checkpointing=checkpointing), whole=True)
            # Mean and deviation of two norms in fp32, where no layer is recomputed as a whole.
            statistics = 0 if policy["mode"] == "full" else 16 * s * b / shards
            mask = 2 * s**2 if attention == "eager" and again else 0  # one for all layers, which run again with it
            expected = count * (formula(core) + statistics) + outside + mask
            assert max(one.activations for one in moments) == expected, (attention, policy, checkpointing)


@pytest.mark.parametrize("stage", range(4))
def test_model_states_are_the_papers_and_padding(stage: int) -> None:
    config = load([f"zero_optimization.stage={stage}", "zero_tp.parallel.tensor=1"])
    parameters = model_of(config.hf_config(), 1, False).parameters
    states = ZeroMemory(parameters, ZeroSettings.of(config.deepspeed_config(), WORLD, cpu=False)).states
    papers = model_states(parameters.total, stage, WORLD)
    # Stage 3 pads each parameter to the number of ranks, stages 1 and 2 each of two groups to twice that.
    padded = {0: 0, 1: 4 * WORLD, 2: 4 * WORLD, 3: WORLD * (len(parameters.matrices) + len(parameters.flats))}[stage]
    own = padded / WORLD
    assert 0 <= states.optimizer - papers["optimizer"] <= 12 * own
    assert 0 <= states.parameters - papers["parameters"] <= 2 * (padded if stage < 3 else own)
    assert stage < 3 or 0 <= states.gradients - papers["gradients"] <= 2 * own


def rank_of(overrides: list[str]) -> int:
    """Return the rank that holds the most: at stages 1 and 2 the last, which owns what backward makes first.

    ZeRO-3's ranks hold the same, and there DeepSpeed compares with rank 0, which has to exist.
    """
    return 0 if "zero_optimization.stage=3" in overrides else WORLD - 1


@functools.cache
def engine_peaks(tier: str, rank: int) -> dict[str, dict[str, Any]]:
    """Many configs in one process: importing and connecting DeepSpeed costs more than a step."""
    mine = [number for number, one in enumerate(CONFIGS) if rank_of(one) == rank]
    done = subprocess.run(
        [sys.executable, "-m", "tests.planned", str(WORLD), str(rank)],
        input=json.dumps([CONFIGS[number] for number in mine if TIERS.get(number, "heavy") == tier]),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {json.dumps(line["overrides"]): line for line in lines}


@pytest.mark.parametrize("number", CASES)
def test_the_plan_against_a_real_step(number: int) -> None:
    overrides = CONFIGS[number]
    found = engine_peaks(TIERS.get(number, "heavy"), rank_of(overrides))[json.dumps(overrides)]
    parallel = load(overrides).zero_tp.parallel
    model = model_of(load(overrides).hf_config(), parallel.tensor, parallel.sequence)
    assert found["parameters"] == model.parameters.total
    assert found["planned"] == pytest.approx(found["measured"], rel=0.03)
    if load(overrides).zero_stage < 3:  # MemTracker misses half of that of ZeRO-3; test_papers_zero.py follows it
        measured, planned = found["first"]
        assert planned == pytest.approx(measured, rel=0.03)
    before, after = found["moments"]  # the first step makes them
    assert before == 0 < after == found["planned_moments"]


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
        moments = joined(measure(model, Batch(tokens, tokens)), range(2))
    parameters = 2 * sum(parameter.numel() for parameter in model.parameters())
    ours = max(one.activations + one.transients + 2 * one.gradients for one in moments) + parameters
    assert peak(fake=True) == peak(fake=False)
    assert ours == pytest.approx(peak(fake=True), rel=0.002)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_every_architecture_are_those_of_transformers(name: str) -> None:
    encoder = name in ENCODERS
    config = load(family(name, "zero_tp.parallel.tensor=1", *([MASKED] if encoder else [])))
    hf_config = config.hf_config()
    with torch.device("meta"):
        theirs = native_model(hf_config, **({"attn_implementation": "eager"} if encoder else {}))
    spec, parameters, whole = model_of(hf_config, 1, False)
    assert whole == parameters.total == theirs.num_parameters()
    assert layer_products(spec) * spec.layers < whole


def test_a_picture_keeps_the_ends_of_phases_and_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "SHOWN_POINTS", 20)
    config = load(["zero_tp.model.n_layer=7"])
    points = rank_memory(config, cpu=False).points
    shown = pictures._thinned(points)
    assert len(shown) < len(points) / 3
    assert max(one.total for one in shown) == max(one.total for one in points)
    assert shown[-3:] == points[-3:], "the end of backward, the step, and what stays after it"
