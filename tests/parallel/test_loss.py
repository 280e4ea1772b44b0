"""The vocab-parallel cross entropy, logits and token scores against torch on whole logits."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.step_launches import OperationCounter
from tests.support.compare import check_close, grid, leaf, piece_of
from tests.support.pools import Pools
from tests.tiers import examples, in_tiers
from zero_tp.parallel import elementwise
from zero_tp.parallel import loss as module
from zero_tp.parallel.collectives import all_gather
from zero_tp.parallel.elementwise import CHUNKED, COMPILED, ElementwiseOps
from zero_tp.parallel.layout import Sharded, vocab_shard_range
from zero_tp.parallel.logits import LogitMap, vocab_parallel_logits
from zero_tp.parallel.loss import vocab_parallel_cross_entropy
from zero_tp.parallel.token_scores import vocab_parallel_token_scores

HIDDEN = 6
IGNORED = {"none": 0.0, "some": 0.4, "most": 0.9, "all": 1.0}


class Case(NamedTuple):
    """Hidden states [pieces · world, batch, h] against a weight [vocabulary, h].

    Attributes:
        large: logits to ±1e4. ignore_index: the ignored label. upstream: the gradient of the loss.
        chunk: elements of a block of logits, and of a chunk that a cache holds.
        frozen: what needs no gradient. strided: hidden states are laid out batch first.
        scale, cap: of the logits. z_loss: its weight.
    """

    world: int = 2
    sequence: bool = False
    pieces: int = 3
    batch: int = 2
    vocabulary: int = 11
    ignored: str = "some"
    large: bool = False
    ignore_index: int = -100
    upstream: float = 2.0
    chunk: int = 30
    seed: int = 7
    frozen: str = ""
    strided: bool = False
    divisor: float | None = None
    scale: float = 1.0
    cap: float | None = None
    z_loss: float = 0.0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [s, b, h], weight [v, h] and labels [s, b], the same on every rank."""
        torch.manual_seed(self.seed)
        hidden = torch.randn(self.pieces * self.world, self.batch, HIDDEN)
        weight = torch.randn(self.vocabulary, HIDDEN)
        if self.large:
            # Whole numbers, so that logits to ±1e4 are exact in fp32 and only the loss itself is
            # compared.
            hidden, weight = (
                torch.randint(-40, 41, hidden.shape).float(),
                torch.randint(-41, 42, weight.shape).float(),
            )
            hidden[0, 0], weight[0] = 40.0, 41.0
            weight[-1] = -41.0
            weight[self.vocabulary // 2] = weight[0]  # a tie, on two ranks
        labels = torch.randint(self.vocabulary, hidden.shape[:2])
        labels[torch.rand(labels.shape) < IGNORED[self.ignored]] = self.ignore_index
        return hidden, weight, labels


def shard_of(weight: Tensor, rank: int, world: int) -> Tensor:
    """Return this rank's rows; padding rows are 1000, so that reading one changes the result."""
    layout = Sharded(0, (len(weight),), padded=True)
    local = layout.shard(weight, rank, world)
    _, count = vocab_shard_range(len(weight), rank, world)
    local[count:] = 1000.0
    return local


def cross_entropy(case: Case) -> set[str]:
    """Compare with torch; return the names of the gradients."""
    topology = grid(case.world, case.sequence)
    group, rank, world = topology.tensor_group, topology.tensor_rank, case.world
    index, divisor = case.ignore_index, case.divisor
    hidden, weight, labels = case.tensors()
    whole_hidden, whole_weight = leaf(hidden), leaf(weight)
    logits = F.linear(whole_hidden, whole_weight) * case.scale
    if case.cap is not None:
        logits = torch.tanh(logits / case.cap) * case.cap
    flat = logits.flatten(0, 1), labels.flatten()
    expected = F.cross_entropy(*flat, ignore_index=index)
    if divisor is not None:
        expected = F.cross_entropy(*flat, ignore_index=index, reduction="sum") / divisor
    entropy, count = expected.item(), (labels != index).sum() if divisor is None else divisor
    # Of logits to 1e4, torch's gradient of the log-sum-exp in fp32 has three digits.
    z_loss = logits.double().logsumexp(2).square()[labels != index].sum() / count
    if case.z_loss:
        expected = expected + case.z_loss * z_loss.float()
    (expected * case.upstream).backward()
    each = F.cross_entropy(*flat, ignore_index=index, reduction="none").view(labels.shape)

    own = piece_of(hidden, topology)
    if case.strided:
        own = own.transpose(0, 1).contiguous().transpose(0, 1)
    given_hidden = own.clone().requires_grad_("hidden" not in case.frozen)
    given_weight = shard_of(weight, rank, world).requires_grad_("weight" not in case.frozen)
    with (
        patch.object(module, "BLOCK_ELEMENTS", case.chunk),
        patch.object(elementwise, "CACHE_ELEMENTS", case.chunk),
    ):
        common: dict[str, Any] = {
            "vocabulary": case.vocabulary,
            "group": group,
            "ignore_index": index,
            "logit_map": LogitMap(case.scale, case.cap),
        }
        once: dict[str, Any] = {"sequence": case.sequence, "divisor": divisor, **common}
        once["z_loss_weight"] = case.z_loss
        found, correct, mean, mean_square = vocab_parallel_cross_entropy(
            given_hidden, given_weight, labels, accuracy=True, **once
        )
        with torch.no_grad():
            without, *_ = vocab_parallel_cross_entropy(given_hidden, given_weight, labels, **once)
        scores = vocab_parallel_token_scores(hidden, given_weight, labels, **common)
        alternatives = torch.stack((labels, labels.roll(1), torch.full_like(labels, index)), 2)
        each_of_three = vocab_parallel_token_scores(hidden, given_weight, alternatives, **common)
    assert (found.dtype, found.shape) == (torch.float32, ())
    assert found.requires_grad == (case.frozen != "hidden weight")
    # Without gradients the blocks, whose losses are added up, are smaller.
    assert without.item() == pytest.approx(expected.item(), rel=2e-6, abs=1e-6, nan_ok=True)
    assert mean.item() == pytest.approx(entropy, rel=2e-6, abs=1e-6, nan_ok=True)
    if mean_square is None:
        assert not case.z_loss and mean is found
    else:
        wanted = pytest.approx(z_loss.item(), rel=2e-6, abs=1e-6, nan_ok=True)
        assert case.z_loss and mean_square.item() == wanted
    everyone = all_gather(found.detach().reshape(1), group)
    assert torch.equal(everyone[0].expand(world), everyone) or everyone.isnan().all()
    assert found.item() == pytest.approx(expected.item(), rel=2e-6, abs=1e-6, nan_ok=True)
    assert torch.allclose(scores.nll, each, rtol=1e-5, atol=2e-6)
    # Of tied logits (`large`) torch's argmax takes the first.
    greedy = (logits.argmax(2) == labels) & (labels != index)
    assert torch.equal(scores.greedy, greedy) and correct == greedy.sum()
    assert torch.equal(each_of_three.greedy[..., 0], scores.greedy)
    assert torch.allclose(each_of_three.nll[..., 0], each, rtol=1e-5, atol=2e-6)
    other = F.cross_entropy(
        flat[0], labels.roll(1).flatten(), ignore_index=index, reduction="none"
    ).view(labels.shape)
    assert torch.allclose(each_of_three.nll[..., 1], other, rtol=1e-5, atol=2e-6)
    assert not each_of_three.nll[..., 2].any() and not each_of_three.greedy[..., 2].any()
    whole_logits = vocab_parallel_logits(
        hidden,
        given_weight,
        vocabulary=case.vocabulary,
        group=group,
        logit_map=common["logit_map"],
    )
    check_close({"logits": whole_logits}, {"logits": logits.detach()})
    if not found.requires_grad:
        return set()

    (found * case.upstream).backward()
    gradients, references = {}, {}
    if given_hidden.requires_grad:
        assert given_hidden.grad is not None and whole_hidden.grad is not None
        gradients["hidden"], references["hidden"] = (
            given_hidden.grad,
            piece_of(whole_hidden.grad, topology),
        )
    if given_weight.requires_grad:
        assert given_weight.grad is not None and whole_weight.grad is not None
        layout = Sharded(0, (case.vocabulary,), padded=True)
        # Against the zero-padded shard: a padded row must have no gradient.
        gradients["weight"], references["weight"] = (
            given_weight.grad,
            layout.shard(whole_weight.grad, rank, world),
        )
    # A floor: with one word in the vocabulary the gradient is zero.
    for each_of in (gradients, references):
        each_of["one"] = torch.ones(1)
    check_close(gradients, references)
    return set(gradients) - {"one"}


# No shrinking: a failure on one rank costs a new pool.
@settings(examples(20, 40), phases=[Phase.explicit, Phase.generate])
@given(
    st.builds(
        Case,
        world=st.sampled_from([2, 3, 4]),
        sequence=st.booleans(),
        pieces=st.integers(1, 4),
        batch=st.integers(1, 3),
        vocabulary=st.integers(1, 40),
        ignored=st.sampled_from(sorted(IGNORED)),
        large=st.booleans(),
        ignore_index=st.sampled_from([-100, -1]),
        upstream=st.sampled_from([1.0, 65536.0, 0.125]),
        chunk=st.sampled_from([1, 30, 100, 2**23]),
        seed=st.integers(0, 2**20),
        frozen=st.just(""),
        strided=st.booleans(),
        divisor=st.none(),
        scale=st.sampled_from([1.0, 0.3]),
        cap=st.sampled_from([None, 2.0]),
        z_loss=st.sampled_from([0.0, 0.2]),
        # tanh of large logits has no digits left in its slope, in torch neither.
    ).map(lambda case: case._replace(cap=None) if case.large else case)
)
@example(
    Case(4, True, 1, 1, 1, "none", True, -100, 1.0, 1, 0)
)  # three of four ranks hold padding only
@example(Case(4, False, 2, 2, 5, "all", False, -100, 65536.0, 30, 1))
@example(
    Case(2, True, 4, 2, 24, "some", True, -100, 0.125, 1, 815781)
)  # the maximum's last digit is not the loss's
@example(Case(3, True, 2, 2, 7, "some", True, -1, 1.0, 2**23, 2))
@example(Case(4, True, 2, 2, 11, scale=0.3, cap=1.5))  # a rank holds padding beside tokens
@example(Case(4, True, 2, 2, 11, scale=0.3, cap=1.5, z_loss=0.2))
def test_cross_entropy_equals_torch(ranks: Pools, case: Case) -> None:
    assert ranks(case.world).run(cross_entropy, case) == [{"hidden", "weight"}] * case.world


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "hidden weight"])
def test_frozen_weight_or_hidden_states(ranks: Pools, sequence: bool, frozen: str) -> None:
    compared = {"hidden", "weight"} - set(frozen.split())
    assert ranks(2).run(cross_entropy, Case(sequence=sequence, frozen=frozen)) == [compared] * 2


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(sequence=True, ignored=ignored, divisor=by)
            for ignored in ("none", "some", "all")
            for by in (0.25, 7.5)
        ),
        Case(sequence=True, divisor=7.5, z_loss=0.2),
        *(Case(sequence=sequence, strided=True) for sequence in (False, True)),
    ],
)
def test_other_divisors_and_layouts(ranks: Pools, case: Case) -> None:
    """With a divisor, a micro-batch whose labels are all ignored has a loss of 0 and no
    gradient.
    """
    assert ranks(2).run(cross_entropy, case) == [{"hidden", "weight"}] * 2


