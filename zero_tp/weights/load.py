"""A model is built with the weights of a Hugging Face directory instead of drawn ones; each rank reads its slices."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from zero_tp.errors import UserError
from zero_tp.models.architectures import Architecture, Weight, aliases_of, architecture_of, weights_of
from zero_tp.parallel.layout import Layout
from zero_tp.parallel.parameter import Init
from zero_tp.tensors.files import DTYPE_NAMES
from zero_tp.topology import Topology
from zero_tp.weights.files import open_weights

FLOATING = ("F64", "F32", "BF16", "F16")


def native_model(config: PretrainedConfig) -> Any:
    """Build the model of the native transformers class, which weights come from and go to, on the meta device."""
    with init_empty_weights(include_buffers=True):
        return AutoModelForCausalLM.from_config(config)


class PretrainedSource:
    """This `WeightSource` reads a Hugging Face directory: a rank's slices of a tensor when its parameter is made."""

    def __init__(self, directory: Path, config: PretrainedConfig, *, allow_pickle: bool = False):
        """Check that the directory's tensors are those of the config's model. Reads no tensor.

        Args:
            config: the model's, of a supported model_type.
            allow_pickle: read pickled weights where there are no safetensors.

        Raises:
            UserError: no weights, or a tensor that is missing, unexpected, of another shape or not floating.
        """
        self.directory = directory
        self.weights = {weight.ours: weight for weight in weights_of(config)}
        self.generation = generation_config(directory)
        self.tensors = open_weights(directory, allow_pickle)
        expected = {name: tuple(tensor.shape) for name, tensor in native_model(config).state_dict().items()}
        self.stored = _names(self.tensors, expected.keys(), architecture_of(config), directory)
        aliases = aliases_of(config)
        # Old files hold an alias beside its source.
        self.aliases = {source: alias for alias, source in aliases.items() if alias in self.stored}
        for name, shape in expected.items():
            if name in self.stored:
                self._check(name, shape)
            elif name not in aliases:
                raise UserError(f"{directory}: no tensor {name}; expected shape {shape}")

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        found = self.tensors[self.stored[name]]
        if tuple(found.shape) != expected:
            raise UserError(f"{self.directory}: tensor {name}: expected shape {expected}, found {tuple(found.shape)}")
        dtype = DTYPE_NAMES.get(found.dtype, str(found.dtype))
        if dtype not in FLOATING:
            raise UserError(f"{self.directory}: tensor {name}: expected one of {', '.join(FLOATING)}, found {dtype}")

    def fill(
        self, local: Tensor, name: str, whole: Sequence[int], layout: Layout, init: Init, topology: Topology
    ) -> None:
        for start, stop, rows in layout.rows_of(local, topology.tensor_rank, topology.tensor):
            if start < stop:  # equal where a rank has padding alone
                rows.copy_(self._read(self.weights[name], layout.dim, start, stop, whole[0]))

    def _read(self, weight: Weight, dim: int, start: int, stop: int, rows: int) -> Tensor:
        """Return rows [start, stop) of dimension `dim` of our parameter, which has `rows` rows in all."""
        pieces = []
        for held in weight.runs(rows):
            first, last = held.start, held.start + held.length
            if dim == 0:  # the rows of this range that are wanted
                first += max(start - held.ours, 0)
                last -= max(held.ours + held.length - stop, 0)
            if first >= last:
                continue
            index = (slice(first, last),) if dim == 0 else (slice(first, last), slice(start, stop))
            pieces.append(self._slice(held.theirs, index, transposed=weight.transposed))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _slice(self, theirs: str, index: tuple[slice, ...], *, transposed: bool) -> Tensor:
        """Return a slice of one of their tensors, indexed as ours lies."""

        def piece(name: str) -> Tensor:
            tensor = self.tensors[self.stored[name]]
            return (tensor.t() if transposed else tensor)[index]

        found, alias = piece(theirs), self.aliases.get(theirs)
        if alias is not None and not torch.equal(found, piece(alias)):
            raise UserError(
                f"{self.directory}: tensors {theirs} and {alias} differ, but its config ties them; set "
                "tie_word_embeddings to false in its config.json"
            )
        return found


def _names(
    tensors: Mapping[str, Tensor], expected: Collection[str], architecture: Architecture, directory: Path
) -> dict[str, str]:
    """Return name in the native class → name in the files.

    Files of the bare decoder leave out the prefix of the class with a head; what the architecture ignores is left out.
    """
    stored: dict[str, str] = {}
    named = {theirs: name for name, theirs in architecture.stored.items()}
    for found, tensor in tensors.items():
        name = named.get(found, found)
        name = name if name in expected else architecture.base_prefix + name
        if name in stored:
            raise UserError(f"{directory}: tensors {stored[name]} and {found} are both {name}")
        if name in expected:
            stored[name] = found
        elif not any(re.fullmatch(f"({re.escape(architecture.base_prefix)})?{old}", found) for old in architecture.old):
            raise UserError(
                f"{directory}: unexpected tensor {found} of shape {tuple(tensor.shape)}; {architecture.native_class} "
                "with this config.json has none of that name"
            )
    return stored


def generation_config(directory: Path) -> GenerationConfig | None:
    """Return the directory's settings of generation; None where it has none.

    Raises:
        UserError: they can't be read.
    """
    if not (directory / GENERATION_CONFIG_NAME).is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory / GENERATION_CONFIG_NAME}: {' '.join(str(error).split())}; mend or remove it"
        ) from error
