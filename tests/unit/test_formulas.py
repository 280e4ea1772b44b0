"""planning/formulas.py against the paper's expressions as they are printed."""

from __future__ import annotations

import random

import pytest

from zero_tp.planning.formulas import Layer, kept, kept_full, kept_selective, sdpa_fused_core, sdpa_maths_core


def test_the_rows_of_table_2(seed: int) -> None:
    draw = random.Random(seed)
    s, b, a, t = (draw.randint(1, 64) for _ in range(4))
    h = a * draw.randint(1, 64)
    alone, split, sequence = Layer(s, b, h, a), Layer(s, b, h, a, t), Layer(s, b, h, a, t, True)
    rows = {
        "no parallelism": (kept(alone), s * b * h * (34 + 5 * a * s / h)),
        "TP": (kept(split), s * b * h * (10 + 24 / t + 5 * a * s / (h * t))),
        "TP + SP": (kept(sequence), s * b * h * (34 / t + 5 * a * s / (h * t))),
        "TP + selective": (kept_selective(split), s * b * h * (10 + 24 / t)),
        "TP + SP + selective": (kept_selective(sequence), s * b * h * 34 / t),
        "full": (kept_full(split), 2 * s * b * h),
        "full, split over TP": (kept_full(split, partitioned=True), 2 * s * b * h / t),
        "full, SP": (kept_full(sequence), 2 * s * b * h / t),
    }
    for name, (ours, papers) in rows.items():
        assert ours == pytest.approx(papers), name


@pytest.mark.parametrize("sequence", [False, True])
def test_terms_that_selective_recomputation_takes_away(sequence: bool) -> None:
    layer = Layer(256, 2, 512, 8, 4, sequence)
    everything = ("attention_core", "mlp_activation", "norm")
    # Left: inputs of the norms, masks, Q, K, V, the projection's input, the activation's input.
    left = layer.sbh * ((4 + 2) / (4 if sequence else 1) + (6 + 2 + 8) / 4)
    for core in (sdpa_fused_core, sdpa_maths_core):
        assert kept_selective(layer, core, everything) == pytest.approx(left)
        assert kept_selective(layer, core) == kept_selective(layer)