def rounded(
    world: int, sequence: bool, length: int, batch: int, draws: int, z_loss: float
) -> set[str]:
    """Compare bf16 with torch in fp32 on the same rounded values; the mean error must vanish."""
    topology = grid(world, sequence)
    layout, vocabulary = Sharded(0, (33,), padded=True), 33
    before, module.BLOCK_ELEMENTS = module.BLOCK_ELEMENTS, 1
    ratios: dict[str, list[float]] = {}
    for draw in range(draws):
        torch.manual_seed(draw)
        hidden = torch.randn(length, batch, HIDDEN).bfloat16()
        weight = torch.randn(vocabulary, HIDDEN).bfloat16()
        labels = torch.randint(vocabulary, (length, batch))
        labels[0, :] = -100  # 115 or 9 counted: 1/115 is not a power of two
        expected_hidden, expected_weight = leaf(hidden.float()), leaf(weight.float())
        logits = F.linear(expected_hidden, expected_weight).flatten(0, 1)
        squares = logits.logsumexp(1).square()[labels.flatten() != -100]
        (F.cross_entropy(logits, labels.flatten()) + z_loss * squares.mean()).backward()
        given_hidden = leaf(piece_of(hidden, topology))
        given_weight = leaf(layout.shard(weight, topology.tensor_rank, world))
        vocab_parallel_cross_entropy(
            given_hidden,
            given_weight,
            labels,
            vocabulary=vocabulary,
            group=topology.tensor_group,
            sequence=sequence,
            z_loss_weight=z_loss,
        )[0].backward()
        assert given_hidden.grad is not None and given_weight.grad is not None
        assert expected_hidden.grad is not None and expected_weight.grad is not None
        found = {"hidden": given_hidden.grad, "weight": given_weight.grad}
        reference = {
            "hidden": piece_of(expected_hidden.grad, topology),
            "weight": layout.shard(expected_weight.grad, topology.tensor_rank, world),
        }
        assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
        check_close(found, reference, relative=1e-2)
        for name, tensor in found.items():
            ratio = (tensor.double() * reference[name]).sum() / reference[name].double().pow(
                2
            ).sum()
            ratios.setdefault(name, []).append(ratio.item())
    module.BLOCK_ELEMENTS = before
    for name, each in ratios.items():  # errors of single elements average out
        assert sum(each) / draws == pytest.approx(1.0, abs=7e-4), name
    return set(ratios)


