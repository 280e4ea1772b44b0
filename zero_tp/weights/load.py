"""Hugging Face safetensors in: a model is built with its weights read instead of drawn."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from zero_tp.errors import UserError
from zero_tp.models.architectures import Weight, architecture_of
from zero_tp.models.spec import TransformerSpec
from zero_tp.parallel.layout import Layout
from zero_tp.parallel.parameter import Init
from zero_tp.topology import Topology

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsSource:
    """The weights of a Hugging Face directory; a tensor is read when its parameter is made.

    Raises:
        UserError: no safetensors in the directory, or a file that cannot be read.
    """

    def __init__(self, directory: Path, weights: Sequence[Weight]):
        self.directory = directory
        self.by_ours = {weight.ours: weight for weight in weights}
        if (directory / INDEX).exists():
            self.files: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
        elif (directory / SINGLE).exists():
            with self._open(SINGLE) as file:
                self.files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise UserError(f"{directory}: no {SINGLE} nor {INDEX} there; give a Hugging Face directory of safetensors")

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self.directory / name, framework="pt")
        except Exception as error:
            raise UserError(f"{self.directory / name}: not a readable safetensors file ({error})") from error

    def read(self, ours: str) -> Tensor:
        """The whole tensor of our parameter.

        Raises:
            UserError: the directory has no such tensor.
        """
        weight = self.by_ours[ours]
        # Files of the bare decoder leave out the prefix of the class with a head.
        bare = weight.theirs.removeprefix("transformer.")
        name = weight.theirs if weight.theirs in self.files else bare
        if name not in self.files:
            raise UserError(f"{self.directory}: no tensor {weight.theirs} (for {ours})")
        with self._open(self.files[name]) as file:
            return weight.convert(file.get_tensor(name))

    def fill(
        self, local: Tensor, name: str, whole: Sequence[int], layout: Layout, init: Init, topology: Topology
    ) -> None:
        tensor = self.read(name)
        if tuple(tensor.shape) != tuple(whole):
            raise UserError(
                f"{self.directory}: tensor {self.by_ours[name].theirs} is {tuple(tensor.shape)}, "
                f"the config gives {tuple(whole)}"
            )
        local.copy_(layout.shard(tensor, topology.tensor_rank, topology.tensor))


def load_pretrained(
    cls: type[Any], directory: str | os.PathLike[str], topology: Topology | None = None, **options: Any
) -> Any:
    """A `cls` model with the weights of a Hugging Face directory. See `ZeroTPForCausalLM.from_pretrained`."""
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: no config.json there; give a Hugging Face model directory")
    config = AutoConfig.from_pretrained(path)
    architecture = architecture_of(config)
    spec: TransformerSpec = architecture.spec(config)
    source = SafetensorsSource(path, list(architecture.each_weight(spec)))
    options.setdefault("dtype", config.dtype or torch.float32)
    return cls(config, topology, source=source, **options)
