"""`zero_tp.model`: Hugging Face's own config fields, checked against what the architecture's table computes.

The tables are read inside functions: they import torch and transformers, and are not needed to read a config file.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, create_model

from zero_tp.config.pretrained import read_config_json
from zero_tp.config.schema import Block, ZeroTP
from zero_tp.config.validation import validate
from zero_tp.errors import ConfigError, UserError, did_you_mean, shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from zero_tp.models.architectures import Fields
    from zero_tp.models.spec import TransformerSpec

KEY = "zero_tp.model"
FROM = "from_pretrained"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def supported() -> list[str]:
    """Every model_type that has a table."""
    from zero_tp.models.architectures import ARCHITECTURES

    return list(ARCHITECTURES)


def fields_of(model_type: str) -> Fields:
    """What becomes of the fields of a supported model_type."""
    from zero_tp.models.architectures import ARCHITECTURES

    return ARCHITECTURES[model_type].fields


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
        remedy = f'supported: {", ".join(supported())}; or give {{"{FROM}": DIR}}'
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
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = _model_type(model, list(CONFIG_MAPPING))
    known, config_class = fields_of(model_type), cast(Any, CONFIG_MAPPING[model_type])
    written = {name: value for name, value in model.items() if name != "model_type"}
    fields = validate(_fields_model(config_class, known), written, KEY).model_dump(exclude_unset=True)
    _check_fields(fields, config_class, known)
    vocabulary: int = fields.get("vocab_size", config_class.vocab_size)
    for name in TOKEN_IDS:
        default = getattr(config_class, name)
        if isinstance(default, int) and default >= vocabulary:
            fields.setdefault(name, None)
    _check_token_ids(fields, vocabulary)
    try:
        config: PreTrainedConfig = config_class(**fields)
    except (ValueError, TypeError, KeyError, ZeroDivisionError, StrictDataclassError) as error:
        # What the class checks itself. Sizes of zero reach its sums before ours.
        _check_written_sizes(fields, known)
        why = " ".join(str(error).split())
        named = [name for name in fields if re.search(rf"\b({name}|{name.replace('_', ' ')})\b", why)]
        key = f"{KEY}.{named[-1]}" if named else KEY
        raise ConfigError(key, f"{config_class.__name__} refuses it ({why})", "correct that field") from None
    _check_sizes(config, fields, known)
    spec_of(config, fields)
    return config


def spec_of(config: PreTrainedConfig, fields: dict[str, Any] | None = None) -> TransformerSpec:
    """What the config's table makes of it.

    Args:
        fields: as they are written; an error names the one that is, where a field has two names.

    Raises:
        ConfigError: a value that is not computed exactly.
    """
    from zero_tp.models.architectures import architecture_of
    from zero_tp.models.architectures.common import check_rope_names

    try:
        check_rope_names(config, fields or {})
        return architecture_of(config).spec(config)
    except UserError as error:
        key, _, rest = str(error).partition(": ")
        problem, _, remedy = rest.partition("; ")
        name = _written(key.removeprefix(f"{KEY}."), fields or {}, config)
        raise ConfigError(f"{KEY}.{name}", problem, remedy or "leave it out") from None


def pretrained_config(directory: Path, key: str = "", **changes: Any) -> PreTrainedConfig:
    """The config of a Hugging Face directory, held to the same rules as one that is written in the file.

    A field of `config.json` that neither its model_type declares nor every config may have is refused: nobody knows
    what it would have changed. A token id outside the vocabulary is None: it is the class's default, saved with the
    rest; but a negative padding id counts from the vocabulary's end where the embedding has a padding row.

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
        known = fields_of(model_type)
        taken = _taken(raw, CONFIG_MAPPING[model_type], known)
        vocabulary = taken.get("vocab_size")
        for name in TOKEN_IDS:
            value = taken.get(name)
            if not isinstance(value, int) or not isinstance(vocabulary, int) or 0 <= value < vocabulary:
                continue
            # transformers gives a padding row to a negative id too, as torch counts from the end.
            has_row = name == "pad_token_id" and name in known.read and -vocabulary <= value < 0
            taken[name] = value + vocabulary if has_row else None
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


