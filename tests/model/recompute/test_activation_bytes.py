"""What one layer keeps for backward on each rank, against arXiv 2205.05198's byte counts and
ours for sdpa.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.papers.kept import kept_by_layer
from tests.support.activation_bytes import sdpa_maths_core
from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.settings import gpt2_config
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model.context import ForwardInputs
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.topology import Topology
from zero_tp.tools.planning.formulas import (
    eager_core,
    saved,
    saved_full,
    saved_selective,
    sdpa_fused_core,
)
from zero_tp.tools.planning.plan_settings import Layer
from zero_tp.tools.planning.tracking import Allocation

SHAPES = 2  # drawn for each test
GRIDS = [(1, False), (2, False), (2, True), (4, False), (4, True)]
# zero_tp.attention, dropout on the softmax (with it torch takes its maths path on the CPU), what
# the core keeps.
CORES: dict[str, tuple[str, float, Callable[[Layer], float]]] = {
    "eager": ("eager", 0.1, eager_core),
    "fused": ("sdpa", 0.0, sdpa_fused_core),
    "maths": ("sdpa", 0.1, sdpa_maths_core),
}
SELECTIVE: list[list[str]] = [
    ["attention_core"],
    ["mlp_activation"],
    ["norm"],
    ["attention_core", "mlp_activation", "norm"],
]
FULL = {"mode": "full"}


def drawn(seed: int) -> list[Layer]:
    draw = random.Random(seed)
    return [
        Layer(
            s=draw.choice((256, 320, 384)),
            b=draw.choice((2, 3)),
            h=draw.choice((256, 384, 512)),
            a=draw.choice((4, 8)),
        )
        for _ in range(SHAPES)
    ]


def model_of(layer: Layer, core: str, topology: Topology) -> ZeroTPForCausalLM:
    attention, dropout, _ = CORES[core]
    sizes = {
        "n_layer": 1,
        "n_embd": layer.h,
        "n_head": layer.a,
        "n_positions": layer.s,
        "vocab_size": 8,
    }
    config = gpt2_config(0.1, attn_pdrop=dropout, **sizes)
    config._attn_implementation = attention
    return ZeroTPForCausalLM(config, topology, dtype=torch.bfloat16).train()


def rows(layer: Layer, core: str) -> dict[str, tuple[dict[str, Any], dict[str, Any], float]]:
    """Policy, activation_checkpointing block, and the bytes that the formulas give, by name."""
    keeps = CORES[core][2]
    found: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
        "none": ({"mode": "none"}, {}, saved(layer, keeps)),
        "full": (FULL, {}, saved_full(layer)),
    }
    for modules in SELECTIVE:
        policy = {"mode": "selective", "modules": modules}
        found[f"selective {modules}"] = (policy, {}, saved_selective(layer, keeps, modules))
    if layer.t > 1 and not layer.sequence:
        found["full, P_a"] = (
            FULL,
            {"partition_activations": True},
            saved_full(layer, partitioned=True),
        )
    return found


def saved_by_autograd(
    function: Callable[[Tensor], Tensor], stream: Tensor, weights: set[int]
) -> int:
    """Bytes of the storages that autograd packs, without weights: another count, valid without
    recomputation.
    """
    packed: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            packed[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function(stream.requires_grad_())
    return sum(tensor.untyped_storage().nbytes() for tensor in packed.values())


def counted_by_autograd(model: ZeroTPForCausalLM, layer: Layer) -> int:
    stream = torch.randn(
        int(layer.residual) // layer.b // layer.h, layer.b, layer.h, dtype=torch.bfloat16
    )
    context = model.transformer.context(layer.s, stream, ForwardInputs(), sequence=layer.sequence)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    return saved_by_autograd(partial(model.transformer.layers[0], context=context), stream, weights)


def measure(
    shapes: list[Layer], tensor: int, sequence: bool
) -> list[tuple[str, float, list[Allocation]]]:
    """On every rank: each row's name, the formula's bytes, and what is kept."""
    topology = grid(tensor, sequence) if tensor > 1 else Topology(world=1)
    found = []
    for shape in shapes:
        layer = replace(shape, t=tensor, sequence=sequence)
        for core in CORES:
            for name, (policy, settings, expected) in rows(layer, core).items():
                model = model_of(layer, core, topology)
                ActivationMemory(
                    model,
                    RecomputePolicy(**policy),
                    ActivationCheckpointing(**settings),
                    torch.device("cpu"),
                )
                storages = kept_by_layer(model, 0, layer.s, layer.b)
                if name == "none":
                    assert counted_by_autograd(model, layer) == sum(
                        storage.bytes for storage in storages
                    )
                found.append((f"{core}, {name}, {layer}", expected, storages))
    return found


@THOROUGH
@pytest.mark.parametrize(("tensor", "sequence"), in_tiers(GRIDS, [(2, True)]))
def test_a_layer_keeps_what_the_formulas_say(
    ranks: Pools, seed: int, tensor: int, sequence: bool
) -> None:
    shapes = drawn(seed)
    everyone = (
        ranks(tensor).run(measure, shapes, tensor, sequence)
        if tensor > 1
        else [measure(shapes, 1, False)]
    )
    for found in everyone:
        for name, expected, storages in found:
            bytes_kept = sum(storage.bytes for storage in storages)
            listing = "\n".join(map(str, storages))
            assert bytes_kept == pytest.approx(expected, rel=0.02), (
                f"{name}: {bytes_kept / expected:.4f}\n{listing}"
            )
