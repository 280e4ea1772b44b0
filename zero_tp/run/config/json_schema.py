"""The JSON schema of the config file, DeepSpeed's keys included, for editors."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import BaseModel, create_model
from pydantic.json_schema import GenerateJsonSchema

from zero_tp.base.settings.deepspeed import ConfigFile
from zero_tp.base.settings.optimizer import (
    OPTIMIZERS,
    SGD,
    CPUAdam,
    FusedAdam,
    Muon,
    OptimizerBlock,
    TorchAdam,
)
from zero_tp.base.settings.refused import REFUSED_KEYS
from zero_tp.base.settings.resolve import AUTO, BATCH_FIELDS
from zero_tp.base.settings.schedule import SCHEDULES
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.run.config.model_block import FROM_PRETRAINED
from zero_tp.run.config.run_config import SCHEMA

Json = dict[str, Any]
ANY_ADAM = "[Aa][Dd][Aa][Mm][Ww]?"
"""A pattern of "Adam" and "AdamW" in any case, which DeepSpeed accepts."""


class _WithoutExtras(GenerateJsonSchema):
    """Leave out `json_schema_extra`, which is for docs/config.md or for DeepSpeed's own code."""

    def generate_inner(self, schema: Any) -> Any:
        metadata = {
            key: value
            for key, value in schema.get("metadata", {}).items()
            if key != "pydantic_js_extra"
        }
        return super().generate_inner({**schema, "metadata": metadata})


def json_schema() -> Json:
    """Return the JSON schema (draft 2020-12) of a run's file.

    It has keys, types and ranges; `params` depend on `type`, and a model's fields on `model_type`.
    Every config that RunConfig accepts without a note on a removed key is valid. It does not check
    combinations of keys and batch arithmetic.
    """
    from zero_tp.model.architectures import ARCHITECTURES

    blocks: dict[str, Any] = {"optimizer": (OptimizerBlock, ...), "zero_tp": (ZeroTP, ...)}
    model = create_model("Config", __base__=ConfigFile, **blocks)
    schema = model.model_json_schema(schema_generator=_WithoutExtras)
    definitions = schema["$defs"]
    model_block = schema["$defs"]["ZeroTP"]["properties"]["model"]
    _adapt(schema["properties"])
    for name in ("zero_optimization", "bf16", "fp16"):
        _adapt(
            definitions[schema["properties"][name]["$ref"].rpartition("/")[2]]["properties"],
            f"{name}.",
        )
    definitions["SchedulerBlock"]["properties"]["type"] = {"enum": list(SCHEDULES)}
    _add_cases(
        definitions["SchedulerBlock"],
        "type",
        {name: _with_params(block) for name, block in SCHEDULES.items()},
    )
    # One schema for three classes: which one is used depends on other keys, which a schema cannot
    # follow.
    adam: type[BaseModel] = create_model("Adam", __base__=(TorchAdam, FusedAdam, CPUAdam))
    classes: dict[str, type[BaseModel]] = {"SGD": SGD, "Muon": Muon, ANY_ADAM: adam}
    optimizers = {name: _with_params(model, "optimizer") for name, model in classes.items()}
    definitions |= Muon.model_json_schema()["$defs"]
    types: Json = {"anyOf": [{"enum": list(OPTIMIZERS)}, {"pattern": f"^{ANY_ADAM}$"}]}
    definitions["OptimizerBlock"]["properties"]["type"] = types
    _add_cases(definitions["OptimizerBlock"], "type", optimizers)
    model_block["properties"] = {
        "model_type": {"enum": list(ARCHITECTURES)},
        FROM_PRETRAINED: {"type": "string"},
    }
    _add_cases(model_block, "model_type", {name: _with_fields(name) for name in ARCHITECTURES})
    schema["properties"][SCHEMA] = {
        "type": "string",
        "description": "The path of this schema, for editors.",
    }
    return {
        **schema,
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": "A run of zero_tp",
        "description": "A DeepSpeed config and the zero_tp block.",
    }


def _add_cases(block: Json, key: str, cases: dict[str, Json]) -> None:
    """Add the schema for each value (a pattern) of `key`.

    Unlike `oneOf`, it reports the path of an error.
    """
    block["allOf"] = [
        {"if": {"properties": {key: {"pattern": f"^{value}$"}}, "required": [key]}, "then": then}
        for value, then in cases.items()
    ]


def _with_params(model: type[BaseModel], block: str = "scheduler") -> Json:
    params = model.model_json_schema()
    _adapt(params["properties"], f"{block}.params.")
    return {
        "properties": {"params": params},
        "required": ["params"] if "required" in params else [],
    }


def _with_fields(model_type: str) -> Json:
    """Return a schema that allows the fields of a model type.

    Those of every transformers config are included.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from zero_tp.model.architectures import ARCHITECTURES

    config_class = CONFIG_MAPPING[model_type]
    names = {
        "model_type",
        *inspect.get_annotations(config_class),
        *ARCHITECTURES[model_type].fields.undeclared,
    }
    # transformers accepts other names for some fields, such as num_hidden_layers for GPT-2's
    # n_layer.
    names |= {alias for alias, name in config_class.attribute_map.items() if name in names}
    return {"properties": dict.fromkeys(sorted(names), True), "additionalProperties": False}


def _adapt(properties: Json, path: str = "") -> None:
    """Allow "auto" where it can be resolved, and remove refused keys, in the block at `path`."""
    for name in list(properties):
        if path + name in REFUSED_KEYS:
            del properties[name]
        elif path + name in (*AUTO, *BATCH_FIELDS):
            properties[name] = {"anyOf": [properties[name], {"const": "auto"}]}
