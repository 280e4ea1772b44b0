"""One table per Hugging Face model_type: its fields, its config as a TransformerSpec, its weights' names."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.errors import UserError
from zero_tp.models.architectures import gpt2, gpt_neox, llama, mistral, qwen2, qwen3
from zero_tp.models.architectures.table import Architecture, Fields, Weight

ARCHITECTURES: dict[str, Architecture] = {
    module.__name__.rpartition(".")[2]: module.ARCHITECTURE for module in (gpt2, gpt_neox, llama, mistral, qwen2, qwen3)
}
"""By model_type, which is the name of the table's file."""

__all__ = ["ARCHITECTURES", "Architecture", "Fields", "Weight", "architecture_of"]


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
