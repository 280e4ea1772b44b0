"""Check Hugging Face configs, of a run's JSON or a directory's config.json, against their architecture's table."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import BaseModel, create_model
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zero_tp import architectures
from zero_tp.architectures.fields import FIXED_IN_EVERY_CONFIG, OF_A_HEAD, OF_EVERY_CONFIG, Fields
from zero_tp.architectures.rotary import ROPE, check_rope_names, check_rope_values
from zero_tp.constants import DTYPES, MODEL_KEY
from zero_tp.errors import ConfigError, did_you_mean, in_json_words, one_line, shown
from zero_tp.strict_json import read_json
from zero_tp.validation import ConfigModel, validate

CONFIG = "config.json"
_GIVE = "give a Hugging Face model directory"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
LARGEST_SIZE, MOST_LAYERS = 2**31 - 1, 10_000
LARGEST_MATRIX = 2**40
"""Elements of one matrix: 4 TiB in fp32."""


def fields_of(model_type: str) -> Fields:
    """Return what becomes of the fields of a supported model_type."""
    return architectures.ARCHITECTURES[model_type].fields


def written_config(model: dict[str, Any]) -> PretrainedConfig:
    """Return the config that these fields, `model_type` among them, describe.

    Token ids that aren't given are None where Hugging Face's default lies outside the vocabulary.

    Raises:
        ConfigError: an unknown or unsupported model_type or field, a wrong type or value, sizes that don't divide.
    """
    model_type = _model_type(model)
    known, config_class = fields_of(model_type), cast(Any, CONFIG_MAPPING[model_type])
    written = {name: value for name, value in model.items() if name != "model_type"}
    fields = validate(_fields_model(config_class, known), written, MODEL_KEY).model_dump(exclude_unset=True)
    _check_names(fields, config_class, known)
    aliases: dict[str, str] = config_class.attribute_map
    _check_sizes(fields, aliases)
    with _named_as_written(fields, aliases):
        known.check({aliases.get(name, name): value for name, value in fields.items()}, written=True)
    vocabulary: int = fields.get("vocab_size", config_class.vocab_size)
    for name in TOKEN_IDS:
        default = getattr(config_class, name)
        if isinstance(default, int) and default >= vocabulary:
            fields.setdefault(name, None)
    _check_token_ids(fields, vocabulary)
    try:
        config: PretrainedConfig = config_class(**fields)
    except (ValueError, TypeError, KeyError, ZeroDivisionError, StrictDataclassError) as error:  # its own checks
        why = in_json_words(" ".join(str(error).split()))
        named = [name for name in fields if re.search(rf"\b({name}|{name.replace('_', ' ')})\b", why)]
        if "rope_parameters" in why:
            named = named or [name for name in ROPE if name in fields]  # its older names
        key = f"{MODEL_KEY}.{named[-1]}" if named else MODEL_KEY
        raise ConfigError(
            key, f"{config_class.__name__} refuses it ({one_line(why, 200)})", "correct that field"
        ) from None
    with _named_as_written(fields, aliases):
        check_rope_names(config, fields)
        spec = architectures.architecture_of(config).spec(config)
        experts = 0 if spec.experts is None else 2 * spec.experts.count * spec.experts.size  # one parameter
        rows = max(spec.vocabulary, spec.mlp_size, 3 * spec.heads * spec.head_size, experts)
        if rows * spec.hidden > LARGEST_MATRIX:
            problem = f"a matrix of {rows} × {spec.hidden} is larger than any that is trained"
            raise ConfigError(f"{MODEL_KEY}.hidden_size", problem, "use smaller sizes")
    return config


def _check_sizes(fields: dict[str, Any], aliases: dict[str, str]) -> None:
    """Refuse sizes for which Hugging Face's class, or a table of ours, would fill memory before anything is checked."""
    for name, value in fields.items():
        layers = name in ("num_hidden_layers", aliases.get("num_hidden_layers"), "num_experts", "num_local_experts")
        most = MOST_LAYERS if layers else LARGEST_SIZE
        if isinstance(value, int) and abs(value) > most:
            reason = "each is built by itself" if layers else "sizes and token ids are counted in 32 bits"
            raise ConfigError(f"{MODEL_KEY}.{name}", f"{value} is more than {most}: {reason}", "use a smaller one")


