"""What each parameter is for: an embedding, the output layer, a matrix of a layer and so on.

Weight decay, `zero_tp.param_groups` and optimizers that treat matrices apart all read it here.
"""

from __future__ import annotations

from torch import nn

from zero_tp.base.settings.param_groups import Kind
from zero_tp.model.gated_delta import DeltaProjection
from zero_tp.model.head import OutputLayer, SentenceHead
from zero_tp.model.moe import Router, SharedExpert
from zero_tp.model.norm import NORMS
from zero_tp.model.position import LearnedEmbedding
from zero_tp.model.qkv import GroupedQKV
from zero_tp.model.split_rms_norm import SplitRMSNorm
from zero_tp.parallel.embedding import VocabParallelEmbedding
from zero_tp.parallel.grouped_linear import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from zero_tp.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

MATRIX_MODULES = (
    ColumnParallelLinear,
    RowParallelLinear,
    ReplicatedLinear,
    GroupedQKV,
    DeltaProjection,
    ColumnParallelGroupedLinear,
    RowParallelGroupedLinear,
)
DECAYED_KINDS: tuple[Kind, ...] = ("embedding", "output", "router", "matrix")
"""Kinds with weight decay by default; norms, biases and other parameters have none."""


def parameter_kinds(model: nn.Module) -> dict[str, Kind]:
    """Return each parameter's kind (`KIND_MEANINGS`) by its name, as `model.named_parameters()`.

    A tied weight has its first name, the embedding's. Kinds hold at every ZeRO stage, because they
    follow from modules and not from shapes.
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
