"""This module says what becomes of a Hugging Face config's fields, and has the one check of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from zero_tp.constants import MODEL_KEY
from zero_tp.errors import ConfigError, did_you_mean, shown

OF_A_HEAD = "of a head that is not trained"

TOKENS = dict.fromkeys(("use_cache", "bos_token_id", "eos_token_id"), "generation reads it")
"""Declared by every config here."""

OF_DECODERS = {
    **TOKENS,
    "is_decoder": "the model is a causal decoder whatever it says",
    "chunk_size_feed_forward": "no decoder reads it",
}
FIXED_IN_DECODERS: dict[str, tuple[Any, str]] = {
    "is_causal": (True, "the model is a causal decoder"),
    "use_bidirectional_attention": (False, "the model is a causal decoder"),
}

OF_EVERY_CONFIG = {
    "model_type": "it chose the table",
    "_commit_hash": "where the file came from",
    "attn_implementation": "zero_tp.attention decides",
    "_attn_implementation_autoset": "zero_tp.attention decides",
    "gradient_checkpointing": "zero_tp.recompute decides",
    "tie_last_hidden_states": "what is returned besides",
    "architectures": "the class that an export opens as is that of model_type",
    "transformers_version": "who wrote the file",
    "_name_or_path": "where the file came from",
    "name_or_path": "where the file came from",
    "_model_name_or_path": "where the file came from",
    "dtype": "of the stored weights; the run's JSON decides",
    "torch_dtype": "the old name of dtype",
    "return_dict": "how outputs are wrapped",
    "output_hidden_states": "what is returned besides",
    "output_attentions": "what is returned besides",
    "id2label": OF_A_HEAD,
    "label2id": OF_A_HEAD,
    "num_labels": OF_A_HEAD,
    "problem_type": OF_A_HEAD,
    "task_specific_params": "generation reads it",
    "finetuning_task": "a note of who wrote the file",
    "prefix": "generation reads it",
    "tokenizer_class": "the tokenizer's own file decides",
    "sep_token_id": "the tokenizer's own file decides",
    "unk_token_id": "the tokenizer's own file decides",
    "decoder_start_token_id": "of encoder-decoders",
    "torchscript": "of an export that is gone",
    "use_bfloat16": "of TensorFlow models",
    "tf_legacy_loss": "of TensorFlow models",
    "cross_attention_hidden_size": "of encoder-decoders",
    "tie_encoder_decoder": "of encoder-decoders",
    "transformers.js_config": "of another library",
    "ignore_keys_at_rope_validation": "what transformers does not warn of",
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
    """These say what becomes of the fields that the Hugging Face config of a model_type declares.

    Every field is in exactly one of these, or in OF_EVERY_CONFIG or FIXED_IN_EVERY_CONFIG; one of `config.json` or of a
    config object that is in none is refused.

    Attributes:
        sizes: that the spec reads, positive integers, or None where the config allows it.
        positive: that the spec reads, numbers above 0.
        dropouts: that the spec reads, probabilities below 1.
        choices: that the spec reads → the values that are computed, of the field or of each entry of a list.
        read: that the spec reads, anything else.
        fixed: field → the only value that is computed, and why. It may be one that only files have.
        irrelevant: field → why it changes nothing here. It may be one that only files have.
        undeclared: those of the above that transformers obeys without declaring them → their type.
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
        """Return all of them, each as often as it is listed."""
        listed = (self.sizes, self.positive, self.dropouts, self.choices, self.read, self.fixed, self.irrelevant)
        return [name for part in listed for name in part]

    def check(self, values: Mapping[str, Any], *, written: bool) -> None:
        """Refuse the first value that is not computed.

        Args:
            values: by the names of the config class.
            written: they are values of a JSON file, else attributes of a config object.
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
        """Refuse the first number that no model has.

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
                raise ConfigError(key, f"{value} is not a probability below 1", "give 0.0, or as 0.1")
            if name in self.positive and not value > 0:
                raise ConfigError(key, f"{value} is not positive", "give more than 0")

    def check_object(self, config: PretrainedConfig) -> None:
        """Refuse a config object that has an attribute which nobody knows, or a value that is not computed.

        transformers' code reads attributes that no config class declares (`is_causal` makes any decoder look ahead).
        """
        if config.is_heterogeneous:
            reason = FIXED_IN_EVERY_CONFIG["per_layer_config"][1]
            raise ConfigError(f"{MODEL_KEY}.per_layer_config", f"refused: {reason}")
        attributes = vars(config)
        self.check(attributes, written=False)
        known = {*self.known(), *OF_EVERY_CONFIG, *FIXED_IN_EVERY_CONFIG}
        for name, value in attributes.items():
            # One that the class declares and no table knows is of a newer transformers: its default changes nothing.
            if not name.startswith("_") and name not in known and value != getattr(type(config), name, _NO_DEFAULT):
                problem = f"{value!r} is not known to the table of {config.model_type}"
                raise ConfigError(f"{MODEL_KEY}.{name}", problem, "delete the attribute if it changes nothing")
