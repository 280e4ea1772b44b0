"""The kind of each parameter, and the optimizer's groups of a run without `param_groups`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiny_configs import MODEL_TYPES, tiny_config
from zero_tp.base.settings.optimizer import OptimizerParams
from zero_tp.base.settings.param_groups import Kind
from zero_tp.engine.param_groups import divide_parameters, optimizer_groups
from zero_tp.model.architectures import architecture_of
from zero_tp.model.model_class import model_class
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.model.parameter_kinds import parameter_kinds
from zero_tp.parallel.layout import whole_shape

KINDS: list[tuple[str, Kind]] = [
    (r"norm|LayerNorm|\.ln[._]", "norm"),
    (r"bias$", "bias"),
    (r"embed|wte|wpe", "embedding"),
    (r"lm_head|embed_out|seq_relationship", "output"),
    (
        r"mlp\.gate\.|block_sparse_moe\.gate\.|router\.(layer|weight)|shared_expert_gate",
        "router",
    ),
    (r"act_fn|sinks|conv1d|A_log", "other"),
    (r".", "matrix"),
]
"""Patterns of Hugging Face's names, of which the first counts, and kinds."""


def model_of(model_type: str, *, tied: bool = False) -> ParallelModel:
    config = tiny_config(model_type, 61)
    if architecture_of(config).causal:
        config.tie_word_embeddings = tied
    spec = architecture_of(config).spec(config)
    return model_class(spec)(config, device="meta")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_kinds_follow_from_hugging_faces_names(model_type: str) -> None:
    model = model_of(model_type)
    kinds = parameter_kinds(model)
    assert list(kinds) == [name for name, _ in model.named_parameters()]
    for weight in model.architecture.weights_of(model.spec):
        if not weight.is_parameter:
            continue
        for name in weight.names:
            expected = next(kind for pattern, kind in KINDS if re.search(pattern, name))
            assert kinds[weight.our_name] == expected, (weight.our_name, name)


def test_a_tied_weight_is_an_embedding() -> None:
    kinds = parameter_kinds(model_of("llama", tied=True))
    assert kinds["transformer.embedding.word.weight"] == "embedding"
    assert "output" not in kinds.values()


def test_what_a_part_of_another_class_makes_is_other_and_does_not_decay() -> None:
    model: Any = model_of("llama")
    model.transformer.sinks = nn.Module()
    model.transformer.sinks.rates = model.head.weight
    model.head.weight = None
    assert parameter_kinds(model)["transformer.sinks.rates"] == "other"
    decayed, others = divide_parameters(model, (), OptimizerParams(lr=0.0, weight_decay=0.1))
    assert "transformer.sinks.rates" in others.names and others.weight_decay == 0.0
    assert "transformer.layers.0.mlp.down.weight" in decayed.names


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_without_entries_everything_but_vectors_decays(model_type: str) -> None:
    """In the order in which DeepSpeed flattens the parameters. The biases of a layer's experts are
    vectors, too; a convolution's kernels are rows of few elements, and do not decay either.
    """
    model = model_of(model_type)
    biases = {id(one) for name, one in model.named_parameters() if name.endswith("bias")}
    groups = optimizer_groups(model, (), OptimizerParams(lr=0.0, weight_decay=0.1))
    parameters = list(model.parameters())

    def decays(parameter: torch.Tensor) -> bool:
        shape = whole_shape(parameter)
        is_kernel = len(shape) == 3 and shape[1] == 1
        return len(shape) > 1 and not is_kernel and id(parameter) not in biases

    by_dimensions: list[list[torch.Tensor]] = [
        [one for one in parameters if decays(one) == is_matrix] for is_matrix in (True, False)
    ]
    assert by_dimensions[0]
    if not by_dimensions[1]:
        by_dimensions.pop()  # nanochat has no vectors
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0][: len(by_dimensions)]
    for group, expected in zip(groups, by_dimensions, strict=True):
        assert group.keys() == {"params", "weight_decay"}
        assert list(map(id, group["params"])) == list(map(id, expected))
