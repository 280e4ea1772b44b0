"""The conjugate operators and the parallel layers against plain torch, on every rank of TP 2, 3
and 4.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.compare import check_close, grid, leaf, maker, piece_of, whole_gradient
from tests.support.pools import Pools
from zero_tp.parallel import collectives
from zero_tp.parallel import linear as products
from zero_tp.parallel.embedding import VocabParallelEmbedding
from zero_tp.parallel.gradients import GradientHooks
from zero_tp.parallel.layout import Sharded
from zero_tp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from zero_tp.parallel.parameter import Normal
from zero_tp.parallel.topology import Topology

BATCH, HIDDEN = 2, 12  # HIDDEN and the lengths divide by 2, 3 and 4
INIT = Normal(1.0)

EACH_GRID = pytest.mark.parametrize(
    ("world", "sequence"), [(world, sequence) for world in (2, 3, 4) for sequence in (False, True)]
)


# ---- f̄, g, ḡ ------------------------------------------------------------------------------------


def operators(world: int) -> tuple[float, float]:
    topology = grid(world, True)
    group, rank = topology.tensor_group, topology.tensor_rank
    # The same on all ranks.
    everyone = [torch.randn(2 * world, BATCH, HIDDEN) for _ in range(world)]
    shards = [torch.randn(2, BATCH, HIDDEN) for _ in range(world)]
    total, joined = torch.stack(everyone).sum(0), torch.cat(shards)

    def applied(operator: object, tensor: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        kept, tensor = tensor.clone(), leaf(tensor)
        given = upstream.clone()
        output = operator(tensor, group)  # type: ignore[operator]
        output.backward(given)
        assert torch.equal(tensor, kept) and torch.equal(given, upstream), (
            "a collective wrote into its argument"
        )
        assert tensor.grad is not None
        return output.detach(), tensor.grad

    own, shard = everyone[rank], shards[rank]
    mine = slice(2 * rank, 2 * rank + 2)
    f_bar, f_bar_backward = applied(collectives.reduce_from_tensor_region, own, own)
    assert torch.equal(f_bar_backward, own)
    g, g_backward = applied(collectives.gather_from_sequence_region, shard, own)
    assert torch.equal(g, joined)
    g_bar, g_bar_backward = applied(collectives.reduce_scatter_to_sequence_region, own, shard)
    assert torch.equal(g_bar_backward, joined)
    check_close(
        {"f̄": f_bar, "g backward": g_backward, "ḡ": g_bar},
        {"f̄": total, "g backward": total[mine], "ḡ": total[mine]},
    )

    # Conjugate: ⟨A x, y⟩ = ⟨x, Aᵀ y⟩ summed over the ranks, for a pair's halves A and Aᵀ.
    forward, transposed = (g * own).sum().double(), (shard * g_backward).sum().double()
    both = torch.stack((forward, transposed))
    dist.all_reduce(both)
    assert both[0].item() == pytest.approx(both[1].item(), rel=1e-4)
    # ḡ ∘ g is t times the identity.
    again = collectives.reduce_scatter_to_sequence_region(
        collectives.gather_from_sequence_region(shard, group), group
    )
    check_close({"ḡ∘g": again}, {"ḡ∘g": world * shard})
    return both[0].item(), both[1].item()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_conjugate_operators(ranks: Pools, world: int) -> None:
    for forward, transposed in ranks(world).run(operators, world):
        assert forward == pytest.approx(transposed, rel=1e-4)


# ---- linear layers -------------------------------------------------------------------------------


def backward_like(
    layer: nn.Module, output: Tensor, upstream: Tensor, topology: Topology
) -> dict[str, Tensor]:
    """The layer's gradients, whole; partial ones summed by the hooks as in training."""
    hooks = GradientHooks(layer, topology.tensor_group)
    output.backward(upstream)
    assert all(gradient_sum.fired == 1 for gradient_sum in hooks.sums.values())
    named = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    return {name: whole_gradient(parameter, topology) for name, parameter in named.items()}


