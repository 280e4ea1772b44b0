"""launch/plan.py and what is under it: published times, devices, search, one-line errors, pages."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.formulas import gpt_parameters, iteration_flops
from tests.support.berts import bert_parameters
from tests.tiers import THOROUGH
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.config import RunConfig
from zero_tp.config.resolve import apply_overrides
from zero_tp.constants import GIB
from zero_tp.devices import NAMES
from zero_tp.devices import named_device as device
from zero_tp.errors import ConfigError, UserError
from zero_tp.files import write_named
from zero_tp.models import flops
from zero_tp.planning import plan_report as report
from zero_tp.planning.forecast import MemoryForecast, run_isolated
from zero_tp.planning.memory import model_of, rank_memory
from zero_tp.planning.pictures import over_time, write_page
from zero_tp.planning.plan import plan
from zero_tp.planning.plan_settings import Workload, ZeroSettings
from zero_tp.planning.search import NEAREST, Search, config_with
from zero_tp.strict_json import read_json

ROOT = Path(__file__).resolve().parents[2]
GPT2 = ROOT / "ds_configs" / "gpt2_355m.json"
LARGE = ROOT / "ds_configs" / "papers" / "gpt_175b.json"
OF_8 = ["train_batch_size=8", "zero_optimization.stage=0"]


def test_parameters_are_those_of_the_closed_formula() -> None:
    config = RunConfig.load(GPT2, (), 8)
    for tensor in (1, 2, 4):
        spec, parameters, whole = model_of(config.hf_config(), tensor, tensor > 1)
        assert flops.model_flops(spec, 512, 1024) == pytest.approx(iteration_flops(512, 1024, 24, 1024, 50257))
        assert whole == gpt_parameters(24, 1024, 50257, 1024)
        assert whole / tensor <= parameters.total < whole / tensor * (1 + 0.02 * tensor)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "billions"),
    [("336m", 24, 1024, 0.336), ("1.3b", 24, 2048, 1.3), ("3.9b", 48, 2560, 3.9)],
)
def test_parameters_of_bert_are_those_of_the_paper(name: str, layers: int, hidden: int, billions: float) -> None:
    """With its heads; the head's FLOPs are those of the masked tokens."""
    config = RunConfig.load(ROOT / "ds_configs" / f"bert_{name}.json", (), 8)
    spec, _, whole = model_of(config.hf_config(), 1, False)
    assert whole == bert_parameters(layers, hidden, 30522)
    assert whole == pytest.approx(billions * 1e9, rel=0.02)
    tokens, length = 1024 * 512, 512
    dense = 24 * tokens * layers * hidden**2 + 4 * tokens * layers * length * hidden
    head = 0.15 * 2 * tokens * hidden * (hidden + 30522)
    assert flops.model_flops(spec, 1024, 512, config.labelled) == pytest.approx(3 * (dense + head))


@pytest.mark.parametrize(
    ("name", "world", "billions", "active"),
    [
        ("mixtral_8x7b", 64, 46.7, 12.9),
        ("qwen1.5_moe_a2.7b", 16, 14.3, 2.7),
        ("qwen3_30b_a3b", 32, 30.5, 3.3),
        ("olmoe_1b_7b", 8, 6.9, 1.3),
    ],
)
def test_parameters_and_those_that_are_active_are_the_published_ones(
    name: str, world: int, billions: float, active: float
) -> None:
    config = RunConfig.load(ROOT / "ds_configs" / f"{name}.json", (), world)
    made = model_of(config.hf_config(), config.zero_tp.parallel.tensor, True)
    assert made.whole == pytest.approx(billions * 1e9, rel=0.005)
    assert made.active == pytest.approx(active * 1e9, rel=0.02)


def test_a_plan_of_experts_says_what_it_assumes() -> None:
    made = plan(RunConfig.load(ROOT / "ds_configs" / "olmoe_small.json", (), 4), device("cpu", 4))
    text = report.describe(made)
    assert f"({made.model.active:,} active: 2 of 8 experts)" in text
    assert "assumed: every expert of a layer gets as many tokens as any other" in text
    assert made.as_json()["model"]["active_parameters"] == made.model.active < made.model.whole


@THOROUGH
@pytest.mark.parametrize("name", NAMES)
def test_every_device_plans_a_run(name: str) -> None:
    overrides = ['bf16={"enabled":false}'] if name.startswith("v100") else []
    made = plan(RunConfig.load(GPT2, overrides, 8), device(name, 8))
    assert made.needed > made.peak.total > 0 and made.time.total > 0
    assert made.fits == (made.spare >= 0)


