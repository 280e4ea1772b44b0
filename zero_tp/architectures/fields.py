"""Classify the fields of Hugging Face configs, and check their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from zero_tp.constants import MODEL_KEY
from zero_tp.errors import ConfigError, did_you_mean, shown

UNTRAINED_HEAD = "of a head that is not trained"

GENERATION_FIELDS = dict.fromkeys(("use_cache", "bos_token_id", "eos_token_id"), "generation reads it")
"""Declared by every config here."""

IRRELEVANT_IN_DECODERS = {
    **GENERATION_FIELDS,
    "is_decoder": "the model is a causal decoder whatever it says",
    "chunk_size_feed_forward": "no decoder reads it",
}
FIXED_IN_DECODERS: dict[str, tuple[Any, str]] = {
    "is_causal": (True, "the model is a causal decoder"),
    "use_bidirectional_attention": (False, "the model is a causal decoder"),
}

IRRELEVANT_IN_EVERY_CONFIG = {
    "model_type": "it chose the table",
    "_commit_hash": "where the file came from",
    "attn_implementation": "zero_tp.attention decides",
    "_attn_implementation_autoset": "zero_tp.attention decides",
    "gradient_checkpointing": "zero_tp.recompute decides",
    "tie_last_hidden_states": "extra outputs",
    "architectures": "model_type chooses the class of an export",
    "transformers_version": "the version that wrote the file",
    "_name_or_path": "where the file came from",
    "name_or_path": "where the file came from",
    "_model_name_or_path": "where the file came from",
    "dtype": "of the stored weights; the run's JSON decides",
    "torch_dtype": "the old name of dtype",
    "return_dict": "how outputs are wrapped",
    "output_hidden_states": "extra outputs",
    "output_attentions": "extra outputs",
    "id2label": UNTRAINED_HEAD,
    "label2id": UNTRAINED_HEAD,
    "num_labels": UNTRAINED_HEAD,
    "problem_type": UNTRAINED_HEAD,
    "task_specific_params": "generation reads it",
    "finetuning_task": "a note of who wrote the file",
    "prefix": "generation reads it",
    "tokenizer_class": "the tokenizer's own file decides",
    "sep_token_id": "the tokenizer's own file decides",
    "unk_token_id": "the tokenizer's own file decides",
    "decoder_start_token_id": "of encoder-decoders",
    "torchscript": "of an export that transformers removed",
    "use_bfloat16": "of TensorFlow models",
    "tf_legacy_loss": "of TensorFlow models",
    "cross_attention_hidden_size": "of encoder-decoders",
    "tie_encoder_decoder": "of encoder-decoders",
    "transformers.js_config": "of another library",
    "ignore_keys_at_rope_validation": "keys that transformers does not warn about",
}
"""Fields that `config.json` may have whatever the model_type, and why they change nothing."""

FIXED_IN_EVERY_CONFIG: dict[str, tuple[Any, str]] = {
    "is_encoder_decoder": (False, "the model is one stack of layers"),
    "add_cross_attention": (False, "the model is one stack of layers"),
    "pruned_heads": ({}, "every head is computed"),
    "attention_chunk_size": (None, "attention in chunks is not computed"),
    "per_layer_config": (None, "all layers have the same sizes"),
    "quantization_config": (None, "quantized weights are not trained; give whole ones"),
    "auto_map": (None, "code that comes with a model is never run"),
}

_NO_DEFAULT = object()


@dataclass(frozen=True)
class Fields:
    """The treatment of each field that a model_type's Hugging Face config declares.

    Every field is in exactly one of the first seven, in IRRELEVANT_IN_EVERY_CONFIG or in FIXED_IN_EVERY_CONFIG. Other
    fields of a `config.json` or a config object are refused.

    Attributes:
        sizes: read by the spec; positive integers, or None where the config allows it.
        positive: read by the spec; numbers above 0.
        dropouts: read by the spec; probabilities below 1.
        choices: read by the spec; field → supported values, of the field or of each entry of a list.
        read: read by the spec; of any other type.
        fixed: field → the only supported value, and the reason. Some fields exist only in files.
        irrelevant: field → the reason why it has no effect. Some fields exist only in files.
        undeclared: field → type, for fields above that transformers reads but its config class does not declare.
    """

    sizes: tuple[str, ...]
    positive: tuple[str, ...]
    dropouts: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]]
    read: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    irrelevant: Mapping[str, str] = field(default_factory=dict)
    undeclared: Mapping[str, Any] = field(default_factory=dict)

    def known(self) -> list[str]:
        """Return the names of all fields. A name that is listed twice appears twice."""
        listed = (self.sizes, self.positive, self.dropouts, self.choices, self.read, self.fixed, self.irrelevant)
        return [name for part in listed for name in part]

    def check(self, values: Mapping[str, Any], *, written: bool) -> None:
        """Refuse the first unsupported value.

        Args:
            values: by the names of the config class.
            written: the values come from a JSON file, otherwise from a config object.
        """
        show = shown if written else repr
        fixed = {**FIXED_IN_EVERY_CONFIG, **self.fixed}
        for name, value in values.items():
            key = f"{MODEL_KEY}.{name}"
            if name in fixed and value != fixed[name][0]:
                only, reason = fixed[name]
                raise ConfigError(key, f"{show(value)} is refused: {reason}", f"leave it at {shown(only)}")
            options = self.choices.get(name)
            for one in value if isinstance(value, list | tuple) else [value]:
                if options is not None and one not in options and not (written and one is None):
                    none_of = "is not one of" if written else "is not supported: it is not one of"
                    problem = f"{show(one)} {none_of} {', '.join(options)}"
                    raise ConfigError(key, problem, did_you_mean(str(one), options))
        self.check_numbers(values)

    def check_numbers(self, values: Mapping[str, Any]) -> None:
        """Refuse the first number that is out of its range.

        Args:
            values: by the names of the config class.
        """
        for name, value in values.items():
            key = f"{MODEL_KEY}.{name}"
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name in self.sizes and value < 1:
                raise ConfigError(key, f"{value} is not positive", "give 1 or more")
            if name in self.dropouts and not 0 <= value < 1:
                raise ConfigError(key, f"{value} is not a probability below 1", "give 0.0, or a number such as 0.1")
            if name in self.positive and not value > 0:
                raise ConfigError(key, f"{value} is not positive", "give more than 0")

    def check_object(self, config: PretrainedConfig) -> None:
        """Refuse a config object with an unknown attribute or an unsupported value.

        transformers reads attributes that no config class declares (`is_causal=False` makes any decoder look ahead).
        """
        if config.is_heterogeneous:
            reason = FIXED_IN_EVERY_CONFIG["per_layer_config"][1]
            raise ConfigError(f"{MODEL_KEY}.per_layer_config", f"refused: {reason}")
        attributes = vars(config)
        self.check(attributes, written=False)
        known = {*self.known(), *IRRELEVANT_IN_EVERY_CONFIG, *FIXED_IN_EVERY_CONFIG}
        for name, value in attributes.items():
            # A newer transformers may declare fields that no table knows. Their defaults change nothing.
            if not name.startswith("_") and name not in known and value != getattr(type(config), name, _NO_DEFAULT):
                problem = f"{value!r} is not known to the table of {config.model_type}"
                raise ConfigError(f"{MODEL_KEY}.{name}", problem, "delete the attribute if it changes nothing")
