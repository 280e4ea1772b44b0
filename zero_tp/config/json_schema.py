"""`json_schema` describes the config file to an editor: every key that is typed, DeepSpeed's part included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from zero_tp.config import optimizer
from zero_tp.config.deepspeed import (
    OFF_BLOCKS,
    OWN_BLOCKS,
    REMOVED,
    RENAMED,
    SWITCHES,
    Scalars,
    deepspeed_models,
)
from zero_tp.config.load import SCHEMA
from zero_tp.config.model import FROM
from zero_tp.config.resolve import AUTO, BATCH_FIELDS
from zero_tp.config.schema import ZeroTP

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Json = dict[str, Any]


class _WithoutExtras(GenerateJsonSchema):
    """What a field's `json_schema_extra` holds is for docs/config.md, and in DeepSpeed's models for its own code."""

    def generate_inner(self, schema: Any) -> Any:
        metadata = {key: value for key, value in schema.get("metadata", {}).items() if key != "pydantic_js_extra"}
        return super().generate_inner({**schema, "metadata": metadata})


def json_schema() -> Json:
    """Return the JSON schema (draft 2020-12) of a run's file. This imports DeepSpeed: about two seconds.

    It knows keys, types and ranges. What RunConfig accepts is valid; combinations and sums it can't know.
    """
    from zero_tp.architectures import ARCHITECTURES

    models: dict[str, type[BaseModel]] = {**deepspeed_models(), **OWN_BLOCKS, "zero_tp": ZeroTP}
    optimizers = {
        name: list(
            _distinct(optimizer.optimizer_params(name.lower(), *each) for each in product((True, False), repeat=2))
        )
        for name in optimizer.OPTIMIZERS
    }
    schedulers = {name: [optimizer.scheduler_params(name)] for name in optimizer.SCHEDULERS}
    params = [model for table in (optimizers, schedulers) for each in table.values() for model in each]
    references, whole = models_json_schema(
        [(model, "validation") for model in _distinct((Scalars, *models.values(), *params))],
        schema_generator=_WithoutExtras,
    )
    definitions: Json = whole["$defs"]

    def reference(model: type[BaseModel]) -> Json:
        return references[model, "validation"]

    def definition(model: type[BaseModel]) -> Json:
        found: Json = definitions[reference(model)["$ref"].removeprefix("#/$defs/")]
        return found

    for block, model in models.items():
        known: Json = definition(model)["properties"]
        if model.model_config.get("populate_by_name"):
            for name, field in model.model_fields.items():
                known.setdefault(name, known.get(field.alias or name))
        for key in (*REMOVED, *RENAMED):
            if key.startswith(f"{block}."):
                known.pop(key.partition(".")[2], None)
        _allow_auto(known, f"{block}.")
    for path, table in (("optimizer.params.", optimizers), ("scheduler.params.", schedulers)):
        for model in _distinct(model for each in table.values() for model in each):
            _allow_auto(definition(model)["properties"], path)
    definition(ZeroTP)["properties"]["model"]["properties"] = {
        "model_type": {"enum": list(ARCHITECTURES)},
        FROM: {"type": "string"},
    }
    scalars: Json = definition(Scalars)["properties"]
    _allow_auto(scalars, "")
    del definitions[reference(Scalars)["$ref"].removeprefix("#/$defs/")]

    def typed(table: dict[str, list[type[BaseModel]]], **more: Json) -> Json:
        return {
            "anyOf": [
                _object(
                    {"type": _in_any_case(name), "params": {"anyOf": [reference(model) for model in each]}, **more},
                    [
                        "type",
                        *(["params"] if any(field.is_required() for field in each[0].model_fields.values()) else []),
                    ],
                )
                for name, each in table.items()
            ]
        }

    properties = {
        SCHEMA: {"type": "string", "description": "The path of this schema, for editors."},
        **scalars,
        "optimizer": typed(optimizers, legacy_fusion={"type": "boolean"}),
        "scheduler": typed(schedulers),
        **{block: reference(model) for block, model in models.items()},
        **{block: {**_off(), "description": reason} for block, reason in OFF_BLOCKS.items()},
    }
    return {
        "$schema": DIALECT,
        "title": "A run of zero_tp",
        "description": "A DeepSpeed config and the zero_tp block.",
        **_object(properties, ["optimizer", "zero_tp"]),
        "$defs": definitions,
    }


def _distinct(models: Iterable[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    return iter(dict.fromkeys(models))


def _object(properties: Json, required: list[str]) -> Json:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _in_any_case(name: str) -> Json:
    """Return the schema of a name that DeepSpeed takes in capitals too; editors offer it as it is written."""
    letters = "".join(f"[{letter.lower()}{letter.upper()}]" for letter in name)
    return {"anyOf": [{"const": name}, {"pattern": f"^{letters}$"}]}


def _allow_auto(properties: Json, path: str) -> None:
    for name, schema in properties.items():
        if path + name in AUTO or path + name in BATCH_FIELDS:
            properties[name] = {"anyOf": [schema, {"const": "auto"}]}


def _off() -> Json:
    """Return the schema of a block that has to stay off."""
    switches = {name: {"enum": list(values)} for name, values in SWITCHES.items()}
    return {"anyOf": [{"enum": [False, None]}, _object(switches, [])]}