def test_a_product_rounds_once_with_deepspeeds_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """`zero.Init` replaces `F.linear` for the rest of the process."""
    dtype = torch.bfloat16
    weight, bias, tensor = (
        torch.randn(24, HIDDEN).to(dtype),
        torch.randn(24).to(dtype),
        torch.randn(16, 3, HIDDEN),
    )
    make = maker(Topology(world=1), dtype, weight=weight, bias=bias)
    layer = ColumnParallelLinear(make, HIDDEN, (24,), bias=True, init=INIT)
    expected = F.linear(tensor.to(dtype), weight, bias)
    monkeypatch.setattr(F, "linear", zero3_linear_wrap)
    assert not torch.equal(F.linear(tensor.to(dtype), weight, bias), expected)
    assert torch.equal(layer(tensor.to(dtype), sequence=False), expected)


def linear(
    world: int,
    sequence: bool,
    kind: str,
    parts: tuple[int, ...],
    bias: bool,
    frozen: str = "",
    dtype: torch.dtype = torch.float32,
) -> set[str]:
    """The names of what was compared with torch."""
    topology = grid(world, sequence)
    column = kind == "column"
    inputs = HIDDEN if column else parts[0]
    outputs = sum(parts) if column else HIDDEN
    length = 2 * world
    shapes = {"weight": (outputs, inputs)} | ({"bias": (outputs,)} if bias else {})
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    whole_input, upstream = (
        torch.randn(length, BATCH, inputs).to(dtype),
        torch.randn(length, BATCH, outputs).to(dtype),
    )

    # The reference is fp32 whatever the dtype.
    expected = {
        name: leaf(tensor.float()) for name, tensor in {**tensors, "input": whole_input}.items()
    }
    expected_output = F.linear(expected["input"], expected["weight"], expected.get("bias"))
    expected_output.backward(upstream.float())

    make = maker(topology, dtype, **tensors)
    features = Sharded(2, parts)
    layer: ColumnParallelLinear | RowParallelLinear
    if column:
        layer = ColumnParallelLinear(make, inputs, parts, bias=bias, init=INIT)
    else:
        layer = RowParallelLinear(make, inputs, outputs, bias=bias, init=INIT)

    def local(whole: Tensor, sharded: bool) -> Tensor:
        return (
            features.shard(whole, topology.tensor_rank, world)
            if sharded
            else piece_of(whole, topology)
        )

    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    given = local(whole_input, not column).clone().requires_grad_("input" not in frozen)
    output = layer(given, sequence=sequence)
    found = backward_like(layer, output, local(upstream, column), topology)
    found["output"] = output.detach()
    reference = {name: expected[name].grad for name in tensors if name not in frozen}
    reference["output"] = local(expected_output.detach(), column)
    if "input" not in frozen:
        assert given.grad is not None
        found["input"] = given.grad
        reference["input"] = local(expected["input"].grad, not column)  # type: ignore[arg-type]
    assert all(tensor.dtype == dtype for tensor in found.values())
    check_close(found, reference, relative=1e-5 if dtype == torch.float32 else 1e-2)  # type: ignore[arg-type]
    return set(found)


@EACH_GRID
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "parts"), [("column", (24,)), ("column", (12, 24, 12)), ("row", (24,))]
)
def test_linear_layers_equal_torch(
    ranks: Pools, world: int, sequence: bool, kind: str, parts: tuple[int, ...], bias: bool
) -> None:
    compared = {"output", "input", "weight"} | ({"bias"} if bias else set())
    assert ranks(world).run(linear, world, sequence, kind, parts, bias) == [compared] * world


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize(
    "frozen", ["weight", "input", "bias", "weight input", "weight bias", "input bias"]
)
def test_frozen_parameters_and_inputs(ranks: Pools, sequence: bool, kind: str, frozen: str) -> None:
    compared = {"output", "input", "weight", "bias"} - set(frozen.split())
    assert ranks(2).run(linear, 2, sequence, kind, (12,), True, frozen) == [compared] * 2


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_linear_layers_in_bf16(ranks: Pools, sequence: bool, kind: str) -> None:
    compared = {"output", "input", "weight", "bias"}
    assert (
        ranks(4).run(linear, 4, sequence, kind, (24,), True, dtype=torch.bfloat16) == [compared] * 4
    )


