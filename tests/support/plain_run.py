"""The run that a parallel one is compared with: transformers' own class with torch's AdamW in one
process.

Both start with the weights that zero_tp draws from the seed, and see the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig

from tests.support.compare import gradient_of, norm
from tests.support.corrected_routers import gates
from tests.support.decoders import biased_margin, margin
from tests.support.encoders import rows_for
from tests.support.families import SEQUENCE, model_sizes
from tests.support.native import (
    buffers_of_files,
    draw_biases,
    native_model,
    our_class,
    to_theirs,
)
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.parallel.layout import stored_tensors
from zero_tp.parallel.topology import Topology

STEPS, MORE_STEPS = 4, 10
# The gradients of these models have norms from 0.2 to 1, so that every step is clipped.
CLIP = 0.1
# Key biases have a gradient of exactly zero: at the default eps Adam would blow its rounding noise
# up.
EPS, DEFAULT_EPS = 1e-3, 1e-8
# A higher rate amplifies the rounding of bf16: at 1e-2, 3e-3 and 1e-3 the first moments of equally
# plain runs are after 4 steps up to 1.7, 1.3 and 1.2 times as far from fp32 as one another.
LEARNING_RATE, WEIGHT_DECAY, BETAS = 1e-3, 0.1, (0.9, 0.95)
MOMENTS = ("exp_avg", "exp_avg_sq")
GLOBAL_BATCH = 24


def batch_of(seed: int, step: int, vocabulary: int) -> Tensor:
    """The global batch of a step: int64 [GLOBAL_BATCH, SEQUENCE + 1]."""
    generator = torch.Generator().manual_seed(seed * 1000 + step)
    return torch.randint(0, vocabulary, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)


def masked_rows(seed: int, step: int, config: Any) -> dict[str, Tensor]:
    """The same of an encoder, by the names of its arguments."""
    return rows_for(vars(config), seed * 1000 + step, GLOBAL_BATCH, SEQUENCE)


StepLosses = Callable[[Any, int], Iterator[Tensor]]
"""(model, step) → parts of the step's loss, which is their sum."""


@dataclass
class Trace:
    """What one run did. Tensors are whole, fp32 and under Hugging Face's names.

    Attributes:
        losses, norms: of every step; norms before clipping.
        balances: the load-balancing loss of every step, if the model has experts.
        margin: how far the choices of experts are from other ones, see `margin`, and what is
            clamped from its limit; of the plain run.
        clipped: norm of what the optimizer got at the first step, read from its first moment.
        gradients: of the first step, before clipping.
        weights, first, second: fp32 weights and Adam's two moments after STEPS steps.
        stale: names of the module's weights that are not those fp32 weights in its dtype.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    balances: list[float] = field(default_factory=list)
    clipped: float = float("nan")
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    margin: float = math.inf


def initial_model(seed: int, family: str, start: torch.dtype, **kernels: Any) -> Any:
    """Hugging Face's fp32 model with the weights that a run of this seed and dtype starts with.

    Args:
        kernels: fields of the config that choose how Hugging Face computes the same function.
    """
    sizes, attention = model_sizes(seed, family), kernels.pop("attn_implementation", None)
    model = native_model(AutoConfig.for_model(**sizes | kernels), attn_implementation=attention)
    draw_weights(model, AutoConfig.for_model(**sizes), seed, start)
    return model


def clamping_experts(model: Any) -> list[Any]:
    """The layers' experts whose SwiGLU is clamped."""
    return [module for module in model.modules() if hasattr(module, "limit")]


def record_clamps(experts: Any, trace: Trace) -> None:
    """Keep the least distance of a gate, or of what it multiplies, from its limit: the gradient
    jumps there.
    """
    apply_gate = experts._apply_gate

    def recorded(gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2].detach(), gate_up[..., 1::2].detach().abs()
        distances = torch.cat(((gate - experts.limit).abs(), (up - experts.limit).abs()))
        if distances.numel():
            trace.margin = min(trace.margin, distances.min().item() / experts.limit)
        output: Tensor = apply_gate(gate_up)
        return output

    experts._apply_gate = recorded


def draw_weights(model: Any, config: Any, seed: int, start: torch.dtype = torch.float32) -> None:
    """Give Hugging Face's model the weights that a run of this config, seed and dtype starts
    with.
    """
    ours = our_class(config)(config, Topology(world=1), seed=seed, dtype=start)
    draw_biases(ours)
    named = dict(model.named_parameters()) | dict(buffers_of_files(model))
    drawn = to_theirs(ours.config, dict(stored_tensors(ours)))
    assert drawn.keys() == named.keys()
    with torch.no_grad():
        for name, weight in named.items():
            weight.copy_(drawn[name])


