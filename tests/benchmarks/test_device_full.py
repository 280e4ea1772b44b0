"""The session of a device (benchmarks/device_full.py) runs on CPU in small: it skips what it has,
ends in time and says what is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import device_full, device_profile, device_torch
from benchmarks.device import ROWS, settings
from benchmarks.device_full import FILE, Contender, Item, LeftOut, Pool, Results, run_full
from benchmarks.device_profile import Span, summarise
from tests.support.device_cells import CELLS, name_of
from tests.support.launched import ROOT
from tests.tiers import THOROUGH


def options_of(directory: Path, **changes: Any) -> argparse.Namespace:
    values = {"part": "A", "seconds": 600.0, "steps": 2, "ranks": 1, "tiny": True, "before": None}
    return argparse.Namespace(**values | {"output": directory} | changes)


def test_classes_idle_time_and_waits_of_a_profile() -> None:
    """Two streams overlap for 2 of 20 µs, and nothing runs in 5."""
    kernels = [
        Span("nvjet_tst_128x256_64x4", 0, 10_000),
        Span("triton_poi_fused_mul_0", 8_000, 12_000),
        Span("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 17_000, 20_000),
    ]
    calls = [Span("cudaStreamSynchronize", 0, 1), Span("cudaLaunchKernel", 1, 2)] * 3
    summary = summarise(kernels, calls)
    figures = {name: summary[name] for name in ("span_ms", "busy_ms", "idle_ms", "launches")}
    assert figures == {"span_ms": 0.02, "busy_ms": 0.015, "idle_ms": 0.005, "launches": 3}
    classes = {name: row["ms"] for name, row in summary["classes"].items()}
    assert classes == {"products": 0.01, "compiled": 0.004, "attention": 0.003}
    assert summary["synchronisations"] == {"cudaStreamSynchronize": 3}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal>", "products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::reduce_kernel<512, 1, at::native::NormTwoOps>", "reductions"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4, AddFunctor>", "elementwise"),
    ],
)
def test_kernels_have_a_class(name: str, expected: str) -> None:
    assert device_profile.class_of(name) == expected


def test_a_profile_counts_the_operations_of_a_cpu() -> None:
    left = torch.ones(8, 8)
    summary = device_profile.profile_step(lambda: (left + 1).sum().item(), torch.device("cpu"))
    assert summary["launches"] >= 2 and summary["synchronisations"]["aten::item"] == 1
    assert 0 < summary["busy_ms"] <= summary["span_ms"]


def parts_of(items: list[Item]) -> Any:
    def part(*_: Any) -> Iterator[Item]:
        yield from items

    return mock.patch.object(device_full, "PARTS", {"A": part})


def test_a_second_run_skips_what_is_there_and_repeats_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: dict[str, list[dict[str, Any]]] = {
        "first": [{}],
        "second": [{"failed": "no memory"}, {}],
    }
    measured: list[str] = []

    def item(name: str) -> Item:
        def measure(limit: float) -> dict[str, Any]:
            # Earlier results are on disk before the next one is measured.
            known = json.loads((tmp_path / FILE).read_text()) if measured else {}
            assert {*known} >= {*measured[:1]}
            measured.append(name)
            return answers[name].pop(0)

        return Item(name, measure)

    for status, failed in ((1, True), (0, False)):
        with parts_of([item("first"), item("second")]), pytest.raises(SystemExit) as end:
            run_full(options_of(tmp_path))
        assert end.value.code == status
        assert ("failed: second" in capsys.readouterr().out) == failed
    assert measured == ["first", "second", "second"]


@pytest.mark.slow
def test_a_part_ends_in_time_and_names_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that does not end is killed, and what is left of the part is not begun."""
    options = options_of(tmp_path, seconds=1.5)
    words = ["-c", "import time; time.sleep(60)"]
    items = [
        Item("quick", lambda limit: {"limit": limit}),
        Item("endless", lambda limit: device_full.json_of(words, ROOT, options, limit)),
        Item("later", lambda limit: pytest.fail("begun")),
    ]
    begin = time.monotonic()
    with parts_of(items), pytest.raises(SystemExit) as end:
        run_full(options)
    assert time.monotonic() - begin < 30
    assert end.value.code == 1
    assert "left out, run again for: endless; later" in capsys.readouterr().out
    assert [*Results(tmp_path).records] == ["quick"]


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    words = ["-c", "print('noise'); raise RuntimeError('CUDA out of memory')"]
    record = device_full.json_of(words, ROOT, options_of(tmp_path), 60)
    assert record["failed"] == "RuntimeError: CUDA out of memory"


STAND_IN = """
import json, sys, time
for request in sys.stdin:
    if request == "die\\n":
        raise ValueError("as asked")
    time.sleep(60 if request == "hang\\n" else 0)
    print(json.dumps({"request": request.strip()}), flush=True)
"""


@pytest.fixture
def contender(tmp_path: Path) -> Iterator[Contender]:
    (tmp_path / "device_contender.py").write_text(STAND_IN)
    with mock.patch.object(device_full, "HERE", tmp_path):
        one = Contender([], ROOT, options_of(tmp_path))
    yield one
    one.close()


def test_a_contender_answers_until_it_dies(contender: Contender) -> None:
    assert contender.ask("time 2", 60) == contender.ask("time 2", 60) == {"request": "time 2"}
    with pytest.raises(LeftOut):
        contender.ask("hang", 0.2)


def test_a_contender_that_dies_says_why(contender: Contender) -> None:
    assert contender.ask("die", 60)["failed"] == "ValueError: as asked"


