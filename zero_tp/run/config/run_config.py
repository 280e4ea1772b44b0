"""The typed, validated view of one JSON file."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError, did_you_mean
from zero_tp.base.settings.deepspeed import MONITORS, DeepSpeedSettings
from zero_tp.base.settings.optimizer import choose_implementation
from zero_tp.base.settings.refused import use_current_names
from zero_tp.base.settings.removed import drop_removed_keys
from zero_tp.base.settings.resolve import (
    BATCH_FIELDS,
    BatchSizes,
    SavedStart,
    apply_overrides,
    check_leaves,
    fill,
    look_up,
    pop_autos,
    resolve_batch,
    unresolvable_autos,
)
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.base.shipped import config_names
from zero_tp.base.strict_json import read_json
from zero_tp.base.validation import ErrorCollector, validate
from zero_tp.base.weight_files import is_cached, is_hub_name, pin_commit, pin_to_first_start
from zero_tp.engine.settings.parse import parse_settings
from zero_tp.engine.settings.rule import Combination
from zero_tp.engine.settings.rules import notes, refuse
from zero_tp.parallel.topology import check_expert_size, data_parallel_size
from zero_tp.run.config.model_block import (
    FROM_PRETRAINED,
    check_model,
    ignored_fields,
    model_config,
    router_bias_note,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from zero_tp.engine.param_groups import ParameterGroup


SCHEMA = "$schema"
TOKENIZER_KEY = "zero_tp.tokenizer"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A DeepSpeed config with a `zero_tp` block, checked as a whole. Create it by `load`.

    Attributes:
        path: the JSON file.
        world_size: number of ranks, or None when the config was checked without one.
        batch: the batch sizes; a size that depends on an unknown world size is None.
        settings: DeepSpeed's part, with "auto" and batch sizes filled in.
        zero_tp: the `zero_tp` block.
    """

    path: Path
    world_size: int | None
    batch: BatchSizes
    settings: DeepSpeedSettings = dataclasses.field(repr=False)
    zero_tp: ZeroTP = dataclasses.field(repr=False)
    _hf_config: PreTrainedConfig = dataclasses.field(repr=False)
    _load_notes: Sequence[str] = ()

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        world_size: int | None = None,
        saved: SavedStart | None = None,
    ) -> RunConfig:
        """Read a config file, check its types, fill in defaults and check combinations.

        Args:
            path: the JSON file.
            overrides: `KEY=VALUE` with a dotted KEY and VALUE in JSON, or else a string.
            world_size: number of ranks; without it, what depends on it is not checked.
            saved: the state that a resumed run continues from.

        Raises:
            ConfigError: the file can't be read.
            ConfigErrors: all keys that are wrong by themselves or, if there are none, all refused
                combinations.
        """
        path = Path(path)
        # `did_you_mean` lists all names if none is similar.
        suggestion = "" if path.exists() else did_you_mean(str(path), config_names())
        remedy = "give the path of a JSON config, or a name of ds_configs"
        remedy += f": {suggestion}" if "?" in suggestion else ""
        values = read_json(path, remedy)
        apply_overrides(values, overrides)
        values, removed = drop_removed_keys(values)
        check_leaves(values)
        if not isinstance(values.pop(SCHEMA, ""), str):  # for editors
            raise ConfigError(
                SCHEMA, "expected a string", "give the path of the schema, or leave it out"
            )
        use_current_names(values)
        # "auto" is a string, which the types of most keys refuse. So these keys are absent until
        # their values are known.
        auto_keys = pop_autos(values)
        # The optimizer's class decides which params are valid, so it is chosen before types are
        # checked.
        choose_implementation(values)

        # 1. Types: errors of single keys. An "auto" has no value yet.
        block = values.pop("zero_tp", None)
        zero_tp, hf_config, batch = _check_keys(values, block, auto_keys, world_size, saved)

        # 2. Fill in defaults, "auto" and batch sizes.
        # Steps first: the length of a schedule may be "auto", which is the number of steps.
        zero_tp = _fill_steps(zero_tp, batch.total)
        lines = fill(values, auto_keys, batch, zero_tp.training.steps, hf_config.hidden_size, saved)
        settings = parse_settings(values)

        # 3. Refuse: combinations that would train another model, or cannot be trained.
        refuse(Combination.of_run(settings, zero_tp, hf_config.num_hidden_layers))
        config = cls(path, world_size, batch, settings, zero_tp, hf_config, (*removed, *lines))
        if zero_tp.param_groups:
            config.parameter_groups()  # raises what is wrong with them
        return config

    def with_pinned_tokenizer(self) -> RunConfig:
        """Return the config with the commit of its tokenizer.

        The hub is asked if the tokenizer is a name there.
        """
        if self.zero_tp.tokenizer is None:
            return self
        zero_tp = self.zero_tp.model_copy(
            update={"tokenizer": pin_commit(self.zero_tp.tokenizer, TOKENIZER_KEY)}
        )
        return dataclasses.replace(self, zero_tp=zero_tp)

    @property
    def name(self) -> str:
        """Return the file's name without its ending: the run directory's default name."""
        return self.path.stem

    @property
    def data_parallel(self) -> int:
        """Return the number of replicas: world size / tensor. Needs a world size."""
        return _required(self.batch.data_parallel)

    @property
    def micro_batch(self) -> int:
        """Return the samples of one forward on one replica. Needs a world size."""
        return _required(self.batch.micro)

    @property
    def accumulation(self) -> int:
        """Return the forwards of one optimizer step on one replica. Needs a world size."""
        return _required(self.batch.accumulation)

    @property
    def global_batch(self) -> int:
        """Return the samples of one optimizer step. Needs a world size."""
        return _required(self.batch.total)

    @property
    def zero_stage(self) -> int:
        return self.settings.stage

    @property
    def nvme_paths(self) -> dict[str, Path | None]:
        """Return the directories of NVMe offload, by the name of their block.

        Only blocks whose device is "nvme" have one.
        """
        return self.settings.zero_optimization.nvme_paths

    def missing_files(self) -> list[Path]:
        """Return the files and directories that the run reads but that are missing.

        What the hub's cache has is not missing.
        """
        data = self.zero_tp.data
        evaluation = self.zero_tp.evaluation
        corpora = [*data.train, *(data.validation or {})]
        named = [Path(f"{prefix}.{ending}") for prefix in corpora for ending in ("bin", "idx")]
        others = (
            self.zero_tp.tokenizer,
            evaluation.task_include_path,
            *evaluation.task_data.values(),
        )
        named += [Path(name) for name in others if name is not None and name not in self.hub_names]
        named += [
            Path(name)
            for name, weights in self.hub_names.items()
            if not is_cached(name, weights=weights)
        ]
        named += [path for path in self.nvme_paths.values() if path is not None]
        return [path for path in named if not os.path.exists(path)]

    @property
    def hub_names(self) -> dict[str, bool]:
        """Return the hub names that a run reads, and whether it reads their weights."""
        names = {self.zero_tp.tokenizer: False, self.zero_tp.model.get(FROM_PRETRAINED): True}
        return {
            name: weights
            for name, weights in names.items()
            if name is not None and is_hub_name(name)
        }

    @property
    def dtype(self) -> str:
        """Return "fp32", "bf16" or "fp16": the dtype of the model's weights and activations."""
        return self.settings.dtype

    @property
    def engine_settings(self) -> DeepSpeedSettings:
        """Return the settings of `TrainingEngine`: without monitors. Needs a world size."""
        _required(self.world_size)
        return self.settings.without(*MONITORS)

    def resolved(self) -> dict[str, Any]:
        """Return the whole config as a dict that can be loaded again.

        Every default of `zero_tp` and every "auto" is filled in.
        """
        return {
            **self.settings.written(),
            "zero_tp": self.zero_tp.model_dump(mode="json", by_alias=True),
        }

    @property
    def label_fraction(self) -> float:
        """Return the share of a sample's tokens that have labels."""
        masked = self.zero_tp.masked
        return 1.0 if masked is None else masked.mask_probability

    @property
    def combination(self) -> Combination:
        """Return the settings that the rules judge together."""
        return Combination.of_run(self.settings, self.zero_tp, self._hf_config.num_hidden_layers)

    def without_effect(self) -> list[str]:
        """Return a line for each setting that changes nothing in this run."""
        return notes(self.combination, "no effect")

    def cautions(self) -> list[str]:
        """Return a line for each unusual setting, and for each removed key."""
        return [
            *self._load_notes,
            *notes(self.combination, "note"),
            *ignored_fields(self.zero_tp.model),
            *router_bias_note(self.zero_tp, self._hf_config),
        ]

    @property
    def pretrained(self) -> Path | None:
        """Return where the initial weights are; None for random weights.

        It is a Hugging Face directory, or a hub name with its commit.
        """
        return (
            Path(self.zero_tp.model[FROM_PRETRAINED])
            if FROM_PRETRAINED in self.zero_tp.model
            else None
        )

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the optimizer's groups of all parameters of the model."""
        # Only here: it loads the layers' classes.
        from zero_tp.engine.param_groups import config_groups

        assert self.settings.optimizer is not None, "a run's config has one"
        params = self.settings.optimizer.params
        return config_groups(self.hf_config(), self.zero_tp.param_groups, params)

    def hf_config(self) -> PreTrainedConfig:
        """Return a new Hugging Face config of `zero_tp.model` with `zero_tp.attention`.

        For an encoder without a sentence head, `architectures` names the class without one.
        """
        # A copy, because callers and transformers change its fields.
        config = copy.deepcopy(self._hf_config)
        config._attn_implementation = self.zero_tp.attention
        masked = self.zero_tp.masked
        if masked is not None and not masked.sentence_order:
            from zero_tp.model.architectures import architecture_of

            config.architectures = [str(architecture_of(config).masked_lm_class)]
        return config


