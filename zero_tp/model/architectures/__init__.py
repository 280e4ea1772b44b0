"""One table per Hugging Face model_type: config fields, translation to a TransformerSpec, names
of weights.
"""

from __future__ import annotations

import importlib
import pkgutil

from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures.fields import Fields
from zero_tp.model.architectures.table import Architecture, Weight, file_tensors, to_hf

_MODULES = (
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
)
ARCHITECTURES: dict[str, Architecture] = {
    getattr(module, "MODEL_TYPE", module.__name__.rpartition(".")[2]): module.ARCHITECTURE
    for module in _MODULES
    if hasattr(module, "ARCHITECTURE")
}
"""By model_type: the table's MODEL_TYPE, else the name of its module."""

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Fields",
    "Weight",
    "aliases_of",
    "architecture_of",
    "file_tensors",
    "native_class_of",
    "supported_types",
    "to_hf",
    "weights_of",
]


def supported_types() -> str:
    """Return what a refusal says instead of a long list."""
    return f'one of {len(ARCHITECTURES)}, which docs/config.md lists, such as "gpt2"'


def architecture_of(config: PretrainedConfig) -> Architecture:
    """Return the table of a config."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise UserError(
            f"model_type: {config.model_type!r} is not supported; give {supported_types()}"
        )
    return architecture


def aliases_of(config: PretrainedConfig) -> dict[str, str]:
    """Return tied tensors, alias → source; exports hold the source only."""
    return architecture_of(config).tied if config.tie_word_embeddings else {}


def native_class_of(config: PretrainedConfig) -> str:
    """Return the name of the transformers class that a model of this config is exported as.

    It is the class without a sentence head if the config's `architectures` names that one.
    """
    architecture = architecture_of(config)
    other = architecture.masked_lm_class
    return (
        other
        if other is not None and config.architectures == [other]
        else architecture.native_class
    )


def weights_of(config: PretrainedConfig) -> list[Weight]:
    """Return every parameter of a model of this config, under both names."""
    architecture = architecture_of(config)
    return list(architecture.weights_of(architecture.spec(config)))
