"""Build models with the weights of a Hugging Face directory; each rank reads its slices."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.base.weight_files import is_finite, open_weights
from zero_tp.model.architectures import (
    Architecture,
    Weight,
    aliases_of,
    architecture_of,
    weights_of,
)
from zero_tp.model.model_class import meta_model
from zero_tp.model.weights.entries import native_shapes
from zero_tp.model.weights.native import (
    check_layers,
    check_shape_and_dtype,
    generation_config,
    non_finite_error,
    tie_error,
)
from zero_tp.model.weights.quantized import join_quantized
from zero_tp.model.weights.stacked_experts import divide_by_sizes, unstack_experts
from zero_tp.parallel.layout import Layout, stored_tensors, whole_shape
from zero_tp.parallel.parameter import Init, SeededInit, whole_slice
from zero_tp.parallel.spans import Index, Spans, overlaps, zero_padding
from zero_tp.parallel.topology import Topology


class PretrainedSource:
    """A `WeightSource` that reads this rank's slices of a Hugging Face directory.

    The constructor checks names, shapes and dtypes; `fill` reads a parameter when it is made.

    Args:
        config: the model's, of a supported model_type.
        allow_pickle: read pickled weights if there are no safetensors.
        seed: of heads that the files lack.

    Attributes:
        new_heads: descriptions of those heads.
        quantized: descriptions of weights that are dequantised where they are read.
        left_out: descriptions of parts of the files that the model lacks.
    """

    def __init__(
        self,
        directory: Path,
        config: PretrainedConfig,
        *,
        allow_pickle: bool = False,
        seed: int = 0,
    ):
        self.directory = directory
        architecture = architecture_of(config)
        named = _with_usual_prefixes(open_weights(directory, allow_pickle), architecture, directory)
        methods = architecture.fields.quantizations
        tensors, self.quantized = join_quantized(named, methods, directory)
        check_layers(directory, config, tensors)
        self.weights = {weight.our_name: weight for weight in weights_of(config)}
        self.generation = generation_config(directory)
        # Of our own model: transformers' class would bring scipy and its generation into each rank.
        shapes = {name: whole_shape(tensor) for name, tensor in stored_tensors(meta_model(config))}
        expected = native_shapes(config, shapes)
        unstacked = unstack_experts(
            tensors, self.weights.values(), shapes, architecture.base_prefix, directory
        )
        self.tensors = divide_by_sizes(unstacked, self.weights.values(), directory)
        self.file_names = _match_names(self.tensors, expected.keys(), architecture, directory)
        self.left_out = [
            f"{directory}: left out: {part}; exports lack it"
            for part in _untrained(self.tensors.keys() - self.file_names.values(), architecture)
        ]
        aliases = aliases_of(config)
        # Old files hold an alias as well as its source, those of `safetensors.torch.save_model` one
        # of them.
        self.aliases = {
            source: alias for alias, source in aliases.items() if alias in self.file_names
        }
        for source, alias in self.aliases.items():
            # A file with the alias alone is the tied weight under its other name.
            self.file_names.setdefault(source, self.file_names[alias])
        heads = architecture.optional_heads
        self.new_heads = [
            head
            for head, pattern in heads.items()
            if _has_none_of(pattern, expected, self.file_names)
        ]
        absent_heads = "|".join(heads[head] for head in self.new_heads)
        self._seeded_init = SeededInit(seed)
        for name, shape in expected.items():
            if name in self.file_names:
                check_shape_and_dtype(
                    directory, self.file_names[name], self.tensors[self.file_names[name]], shape
                )
            # Without new heads the pattern is empty and fits no name.
            elif name not in aliases and not re.fullmatch(absent_heads, name):
                raise UserError(f"{directory}: no tensor {name}; expected shape {shape}")

    def notes(self) -> Iterator[str]:
        """Yield lines on heads that are drawn, weights that are dequantised, and what is left
        out.
        """
        if self.new_heads:
            heads = ", ".join(self.new_heads)
            yield f"{self.directory}: has no weights of {heads}: drawn from the seed"
        for weights in self.quantized:
            yield f"{self.directory}: {weights} are dequantised to bf16"
        yield from self.left_out

    def fill(
        self,
        local: Tensor,
        name: str,
        whole: Sequence[int],
        layout: Layout,
        init: Init,
        topology: Topology,
    ) -> None:
        weight = self.weights[name]
        if weight.names[0] not in self.file_names:
            self._seeded_init.fill(local, name, whole, layout, init, topology)
            return
        rank = topology.tensor_rank, topology.tensor, topology.expert_rank
        spans = layout.spans(whole, *rank)
        # The last ranks' rows beyond the vocabulary are in no file, and `local` is uninitialised.
        zero_padding(local, spans)
        if weight.experts:
            # Files have one tensor an expert, our parameter a rank's experts: TP splits each
            # matrix, and expert parallelism their number.
            own = list(weight.matrices())[whole_slice(spans[0])]
            for matrix, target in zip(own, local, strict=True):
                self._read(target, matrix, spans[1:])
        else:
            self._read(local, weight, spans)
        # Each rank checks the slices that it has read; none reads a whole file.
        if not is_finite(local):
            raise non_finite_error(self.directory, ", ".join(weight.names), local)

    def _read(self, target: Tensor, weight: Weight, spans: Sequence[Spans]) -> None:
        """Read a part of one matrix, or of a vector, into `target`.

        Gate and up of width 4 are one parameter here and two tensors in files. Rank 1 of TP 2:

            parameter [8, h]    g0 g1 g2 g3 u0 u1 u2 u3
            target [4, h]       g2 g3 u2 u3
            it reads            gate_proj[2:4] → target[0:2],  up_proj[2:4] → target[2:4]

        Args:
            spans: the part's map along each dimension. Hugging Face's tensors split the rows, too.
        """
        rows, *columns = spans
        # A row layer is split along columns, which no file splits.
        whole_columns = [Spans.identity(along.whole_length) for along in columns]
        for name, stored_rows in weight.spans(rows.whole_length).items():
            for stored_index, index in overlaps((stored_rows, *whole_columns), spans):
                target[index] = self._slice(weight, name, stored_index)

    def _slice(self, weight: Weight, hf_name: str, index: Index) -> Tensor:
        """Return a slice of a Hugging Face tensor; `index` is that of our parameter's form."""

        def read(name: str) -> Tensor:
            # A memory-mapped file: the transpose is a view, and only the slice's pages are read.
            return weight.slice_stored(self.tensors[self.file_names[name]], index)

        source = read(hf_name)
        alias = self.aliases.get(hf_name)
        # Compared slice by slice, so no rank reads a whole embedding for it.
        if alias is not None and not torch.equal(source, read(alias)):
            raise tie_error(self.directory, hf_name, alias)
        return source


