"""Classify the fields of Hugging Face configs, and check their values."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError, did_you_mean, shown
from zero_tp.base.validation import ErrorCollector

AUTO_MAP = "auto_map"
UNTRAINED_HEAD = "of a head that is not trained"

GENERATION_FIELDS = dict.fromkeys(
    ("use_cache", "bos_token_id", "eos_token_id"), "generation reads it"
)
"""Declared by every config here."""

IRRELEVANT_IN_DECODERS = {
    **GENERATION_FIELDS,
    "is_decoder": "the model is a causal decoder for either value",
    "chunk_size_feed_forward": "no decoder reads it",
}
FIXED_IN_DECODERS: dict[str, tuple[Any, str]] = {
    "is_causal": (True, "the model is a causal decoder"),
    "use_bidirectional_attention": (False, "the model is a causal decoder"),
}

_IRRELEVANT: dict[str, tuple[str, ...]] = {
    "model_type chooses the table and the class of an export": ("model_type", "architectures"),
    "where the file came from": (
        "_commit_hash",
        "_name_or_path",
        "name_or_path",
        "_model_name_or_path",
    ),
    "what wrote the file, and for which task": (
        "transformers_version",
        "finetuning_task",
        "transformers.js_config",
    ),
    "the run's JSON decides": ("dtype", "torch_dtype", "gradient_checkpointing"),
    "zero_tp.attention decides": ("attn_implementation", "_attn_implementation_autoset"),
    "extra outputs": (
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "tie_last_hidden_states",
    ),
    UNTRAINED_HEAD: ("id2label", "label2id", "num_labels", "problem_type"),
    "generation reads it": ("task_specific_params", "prefix"),
    "the tokenizer's own file decides": ("tokenizer_class", "sep_token_id", "unk_token_id"),
    "of encoder-decoders": (
        "decoder_start_token_id",
        "cross_attention_hidden_size",
        "tie_encoder_decoder",
    ),
    "of TensorFlow, or of an export that transformers removed": (
        "use_bfloat16",
        "tf_legacy_loss",
        "torchscript",
    ),
    "keys that transformers does not warn about": ("ignore_keys_at_rope_validation",),
    "code that comes with a model is never run, and transformers has a class of its own": (
        AUTO_MAP,
    ),
}
IRRELEVANT_IN_EVERY_CONFIG = {
    name: reason for reason, names in _IRRELEVANT.items() for name in names
}
"""Fields that `config.json` of any model_type may have → why they change nothing."""

FIXED_IN_EVERY_CONFIG: dict[str, tuple[Any, str]] = {
    "add_cross_attention": (False, "the model is one stack of layers"),
    "is_encoder_decoder": (False, "the model is one stack of layers"),
    "pruned_heads": ({}, "every head is computed"),
    "attention_chunk_size": (None, "attention in chunks is not computed"),
    "per_layer_config": (None, "all layers have the same sizes"),
    "quantization_config": (None, "quantized weights are not trained; give whole ones"),
}

OR_NULL = {"sliding_window": ", or null for attention to all earlier tokens"}
"""A size that may be null → what null means."""

_NO_DEFAULT = object()


@dataclass(frozen=True)
class Fields:
    """The treatment of each field that a model_type's Hugging Face config has.

    A field is listed once: in one attribute, in IRRELEVANT_IN_EVERY_CONFIG or in
    FIXED_IN_EVERY_CONFIG; `undeclared` adds its type. A field that is not listed must have its
    class's default, or is refused if the class has none.

    Attributes:
        sizes: read by the spec; positive integers, or None where the config allows it.
        positive: read by the spec; numbers above 0.
        dropouts: read by the spec; probabilities below 1.
        choices: read by the spec; field → supported values, of the field or of each entry of a
            list.
        read: read by the spec; of any other type.
        fixed: field that the config class does not declare → the only supported value, and the
            reason.
        irrelevant: field → the reason why it has no effect. Some fields exist only in files.
        quantizations: values of `quant_method` whose weights are dequantised where they are read.
        undeclared: field → type, for fields above that transformers reads but its config class does
            not declare.
    """

    sizes: tuple[str, ...]
    positive: tuple[str, ...]
    dropouts: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]]
    read: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    irrelevant: Mapping[str, str] = field(default_factory=dict)
    undeclared: Mapping[str, Any] = field(default_factory=dict)
    quantizations: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Return the names of all fields. A name that is listed twice appears twice."""
        listed = (
            self.sizes,
            self.positive,
            self.dropouts,
            self.choices,
            self.read,
            self.fixed,
            self.irrelevant,
        )
        return [name for part in listed for name in part]

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuse every unsupported value of a field above.

        Args:
            values: by the names of the config class.

        Raises:
            ConfigErrors: one for each field.
        """
        collector = ErrorCollector()
        for name, value in values.items():
            with collector:
                self._check_value(name, value)
                self.check_range(name, value)
        collector.raise_all()

    def _check_value(self, name: str, value: Any) -> None:
        fixed = {**FIXED_IN_EVERY_CONFIG, **self.fixed}
        only, reason = fixed.get(name, (value, ""))
        # Code that tests for false takes null for it.
        if value != only and not (only is False and value is None):
            raise _unsupported(name, value, reason, only)
        options = self.choices.get(name, ())
        for one in value if isinstance(value, list | tuple) else [value]:
            if options and one not in options:
                problem = f"{shown(one)} is not one of {', '.join(options)}"
                raise ConfigError(f"{MODEL_KEY}.{name}", problem, did_you_mean(str(one), options))

    def check_range(self, name: str, value: Any) -> None:
        """Refuse a number that is out of its field's range."""
        key = f"{MODEL_KEY}.{name}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if name in self.sizes and value < 1:
            raise ConfigError(
                key, f"{value} is not positive", f"give 1 or more{OR_NULL.get(name, '')}"
            )
        if name in self.dropouts and not 0 <= value < 1:
            raise ConfigError(
                key, f"{value} is not a probability below 1", "give 0.0, or a number such as 0.1"
            )
        if name in self.positive and not value > 0:
            raise ConfigError(key, f"{value} is not positive", "give more than 0")

    def check_object(self, config: PretrainedConfig) -> None:
        """Refuse a config object with an unknown attribute or an unsupported value.

        transformers reads attributes that no config class declares (`is_causal=False` makes any
        decoder look ahead).
        """
        if config.is_heterogeneous:
            reason = FIXED_IN_EVERY_CONFIG["per_layer_config"][1]
            raise ConfigError(f"{MODEL_KEY}.per_layer_config", f"refused: {reason}", "leave it out")
        attributes = vars(config)
        self.check(attributes)
        known = {*self.names(), *IRRELEVANT_IN_EVERY_CONFIG, *FIXED_IN_EVERY_CONFIG}
        for name, value in attributes.items():
            default = getattr(type(config), name, _NO_DEFAULT)
            if name.startswith("_") or name in known or value == default:
                continue
            # An attribute whose name is nowhere in transformers' code changes nothing.
            if default is _NO_DEFAULT and not may_read(config.model_type, name):
                continue
            if default is _NO_DEFAULT:
                problem = f"{shown(value)} is unknown to zero_tp's {config.model_type}"
                raise ConfigError(
                    f"{MODEL_KEY}.{name}", problem, "delete the attribute if it changes nothing"
                )
            raise _unsupported(
                name, value, f"zero_tp's {config.model_type} does not read it", default
            )