def pretrained_config(directory: Path, key: str = "", **changes: Any) -> PretrainedConfig:
    """Return the config of a Hugging Face directory, held to the same rules as one that is written in the file.

    Args:
        key: what the message starts with where the directory isn't a model's.
        changes: fields to take instead of the directory's.
    """
    return config_from(read_config_json(directory, key), directory, **changes)


def config_from(raw: dict[str, Any], directory: Path, **changes: Any) -> PretrainedConfig:
    """Return the config of what a config.json holds.

    A field that neither its model_type declares nor every config may have is refused: nobody knows what it would have
    changed. A token id outside the vocabulary is None: it is the class's default, saved with the rest; but a negative
    padding id counts from the vocabulary's end where the embedding has a padding row.

    Args:
        directory: named by the messages.
        changes: fields to take instead.
    """
    fixed = set(FIXED_IN_EVERY_CONFIG)
    try:
        model_type = _model_type(raw)
        known = fields_of(model_type)
        fixed |= known.fixed.keys()
        fields = _checked_fields(raw, CONFIG_MAPPING[model_type], known)
        vocabulary = fields.get("vocab_size")
        for name in TOKEN_IDS:
            value = fields.get(name)
            if not isinstance(value, int) or not isinstance(vocabulary, int) or 0 <= value < vocabulary:
                continue
            # transformers gives a padding row to a negative id too, as torch counts from the end.
            has_row = name == "pad_token_id" and name in known.read and -vocabulary <= value < 0
            fields[name] = value + vocabulary if has_row else None
        config = written_config({"model_type": model_type, **fields, **changes})
    except ConfigError as error:
        name = error.key.removeprefix(f"{MODEL_KEY}.")
        if name in changes:
            raise
        remedy = "give another model" if name in fixed else error.remedy  # nobody can leave somebody else's file at it
        raise ConfigError(f"{directory / CONFIG}: {name}", error.problem, remedy) from None
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    if isinstance(dtype, str) and dtype in DTYPES.values():
        config.dtype = getattr(torch, dtype)
    return config


def read_config_json(directory: Path, key: str = "") -> dict[str, Any]:
    """Return the config.json of a Hugging Face directory, as it stands there.

    Args:
        key: what the message starts with where the directory isn't a model's; by default the directory.

    Raises:
        ConfigError: no such directory, no config.json, not an object in JSON, a training run's, or a quantized model's.
    """
    named = f" {directory}" if key else ""
    where = key or str(directory)
    if not directory.is_dir():
        raise ConfigError(where, f"no directory{named}", _GIVE)
    if not (directory / CONFIG).is_file():
        raise ConfigError(where, f"no {CONFIG} in{named or ' it'}", _GIVE)
    raw = read_json(directory / CONFIG)
    if "zero_tp" in raw:
        remedy = f"export it with zero-tp convert to-hf {directory} --output DIR, and give that DIR"
        raise ConfigError(where, f"{directory} is a training run", remedy)
    if raw.get("quantization_config") is not None:
        raise ConfigError(f"{directory / CONFIG}: quantization_config", "quantized weights", "give whole ones")
    return raw


def check_numbers(config: PretrainedConfig, path: Path) -> None:
    """Check the numbers of a config.json that transformers' own class computes with, of any model_type.

    Args:
        path: of the file.
    """
    table = architectures.ARCHITECTURES.get(config.model_type)
    try:
        if table is not None:
            table.fields.check_numbers(vars(config))
        check_rope_values(getattr(config.get_text_config(), "rope_parameters", None) or {})
    except ConfigError as error:
        name = error.key.removeprefix(f"{MODEL_KEY}.")
        raise ConfigError(f"{path}: {name}", error.problem, "give another model, or mend the file") from None


def check_unchanged(directory: Path, config: PretrainedConfig, saved: dict[str, Any]) -> None:
    """Check that a run that resumes still has the model it was started with.

    Args:
        directory: of `from_pretrained`; what it holds may have changed, where a written model is part of the file.
        saved: the config of the checkpoint's model.
    """
    known = fields_of(config.model_type)
    for name in (*inspect.get_annotations(type(config)), *known.undeclared):
        value, before = getattr(config, name, None), saved.get(name)
        # The tokenizer beside the data decides the token ids.
        if name not in TOKEN_IDS and name not in known.irrelevant and value != before:
            key, remedy = f"{MODEL_KEY}.from_pretrained", "start it with that, or give another --output-dir"
            problem = f"{name} in {directory} is {shown(value)}, but the run was started with {shown(before)}"
            raise ConfigError(key, problem, remedy)


