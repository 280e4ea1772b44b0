"""Count a model's FLOPs, and the share of a device's peak that a run reaches (MFU, HFU).

A multiply-add is two FLOPs. Work done once per row, such as a pooler's, is not counted. s sequence,
h hidden, a heads, k KV heads, d head size, L layers, v vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zero_tp.model.architectures.spec import CHUNK

if TYPE_CHECKING:
    from zero_tp.model.architectures.spec import TransformerSpec


class ForwardFlops(NamedTuple):
    """FLOPs of a forward: one layer's matrices (mean over layers), one layer's attention core,
    the head.
    """

    matrices: float
    core: float
    logits: float


def projections(spec: TransformerSpec, tensor: int = 1) -> list[tuple[int, float]]:
    """Return (inputs, outputs) of the products that make a rank's queries, keys and values, and the
    gate of the output.

    Args:
        tensor: TP degree. Latents are whole on each rank. With fewer KV heads than ranks each
            computes a whole head, which others compute too.
    """
    latent = spec.latent
    queries = spec.heads * spec.head_size / tensor
    if latent is None:
        kv_heads = max(1.0, spec.kv_heads / tensor)
        gates = queries * spec.output_gate
        return [(spec.hidden, queries + gates + 2 * kv_heads * spec.head_size)]
    expanded = spec.heads * (spec.head_size - latent.rotated + latent.value) / tensor
    return [
        (spec.hidden, latent.width),
        (latent.query or spec.hidden, queries),
        (latent.key_value, expanded),
    ]


def layer_products(spec: TransformerSpec) -> float:
    """Return the multiply-adds per token of a layer's matrices, a mean over layers.

    A matrix has one for each of its elements.

    Experts count only if they compute the token; routers and the shared experts' gates count too.
    """
    attention = sum(inputs * outputs for inputs, outputs in projections(spec))
    attention += spec.heads * spec.value_size * spec.hidden
    share = spec.attention_share
    mixer = share * attention
    delta = spec.gated_delta
    if delta is not None:
        convolution = delta.kernel * (2 * delta.keys + delta.values)
        matrices = spec.hidden * (delta.columns + delta.values) + convolution
        mixer += (1 - share) * matrices
    choices = 0
    if spec.experts is not None:
        has_gate = spec.experts.shared > 0 and spec.experts.shared_gate
        choices = spec.experts.count + has_gate
    routers = spec.hidden * choices * len(spec.expert_layers) / spec.layers
    return mixer + routers + spec.mlp_matrices * spec.hidden * spec.active_width


def head_products(spec: TransformerSpec) -> int:
    """Return the head's multiply-adds per label: the output layer's, and an encoder's dense
    layer's before it.
    """
    return spec.hidden * (spec.vocabulary + (0 if spec.causal else spec.hidden))


def attention_core(spec: TransformerSpec, batch: int, length: int) -> float:
    """Return the FLOPs of one layer's QKᵀ and product with V; masked scores count, too."""
    # Two FLOPs a multiply-add each.
    return 2.0 * batch * length**2 * spec.heads * (spec.head_size + spec.value_size)


def delta_core(spec: TransformerSpec, batch: int, length: int) -> float:
    """Return the FLOPs of one layer's gated delta rule in its chunks (model/gated_delta.py)."""
    delta = spec.gated_delta
    if delta is None:
        return 0.0
    tokens = batch * -(-length // CHUNK) * CHUNK
    # Of a chunk's tokens with each other, for each key head: products of keys, and of queries and
    # keys.
    pairs = 4.0 * CHUNK * delta.keys
    # For each value head: its part of the triangular solve, a multiply-add of which is needed for
    # half of the pairs, and scores times corrections.
    features = delta.value_heads * (delta.key_size + delta.value_size)
    corrections = CHUNK * (features + 2.0 * delta.values)
    # Two reads of the state, and its update.
    state = 6.0 * delta.key_size * delta.values
    return tokens * (pairs + corrections + state)


def forward_flops(
    spec: TransformerSpec, batch: int, length: int, label_fraction: float = 1.0
) -> ForwardFlops:
    """Return the FLOPs of a forward of `batch` sequences.

    The core counts every score, also masked ones, as the papers do.

    Args:
        label_fraction: share of the tokens that go through the head.
    """
    tokens = batch * length
    share = spec.attention_share
    core = share * attention_core(spec, batch, length)
    core += (1 - share) * delta_core(spec, batch, length)
    return ForwardFlops(
        2.0 * tokens * layer_products(spec),
        core,
        2.0 * tokens * label_fraction * head_products(spec),
    )


def model_flops(
    spec: TransformerSpec, global_batch: int, length: int, label_fraction: float = 1.0
) -> float:
    """Return the FLOPs of one step, forward and backward, not counting recomputation.

    With GPT-2's layers this is equation 7 of arXiv 2205.05198.

    Args:
        label_fraction: see `forward_flops`.
    """
    matrices, core, logits = forward_flops(spec, global_batch, length, label_fraction)
    # Backward has two products for each of forward's: for the gradients of its two factors.
    return 3 * (spec.layers * (matrices + core) + logits)


def hardware_flops(
    spec: TransformerSpec,
    global_batch: int,
    length: int,
    label_fraction: float = 1.0,
    recomputed: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Return the FLOPs that one step runs: those of `model_flops`, and the products that backward
    computes again.

    With GPT-2's layers, recomputing every attention core adds 4Bs²h per layer, as in appendix A of
    arXiv 2205.05198. The paper's equation 8 adds three times as much.

    Args:
        recomputed: (whole layers, layers of which only the attention core), see
            `RecomputePolicy.recomputed_layers_and_cores`.
    """
    matrices, core, _ = forward_flops(spec, global_batch, length, label_fraction)
    layers, cores = recomputed
    return (
        model_flops(spec, global_batch, length, label_fraction)
        + layers * (matrices + core)
        + cores * core
    )


def utilisation(
    flops: float, seconds: float, devices: int, peak_flops: float | None
) -> float | None:
    """Return FLOPs / (time × devices × peak), in 0..1: MFU of model FLOPs, HFU of hardware FLOPs;
    None without a peak.

    Args:
        flops: of one iteration, all devices together.
        seconds: of one iteration.
        peak_flops: of one device [FLOP/s].
    """
    return None if peak_flops is None else flops / (seconds * devices * peak_flops)