@pytest.mark.parametrize(
    ("world", "tensor", "communicators"), [(8, 2, 3), (8, 1, 1), (8, 8, 1), (1, 1, 0), (4096, 8, 3)]
)
def test_each_group_of_ranks_has_a_communicator(world: int, tensor: int, communicators: int) -> None:
    """The world's, the TP's and the DP's; no group of one rank has one."""
    overrides = [f"zero_tp.parallel.tensor={tensor}", "train_batch_size=auto", "gradient_accumulation_steps=1"]
    made = plan(RunConfig.load(GPT2, overrides, world), device("a100-80gb"))
    margin = (0.92 + 0.67 * communicators) * GIB
    assert made.communicators == communicators
    assert made.needed == pytest.approx(1.05 * made.peak.total + margin)
    said = f"{margin / GIB:.2f} GiB for the context and {communicators} communicators"
    assert said in report.describe(made)


def test_a_search_counts_each_choices_communicators() -> None:
    config = RunConfig.load(GPT2, ("train_batch_size=8", "train_micro_batch_size_per_gpu=1"), 8)
    for one in Search(config, device("h100")).ranked:
        groups = 1 if one.workload.tensor in (1, 8) else 3
        assert one.needed == pytest.approx(1.05 * one.peak.total + (0.92 + 0.67 * groups) * GIB)


def test_the_links_and_hosts_of_nodes_that_are_not_eight_devices() -> None:
    """Cards in PCIe slots, a superchip that is its own node, a rack that is one."""
    links = {name: device(name) for name in ("a100-80gb", "a100-pcie-80gb", "a800-80gb", "gh200", "gb200")}
    assert [each.intra_gbps for each in links.values()] == [300, 32, 200, 50, 900]
    assert [each.per_node for each in links.values()] == [8, 8, 8, 1, 72]
    assert links["gh200"].host_memory_gib < 480 < 1024 < links["gb200"].host_memory_gib

    def seconds(name: str) -> float:
        return plan(RunConfig.load(GPT2, ("zero_tp.parallel.tensor=2",), 8), links[name]).time.tensor

    assert seconds("a100-80gb") < seconds("a800-80gb") < seconds("a100-pcie-80gb")


def test_checkpoints_in_host_memory_count() -> None:
    """Each takes page-locked memory, rounded up to a power of two: 8 × 1000 × 1024 numbers of bf16 take 16 MiB."""
    blocks = {"cpu_checkpointing": True}
    base = ("zero_tp.recompute=full", "zero_tp.data.sequence_length=1000", "train_micro_batch_size_per_gpu=8")

    def host(checkpointing: dict[str, Any], *more: str) -> float:
        given = (*base, f"activation_checkpointing={json.dumps(checkpointing)}", *more)
        return plan(RunConfig.load(GPT2, given, 8), device("h100")).memory.host

    assert host({}) == 0
    assert host(blocks) == 24 * 16 * 2**20
    assert host({**blocks, "contiguous_memory_optimization": True}) == 512 * 2**20, "one buffer, of 375 MiB"
    assert host(blocks, "zero_tp.parallel.tensor=2") == 24 * 8 * 2**20, "a shard under SP"


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    own = {"name": "mine", "memory_gib": 5, "bf16_tflops": 100, "fp32_tflops": 20, "memory_gbps": 1000,
           "intra_gbps": 50, "inter_gbps": 10}  # fmt: skip
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(own))
    chosen = device(str(path))
    assert (chosen.name, chosen.per_node, chosen.tflops("fp16")) == ("mine", 8, None)
    made = plan(RunConfig.load(GPT2, (), 8), chosen)
    assert "mine" in report.describe(made)
    path.write_text(json.dumps({**own, "memory_gbp": 1}))
    with pytest.raises(ConfigError, match=r"memory_gbp: unknown key.*memory_gbps"):
        device(str(path))


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--device: 'a100-80g' is unknown.*a100-80gb"):
        device("a100-80g")
    with pytest.raises(UserError, match="v100-32gb has no bf16 matrix units"):
        plan(RunConfig.load(GPT2, (), 8), device("v100"))