def _model_type(model: dict[str, Any]) -> str:
    supported, key = list(architectures.ARCHITECTURES), f"{MODEL_KEY}.model_type"
    listed = f"supported: {', '.join(supported)}"
    if "model_type" not in model:
        raise ConfigError(key, "required, but not given", listed)
    model_type = model["model_type"]
    if not isinstance(model_type, str):
        raise ConfigError(key, f"expected a string, got {shown(model_type)}", listed)
    if model_type in supported:
        return model_type
    if model_type in CONFIG_MAPPING:
        raise ConfigError(key, f"{shown(model_type)} has no table here", listed)
    hint = did_you_mean(model_type, supported)
    raise ConfigError(key, f"{shown(model_type)} is unknown", hint if "?" in hint else listed)


def _checked_fields(raw: dict[str, Any], config_class: Any, known: Fields) -> dict[str, Any]:
    """Return the fields of a config.json that the model_type has."""
    declared = _fields_model(config_class, known).model_fields
    known.check({name: value for name, value in raw.items() if name not in declared}, written=True)
    # Old files hold settings of generation too, which transformers takes out.
    of_generation = GenerationConfig._get_default_generation_params()
    elsewhere = {*OF_EVERY_CONFIG, *FIXED_IN_EVERY_CONFIG, *known.fixed, *known.irrelevant, *of_generation}
    for name, value in raw.items():
        if name not in declared and name not in elsewhere:
            problem = f"{shown(value)} is no field of {config_class.__name__}"
            raise ConfigError(f"{MODEL_KEY}.{name}", problem, "remove it from the file if it changes nothing")
    return {name: raw[name] for name in raw if name in declared and known.irrelevant.get(name) != OF_A_HEAD}


def _fields_model(config_class: Any, known: Fields) -> type[BaseModel]:
    """Return the fields that a Hugging Face config class declares itself, under its names and the general ones, and
    those that it obeys without declaring them."""
    hints = inspect.get_annotations(config_class, eval_str=True)
    hints |= {alias: hints[name] for alias, name in config_class.attribute_map.items() if name in hints}
    if "rope_parameters" in hints:
        hints["rope_parameters"] = dict[str, Any] | None  # its TypedDict is none that pydantic takes before Python 3.12
    fields: dict[str, Any] = {name: (hint, None) for name, hint in {**hints, **known.undeclared}.items()}
    return create_model("Fields", __base__=ConfigModel, **fields)


def _check_names(fields: dict[str, Any], config_class: Any, known: Fields) -> None:
    aliases: dict[str, str] = config_class.attribute_map
    for name, value in fields.items():
        if aliases.get(name) in fields:
            problem = f"is another name of {aliases[name]}, which is given too"
            raise ConfigError(f"{MODEL_KEY}.{name}", problem, "keep one of them")
        if known.irrelevant.get(name) == OF_A_HEAD and value != getattr(config_class, name):
            raise ConfigError(f"{MODEL_KEY}.{name}", "belongs to a head that is not trained here", "leave it out")


def _check_token_ids(fields: dict[str, Any], vocabulary: int) -> None:
    for name in TOKEN_IDS:
        value = fields.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not 0 <= token < vocabulary:
                remedy = f"give an id from 0 to {vocabulary - 1}, or null"
                raise ConfigError(f"{MODEL_KEY}.{name}", f"{token} is outside the vocabulary of {vocabulary}", remedy)


@contextlib.contextmanager
def _named_as_written(fields: dict[str, Any], aliases: dict[str, str]) -> Iterator[None]:
    """An error names the field that the file gives, where a field has a general name and the architecture's own."""
    try:
        yield
    except ConfigError as error:
        own = error.key.removeprefix(f"{MODEL_KEY}.")
        name = next((alias for alias, target in aliases.items() if target == own and alias in fields), own)
        raise ConfigError(f"{MODEL_KEY}.{name}", error.problem, error.remedy or "leave it out") from None
