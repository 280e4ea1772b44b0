"""Read a config file, fill in what it leaves open, and check the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zero_tp.config.deepspeed import OFF_BLOCKS, check_names, refuse_auto
from zero_tp.config.model import FROM, check_model, check_recompute
from zero_tp.config.optimizer import choose_implementation
from zero_tp.config.refusals import check_deepspeed
from zero_tp.config.resolve import (
    BATCH_FIELDS,
    BatchSizes,
    apply_overrides,
    check_numbers,
    look_up,
    resolve_auto,
    resolve_batch,
)
from zero_tp.config.schema import ZeroTP
from zero_tp.config.view import View
from zero_tp.constants import MODEL_KEY
from zero_tp.errors import ConfigError
from zero_tp.strict_json import read_json
from zero_tp.topology import data_parallel_size
from zero_tp.validation import refuse_nul, validate
from zero_tp.weights.files import pin_to_first_start, pinned

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SCHEMA, TOKENIZER_KEY = "$schema", "zero_tp.tokenizer"
MOST_SAMPLES = 2**31 - 1
"""Samples of a step, and tokens of a forward: kernels count in 32 bits."""


class LoadedConfig(NamedTuple):
    """The parts of a checked config.

    Attributes:
        zero_tp: the `zero_tp` block.
        batch: the batch sizes; parts are None when they depend on a world size that isn't known.
        deepspeed: the rest of the file, filled in.
        hf_config: of the model.
    """

    zero_tp: ZeroTP
    batch: BatchSizes
    deepspeed: dict[str, Any]
    hf_config: PreTrainedConfig


def load(
    path: Path,
    overrides: Sequence[str],
    world_size: int | None,
    frozen: dict[str, Any] | None,
    saved_model: dict[str, Any] | None,
) -> LoadedConfig:
    """Read and check a config file. Arguments and errors: see `RunConfig.load`."""
    raw = read_json(path)
    apply_overrides(raw, overrides)
    refuse_nul(raw)
    _take_schema(raw)
    check_numbers(raw)
    check_names(raw)
    if "zero_tp" not in raw:
        raise ConfigError("zero_tp", "required, but not given", "add the block that docs/config.md describes")
    refuse_auto(raw["zero_tp"], "zero_tp")
    zero_tp = validate(ZeroTP, raw.pop("zero_tp"), "zero_tp")
    data = None if world_size is None else data_parallel_size(world_size, zero_tp.parallel.tensor)
    key = f"{MODEL_KEY}.{FROM}"
    if FROM in zero_tp.model:
        zero_tp.model[FROM] = pin_to_first_start(zero_tp.model[FROM], look_up(frozen, key))
    hf_config = check_model(zero_tp, saved_model)
    if FROM in zero_tp.model:
        zero_tp.model[FROM] = pinned(zero_tp.model[FROM], key)
    if zero_tp.tokenizer is not None:
        begun = {"tokenizer": pin_to_first_start(zero_tp.tokenizer, look_up(frozen, TOKENIZER_KEY))}
        zero_tp = zero_tp.model_copy(update=begun)
    resolve_auto(raw, zero_tp.training.steps, hf_config.hidden_size, frozen)
    choose_implementation(raw)
    check_deepspeed(View(raw, zero_tp))
    batch = resolve_batch(raw, data)
    _check_tokens(batch, zero_tp.data.sequence_length)
    check_recompute(raw, zero_tp, hf_config.num_hidden_layers, batch.accumulation)
    raw = {key: value for key, value in raw.items() if key not in OFF_BLOCKS}  # some are on by being there
    raw.setdefault("gradient_clipping", 1.0)
    if "scheduler" in raw:
        raw["scheduler"].setdefault("params", {})  # DeepSpeed takes them to be there
    for key, field in BATCH_FIELDS.items():
        if getattr(batch, field) is not None:
            raw[key] = getattr(batch, field)
    return LoadedConfig(zero_tp, batch, raw, hf_config)


def _take_schema(raw: dict[str, Any]) -> None:
    """Take out what tells an editor where the schema is: it is nothing of a run."""
    if not isinstance(raw.pop(SCHEMA, ""), str):
        raise ConfigError(SCHEMA, "expected a string", "give the path of what `zero-tp schema` prints, or leave it out")


def _check_tokens(batch: BatchSizes, length: int) -> None:
    for key, field in BATCH_FIELDS.items():
        size = getattr(batch, field) or 0
        if size > MOST_SAMPLES:
            raise ConfigError(key, f"{size} samples, but at most 2^31 - 1 are counted", "use fewer")
    if (batch.micro or 0) * length > MOST_SAMPLES:
        problem = f"micro {batch.micro} × sequence length {length} are more than 2^31 - 1 tokens in one forward"
        raise ConfigError("train_micro_batch_size_per_gpu", problem, "use fewer, and accumulate")