def test_search_finds_faster_settings_that_runs_accept(tmp_path: Path) -> None:
    config = RunConfig.load(GPT2, ("zero_tp.recompute=full", "train_batch_size=1024"), 64)
    made = plan(config, device("a100-40gb"))
    start = time.process_time()
    search = Search(config, made.device)
    shown, best = search.fastest(["zero_tp.recompute=full", "train_batch_size=1024"], 5)
    assert len(search.ranked) > 1000 and time.process_time() - start < 10
    assert len(shown) == 5 and shown[0].time.total < made.time.total
    assert [one.time.total for one in shown] == sorted(one.time.total for one in shown)
    path = tmp_path / "best.json"
    path.write_text(json.dumps(best))
    again = plan(RunConfig.load(path, (), 64), made.device)
    assert again.config.global_batch == 1024 and again.fits
    # The written run is the candidate.
    assert again.needed == pytest.approx(shown[0].needed) and again.time.total == pytest.approx(shown[0].time.total)
    told = "\n".join(report.advice(search, shown, made))
    assert "the present settings fit" in told and "longer than the first" in told


def test_search_weighs_reductions_to_owners() -> None:
    """Where DeepSpeed has them: at stages 1 and 2, not in its BF16_Optimizer, and over two ranks or more."""

    def stages(*overrides: str) -> set[tuple[int, bool]]:
        config = RunConfig.load(GPT2, ("train_batch_size=8", "train_micro_batch_size_per_gpu=1", *overrides), 8)
        ranked = Search(config, device("h100")).ranked
        owners = [one for one in ranked if one.settings.owners]
        assert all(one.workload.tensor < 8 and "reduced to owners" in one.describe() for one in owners)
        return {(one.settings.stage, one.settings.owners) for one in ranked if not one.settings.offload_optimizer}

    both = {(stage, False) for stage in range(4)} | {(2, True)}
    assert stages() == both | {(1, True)}
    assert stages("data_types.grad_accum_dtype=fp32") == both


@pytest.mark.parametrize("given", [1, 3])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("reductions", [{}, {"use_multi_rank_bucket_allreduce": False}, {"reduce_scatter": False}])
def test_a_written_candidate_has_the_settings_that_were_weighed(
    given: int, overlap: bool, reductions: dict[str, bool], tmp_path: Path
) -> None:
    raw, path = read_json(GPT2), tmp_path / "one.json"
    settings = {"stage": given, "overlap_comm": overlap, **reductions}
    apply_overrides(raw, [f"zero_optimization={json.dumps(settings)}"])

    def settings_of(written: dict[str, Any]) -> ZeroSettings:
        path.write_text(json.dumps(written))
        return ZeroSettings.of(RunConfig.load(path, (), 8), cpu=False)

    weighed, workload = settings_of(raw), Workload(1024, 4, policy=RecomputePolicy(mode="full"))
    for stage, owners in [*((stage, False) for stage in range(4)), (1, True), (2, True)]:
        wanted = weighed.with_stage(stage, accumulation=16, owners=owners)
        written = settings_of(config_with(raw, workload, wanted))
        assert written == wanted
        assert written.to_owners == owners


def test_a_config_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "best.json"
    write_named(path, '{"a": 1}')
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"best\.json: can't be written \(No space left on device\)"):
        write_named(path, '{"a": 2}')
    assert read_json(path) == {"a": 1} and [each.name for each in tmp_path.iterdir()] == ["best.json"]


@THOROUGH
def test_what_fits_in_no_way_says_what_was_tried_and_what_is_short(tmp_path: Path) -> None:
    overrides = [*OF_8, "zero_tp.recompute=full", "zero_tp.parallel.sequence=false"]
    config = RunConfig.load(LARGE, overrides, 8)
    chosen = device("rtx4090")
    made = plan(config, chosen)
    assert not made.fits and "does not fit, short by" in report.verdict(made)
    search = Search(config, chosen)
    with pytest.raises(UserError) as caught:
        search.fastest((), 5)
    told = str(caught.value)
    tried = f"of {len(search.ranked)} ways none fit by formulas, and none of the nearest {NEAREST} fits when run dry"
    assert f"does not fit 8 × rtx4090-24gb: {tried}" in told
    raw = read_json(LARGE)
    apply_overrides(raw, overrides)
    short: dict[str, float] = {}  # of the plan of a run with those settings, which knows of no search
    for one in search.ranked[:NEAREST]:
        (tmp_path / "one.json").write_text(json.dumps(config_with(raw, one.workload, one.settings)))
        memory = plan(RunConfig.load(tmp_path / "one.json", (), 8), chosen).memory
        groups = 1 if one.workload.tensor in (1, 8) else 3
        short[one.describe()] = max(
            1.05 * memory.peak.total / GIB + 0.92 + 0.67 * groups - 23.6, (8 * memory.host / GIB - 1024) / 8
        )
    nearest = min(short, key=lambda name: short[name])
    assert short[nearest] > 0 and f"; {nearest} comes nearest with" in told
    assert f", short by {short[nearest]:.1f} GiB a device" in told