_GENERIC_SOURCES = (
    *("masking_utils", "modeling_utils", "modeling_rope_utils", "modeling_layers", "cache_utils"),
    *("integrations/sdpa_attention", "integrations/eager_paged", "loss/loss_utils"),
)
"""Modules of transformers that read the config of any model_type."""


@functools.cache
def _identifiers(model_type: str) -> frozenset[str]:
    """Return all identifiers in the code that transformers runs for a model_type."""
    root = Path(transformers.__file__).parent
    # transformers.models.PACKAGE.configuration_…: its name may differ from the model_type
    # (megatron_bert).
    package = CONFIG_MAPPING[model_type].__module__.split(".")[2]
    sources = [root / f"{name}.py" for name in _GENERIC_SOURCES]
    sources += (root / "models" / package).glob("modeling_*.py")
    return frozenset(
        name
        for source in sources
        if source.exists()
        for name in re.findall(r"\w+", source.read_text())
    )


def may_read(model_type: str, name: str) -> bool:
    """Return whether transformers' model could read a field that its config class lacks.

    False is certain: the name is nowhere in the model's code. True also covers other uses of the
    name.
    """
    return name in _identifiers(model_type)


def _unsupported(name: str, value: Any, reason: str, only: Any) -> ConfigError:
    problem = f"{shown(value)} is refused: {reason}"
    return ConfigError(f"{MODEL_KEY}.{name}", problem, f"only {shown(only)} is supported")
