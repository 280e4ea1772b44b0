"""Show that an imported model predicts a page of text, a layer at a time in memory.

A fault of an importer, such as exchanged rows, keeps all shapes right, and most make the model
worse than a uniform guess, whose loss is ln(vocabulary). SmolLM2-135M has 3.6 on the shipped page,
15.4 with gate and up exchanged, 5.7 with neighbours rotated instead of halves; ln(V) is 10.8.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import aliases_of, architecture_of, weights_of
from zero_tp.model.architectures.table import Weight
from zero_tp.model.weights.native import native_model, open_config
from zero_tp.model.weights.stacked_experts import divide_by_sizes
from zero_tp.tools.checkpoint_import.safetensors_file import open_safetensors
from zero_tp.tools.checkpoint_import.stored_tensors import FileTensor, read_whole, rows_of

TOKENS = 512
"""Tokens of a text that are scored."""
HEAD_ROWS = 8192
"""Rows of the head that are in memory at once."""


@dataclass(frozen=True)
class Proof:
    """The loss of an imported model on some tokens.

    Attributes:
        loss: mean over the predicted tokens [nats].
        uniform: ln(vocabulary), the loss of a uniform guess [nats].
        seconds: the time that it took.
    """

    loss: float
    uniform: float
    tokens: int
    seconds: float


class WrittenWeights:
    """Reads the tensors of a written model one at a time, in fp32, by the names of transformers'
    class.
    """

    def __init__(self, directory: Path, config: PretrainedConfig) -> None:
        self.directory = directory
        self.tensors: dict[str, FileTensor] = {}
        # Not memory-mapped: pages of a map count as this process's memory.
        for file in sorted(directory.glob("*.safetensors")):
            self.tensors |= open_safetensors(file).tensors
        self.stacked = {weight.native_name: weight for weight in weights_of(config)}
        self.aliases = aliases_of(config)
        self.renamed = architecture_of(config).file_names

    def read(self, name: str, rows: slice | Tensor | None = None) -> Tensor:
        """Return a tensor, or some of its rows."""
        name = self.aliases.get(name, name)
        name = self.renamed.get(name, name)
        weight = self.stacked.get(name)
        if name not in self.tensors and weight is not None:
            return self._stack(weight)
        stored = self.tensors[name]
        if rows is None:
            return read_whole(stored).float()
        if isinstance(rows, slice):
            return rows_of(stored, rows).float()
        return torch.cat([rows_of(stored, slice(row, row + 1)) for row in rows.tolist()]).float()

    def _stack(self, weight: Weight) -> Tensor:
        """Return what files have in parts: the matrices of all experts, or convolutions."""
        parts = {name: self.read(name) for name in weight.names}
        return weight.from_hf(divide_by_sizes(parts, [weight], self.directory))


class _StreamedEmbedding(nn.Module):
    """An embedding of which only the rows that are asked for are read."""

    def __init__(self, embedding: nn.Module, name: str, weights: WrittenWeights) -> None:
        super().__init__()
        self.scale = getattr(embedding, "embed_scale", None)
        self.name = name
        self.weights = weights
        self.weight = torch.empty(0)  # its dtype is asked for

    def forward(self, tokens: Tensor) -> Tensor:
        wanted, places = tokens.unique(return_inverse=True)
        rows = self.weights.read(self.name, wanted)[places]
        return rows if self.scale is None else rows * self.scale


class _StreamedHead(nn.Module):
    """A head whose logits are computed from some of its rows at a time."""

    def __init__(self, head: nn.Linear, name: str, weights: WrittenWeights) -> None:
        super().__init__()
        self.rows = head.out_features
        self.has_bias = head.bias is not None
        self.name = name
        self.weights = weights

    def forward(self, hidden: Tensor) -> Tensor:
        parts = []
        for start in range(0, self.rows, HEAD_ROWS):
            rows = slice(start, min(start + HEAD_ROWS, self.rows))
            parts.append(hidden @ self.weights.read(f"{self.name}.weight", rows).T)
        logits = torch.cat(parts, dim=-1)
        if self.has_bias:
            logits += self.weights.read(f"{self.name}.bias")
        return logits


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a model, which are read one by one."""
    stacks = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name in stacks:
        # A layer's own list, such as that of its experts, is read with the layer.
        if not any(name.startswith(f"{outer}.") for outer in stacks):
            stack = model.get_submodule(name)
            yield from ((f"{name}.{number}", layer) for number, layer in stack.named_children())


def _stream(model: nn.Module, name: str, module: nn.Module, weights: WrittenWeights) -> None:
    """Read a module's parameters before its forward, and drop them after it."""

    def fill(*_: Any) -> None:
        for own, _parameter in list(module.named_parameters()):
            _assign(module, own, nn.Parameter(weights.read(f"{name}.{own}"), requires_grad=False))

    def drop(*_: Any) -> None:
        for own, parameter in list(module.named_parameters()):
            empty = torch.empty_like(parameter, device="meta")
            _assign(module, own, nn.Parameter(empty, requires_grad=False))

    module.register_forward_pre_hook(fill)
    module.register_forward_hook(drop)


def _assign(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, parameter)


def streamed_model(directory: Path) -> Any:
    """Return transformers' model of a directory, of which each layer is read when it computes."""
    config = open_config(directory)
    weights = WrittenWeights(directory, config)
    config._attn_implementation = "eager"
    model = native_model(config, with_buffers=True).eval()
    names = {id(module): name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    name = names[id(embedding)]
    _replace(model, name, _StreamedEmbedding(embedding, f"{name}.weight", weights))
    _replace(model, names[id(head)], _StreamedHead(head, names[id(head)], weights))
    for layer_name, layer in _layers(model):
        _stream(model, layer_name, layer, weights)
    inside = tuple(f"{layer_name}." for layer_name, _ in _layers(model))
    for parameter_name, _ in list(model.named_parameters()):
        if not parameter_name.startswith(inside):
            whole = nn.Parameter(weights.read(parameter_name), requires_grad=False)
            _assign(model, parameter_name, whole)
    for buffer_name, buffer in list(model.named_buffers()):
        if buffer_name in weights.tensors:  # a router's bias
            buffer.copy_(weights.read(buffer_name))
    return model


def prove(directory: Path, tokens: Tensor) -> Proof:
    """Score some tokens by a written model.

    Args:
        tokens: [tokens], at least two.

    Raises:
        UserError: a token is not in the vocabulary.
    """
    begin = time.monotonic()
    model = streamed_model(directory)
    vocabulary = model.config.vocab_size
    if len(tokens) < 2 or int(tokens.max()) >= vocabulary:
        raise UserError(
            f"the proof has {len(tokens)} tokens up to {int(tokens.max())}; give two or more, "
            f"below the vocabulary of {vocabulary:,}"
        )
    limit = min(TOKENS, model.config.max_position_embeddings)
    page = tokens[None, :limit]
    with torch.no_grad():
        logits = model(input_ids=page, use_cache=False).logits[0, :-1].float()
        loss = nn.functional.cross_entropy(logits, page[0, 1:]).item()
    seconds = time.monotonic() - begin
    return Proof(loss, math.log(vocabulary), page.shape[1], seconds)
