"""Validate a JSON block by a pydantic model, ours or DeepSpeed's, with one line for each error."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from zero_tp.base.errors import ConfigError, did_you_mean, shown

Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Below1 = Annotated[float, Field(ge=0, lt=1)]

MISSING = "required, but not given"
"""The problem of an error about a missing key."""

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


class ConfigModel(BaseModel):
    """A JSON object that refuses unknown keys and is frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ConfigErrors(ConfigError):
    """Several errors of one file. Its line is the first one's."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__(errors[0].key, errors[0].problem, errors[0].remedy)
        keys = [error.key for error in errors]
        self._errors = [
            error for index, error in enumerate(errors) if keys.index(error.key) == index
        ]

    @property
    def errors(self) -> list[ConfigError]:
        """Return the first error of each key."""
        return self._errors


def with_keys(error: ConfigError, rename: Callable[[str], str]) -> ConfigError:
    """Return an error with its keys renamed, each of several."""
    errors = [
        ConfigError(rename(one.key), one.problem, one.remedy)
        for one in error.errors
        if isinstance(one, ConfigError)
    ]
    return ConfigErrors(errors) if len(errors) > 1 else errors[0]


class ErrorCollector:
    """Collect the errors of independent checks: `with collector:` around each, then `raise_all`."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        if isinstance(error, ConfigErrors):
            self.errors += error.errors
        elif isinstance(error, ConfigError):
            self.errors.append(error)
        # True swallows the error, so that the next check runs; any other exception is a bug and
        # passes.
        return isinstance(error, ConfigError)

    def raise_all(self) -> None:
        """Raise a ConfigErrors if there is an error."""
        if self.errors:
            raise ConfigErrors(self.errors)


def validate(model: type[Model], raw: Any, path: str, earlier: Iterable[ConfigError] = ()) -> Model:
    """Return `raw`, the JSON value at `path`, as an instance of `model`.

    An integer may be written as 5e8, as in DeepSpeed's documentation. Strings are not numbers, and
    true is not 1.

    Args:
        earlier: errors of earlier checks; they come first, and their keys are not validated again.

    Raises:
        ConfigErrors: not an object, or each unknown key (with the nearest valid one), missing key,
            wrong type or value.
    """
    if not isinstance(raw, dict):
        raise ConfigErrors([_not_an_object(raw, path)])
    # Unknown keys are found here, because pydantic's error for them suggests no name.
    errors = [*earlier, *_unknown_keys(model, raw, path)]
    remaining = _drop_keys({error.key for error in errors}, raw, path)
    try:
        parsed = model(**remaining)
    except ValidationError as error:
        # For a union pydantic lists an error per member. Those of our own rules say the most: put
        # them first.
        details = sorted(
            error.errors(include_url=False), key=lambda detail: detail["type"] != "value_error"
        )
        errors += (_from_pydantic(detail, raw, path) for detail in details)
    else:
        # Not by pydantic's strict mode, which would refuse 5e8 as an integer.
        errors += _coercion_errors(remaining, parsed.model_dump(by_alias=True), path)
        if not errors:
            return parsed
    # For a union, report the member whose errors are deepest.
    deepest = [
        error
        for error in errors
        if not any(other.key.startswith(f"{error.key}.") for other in errors)
    ]
    raise ConfigErrors(deepest) from None


def _unknown_keys(model: type[BaseModel], raw: dict[str, Any], path: str) -> Iterator[ConfigError]:
    """Yield an error for each key of `raw` that names no field of `model` or of the models
    within.
    """
    fields = fields_by_name(model)
    for key, value in raw.items():
        where = f"{path}.{key}" if path else key
        if key not in fields:
            # This block's names precede those of nested blocks.
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.8)
            yield ConfigError(where, "unknown key", did_you_mean(key, near or nested_names(model)))
        elif (inner := nested_model(fields[key].annotation)) is not None and isinstance(
            value, dict
        ):
            yield from _unknown_keys(inner, value, where)
        elif inner is not None and inner is fields[key].annotation:
            yield _not_an_object(value, where)
        elif isinstance(value, list) and (inner := _item_model(fields[key].annotation)) is not None:
            for index, item in enumerate(value):
                yield from (
                    _unknown_keys(inner, item, f"{where}.{index}")
                    if isinstance(item, dict)
                    else [_not_an_object(item, f"{where}.{index}")]
                )


def _not_an_object(value: Any, path: str) -> ConfigError:
    return ConfigError(path, f"expected an object, got {shown(value)}", 'write {"key": value, ...}')


