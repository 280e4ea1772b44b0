"""RunConfig is the typed, validated view of one JSON file."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.config.deepspeed import MONITORS
from zero_tp.config.effects import cautions, without_effect
from zero_tp.config.load import TOKENIZER_KEY, load
from zero_tp.config.model import FROM
from zero_tp.config.resolve import BatchSizes, dtype_name
from zero_tp.config.schema import ZeroTP
from zero_tp.config.view import View
from zero_tp.weights.files import is_cached, is_name, pinned

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
        loaded = load(path, overrides, world_size, frozen, saved_model)
        return cls(path, loaded.zero_tp, world_size, loaded.batch, loaded.deepspeed, loaded.hf_config)

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
        return without_effect(View(self._deepspeed, self.zero_tp))

    def cautions(self) -> list[str]:
        """Return a line for each setting that does less than it says, or is unusual."""
        return cautions(View(self._deepspeed, self.zero_tp))

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
            from zero_tp.architectures import architecture_of

            config.architectures = [str(architecture_of(config).without_sentences)]
        return config


def _known(size: int | None) -> int:
    assert size is not None, "RunConfig.load needs a world_size for this"
    return size