def test_search_runs_the_nearest_dry_before_it_says_that_none_fits() -> None:
    """Where the formulas count more than is measured."""
    search = Search(RunConfig.load(GPT2, (), 8), device("h100"))
    search.fitting = 0
    shown, _ = search.fastest((), 100)
    assert 0 < len(shown) <= NEAREST and all(one.shortage <= 0 for one in shown)


@THOROUGH
def test_a_page_that_needs_no_network(tmp_path: Path) -> None:
    made = plan(RunConfig.load(GPT2, (), 8), device("h100"))
    search = Search(made.config, made.device)
    shown, _ = search.fastest((), 3)
    written = write_page(made, tmp_path / "plan.html", report.advice(search, shown, made), shown[0])
    text = written[0].read_text()
    assert {path.suffix for path in written[1:]} == {".png"} and len(written) == 2
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written[1:])
    links = set(re.findall(r"(?:src|href)\s*=\s*\"([^\"]*)\"", text))
    assert not [link for link in links if not link.startswith("#")], "only references inside the page"
    assert "@import" not in text and "<script" not in text
    assert text.count("<svg") == 1 and all(one.describe() in text for one in shown)


def test_a_picture_shows_below_which_size_tensors_fit_with_margins() -> None:
    """Beside another settings' picture, on one scale."""
    made = plan(RunConfig.load(GPT2, (), 8), device("h100"))
    full = replace(made, device=made.device.model_copy(update={"memory_gib": made.needed / GIB}))
    assert full.usable == pytest.approx(made.peak.total) and full.usable < full.device.memory_gib * GIB
    points = made.memory.points
    first, second, third = over_time(
        {"full": (points, full.usable), "present": (points, made.usable), "unknown": (points, None)}
    ).axes
    assert [line.get_ydata()[0] for line in first.lines if line.get_linestyle() == "--"] == [full.usable / GIB]
    assert not [line for axes in (second, third) for line in axes.lines if line.get_linestyle() == "--"], "far above"
    assert first.get_ylim() == second.get_ylim() == third.get_ylim()
    assert second.get_xlabel().endswith(f"fits below {made.usable / GIB:.4g}")


def test_the_time_of_the_whole_run() -> None:
    config = RunConfig.load(GPT2, ["zero_tp.training.steps=10000"], 8)
    step = config.global_batch * config.zero_tp.data.sequence_length
    for asked, tokens in ((None, 10000 * step), (10**12, 10**12)):
        made = plan(config, device("a100-80gb", 8), asked)
        seconds = made.time.total * tokens / step
        expected = {"tokens": tokens, "days": seconds / 86400, "device_hours": 8 * seconds / 3600}
        assert made.as_json()["run"] == pytest.approx(expected)
        (line,) = (line for line in report.time(made) if "the whole run" in line)
        found = re.search(r"([\d,.]+) (days|hours), ([\d,.]+) device-hours", line)
        assert found and float(found[3].replace(",", "")) == pytest.approx(8 * seconds / 3600, abs=0.051)
        hours = float(found[1].replace(",", "")) * (24 if found[2] == "days" else 1)
        assert hours == pytest.approx(seconds / 3600, abs=1.3)


def test_a_model_of_96_layers_is_planned_in_seconds() -> None:
    plan(RunConfig.load(GPT2, (), 8), device("h100"))  # torch loads parts of itself
    start = time.process_time()
    made = plan(RunConfig.load(LARGE, OF_8, 8), device("h100"))
    assert made.model.spec.layers == 96 and time.process_time() - start < 3


def test_the_papers_column_has_the_runs_policy_and_dtype() -> None:
    def papers(*overrides: str) -> dict[str, float]:
        return plan(RunConfig.load(GPT2, overrides, 8), device("h100")).paper.bytes()

    eager = "zero_tp.attention=eager"
    none, full = papers(eager, "zero_tp.recompute=none"), papers(eager, "zero_tp.recompute=full")
    some = papers(eager, 'zero_tp.recompute={"mode":"full","layers":6}')  # of 24
    assert some["activations"] == pytest.approx((3 * none["activations"] + full["activations"]) / 4)
    assert papers(eager, 'zero_tp.recompute={"mode":"full","every":4}') == some
    assert papers(eager, 'zero_tp.recompute={"mode":"full","keep_micro_batches":1}') == none
    wide = papers(eager, "zero_tp.recompute=full", 'bf16={"enabled":false}')
    assert wide["activations"] == 2 * full["activations"] and wide["parameters"] == 2 * full["parameters"]