# With a z-loss a draw's ratio scatters twice as much.
ROUNDED = [
    (*sizes, sequence, z_loss)
    for *sizes, z_loss in ((24, 5, 10, 0.0), (4, 3, 40, 0.0), (24, 5, 40, 0.03), (4, 3, 100, 0.03))
    for sequence in (False, True)
]
FIRST_ROUNDED = [(24, 5, 10, False, 0.0), (4, 3, 100, True, 0.03)]


@pytest.mark.parametrize(
    ("length", "batch", "draws", "sequence", "z_loss"), in_tiers(ROUNDED, FIRST_ROUNDED)
)
def test_bf16(
    ranks: Pools, length: int, batch: int, draws: int, sequence: bool, z_loss: float
) -> None:
    """In several blocks, and in a single block, whose gradient is not accumulated in fp32."""
    found = ranks(2).run(rounded, 2, sequence, length, batch, draws, z_loss)
    assert found == [{"hidden", "weight"}] * 2


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest_tensor(world: int, sequence: bool, chunk: int, trained: bool = True) -> int:
    topology = grid(world, sequence)
    vocabulary = 64
    hidden, weight, labels = Case(
        world, pieces=32 // world, vocabulary=vocabulary, seed=0
    ).tensors()
    own = leaf(piece_of(hidden, topology))
    shard = leaf(Sharded(0, (vocabulary,), padded=True).shard(weight, topology.tensor_rank, world))
    common: dict[str, Any] = {"vocabulary": vocabulary, "group": topology.tensor_group}
    with (
        patch.object(module, "BLOCK_ELEMENTS", chunk),
        Largest() as largest,
        torch.set_grad_enabled(trained),
    ):
        found, *_ = vocab_parallel_cross_entropy(own, shard, labels, sequence=sequence, **common)
        if trained:
            found.backward()
        vocab_parallel_token_scores(hidden, shard, labels, **common)
    return largest.elements