def _item_model(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model M of a `list[M]`, or None."""
    if typing.get_origin(annotation) is not list:
        return None
    return nested_model(typing.get_args(annotation)[0])


def _drop_keys(keys: set[str], raw: Any, path: str) -> Any:
    """Return `raw`, the value at `path`, without these dotted keys, on which DeepSpeed's
    validators may fail.
    """
    if isinstance(raw, list):
        # An item stays, because errors name those after it by their numbers.
        return [_drop_keys(keys, item, f"{path}.{index}") for index, item in enumerate(raw)]
    if not isinstance(raw, dict):
        return raw
    return {
        key: _drop_keys(keys, value, where)
        for key, value in raw.items()
        if (where := f"{path}.{key}" if path else key) not in keys
    }


def fields_by_name(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields by their documented names: the alias, or else the field's own."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def nested_names(
    model: type[BaseModel], prefix: str = "", within: frozenset[type[BaseModel]] = frozenset()
) -> Iterator[str]:
    """Yield the model's key names, then the dotted names of nested models; a recursive model is
    entered once.

    Args:
        within: the models that contain this one.
    """
    fields = fields_by_name(model)
    yield from (prefix + name for name in fields)
    for name, field in fields.items():
        inner = nested_model(field.annotation)
        if inner is not None and inner not in within | {model}:
            yield from nested_names(inner, f"{prefix}{name}.", within | {model})


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model in an annotation (`M`, `M | None`, `str | M`), or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return next(filter(None, map(nested_model, typing.get_args(annotation))), None)
    return None


def _from_pydantic(detail: Any, raw: Any, path: str) -> ConfigError:
    """Return one of pydantic's `errors()` as a ConfigError with JSON's names."""
    parts, value = _locate(detail["loc"], detail["type"], raw, path)
    key = ".".join(parts)
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind == "missing":
        return ConfigError(key, MISSING, "add it (docs/config.md describes it)")
    if kind == "string_too_short" or (kind == "too_short" and not value):
        return ConfigError(key, "is empty", "docs/config.md lists what is accepted")
    if kind in ("literal_error", "enum"):
        words = context["expected"].replace(" or ", ", ").split(",")
        options = list(dict.fromkeys(word.strip().strip("'") for word in words))
        wrong = f"{shown(value)} is not one of " + ", ".join(options)
        if isinstance(value, str) and value in options:  # the options are numbers
            return ConfigError(key, f"{shown(value)} is text", f"write {value} without quotes")
        return ConfigError(
            key,
            wrong,
            did_you_mean(value, options) if isinstance(value, str) else "use one of these",
        )
    for prefix, expected in EXPECTED.items():
        if kind.startswith(prefix + "_"):
            return ConfigError(key, f"expected {expected}, got {shown(value)}", f"write {expected}")
    # What our own validators raise, pydantic prefixes with the kind of exception.
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message.replace("Input should", "must").removeprefix(f"{key} ")
    return ConfigError(key, f"{shown(value)}: {message}", "docs/config.md lists what is accepted")


def _locate(location: tuple[Any, ...], kind: str, raw: Any, path: str) -> tuple[list[str], Any]:
    """Return a key's parts and its JSON value, without the union members in pydantic's location."""
    parts = [path] if path else []
    value = raw
    for part in location:
        # For a union pydantic's location also has the member's class, which is no key of the file.
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            parts.append(str(part))
            value = value[part]
        elif kind == "missing" and part == location[-1]:
            parts.append(str(part))
    return parts, value


def _coercion_errors(written: Any, value: Any, where: str) -> Iterator[ConfigError]:
    """Yield an error for each value that pydantic has converted: "8" to 8, and true to 1."""
    if isinstance(written, dict) and isinstance(value, dict):
        for key in filter(value.__contains__, written):  # in the file's order
            yield from _coercion_errors(
                written[key], value[key], f"{where}.{key}" if where else key
            )
    elif isinstance(written, list) and isinstance(value, (list, tuple)):
        for index, pair in enumerate(zip(written, value, strict=True)):
            yield from _coercion_errors(*pair, f"{where}.{index}")
    elif isinstance(value, (bool, int, float)) and (
        isinstance(written, str) or isinstance(value, bool) != isinstance(written, bool)
    ):
        expected = EXPECTED[
            "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        ]
        yield ConfigError(where, f"expected {expected}, got {shown(written)}", f"write {expected}")
