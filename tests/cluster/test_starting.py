"""Two machines of two ranks train what one machine of four does, bit for bit, whichever launcher
starts which steps.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.cluster.nodes import Rack
from tests.cluster.runs import losses
from tests.cluster.starts import STARTS, Start, alone, srun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

STEPS = 8
ACROSS = partial(srun, options=["--distribution=cyclic"])
"""Neighbouring ranks on different machines: TP of 2 crosses them."""

CHAINS: dict[str, tuple[int, int, list[Start]]] = {
    "TP inside, ZeRO-1": (
        2,
        1,
        [STARTS[name] for name in ("deepspeed, pdsh", "torchrun", "srun", "accelerate")],
    ),
    "TP inside and across, ZeRO-3": (
        2,
        3,
        [STARTS["deepspeed, no ssh"], ACROSS, STARTS["sbatch"], STARTS["torchrun"]],
    ),
    "TP across, ZeRO-1": (4, 1, [STARTS["accelerate"], STARTS["deepspeed, pdsh"]]),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_launchers_go_on_with_each_others_runs(chain: str, slurm: Rack, workplace: Path) -> None:
    tensor, stage, starts = CHAINS[chain]
    settings = ["--deepspeed_config", "small.json", "--set", f"zero_tp.parallel.tensor={tensor}"]
    settings += ["--set", f"zero_optimization.stage={stage}", "--output-dir"]
    name = chain.replace(" ", "_").replace(",", "")
    reference = alone(slurm, *settings, f"runs/{name}_alone").ended()
    assert reference.statuses == [0], reference.output
    for number, start in enumerate(starts, 1):
        done = STEPS * number // len(starts)
        ended = start(
            slurm, *settings, f"runs/{name}", "--set", f"zero_tp.training.steps={done}"
        ).ended()
        assert set(ended.statuses) == {0}, ended.output
        assert f"saved runs/{name}/checkpoints/step_{done:08d}" in ended.output, ended.output
        assert number == 1 or "resuming step" in ended.output
    assert losses(workplace / "runs" / name) == losses(workplace / "runs" / f"{name}_alone")
