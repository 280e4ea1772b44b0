"""What a TransformerSpec says of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.settings import gpt2_config
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import MLP_MATRICES
from zero_tp.model.transformer import MLPS


def test_each_mlp_has_its_number_of_matrices() -> None:
    assert MLP_MATRICES.keys() == MLPS.keys()
    config = gpt2_config()
    spec = architecture_of(config).spec(config)
    assert spec.mlp_matrices == 2
    assert replace(spec, mlps=("gated", "experts")).mlp_matrices == 3
    with pytest.raises(ValueError, match="the MLP 'new' has no number of matrices"):
        _ = replace(spec, mlps=("new",)).mlp_matrices
    with pytest.raises(ValueError, match="different numbers of matrices"):
        _ = replace(spec, mlps=("mlp", "experts")).mlp_matrices