@pytest.mark.parametrize(
    ("free", "rounds", "alive"), [(12.0, 3, 2), (10.0, 2, 0)], ids=["fits", "does not fit"]
)
def test_contenders_stay_alive_while_another_fits_else_two_rounds(
    tmp_path: Path, free: float, rounds: int, alive: int
) -> None:
    """Each takes 10 GiB at its peak, and 1.1 times that must be free for the next."""
    options = options_of(tmp_path)
    results = Results(tmp_path)
    answer = {"reserved_gib": 10.0, "free_gib": free}
    made = mock.Mock()
    made.return_value.ask.side_effect = lambda request, limit: dict(answer)
    pools: list[Pool] = []

    def keep(*words: Any) -> Pool:
        pools.append(Pool(*words))
        return pools[-1]

    with (
        mock.patch.object(device_full, "Contender", made),
        mock.patch.object(device_full, "Pool", keep),
    ):
        items = device_full.trained("1.3b", results, options)
        for item in items:
            results.add(item.name, item.measure(1.0))
            living = len(pools[0]._alive)
    names = [name for name in results.records if "round" in name]
    assert len(names) == 2 * rounds and living == alive
    assert names[:2] == ["1.3b, this, round 1", "1.3b, transformers, round 1"]
    assert made.return_value.close.called and not pools[0]._alive


def test_the_models_are_those_of_the_rows(tmp_path: Path) -> None:
    full = options_of(tmp_path, tiny=False)
    dense, experts = (settings(ROWS[name], full) for name in device_full.MODELS)
    assert dense["train_micro_batch_size_per_gpu"] == 8
    assert experts["train_micro_batch_size_per_gpu"] == 4
    model = experts["zero_tp"]["model"]
    sizes = (model["num_hidden_layers"], model["num_experts"], model["num_experts_per_tok"])
    assert sizes == (6, 64, 8) and model["intermediate_size"] == 1024


def test_torch_2_11_gets_the_newer_names() -> None:
    older = mock.Mock(spec=["all_gather_into_tensor", "reduce_scatter_tensor"])
    with mock.patch.object(device_torch, "dist", older):
        device_torch.add_new_names()
    assert older.all_gather_single is older.all_gather_into_tensor
    assert older.reduce_scatter_single is older.reduce_scatter_tensor
    before = torch.distributed.all_gather_single
    device_torch.add_new_names()
    assert torch.distributed.all_gather_single is before


def full_run(directory: Path, part: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.device", "--full", "--tiny", "--part", part]
    command += ["--steps", "1", "--seconds", "900", "--output", str(directory), *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=1000)


def files_of(tree: Path) -> set[Path]:
    """Return a tree's files, without the bytecode of this test's own process."""
    folders = [tree / name for name in ("benchmarks", "tests", "zero_tp", "launch")]
    files = (path for folder in folders for path in folder.rglob("*"))
    return {path for path in files if "__pycache__" not in path.parts} | {*tree.iterdir()}


@THOROUGH
@pytest.mark.timeout(2000)
def test_part_a_in_small(tmp_path: Path) -> None:
    """This tree stands for the older one, too. A second run measures nothing."""
    before = files_of(ROOT)
    done = full_run(tmp_path, "A", "--before", str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    records = Results(tmp_path).records
    for model in device_full.MODELS:
        losses = [records[f"{model}, {name}, round 3"]["losses"] for name in ("before", "this")]
        assert losses[0] == losses[1]
        plain = records[f"{model}, transformers, round 1"]["losses"]
        assert plain == pytest.approx(records[f"{model}, this, round 1"]["losses"], rel=0.05)
        assert records[f"{model}, this, profile"]["launches"] > 100
    assert files_of(ROOT) == before
    again = full_run(tmp_path, "A", "--before", str(ROOT))
    assert again.returncode == 0 and again.stdout == ""


@THOROUGH
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["a NaN step", "gloo's collectives", "pieces, this"])
def test_items_of_part_b_in_small(tmp_path: Path, name: str) -> None:
    options = options_of(tmp_path)
    items = {item.name: item for item in device_full.part_b(Results(tmp_path), options)}
    record = items[name].measure(800.0)
    assert "failed" not in record, record
    if name == "pieces, this":
        assert len(record) == 9 and all("us" in piece for piece in record.values()), record
    if name == "gloo's collectives":
        assert {*record.values()} == {"cpu", "works"}


def test_the_order_of_part_b(tmp_path: Path) -> None:
    options = options_of(tmp_path, before=tmp_path)
    names = [item.name for item in device_full.part_b(Results(tmp_path), options)]
    expected = ["a NaN step", "stop and resume", "several ranks on one device"]
    expected += ["gloo's collectives", "micro-batch 16", "pieces, before", "pieces, this"]
    assert names[3:] == expected
    assert all(name.startswith("parity: ") for name in names[:3])


@THOROUGH
def test_pytest_collects_the_tests_of_part_b(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "--collect-only", "-q"]
    command += [f"-c{ROOT / 'setup.cfg'}", f"--rootdir={ROOT}", "-p", "no:cacheprovider"]
    nodes = [str(ROOT / nodes) for nodes in device_full.TESTS.values()]
    done = subprocess.run([*command, *nodes], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("test_a_run_trains_the_plain_model") == len(device_full.PARITY)


def test_the_tests_of_part_b_exist() -> None:
    assert {*device_full.PARITY} <= {name_of(*case) for case in CELLS}
    for nodes in device_full.TESTS.values():
        assert (ROOT / nodes.split("::")[0]).exists()
