"""RunConfig is the typed, validated view of one JSON file."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.config.deepspeed import MONITORS, OFF_BLOCKS, check_names, check_values, refuse_auto
from zero_tp.config.model import FROM, check_model, check_recompute
from zero_tp.config.optimizer import choose_implementation
from zero_tp.config.refusals import check_refusals, without_effect
from zero_tp.config.resolve import (
    BATCH_FIELDS,
    BatchSizes,
    apply_overrides,
    check_numbers,
    dtype_name,
    look_up,
    resolve_auto,
    resolve_batch,
)
from zero_tp.config.schema import ZeroTP
from zero_tp.constants import MODEL_KEY
from zero_tp.errors import ConfigError
from zero_tp.strict_json import read_json
from zero_tp.topology import data_parallel_size
from zero_tp.validation import validate
from zero_tp.weights.files import as_begun, is_cached, is_name, pinned

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SCHEMA, TOKENIZER_KEY = "$schema", "zero_tp.tokenizer"
MOST_SAMPLES = 2**31 - 1
"""Samples of a step, and tokens of a forward: kernels count in 32 bits."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A run's config is a DeepSpeed config and its `zero_tp` block, checked as a whole; `load` makes it.

    Attributes:
        path: the JSON file.
        zero_tp: the `zero_tp` block.
        world_size: number of ranks, or None when the config was checked without one.
        batch: the batch sizes; parts are None when they depend on a world size that isn't known.
    """

    path: Path
    zero_tp: ZeroTP
    world_size: int | None
    batch: BatchSizes
    _deepspeed: dict[str, Any] = dataclasses.field(repr=False)
    _hf_config: PreTrainedConfig = dataclasses.field(repr=False)

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        world_size: int | None = None,
        frozen: dict[str, Any] | None = None,
        saved_model: dict[str, Any] | None = None,
    ) -> RunConfig:
        """Read and check a config file.

        Args:
            path: the JSON file.
            overrides: `KEY=VALUE` with a dotted KEY and VALUE in JSON, or else a string.
            world_size: number of ranks; None checks all that doesn't need it.
            frozen: `resolved()` of the run's first start, which decided the length of an "auto" schedule.
            saved_model: the model's config in the run's checkpoint, for when the directory of `from_pretrained`, which
                a run needs to start and not to go on, is gone.

        Raises:
            ConfigError: the file can't be read, or the run can't be started as it is written.
        """
        path = Path(path)
        raw = read_json(path)
        apply_overrides(raw, overrides)
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
            zero_tp.model[FROM] = as_begun(zero_tp.model[FROM], look_up(frozen, key))
        hf_config = check_model(zero_tp, saved_model)
        if FROM in zero_tp.model:
            zero_tp.model[FROM] = pinned(zero_tp.model[FROM], key)
        if zero_tp.tokenizer is not None:
            begun = {"tokenizer": as_begun(zero_tp.tokenizer, look_up(frozen, TOKENIZER_KEY))}
            zero_tp = zero_tp.model_copy(update=begun)
        resolve_auto(raw, zero_tp.training.steps, hf_config.hidden_size, frozen)
        choose_implementation(raw)
        check_values(raw)
        batch = resolve_batch(raw, data)
        _check_tokens(batch, zero_tp.data.sequence_length)
        check_refusals(raw, zero_tp)
        check_recompute(raw, zero_tp, hf_config.num_hidden_layers, batch.accumulation)
        raw = {key: value for key, value in raw.items() if key not in OFF_BLOCKS}  # some are on by being there
        raw.setdefault("gradient_clipping", 1.0)
        if "scheduler" in raw:
            raw["scheduler"].setdefault("params", {})  # DeepSpeed takes them to be there
        for key, field in BATCH_FIELDS.items():
            if getattr(batch, field) is not None:
                raw[key] = getattr(batch, field)
        return cls(path, zero_tp, world_size, batch, raw, hf_config)

    def pinned(self) -> RunConfig:
        """Return the config with the commit of its tokenizer, where that is a name on the hub, which is asked for it.

        Raises:
            ConfigError: there is no such directory, and the hub does not give it.
        """
        if self.zero_tp.tokenizer is None:
            return self
        named = {"tokenizer": pinned(self.zero_tp.tokenizer, TOKENIZER_KEY)}
        return dataclasses.replace(self, zero_tp=self.zero_tp.model_copy(update=named))

    @property
    def name(self) -> str:
        """Return the file's name without its ending: the run directory's default name."""
        return self.path.stem

    @property
    def data_parallel(self) -> int:
        """Return the number of replicas: world size / tensor. Needs a world size."""
        return _known(self.batch.data_parallel)

    @property
    def micro_batch(self) -> int:
        """Return the samples of one forward on one replica. Needs a world size."""
        return _known(self.batch.micro)

    @property
    def accumulation(self) -> int:
        """Return the forwards of one optimizer step on one replica. Needs a world size."""
        return _known(self.batch.accumulation)

    @property
    def global_batch(self) -> int:
        """Return the samples of one optimizer step. Needs a world size."""
        return _known(self.batch.total)

    @property
    def zero_stage(self) -> int:
        return int(self._deepspeed.get("zero_optimization", {}).get("stage", 0))

    @property
    def nvme_paths(self) -> dict[str, Path]:
        """Return the directories of the offload blocks whose device is "nvme", by the block's name."""
        zero = self._deepspeed.get("zero_optimization", {})
        blocks = {name: zero.get(name) or {} for name in ("offload_optimizer", "offload_param")}
        return {name: Path(block["nvme_path"]) for name, block in blocks.items() if block.get("device") == "nvme"}

    def absent(self) -> list[Path]:
        """Return the files and directories that a run of this config reads and that are not on this machine, nor in its
        cache of the hub."""
        data, evaluation = self.zero_tp.data, self.zero_tp.evaluation
        corpora = [*data.train, *(data.validation or {})]
        named = [Path(f"{prefix}.{ending}") for prefix in corpora for ending in ("bin", "idx")]
        others = (self.zero_tp.tokenizer, evaluation.task_include_path, *evaluation.task_data.values())
        named += [Path(each) for each in others if each is not None and each not in self.on_hub]
        named += [Path(name) for name, weights in self.on_hub.items() if not is_cached(name, weights=weights)]
        return [path for path in (*named, *self.nvme_paths.values()) if not os.path.exists(path)]

    @property
    def on_hub(self) -> dict[str, bool]:
        """Return the names on the hub that a run takes something of, and whether its weights."""
        given = {self.zero_tp.tokenizer: False, self.zero_tp.model.get(FROM): True}
        return {name: weights for name, weights in given.items() if name is not None and is_name(name)}

    @property
    def dtype(self) -> str:
        """Return "fp32", "bf16" or "fp16": the dtype of the model's weights and activations."""
        return dtype_name(self._deepspeed)

    def deepspeed_config(self) -> dict[str, Any]:
        """Return a new dict for `deepspeed.initialize`: no `zero_tp`, "auto" or monitors, all batch sizes. Needs a
        world size."""
        _known(self.world_size)
        return copy.deepcopy({key: value for key, value in self._deepspeed.items() if key not in MONITORS})

    def resolved(self) -> dict[str, Any]:
        """Return the whole config with every default of `zero_tp` and every "auto" filled in; it loads again."""
        return {**copy.deepcopy(self._deepspeed), "zero_tp": self.zero_tp.model_dump(mode="json", by_alias=True)}

    @property
    def labelled(self) -> float:
        """Return the share of a sample's tokens that have labels."""
        masked = self.zero_tp.masked
        return 1.0 if masked is None else masked.mask_probability

    def without_effect(self) -> list[str]:
        """Return a line for each setting that changes nothing in this run."""
        return without_effect(self._deepspeed, self.zero_tp)

    @property
    def pretrained(self) -> Path | None:
        """Return the Hugging Face directory that the weights start from, or its name on the hub with the commit; None
        when they are drawn from the seed."""
        return Path(self.zero_tp.model[FROM]) if FROM in self.zero_tp.model else None

    def hf_config(self) -> PreTrainedConfig:
        """Return a new Hugging Face config object of `zero_tp.model`, with `zero_tp.attention` as its attention and, of
        an encoder without a sentence head, the class that has none."""
        config = copy.deepcopy(self._hf_config)
        config._attn_implementation = self.zero_tp.attention
        masked = self.zero_tp.masked
        if masked is not None and not masked.sentence_order:
            from zero_tp.models.architectures import architecture_of

            config.architectures = [str(architecture_of(config).without_sentences)]
        return config


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


