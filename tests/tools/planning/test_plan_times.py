"""The planner's times: the papers' published ones, and the mechanisms that they are made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from benchmarks.device import llama
from benchmarks.papers import published
from benchmarks.papers.programs import Megatron2019Synchronous
from benchmarks.step_launches import small_llama
from tests.support.launched import ROOT
from tests.support.plans import GPT2, plan_gpt2
from tests.tiers import THOROUGH
from zero_tp.parallel.devices import named_device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.plan import plan
from zero_tp.tools.planning.plan_settings import ZeroSettings
from zero_tp.tools.planning.rates import BASE_LATENCY, FAR_HOP, NEAR_HOP, TILE, Rates

H100 = Rates(named_device("h100"), 2, 989e12)


def efficiencies_on_512_gpus() -> tuple[float, float]:
    """Return the scaling of 8.3 B with gradients reduced after backward, and during backward."""
    overlapping = published.scaled(published.B8_3, 8, 64, heads=32)
    after = replace(overlapping, program=Megatron2019Synchronous)
    return after.speed / published.B1_2.speed, overlapping.speed / published.B1_2.speed


@pytest.mark.slow
def test_megatrons_readme_on_512_gpus() -> None:
    """Within 5 points."""
    assert efficiencies_on_512_gpus() == pytest.approx((0.60, 0.76), abs=0.05)


@pytest.mark.parametrize(
    ("optimizer", "micro_batch", "milliseconds"),
    [
        # DeepSpeed's own step, as a version of November 2026 ran it with torch's AdamW.
        ({"torch_adam": False}, 8, 303.8),
        # A prototype of the norm and the update in one pass each; then with three more kernels.
        ({}, 8, 259.8),
        ({}, 16, 495.8),
    ],
)
def test_a_step_on_an_h200(
    optimizer: dict[str, Any], micro_batch: int, milliseconds: float, tmp_path: Path
) -> None:
    """1.3 B Llama, bf16, ZeRO-1, compiled, 2,048 tokens; measured on one device, within 7 %."""
    config = small_llama(2048)
    config["train_micro_batch_size_per_gpu"] = micro_batch
    config["optimizer"]["params"] |= optimizer
    config["zero_tp"]["model"] = llama(2048, 24, 16, 16, 5504, 32_000)
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned = plan(RunConfig.load(tmp_path / "config.json", (), 1), named_device("h200-141gb"))
    assert 1e3 * planned.time.total == pytest.approx(milliseconds, rel=0.07)


# ---- mechanisms ----------------------------------------------------------------------------------


def test_an_average_is_read_and_written_in_each_update() -> None:
    """12 bytes of each parameter of this rank's part."""
    times = [
        plan_gpt2("zero_optimization.stage=1", "zero_tp.parallel.tensor=1", *changes).time
        for changes in ((), ('zero_tp.training.ema={"decay": 0.999}',))
    ]
    seconds = 12 * 354_823_168 / 8 / H100.memory
    assert times[1].optimizer - times[0].optimizer == pytest.approx(seconds)
    assert times[1].total - times[0].total == pytest.approx(seconds)


def test_an_incomplete_wave_of_tiles_takes_as_long_as_a_full_one() -> None:
    high, wide = TILE
    units, depth = H100.device.units, 4096

    def waves(tiles: int) -> float:
        written = 2 * tiles * high * wide / H100.memory
        multiplying = H100.product_seconds(tiles * high, wide, depth) - written
        return multiplying / (2 * high * wide * depth * units / H100.matrix)

    assert waves(units) == pytest.approx(1) and waves(1) == pytest.approx(1)
    assert waves(units + 1) == pytest.approx(2) == waves(2 * units)


def test_rings_share_the_ports_of_a_node() -> None:
    """16 ranks on two nodes: one ring of all has 8 ports, each of 8 rings of 2 has one."""
    size, port = 1e9, 50e9 * 0.5
    together, apart = H100.collective_seconds(size, 16), H100.collective_seconds(size, 2, stride=8)
    assert together - BASE_LATENCY - FAR_HOP - 14 * NEAR_HOP == pytest.approx(
        size * 15 / 16 / (8 * port)
    )
    assert apart - BASE_LATENCY - FAR_HOP == pytest.approx(size / 2 / port)
    inside = H100.collective_seconds(size, 8)
    assert inside - BASE_LATENCY - 7 * NEAR_HOP == pytest.approx(size * 7 / 8 / (450e9 * 0.75))
    assert H100.collective_seconds(size, 2, stride=4) == pytest.approx(
        BASE_LATENCY + NEAR_HOP + size / 2 / (450e9 * 0.75)
    )
    assert H100.collective_seconds(size, 16, calls=3) - together == pytest.approx(
        2 * (BASE_LATENCY + FAR_HOP + 14 * NEAR_HOP)
    )
    assert H100.collective_seconds(size, 1) == 0


