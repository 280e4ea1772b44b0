"""The plan of a run: parameters, devices, margins, the papers' column, the whole run's time, and
the command.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.formulas import gpt_parameters, iteration_flops
from tests.support.launched import ROOT, script
from tests.support.plans import CONFIGS, GPT2, plan_gpt2
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.constants import GIB
from zero_tp.base.errors import UserError
from zero_tp.model import flops
from zero_tp.parallel.devices import NAMES, named_device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning import plan_report as report
from zero_tp.tools.planning.memory import model_size
from zero_tp.tools.planning.plan import plan

# ---- parameters ----------------------------------------------------------------------------------


def test_parameters_are_those_of_the_closed_formula() -> None:
    config = RunConfig.load(GPT2, (), 8)
    for tensor in (1, 2, 4):
        spec, parameters, whole = model_size(config.hf_config(), tensor, tensor > 1)
        assert flops.model_flops(spec, 512, 1024) == pytest.approx(
            iteration_flops(512, 1024, 24, 1024, 50257)
        )
        assert whole == gpt_parameters(24, 1024, 50257, 1024)
        assert whole / tensor <= parameters.total < whole / tensor * (1 + 0.02 * tensor)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "billions"),
    [("336m", 24, 1024, 0.336), ("1.3b", 24, 2048, 1.3), ("3.9b", 48, 2560, 3.9)],
)
def test_parameters_of_bert_are_those_of_the_paper(
    name: str, layers: int, hidden: int, billions: float
) -> None:
    """With its heads; the head's FLOPs are those of the masked tokens."""
    config = RunConfig.load(CONFIGS / f"bert_{name}.json", (), 8)
    spec, _, whole = model_size(config.hf_config(), 1, False)
    # Pooler, MLM transform with its norm and a bias per token, sentence head; and two token types
    # (arXiv 1909.08053).
    heads = (hidden**2 + hidden) + (hidden**2 + 3 * hidden + 30522) + (2 * hidden + 2)
    assert whole == gpt_parameters(layers, hidden, 30522, 512) + 2 * hidden + heads
    assert round(whole / 1e9, 3 if billions < 1 else 1) == billions
    tokens, length = 1024 * 512, 512
    dense = 24 * tokens * layers * hidden**2 + 4 * tokens * layers * length * hidden
    head = 0.15 * 2 * tokens * hidden * (hidden + 30522)
    assert flops.model_flops(spec, 1024, 512, config.label_fraction) == pytest.approx(
        3 * (dense + head)
    )


@pytest.mark.parametrize(
    ("name", "world", "billions", "active"),
    [
        ("mixtral_8x7b", 64, 46.7, 12.9),
        ("qwen1.5_moe_a2.7b", 16, 14.3, 2.7),
        ("qwen3_30b_a3b", 32, 30.5, 3.3),
        ("olmoe_1b_7b", 8, 6.9, 1.3),
    ],
)
def test_parameters_of_experts_and_the_active_ones_are_the_published_ones(
    name: str, world: int, billions: float, active: float
) -> None:
    config = RunConfig.load(CONFIGS / f"{name}.json", (), world)
    model = model_size(config.hf_config(), config.zero_tp.parallel.tensor, True)
    assert model.num_parameters == pytest.approx(billions * 1e9, rel=0.005)
    assert model.active_parameters == pytest.approx(active * 1e9, rel=0.02)


def test_glm_4_5_air_has_106_billion_parameters_of_which_12_compute_a_token() -> None:
    """Its embeddings are in no active parameters that are published."""
    config = RunConfig.load(CONFIGS / "glm4.5_air.json", (), 128)
    model = model_size(config.hf_config(), config.zero_tp.parallel.tensor, True)
    embeddings = 2 * model.spec.vocabulary * model.spec.hidden
    assert 106 <= model.num_parameters / 1e9 < 107
    assert 12 <= (model.active_parameters - embeddings) / 1e9 < 12.5


