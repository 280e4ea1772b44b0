"""What an architecture table holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.models.spec import TransformerSpec


@dataclass(frozen=True)
class Weight:
    """One parameter under both names; `{layer}` stands for the layer's number.

    Attributes:
        ours: its name in ZeroTPForCausalLM.
        theirs: its name in the Hugging Face class.
        transposed: Hugging Face stores [in, out] (Conv1D).
    """

    ours: str
    theirs: str
    transposed: bool = False

    def convert(self, whole: Tensor) -> Tensor:
        """Theirs as ours or ours as theirs: the same operation both ways."""
        return whole.t() if self.transposed else whole

    def convert_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what `convert` gives."""
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True)
class Architecture:
    """
    Attributes:
        spec: Hugging Face config → TransformerSpec; raises UserError for what it does not compute exactly.
        weights: every parameter; those with `{layer}` once a layer.
        tied: Hugging Face names that alias another when the embeddings are tied, {alias: source}.
        native_class: name of the transformers class that an export opens as.
        base_prefix: what files of the class without a head leave out before its tensors' names.
        old: patterns of tensors that older versions of the class saved and that are no weights (buffers), without the
            prefix.
    """

    spec: Callable[[PretrainedConfig], TransformerSpec]
    weights: tuple[Weight, ...]
    tied: dict[str, str]
    native_class: str
    base_prefix: str
    old: tuple[str, ...] = ()

    def each_weight(self, spec: TransformerSpec) -> Iterator[Weight]:
        """Every parameter of a model of this spec, with its layer's number filled in."""
        aliases = self.tied if spec.tied else {}
        for weight in self.weights:
            if weight.theirs in aliases:
                continue
            if "{layer}" not in weight.ours:
                yield weight
                continue
            for layer in range(spec.layers):
                yield Weight(weight.ours.format(layer=layer), weight.theirs.format(layer=layer), weight.transposed)