@pytest.mark.parametrize("sequence", in_tiers([False, True], [True]))
def test_the_full_logits_never_exist(ranks: Pools, sequence: bool) -> None:
    whole_logits, hidden_states = 32 * 2 * 64 // 2, 32 * 2 * HIDDEN
    at_least = HIDDEN * 64 // 2  # a block as large as the weight's gradient
    for chunk in (1, 128, 512):
        assert set(ranks(2).run(largest_tensor, 2, sequence, chunk)) == {
            max(chunk, at_least, hidden_states)
        }
        assert set(ranks(2).run(largest_tensor, 2, sequence, chunk, trained=False)) == {
            max(chunk, hidden_states)
        }
    assert set(ranks(2).run(largest_tensor, 2, sequence, 2**23)) == {whole_logits}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_scales_in_place_unless_another_may_follow(dtype: torch.dtype) -> None:
    """All in one block, whose gradients have the weight's dtype."""
    hidden, weight = (leaf(torch.randn(shape).to(dtype)) for shape in ((8, 1, 8), (64, 8)))
    labels = torch.randint(64, (8, 1))
    found, *_ = vocab_parallel_cross_entropy(hidden, weight, labels, vocabulary=64, group=None)
    gradients, copies = [], []
    for factor, is_kept in ((2.0, True), (2.0, True), (1.0, False)):
        with patch.object(torch, "empty_like", wraps=torch.empty_like) as copy:
            gradients.append(
                torch.autograd.grad(found * factor, (hidden, weight), retain_graph=is_kept)
            )
        copies.append(copy.call_count)
    assert copies == [2, 2, 0]
    for first, again, last in zip(*gradients, strict=True):
        assert torch.equal(first, again)
        assert torch.equal(first, 2 * last)


def launches(ops: ElementwiseOps, blocks: int) -> Counter[str]:
    """Return the operations of a loss of some blocks of 8 tokens, and its compiled calls."""
    counter = OperationCounter()
    hidden, weight = leaf(torch.randn(8 * blocks, 1, 8)), leaf(torch.randn(16, 8))
    labels = torch.randint(16, (8 * blocks, 1))
    with (
        patch.object(elementwise, "_compiled", counter.compile),
        patch.object(module, "BLOCK_ELEMENTS", 1),  # a block has as many tokens as columns
        counter,
    ):
        vocab_parallel_cross_entropy(hidden, weight, labels, vocabulary=16, group=None, ops=ops)
    calls = Counter(call.function.__name__ for call in counter.compiled_calls["start"].elements())
    return counter.operations["start"] + calls


def test_launches_of_a_block() -> None:
    """Beside the GEMMs and what is compiled, a block sends numbers and writes targets' columns."""
    compiled = launches(COMPILED, 3) - launches(COMPILED, 2)
    assert compiled == {
        **{"mm": 2, "addmm_": 1, "stack": 1, "arange": 1, "index_put_": 1},
        **{"_block": 1, "_max_and_sum_exp_": 1, "_target_logits": 1},
        **{"_add_rows_": 1, "_to_probabilities_": 1},
    }
    assert (launches(CHUNKED, 3) - launches(CHUNKED, 2)).total() <= 47
