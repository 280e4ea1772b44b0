"""Compiled elementwise kernels train what the operations as written train: losses, norms and
every weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig

from tests.support.compare import leaf
from tests.support.pools import Pools
from tests.support.tiny_configs import general_fields
from tests.tiers import in_tiers
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model.mlp import _clamped, _clamped_gradient, _gated, _gated_gradient
from zero_tp.model.position import _rotate_back_and_join, _rotate_pairs_
from zero_tp.model.rms_norm import (
    OffsetScaling,
    Scaling,
    WideScaling,
    _rms_norm,
    _rows_gradient,
    _rows_gradient_of_both,
    _sum_and_norm,
    _weight_gradient,
)
from zero_tp.parallel import elementwise, loss
from zero_tp.parallel.grouped_linear import (
    _project_rows,
    _sum_copies_,
    _sum_weighted_copies_,
    _weight_and_project_rows,
    _weight_rows,
)
from zero_tp.parallel.logits import LogitMap
from zero_tp.parallel.loss import _max_and_sum_exp_, _to_probabilities_
from zero_tp.parallel.topology import Topology

STEPS, BATCH, SEQUENCE = 3, 8, 16
MODELS = ("qwen3", "gpt_neox")
"""RMS norms over hidden states and heads, rotary, gate; layer norms, a part of each head that
turns.
"""
OTHER_MIXERS = ("qwen3_5_text", "youtu")


def run(
    seed: int, model_type: str, tensor: int, sequence: bool, stage: int, dtype: str, mode: str
) -> list[Any]:
    """On every rank: losses, norms and weights as written and compiled, and how many kernels
    were made.
    """
    from tests.support.native import native_tensors
    from zero_tp.engine.engine import TrainingEngine

    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 101,
        "max_position_embeddings": SEQUENCE,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if model_type == "qwen3":
        sizes |= {"head_dim": 12, "num_key_value_heads": 2}
    if model_type in OTHER_MIXERS:
        sizes = general_fields(model_type)
        del sizes["model_type"]
    config = AutoConfig.for_model(model_type, **sizes)
    topology, found = Topology(tensor, sequence), []
    settings = {
        "train_micro_batch_size_per_gpu": BATCH // topology.data,
        "optimizer": {
            "type": "SGD",
            "params": {"lr": 0.5},
        },  # as large as their gradients, weights differ
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_allow_untested_optimizer": True,
    }
    policy = RecomputePolicy(mode=mode)
    elementwise._compiled.cache_clear()
    compile_graph = mock.Mock(wraps=elementwise.compile_graph)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(elementwise, "compile_graph", compile_graph)
    for compiled in (False, True):
        compile_graph.reset_mock()
        engine = TrainingEngine.from_dict(
            config, topology, settings, seed=seed, recompute=policy, compiled=compiled
        )
        generator = torch.Generator().manual_seed(seed)
        losses, norms = [], []
        for _ in range(STEPS):
            windows = torch.randint(
                0, config.vocab_size, (BATCH, SEQUENCE + 1), generator=generator
            )
            own = windows.chunk(topology.data)[topology.data_rank]
            losses.append(engine.train_step([(own[:, :-1], own[:, 1:])]))
            norms.append(engine.gradient_norm)
        weights = {key: value.float().clone() for key, value in native_tensors(engine.model)}
        found.append((losses, norms, weights, compile_graph.call_count))
    monkeypatch.undo()
    return found


CASES = [
    *(
        pytest.param(model_type, 2, True, 3, "fp32", "full", marks=pytest.mark.thorough)
        for model_type in ("qwen3", *OTHER_MIXERS)
    ),
    *(
        pytest.param(*case, marks=pytest.mark.heavy)
        for case in (
            ("qwen3", 1, False, 0, "fp32", "none"),
            ("gpt_neox", 2, True, 0, "bf16", "selective"),
            ("qwen3", 2, False, 0, "bf16", "full"),
            ("gpt_neox", 2, True, 1, "fp32", "none"),
            ("qwen3", 2, True, 1, "bf16", "selective"),
            ("gpt_neox", 1, False, 1, "fp32", "full"),
            ("qwen3", 2, True, 2, "bf16", "none"),
            ("gpt_neox", 2, False, 2, "fp32", "selective"),
            ("qwen3", 1, False, 2, "bf16", "full"),
            ("gpt_neox", 1, False, 3, "bf16", "none"),
            ("qwen3", 1, False, 3, "fp32", "selective"),
        )
    ),
]
"""Every ZeRO stage with every recomputation, each architecture, grid and dtype among them."""


@pytest.mark.parametrize(("model_type", "tensor", "sequence", "stage", "dtype", "mode"), CASES)
def test_a_run_trains_the_same(
    ranks: Pools,
    seed: int,
    model_type: str,
    tensor: int,
    sequence: bool,
    stage: int,
    dtype: str,
    mode: str,
) -> None:
    limit = 2e-5 if dtype == "fp32" else 2e-2
    for plain, compiled in ranks(2).run(
        run, seed, model_type, tensor, sequence, stage, dtype, mode
    ):
        assert plain[3] == 0 and compiled[3] > 3
        assert compiled[0] == pytest.approx(plain[0], rel=limit)
        assert compiled[1] == pytest.approx(plain[1], rel=limit)
        for name, expected in plain[2].items():
            assert (compiled[2][name] - expected).norm() <= limit * expected.norm(), name


def cases(dtype: torch.dtype, device: str) -> dict[str, tuple[Any, list[Tensor], list[Any]]]:
    """Name → function, rows, what else it takes."""
    torch.set_default_device(device)
    rows, gradient, weight = (
        torch.randn(37, 24).to(dtype),
        torch.randn(37, 24).to(dtype),
        torch.rand(24).to(dtype),
    )
    scale, wide = torch.rand(37, 1), torch.randn(37, 48).to(dtype)
    halves = torch.randn(2, 37, 2, 3, 3).to(dtype).unbind()
    heads = torch.randn(3, 37, 2, 3, 8).to(dtype).unbind()
    angles = torch.randn(2, 37, 1, 1, 3).to(dtype).unbind()
    logits, maximum, factor = torch.randn(37, 24).to(dtype), torch.rand(37), torch.rand(37)
    row_of_copy = torch.randperm(3 * 37).view(37, 3)
    copies, by_token = torch.randn(3 * 37, 24).to(dtype), torch.rand(37, 3)
    torch.set_default_device("cpu")
    gelu = partial(F.gelu, approximate="tanh")
    return {
        **{
            f"{scaling.__name__} {name}": (function, tensors, [*others, scaling])
            for scaling in (Scaling, WideScaling, OffsetScaling)
            for name, function, tensors, others in (
                ("norm", _rms_norm, [rows], [weight, 1e-5]),
                ("norm's weight", _weight_gradient, [gradient, rows, scale], []),
                ("norm's rows", _rows_gradient, [gradient, rows, scale], [weight]),
                ("sum and norm", _sum_and_norm, [rows, gradient], [weight, 1e-5]),
                ("both rows", _rows_gradient_of_both, [gradient, rows, scale, rows], [weight]),
            )
        },
        "norm without a weight": (_rms_norm, [rows], [None, 1e-5, Scaling]),
        "its rows": (_rows_gradient, [gradient, rows, scale], [None, Scaling]),
        "gate": (_gated, [wide], [F.silu]),
        "gate's gradient": (_gated_gradient, [wide, gradient], [F.silu]),
        "another gate's": (_gated_gradient, [wide, gradient], [gelu]),
        "clamped": (_clamped, [wide], [1.702, 0.5]),
        "clamped gate's": (_clamped_gradient, [wide, gradient], [1.702, 0.5]),
        "rotation": (_rotate_pairs_, [*halves, *angles], []),
        "rotation back": (_rotate_back_and_join, [*heads, *angles], [False, False]),
        "neighbours back": (_rotate_back_and_join, [*heads, *angles], [True, False]),
        "last features back": (_rotate_back_and_join, [*heads, *angles], [True, True]),
        "copies": (_sum_copies_, [rows, row_of_copy], [copies]),
        "weighted copies": (_sum_weighted_copies_, [rows, row_of_copy, by_token], [copies]),
        "gradients of copies": (_weight_and_project_rows, [gradient, scale, rows], []),
        "of biases": (_project_rows, [wide[:, :24], rows], []),
        "softmax": (_max_and_sum_exp_, [logits, maximum, factor], [21]),
        "probabilities": (_to_probabilities_, [logits, maximum, factor], [21, LogitMap()]),
        "capped": (_to_probabilities_, [logits, maximum, factor], [21, LogitMap(0.5, 3.0)]),
    }


def run_graph(graph: Any, inputs: Any) -> Any:
    """Return a function of a list of tensors that runs the graph's operations one by one."""
    sizes = [size for tensor in inputs for size in (*tensor.shape, *tensor.stride())]
    assert all(isinstance(size, int) for size in sizes), "symbols instead of sizes"
    return lambda tensors: graph(*tensors)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", in_tiers([torch.float32, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("graph", "cpu"),
        pytest.param("inductor", "cpu", marks=pytest.mark.heavy),
        pytest.param("inductor", "cuda", marks=pytest.mark.cuda),
    ],
)
def test_a_kernel_computes_what_is_written(
    seed: int, monkeypatch: pytest.MonkeyPatch, backend: str, device: str, dtype: torch.dtype
) -> None:
    """In one graph each; what the compiler fuses it rounds less often."""
    elementwise._compiled.cache_clear()
    if backend == "graph":
        monkeypatch.setattr(elementwise, "compile_graph", run_graph)
    torch.manual_seed(seed)
    # The graph's operations are torch's decompositions: that of silu differs from torch's kernel by
    # a last bit on some CPUs.
    exact = 2**-23 if backend == "graph" else 1e-6 if dtype == torch.float32 else 1e-2
    for name, (function, rows, others) in cases(dtype, device).items():
        copies = [each.clone() for each in rows]
        with torch.no_grad():
            run = (
                elementwise.COMPILED.sum_rows
                if function is _weight_gradient
                else elementwise.COMPILED.map_rows
            )
            found, expected = run(function, copies, *others), function(*rows, *others)
        if expected is None:
            found, expected = copies, rows
        for mine, yours in zip(
            *([each] if isinstance(each, Tensor) else each for each in (found, expected)),
            strict=True,
        ):
            assert mine.dtype == yours.dtype and mine.shape == yours.shape, name
            assert (
                mine.float() - yours.float()
            ).abs().max() <= exact * yours.float().abs().max(), name
    elementwise._compiled.cache_clear()