def test_overlapping_collectives_take_multiprocessors_from_products() -> None:
    def exposed(overlap: bool) -> float:
        overrides = [
            f"zero_optimization.overlap_comm={str(overlap).lower()}",
            "zero_optimization.stage=2",
        ]
        return plan_gpt2(*overrides, world=64).time.dp_communication

    assert 0 < exposed(True) < exposed(False)
    without_channels = replace(H100, device=H100.device.model_copy(update={"channels": 0}))
    assert without_channels.slowdown(1.0) == 0 and H100.slowdown(1.0) == pytest.approx(24 / 132)


@THOROUGH
def test_gradients_in_fp32_take_longer_to_send_and_to_add() -> None:
    wider = ["communication_data_type=fp32", "data_types.grad_accum_dtype=fp32"]

    def seconds(*overrides: str, world: int = 64) -> tuple[float, float]:
        time = plan_gpt2(
            "zero_optimization.stage=1", "zero_tp.parallel.tensor=1", *overrides, world=world
        ).time
        return time.dp_communication, time.elementwise

    narrow, wide = seconds(), seconds(*wider)
    parameters, ports = 354_823_168, 8 * 50e9 * 0.5
    ring = parameters * 63 / 64 / ports
    assert wide[0] - narrow[0] == pytest.approx(2 * 2 * ring), "DeepSpeed all-reduces"
    assert wide[1] > narrow[1]
    owners = "zero_optimization.use_multi_rank_bucket_allreduce=false"
    assert seconds(owners, world=8)[0] < seconds(world=8)[0]
    assert seconds(owners)[0] > narrow[0], "64 reductions of 11 MB each wait for 63 hops"
    assert seconds(owners, "zero_optimization.reduce_scatter=false") == narrow
    beside = "zero_optimization.overlap_comm=true"
    assert seconds(owners, beside, *wider) == wide, "BF16_Optimizer all-reduces after backward"
    from_3 = RunConfig.load(GPT2, ["zero_optimization.stage=3", owners], 64)
    assert ZeroSettings.of(from_3, cpu=False).with_stage(1).reduces_to_owners, (
        "as a search changes it"
    )
    second = (
        "zero_optimization.stage=2",
        "gradient_accumulation_steps=1",
        "train_batch_size=auto",
        owners,
    )
    assert seconds(*second, *wider)[0] - seconds(*second)[0] == pytest.approx(
        2 * parameters / ports
    ), "a chain"
    assert seconds(*second, beside)[0] == seconds(*second)[0], "each waits for the device"
    small = "zero_optimization.reduce_bucket_size=5000000"
    pieces = -(-parameters // 5_000_000)
    latency = H100.collective_seconds(0, 64)
    assert seconds(small)[0] - narrow[0] == pytest.approx(2 * (pieces - 1) * latency)
    assert seconds(small, owners)[0] - seconds(owners)[0] == pytest.approx((pieces - 1) * latency)
    assert seconds(owners)[0] == pytest.approx(2 * ring + 2 * parameters / ports + 65 * latency), (
        "64 owners"
    )


@THOROUGH
def test_the_documents_show_the_scaling_as_it_is() -> None:
    assert (
        scaling.table("8 B", scaling.DEVICES)
        in (ROOT / "benchmarks" / "results" / "scaling.md").read_text()
    )


@pytest.mark.slow
def test_the_documents_have_the_scaling_figures_of_the_planner() -> None:
    text = (ROOT / "benchmarks" / "results" / "scaling.md").read_text()
    after, overlapping = efficiencies_on_512_gpus()
    more = published.B530_DP8.time.total - published.B530.time.total
    share = published.B530_DP8.speed / published.B530.speed
    rows = (f"| 74 % | {100 * overlapping:.1f} % |", f"| 60 % | {100 * after:.1f} % |")
    for row in (*rows, f"| 96.6 % (+1.32 s) | {100 * share:.1f} % (+{more:.2f} s) |"):
        assert row in text