def test_a_plan_of_experts_prints_its_assumption() -> None:
    experts = plan(RunConfig.load(CONFIGS / "olmoe_small.json", (), 4), named_device("cpu", 4))
    text = report.describe(experts)
    assert report.GUARD_NOTE not in text
    assert f"({experts.model.active_parameters:,} active: 2 of 8 experts)" in text
    assert "assumed: every expert of a layer gets as many tokens as any other" in text
    assert (
        experts.as_json()["model"]["active_parameters"]
        == experts.model.active_parameters
        < experts.model.num_parameters
    )


def test_a_plan_says_that_it_leaves_out_guarded_steps() -> None:
    assert report.GUARD_NOTE in report.heading_lines(
        plan_gpt2("zero_tp.training.guard_gradients=true")
    )


# ---- devices and margins -------------------------------------------------------------------------


@THOROUGH
@pytest.mark.parametrize("name", NAMES)
def test_every_device_plans_a_run(name: str) -> None:
    planned = plan_gpt2(
        *(['bf16={"enabled":false}'] if name.startswith("v100") else []), device=name
    )
    assert planned.needed > planned.peak.total > 0 and planned.time.total > 0
    assert planned.fits == (planned.spare >= 0)


GROUPS = [(8, 2, 3), (8, 1, 1), (1, 1, 0), (8, 8, 1), (4096, 8, 3)]


@pytest.mark.parametrize(("world", "tensor", "communicators"), in_tiers(GROUPS, GROUPS[:3]))
def test_each_group_of_ranks_has_a_communicator(
    world: int, tensor: int, communicators: int
) -> None:
    """Those of the world, TP and DP; groups of one rank have none."""
    overrides = [
        f"zero_tp.parallel.tensor={tensor}",
        "train_batch_size=auto",
        "gradient_accumulation_steps=1",
    ]
    planned = plan_gpt2(*overrides, world=world, device="a100-80gb")
    margin = (0.92 + 0.67 * communicators) * GIB
    assert planned.communicators == communicators
    assert planned.needed == pytest.approx(1.05 * planned.peak.total + margin)
    line = f" GiB of tensors + {margin / GIB:.2f} for the context and {communicators} communicator"
    assert line in report.describe(planned)


def test_the_links_and_hosts_of_nodes_that_are_not_eight_devices() -> None:
    """A rack, a board of eight, one with slower links, a superchip that is its own node, cards
    in PCIe slots.
    """
    assert [named_device(name).per_node for name in ("gb200", "h100", "gh200")] == [72, 8, 1]
    names = ("a100-80gb", "a800-80gb", "a100-pcie-80gb")
    seconds = [
        plan_gpt2("zero_tp.parallel.tensor=2", device=name).time.tp_communication for name in names
    ]
    assert sorted(set(seconds)) == seconds


@pytest.mark.thorough
def test_checkpoints_in_host_memory_count() -> None:
    """Each takes page-locked memory, rounded up to a power of two: 8 × 1000 × 1024 numbers of
    bf16 take 16 MiB.
    """
    blocks = {"cpu_checkpointing": True}
    base = (
        "zero_tp.recompute=full",
        "zero_tp.data.sequence_length=1000",
        "train_micro_batch_size_per_gpu=8",
    )

    def host(checkpointing: dict[str, Any], *more: str) -> float:
        return plan_gpt2(
            *base, f"activation_checkpointing={json.dumps(checkpointing)}", *more
        ).memory.host

    assert host({}) == 0
    assert host(blocks) == 24 * 16 * 2**20
    assert host({**blocks, "contiguous_memory_optimization": True}) == 512 * 2**20, (
        "one buffer, of 375 MiB"
    )
    assert host(blocks, "zero_tp.parallel.tensor=2") == 24 * 8 * 2**20, "a shard under SP"


OWN = {
    "name": "mine",
    "memory_gib": 5,
    "bf16_tflops": 100,
    "fp32_tflops": 20,
    "memory_gbps": 1000,
    "intra_gbps": 50,
    "inter_gbps": 10,
}


def test_a_device_file_is_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN))
    own = named_device(str(path))
    assert (own.name, own.per_node, own.tflops("fp16")) == ("mine", 8, None)
    assert "mine" in report.describe(plan_gpt2(device=str(path)))


