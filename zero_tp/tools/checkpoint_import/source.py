"""What every trainer's checkpoint is opened as: a config, tensors, and the table of their rows."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import Weight, weights_of
from zero_tp.model.weights.native import native_model, stored_shapes
from zero_tp.tools.checkpoint_import.row_maps import Rows, in_order
from zero_tp.tools.checkpoint_import.stored_tensors import (
    StoredTensor,
    are_equal,
    read_into,
    read_whole,
    rows_of,
    whole_index,
)

OUR_LAYER = "transformer.layers.{layer}."


@dataclass(frozen=True)
class SourceWeight:
    """One parameter of ours and the tensors of the source that have its rows.

    Attributes:
        our_name, names: may have `{layer}`; `names` may have `{expert}`, too.
        rows: the map between our rows and those of each of `names`. Those of a matrix of experts
            are one expert's.
        layers: numbers of the layers that have it; None: all.
        experts: number of matrices that our parameter stacks.
        native: the architecture's own weight, if the source has the names and forms of
            transformers' class.
    """

    our_name: str
    names: tuple[str, ...]
    rows: Rows | None = None
    layers: tuple[int, ...] | None = None
    experts: int | None = None
    native: Weight | None = None

    def in_layer(self, layer: int) -> SourceWeight:
        names = tuple(name.replace("{layer}", str(layer)) for name in self.names)
        return replace(self, our_name=self.our_name.format(layer=layer), names=names)

    def maps(self, rows: int) -> Iterator[tuple[str, slice, slice]]:
        """Yield (source's name, its rows, our rows) of each run.

        Args:
            rows: of our parameter, all experts' together.
        """
        count = self.experts or 1
        size = rows // count
        maps = (self.rows or in_order(len(self.names)))(size)
        for expert in range(count):
            for name, spans in zip(self.names, maps, strict=True):
                for span in spans:
                    start = expert * size + span.whole_start
                    yield (
                        name.replace("{expert}", str(expert)),
                        span.local,
                        slice(start, start + span.length),
                    )

    def shapes(self, whole: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape that each tensor of the source must have, given our parameter's."""
        if self.native is not None:
            return self.native.shapes(whole)
        stacked = bool(self.experts)
        size = whole[1] if stacked else whole[0] if whole else 1
        columns = whole[2:] if stacked else whole[1:]
        maps = (self.rows or in_order(len(self.names)))(size)
        return {
            name.replace("{expert}", str(expert)): (spans.local_length, *columns)
            for expert in range(self.experts or 1)
            for name, spans in zip(self.names, maps, strict=True)
        }


@dataclass(frozen=True)
class SourceStates:
    """The states of a source's Adam, under the names of its weights.

    Attributes:
        moments: kind → name → tensor, of the shapes of the weights.
        groups: (settings, names) of each group of the optimizer.
        frozen: names of parameters that were not trained.
        decoupled: AdamW's decay; None: the source does not tell.
        steps: the count of updates.
        counters, loss_scale: as in `ZeroEngine.progress`.
        schedule_start: see there; None: no schedule was saved.
        zero_stage, dtype: of the run.
    """

    moments: Mapping[str, Mapping[str, StoredTensor]]
    groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]]
    frozen: tuple[str, ...]
    decoupled: bool | None
    steps: int
    counters: Mapping[str, int]
    loss_scale: Mapping[str, Any]
    schedule_start: int | None
    zero_stage: int
    dtype: str


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint of another trainer.

    Attributes:
        trainer: its name in `--format`.
        folder: of this step.
        config: Hugging Face's.
        tensors: the model's, by the trainer's names, whole.
        weights: the table of all of our parameters.
        padded: names of tensors of which the rows beyond the vocabulary are left out.
        left_out: descriptions of what the folder holds and the model lacks.
        ignorable: patterns of names that are no weights.
        notes: lines for the user.
        dtype: of the weights; None: that of the largest tensor.
        states: of the optimizer. None: they are not read, because of `states_problem`.
    """

    trainer: str
    folder: Path
    config: PretrainedConfig
    tensors: Mapping[str, StoredTensor]
    weights: Sequence[SourceWeight]
    padded: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    ignorable: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    states: SourceStates | None = None
    states_problem: str = "states of this trainer are not read"


PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Of weights that are what they say: 8-bit ones are quantised."""


def without_tied_head(
    folder: Path, tensors: Mapping[str, StoredTensor], embedding: str, head: str
) -> dict[str, StoredTensor]:
    """Return the tensors without a head that is the embedding under a second name.

    Raises:
        UserError: its values are others.
    """
    rest = {name: tensor for name, tensor in tensors.items() if name != head}
    if head not in tensors or embedding not in tensors:
        return rest
    if not are_equal(tensors[embedding], tensors[head]):
        raise UserError(
            f"{folder}: {head} is not {embedding}, so the model is not tied; give the --config "
            "that it was trained with"
        )
    return rest


