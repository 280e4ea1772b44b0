"""Check Hugging Face configs against their architecture's table.

A config comes from a run's JSON (`zero_tp.model`) or from a directory's config.json.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import BaseModel, create_model
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zero_tp.base.constants import DTYPES, MODEL_KEY
from zero_tp.base.errors import ConfigError, did_you_mean, one_line, shown
from zero_tp.base.strict_json import read_json
from zero_tp.base.validation import ConfigModel, ErrorCollector, validate, with_keys
from zero_tp.model import architectures
from zero_tp.model.architectures.fields import (
    AUTO_MAP,
    FIXED_IN_EVERY_CONFIG,
    IRRELEVANT_IN_EVERY_CONFIG,
    Fields,
    may_read,
)
from zero_tp.model.architectures.rotary import ROPE, check_rope_names, check_rope_values

CONFIG = "config.json"
QUANTIZATION = "quantization_config"
_GIVE_DIRECTORY = "give a Hugging Face model directory"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
MAX_MATRIX_ELEMENTS = 2**40
"""4 TiB in fp32."""


def fields_of(model_type: str) -> Fields:
    """Return how the table of a supported model_type treats each field."""
    return architectures.ARCHITECTURES[model_type].fields


def config_from_block(model: dict[str, Any]) -> PretrainedConfig:
    """Return the config of a `zero_tp.model` block: `model_type` and fields of Hugging Face's
    config.

    A token id that the block omits is None if Hugging Face's default is outside the vocabulary.
    """
    model_type = _model_type(model)
    rules = fields_of(model_type)
    config_class = cast(Any, CONFIG_MAPPING[model_type])
    written = {name: value for name, value in model.items() if name != "model_type"}
    fields = validate(_pydantic_model(config_class, rules), written, MODEL_KEY).model_dump(
        exclude_unset=True
    )
    aliases: dict[str, str] = config_class.attribute_map
    _check_aliases(fields, aliases)
    collector = ErrorCollector()
    with collector:
        _check_sizes(fields, aliases)
    with collector, _errors_by_written_name(fields, aliases):
        rules.check(
            {aliases.get(name, name): value for name, value in fields.items() if value is not None}
        )
    vocabulary: int = fields.get("vocab_size", config_class.vocab_size)
    for name in TOKEN_IDS:
        default = getattr(config_class, name)
        # GPT-2's default is 50,256, which a smaller vocabulary does not have.
        if isinstance(default, int) and default >= vocabulary:
            fields.setdefault(name, None)
    with collector:
        _check_token_ids(fields, vocabulary)
    collector.raise_all()
    try:
        config: PretrainedConfig = config_class(**fields)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        ZeroDivisionError,
        StrictDataclassError,
    ) as error:  # its own checks
        raise _refusal(error, fields, config_class) from None
    with _errors_by_written_name(fields, aliases):
        check_rope_names(config, fields)
        spec = architectures.architecture_of(config).spec(config, MODEL_KEY)
        # Gate and up projections of a layer's experts are one parameter.
        experts = 0 if spec.experts is None else 2 * spec.experts.count * spec.experts.size
        embeddings = (
            spec.vocabulary,
            spec.token_types,
            spec.positions if spec.position == "learned" else 0,
        )
        rows = max(*embeddings, spec.mlp_size, 3 * spec.heads * spec.head_size, experts)
        if rows * spec.hidden > MAX_MATRIX_ELEMENTS:
            problem = f"a matrix of {rows} × {spec.hidden} is larger than any that is trained"
            raise ConfigError(f"{MODEL_KEY}.hidden_size", problem, "use smaller sizes")
    return config


def _refusal(error: Exception, fields: Mapping[str, Any], config_class: type[Any]) -> ConfigError:
    """Return what a config class raises as an error of the field that it is about."""
    why = " ".join(str(error).split())
    # Errors of a class name its fields in their text; of several the last is blamed.
    causes = [name for name in fields if re.search(rf"\b({name}|{name.replace('_', ' ')})\b", why)]
    if isinstance(error, ZeroDivisionError):
        zeros = [name for name, value in fields.items() if value == 0 and name not in TOKEN_IDS]
        causes = causes or zeros
    if "rope_parameters" in why:
        causes = causes or [name for name in ROPE if name in fields]  # its older names
    if "attention layer" in why or "_attention' layer" in why:
        causes = causes or [name for name in fields if name == "layer_types"]
    key = f"{MODEL_KEY}.{causes[-1]}" if causes else MODEL_KEY
    problem = f"{config_class.__name__} refuses it ({one_line(why, 200)})"
    return ConfigError(key, problem, "correct that field")


def _check_sizes(fields: dict[str, Any], aliases: dict[str, str]) -> None:
    """Refuse sizes with which building the config or its table would exhaust the memory.

    They would do so before any later check runs.
    """
    counts = {
        "num_hidden_layers",
        aliases.get("num_hidden_layers"),
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
    }
    collector = ErrorCollector()
    for name, value in fields.items():
        most = MAX_LAYERS if name in counts else MAX_SIZE
        if isinstance(value, int) and abs(value) > most:
            reason = (
                "each one is built separately"
                if name in counts
                else "sizes and token ids are counted in 32 bits"
            )
            problem = f"{value} is more than {most}: {reason}"
            collector.errors.append(
                ConfigError(f"{MODEL_KEY}.{name}", problem, "use a smaller one")
            )
    collector.raise_all()


def config_from_directory(directory: Path, key: str = "", **changes: Any) -> PretrainedConfig:
    """Return the config of a Hugging Face directory, checked like a `zero_tp.model` block.

    Args:
        key: prefix of the error message if the directory holds no model; by default the directory.
        changes: fields that override the directory's.
    """
    return config_from_json(read_config_json(directory, key), directory, **changes)


def config_from_json(raw: dict[str, Any], directory: Path, **changes: Any) -> PretrainedConfig:
    """Return the config of the content of a config.json.

    An unknown field is refused if transformers' model might read it, and otherwise left out, as
    transformers ignores it (`describe_ignored_fields`). A token id outside the vocabulary becomes
    None: it is a default that transformers' class wrote. If the embedding has a padding row, a
    negative padding id counts from the end of the vocabulary.

    Args:
        directory: for error messages.
        changes: fields that override the file's.
    """
    collector = ErrorCollector()
    try:
        model_type = _model_type(raw)
        config_class = CONFIG_MAPPING[model_type]
        rules = fields_of(model_type)
        with collector:
            refuse_quantized(raw, directory, rules.quantizations)
        # Read weights are whole, and so are exported ones.
        raw = {name: value for name, value in raw.items() if name != QUANTIZATION}
        with collector:
            _check_undeclared(raw, config_class, rules)
        declared = _pydantic_model(config_class, rules).model_fields
        fields = {name: raw[name] for name in raw if name in declared}
        vocabulary = fields.get("vocab_size")
        for name in TOKEN_IDS:
            value = fields.get(name)
            if (
                not isinstance(value, int)
                or not isinstance(vocabulary, int)
                or 0 <= value < vocabulary
            ):
                continue
            # transformers gives a padding row to a negative id too, as torch counts from the end.
            has_row = name == "pad_token_id" and name in rules.read and -vocabulary <= value < 0
            fields[name] = value + vocabulary if has_row else None
        with collector:
            config = config_from_block({"model_type": model_type, **fields, **changes})
        collector.raise_all()
    except ConfigError as error:

        def in_file(key: str) -> str:
            name = key.removeprefix(f"{MODEL_KEY}.")
            is_of_file = key.startswith(MODEL_KEY) and name not in changes
            return f"{directory / CONFIG}: {name}" if is_of_file else key

        raise with_keys(error, in_file) from None
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    if isinstance(dtype, str) and dtype in DTYPES.values():
        config.dtype = getattr(torch, dtype)
    return config


def read_config_json(directory: Path, key: str = "") -> dict[str, Any]:
    """Return the content of a Hugging Face directory's config.json.

    Args:
        key: see `config_from_directory`.
    """
    suffix = f" {directory}" if key else ""
    where = key or str(directory)
    if not directory.is_dir():
        raise ConfigError(where, f"no directory{suffix}", _GIVE_DIRECTORY)
    if not (directory / CONFIG).is_file():
        raise ConfigError(where, f"no {CONFIG} in{suffix or ' it'}", _GIVE_DIRECTORY)
    raw = read_json(directory / CONFIG)
    if "zero_tp" in raw:
        remedy = f"export it with zero-tp convert to-hf {directory} --output DIR, and give that DIR"
        raise ConfigError(where, f"{directory} is a training run", remedy)
    return raw


def refuse_quantized(raw: dict[str, Any], directory: Path, methods: tuple[str, ...] = ()) -> None:
    """Raise a ConfigError if the weights beside a config.json are quantized.

    Args:
        methods: of quantization whose weights are read.
    """
    settings = raw.get(QUANTIZATION)
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if settings is not None and method not in methods:
        raise ConfigError(
            f"{directory / CONFIG}: {QUANTIZATION}", "quantized weights", "give whole ones"
        )


def check_numbers(config: PretrainedConfig, path: Path) -> None:
    """Check the numbers of a config.json that transformers' own class will run, of any model_type.

    Args:
        path: of the file.
    """
    table = architectures.ARCHITECTURES.get(config.model_type)
    collector = ErrorCollector()
    for name, value in vars(config).items():
        if table is None:
            break
        with collector:
            table.fields.check_range(name, value)
    with collector:
        check_rope_values(getattr(config.get_text_config(), "rope_parameters", None) or {})
    remedy = "give another model, or mend the file"
    collector.errors = [
        ConfigError(f"{path}: {error.key.removeprefix(f'{MODEL_KEY}.')}", error.problem, remedy)
        for error in collector.errors
    ]
    collector.raise_all()


def check_unchanged(directory: Path, config: PretrainedConfig, saved: dict[str, Any]) -> None:
    """Check that a run that resumes still has the model it was started with.

    Args:
        directory: of `from_pretrained`; its files may have changed since the run started.
        saved: the model config in the checkpoint.
    """
    rules = fields_of(config.model_type)
    for name in (*inspect.get_annotations(type(config)), *rules.undeclared):
        value = getattr(config, name, None)
        before = saved.get(name)
        # The data's tokenizer decides the token ids.
        if name not in TOKEN_IDS and name not in rules.irrelevant and value != before:
            key = f"{MODEL_KEY}.from_pretrained"
            remedy = "restore that value, or give another --output-dir"
            problem = (
                f"{name} in {directory} is {shown(value)}, but the run was started with "
                f"{shown(before)}"
            )
            raise ConfigError(key, problem, remedy)


def _model_type(model: dict[str, Any]) -> str:
    supported = list(architectures.ARCHITECTURES)
    key = f"{MODEL_KEY}.model_type"
    listed = f"give {architectures.supported_types()}"
    if "model_type" not in model:
        raise ConfigError(key, "required, but not given", listed)
    model_type = model["model_type"]
    if not isinstance(model_type, str):
        raise ConfigError(key, f"expected a string, got {shown(model_type)}", listed)
    if model_type in supported:
        return model_type
    also = ", and its weights are quantized" if model.get(QUANTIZATION) is not None else ""
    if model_type in CONFIG_MAPPING:
        problem = f"{shown(model_type)} is not supported{also}"
        text_config = model.get("text_config")
        text = text_config.get("model_type") if isinstance(text_config, dict) else None
        if text in supported:
            native = architectures.ARCHITECTURES[text].native_class
            problem += ", because it has parts for pictures or sound"
            listed = (
                f"give its {text} alone, as transformers' {native}.from_pretrained(…)"
                ".save_pretrained(DIRECTORY) writes it"
            )
        raise ConfigError(key, problem, listed)
    hint = did_you_mean(model_type, supported)
    raise ConfigError(key, f"{shown(model_type)} is unknown{also}", hint if "?" in hint else listed)


def _check_undeclared(raw: dict[str, Any], config_class: Any, rules: Fields) -> None:
    """Refuse each field of a config.json that the model_type lacks and transformers may read."""
    declared = _pydantic_model(config_class, rules).model_fields
    collector = ErrorCollector()
    with collector:
        rules.check({name: value for name, value in raw.items() if name not in declared})
    for name in _unknown_fields(raw, config_class, rules):
        if may_read(config_class.model_type, name):
            problem = f"{shown(raw[name])} is no field of {config_class.__name__}"
            remedy = "remove it from the file if it changes nothing"
            collector.errors.append(ConfigError(f"{MODEL_KEY}.{name}", problem, remedy))
    collector.raise_all()


def _unknown_fields(raw: dict[str, Any], config_class: Any, rules: Fields) -> list[str]:
    """Return the names in a config.json that are no known fields.

    Known are those of the model_type, of every config and of generation.
    """
    # Old files also hold generation settings, which transformers removes.
    generation_fields = GenerationConfig._get_default_generation_params()
    known = {
        *IRRELEVANT_IN_EVERY_CONFIG,
        *FIXED_IN_EVERY_CONFIG,
        *rules.fixed,
        *rules.irrelevant,
        *generation_fields,
    }
    known |= _pydantic_model(config_class, rules).model_fields.keys()
    return [name for name in raw if name not in known]


def describe_ignored_fields(directory: Path) -> list[str]:
    """Return a line about the fields of a config.json that transformers ignores, or no line.

    They are ignored here, too.
    """
    raw = read_config_json(directory)
    model_type = _model_type(raw)
    names = _unknown_fields(raw, CONFIG_MAPPING[model_type], fields_of(model_type))
    if raw.get(AUTO_MAP) is not None:
        names.append(AUTO_MAP)
    if not names:
        return []
    verb = "changes" if len(names) == 1 else "change"
    return [
        f"{directory / CONFIG}: {', '.join(names)} {verb} nothing: transformers' {model_type} "
        "ignores it"
    ]


def _pydantic_model(config_class: Any, rules: Fields) -> type[BaseModel]:
    """Return a pydantic model of a config class's fields: declared ones under both names, and
    `rules.undeclared`.
    """
    hints = inspect.get_annotations(config_class, eval_str=True)
    hints |= {
        alias: hints[name] for alias, name in config_class.attribute_map.items() if name in hints
    }
    if "rope_parameters" in hints:
        # Pydantic rejects its TypedDict before Python 3.12.
        hints["rope_parameters"] = dict[str, Any] | None
    fields: dict[str, Any] = {
        name: (hint, None) for name, hint in {**hints, **rules.undeclared}.items()
    }
    return create_model("Fields", __base__=ConfigModel, **fields)


def _check_aliases(fields: dict[str, Any], aliases: dict[str, str]) -> None:
    for name in fields:
        if aliases.get(name) in fields:
            problem = f"is another name of {aliases[name]}, which is given too"
            raise ConfigError(f"{MODEL_KEY}.{name}", problem, "keep one of them")


def _check_token_ids(fields: dict[str, Any], vocabulary: int) -> None:
    collector = ErrorCollector()
    for name in TOKEN_IDS:
        value = fields.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not 0 <= token < vocabulary:
                problem = f"{token} is outside the vocabulary of {vocabulary}"
                remedy = f"give an id from 0 to {vocabulary - 1}, or null"
                collector.errors.append(ConfigError(f"{MODEL_KEY}.{name}", problem, remedy))
    collector.raise_all()


@contextlib.contextmanager
def _errors_by_written_name(fields: dict[str, Any], aliases: dict[str, str]) -> Iterator[None]:
    """Raise errors with a field's name as the file has it: `hidden_size`, or the architecture's
    own `n_embd`.
    """
    try:
        yield
    except ConfigError as error:

        def as_written(key: str) -> str:
            own = key.removeprefix(f"{MODEL_KEY}.")
            written = (name for name, target in aliases.items() if target == own and name in fields)
            return f"{MODEL_KEY}.{next(written, own)}"

        raise with_keys(error, as_written) from None
