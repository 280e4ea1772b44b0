"""The parity proof of test_matrix.py on other worlds, and further on: TP 1, 2 and 3 on 2 and 3
ranks.

After the compared steps ten more follow at the default eps, whose losses agree with the plain
model's within 1e-4.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.closeness import of_fp32
from tests.support.matrix import config_of
from tests.support.parallel_run import train
from tests.support.plain_run import MORE_STEPS, STEPS, plain
from tests.support.pools import Pools
from tests.tiers import EACH_STAGE, in_tiers

# (world, tensor, sequence)
PLACES = [(2, 1, False), (2, 2, False), (2, 2, True), (3, 1, False), (3, 3, False), (3, 3, True)]


@EACH_STAGE
@pytest.mark.parametrize(("world", "tensor", "sequence"), in_tiers(PLACES, [(3, 3, True)]))
def test_a_parallel_run_trains_the_plain_model(
    ranks: Pools, run_seed: int, tmp_path: Path, world: int, tensor: int, sequence: bool, stage: int
) -> None:
    config = config_of(
        ("TP 1", "no SP", f"ZeRO-{stage}", "none", "no offload", "× 1", "fp32"), run_seed
    )
    config["gradient_accumulation_steps"] = 1 + (stage + tensor) % 2
    config["zero_tp"]["parallel"] = {"tensor": tensor, "sequence": sequence}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    traces = ranks(world).run(train, path, more_steps=MORE_STEPS)
    for trace in traces:
        assert trace.losses == traces[0].losses, "ranks disagree on the loss"
    far = of_fp32(traces[0], run_seed, more_steps=MORE_STEPS)
    assert not {name: distance for name, distance in far.items() if not distance <= 1}
    expected = plain(run_seed, more_steps=MORE_STEPS)
    assert len(traces[0].losses) == STEPS + MORE_STEPS
    assert traces[0].losses[STEPS:] == pytest.approx(expected.losses[STEPS:], abs=1e-4)
