"""Writes docs/config.md from the schema, the refusals and the resolvable "auto" keys.

`python -m tests.tools.config_page` prints the page; with `--write PATH` it writes it.
"""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from zero_tp.base.errors import shown
from zero_tp.base.settings.deepspeed import ConfigFile
from zero_tp.base.settings.optimizer import OPTIMIZERS, REFUSED_OPTIMIZERS
from zero_tp.base.settings.param_groups import KIND_MEANINGS, ParamGroup
from zero_tp.base.settings.refused import FIXED, REFUSED_KEYS
from zero_tp.base.settings.removed import REMOVED_KEYS
from zero_tp.base.settings.resolve import AUTO, BATCH_FIELDS
from zero_tp.base.settings.schedule import (
    DEEPSPEED_SCHEDULES,
    REFUSED_SCHEDULES,
    SCHEDULES,
    TRANSFORMERS_SCHEDULES,
)
from zero_tp.base.settings.schema import (
    Ema,
    MaskedObjective,
    RecomputePolicy,
    Spike,
    Timeouts,
    TrainingStage,
    ZeroTP,
)
from zero_tp.base.validation import fields_by_name, nested_model
from zero_tp.engine.settings.rule import Combination
from zero_tp.engine.settings.rules import rules
from zero_tp.model.architectures import ARCHITECTURES, Fields
from zero_tp.model.architectures.fields import FIXED_IN_EVERY_CONFIG, IRRELEVANT_IN_EVERY_CONFIG
from zero_tp.model.architectures.rotary import ROPE_KEYS
from zero_tp.run.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED_DOCS = "https://www.deepspeed.ai/docs/config-json/"
ANCHORS = {
    "zero_optimization": "zero-optimizations-for-fp16-training",
    "bf16": "bfloat16-training-options",
    "fp16": "fp16-training-options",
    "tensorboard": "monitoring-module",
    "wandb": "monitoring-module",
    "csv_monitor": "monitoring-module",
    "comet": "monitoring-module",
    "comms_logger": "communication-logging",
    "activation_checkpointing": "activation-checkpointing",
    "data_types": "data-type-options",
    "aio": "asynchronous-io",
    "flops_profiler": "flops-profiler",
}
NOTES = {
    "timers": "`throughput` is off by default, unlike in DeepSpeed, because it synchronises with "
    "the device twice a"
    " micro-batch",
    "data_types": 'with bf16 and many micro-batches a step, `grad_accum_dtype` `"fp32"` adds up '
    "gradients without"
    " rounding them to bf16 each time (after 256 equal micro-batches the norm is 0.8% off without "
    "it)",
}
TYPES = {
    **dict.fromkeys(("data.train", "data.validation"), "string or object"),
    "logging.trackers": "list of strings or object",
}
"""Types of keys that are converted as they are read."""
KEYS = ("key", "type", "default", "meaning")
NAMES = {int: "int", float: "number", bool: "bool", str: "string", type(None): "null"}


