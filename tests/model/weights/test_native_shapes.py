"""Names and shapes that a directory is expected to have, beside those of transformers' class."""

from __future__ import annotations

import pytest

from tests.support.tiny_configs import MODEL_TYPES, tiny_config
from tests.tiers import in_tiers
from zero_tp.model.architectures import ARCHITECTURES
from zero_tp.model.model_class import meta_model
from zero_tp.model.weights.entries import native_shapes
from zero_tp.model.weights.native import native_model, stored_shapes
from zero_tp.parallel.layout import stored_tensors, whole_shape

CASES = [
    (model_type, tied)
    for model_type in MODEL_TYPES
    for tied in (False, True)
    if tied or ARCHITECTURES[model_type].causal
]
"""An encoder's head is always tied."""


@pytest.mark.parametrize(("model_type", "tied"), in_tiers(CASES, [("llama", True)]))
def test_expected_tensors_are_those_of_the_native_class(model_type: str, tied: bool) -> None:
    config = tiny_config(model_type, 96)
    config.tie_word_embeddings = tied
    shapes = {name: whole_shape(tensor) for name, tensor in stored_tensors(meta_model(config))}
    assert native_shapes(config, shapes) == stored_shapes(native_model(config), config)
