"""`zero_tp.model`: Hugging Face's own config fields, checked against what the layers here compute."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, create_model

from zero_tp.config.errors import ConfigError
from zero_tp.config.pretrained import read_config_json
from zero_tp.config.schema import Block, ZeroTP
from zero_tp.config.suggest import did_you_mean, shown
from zero_tp.config.validation import validate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY = "zero_tp.model"
FROM = "from_pretrained"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


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


def check_model(zero_tp: ZeroTP, saved: dict[str, Any] | None = None) -> PreTrainedConfig:
    """The Hugging Face config of `zero_tp.model`. Imports transformers.

    Args:
        saved: the config to take where the directory of `from_pretrained` is gone.

    Raises:
        ConfigError: an unknown or unsupported model_type or field, a wrong type or value, sizes that don't divide; no
            such directory.
    """
    model = zero_tp.model
    if not {"model_type", FROM} & model.keys():
        remedy = f'supported: {", ".join(ARCHITECTURES)}; or give {{"{FROM}": DIR}}'
        raise ConfigError(f"{KEY}.model_type", "required, but not given", remedy)
    config = written_config(model) if FROM not in model else _config_from(model, saved)
    _check_split(config, zero_tp)
    return config


def written_config(model: dict[str, Any]) -> PreTrainedConfig:
    """The config that these fields, `model_type` among them, describe.

    Token ids that aren't given are None where Hugging Face's default lies outside the vocabulary.

    Raises:
        ConfigError: see `check_model`.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = _model_type(model, list(CONFIG_MAPPING))
    architecture, config_class = ARCHITECTURES[model_type], cast(Any, CONFIG_MAPPING[model_type])
    written = {name: value for name, value in model.items() if name != "model_type"}
    fields = validate(_fields_model(config_class), written, KEY).model_dump(exclude_unset=True)
    _check_fields(fields, config_class, architecture)
    vocabulary: int = fields.get("vocab_size", config_class.vocab_size)
    for name in TOKEN_IDS:
        default = getattr(config_class, name)
        if isinstance(default, int) and default >= vocabulary:
            fields.setdefault(name, None)
    _check_token_ids(fields, vocabulary)
    config: PreTrainedConfig = config_class(**fields)
    _check_sizes(config, fields)
    return config


def pretrained_config(directory: Path, key: str = "", **changes: Any) -> PreTrainedConfig:
    """The config of a Hugging Face directory, held to the same rules as one that is written in the file.

    Of `config.json` the fields that its model_type declares are taken, besides those of heads that are not trained,
    and `dtype`. A token id outside the vocabulary is None: it is the class's default, saved with the rest.

    Args:
        key: what the message starts with where the directory isn't a model's.
        changes: fields to take instead of the directory's.

    Raises:
        ConfigError: see `check_model`; the directory or its config.json is missing or can't be read.
    """
    return _read_config(read_config_json(directory, key), directory, changes)


def _read_config(raw: dict[str, Any], directory: Path, changes: dict[str, Any]) -> PreTrainedConfig:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        model_type = _model_type(raw, list(CONFIG_MAPPING))
        known, unused = _fields_model(CONFIG_MAPPING[model_type]).model_fields, ARCHITECTURES[model_type].unused
        taken = {name: raw[name] for name in raw if name in known and not name.startswith(unused)}
        vocabulary = taken.get("vocab_size")
        for name in TOKEN_IDS:
            if isinstance(taken.get(name), int) and isinstance(vocabulary, int) and not 0 <= taken[name] < vocabulary:
                taken[name] = None
        config = written_config({"model_type": model_type, **taken, **changes})
    except ConfigError as error:
        name = error.key.removeprefix(f"{KEY}.")
        if name in changes:
            raise
        raise ConfigError(f"{directory / 'config.json'}: {name}", error.problem, error.remedy) from None
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    if dtype in ("float32", "bfloat16", "float16"):
        import torch

        config.dtype = getattr(torch, dtype)
    return config


def check_unchanged(directory: Path, config: PreTrainedConfig, saved: dict[str, Any]) -> None:
    """Whether a run that resumes still has the model it was started with.

    Args:
        directory: of `from_pretrained`; what it holds may have changed, where a written model is part of the file.
        saved: the config of the checkpoint's model.

    Raises:
        ConfigError: names the first field that is another one.
    """
    unused = ARCHITECTURES[config.model_type].unused
    for name in inspect.get_annotations(type(config)):
        found, before = getattr(config, name), saved.get(name)
        # The tokenizer beside the data decides the token ids.
        if name not in TOKEN_IDS and not name.startswith(unused) and found != before:
            problem = f"{name} in {directory} is {shown(found)}, but the run was started with {shown(before)}"
            raise ConfigError(f"{KEY}.{FROM}", problem, "start it with that, or give another --output-dir")