def _required(size: int | None) -> int:
    assert size is not None, "RunConfig.load needs a world_size for this"
    return size


def _check_keys(
    values: dict[str, Any],
    block: Any,
    auto_keys: Sequence[str],
    world_size: int | None,
    saved: SavedStart | None,
) -> tuple[ZeroTP, PreTrainedConfig, BatchSizes]:
    """Check every key by itself.

    Returns the `zero_tp` block, the model's config and the batch sizes.

    Args:
        values: DeepSpeed's part.
        block: the `zero_tp` block.
    """
    collector = ErrorCollector()
    zero_tp = None
    hf_config = None
    batch = None
    data = None
    with collector:
        # Each block of this function adds its errors to the collector, so that one start shows all
        # wrong keys.
        # Only for its errors: the sections are made after `fill`.
        parse_settings(values, auto_keys=auto_keys)
    with collector:
        zero_tp = _check_block(block)
    if zero_tp is not None and world_size is not None:
        with collector:
            data = data_parallel_size(world_size, zero_tp.parallel.tensor)
            check_expert_size(zero_tp.parallel.expert, data)
    # A sum of batch sizes that are wrong by themselves would only repeat their errors.
    if not any(error.key.partition(".")[0] in BATCH_FIELDS for error in collector.errors):
        with collector:
            batch = resolve_batch(values, data)
    model = look_up(block, "model")
    from_hub = isinstance(model, dict) and is_hub_name(model.get(FROM_PRETRAINED, ""))
    if not (collector.errors and from_hub):  # with other errors, a download would be in vain
        with collector:
            if zero_tp is not None:
                zero_tp, hf_config = _pin_and_check_model(zero_tp, saved, data)
            # The rest of the block is wrong. Errors of the model are shown nevertheless.
            elif isinstance(model, dict):
                model_config(model)
    collector.raise_all()
    assert zero_tp is not None and hf_config is not None and batch is not None
    return zero_tp, hf_config, batch