def page() -> str:
    """The whole of docs/config.md. The rows of refusals and notes are the same for every config."""
    config = RunConfig.load(ROOT / "ds_configs" / "quickstart.json").combination
    keys = [
        f"- the [batch sizes]({DEEPSPEED_DOCS}#batch-size-related-parameters), where"
        " `train_batch_size` = micro × accumulation × data, and data = world / "
        "`zero_tp.parallel.tensor`",
        f"- [`optimizer`]({DEEPSPEED_DOCS}#optimizer-parameters): {_listed(OPTIMIZERS)}"
        " ([muon.md](muon.md)). `Adam` "
        "means AdamW unless"
        " `adam_w_mode` is false. Weight decay skips biases and norms. Adam is torch's fused "
        "kernel where"
        " `torch_adam`, `fused` and `foreach` are left out and nothing is offloaded; DeepSpeed's "
        "FusedAdam"
        " (`torch_adam` false) and its CPUAdam of offloaded states need a C++ compiler, on CUDA"
        " devices `nvcc` too, and are compiled when a machine first needs them, which a line says. "
        "They may change"
        " when a run is resumed.",
        f"- [`scheduler`]({DEEPSPEED_DOCS}#scheduler-parameters): DeepSpeed's "
        f"{_listed(DEEPSPEED_SCHEDULES)},"
        f" and transformers' {_listed(TRANSFORMERS_SCHEDULES)}. Step k, from 1, trains at the "
        "value of their own"
        " class at k: a linear warm-up of 100 steps reaches its rate at step 100, a logarithmic "
        "one at step 99."
        " `WarmupCosineLR` already falls in the last step of its warm-up, and is at its end one "
        "step before"
        " `total_num_steps`. DeepSpeed itself is two steps later, and trains steps 1 and 2 at rate "
        "0; so do"
        " transformers' Trainer and [`ZeroTPTrainer`](python.md#trainer), which take DeepSpeed's "
        "five only. A resumed"
        " run trains at the rate of its own config at that step;"
        " `zero-tp check` prints the rates of some steps.",
        *(
            f"- {_block(name)}"
            for name, field in ConfigFile.model_fields.items()
            if _is_block(name, field)
        ),
    ]
    blocks = [
        "# The config file",
        "<!-- `python -m tests.tools.config_page --write docs/config.md` writes this: change the "
        "code instead. -->",
        "One JSON file is one run: a DeepSpeed config plus the `zero_tp` block. Every key is "
        "checked before the run"
        " starts, DeepSpeed's too; `zero-tp check FILE [--world-size N]` checks alone, and"
        " `--set KEY=VALUE` overrides any key. A check reports every key that is wrong by itself, "
        "and once there is"
        " none, every combination and sum: exit status 2. Status 1 means that FILE is valid, but "
        "that a corpus,"
        " directory or file which a run reads is missing on this machine and no name on the hub; so"
        " `zero-tp check FILE && sbatch …` submits what can start. `zero-tp schema` prints a JSON "
        "schema, by which"
        ' an editor completes and checks the file: `"$schema": "zero_tp.schema.json"` names it.'
        " `zero-tp check FILE --explain KEY` prints a key's value, where it comes from (the file, "
        "`--set`,"
        ' `"auto"` or the default), what reads it, and the rules about it.',
        "## The `zero_tp` block",
        _table(KEYS, _rows(ZeroTP, "")),
        "`recompute` as an object ([training.md](training.md#activation-memory) says what each "
        "choice keeps):",
        _table(KEYS, _rows(RecomputePolicy, "recompute.")),
        "`objective` as an object; `masked` alone has these defaults:",
        _table(KEYS, _rows(MaskedObjective, "objective.")),
        "`training.spike` ([training.md](training.md#checks-during-training)):",
        _table(KEYS, _rows(Spike, "training.spike.")),
        "`training.stages` ([recipes.md](recipes.md#stages)):",
        _table(KEYS, _rows(TrainingStage, "training.stages[].")),
        "`training.ema` ([recipes.md](recipes.md#averaged-weights)):",
        _table(KEYS, _rows(Ema, "training.ema.")),
        "`training.timeout_minutes` as an object:",
        _table(KEYS, _rows(Timeouts, "training.timeout_minutes.")),
        "### `param_groups`",
        "Each entry selects parameters by `kind` or by `pattern`. The first entry that matches a "
        "parameter has it; the others train as without the key, where embeddings, output layer, "
        "routers and matrices decay. For example, OLMo 3 and SmolLM3 do not decay embeddings "
        "([`llama_135m_no_embedding_decay.json`](../ds_configs/llama_135m_no_embedding_decay.json)):",
        '```json\n"param_groups": [{"kind": "embedding", "weight_decay": 0}]\n```',
        _table(KEYS, _rows(ParamGroup, "param_groups[].")),
        _table(("kind", "parameters"), _quoted(KIND_MEANINGS)),
        "An entry that matches nothing is refused. So is a pattern that matches a part of a "
        "parameter: Q, K and V are one where there are as many KV heads as heads, gate and up are "
        "one, and so are the experts of a layer. `zero-tp check` prints each group. Like the rest "
        "of the optimizer, the groups of a run cannot change when it is resumed; a run that starts "
        "`--from` another has its own. `learning_rate` in logs is the rate without a factor.",
        "### `model`",
        *_models(),
        "## DeepSpeed's part",
        "The keys keep the names and the meaning of [DeepSpeed's "
        f"documentation]({DEEPSPEED_DOCS}):",
        "\n".join(keys),
        '### `"auto"`',
        f"The batch sizes ({_listed(BATCH_FIELDS)}) are worked out from each other. Besides:",
        _table(("key", "means"), _quoted(AUTO)),
        '`"auto"` for any other key is an error.',
        "A schedule of n steps is at its end, often rate 0, at step n; one step more than the run "
        "has leaves that"
        " out (except for `WarmupCosineLR`, whose last step trains at `cos_min_ratio`). Steps "
        "after the end keep"
        " its rate. When a run is resumed with other `training.steps`, the length follows them "
        "until the rate has"
        " begun to fall, and stays from then on; a line of the log says which. So a run with "
        "`warmup_stable_decay`"
        " may be made longer or begin its decay at any checkpoint of the stable phase.",
        "### `scheduler.params`",
        "A run's file may give `warmup_tokens` and `decay_tokens` instead of the steps of these "
        "phases ([recipes.md](recipes.md#schedules-in-tokens)).",
        _table(
            ("type", "parameters and defaults"),
            ((f"`{name}`", _params(m)) for name, m in SCHEDULES.items()),
        ),
        "## What is refused",
        "### Combinations",
        _table(("key", "refused", "reason", "instead"), _refusals(config)),
        "### Keys",
        _table(("key", "reason", "instead"), (_refused_key(*row) for row in REFUSED_KEYS.items())),
        "### Optimizers",
        _table(("type", "reason"), _quoted(REFUSED_OPTIMIZERS)),
        "### Schedules",
        _table(("type", "reason"), _quoted(REFUSED_SCHEDULES)),
        f"`zero_tp.model.model_type` other than {_listed(sorted(ARCHITECTURES))}.",
        "### Accepted without effect",
        "A key that changes nothing may stay; `zero-tp check` and the run's first lines name it.",
        _table(("keys", "when"), _notes(config, "no effect")),
        "### Accepted with a note",
        _table(("key", "note"), _notes(config, "note")),
        "### Removed keys",
        "Files and checkpoints of earlier versions may have these keys at their last default, "
        "which a note names."
        " Another value is refused.",
        _table(("key", "last default", "instead of another value"), _removed()),
    ]
    return "\n\n".join(blocks) + "\n"


