"""One table per Hugging Face model_type: its config as a TransformerSpec, and its weights' names and layouts."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.errors import UserError
from zero_tp.models.architectures import gpt2
from zero_tp.models.architectures.table import Architecture, Weight

ARCHITECTURES: dict[str, Architecture] = {"gpt2": gpt2.ARCHITECTURE}

__all__ = ["ARCHITECTURES", "Architecture", "Weight", "architecture_of"]


def architecture_of(config: PretrainedConfig) -> Architecture:
    """
    Raises:
        UserError: no table for the config's model_type; names those there are.
    """
    found = ARCHITECTURES.get(config.model_type)
    if found is None:
        raise UserError(
            f"zero_tp.model.model_type: {config.model_type!r} has no architecture table; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return found
