"""Layouts: shards of a tensor, initial weights that no TP size changes, and the audit of a
model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config

from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.gradients import GradientHooks
from zero_tp.parallel.layout import MARKS, Replicated, Sharded, audit, layout_of, set_layout
from zero_tp.parallel.spans import blocks
from zero_tp.parallel.topology import Topology

LAYERS, VOCABULARY, STD = 2, 301, 0.02


def config(**changes: Any) -> GPT2Config:
    # 24 heads divide by 1, 2, 3, 4 and 8; the odd vocabulary by none. 72 rows end inside a block of
    # 64.
    sizes: dict[str, Any] = {
        "n_layer": LAYERS,
        "n_head": 24,
        "n_embd": 72,
        "n_positions": 80,
        "vocab_size": VOCABULARY,
    }
    return GPT2Config(**{**sizes, **changes})


def models(tensor: int, sequence: bool = False, **options: Any) -> list[Any]:
    """Every TP rank's model, made from descriptions of the ranks."""
    untied = config(tie_word_embeddings=False)
    return [
        ZeroTPForCausalLM(
            untied, Topology(tensor, sequence, world=tensor, rank=rank), seed=5, **options
        )
        for rank in range(tensor)
    ]


def shards(ranks: list[Any], name: str) -> list[Any]:
    return [dict(model.named_parameters())[name] for model in ranks]


@given(st.data())
def test_unshard_of_shards_is_the_whole(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6), "size")
    padded = data.draw(st.booleans(), "padded")
    part = st.integers(1, 20) if padded else st.integers(1, 4).map(lambda n: n * size)
    parts = tuple(data.draw(st.lists(part, min_size=1, max_size=3), "parts"))
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3), "shape")
    dim = data.draw(st.integers(0, len(shape) - 1), "dim")
    shape[dim] = sum(parts)
    # No element is zero, so that every zero of a shard is padding.
    whole = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    layout = Sharded(dim, parts, padded)
    pieces = [layout.shard(whole, rank, size) for rank in range(size)]
    assert all(tuple(piece.shape) == layout.local_shape(shape, size) for piece in pieces)
    assert torch.equal(layout.unshard(pieces), whole)
    assert sum(int((piece != 0).sum()) for piece in pieces) == whole.numel()
    for rank, piece in enumerate(pieces):
        spans = layout.spans(shape, rank, size)
        assert tuple(along.local_length for along in spans) == tuple(piece.shape)
        copy = piece.clone()
        for whole_index, local_index in blocks(spans):
            assert torch.equal(piece[local_index], whole[whole_index])
            copy[local_index] = 0
        assert not copy.any()
        assert padded or not list(spans[dim].padding())


@pytest.mark.parametrize(
    ("layout", "whole", "shards"),
    [
        (Sharded(0, (3,), padded=True), [1, 2, 3], [[1], [2], [3], [0], [0]]),
        # Three rows a rank: the last has one row past the end of the third.
        (
            Sharded(0, (9,), padded=True),
            [*range(1, 10)],
            [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 0, 0]],
        ),
        (
            Sharded(0, (2, 2, 4)),
            [10, 11, 20, 21, 30, 31, 32, 33],
            [[10, 20, 30, 31], [11, 21, 32, 33]],
        ),
    ],
    ids=["padding only", "a row past the end", "fused parts"],
)
def test_shards_in_numbers(layout: Sharded, whole: list[int], shards: list[list[int]]) -> None:
    assert [
        layout.shard(torch.tensor(whole), rank, len(shards)).tolist() for rank in range(len(shards))
    ] == shards


