"""`json_schema` describes the config file to an editor: every key that is typed, DeepSpeed's part included."""

from __future__ import annotations

from typing import Any

from pydantic import create_model
from pydantic.json_schema import GenerateJsonSchema

from zero_tp.config.deepspeed import RENAMED
from zero_tp.config.model import FROM
from zero_tp.config.optimizer import OptimizerBlock
from zero_tp.config.resolve import AUTO, BATCH_FIELDS
from zero_tp.config.run_config import SCHEMA
from zero_tp.config.schema import ZeroTP

Json = dict[str, Any]
CAN_BE_AUTO = {*AUTO, *BATCH_FIELDS}


class _WithoutExtras(GenerateJsonSchema):
    """What a field's `json_schema_extra` holds is for docs/config.md, and in DeepSpeed's models for its own code."""

    def generate_inner(self, schema: Any) -> Any:
        metadata = {key: value for key, value in schema.get("metadata", {}).items() if key != "pydantic_js_extra"}
        return super().generate_inner({**schema, "metadata": metadata})


def json_schema() -> Json:
    """Return the JSON schema (draft 2020-12) of a run's file. This imports DeepSpeed: about two seconds.

    It knows keys, types and ranges, but for the `params` of optimizer and scheduler, which depend on their types. What
    RunConfig accepts is valid; combinations and sums it can't know.
    """
    from zero_tp.architectures import ARCHITECTURES
    from zero_tp.config.config_file import ConfigFile

    required: dict[str, Any] = {"optimizer": (OptimizerBlock, ...), "zero_tp": (ZeroTP, ...)}
    model = create_model("Config", __base__=ConfigFile, **required)
    schema = model.model_json_schema(schema_generator=_WithoutExtras)
    _adapt(schema, schema["$defs"])
    schema["$defs"]["ZeroTP"]["properties"]["model"]["properties"] = {
        "model_type": {"enum": list(ARCHITECTURES)},
        FROM: {"type": "string"},
    }
    schema["properties"][SCHEMA] = {"type": "string", "description": "The path of this schema, for editors."}
    return {
        **schema,
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": "A run of zero_tp",
        "description": "A DeepSpeed config and the zero_tp block.",
    }


def _adapt(schema: Json, definitions: Json, path: str = "") -> None:
    """Allow "auto" where the run decides a value, and take out the keys that were renamed, from `path` on."""
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for option in schema.get("anyOf", ()):
        _adapt(option, definitions, path)
    properties: Json = schema.get("properties", {})
    for name, value in list(properties.items()):
        key = path + name
        if key in RENAMED:
            del properties[name]
        elif key in CAN_BE_AUTO and {"const": "auto"} not in value.get("anyOf", ()):
            properties[name] = {"anyOf": [value, {"const": "auto"}]}
        elif any(other.startswith(f"{key}.") for other in (*CAN_BE_AUTO, *RENAMED)):
            _adapt(value, definitions, f"{key}.")