def _refusals(config: Combination) -> Iterator[tuple[str, ...]]:
    texts = [
        (key, f"unless it is {shown(value)}: {reason}") for key, (value, reason) in FIXED.items()
    ]
    texts += [(rule.keys, rule.reason) for rule in rules(config) if rule.kind == "refused"]
    for key, text in texts:
        problem, _, remedy = text.partition("; ")
        when, _, reason = problem.partition(": ")
        yield f"`{key}`", when, reason, remedy or "leave it out"


def _removed() -> Iterator[tuple[str, ...]]:
    return (
        (f"`{key}`", f"`{shown(entry.default)}`", entry.remedy)
        for key, entry in REMOVED_KEYS.items()
    )


def _refused_key(key: str, text: str) -> tuple[str, ...]:
    reason, _, remedy = text.partition("; ")
    return f"`{key}`", reason, remedy or "leave it out"


def _notes(config: Combination, kind: str) -> Iterator[tuple[str, ...]]:
    return ((_patterns(rule.keys), rule.reason) for rule in rules(config) if rule.kind == kind)


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, ...]]:
    for name, field in fields_by_name(model).items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(field.annotation, f"{prefix}{name}.")
            continue
        key = f"{prefix}{name}"
        yield (
            f"`{key}`",
            TYPES.get(key) or _type_name(field.annotation),
            _default(field),
            field.description or "",
        )


def _params(model: type[BaseModel]) -> str:
    return (
        ", ".join(f"`{name}` ({_default(field)})" for name, field in model.model_fields.items())
        or "none"
    )


