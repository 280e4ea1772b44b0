"""`zero_tp.model`: Hugging Face's own config fields, checked against what the layers here compute."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from zero_tp.config.errors import ConfigError
from zero_tp.config.schema import ZeroTP
from zero_tp.config.suggest import did_you_mean, shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY = "zero_tp.model"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What the layers can compute of one `model_type`.

    Attributes:
        activations: accepted values of `activation_function`.
        fixed: fields that have to keep this value, with the reason.
        unused: prefix of the fields that belong to heads which are not trained.
    """

    activations: tuple[str, ...]
    fixed: dict[str, tuple[Any, str]]
    unused: str


ARCHITECTURES = {
    "gpt2": Architecture(
        activations=("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu"),
        fixed={
            "scale_attn_weights": (True, "attention always scales by 1/sqrt(head size)"),
            "scale_attn_by_inverse_layer_idx": (False, "attention is not scaled by the layer's index"),
            "reorder_and_upcast_attn": (False, "attention computes in the model's dtype"),
            "add_cross_attention": (False, "the model is a decoder alone"),
        },
        unused="summary_",
    ),
}


def check_model(zero_tp: ZeroTP) -> PreTrainedConfig:
    """The Hugging Face config of `zero_tp.model`. Imports transformers.

    Token ids that the file doesn't name are None where Hugging Face's default lies outside the vocabulary.

    Raises:
        ConfigError: an unknown or unsupported model_type or field, a wrong type or value, sizes that don't divide.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model = zero_tp.model
    model_type = _model_type(model, list(CONFIG_MAPPING))
    architecture, config_class = ARCHITECTURES[model_type], CONFIG_MAPPING[model_type]
    fields = {name: value for name, value in model.items() if name != "model_type"}
    _check_fields(fields, config_class, architecture)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        default = getattr(config_class, name, None)
        if isinstance(default, int) and default >= _vocabulary(fields, config_class):
            fields.setdefault(name, None)
    _check_token_ids(fields, _vocabulary(fields, config_class))
    try:
        config = config_class(**fields)
    except Exception as error:  # a type error of huggingface_hub's strict dataclasses, under several class names
        raise _type_error(error, fields) from None
    _check_sizes(config, fields)
    _check_split(config, zero_tp)
    return config


def _model_type(model: dict[str, Any], known: list[str]) -> str:
    supported = ", ".join(ARCHITECTURES)
    if "from_pretrained" in model:
        raise ConfigError(f"{KEY}.from_pretrained", "not built yet", "give the config's fields with model_type")
    if "model_type" not in model:
        raise ConfigError(f"{KEY}.model_type", "required, but not given", f"supported: {supported}")
    model_type = model["model_type"]
    if model_type in ARCHITECTURES:
        return str(model_type)
    key = f"{KEY}.model_type"
    if model_type in known:
        raise ConfigError(key, f"{shown(model_type)} is not built yet", f"supported: {supported}")
    hint = did_you_mean(str(model_type), ARCHITECTURES)
    raise ConfigError(key, f"{shown(model_type)} is unknown", hint if "?" in hint else f"supported: {supported}")


def _check_fields(fields: dict[str, Any], config_class: Any, architecture: Architecture) -> None:
    aliases: dict[str, str] = getattr(config_class, "attribute_map", {})
    own = [name for name in vars(config_class).get("__annotations__", {}) if not name.startswith("_")]
    for name, value in fields.items():
        key = f"{KEY}.{name}"
        if name not in own and name not in aliases:
            raise ConfigError(key, "unknown key", did_you_mean(name, [*own, *aliases]))
        if aliases.get(name) in fields:
            raise ConfigError(key, f"is another name of {aliases[name]}, which is given too", "keep one of them")
        if name in architecture.fixed and value != architecture.fixed[name][0]:
            only, reason = architecture.fixed[name]
            raise ConfigError(key, f"{shown(value)} is refused: {reason}", f"leave it at {shown(only)}")
        if name.startswith(architecture.unused) and value != getattr(config_class, name):
            raise ConfigError(key, "belongs to a head that is not trained here", "leave it out")
        if name == "activation_function" and value not in architecture.activations:
            options = architecture.activations
            raise ConfigError(
                key, f"{shown(value)} is not one of {', '.join(options)}", did_you_mean(str(value), options)
            )


def _vocabulary(fields: dict[str, Any], config_class: Any) -> int:
    size = fields.get("vocab_size", config_class.vocab_size)
    return size if isinstance(size, int) else 0


def _check_token_ids(fields: dict[str, Any], vocabulary: int) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = fields.get(name)
        if isinstance(value, int) and not 0 <= value < max(vocabulary, 1):
            remedy = f"give an id from 0 to {vocabulary - 1}, or null"
            raise ConfigError(f"{KEY}.{name}", f"{value} is outside the vocabulary of {vocabulary}", remedy)


def _type_error(error: Exception, fields: dict[str, Any]) -> ConfigError:
    text = " ".join(str(error).split())
    named = [name for name in fields if f"'{name}'" in text]
    key = f"{KEY}.{named[0]}" if named else KEY
    problem = text.partition("TypeError: ")[2].partition(" Errors:")[0] or text
    return ConfigError(key, problem, "see the fields of the Hugging Face config class")


def _check_sizes(config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    reverse = {target: alias for alias, target in config.attribute_map.items()}
    positive = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")
    for name in (*positive, "n_inner"):
        own = config.attribute_map.get(name, name)
        value = getattr(config, own)
        if value is not None and value < 1:
            raise ConfigError(f"{KEY}.{_written(own, fields, reverse)}", f"{value} is not positive", "give 1 or more")
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ConfigError(f"{KEY}.{name}", f"{value} is not a probability below 1", "give 0.0, or as 0.1")
    for name in ("layer_norm_epsilon", "initializer_range"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{KEY}.{name}", f"{getattr(config, name)} is not positive", "give more than 0")
    if config.hidden_size % config.num_attention_heads:
        key = _written(config.attribute_map["hidden_size"], fields, reverse)
        share = config.hidden_size / config.num_attention_heads
        sums = f"hidden size {config.hidden_size} ≠ heads {config.num_attention_heads} × head size {share:.4g}"
        raise ConfigError(f"{KEY}.{key}", sums, "give a hidden size that is a multiple of the heads")


def _written(own: str, fields: dict[str, Any], reverse: dict[str, str]) -> str:
    """The name under which the file gives a field: Hugging Face's general one, or the architecture's own."""
    return reverse[own] if reverse.get(own) in fields else own


def _check_split(config: PreTrainedConfig, zero_tp: ZeroTP) -> None:
    tensor, length = zero_tp.parallel.tensor, zero_tp.data.sequence_length
    heads, inner = config.num_attention_heads, config.n_inner or 4 * config.hidden_size
    for what, size in (("heads", heads), ("MLP width", inner)):
        if size % tensor:
            sums = f"{what} {size} ≠ tensor {tensor} × {size / tensor:.4g} a rank"
            raise ConfigError("zero_tp.parallel.tensor", sums, f"use a tensor degree that divides {size}")
    if length > config.max_position_embeddings:
        problem = f"{length} tokens, but the model has {config.max_position_embeddings} positions"
        raise ConfigError("zero_tp.data.sequence_length", problem, "shorten it, or raise zero_tp.model.n_positions")
    if zero_tp.parallel.sequence and length % tensor:
        sums = f"{length} ≠ tensor {tensor} × {length / tensor:.4g} tokens a rank"
        remedy = f"use a multiple of {tensor}, or set zero_tp.parallel.sequence to false"
        raise ConfigError("zero_tp.data.sequence_length", sums + ", which sequence parallelism needs", remedy)