def test_a_part_that_does_not_divide_is_an_error() -> None:
    layout = Sharded(0, (4, 6))
    for call in (
        lambda: layout.piece_sizes(4),
        lambda: layout.local_shape((10, 3), 4),
        lambda: layout.shard(torch.zeros(10, 3), 0, 4),
        lambda: layout.unshard([torch.zeros(3, 3)] * 4),
    ):
        with pytest.raises(ValueError, match="6 does not divide by tensor parallel size 4"):
            call()
    with pytest.raises(ValueError, match=r"dimension 0 is 11.*\(4, 6\)"):
        layout.shard(torch.zeros(11, 3), 0, 2)


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [*((tensor, torch.float32) for tensor in (2, 3, 4, 8)), (3, torch.bfloat16)],
)
def test_initial_weights_are_the_same_for_every_tensor_size(
    tensor: int, dtype: torch.dtype
) -> None:
    whole = dict(models(1)[0].named_parameters())
    split = models(tensor, sequence=True, dtype=dtype)
    for name, reference in whole.items():
        pieces = shards(split, name)
        assert torch.equal(layout_of(pieces[0]).unshard(pieces), reference.to(dtype)), name
        assert layout_of(reference).__class__ is layout_of(pieces[0]).__class__
    for name in ("transformer.embedding.word.weight", "head.weight"):
        padding = torch.cat(shards(split, name))[VOCABULARY:]
        assert len(padding) == -VOCABULARY % tensor and not padding.any()
    for model in split:
        audit(model, model.topology)


def test_another_seed_draws_other_weights() -> None:
    other = dict(ZeroTPForCausalLM(config(tie_word_embeddings=False), seed=6).named_parameters())
    for name, reference in models(1)[0].named_parameters():
        assert torch.equal(other[name], reference) == (reference.dim() == 1), name


def test_initial_distribution() -> None:
    parameters = dict(
        ZeroTPForCausalLM(config(tie_word_embeddings=False), seed=3).named_parameters()
    )
    seen: set[float] = set()
    for name, weight in parameters.items():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = STD / (2 * LAYERS) ** 0.5 if residual else STD
            error = weight.numel() ** -0.5
            assert weight.std().item() == pytest.approx(std, rel=4 * error), name
            assert abs(weight.mean().item()) < 5 * std * error, name
            first = weight.flatten()[0].item() / std
            assert first not in seen, f"{name} repeats another's draws"
            seen.add(first)
            rows = weight.detach() if weight.shape[0] > 64 else weight.detach().t()
            assert len(rows[:, 0].unique()) == len(rows), f"{name}: blocks repeat"


def reshape(layer: Any) -> None:
    marks = vars(layer.mlp.up.weight)
    layer.mlp.up.weight = nn.Parameter(torch.zeros(7, 72))
    vars(layer.mlp.up.weight).update(marks)


def swap(layer: Any) -> None:
    layer.mlp_norm.weight, layer.attention_norm.weight = (
        layer.attention_norm.weight,
        layer.mlp_norm.weight,
    )


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (
            lambda layer: setattr(layer.mlp, "extra", nn.Parameter(torch.zeros(3))),
            r"mlp\.extra has no layout",
        ),
        (reshape, r"mlp\.up\.weight: shape \(7, 72\).*gives \(144, 72\)"),
        (swap, r"attention_norm\.weight: it was initialised as .*layers\.1\.mlp_norm\.weight"),
        *(
            (
                lambda layer, mark=mark: setattr(layer.mlp.up.weight, mark, False),
                rf"mlp\.up\.weight: .* {mark}=False",
            )
            for mark in MARKS
        ),
        (
            lambda layer: setattr(layer.mlp_norm.weight, MARKS[1], True),
            rf"mlp_norm\.weight: .* {MARKS[1]}=True",
        ),
    ],
    ids=["no layout", "shape", "name", *(f"no {mark}" for mark in MARKS), "marked"],
)
def test_audit_names_what_is_wrong(tamper: Callable[[Any], None], message: str) -> None:
    topology = Topology(2, world=2, rank=1)
    model: Any = ZeroTPForCausalLM(config(), topology)
    audit(model, topology)
    tamper(model.transformer.layers[1])
    with pytest.raises(ValueError, match=rf"parameter transformer\.layers\.1\.{message}"):
        audit(model, topology)


def test_audit_refuses_a_partial_gradient_without_tensor_parallelism() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2))
    set_layout(module.weight, "weight", Replicated("partial"), (2,), 1)
    with pytest.raises(ValueError, match="weight: a partial gradient without tensor parallelism"):
        audit(module, Topology())


def test_hooks_refuse_an_unclassified_parameter() -> None:
    with pytest.raises(ValueError, match="no layout"):
        GradientHooks(nn.Linear(2, 2), None)
