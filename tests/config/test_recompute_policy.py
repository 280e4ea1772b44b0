"""`zero_tp.recompute` as an object: which layers are recomputed."""

from __future__ import annotations

import pytest

from zero_tp.activations.policy import RecomputePolicy
from zero_tp.config import ConfigError
from zero_tp.validation import validate


def test_an_object_for_recompute_says_which_layers() -> None:
    assert validate(RecomputePolicy, {"mode": "full", "layers": 2}, "zero_tp.recompute").layers == 2
    with pytest.raises(ConfigError, match="both choose the layers"):
        validate(RecomputePolicy, {"mode": "full", "layers": 2, "every": 2}, "zero_tp.recompute")
    with pytest.raises(ConfigError, match="chooses the parts of a layer"):
        validate(RecomputePolicy, {"mode": "full", "modules": ["norm"]}, "zero_tp.recompute")
    for narrowed in ("layers", "every", "keep_micro_batches"):
        with pytest.raises(ConfigError, match=f'"{narrowed}" narrows what is recomputed'):
            validate(RecomputePolicy, {"mode": "none", narrowed: 1}, "zero_tp.recompute")


@pytest.mark.parametrize(
    ("policy", "layers"),
    [
        ({"mode": "none"}, []),
        ({"mode": "full"}, [0, 1, 2, 3, 4]),
        ({"mode": "full", "layers": 2}, [0, 1]),
        ({"mode": "selective", "every": 2}, [0, 2, 4]),
        ({"mode": "full", "every": 5}, [0]),
    ],
)
def test_which_layers_are_recomputed(policy: dict[str, object], layers: list[int]) -> None:
    assert list(RecomputePolicy.model_validate(policy).recomputed_layers(5)) == layers
