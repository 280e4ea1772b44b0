"""What each parameter is for: an embedding, the output layer, a matrix of a layer and so on.

Weight decay, `zero_tp.param_groups` and optimizers that treat matrices apart all read it here.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from zero_tp.base.settings.param_groups import Kind
from zero_tp.model.head import OutputLayer, SentenceHead
from zero_tp.model.moe import Router, SharedExpert
from zero_tp.model.norm import NORMS, SplitRMSNorm
from zero_tp.model.position import LearnedEmbedding
from zero_tp.model.qkv import GroupedQKV
from zero_tp.parallel.embedding import VocabParallelEmbedding
from zero_tp.parallel.grouped_linear import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from zero_tp.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

MATRIX_MODULES = (
    ColumnParallelLinear,
    RowParallelLinear,
    ReplicatedLinear,
    GroupedQKV,
    ColumnParallelGroupedLinear,
    RowParallelGroupedLinear,
)
DECAYED_KINDS: tuple[Kind, ...] = ("embedding", "output", "router", "matrix")
"""Kinds with weight decay by default; norms, biases and other parameters have none."""


def parameter_kinds(model: nn.Module) -> Mapping[str, Kind]:
    """Return each parameter's kind by its name, in the order of `model.named_parameters()`.

        embedding   of words, positions and token types; a tied output layer is the embedding
        output      the untied output layer; BERT's classifier of sentence order
        norm        weights and biases of norms, those of Q and K too
        bias        every other bias
        router      routers of experts; the gate of a shared expert, one row
        matrix      of layers and of BERT's dense heads [out, in]; experts' [E, out, in]
        other       whatever a part makes by itself that is none of these

    It holds at every ZeRO stage, because it reads modules and not shapes.
    """
    classifiers = {
        id(module.classifier) for module in model.modules() if isinstance(module, SentenceHead)
    }
    kinds: dict[str, Kind] = {}
    for name, _ in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        kind = _kind(module, leaf)
        kinds[name] = "output" if kind == "matrix" and id(module) in classifiers else kind
    return kinds


def divide_for_muon(kinds: Mapping[str, Kind]) -> list[list[str]]:
    """Return the names of the matrices, of the other parameters with weight decay, and of those
    without: the groups of Muon's optimizer.
    """
    groups: list[list[str]] = [[], [], []]
    for name, kind in kinds.items():
        groups[0 if kind == "matrix" else 1 if kind in DECAYED_KINDS else 2].append(name)
    return groups


def _kind(module: nn.Module, leaf: str) -> Kind:
    """Return the kind of a module's own parameter `leaf`."""
    if isinstance(module, (*NORMS.values(), SplitRMSNorm)):
        return "norm"
    if leaf == "bias" or leaf.endswith("_bias"):
        return "bias"
    if isinstance(module, (VocabParallelEmbedding, LearnedEmbedding)):
        return "embedding"
    if isinstance(module, OutputLayer):
        return "output"
    if isinstance(module, Router) or (isinstance(module, SharedExpert) and leaf == "gate"):
        return "router"
    # A part of another class may hold anything, such as a convolution's kernel or a state's decay
    # rates: it is no matrix until its class is in the table.
    return "matrix" if isinstance(module, MATRIX_MODULES) else "other"
