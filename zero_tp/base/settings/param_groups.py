"""Type `zero_tp.param_groups`: parameters that the optimizer treats in their own way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from zero_tp.base.constants import PARAM_GROUPS_KEY
from zero_tp.base.errors import shown
from zero_tp.base.validation import ConfigModel, ErrorCollector, NonNegative, validate

Kind = Literal["embedding", "output", "norm", "bias", "router", "matrix", "other"]
"""What a parameter is for; `model/parameter_kinds.py` finds it."""
KIND_MEANINGS: dict[str, str] = {
    "embedding": "embeddings of words, positions and token types; a tied output layer is the "
    "embedding",
    "output": "an untied output layer; BERT's classifier of sentence order",
    "norm": "weights and biases of norms, those of Q and K too",
    "bias": "every other bias",
    "router": "routers of experts; a shared expert's gate, which is one row",
    "matrix": "matrices of layers, experts and BERT's dense heads",
    "other": "what a part makes that is none of these, such as a convolution or an activation's "
    "parameter",
}


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression of Python: {error}") from None
    return pattern


class ParamGroup(ConfigModel):
    """The parameters of one kind, or those whose Hugging Face names match a pattern."""

    kind: Kind | None = Field(
        None, description="What the parameters are for; a tied output layer is an embedding."
    )
    pattern: Annotated[str, Field(min_length=1), AfterValidator(_compiles)] | None = Field(
        None,
        description="Instead of `kind`: a regular expression that is searched in Hugging Face's "
        "names.",
    )
    weight_decay: NonNegative | None = Field(
        None,
        description="Their weight decay; none: `optimizer.params.weight_decay`, and 0 for norms, "
        "biases and others.",
    )
    lr_scale: Annotated[float, Field(gt=0, le=1e6)] = Field(
        1.0, description="Factor of the learning rate, at each step of any schedule."
    )
    optimizer: Literal["adamw"] | None = Field(
        None, description="Under Muon: AdamW updates matrices among them, too."
    )

    @model_validator(mode="after")
    def _selects_once(self) -> ParamGroup:
        if (self.kind is None) == (self.pattern is None):
            raise ValueError('selects parameters by "kind" or by "pattern": give one of them')
        return self

    @property
    def selector(self) -> str:
        """Return how the group selects its parameters, as written."""
        if self.pattern is not None:
            return f"pattern {shown(self.pattern)}"
        return "the rest" if self.kind is None else f"kind {shown(self.kind)}"


def parse_param_groups(values: Sequence[Any]) -> list[ParamGroup]:
    """Return the typed entries of a script's list, which is written as in a run's file.

    Raises:
        ConfigErrors: all entries that are wrong by themselves.
    """
    collector = ErrorCollector()
    entries: list[ParamGroup] = []
    for index, value in enumerate(values):
        with collector:
            entries.append(
                value
                if isinstance(value, ParamGroup)
                else validate(ParamGroup, value, f"{PARAM_GROUPS_KEY}.{index}")
            )
    collector.raise_all()
    return entries
