"""The parts of an architecture table: weights under both names, and the table itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.base.validation import with_keys
from zero_tp.model.architectures.fields import Fields
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.parallel.spans import Span, Spans

Form = Literal["ours", "transposed", "scalar"]


@dataclass(frozen=True)
class Weight:
    """One parameter under our name and Hugging Face's; `{layer}` stands for the layer's number.

    Attributes:
        our_name: its name in our model.
        hf_name: its name in the Hugging Face class; several if our parameter concatenates tensors
            of equal size.
        form: how Hugging Face stores it: "transposed" is [in, out] (Conv1D), or [experts, in, out],
            "scalar" has no dimension where ours has one.
        heads: Hugging Face interleaves Q, K and V by head, [heads, 3, d, …], where our parameter is
            [3, heads, d, …].
        interleaved: Hugging Face interleaves gate and up of each expert, where our parameter
            [experts, 2f, …] has gate before up.
        head_rows: rows of each part of a head, if they are not three of one size.
        sizes: rows of each of the tensors of `hf_name`, if they differ.
        rows: (start, stop, total): our parameter is rows [start, stop) of a tensor of `total` rows.
        experts: our parameter stacks this number of matrices, [experts, out, in]; `hf_name` lists
            them by expert. None for a file that stacks them, too.
        native_name: its name in transformers' class if files differ; `hf_name` is then the name in
            files. The class stacks experts as we do; files have one tensor for each.
        layers: numbers of the layers that have it; None: all.
        is_parameter: our model trains it; a buffer is fp32 in every run.
        dtype: in files; None: that of all others.
    """

    our_name: str
    hf_name: str | tuple[str, ...]
    form: Form = "ours"
    heads: int | None = None
    interleaved: bool = False
    head_rows: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    rows: tuple[int, int, int] | None = None
    experts: int | None = None
    native_name: str | None = None
    layers: tuple[int, ...] | None = None
    is_parameter: bool = True
    dtype: torch.dtype | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hf_name,) if isinstance(self.hf_name, str) else self.hf_name

    def for_layer(self, number: int) -> Weight:
        hf_names = tuple(name.format(layer=number) for name in self.names)
        native_name = self.native_name and self.native_name.format(layer=number)
        return replace(
            self,
            our_name=self.our_name.format(layer=number),
            hf_name=hf_names,
            native_name=native_name,
        )

    def as_rows(self, whole: Tensor) -> Tensor:
        """Return our parameter as the rows of all its matrices, a view. [E, o, i] → [E·o, i]"""
        return whole.flatten(0, 1) if self.experts else whole

    def matrices(self) -> list[Weight]:
        """Return a weight for each expert's matrix; without experts, this one.

        Of Mixtral's gate and up with 2 experts:

            names       0.w1 0.w3 1.w1 1.w3
            matrices    (0.w1 0.w3), (1.w1 1.w3)
        """
        if not self.experts:
            return [self]
        parts = len(self.names) // self.experts
        starts = range(0, len(self.names), parts)
        return [
            replace(self, hf_name=self.names[start : start + parts], experts=None)
            for start in starts
        ]

    def spans(self, rows: int) -> dict[str, Spans]:
        """Return Hugging Face's name → the map between our parameter's rows and the tensor's.

        Names and spans are in the order of our rows. Two heads, interleaved in Hugging Face's QKV:

            ours    q0 q1 k0 k1 v0 v1
            theirs  q0 k0 v0 q1 k1 v1
        """
        if self.heads is not None:
            sizes = self.head_rows or (rows // (3 * self.heads),) * 3
            starts = (0, *itertools.accumulate(sizes))
            spans = tuple(
                Span(self.heads * start + head * size, head * starts[-1] + start, size)
                for (start, size), head in itertools.product(
                    zip(starts, sizes, strict=False), range(self.heads)
                )
            )
            return {self.names[0]: Spans(spans, rows, rows)}
        if self.rows is not None:
            start, _, total = self.rows
            return {self.names[0]: Spans((Span(0, start, rows),), rows, total)}
        sizes = self.sizes or (rows // len(self.names),) * len(self.names)
        starts = (0, *itertools.accumulate(sizes))
        return {
            name: Spans((Span(start, 0, size),), rows, size)
            for name, start, size in zip(self.names, starts, sizes, strict=False)
        }

    def shapes(self, whole: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of Hugging Face's tensors, given our whole parameter's shape."""
        whole = (whole[0] * whole[1], whole[2]) if self.experts else whole
        rows = self.rows[2] if self.rows else whole[0] // len(self.names)
        sizes = self.sizes or (rows,) * len(self.names)

        def stored(rows: int) -> tuple[int, ...]:
            part = (rows, *whole[1:])
            swapped = (*part[:-2], *part[-2:][::-1])
            return {"ours": part, "transposed": swapped, "scalar": ()}[self.form]

        return {name: stored(size) for name, size in zip(self.names, sizes, strict=True)}

    def from_stored(self, tensor: Tensor) -> Tensor:
        """Return Hugging Face's tensor in the form of our parameters, a view unless interleaved."""
        return self.slice_stored(tensor, (slice(None),) * 2 if self.interleaved else ())

    def slice_stored(self, tensor: Tensor, index: tuple[slice, ...]) -> Tensor:
        """Return a part of Hugging Face's tensor in the form of our parameters; no more of it is
        read.

        Of gate and up with f 3, interleaved, a rank's first rows of both:

            stored           g0 u0 g1 u1 g2 u2
            order            0 2 4 1 3 5
            index, reads     [0:2]: 0 2    [3:5]: 1 3
        """
        if self.form == "scalar":
            return tensor.reshape(1)[index]
        oriented = tensor.mT if self.form == "transposed" else tensor
        if not self.interleaved:
            return oriented[index]
        experts, rows, *columns = index
        order = torch.arange(oriented.shape[1]).view(-1, 2).t().flatten()
        index_of_rows: tuple[Any, ...] = (experts, order[rows], *columns)
        return oriented[index_of_rows]

    def to_stored(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the form of our parameters in Hugging Face's, a view unless
        interleaved.
        """
        if self.form == "scalar":
            return tensor.reshape(())
        if self.interleaved:
            # [experts, 2, f, …] → [experts, f, 2, …]
            tensor = tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return tensor.mT if self.form == "transposed" else tensor

    def from_hf(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return our whole parameter from Hugging Face's tensors."""
        oriented = {name: self.from_stored(tensors[name]) for name in self.names}
        rows = (
            self.rows[1] - self.rows[0]
            if self.rows
            else sum(tensor.shape[0] for tensor in oriented.values())
        )
        maps = self.spans(rows).items()
        # Names and spans are in the order of our rows, so joined pieces are our parameter.
        parts = [oriented[name][span.local] for name, spans in maps for span in spans]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.unflatten(0, (self.experts, -1)) if self.experts else whole


def to_hf(weights: Iterable[Weight], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return Hugging Face's tensors from our parameters, as views if possible.

    Args:
        weights: all weights that these tensors consist of.
        read: our parameter's name → the whole of it.
    """
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    owners: dict[str, Weight] = {}
    for weight in weights:
        whole = weight.as_rows(read(weight.our_name))
        for name, spans in weight.spans(whole.shape[0]).items():
            parts = [(span.local_start, whole[span.whole]) for span in spans]
            # Several weights may have rows of one tensor, in any order; they are sorted by where
            # they start.
            pieces.setdefault(name, []).extend(parts)
            owners[name] = weight
    tensors = {}
    for name, rows_by_start in pieces.items():
        ordered = [rows for _, rows in sorted(rows_by_start, key=lambda pair: pair[0])]
        # One piece stays a view, so most tensors are not copied.
        joined = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
        tensors[name] = owners[name].to_stored(joined)
    return tensors


def file_tensors(weights: Iterable[Weight], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a transformers class as files name them.

    Stacked experts become one view each. A file's own names stay.
    """
    stored = dict(tensors)
    for weight in weights:
        if weight.native_name in stored:
            stacked = stored.pop(weight.native_name)
            stored |= to_hf([weight], {weight.our_name: stacked}.__getitem__)
    return stored


@dataclass(frozen=True)
class Architecture:
    """The table of one Hugging Face model_type.

    Attributes:
        fields: treatment of the Hugging Face config's fields.
        translate: Hugging Face config → TransformerSpec; raises UserError for anything it cannot
            compute exactly.
        weights: spec → every parameter; a name with `{layer}` stands for one parameter per layer.
        tied: Hugging Face names that alias another when the embeddings are tied, {alias: source}.
        native_class: name of the transformers class that opens an export.
        masked_lm_class: name of an encoder's class without a sentence head; None for decoders.
        file_names: of tensors that files name differently, {name in the class: name in files}.
        base_prefix: prefix of names in the class with a head; files of the bare model lack it.
        obsolete_tensors: patterns of buffers that older versions saved, without the prefix. They
            are ignored.
        untrained_parts: pattern of tensors that files may have, without the prefix → what they are
            of. They are left out.
        optional_heads: head → pattern of its tensors. Files may lack it; it is then initialised
            from the seed.
        other_prefixes: prefix of tensor names in some files → prefix in others.
        obsolete_suffixes: suffix of tensor names in old files → suffix in the class.
    """

    fields: Fields
    translate: Callable[[PretrainedConfig], TransformerSpec]
    weights: Callable[[TransformerSpec], tuple[Weight, ...]]
    tied: dict[str, str]
    native_class: str
    base_prefix: str
    masked_lm_class: str | None = None
    obsolete_tensors: tuple[str, ...] = ()
    untrained_parts: Mapping[str, str] = field(default_factory=dict)
    optional_heads: Mapping[str, str] = field(default_factory=dict)
    other_prefixes: Mapping[str, str] = field(default_factory=dict)
    obsolete_suffixes: Mapping[str, str] = field(default_factory=dict)
    file_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def causal(self) -> bool:
        """Return whether its models are causal decoders. Only encoders have a `masked_lm_class`."""
        return self.masked_lm_class is None

    def spec(self, config: PretrainedConfig, key: str = "") -> TransformerSpec:
        """Check a config's fields and translate it to a TransformerSpec.

        Args:
            key: prefix of the fields in errors; by default the name of the config's class.
        """
        try:
            self.fields.check_object(config)
            return self.translate(config)
        except ConfigError as error:
            owner = key or type(config).__name__
            raise with_keys(
                error, lambda name: f"{owner}.{name.removeprefix(f'{MODEL_KEY}.')}"
            ) from None

    def weights_of(self, spec: TransformerSpec) -> Iterator[Weight]:
        """Yield every parameter of a model of this spec, with its layer's number filled in."""
        # A tied head is the word embedding, and exports hold that only.
        aliases = self.tied if spec.tied else {}
        for weight in self.weights(spec):
            if weight.names[0] in aliases:
                continue
            if "{layer}" not in weight.our_name:
                yield weight
                continue
            for layer in range(spec.layers) if weight.layers is None else weight.layers:
                yield weight.for_layer(layer)