def _taken(raw: dict[str, Any], config_class: Any, known: Fields) -> dict[str, Any]:
    """The fields of a config.json that the model_type has."""
    from transformers import GenerationConfig

    from zero_tp.models.architectures.common import FIXED_IN_EVERY_CONFIG, OF_A_HEAD, OF_EVERY_CONFIG

    declared = _fields_model(config_class, known).model_fields
    # Old files hold settings of generation too, which transformers takes out.
    elsewhere = OF_EVERY_CONFIG.keys() | GenerationConfig._get_default_generation_params().keys()
    fixed = {**FIXED_IN_EVERY_CONFIG, **known.fixed}
    taken = {}
    for name, value in raw.items():
        if name in declared:
            if known.irrelevant.get(name) != OF_A_HEAD:
                taken[name] = value
        elif name in fixed:
            only, reason = fixed[name]
            if value != only:
                raise ConfigError(f"{KEY}.{name}", f"{shown(value)} is refused: {reason}", "give another model")
        elif name not in elsewhere and name not in known.irrelevant:
            problem = f"{shown(value)} is no field of {config_class.__name__}"
            raise ConfigError(f"{KEY}.{name}", problem, "remove it from the file if it changes nothing")
    return taken


def check_unchanged(directory: Path, config: PreTrainedConfig, saved: dict[str, Any]) -> None:
    """Whether a run that resumes still has the model it was started with.

    Args:
        directory: of `from_pretrained`; what it holds may have changed, where a written model is part of the file.
        saved: the config of the checkpoint's model.

    Raises:
        ConfigError: names the first field that is another one.
    """
    known = fields_of(config.model_type)
    for name in (*inspect.get_annotations(type(config)), *known.undeclared):
        found, before = getattr(config, name, None), saved.get(name)
        # The tokenizer beside the data decides the token ids.
        if name not in TOKEN_IDS and name not in known.irrelevant and found != before:
            problem = f"{name} in {directory} is {shown(found)}, but the run was started with {shown(before)}"
            raise ConfigError(f"{KEY}.{FROM}", problem, "start it with that, or give another --output-dir")


def _config_from(model: dict[str, Any], saved: dict[str, Any] | None) -> PreTrainedConfig:
    """The config of `{"from_pretrained": DIR}`, or the saved one where DIR is gone, with other dropout probabilities
    where they are given beside it."""
    directory, key = model[FROM], f"{KEY}.{FROM}"
    if not isinstance(directory, str) or not directory:
        raise ConfigError(key, f"expected a string, got {shown(directory)}", "give a Hugging Face model directory")
    changes = {name: value for name, value in model.items() if name != FROM}
    dropouts = list(dict.fromkeys(name for model_type in supported() for name in fields_of(model_type).dropouts))
    for name in changes:
        if name not in dropouts:
            problem = f"given beside {FROM}, but {directory} decides it"
            raise ConfigError(f"{KEY}.{name}", problem, f"leave it out; only {', '.join(dropouts)} can be given")
    if saved is not None and not Path(directory).exists():
        return _read_config(saved, Path(directory), changes)
    return pretrained_config(Path(directory), key, **changes)


def _model_type(model: dict[str, Any], known: list[str]) -> str:
    listed = f"supported: {', '.join(supported())}"
    if "model_type" not in model:
        raise ConfigError(f"{KEY}.model_type", "required, but not given", listed)
    model_type, key = model["model_type"], f"{KEY}.model_type"
    if not isinstance(model_type, str):
        raise ConfigError(key, f"expected a string, got {shown(model_type)}", listed)
    if model_type in supported():
        return model_type
    if model_type in known:
        raise ConfigError(key, f"{shown(model_type)} has no table here", listed)
    hint = did_you_mean(model_type, supported())
    raise ConfigError(key, f"{shown(model_type)} is unknown", hint if "?" in hint else listed)


def _fields_model(config_class: Any, known: Fields) -> type[BaseModel]:
    """The fields that a Hugging Face config class declares itself, under its names and the general ones, and those that
    it obeys without declaring them."""
    hints = inspect.get_annotations(config_class, eval_str=True)
    hints |= {alias: hints[name] for alias, name in config_class.attribute_map.items() if name in hints}
    if "rope_parameters" in hints:
        hints["rope_parameters"] = dict[str, Any] | None  # its TypedDict is none that pydantic takes before Python 3.12
    fields: dict[str, Any] = {name: (hint, None) for name, hint in {**hints, **known.undeclared}.items()}
    return create_model("Fields", __base__=Block, **fields)