def test_the_time_counts_the_micro_batches_that_recompute() -> None:
    def seconds(policy: str) -> float:
        overrides = ("train_batch_size=64", "train_micro_batch_size_per_gpu=2", f"zero_tp.recompute={policy}")
        return plan(RunConfig.load(GPT2, overrides, 8), device("h100")).time.recompute

    assert seconds('{"mode":"full","keep_micro_batches":1}') == pytest.approx(0.75 * seconds("full"))


def test_a_cpu_run_and_its_plan_say_the_same() -> None:
    """The run's own line at its start."""
    config = RunConfig.load(ROOT / "ds_configs" / "quickstart.json", (), 4)
    made = plan(config, device("cpu", 4))
    said = MemoryForecast().announce(config, "cpu")
    planned = re.search(r"at most ([\d.]+) GiB", said)
    assert planned is not None and f"{made.peak.total / GIB:.2f}" == planned[1] and float(planned[1]) < 0.2


OF_AN_ACCELERATOR = """
import torch
from zero_tp.config import RunConfig
from zero_tp.planning import forecast
forecast._current, forecast.runs_varlen = torch.device, lambda _: False  # this machine has none
if __name__ == "__main__":
    made = forecast.MemoryForecast()
    made.announce(RunConfig.load("ds_configs/quickstart.json", (), 4), "cuda")
    print(made._planned, torch._C._get_accelerator())
"""


@THOROUGH
def test_the_forecast_of_an_accelerator_leaves_the_process_as_it_was() -> None:
    """A simulated device that the run's own process knew would be its accelerator from then on."""
    done = subprocess.run([sys.executable, "-c", OF_AN_ACCELERATOR], cwd=ROOT, capture_output=True, text=True)
    planned, accelerator = done.stdout.split()[-2:]
    config = RunConfig.load(ROOT / "ds_configs" / "quickstart.json", (), 4)
    assert float(planned) == rank_memory(config, cpu=False, varlen=False).peak.total / GIB
    assert accelerator == "cpu"


@THOROUGH
def test_a_planner_that_fails_on_its_own_says_why() -> None:
    with pytest.raises(ValueError, match=r"^invalid literal for int\(\) with base 10: 'x'$"):
        run_isolated(int, "x")
    assert run_isolated(int, "17", base=8) == 15


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "launch/plan.py", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.thorough
def test_the_command(tmp_path: Path) -> None:
    written = tmp_path / "planned.json"
    done = command(
        "ds_configs/gpt2_355m.json", "--world-size", "8", "--device", "h100-80gb", "--json", "--dry-run", "--search",
        "--write", str(written), "--set", "zero_tp.model.n_layer=4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["fits"] and result["peak_bytes"]["total"] < result["needed_bytes"]
    sent = result["paper_elements_sent"]
    assert sent["tensor"] == 0 and sent["data"] == pytest.approx(2 * result["model"]["parameters"] * 7 / 8)
    dry = result["dry_run"]
    assert dry["dry_run_bytes"] == dry["true_view_bytes"]
    assert result["candidates"][0]["step_seconds"]["total"] <= result["step_seconds"]["total"]
    assert RunConfig.load(written, (), 8).global_batch == result["batch"]["global"]


MISTAKES = [
    (["--world-size", "8", "--device", "h1000"], "--device: 'h1000' is unknown"),
    (["--world-size", "0", "--device", "h100"], "--world-size: 0 is not positive"),
    (["--world-size", "8", "--device", "h100", "--write", "x.json"], "--write: writes what --search finds"),
    (["--world-size", "8", "--device", "h100", "--pipeline", "2"], "unrecognized arguments: --pipeline 2"),
    (["--world-size", "3", "--device", "h100"], "zero_tp.parallel.tensor: tensor 2 × data 1.5 ≠ world 3"),
]


@THOROUGH
@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_mistakes_are_one_line(arguments: list[str], said: str) -> None:
    done = command("ds_configs/gpt2_355m.json", "--set", "zero_tp.parallel.tensor=2", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1