class Products(TorchDispatchMode):
    """Count matrix products with an `out` argument."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function in (torch.ops.aten.mm.out, torch.ops.aten.addmm.out)
        return function(*args, **(kwargs or {}))


def products_without_own_rows_first(world: int) -> int:
    """Compare the products; return how many fewer there are without `OWN_ROWS_FIRST`."""
    topology = grid(world, True)
    whole = torch.randn(3 * world, BATCH, HIDDEN)
    matrices, biases = (torch.randn(HIDDEN, 8), torch.randn(HIDDEN, 5)), (torch.randn(8), None)
    shard, counts, found = whole.chunk(world)[topology.tensor_rank], [], []
    for own_rows_first in (True, False):
        with patch.object(products, "OWN_ROWS_FIRST", own_rows_first), Products() as counted:
            gathered, outputs = products._all_gather_matmul(
                shard, matrices, biases, topology.tensor_group
            )
        assert torch.equal(gathered, whole)
        counts.append(counted.count)
        found.append(dict(zip("ab", outputs, strict=True)))
    check_close(*found, relative=1e-6)
    assert counts[1] == len(matrices)
    with patch.object(products, "OWN_ROWS_FIRST", False):
        linear(world, True, "column", (12, 24, 12), True)
        linear(world, True, "row", (24,), True)
    return counts[0] - counts[1]


def test_own_rows_first_changes_no_product(ranks: Pools) -> None:
    """Without it every gradient equals torch's, too."""
    assert ranks(3).run(products_without_own_rows_first, 3) == [2, 4, 2]


def refused(world: int) -> tuple[str, str]:
    with pytest.raises(ValueError) as rows:
        collectives.reduce_scatter(torch.zeros(world + 1, 2), grid(world, True).tensor_group)
    with pytest.raises(ValueError) as features:
        RowParallelLinear(maker(grid(world, False)), 7, HIDDEN, bias=True, init=INIT)
    return str(rows.value), str(features.value)


def test_sizes_that_do_not_divide_are_refused(ranks: Pools) -> None:
    for rows, features in ranks(3).run(refused, 3):
        assert "4 rows do not split over 3 ranks" in rows
        assert "weight: 7 does not divide by tensor parallel size 3" in features


# ---- embedding -----------------------------------------------------------------------------------


def embedding(world: int, sequence: bool, vocabulary: int) -> set[str]:
    topology = grid(world, sequence)
    weight = torch.randn(vocabulary, HIDDEN)
    tokens = torch.randint(vocabulary, (2 * world, BATCH))
    tokens[0] = vocabulary - 1
    upstream = torch.randn(2 * world, BATCH, HIDDEN)
    expected = leaf(weight)
    expected_output = F.embedding(tokens, expected)
    expected_output.backward(upstream)

    layer = VocabParallelEmbedding(maker(topology, weight=weight), vocabulary, HIDDEN, init=INIT)
    output = layer(tokens, sequence=sequence)
    found = backward_like(layer, output, piece_of(upstream, topology), topology)
    assert torch.equal(output, piece_of(expected_output, topology))
    check_close(found, {"weight": expected.grad})  # type: ignore[dict-item]
    # Padded rows are never looked up.
    rows = -(-vocabulary // world)
    held = max(0, min(rows, vocabulary - rows * topology.tensor_rank))
    assert layer.weight.grad is not None and not layer.weight.grad[held:].any()
    return set(found)


@EACH_GRID
@pytest.mark.parametrize("vocabulary", [1, 2, 5, 9, 12])
def test_embedding_equals_torch(ranks: Pools, world: int, sequence: bool, vocabulary: int) -> None:
    assert ranks(world).run(embedding, world, sequence, vocabulary) == [{"weight"}] * world