def _match_names(
    tensors: Mapping[str, Tensor],
    expected: Collection[str],
    architecture: Architecture,
    directory: Path,
) -> dict[str, str]:
    """Return name in the native class → name in the files.

    Files of the bare model lack the prefix of the class with a head. Tensors that the architecture
    ignores are dropped.

        in files                            in the class
        wte.weight (a bare GPT2Model)       transformer.wte.weight
        embed_out.weight (GPT-NeoX)         lm_head.weight
        bert.….LayerNorm.gamma              bert.….LayerNorm.weight
        h.0.attn.bias (a causal mask)       dropped
    """
    file_names: dict[str, str] = {}
    native_names = {file_name: name for name, file_name in architecture.file_names.items()}
    for file_name, tensor in tensors.items():
        name = native_names.get(file_name, file_name)
        for old, new in architecture.obsolete_suffixes.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        # An unknown name gets the prefix too; `_is_ignorable` tries it with and without.
        name = name if name in expected else architecture.base_prefix + name
        if name in file_names:
            raise UserError(
                f"{directory}: tensors {file_names[name]} and {file_name} are both {name}"
            )
        if name in expected:
            file_names[name] = file_name
        elif not _is_ignorable(name, architecture):
            raise UserError(
                f"{directory}: unexpected tensor {file_name} of shape {tuple(tensor.shape)}; "
                f"{architecture.native_class} with this config.json has none of that name"
            )
    return file_names


def _with_usual_prefixes(
    tensors: Mapping[str, Tensor], architecture: Architecture, directory: Path
) -> Mapping[str, Tensor]:
    """Return the tensors with names as if no file had `other_prefixes`."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        usual = name
        for prefix, other in architecture.other_prefixes.items():
            if name.startswith(prefix):
                usual = other + name.removeprefix(prefix)
        if usual in renamed:
            raise UserError(f"{directory}: tensor {name}: there is a second {usual}")
        renamed[usual] = tensor
    return renamed


def _untrained(tensors: Collection[str], architecture: Architecture) -> Iterator[str]:
    """Yield a description of each part of the files that is left out.

    Args:
        tensors: names of those that the model lacks.
    """
    for pattern, part in architecture.untrained_parts.items():
        if names := sorted(name for name in tensors if re.fullmatch(pattern, name)):
            yield f"{part} (tensors such as {names[0]}, {len(names)} in all)"


def _is_ignorable(name: str, architecture: Architecture) -> bool:
    """Return whether a tensor belongs to an optional head or an untrained part, or is an obsolete
    buffer.

    Args:
        name: with the prefix.
    """
    patterns = [
        *architecture.optional_heads.values(),
        *architecture.untrained_parts,
        *(re.escape(architecture.base_prefix) + old for old in architecture.obsolete_tensors),
    ]
    bare = name.removeprefix(architecture.base_prefix)
    return any(re.fullmatch(pattern, form) for pattern in patterns for form in (name, bare))


def _has_none_of(pattern: str, expected: Collection[str], present: Collection[str]) -> bool:
    """Return whether the files have none of a head's tensors."""
    names = [name for name in expected if re.fullmatch(pattern, name)]
    return bool(names) and not any(name in present for name in names)