@pytest.mark.parametrize(
    ("device", "refusal"),
    [
        ("a100-80g", r"--device: 'a100-80g' is unknown.*a100-80gb"),
        ("v100", "v100-32gb has no bf16 matrix units"),
        ("mine.json", r"memory_gbp: unknown key.*memory_gbps"),
        (
            "channels.json",
            r"^channels\.json\.channels: 24 exceeds units, 1; set units to the device's number of "
            "m",
        ),
        (
            "none.json",
            "^none.json: no such file; give the path of a device's JSON file, or one of "
            "v100-16gb, ",
        ),
    ],
)
def test_devices_that_cannot_be_planned_for(
    device: str, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, change in {"mine": {"memory_gbp": 1}, "channels": {"channels": 24}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(OWN | change))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=refusal):
        plan_gpt2(device=device)


def test_the_remedy_names_the_dtype_that_the_device_lacks() -> None:
    with pytest.raises(UserError, match=r"cpu has no fp16 matrix units.*--set fp16\.enabled=false"):
        plan_gpt2("bf16.enabled=false", 'fp16={"enabled":true}', device="cpu")


# ---- figures -------------------------------------------------------------------------------------


def test_the_time_of_the_whole_run() -> None:
    config = RunConfig.load(GPT2, ["zero_tp.training.steps=10000"], 8)
    step = config.global_batch * config.zero_tp.data.sequence_length
    for budget, tokens in ((None, 10000 * step), (10**12, 10**12)):
        planned = plan(config, named_device("a100-80gb", 8), budget)
        seconds = planned.time.total * tokens / step
        expected = {"tokens": tokens, "days": seconds / 86400, "device_hours": 8 * seconds / 3600}
        assert planned.as_json()["run"] == pytest.approx(expected)
        (line,) = (line for line in report.time_lines(planned) if "the whole run" in line)
        numbers = re.search(r"([\d,.]+) (days|hours), ([\d,.]+) device-hours", line)
        assert numbers and float(numbers[3].replace(",", "")) == pytest.approx(
            8 * seconds / 3600, abs=0.051
        )
        hours = float(numbers[1].replace(",", "")) * (24 if numbers[2] == "days" else 1)
        assert hours == pytest.approx(seconds / 3600, abs=1.3)


def test_a_tiny_models_figures_are_in_small_units() -> None:
    config = RunConfig.load(CONFIGS / "quickstart.json", (), 4)
    planned = plan(config, named_device("h100"))
    lines = report.describe(planned).splitlines()
    (memory,) = (
        number for number, line in enumerate(lines) if line.startswith("memory of one device [MiB]")
    )
    (time,) = (
        number for number, line in enumerate(lines) if line == "time of one step, an estimate [ms]"
    )
    totals = [line.split() for line in lines if line.startswith("  total")]
    assert (
        float(totals[0][2]) == pytest.approx(planned.tensor_bytes / 2**20, abs=0.006)
        and memory < time
    )
    assert float(totals[1][1]) == pytest.approx(1e3 * planned.time.total, abs=0.0006)
    assert all(
        float(line.split()[-1]) > 0
        for line in lines[memory + 1 :]
        if line.startswith("  parameters")
    )
    (run,) = (line for line in lines if "the whole run" in line)
    numbers = re.search(r"([\d,.]+) seconds, ([\d.]+) device-hours", run)
    assert (
        numbers
        and float(numbers[1]) > 0
        and float(numbers[2]) == pytest.approx(4 * planned.run_seconds / 3600, rel=0.06)
    )


@THOROUGH
def test_the_papers_column_has_the_runs_policy_and_dtype() -> None:
    def papers(*overrides: str) -> dict[str, float]:
        return plan_gpt2("zero_tp.attention=eager", *overrides).paper.bytes()

    none, full = papers("zero_tp.recompute=none"), papers("zero_tp.recompute=full")
    some = papers('zero_tp.recompute={"mode":"full","layers":6}')  # of 24
    assert some["activations"] == pytest.approx((3 * none["activations"] + full["activations"]) / 4)
    assert papers('zero_tp.recompute={"mode":"full","every":4}') == some
    assert papers('zero_tp.recompute={"mode":"full","keep_micro_batches":1}') == none
    fp32 = papers("zero_tp.recompute=full", 'bf16={"enabled":false}')
    assert (
        fp32["activations"] == 2 * full["activations"]
        and fp32["parameters"] == 2 * full["parameters"]
    )


