"""Wherever a corpus, a tokenizer and a model meet, a page has the same ids and loss, or the
meeting is refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.seams import WAYS, Seam, check_seam
from tests.tiers import seeds_in_tiers

FIRST = range(len(WAYS))


@pytest.mark.parametrize("seed", seeds_in_tiers(FIRST, 90, 213))
def test_a_page_has_the_same_ids_and_loss_or_is_refused(tmp_path: Path, seed: int) -> None:
    check_seam(tmp_path, Seam.draw(seed))


def test_the_seeds_reach_both_answers() -> None:
    """Each way is drawn, with tokenizers that give the same ids and with others."""
    seams = [Seam.draw(seed) for seed in FIRST]
    assert {seam.way for seam in seams} == set(WAYS)
    met = [seam.other == "same" for seam in seams if WAYS[seam.way][1]]
    assert any(met) and not all(met)
