"""Time pieces of a training step, as an older tree computes them or as this one does.

    PYTHONPATH=TREE python -P benchmarks/device_pieces.py before|this

It prints JSON: of each piece its microseconds, and TB/s of the bytes that it has to move: each
input read once, each output written once, so that a tree that moves more has a lower rate. The
older tree is b5321b6d, whose files have other names. The sizes are those of row `1.3b`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

REPEATS = 20
EPSILON = 1e-5
NAMES = (
    "squared norm",
    "one parameter's update",
    "RMSNorm backward with the residual's gradient",
    "sum and norm",
    "SwiGLU backward",
    "Q and K rotated",
    "rotation backward",
    "the loss's block",
    "grouped-query gradient",
)
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}


class Sizes(NamedTuple):
    tokens: int
    batch: int
    hidden: int
    width: int
    head: int
    vocabulary: int
    block: int
    kv_heads: int


FULL = Sizes(16_384, 8, 2048, 5504, 128, 32_000, 4096, 4)
TINY = Sizes(64, 2, 32, 48, 8, 96, 16, 2)


class Piece(NamedTuple):
    """A piece to time.

    Attributes:
        moved: bytes that it has to read and write.
    """

    run: Callable[[], object]
    moved: int


class Inputs:
    """Random tensors of the pieces, bf16 unless their name says otherwise."""

    def __init__(self, sizes: Sizes, device: torch.device):
        self.sizes = sizes
        self.device = device

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def rows(self) -> Tensor:
        return self.random(self.sizes.tokens, self.sizes.hidden)

    def scale(self) -> Tensor:
        return self.random(self.sizes.tokens, 1, dtype=torch.float32).abs()

    def gradients(self) -> list[Tensor]:
        """Return those of a layer's matrices and of its norms."""
        _, _, hidden, width, *_ = self.sizes
        shapes = ((3 * hidden, hidden), (hidden, hidden), (2 * width, hidden), (hidden, width))
        return [*(self.random(*shape) for shape in shapes), *(self.random(hidden),) * 2]

    def heads(self) -> Tensor:
        """Return a view [b, a, s, d] whose memory is a product's, [s, b, a·d]."""
        tokens, batch, hidden, _, head, *_ = self.sizes
        product = self.random(tokens // batch, batch, hidden)
        return product.unflatten(-1, (-1, head)).permute(1, 2, 0, 3)

    def angles(self, features: int) -> Tensor:
        length = self.sizes.tokens // self.sizes.batch
        return self.random(1, 1, length, features).clamp(-1, 1)

    def update(self) -> tuple[Tensor, ...]:
        """Return (gradient, master, first, second, weight) of a matrix."""
        numel = self.sizes.hidden * self.sizes.width
        wide = [self.random(numel, dtype=torch.float32) for _ in range(3)]
        wide[2].abs_()
        return (self.random(numel), *wide, self.random(numel))

    def logits(self) -> tuple[Tensor, Tensor]:
        """Return a block's logits and their targets."""
        block, vocabulary = self.sizes.block, self.sizes.vocabulary
        target = torch.randint(vocabulary, (block,), device=self.device)
        return self.random(block, vocabulary), target


def grouped_gradient(inputs: Inputs) -> Piece:
    """The gradients of causal attention whose queries share keys: one call of torch in both."""
    tokens, batch, hidden, _, head, *_ = inputs.sizes
    kv = inputs.sizes.kv_heads
    length = tokens // batch
    query = inputs.random(batch, hidden // head, length, head).requires_grad_()
    key, value = (inputs.random(batch, kv, length, head).requires_grad_() for _ in range(2))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    upstream = torch.randn_like(output)
    run = partial(torch.autograd.grad, output, (query, key, value), upstream, retain_graph=True)
    return Piece(run, 2 * 4 * (query.numel() + key.numel()))


def pieces_before(inputs: Inputs, ops: Any) -> dict[str, Callable[[], Piece]]:
    """Return the pieces as b5321b6d and DeepSpeed's own step compute them."""
    from zero_tp.models.mlp import _gated_gradient  # type: ignore[import-not-found]
    from zero_tp.models.norm import _rms_norm, _rows_gradient, _weight_gradient  # type: ignore[import-not-found]
    from zero_tp.models.position import _rotate_rows  # type: ignore[import-not-found]

    loss: Any = import_module("zero_tp.parallel.loss")

    def scan() -> Piece:
        from deepspeed.runtime.utils import has_inf_or_nan

        gradients = inputs.gradients()
        return Piece(lambda: [has_inf_or_nan(one) for one in gradients], _bytes(*gradients))

    def norm() -> Piece:
        gradients = inputs.gradients()
        return Piece(lambda: [one.double().norm(2) for one in gradients], _bytes(*gradients))

    def update() -> Piece:
        gradient, master, first, second, weight = inputs.update()
        step = torch.ones((), device=inputs.device)
        settings = {name: value for name, value in ADAMW.items() if name != "betas"}
        settings |= dict(zip(("beta1", "beta2"), ADAMW["betas"], strict=True))

        def run() -> None:
            wide = gradient.float().mul_(0.5)
            update_fused: Any = torch._fused_adamw_
            states = [[master], [wide], [first], [second], [], [step]]
            update_fused(*states, **settings, amsgrad=False, maximize=False)
            weight.copy_(master)

        return Piece(run, 28 * master.numel())

    def norm_backward() -> Piece:
        gradient, rows, residual = inputs.rows(), inputs.rows(), inputs.rows()
        scale, weight = inputs.scale(), inputs.random(inputs.sizes.hidden)

        def run() -> None:
            ops.sum_rows(_weight_gradient, (gradient, rows, scale))
            ops.map_rows(_rows_gradient, (gradient, rows, scale), weight).add_(residual)

        return Piece(run, 4 * _bytes(rows))

    def sum_and_norm() -> Piece:
        rows, branch, weight = inputs.rows(), inputs.rows(), inputs.random(inputs.sizes.hidden)
        run = lambda: ops.map_rows(_rms_norm, (rows + branch,), weight, EPSILON)  # noqa: E731
        return Piece(run, 4 * _bytes(rows))

    def rotation() -> Piece:
        query, key = inputs.heads(), inputs.heads()
        cosine, sine = (inputs.angles(inputs.sizes.head) for _ in range(2))
        run = lambda: [_rotate_rows(one, cosine, sine, ops) for one in (query, key)]  # noqa: E731
        return Piece(run, 4 * _bytes(query))

    def rotation_backward() -> Piece:
        heads = [inputs.heads() for _ in range(3)]
        cosine, sine = (inputs.angles(inputs.sizes.head) for _ in range(2))

        def run() -> Tensor:
            query, key = (_rotate_rows(one, cosine, -sine, ops) for one in heads[:2])
            parts = (one.permute(2, 0, 1, 3).flatten(2) for one in (query, key, heads[2]))
            return torch.cat([*parts], -1)

        return Piece(run, 6 * _bytes(heads[0]))

    def loss_block() -> Piece:
        logits, target = inputs.logits()
        valid = inputs.sizes.vocabulary

        def run() -> None:
            _, maximum, factor, _ = loss._log_probability(logits, target, valid, None, ops, False)
            loss._to_logit_gradients_(logits, target, valid, maximum, factor, ops)

        return Piece(run, 3 * _bytes(logits))

    swiglu = partial(_swiglu, inputs, ops, _gated_gradient)
    rows = (norm_backward, sum_and_norm, swiglu, rotation, rotation_backward)
    return {"overflow scan": scan, **_named(inputs, norm, update, *rows, loss_block)}


def pieces_of_this_tree(inputs: Inputs, ops: Any) -> dict[str, Callable[[], Piece]]:
    """Return the pieces as this tree computes them; the norm finds an overflow, so no scan."""
    from zero_tp.engine.zero.adamw import adamw_scalars, update_and_round_compiled
    from zero_tp.model.mlp import _gated_gradient
    from zero_tp.model.position import (
        Rotation,
        _by_position,
        _rotate_back_and_join,
        _rotate_in_place,
    )
    from zero_tp.model.rms_norm import Scaling, _gradients_of_both, _sum_and_norm
    from zero_tp.parallel import loss
    from zero_tp.parallel.gradients import squared_norms
    from zero_tp.parallel.logits import LogitMap

    def norm() -> Piece:
        gradients = inputs.gradients()
        return Piece(partial(squared_norms, gradients), _bytes(*gradients))

    def update() -> Piece:
        parts = inputs.update()
        scalars = torch.tensor(adamw_scalars(ADAMW, 1, 0.5), device=inputs.device)
        return Piece(
            partial(ops.map_rows, update_and_round_compiled, parts, scalars), 28 * parts[1].numel()
        )

    def norm_backward() -> Piece:
        rows = (inputs.rows(), inputs.rows(), inputs.scale(), inputs.rows())
        others = (inputs.random(inputs.sizes.hidden), Scaling)
        run = partial(ops.map_and_sum_rows, _gradients_of_both, rows, *others)
        return Piece(run, 4 * _bytes(rows[0]))

    def sum_and_norm() -> Piece:
        rows = (inputs.rows(), inputs.rows())
        others = (inputs.random(inputs.sizes.hidden), EPSILON, Scaling)
        return Piece(partial(ops.map_rows, _sum_and_norm, rows, *others), 4 * _bytes(rows[0]))

    def rotation() -> Piece:
        query, key = inputs.heads(), inputs.heads()
        cosine, sine = (inputs.angles(inputs.sizes.head // 2) for _ in range(2))
        turn = Rotation(cosine, sine, False, False)
        return Piece(partial(_rotate_in_place, query, key, turn, ops), 4 * _bytes(query))

    def rotation_backward() -> Piece:
        heads = [inputs.heads() for _ in range(3)]
        angles = [inputs.angles(inputs.sizes.head // 2) for _ in range(2)]
        rows = _by_position(*heads, *angles)
        run = partial(ops.map_rows, _rotate_back_and_join, rows, False, False)
        return Piece(run, 6 * _bytes(heads[0]))

    def loss_block() -> Piece:
        logits, target = inputs.logits()
        valid = inputs.sizes.vocabulary

        def run() -> None:
            absent = torch.zeros_like(target, dtype=torch.bool)
            rows = loss._all_gather_rows(logits, target, absent, valid, None, ops, False)
            sums = loss._Sums(logits.device, 0.0).tensors(False)
            others = (0.0, valid, LogitMap(), True)
            gradients = ops.map_rows(loss._add_rows_, (absent, absent, *rows), *sums, *others)
            arguments = (gradients, valid, LogitMap(), ops)
            loss._to_logit_gradients_(logits, target, rows[0], *arguments)

        return Piece(run, 3 * _bytes(logits))

    swiglu = partial(_swiglu, inputs, ops, _gated_gradient)
    rows = (norm_backward, sum_and_norm, swiglu, rotation, rotation_backward)
    return _named(inputs, norm, update, *rows, loss_block)


def _named(inputs: Inputs, *pieces: Callable[[], Piece]) -> dict[str, Callable[[], Piece]]:
    """Return pieces in the order of NAMES, with the last one, which is the same in every tree."""
    return dict(zip(NAMES, (*pieces, partial(grouped_gradient, inputs)), strict=True))


def _swiglu(inputs: Inputs, ops: Any, function: Callable[..., Tensor]) -> Piece:
    intermediate = inputs.random(inputs.sizes.tokens, 2 * inputs.sizes.width)
    gradient = inputs.random(inputs.sizes.tokens, inputs.sizes.width)
    run = partial(ops.map_rows, function, (intermediate, gradient), F.silu)
    return Piece(run, 2 * _bytes(intermediate) + _bytes(gradient))


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def microseconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median of the device's time of a call, after three."""
    for _ in range(3):
        run()
    times = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            run()
            marks[1].record()
            torch.cuda.synchronize()
            times.append(1e3 * marks[0].elapsed_time(marks[1]))
        else:
            begin = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    from zero_tp.parallel.elementwise import CHUNKED, COMPILED

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.type == "cuda"
    inputs = Inputs(FULL if on_cuda else TINY, device)
    make = {"before": pieces_before, "this": pieces_of_this_tree}[sys.argv[1]]
    figures: dict[str, Any] = {}
    for name, build in make(inputs, COMPILED if on_cuda else CHUNKED).items():
        try:
            piece = build()
            with torch.no_grad() if "grouped" not in name else torch.enable_grad():
                time_us = microseconds(piece.run, device)
            figures[name] = {"us": time_us, "tbps": piece.moved / time_us / 1e6}
        except Exception as error:  # is this piece's result; the others are timed
            figures[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