def expand(weights: Iterable[SourceWeight], layers: int) -> list[SourceWeight]:
    """Return a weight for each layer of those with `{layer}`."""
    listed = []
    for weight in weights:
        if "{layer}" not in weight.our_name:
            listed.append(weight)
            continue
        numbers = range(layers) if weight.layers is None else weight.layers
        listed += [weight.in_layer(number) for number in numbers]
    return listed


def our_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of all parameters of a model, by our names."""
    stored = {
        name: torch.empty(shape, device="meta")
        for name, shape in stored_shapes(native_model(config), config).items()
    }
    return {weight.our_name: _our_shape(weight, stored) for weight in weights_of(config)}


def _our_shape(weight: Weight, stored: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(weight.from_hf(stored).shape)


@dataclass
class ParameterReader:
    """Reads our whole parameters from a checkpoint of another trainer, one at a time.

    The constructor checks names and shapes of everything.

    Args:
        ignored: patterns of names that may be unused.

    Attributes:
        shapes: by our names.
        used: names of the tensors that are read.
        notes: a line on each tensor of which rows are left out.

    Raises:
        UserError: a tensor is missing, unused, or of another shape.
    """

    checkpoint: SourceCheckpoint
    ignored: Sequence[str] = ()
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    used: set[str] = field(init=False, default_factory=set)
    notes: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        source = self.checkpoint
        self.shapes = our_shapes(source.config)
        weights = expand(source.weights, source.config.num_hidden_layers)
        self._weights = {weight.our_name: weight for weight in weights}
        for name, shape in self.shapes.items():
            self._check(name, shape)
        unused = [
            name
            for name in source.tensors.keys() - self.used
            if not any(re.fullmatch(pattern, name) for pattern in source.ignorable)
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)
        ]
        if unused:
            first = min(unused)
            raise UserError(
                f"{source.folder}: {len(unused)} tensors are unknown, such as {first} of shape "
                f"{tuple(source.tensors[first].shape)}; a {source.config.model_type} has none of "
                f"that name: give another --config, or --ignore '{first}'"
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        source = self.checkpoint
        if name not in self._weights:
            raise UserError(
                f"{source.folder}: a {source.config.model_type} has {name}, which "
                f"{source.trainer} has no tensor for; give the config.json of another family"
            )
        for stored_name, expected in self._weights[name].shapes(shape).items():
            tensor = source.tensors.get(stored_name)
            if tensor is None:
                raise UserError(
                    f"{source.folder}: no tensor {stored_name}, which a "
                    f"{source.config.model_type} of this config has; give the --config that the "
                    "model was trained with"
                )
            cut = stored_name in source.padded and tensor.shape[:1] >= expected[:1]
            if tensor.shape[1 if cut else 0 :] != expected[1 if cut else 0 :]:
                raise UserError(
                    f"{source.folder}: tensor {stored_name}: expected shape {expected}, found "
                    f"{tuple(tensor.shape)}; give the --config that the model was trained with"
                )
            if tensor.dtype not in PLAIN_DTYPES:
                raise UserError(
                    f"{source.folder}: tensor {stored_name} is of {tensor.dtype}, and its scale is "
                    "not read; save the weights in 16 or 32 bit"
                )
            self.used.add(stored_name)
            if cut and tensor.shape[0] > expected[0]:
                self.notes.append(
                    f"{stored_name}: {expected[0]:,} rows of {tensor.shape[0]:,}, the vocabulary; "
                    "the rest is padding"
                )

    def read(self, name: str) -> Tensor:
        """Return one of our parameters, whole."""
        shape = self.shapes[name]
        weight = self._weights[name]
        tensors = self.checkpoint.tensors
        if weight.native is not None:
            native = {name: read_whole(tensors[name]) for name in weight.native.names}
            return weight.native.from_hf(native)
        rows = shape[0] * shape[1] if weight.experts else shape[0]
        columns = shape[2:] if weight.experts else shape[1:]
        whole: Tensor | None = None
        for stored_name, group in itertools.groupby(weight.maps(rows), lambda run: run[0]):
            runs = [(theirs, ours) for _, theirs, ours in group]
            if whole is None:
                whole = torch.empty((rows, *columns), dtype=tensors[stored_name].dtype)
            _read_runs(whole, tensors[stored_name], runs)
        assert whole is not None
        return whole.reshape(shape)


def _read_runs(whole: Tensor, tensor: StoredTensor, runs: Sequence[tuple[slice, slice]]) -> None:
    """Read each run (their rows, our rows) of a tensor into our parameter's rows.

    Runs that follow each other are read at once: a permutation of rows has one a row.
    """
    first = min(theirs.start for theirs, _ in runs)
    last = max(theirs.stop for theirs, _ in runs)
    columns = whole_index(tensor)[1:]
    if len(runs) == 1 or sum(theirs.stop - theirs.start for theirs, _ in runs) < last - first:
        for theirs, ours in runs:
            read_into(whole[ours], tensor, (theirs, *columns))
        return
    block = rows_of(tensor, slice(first, last))
    for theirs, ours in runs:
        whole[ours] = block[theirs.start - first : theirs.stop - first]