def _known(size: int | None) -> int:
    assert size is not None, "RunConfig.load needs a world_size for this"
    return size


def describe(config: RunConfig) -> str:
    """Return what `pretrain.py --check` prints about a config that is right."""
    block, batch, raw = config.zero_tp, config.batch, config.resolved()
    tensor, length, steps = block.parallel.tensor, block.data.sequence_length, block.training.steps
    model = config.hf_config()
    sequence = ", sequence parallel" if block.parallel.sequence else ""
    if config.world_size is None:
        ranks = f"a multiple of {tensor} (tensor {tensor} × data ?){sequence}; --world-size N checks the sums"
    else:
        ranks = f"{config.world_size} = tensor {tensor} × data {config.data_parallel}{sequence}"
    factors = (("micro", batch.micro), ("accumulation", batch.accumulation), ("data", batch.data_parallel))
    product = " × ".join(f"{name} {_number(size)}" for name, size in factors)
    params = raw["optimizer"].get("params", {})
    scheduler = raw.get("scheduler", {}).get("type", "none")
    tokens = "?" if batch.total is None else f"{batch.total * length:,}"
    total = "?" if batch.total is None else f"{batch.total * length * steps:,}"
    kind = f"{model.model_type}, {model.num_hidden_layers} layers, hidden {model.hidden_size}"
    weights = f" from {config.pretrained}" if config.pretrained else ""
    lines = (
        ("config", f"{config.path} is right"),
        ("model", f"{kind}, {model.num_attention_heads} heads, vocabulary {model.vocab_size:,}{weights}"),
        ("ranks", ranks),
        ("ZeRO", f"stage {config.zero_stage}, {config.dtype}"),
        ("batch", f"{_number(batch.total)} samples = {product}"),
        ("optimizer", f"{raw['optimizer']['type']}, lr {params['lr']:g}, clip {raw['gradient_clipping']:g}"),
        ("schedule", scheduler),
        ("steps", f"{steps:,} of {tokens} tokens (sequence length {length:,}): {total} tokens"),
    )
    notes = [("no effect", text) for text in config.without_effect()]
    for path in config.absent():
        asked = " and asks the Hugging Face hub for" if str(path) in config.on_hub else ""
        notes.append(("not here", f"{path}, which a run needs{asked}"))
    return "\n".join(f"{name:<10} {text}" for name, text in (*lines, *notes))


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)