def _check_block(block: Any) -> ZeroTP:
    """Return the `zero_tp` block of a file, typed."""
    if block is None:
        raise ConfigError(
            "zero_tp", "required, but not given", "add the block that docs/config.md describes"
        )
    zero_tp = validate(ZeroTP, block, "zero_tp", unresolvable_autos(block, "zero_tp"))
    steps = zero_tp.training.steps
    tokens = zero_tp.training.tokens
    if (steps is None) == (tokens is None):
        problem = (
            "required, but not given" if steps is None else "given with zero_tp.training.tokens"
        )
        raise ConfigError(
            "zero_tp.training.steps", problem, "give the steps or the tokens of the whole run"
        )
    return zero_tp


def _pin_and_check_model(
    zero_tp: ZeroTP, saved: SavedStart | None, data: int | None
) -> tuple[ZeroTP, PreTrainedConfig]:
    """Pin hub names to the commits of the run's first start.

    Returns the block and the model's config.

    Args:
        data: DP degree, if it is known.
    """
    model = zero_tp.model
    key = f"{MODEL_KEY}.{FROM_PRETRAINED}"
    earlier = None if saved is None else saved.config
    if FROM_PRETRAINED in model:
        # The commit of the first start: a name without one follows the hub's branch, and a resumed
        # run would change its model.
        model[FROM_PRETRAINED] = pin_to_first_start(model[FROM_PRETRAINED], look_up(earlier, key))
    hf_config = check_model(zero_tp, None if saved is None else saved.model, data)
    if FROM_PRETRAINED in model:
        model[FROM_PRETRAINED] = pin_commit(model[FROM_PRETRAINED], key)
    if zero_tp.tokenizer is not None:
        tokenizer = pin_to_first_start(zero_tp.tokenizer, look_up(earlier, TOKENIZER_KEY))
        zero_tp = zero_tp.model_copy(update={"tokenizer": tokenizer})
    return zero_tp, hf_config


def _fill_steps(zero_tp: ZeroTP, samples: int | None) -> ZeroTP:
    """Replace `training.tokens` by the number of steps that train on them.

    A step has `samples` samples.
    """
    training = zero_tp.training
    if training.tokens is None:
        return zero_tp
    if samples is None:
        problem = "needs the global batch, which the number of ranks decides"
        raise ConfigError(
            "zero_tp.training.tokens", problem, "give --world-size N, or train_batch_size"
        )
    # Rounded up: the run trains on at least so many tokens.
    steps = math.ceil(training.tokens / (samples * zero_tp.data.sequence_length))
    return zero_tp.model_copy(
        update={"training": training.model_copy(update={"steps": steps, "tokens": None})}
    )


def check_accelerator(dtype: str, accelerator: Any) -> None:
    """Check that this machine's accelerator supports a dtype.

    The accelerator is DeepSpeed's object; the dtype is "fp32", "bf16" or "fp16".
    """
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if dtype != "fp32" and not supported[dtype]():
        others = " or ".join(other for other in supported if other != dtype and supported[other]())
        problem = (
            f"the accelerator of this machine ({accelerator.device_name()}) does not support "
            f"{dtype}"
        )
        raise ConfigError(
            f"{dtype}.enabled", problem, f"use {others or 'fp32'}, or a machine that supports it"
        )