def test_the_time_counts_the_micro_batches_that_recompute() -> None:
    def seconds(policy: str) -> float:
        overrides = (
            "train_batch_size=64",
            "train_micro_batch_size_per_gpu=2",
            f"zero_tp.recompute={policy}",
        )
        return plan_gpt2(*overrides).time.recompute

    assert seconds('{"mode":"full","keep_micro_batches":1}') == pytest.approx(
        0.75 * seconds("full")
    )


@THOROUGH
def test_the_elements_sent_over_tp_count_the_layers_that_recompute() -> None:
    def sent(policy: str) -> float:
        batch = (
            "train_batch_size=64",
            "train_micro_batch_size_per_gpu=4",
            "zero_tp.parallel.tensor=2",
        )
        return plan_gpt2(*batch, f"zero_tp.recompute={policy}").elements_sent()["tensor"]

    none, full = sent("none"), sent("full")
    assert sent('{"mode":"full","layers":6}') == pytest.approx((3 * none + full) / 4)  # of 24
    assert (
        sent('{"mode":"full","keep_micro_batches":1}') == pytest.approx((none + 3 * full) / 4)
        and none < full
    )


@pytest.mark.parametrize(("stage", "volume"), [(1, 2), (2, 1 + 4), (3, 3 * 4)])
def test_the_elements_sent_count_the_micro_batches(stage: int, volume: int) -> None:
    """ZeRO-2 reduces in each of the four micro-batches, ZeRO-3 gathers in each, too."""
    batch = ("train_batch_size=64", "train_micro_batch_size_per_gpu=2")
    planned = plan_gpt2(f"zero_optimization.stage={stage}", *batch)
    assert planned.elements_sent()["data"] == pytest.approx(
        volume * planned.model.num_parameters * 7 / 8
    )


# ---- the command ---------------------------------------------------------------------------------


@THOROUGH
def test_the_command(tmp_path: Path) -> None:
    written = tmp_path / "planned.json"
    done = script(
        "launch/plan.py",
        ROOT,
        "ds_configs/gpt2_355m.json",
        "--world-size",
        "8",
        "--device",
        "h100-80gb",
        "--json",
        "--dry-run",
        "--search",
        "--write",
        str(written),
        "--set",
        "zero_tp.model.n_layer=4",
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["fits"] and result["peak_bytes"]["total"] < result["needed_bytes"]
    sent = result["paper_elements_sent"]
    assert sent["tensor"] == 0 and sent["data"] == pytest.approx(
        2 * result["model"]["parameters"] * 7 / 8
    )
    assert result["dry_run"]["dry_run_bytes"] == result["dry_run"]["true_view_bytes"]
    assert result["candidates"][0]["step_seconds"]["total"] <= result["step_seconds"]["total"]
    assert RunConfig.load(written, (), 8).global_batch == result["batch"]["global"]


@THOROUGH
@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--world-size 8 --device h1000", "--device: 'h1000' is unknown"),
        ("--world-size 0 --device h100", "--world-size: 0 is not positive"),
        ("--world-size 8 --device h100 --write x.json", "--write: writes what --search finds"),
        ("--world-size 8 --device h100 --top 3", "--top: shows what --search finds"),
        ("--world-size 8 --device h100 --html /proc/x/x.html", "/proc/x: can't be written"),
        (
            "--world-size 8 --device h100 --html=",
            "--html: . is a directory; give the path of a file",
        ),
        ("--world-size 8 --device h100 --pipeline 2", "unrecognized arguments: --pipeline 2"),
        ("--world-size 3 --device h100", "zero_tp.parallel.tensor: tensor 2 × data 1.5 ≠ world 3"),
    ],
)
def test_mistakes_are_one_line(words: str, refusal: str) -> None:
    config = ("ds_configs/gpt2_355m.json", "--set", "zero_tp.parallel.tensor=2")
    done = script("launch/plan.py", ROOT, *config, *words.split())
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("error: ")
        and refusal in done.stderr
        and done.stderr.count("\n") == 1
    )
