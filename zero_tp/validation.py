"""Validate one JSON block by one pydantic model, our own, DeepSpeed's or another's, with every error as one line."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from zero_tp.errors import ConfigError, did_you_mean, shown

Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Below1 = Annotated[float, Field(ge=0, lt=1)]

EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
    "path": "a string",
}


class Block(BaseModel):
    """A block is a JSON object that refuses unknown keys and can't be changed after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def validate(model: type[Model], raw: Any, path: str) -> Model:
    """Return `raw`, the JSON value at `path`, as an instance of `model`.

    Numbers may be written 5e8 for an integer, as DeepSpeed's documentation does; strings are not numbers, and
    true is not 1.

    Raises:
        ConfigError: not an object, an unknown key (with the nearest valid one), a missing key, a wrong type or value.
    """
    check_keys(model, raw, path)
    try:
        parsed = model(**raw)
    except ValidationError as error:
        raise _one_line(error, raw, path) from None
    _refuse_coercion(parsed, raw, path)
    return parsed


def check_keys(model: type[BaseModel], raw: Any, path: str) -> None:
    """Raise ConfigError for the first key of `raw` that names no field of `model` or of the models within."""
    if not isinstance(raw, dict):
        raise ConfigError(path, f"expected an object, got {shown(raw)}", 'write {"key": value, ...}')
    fields = fields_by_name(model)
    for key, value in raw.items():
        where = f"{path}.{key}" if path else key
        if key not in fields:
            raise ConfigError(where, "unknown key", did_you_mean(key, nested_names(model)))
        inner = model_in(fields[key].annotation)
        if inner is not None and (isinstance(value, dict) or fields[key].annotation is inner):
            check_keys(inner, value, where)


def fields_by_name(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields by every name that JSON may use: the alias, and the field's own where the model allows it."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        if field.alias:
            found[field.alias] = field
        if not field.alias or model.model_config.get("populate_by_name"):
            found[name] = field
    return found


def nested_names(
    model: type[BaseModel], prefix: str = "", within: frozenset[type[BaseModel]] = frozenset()
) -> Iterator[str]:
    """Yield the model's key names, then the dotted names of the models within; of one within itself no more than once.

    Args:
        within: the models that this one is part of.
    """
    fields = fields_by_name(model)
    yield from (prefix + name for name in fields)
    for name, field in fields.items():
        inner = model_in(field.annotation)
        if inner is not None and inner not in within | {model}:
            yield from nested_names(inner, f"{prefix}{name}.", within | {model})


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model in an annotation (`M`, `M | None`, `str | M`), or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return next(filter(None, map(model_in, typing.get_args(annotation))), None)
    return None


def _one_line(error: ValidationError, raw: Any, path: str) -> ConfigError:
    """Return the first of the deepest errors: of a union's members, the one that went furthest is the one meant."""
    found = [(_resolve(detail["loc"], detail["type"], raw, path), detail) for detail in error.errors(include_url=False)]
    (parts, value), first = max(found, key=lambda one: len(one[0][0]))
    key = ".".join(parts)
    kind, context = first["type"], first.get("ctx", {})
    if kind == "missing":
        return ConfigError(key, "required, but not given", "add it (docs/config.md describes it)")
    if kind in ("literal_error", "enum"):
        words = context["expected"].replace(" or ", ", ").split(",")
        options = list(dict.fromkeys(word.strip().strip("'") for word in words))
        wrong = f"{shown(value)} is not one of " + ", ".join(options)
        return ConfigError(key, wrong, did_you_mean(value, options) if isinstance(value, str) else "use one of these")
    for prefix, expected in EXPECTED.items():
        if kind.startswith(prefix + "_"):
            return ConfigError(key, f"expected {expected}, got {shown(value)}", f"write {expected}")
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = re.sub(r", not \w+$", "", message.replace("Input should", "must").removeprefix(f"{key} "))
    return ConfigError(key, f"{shown(value)}: {message}", "docs/config.md lists what is accepted")


def _resolve(location: tuple[Any, ...], kind: str, raw: Any, path: str) -> tuple[list[str], Any]:
    """Return a key's parts and the JSON value there, from pydantic's location, which may also name a union's member."""
    parts, value = [path] if path else [], raw
    for part in location:
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            parts.append(str(part))
            value = value[part]
        elif kind == "missing" and part == location[-1]:
            parts.append(str(part))
    return parts, value


def _refuse_coercion(parsed: BaseModel, raw: dict[str, Any], path: str) -> None:
    """Refuse what pydantic takes although the field does not ask for it: "8" for 8, and true for 1."""
    fields = type(parsed).model_fields
    for name, field in fields.items():
        for key in {name, field.alias or name} & raw.keys():
            where, written = f"{path}.{key}" if path else str(key), raw[key]
            value = getattr(parsed, name, None)
            if isinstance(value, BaseModel) and isinstance(written, dict):
                _refuse_coercion(value, written, where)
            else:
                _compare(written, value, where)


def _compare(written: Any, value: Any, where: str) -> None:
    if isinstance(written, list) and isinstance(value, (list, tuple)):
        if len(value) < len(written):  # DeepSpeed's leaf_module drops them
            raise ConfigError(where, f"{shown(written)}: an entry is there twice", "write each once")
        for index, (inner_written, inner_value) in enumerate(zip(written, value, strict=True)):
            _compare(inner_written, inner_value, f"{where}.{index}")
    elif isinstance(written, dict) and isinstance(value, dict):
        for key in written.keys() & value.keys():
            _compare(written[key], value[key], f"{where}.{key}")
    elif isinstance(value, (bool, int, float)) and (
        isinstance(written, str) or isinstance(value, bool) != isinstance(written, bool)
    ):
        expected = EXPECTED["bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"]
        raise ConfigError(where, f"expected {expected}, got {shown(written)}", f"write {expected}")
