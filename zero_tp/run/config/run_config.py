"""The typed, validated view of one JSON file."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.base.errors import ConfigError, did_you_mean
from zero_tp.base.settings.deepspeed import MONITORS, DeepSpeedSettings
from zero_tp.base.settings.keys import apply_overrides, check_leaves
from zero_tp.base.settings.optimizer import choose_implementation
from zero_tp.base.settings.refused import use_current_names
from zero_tp.base.settings.removed import drop_removed_keys
from zero_tp.base.settings.resolve import (
    BATCH_FIELDS,
    BatchSizes,
    SavedStart,
    fill,
    pop_autos,
    set_token_lengths,
)
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.base.settings.timeline import Timeline
from zero_tp.base.shipped import config_names
from zero_tp.base.strict_json import read_json
from zero_tp.base.validation import ErrorCollector, with_keys
from zero_tp.base.weight_files import is_cached, is_hub_name, pin_commit
from zero_tp.engine.settings.parse import parse_settings
from zero_tp.engine.settings.rule import Combination
from zero_tp.engine.settings.rules import notes, refuse
from zero_tp.run.config.check_keys import TOKENIZER_KEY, check_keys
from zero_tp.run.config.model_block import (
    FROM_PRETRAINED,
    check_length,
    ignored_fields,
    router_bias_note,
)
from zero_tp.run.config.stages import (
    RunStage,
    check_schedules,
    file_schedule_steps,
    name_in_stage,
    stage_key,
    stage_model,
    with_stage_lengths,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from zero_tp.engine.param_groups import ParameterGroup


SCHEMA = "$schema"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A DeepSpeed config with a `zero_tp` block, checked as a whole. Create it by `load`.

    Attributes:
        path: the JSON file.
        world_size: number of ranks, or None when the config was checked without one.
        batch: the batch sizes; a size that depends on an unknown world size is None.
        settings: DeepSpeed's part, with "auto" and batch sizes filled in.
        zero_tp: the `zero_tp` block.
        stages: the run's parts, at least one.
    """

    path: Path
    world_size: int | None
    batch: BatchSizes
    settings: DeepSpeedSettings = dataclasses.field(repr=False)
    zero_tp: ZeroTP = dataclasses.field(repr=False)
    _hf_config: PreTrainedConfig = dataclasses.field(repr=False)
    stages: tuple[RunStage, ...] = dataclasses.field(repr=False)
    _timeline: Timeline | None = dataclasses.field(repr=False)
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
        checked = check_keys(values, block, auto_keys, world_size, saved)
        zero_tp, hf_config, batch, stages, timeline, token_lengths = checked

        # 2. Fill in defaults, "auto" and batch sizes.
        # Steps first: the length of a schedule may be "auto", which is the number of steps.
        steps = range(1, zero_tp.training.steps + 1)
        if timeline is not None:
            steps = file_schedule_steps(zero_tp, timeline)
            zero_tp = with_stage_lengths(zero_tp, stages, timeline)
        lines = fill(values, auto_keys, batch, len(steps), hf_config.hidden_size, saved)
        set_token_lengths(values, token_lengths, timeline, steps)
        settings = parse_settings(values)

        # 3. Refuse: combinations that would train another model, or cannot be trained.
        notes = (*removed, *lines)
        config = cls(path, world_size, batch, settings, zero_tp, hf_config, stages, timeline, notes)
        check_schedules(zero_tp, stages, settings.scheduler)
        refuse(config.combination)
        config.check_stages()
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
    def timeline(self) -> Timeline:
        """Return what each step trains on. Needs the global batch."""
        assert self._timeline is not None, "RunConfig.load needs a world_size for this"
        return self._timeline

    @property
    def has_timeline(self) -> bool:
        """Return whether the global batch is known."""
        return self._timeline is not None

    def stage_config(self, index: int) -> RunConfig:
        """Return the config of a run that is like one stage, as rules and plans judge it.

        Its `training.steps` are those that the stage's schedule rules.
        """
        stage = self.stages[index]
        if not stage.name:
            return self
        sizes = {key: getattr(stage.batch, field) for key, field in BATCH_FIELDS.items()}
        update = {key: size for key, size in sizes.items() if size is not None}
        if stage.schedule is not None:
            update["scheduler"] = stage.schedule
        data = self.zero_tp.data
        changes = {"train": stage.data, "sequence_length": stage.length}
        steps = len(self.timeline.stage_steps(stage.schedule_stage))
        if stage.schedule is None:
            steps = len(file_schedule_steps(self.zero_tp, self.timeline))
        length = {"steps": steps, "stages": []}
        block = {
            "data": data.model_copy(update=changes),
            "recompute": stage.recompute,
            "training": self.zero_tp.training.model_copy(update=length),
        }
        return dataclasses.replace(
            self,
            batch=stage.batch,
            settings=self.settings.model_copy(update=update),
            zero_tp=self.zero_tp.model_copy(update=block),
            _hf_config=stage_model(self._hf_config, stage.rope, index),
            stages=(
                dataclasses.replace(
                    stage, name="", ramp=None, own_ramp=False, rope={}, schedule=None
                ),
            ),
            _timeline=None,
        )

    def check_stages(self) -> None:
        """Check each stage as a run of its own.

        Raises:
            ConfigErrors: all combinations that a stage makes and that are refused.
        """
        collector = ErrorCollector()
        problems_before = set[tuple[str, str]]()
        for index, written in enumerate(self.zero_tp.training.stages):
            problems = set[tuple[str, str]]()
            try:
                config = self.stage_config(index)
                check_length(config.zero_tp, config._hf_config)
                refuse(config.combination)
            except ConfigError as error:
                for one in with_keys(error, partial(name_in_stage, index)).errors:
                    assert isinstance(one, ConfigError)
                    field = one.key.removeprefix(f"{stage_key(index)}.")
                    problems.add((field, one.problem))
                    # What a stage does not name has been told of the stage before.
                    named = getattr(written, field.partition(".")[0], None) is not None
                    if named or (field, one.problem) not in problems_before:
                        collector.errors.append(one)
            problems_before = problems
        collector.raise_all()

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
        corpora = [*self.training_corpora, *(data.validation or {})]
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
    def training_corpora(self) -> list[str]:
        """Return the prefixes of the corpora that the run's stages read, in their order."""
        return list(dict.fromkeys(prefix for stage in self.stages for prefix in stage.data))

    def trained_corpora(self, step: int) -> list[str]:
        """Return the first of `training_corpora`: those of the stages that begin up to a step."""
        stages = [
            stage
            for stage, first in zip(self.stages, self.timeline.first_steps, strict=False)
            if first <= max(1, step)
        ]
        return list(dict.fromkeys(prefix for stage in stages for prefix in stage.data))

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
        zero_tp = self.zero_tp
        if zero_tp.training.stages:
            # The rules compare the file's schedule with the steps that it rules.
            steps = len(file_schedule_steps(zero_tp, self.timeline))
            training = zero_tp.training.model_copy(update={"steps": steps})
            zero_tp = zero_tp.model_copy(update={"training": training})
        return Combination.of_run(self.settings, zero_tp, self._hf_config.num_hidden_layers)

    def without_effect(self) -> list[str]:
        """Return a line for each setting that changes nothing in this run."""
        return notes(self.combination, "no effect")

    def cautions(self) -> list[str]:
        """Return a line for each unusual setting, and for each removed key."""
        return [
            *self._load_notes,
            *self._unfinished_ramps(),
            *notes(self.combination, "note"),
            *ignored_fields(self.zero_tp.model),
            *router_bias_note(self.zero_tp, self._hf_config),
        ]

    def _unfinished_ramps(self) -> Iterator[str]:
        """Yield a line for each ramp of a stage that ends before the batch is full."""
        for index, stage in enumerate(self.stages):
            tokens = self.timeline.stage_tokens(index) if stage.own_ramp else 0
            if stage.own_ramp and stage.ramp is not None and tokens <= stage.ramp.tokens:
                yield (
                    f"{stage_key(index, 'batch_size_rampup.tokens')}: {stage.ramp.tokens}, but the "
                    f"stage ends after {tokens}, before the batch is full"
                )

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
