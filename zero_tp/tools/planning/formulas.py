"""Count activations, model states and communication by the papers' formulas.

Notation: s sequence, b micro-batch, h hidden, a heads, L layers, v vocabulary, t TP size, N_d
data-parallel size, Ψ parameters. Sizes are in bytes; activations have 16 bits unless e says
otherwise.

Activations that one rank keeps of one transformer layer (arXiv 2205.05198, section 4 and table 2),
for 16-bit activations, masks of one byte, an MLP of 4h and dropout everywhere:

| bytes | what | split over t |
| --- | --- | --- |
| 4sbh | inputs of the two norms | under SP |
| 4sbh | outputs of the two norms: inputs of QKV and of the MLP's first product | under SP |
| 2sbh | masks of the two residual dropouts | under SP |
| 6sbh | Q, K, V | always |
| 5as²b | softmax output 2, its dropout mask 1, dropout output 2 | always |
| 2sbh | input of the output projection | always |
| 16sbh | input and output of the MLP's activation | always |

The first three lines are the paper's 10, the others its 24 + 5as/h. Like the paper, this leaves out
the norms' statistics (16sb in fp32 on accelerators, under SP 16sb/t), the states of random
generators, a mask that all layers share, and the layer's output (the next one's input).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from zero_tp.model.architectures.spec import CHUNK, TransformerSpec
from zero_tp.tools.planning.plan_settings import Layer

DELTA_PAIRS, DELTA_FEATURES = 5, 9
"""Tensors of the gated delta rule that backward needs: of pairs of tokens, and of features."""


# ---- activations of the attention core, besides Q, K and V ---------------------------------------


def eager_core(layer: Layer) -> float:
    """Return the bytes that eager attention keeps besides Q, K and V.

    This is 5as²b/t (equation 1): softmax output 2, dropout mask 1, dropout output 2. Without
    dropout it is e·as²b/t. A soft cap keeps as much again, the tanh's output; sinks are a column
    of the softmax more.
    """
    e = layer.itemsize
    capped = e * layer.scores if layer.soft_cap else 0.0
    sinks = e * layer.scores / layer.s if layer.sinks else 0.0
    return (2 * e + 1 if layer.attention_dropout else e) * layer.scores + capped + sinks


def sdpa_fused_core(layer: Layer) -> float:
    """Return the bytes that fused attention keeps besides Q, K and V.

    This is 4asb/t: the logarithm of each softmax's sum in fp32, as torch's flash attention keeps
    it.

    Its output is the input of the output projection, one storage, and counted there. With sinks
    that is another tensor, the output times a factor of each query, in fp32 and rounded.
    """
    e = layer.itemsize
    rows = layer.scores / layer.s
    return 4 * rows + (e * layer.queries + (4 + e) * rows if layer.sinks else 0.0)


def delta_core(layer: Layer, spec: TransformerSpec) -> float:
    """Return the bytes that the gated delta rule keeps besides its inputs, in fp32.

    For each value head these are products, decays and masks of the pairs of a chunk's tokens, and
    keys, values and corrections.
    """
    delta = spec.gated_delta
    if delta is None:
        return 0.0
    features = delta.key_size + delta.value_size
    elements = DELTA_PAIRS * CHUNK + DELTA_FEATURES * features
    return 4 * layer.s * layer.b * delta.value_heads * elements / layer.t


# ---- a layer, by its recomputation ---------------------------------------------------------------

Core = Callable[[Layer], float]


def saved(layer: Layer, core: Core = eager_core) -> float:
    """Return the bytes that a layer keeps without recomputation.

    This is sbh(10 + 24/t + 5as/(ht)), under SP sbh/t·(34 + 5as/h).

    Equations 1 (t = 1), 2 and 4; table 2, rows "no parallelism", "tensor parallel" and "tensor +
    sequence parallel", all with the eager core. A gated MLP keeps gate and up projection, the
    activation, and its product with the latter.
    """
    e = layer.itemsize
    # By the lines of the module's table, without the core; in 16 bit with a = k and an MLP of 4h:
    #
    #     stream      (4 · 2 + 2) sbh   = 10 sbh     over t only under SP
    #     attention   2 · (2 + 2) sbh/t = 8 sbh/t    Q, K, V and the projection's input
    #     MLP         2 · 2 · 4 sbh/t   = 16 sbh/t
    stream = 4 * e + (2 if layer.residual_dropout else 0)
    return (
        stream * layer.residual
        + e * layer.attention
        + core(layer)
        + (4 if layer.gated else 2) * e * layer.mlp
    )


def saved_selective(
    layer: Layer, core: Core = eager_core, modules: Collection[str] = ("attention_core",)
) -> float:
    """Return the bytes that a layer keeps under `selective` (section 5).

    This is sbh(10 + 24/t), with SP 34sbh/t: table 2, "selective" rows.

    Args:
        modules: `zero_tp.recompute.modules`. Recomputing `attention_core` keeps of it only its
            inputs, Q, K and V. `mlp_activation` removes 8sbh/t, the activation's output. `norm`
            removes the outputs of the two norms, 4sbh, under SP 4sbh/t. With post-norm it removes
            that of the first norm, 2sbh.
    """
    recomputed = {
        "attention_core": core(layer),
        "mlp_activation": layer.itemsize * layer.mlp,
        "norm": layer.recomputed_norms * layer.itemsize * layer.residual,
    }
    return saved(layer, core) - sum(recomputed[module] for module in modules)


def saved_full(layer: Layer, *, partitioned: bool = False) -> float:
    """Return the bytes of a layer's input, which `full` recomputation keeps.

    This is 2sbh, under SP 2sbh/t: table 2, row "full".

    Args:
        partitioned: P_a (arXiv 1910.02054, section 6.1): each TP rank keeps a t-th of it, 2sbh/t.
    """
    # Under SP the residual stream is split over TP already, so P_a has nothing to add.
    return layer.itemsize * (layer.sbh / layer.t if partitioned else layer.residual)


def saved_outside_layers(layer: Layer, v: float, *, dropout: bool = True) -> float:
    """Return the bytes that are kept outside the layers.

    This is sbh/t · (1 + 4·(1 + v/h)): dropout of the input, and the output (2205.05198, section
    4.3, with p = 1).

    These are the mask of the embedding's dropout, sbh; the input of the final norm and of the
    output layer, 2sbh each; the logits in fp32, 4sbv. The paper divides all of it by t. Without SP
    only the logits are split.

    Args:
        v: the vocabulary, times the share of tokens that have labels.
        dropout: whether the embedding's output has dropout.
    """
    mask = layer.residual if dropout else 0.0
    return mask + 2 * layer.itemsize * layer.residual + 4 * layer.s * layer.b * v / layer.t


# ---- model states (arXiv 1910.02054) -------------------------------------------------------------


def model_states(parameters: float, stage: int, data: int, itemsize: int = 2) -> dict[str, float]:
    """Return the bytes of one device's parameters, gradients and optimizer states.

    Source: figure 1 and sections 5.1 to 5.3.

    Their sum in mixed precision at stage 0: 16Ψ; 1 (P_os): 4Ψ + 12Ψ/N_d; 2 (P_os+g): 2Ψ + 14Ψ/N_d;
    3 (P_os+g+p): 16Ψ/N_d. The optimizer has K = 12: fp32 master, momentum and variance of Adam
    (section 3.1). In fp32 the parameters are their own masters.

    Args:
        parameters: Ψ on one TP rank.
    """
    sizes = {
        "parameters": itemsize,
        "gradients": itemsize,
        "optimizer": 12 - (4 if itemsize == 4 else 0),
    }
    # The sum per parameter with N_d = 4, in bytes:
    #
    #     stage   parameters   gradients   optimizer   sum
    #     0       2            2           12          16
    #     1       2            2           3           7
    #     2       2            0.5         3           5.5
    #     3       0.5          0.5         3           4
    partitioned_from = {"parameters": 3, "gradients": 2, "optimizer": 1}
    return {
        name: size * parameters / (data if stage >= partitioned_from[name] else 1)
        for name, size in sizes.items()
    }


def model_states_of_shares(
    shares: Iterable[tuple[float, int]], stage: int, itemsize: int
) -> dict[str, float]:
    """Return the sum of `model_states` of parts of a rank's parameters, (Ψ, N_d) each."""
    states = [model_states(parameters, stage, data, itemsize) for parameters, data in shares]
    return {name: sum(one[name] for one in states) for name in states[0]}