@cache
def plain(
    seed: int,
    family: str = "gpt2",
    *,
    start: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    micro_batches: int = 1,
    summed_in: torch.dtype | None = None,
    more_steps: int = 0,
    losses_of: StepLosses | None = None,
    **kernels: Any,
) -> Trace:
    """The run, with fp32 weights for the optimizer.

    Args:
        start: dtype of the weights that the run starts with.
        dtype: that the model computes in.
        summed_in: dtype in which the gradients of a step's micro-batches are added; `dtype` where
            None.
        more_steps: at the default eps, whose losses are added.
        losses_of: of other data than `batch_of`.
        kernels: see `initial_model`.
    """
    model = initial_model(seed, family, start, **kernels)
    masters = {
        name: nn.Parameter(weight.detach().clone()) for name, weight in model.named_parameters()
    }
    biases = {name: bias.clone() for name, bias in buffers_of_files(model)}
    nn.Module.to(model, dtype)
    for name, bias in biases.items():  # which transformers keeps in fp32
        model.get_buffer(name).data = bias
    named = dict(model.named_parameters())
    # The biases of a layer's experts are one tensor; a convolution's kernels are no matrix.
    no_matrices = ("_bias", "conv1d.weight")
    is_flat = {name: one.ndim == 1 or name.endswith(no_matrices) for name, one in masters.items()}
    matrices = [weight for name, weight in masters.items() if not is_flat[name]]
    flat = [weight for name, weight in masters.items() if is_flat[name]]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": flat, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        eps=EPS,
        betas=BETAS,
    )
    trace = Trace()
    balances: list[float] = []

    def record_routers(_: Any, __: Any, output: Any) -> None:
        if biases:
            routers = zip(gates(model), output.router_logits, strict=True)
            trace.margin = min(
                trace.margin, *(biased_margin(model, gate, logits) for gate, logits in routers)
            )
        elif getattr(output, "aux_loss", None) is not None:
            balances.append(output.aux_loss.item())
            chosen = model.config.num_experts_per_tok
            trace.margin = min(
                trace.margin, *(margin(logits, chosen) for logits in output.router_logits)
            )

    model.register_forward_hook(record_routers)
    for experts in clamping_experts(model):
        record_clamps(experts, trace)
    for step in range(STEPS + more_steps):
        if step == STEPS:
            for group in optimizer.param_groups:
                group["eps"] = DEFAULT_EPS
        gradients = {
            name: torch.zeros_like(weight, dtype=summed_in) for name, weight in named.items()
        }
        losses = []
        for loss in (losses_of or partial(whole_losses, seed, micro_batches))(model, step):
            losses.append(loss)
            model.zero_grad()
            loss.backward()
            for name, weight in named.items():
                gradients[name] += gradient_of(weight)
        gradients = {name: gradient.float() for name, gradient in gradients.items()}
        trace.losses.append(sum(loss.item() for loss in losses))
        trace.balances += [fmean(balances)] if balances else []
        balances.clear()
        trace.norms.append(norm(*gradients.values()))
        for name, master in masters.items():
            master.grad = gradients[name] * min(1.0, CLIP / (trace.norms[step] + 1e-6))
        optimizer.step()
        with torch.no_grad():
            for name, weight in named.items():
                weight.copy_(masters[name])
        moments = {
            key: {name: optimizer.state[master][key] for name, master in masters.items()}
            for key in MOMENTS
        }
        if step == 0:
            trace.gradients = copied(gradients)
            trace.clipped = norm(*moments["exp_avg"].values()) / (1 - BETAS[0])
        if step == STEPS - 1:
            trace.weights = copied(masters)
            trace.first, trace.second = (copied(moments[key]) for key in MOMENTS)
    return trace


def whole_losses(seed: int, micro_batches: int, model: Any, step: int) -> Iterator[Tensor]:
    if hasattr(model, "cls"):
        yield from masked_losses(masked_rows(seed, step, model.config), micro_batches, model)
        return
    for part in batch_of(seed, step, model.config.vocab_size).chunk(micro_batches):
        output = model(part[:, :-1])
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), part[:, 1:].flatten())
        if getattr(output, "aux_loss", None) is not None:
            loss = loss + model.router_aux_loss_coef * output.aux_loss
        yield loss / micro_batches


def masked_losses(rows: dict[str, Tensor], micro_batches: int, model: Any) -> Iterator[Tensor]:
    """The mean over all masked tokens, and the mean over the rows of the loss of their segments'
    order.
    """
    count = (rows["labels"] != IGNORE_INDEX).sum()
    for number in range(micro_batches):
        part = {name: each.chunk(micro_batches)[number] for name, each in rows.items()}
        labels, order = part.pop("labels"), part.pop("next_sentence_label")
        output = model(**part)
        words, orders = output.prediction_logits.float(), output.seq_relationship_logits.float()
        of_words = F.cross_entropy(words.flatten(0, 1), labels.flatten(), reduction="sum") / count
        yield of_words + F.cross_entropy(orders, order) / micro_batches


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