def _type_name(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " / ".join(f"`{shown(option)}`" for option in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(option) for option in inner)
    if origin is typing.Annotated:
        return _type_name(inner[0])
    if origin is list:
        return f"list of {_type_name(inner[0])}s"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "object"
    return NAMES[annotation]


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default" in extra:
        return f"{extra['default']}"
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "none" if value is None or value is PydanticUndefined else f"`{shown(value)}`"


def _models() -> Iterator[str]:
    lines = {name: _field_lines(table.fields) for name, table in ARCHITECTURES.items()}
    causal = [name for name, table in ARCHITECTURES.items() if table.causal]
    of_decoders = [line for line in lines[causal[0]] if all(line in lines[one] for one in causal)]
    yield (
        "Each `model_type` has the fields of transformers' own config class, under its names. In "
        "each decoder:"
    )
    yield "\n".join(of_decoders)
    for name, architecture in ARCHITECTURES.items():
        of_decoder = of_decoders if architecture.causal else []
        own = [line for line in lines[name] if line not in of_decoder]
        yield "\n".join((f"`{name}` ({architecture.native_class}){':' if own else ''}", "", *own))
    yield (
        f"`rope_parameters.rope_type` is one of {_listed(ROPE_KEYS)}; a key that the type does not "
        "read is refused."
    )
    yield (
        '`{"from_pretrained": DIR}`: config and weights of a Hugging Face directory of '
        "safetensors, relative to the"
        " working directory; the same rules hold for its `config.json`. A field that transformers' "
        "class neither"
        " declares nor reads is ignored, with a note. Beside `from_pretrained` only dropout "
        "probabilities,"
        " `output_router_logits` and `router_aux_loss_coef` can be given. Each rank reads its "
        "slices of the weights. A"
        " run that resumes takes its weights from the checkpoint, and where DIR is gone its config "
        "too."
    )
    yield (
        "Any other field must have its class's default. Whatever the model_type, in a written "
        "model, a `config.json` "
        "and a config object:"
    )
    yield "\n".join(_fixed(FIXED_IN_EVERY_CONFIG))
    yield (
        "These may be in a `config.json` and change nothing: "
        f"{_listed(name for name in IRRELEVANT_IN_EVERY_CONFIG)}; so may what `GenerationConfig` "
        "declares."
    )


def _field_lines(fields: Fields) -> list[str]:
    """Return a line for the choices, and for each fixed field and reason to ignore fields."""
    lines = [
        f"- `{field}` is one of {_listed(options)}" for field, options in fields.choices.items()
    ]
    lines += _fixed(fields.fixed)
    for reason in dict.fromkeys(fields.irrelevant.values()):
        ignored = [field for field, why in fields.irrelevant.items() if why == reason]
        lines.append(f"- {_listed(ignored)}: accepted, {reason}")
    return lines


def _fixed(fields: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    return (
        f"- `{field}` stays `{shown(value)}`: {reason}" for field, (value, reason) in fields.items()
    )


def _is_block(name: str, field: FieldInfo) -> bool:
    """Whether a key holds a block of DeepSpeed's that has no line of its own."""
    return nested_model(field.annotation) is not None and name not in (
        "optimizer",
        "scheduler",
        "zero_tp",
    )


def _block(name: str) -> str:
    anchor = ANCHORS.get(name)
    note = f": {NOTES[name]}" if name in NOTES else ""
    return (f"[`{name}`]({DEEPSPEED_DOCS}#{anchor})" if anchor else f"`{name}`") + note


def _listed(names: typing.Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _quoted(meanings: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    return ((f"`{name}`", meaning) for name, meaning in meanings.items())


def _patterns(patterns: str) -> str:
    """The patterns of keys as a reader writes them: a class of letters is part of a star."""
    return _listed(
        dict.fromkeys(re.sub(r"\w?\[!\w\]\*", "*", pattern) for pattern in patterns.split())
    )


def _table(head: tuple[str, ...], rows: typing.Iterable[tuple[str, ...]]) -> str:
    cells = (
        [re.sub(r"\|", r"\\|", cell) for cell in row] for row in (head, ("---",) * len(head), *rows)
    )
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description="Generate docs/config.md.")
    parser.add_argument(
        "--write", type=Path, metavar="PATH", help="write the page there instead of printing it"
    )
    path = parser.parse_args().write
    if path:
        path.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
