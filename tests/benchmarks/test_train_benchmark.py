"""The benchmark of training runs at a tiny size, and its contenders do the same work: their
losses are the same.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.launched import ROOT, run
from tests.tiers import THOROUGH

FEW = ["hf-1p", "ztp-1p", "ds-z2", "ztp-z2", "autotp", "ztp-sp-compiled"]
OTHERS = [
    "hf-1p",
    "ztp-z1-1p",
    "ztp-z1",
    "ztp-z3",
    "ztp-tp",
    "ztp-sp",
    "ztp-1p-compiled",
    "ztp-z2-compiled",
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "contenders",
    [pytest.param(FEW, marks=THOROUGH), pytest.param(OTHERS, marks=pytest.mark.heavy)],
    ids=["few", "others"],
)
def test_every_contender_trains_the_same_model(tmp_path: Path, contenders: list[str]) -> None:
    words = ["--shape", "tiny", "--dtype", "fp32", "--rounds", "1", "--output", str(tmp_path)]
    words += ["--contenders", ",".join(contenders)]
    done = run([sys.executable, str(ROOT / "benchmarks" / "train.py"), *words], tmp_path, limit=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*-train-tiny-fp32.json")
    result = json.loads(file.read_text())
    assert list(result["losses"]) == contenders == list(result["tokens_per_second"])
    for name, losses in result["losses"].items():
        assert losses == pytest.approx(result["losses"]["hf-1p"], abs=1e-4), name
        assert re.search(rf"^{name} +[\d.]+ ", done.stdout, re.MULTILINE)
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