def test_auto_compiles_on_cuda_alone() -> None:
    places = {place: torch.device(place) for place in ("cpu", "cuda")}
    decided = [
        [elementwise.is_compiled(each, place) for place in places.values()]
        for each in ("auto", True, False)
    ]
    assert decided == [[False, True], [True, True], [False, False]]


@pytest.mark.slow
def test_numbers_of_rows_share_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked tokens differ in number from batch to batch; dynamo gives up after eight kernels of
    one function.
    """
    logits = torch.randn(40, 24)
    elementwise._compiled.cache_clear()
    torch._dynamo.reset()
    monkeypatch.setattr(elementwise, "compile_graph", run_graph)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for count in (37, 1, 0, *range(2, 20)):
        found, expected = (
            [logits[:count].clone(), torch.zeros(count), torch.zeros(count)] for _ in range(2)
        )
        elementwise.COMPILED.map_rows(_max_and_sum_exp_, found, 21)
        _max_and_sum_exp_(expected[0], expected[1], expected[2], 21)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    elementwise._compiled.cache_clear()


def test_no_rows_make_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that first gets no rows of its experts compiles for the next number."""
    elementwise._compiled.cache_clear()
    compiled = []

    def compile_and_note(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs[0]))
        return run_graph(graph, inputs)

    monkeypatch.setattr(elementwise, "compile_graph", compile_and_note)
    for count in (0, 7, 0, 7):
        rows, weights = torch.randn(count, 24), torch.rand(count, 1)
        found = elementwise.COMPILED.map_rows(_weight_rows, (rows, weights))
        torch.testing.assert_close(found, rows * weights)
    assert compiled == [7]
    elementwise._compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("z_loss", in_tiers([0.0, 0.1], [0.1]))