def _check_fields(fields: dict[str, Any], config_class: Any, known: Fields) -> None:
    from zero_tp.models.architectures.common import FIXED_IN_EVERY_CONFIG, OF_A_HEAD

    fixed = {**FIXED_IN_EVERY_CONFIG, **known.fixed}
    aliases: dict[str, str] = config_class.attribute_map
    for name, value in fields.items():
        key = f"{KEY}.{name}"
        if aliases.get(name) in fields:
            raise ConfigError(key, f"is another name of {aliases[name]}, which is given too", "keep one of them")
        if name in fixed and value != fixed[name][0]:
            only, reason = fixed[name]
            raise ConfigError(key, f"{shown(value)} is refused: {reason}", f"leave it at {shown(only)}")
        if known.irrelevant.get(name) == OF_A_HEAD and value != getattr(config_class, name):
            raise ConfigError(key, "belongs to a head that is not trained here", "leave it out")
        options = known.choices.get(name)
        for one in value if isinstance(value, list) else [value]:
            if options is not None and one is not None and one not in options:
                raise ConfigError(key, f"{shown(one)} is not one of {', '.join(options)}", did_you_mean(one, options))


def _check_token_ids(fields: dict[str, Any], vocabulary: int) -> None:
    for name in TOKEN_IDS:
        value = fields.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not 0 <= token < vocabulary:
                remedy = f"give an id from 0 to {vocabulary - 1}, or null"
                raise ConfigError(f"{KEY}.{name}", f"{token} is outside the vocabulary of {vocabulary}", remedy)


def _check_written_sizes(fields: dict[str, Any], known: Fields) -> None:
    for name in known.sizes:
        if fields.get(name) is not None and fields[name] < 1:
            raise ConfigError(f"{KEY}.{name}", f"{fields[name]} is not positive", "give 1 or more")


def _check_sizes(config: PreTrainedConfig, fields: dict[str, Any], known: Fields) -> None:
    for name in known.sizes:
        value = getattr(config, name, None)
        if value is not None and value < 1:
            key = f"{KEY}.{_written(name, fields, config)}"
            raise ConfigError(key, f"{value} is not positive", "give 1 or more")
    for name in known.dropouts:
        value = getattr(config, name)
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"{KEY}.{name}", f"{value} is not a probability below 1", "give 0.0, or as 0.1")
    for name in known.positive:
        if not getattr(config, name) > 0:
            raise ConfigError(f"{KEY}.{name}", f"{getattr(config, name)} is not positive", "give more than 0")


def _written(own: str, fields: dict[str, Any], config: PreTrainedConfig) -> str:
    """The name under which the file gives a field: Hugging Face's general one, or the architecture's own."""
    reverse = {target: alias for alias, target in config.attribute_map.items()}
    return reverse[own] if reverse.get(own) in fields else own


def _check_split(config: PreTrainedConfig, zero_tp: ZeroTP) -> None:
    tensor, length, spec = zero_tp.parallel.tensor, zero_tp.data.sequence_length, spec_of(config)
    for what, size in (("heads", spec.heads), ("MLP width", spec.mlp_size)):
        if size % tensor:
            sums = f"{what} {size} ≠ tensor {tensor} × {size / tensor:.4g} a rank"
            raise ConfigError("zero_tp.parallel.tensor", sums, f"use a tensor degree that divides {size}")
    if length > spec.positions:
        problem = f"{length} tokens, but the model has {spec.positions} positions"
        name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        longer = "use another model" if FROM in zero_tp.model else f"raise {KEY}.{name}"
        raise ConfigError("zero_tp.data.sequence_length", problem, f"shorten it, or {longer}")
    if zero_tp.parallel.sequence and length % tensor:
        sums = f"{length} ≠ tensor {tensor} × {length / tensor:.4g} tokens a rank"
        remedy = f"use a multiple of {tensor}, or set zero_tp.parallel.sequence to false"
        raise ConfigError("zero_tp.data.sequence_length", sums + ", which sequence parallelism needs", remedy)