# ---- communication of one step -------------------------------------------------------------------


def zero_volume(parameters: float, stage: int, data: int, micro_batches: int = 1) -> float:
    """Return the elements that a rank sends over DP in a step.

    This is 2Ψ(N_d-1)/N_d, at stage 3 3Ψ(N_d-1)/N_d (1910.02054, section 7).

    Stages 0 to 2: reduce-scatter and all-gather (an all-reduce is both); stage 3: an all-gather in
    forward, one in backward, and the reduce-scatter. Stage 2 reduces in each micro-batch; stage 3
    also gathers in each.
    """
    reductions = micro_batches if stage >= 2 else 1
    gathers = 2 * micro_batches if stage == 3 else 1
    return (gathers + reductions) * parameters * (data - 1) / data


def tensor_volume(layer: Layer, mode: str = "none") -> float:
    """Return the elements that a rank sends over TP for a layer and micro-batch.

    Without recomputation these are 4 all-reduces of sbh.

    Source: 1909.08053, figure 4. A ring all-reduce is a reduce-scatter and an all-gather, each of
    which sends (t-1)/t of the tensor, so SP has the same volume (2205.05198, section 4.2.2). SP
    also all-gathers the two saved input shards in backward. `full` recomputation runs the forward's
    collectives once more.
    """
    # Two in forward (attention, MLP) and two in backward; `full` adds the two of its second
    # forward.
    all_reduces = 6 if mode == "full" else 4
    gathers = 2 if layer.sequence else 0
    return layer.sbh * (layer.t - 1) / layer.t * (2 * all_reduces + gathers)