def _config_from(model: dict[str, Any], saved: dict[str, Any] | None) -> PreTrainedConfig:
    """The config of `{"from_pretrained": DIR}`, or the saved one where DIR is gone, with other dropout probabilities
    where they are given beside it."""
    directory, key = model[FROM], f"{KEY}.{FROM}"
    if not isinstance(directory, str) or not directory:
        raise ConfigError(key, f"expected a string, got {shown(directory)}", "give a Hugging Face model directory")
    changes = {name: value for name, value in model.items() if name != FROM}
    for name in changes:
        if name not in DROPOUTS:
            problem = f"given beside {FROM}, but {directory} decides it"
            raise ConfigError(f"{KEY}.{name}", problem, f"leave it out; only {', '.join(DROPOUTS)} can be given")
    if saved is not None and not Path(directory).exists():
        return _read_config(saved, Path(directory), changes)
    return pretrained_config(Path(directory), key, **changes)


def _model_type(model: dict[str, Any], known: list[str]) -> str:
    supported = ", ".join(ARCHITECTURES)
    if "model_type" not in model:
        raise ConfigError(f"{KEY}.model_type", "required, but not given", f"supported: {supported}")
    model_type, key = model["model_type"], f"{KEY}.model_type"
    if not isinstance(model_type, str):
        raise ConfigError(key, f"expected a string, got {shown(model_type)}", f"supported: {supported}")
    if model_type in ARCHITECTURES:
        return model_type
    if model_type in known:
        raise ConfigError(key, f"{shown(model_type)} is not built yet", f"supported: {supported}")
    hint = did_you_mean(model_type, ARCHITECTURES)
    raise ConfigError(key, f"{shown(model_type)} is unknown", hint if "?" in hint else f"supported: {supported}")


def _fields_model(config_class: Any) -> type[BaseModel]:
    """The fields that a Hugging Face config class declares itself, under its names and the general ones."""
    hints = inspect.get_annotations(config_class, eval_str=True)
    hints |= {alias: hints[name] for alias, name in config_class.attribute_map.items() if name in hints}
    fields: dict[str, Any] = {name: (hint, None) for name, hint in hints.items()}
    return create_model("Fields", __base__=Block, **fields)


def _check_fields(fields: dict[str, Any], config_class: Any, architecture: Architecture) -> None:
    aliases: dict[str, str] = config_class.attribute_map
    for name, value in fields.items():
        key = f"{KEY}.{name}"
        if aliases.get(name) in fields:
            raise ConfigError(key, f"is another name of {aliases[name]}, which is given too", "keep one of them")
        if name in architecture.fixed and value != architecture.fixed[name][0]:
            only, reason = architecture.fixed[name]
            raise ConfigError(key, f"{shown(value)} is refused: {reason}", f"leave it at {shown(only)}")
        if name.startswith(architecture.unused) and value != getattr(config_class, name):
            raise ConfigError(key, "belongs to a head that is not trained here", "leave it out")
        if name == "activation_function" and value not in architecture.activations:
            options = architecture.activations
            raise ConfigError(key, f"{shown(value)} is not one of {', '.join(options)}", did_you_mean(value, options))


def _check_token_ids(fields: dict[str, Any], vocabulary: int) -> None:
    for name in TOKEN_IDS:
        value = fields.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not 0 <= token < vocabulary:
                remedy = f"give an id from 0 to {vocabulary - 1}, or null"
                raise ConfigError(f"{KEY}.{name}", f"{token} is outside the vocabulary of {vocabulary}", remedy)


def _check_sizes(config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    reverse = {target: alias for alias, target in config.attribute_map.items()}
    positive = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")
    for name in (*positive, "n_inner"):
        own = config.attribute_map.get(name, name)
        value = getattr(config, own)
        if value is not None and value < 1:
            raise ConfigError(f"{KEY}.{_written(own, fields, reverse)}", f"{value} is not positive", "give 1 or more")
    for name in DROPOUTS:
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
        longer = "use another model" if FROM in zero_tp.model else "raise zero_tp.model.n_positions"
        raise ConfigError("zero_tp.data.sequence_length", problem, f"shorten it, or {longer}")
    if zero_tp.parallel.sequence and length % tensor:
        sums = f"{length} ≠ tensor {tensor} × {length / tensor:.4g} tokens a rank"
        remedy = f"use a multiple of {tensor}, or set zero_tp.parallel.sequence to false"
        raise ConfigError("zero_tp.data.sequence_length", sums + ", which sequence parallelism needs", remedy)