def test_a_compiled_loss_is_the_one_as_written(
    seed: int, monkeypatch: pytest.MonkeyPatch, z_loss: float
) -> None:
    """In blocks of 7, 7, 7 and 4 rows; all of them add to the same sums."""
    elementwise._compiled.cache_clear()
    torch._dynamo.reset()
    monkeypatch.setattr(elementwise, "compile_graph", run_graph)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(loss, "BLOCK_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(16, (25, 1), generator=generator)
    labels[::3] = IGNORE_INDEX
    tensors = [torch.randn(*shape, generator=generator) for shape in ((25, 1, 8), (17, 8))]
    results = []
    for ops in (elementwise.CHUNKED, elementwise.COMPILED):
        hidden, weight = (leaf(tensor) for tensor in tensors)
        found = loss.vocab_parallel_cross_entropy(
            *(hidden, weight, labels),
            vocabulary=16,
            group=None,
            accuracy=True,
            z_loss_weight=z_loss,
            ops=ops,
        )
        found.loss.backward()
        results.append([found.loss, found.correct, found.cross_entropy, hidden.grad, weight.grad])
    for written, compiled in zip(*results, strict=True):
        assert written is not None and torch.equal(written, compiled)
    elementwise._compiled.cache_clear()


@pytest.mark.slow
def test_halves_of_one_tensor_rotate_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of rows; `torch.compile` would compile in the size of the shared tensor."""
    elementwise._compiled.cache_clear()
    monkeypatch.setattr(elementwise, "compile_graph", run_graph)
    for count in (7, 5, 9):
        heads = torch.randn(count, 2, 3, 8)
        cosine, sine = torch.randn(2, count, 1, 1, 4).unbind()
        first, second = heads.clone().chunk(2, -1)
        elementwise.COMPILED.map_rows(_rotate_pairs_, (*heads.chunk(2, -1), cosine, sine))
        rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        torch.testing.assert_close(heads, rotated)
    elementwise._compiled.cache_clear()


@pytest.mark.parametrize("missing", ["compiler", "triton"])
def test_a_machine_without_a_compiler_is_told(missing: str) -> None:
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import TritonMissing

    def failing(*_: Any) -> None:
        if missing == "triton":
            raise TritonMissing(None)
        raise BackendCompilerFailed(failing, RuntimeError("No working C++ compiler found"), None)

    told = (
        rf"^zero_tp.compile: torch can't compile for cpu here \(.*{missing} .*\); set it to false$"
    )
    with (
        mock.patch.object(elementwise, "_compiled", lambda _: failing),
        pytest.raises(UserError, match=told),
    ):
        elementwise.compile_elementwise(torch.nn.Identity(), torch.device("cpu"))
