"""The part of examples/layer_norm_1p.py and the library's own compute what transformers' class
does, on whole rows and on shards.

Every layer, also a new one, names for recomputation the modules that its norms feed.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support.compare import check_close, grid, leaf, maker, piece_of
from tests.support.launched import ROOT
from tests.support.pools import Pools
from tests.support.settings import gpt2_config
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.norm import NORMS
from zero_tp.model.transformer import LAYERS
from zero_tp.parallel.collectives import all_gather
from zero_tp.parallel.gradients import GradientHooks
from zero_tp.parallel.topology import Topology

LENGTH, BATCH, HIDDEN, EPSILON = 4, 3, 8, 1e-6


def results(name: str, sequence: bool) -> dict[str, Tensor]:
    """Return output, and gradients of input and weight, whole."""
    code = (ROOT / "examples" / "layer_norm_1p.py").read_text()
    with patch.dict(NORMS):
        exec(code, {})
        topology = grid(2, sequence)
        weight, bias, rows, upstream = drawn()
        norm: Any = NORMS[name](
            maker(topology, weight=weight, bias=bias), HIDDEN, EPSILON, sharded_input=sequence
        )
    GradientHooks(norm, topology.tensor_group)
    own = leaf(piece_of(rows, topology))
    output = norm(own)
    output.backward(piece_of(upstream, topology))
    assert own.grad is not None
    output, gradient = (
        all_gather(part, topology.tensor_group) if sequence else part
        for part in (output.detach(), own.grad)
    )
    return {
        "output": output,
        "rows": gradient,
        "weight": norm.weight.grad,
        "bias": norm.bias.grad,
    }


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    weight, bias = torch.randn(2, HIDDEN, generator=draw)
    return weight, bias, *torch.randn(2, LENGTH, BATCH, HIDDEN, generator=draw)


def nemotrons(dtype: torch.dtype) -> dict[str, Tensor]:
    """The same of transformers' norm."""
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

    weight, bias, rows, upstream = (tensor.to(dtype) for tensor in drawn())
    norm = NemotronLayerNorm1P(HIDDEN, EPSILON, dtype=dtype)
    norm.weight.data.copy_(weight)
    norm.bias.data.copy_(bias)
    rows = leaf(rows)
    output = norm(rows)
    output.backward(upstream)
    assert rows.grad is not None
    gradients = {"rows": rows.grad, "weight": norm.weight.grad, "bias": norm.bias.grad}
    return {"output": output.detach(), **gradients}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["layer_norm_1p", "offset_layer_norm"])
def test_the_norm_is_nemotrons(ranks: Pools, name: str, sequence: bool) -> None:
    expected = nemotrons(torch.float32)
    for found in ranks(2).run(results, name, sequence):
        check_close(found, expected)


def test_the_norm_rounds_as_nemotrons() -> None:
    weight, bias, rows, upstream = (tensor.bfloat16() for tensor in drawn())
    make = maker(Topology(world=1), torch.bfloat16, weight=weight, bias=bias)
    norm: Any = NORMS["offset_layer_norm"](make, HIDDEN, EPSILON, sharded_input=False)
    rows = leaf(rows)
    output = norm(rows)
    output.backward(upstream)
    found = {"output": output, "rows": rows.grad, "weight": norm.weight.grad}
    expected = nemotrons(torch.bfloat16)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("layer_class", LAYERS.values())
def test_a_norm_that_backward_recomputes_feeds_the_module_that_its_layer_names(
    layer_class: Any,
) -> None:
    with patch.dict(LAYERS, sequential=layer_class):
        model = ZeroTPForCausalLM(gpt2_config(), Topology(world=1), seed=1)
    layer, outputs, fed = model.transformer.layers[0], {}, []
    for producer, consumer in layer_class.recomputed_norms:
        layer.get_submodule(producer).register_forward_hook(
            lambda module, inputs, output, key=consumer: outputs.update({key: output})
        )
        layer.get_submodule(consumer).register_forward_pre_hook(
            lambda module, inputs, key=consumer: fed.append(inputs[0] is outputs.get(key))
        )
    model(torch.zeros(1, 4, dtype=torch.long))
    assert fed == [True] * len(layer_class.recomputed_norms)
