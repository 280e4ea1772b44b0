"""The manifest of a checkpoint: one JSON file with a schema and the hash of its own content.

It records the keys that no resume may change (`fixed_settings`) and the parallelism, which any
resume may change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from zero_tp.base.constants import MODEL_KEY, PARAM_GROUPS_KEY, RAMP_KEY, STAGES_KEY
from zero_tp.base.errors import ConfigError, UserError, shown
from zero_tp.base.settings.optimizer import IMPLEMENTATION
from zero_tp.base.settings.removed import drop_removed_keys
from zero_tp.base.validation import ConfigModel, Count, Positive, validate
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.parallel.topology import describe_grid
from zero_tp.run.checkpoint.imported import Imported
from zero_tp.run.config.stages import fixed_stages

if TYPE_CHECKING:
    from zero_tp.run.config import RunConfig

# The format of this version. Format 4 has files' hashes by SHA-256; earlier ones are refused by
# their number (`parse_manifest`).
FORMAT = 5
FORMATS = (4, 5)
OWN_HASH = "sha256"
PARALLELISM_KEYS = ("zero_tp.parallel", "zero_optimization.stage", "bf16.enabled", "fp16.enabled")
"""Keys of a config that `Parallelism` covers."""

STAGE_SETTINGS = {
    "sequence_length": "zero_tp.data.sequence_length",
    "train_batch_size": "train_batch_size",
}
UNSTAGED: dict[str, Any] = {
    "batch_size_rampup": None,
    "rope": {},
    "scheduler": None,
    "lr_scale": 1.0,
}
"""What the only stage of a run without stages has: a setting of the whole run, or none."""

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def states_file(tensor_rank: int, data_rank: int) -> str:
    """Return the name of a rank's file."""
    return f"states_tp{tensor_rank:02d}_dp{data_rank:04d}.safetensors"


class ManifestFile(ConfigModel):
    """A file's size and hash (`safetensors_files.py`): one of the two.

    Attributes:
        sha256: in format 4, that of the SHA-256s of its 8 MiB `parts`.
    """

    bytes: Count
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    sha256: Digest | None = None
    parts: list[Digest] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_one_hash(self) -> ManifestFile:
        if (self.xxh3_128 is None) == (self.sha256 is None):
            raise ValueError("must have xxh3_128 or, in format 4, sha256")
        return self


class ShardedParameter(ConfigModel):
    """A parameter split over TP, and experts over expert ranks (`parallel.layout.Sharded`).

    `shape` is that of the whole parameter.
    """

    layout: Literal["Sharded"]
    dim: Count
    parts: list[Count]
    padded: bool
    experts: Positive = 1
    shape: list[Count]


class ReplicatedParameter(ConfigModel):
    """A parameter that is equal on every TP rank (`parallel.layout.Replicated`)."""

    layout: Literal["Replicated"]
    gradient: Literal["identical", "partial"]
    shape: list[Count]


class Progress(ConfigModel):
    """A run's counts, schedule and loss scale (see `ZeroEngine.progress`).

    Attributes:
        schedule_start: number of updates before the first step of its stage's schedule.
    """

    optimizer_steps: Count | None
    counters: dict[str, Count]
    schedule: dict[str, Any] | None
    learning_rates: list[float]
    loss_scale: dict[str, Any]
    recent: list[list[float]] = Field(default_factory=list)
    schedule_start: Count = 0


class Parent(ConfigModel):
    """The checkpoint of another run that a run was started from (see parent.py).

    Attributes:
        sha256: the manifest's.
        tokens: number of tokens that its weights were trained on, its own parents' included.
    """

    checkpoint: str
    sha256: Digest
    step: Count
    tokens: Count
    parent: Parent | None = None

    @classmethod
    def of(cls, checkpoint: Path, manifest: Manifest) -> Parent:
        """Return the record of a checkpoint for the runs that start from it."""
        tokens = manifest.trained_tokens
        return cls(
            checkpoint=str(checkpoint.resolve()),
            sha256=manifest.sha256,
            step=manifest.step,
            tokens=tokens + (0 if manifest.parent is None else manifest.parent.tokens),
            parent=manifest.parent,
        )


class Manifest(ConfigModel):
    """The description of one checkpoint.

    Attributes:
        tensor … dtype, expert: see `Parallelism`.
        model, generation: Hugging Face's configs.
        kinds: names of the parameters' tensors: the master, the optimizer's states and the average.
            Under Muon a parameter has those of its own kind only.
        ema: decay of the average of the weights; None: the run keeps none.
        fixed, corpora: the keys and corpora that no resume may change (see `fixed_settings`).
        tokenizer, tokenizer_from_run: the tokenizer's hub name, or its path and the path relative
            to the run.
        tokenizer_fingerprint: of the tokenizer or, in a run without one, of the corpora's.
        config: the resolved config that the run was started with.
        stage, tokens: the name of the last step's stage, and the tokens that the run has consumed;
            None if all steps have the same batch.
        imported: the checkpoint of another trainer that this one was converted from (imported.py).
        sha256: of the manifest's content (see `content_hash`).
    """

    format: Literal[4, 5]
    step: Count
    tensor: Positive
    data: Positive
    sequence: bool
    zero_stage: Literal[0, 1, 2, 3]
    dtype: Literal["fp32", "bf16", "fp16"]
    model: dict[str, Any]
    generation: dict[str, Any] | None = None
    parameters: dict[str, ShardedParameter | ReplicatedParameter]
    kinds: Annotated[list[str], Field(min_length=1)]
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    progress: Progress
    fixed: dict[str, Any]
    corpora: dict[str, dict[str, Any]]
    validation: dict[str, dict[str, Any]] = Field(default_factory=dict)
    tokenizer: str | None
    tokenizer_from_run: str | None = None
    tokenizer_fingerprint: TokenizerFingerprint | None = None
    versions: dict[str, str]
    parent: Parent | None = None
    config: dict[str, Any]
    stage: str | None = None
    tokens: Count | None = None
    expert: Positive = 1
    imported: Imported | None = None
    files: dict[str, ManifestFile]
    sha256: Digest

    @property
    def trained_tokens(self) -> int:
        """Return the tokens that the run has consumed, without its parents'."""
        if self.tokens is not None:
            return self.tokens
        if self.imported is not None:
            return 0  # which the other trainer does not record
        samples = self.step * int(self.fixed["train_batch_size"])
        return samples * int(self.fixed["zero_tp.data.sequence_length"])


def content_hash(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's compact JSON with sorted keys, without its own hash."""
    # Compact and sorted, because the file is indented and a copy may have another order of keys:
    # only the content counts. NaN is refused, because it is no JSON.
    content = {key: value for key, value in manifest.items() if key != OWN_HASH}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def parse_manifest(raw: dict[str, Any]) -> Manifest:
    """Parse the JSON object of a manifest.

    A ConfigError names the wrong key: "format" if another version wrote it.
    """
    # The hash first: in a damaged file, a wrong type of some key would only be a consequence.
    if OWN_HASH in raw and raw[OWN_HASH] != (sha256 := content_hash(raw)):
        raise ConfigError(
            OWN_HASH,
            f"the content has {sha256[:12]}…, the manifest says {shown(raw[OWN_HASH])[1:13]}…",
        )
    # Before the schema, because another format may have other keys.
    if raw.get("format") not in FORMATS:
        known = " and ".join(map(str, FORMATS))
        written = shown(raw.get("format"))
        raise ConfigError("format", f"format {written}, this version reads {known}")
    manifest = validate(Manifest, raw, "")
    ranks = len(manifest.files)
    # As many names as there are files: in a wrong manifest, tensor × data may be huge.
    files = {states_file(*divmod(rank, manifest.data)) for rank in range(ranks)}
    if ranks != manifest.tensor * manifest.data or manifest.files.keys() != files:
        raise ConfigError(
            "files", f"not those of tensor {manifest.tensor} × data {manifest.data} ranks"
        )
    return manifest


class Parallelism(NamedTuple):
    """The parallelism and dtype of a run; a resume may change all of it."""

    tensor: int
    data: int
    sequence: bool
    zero_stage: int
    dtype: str
    expert: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> Parallelism:
        parallel = config.zero_tp.parallel
        return cls(
            parallel.tensor,
            config.data_parallel,
            parallel.sequence,
            config.zero_stage,
            config.dtype,
            parallel.expert,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a manifest's entries; EP of 1, which earlier versions do not read, has none."""
        entries = self._asdict()
        return {key: value for key, value in entries.items() if key != "expert" or value > 1}

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Parallelism:
        return cls(*(getattr(manifest, name) for name in cls._fields))

    def __str__(self) -> str:
        """Return it as `TP 2 × DP 2, SP, EP 2, ZeRO-2, bf16`."""
        grid = describe_grid(self.tensor, self.data, self.sequence, self.expert)
        return f"{grid}, ZeRO-{self.zero_stage}, {self.dtype}"


def stage_entries(config: RunConfig, step: int) -> dict[str, Any]:
    """Return a manifest's entries on its stage; none if all steps have the same batch."""
    training = config.zero_tp.training
    if not training.stages and training.batch_size_rampup is None:
        return {}
    stage = config.stages[config.timeline.step_samples(step).stage].name
    return {
        **({"stage": stage} if stage else {}),
        "tokens": config.timeline.step_samples(step + 1).tokens_before,
    }


def fixed_settings(
    config: RunConfig, names: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the keys of a config that no resume may change.

    Args:
        names: of corpora that have moved: the prefix now → the one before.
    """
    block = config.zero_tp
    ramp = block.training.batch_size_rampup
    optimizer = config.settings.written()["optimizer"]
    params = optimizer["params"]
    return {
        "zero_tp.model": {key: block.model[key] for key in sorted(block.model)},
        "zero_tp.training.seed": block.training.seed,
        # A list, because the order of the corpora decides which samples a step sees.
        "zero_tp.data.train": [
            [names.get(prefix, prefix), weight] for prefix, weight in block.data.train.items()
        ],
        "zero_tp.data.sequence_length": block.data.sequence_length,
        "zero_tp.data.document_attention": block.data.document_attention,
        "train_batch_size": config.global_batch,
        # The optimizer's implementation may change, like offload.
        "optimizer": {
            **optimizer,
            "params": {key: params[key] for key in params if key not in IMPLEMENTATION},
        },
        # By number, so that a difference is named with its entry.
        PARAM_GROUPS_KEY: {
            str(index): group.model_dump(exclude_none=True)
            for index, group in enumerate(block.param_groups)
        },
        **({} if block.masked is None else {"zero_tp.objective": block.masked.model_dump()}),
        RAMP_KEY: None if ramp is None else ramp.model_dump(),
        **fixed_stages(config.stages, config.timeline, names),
    }


def versions(packages: Sequence[str] = ("torch", "deepspeed", "transformers")) -> dict[str, str]:
    """Return the versions of installed packages."""
    installed = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def differences(
    manifest: Manifest, config: RunConfig, validation: dict[str, dict[str, Any]]
) -> list[str]:
    """Return a line on each difference between a checkpoint and the run that opens it.

    Compared are config keys, versions of libraries and validation corpora.

    Keys of `Parallelism` are omitted: `describe_parent` and the line "resuming step …" show them.

    Args:
        validation: identities of the validation corpora by prefix.
    """
    saved = f"when step {manifest.step} was saved"
    # A corpus that validation had then and lacks now is no line here: the key of its list has one.
    changed = [
        prefix for prefix, old in manifest.validation.items() if validation.get(prefix, old) != old
    ]
    # Keys that this version no longer has would show as "not set".
    config_before, _ = drop_removed_keys(manifest.config)
    before = {
        **config_before,
        **{f"{name}'s version": version for name, version in manifest.versions.items()},
    }
    now = {
        **config.resolved(),
        **{f"{name}'s version": version for name, version in versions().items()},
    }
    return [
        *(f"{key}: {value}, was {old} {saved}" for key, value, old in _differing("", now, before)),
        *(
            f"zero_tp.data.validation: {prefix} holds other documents or tokens than {saved}"
            for prefix in changed
        ),
    ]


def _differing(path: str, now: Any, before: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value now, value before) of each difference, at the deepest key that has one."""
    if path in PARALLELISM_KEYS:
        return
    if isinstance(now, dict) and isinstance(before, dict):
        # Not a set, whose order of strings differs between two starts.
        for key in (*before, *(key for key in now if key not in before)):
            yield from _differing(f"{path}.{key}" if path else key, now.get(key), before.get(key))
    elif now != before:
        yield (
            path,
            "not set" if now is None else shown(now),
            "not set" if before is None else shown(before),
        )


def check_same_run(checkpoint: Path, manifest: Manifest, config: RunConfig) -> None:
    """Check that a run of this config can resume from the checkpoint.

    Corpora may have moved; `RunInputs.check_resumed` compares their content.
    """
    check_states(checkpoint, manifest, config)
    if manifest.imported is not None:
        return  # `check_imported` compares what another trainer records
    check_saved_by_run(checkpoint, manifest)
    # Corpora may have moved: only their number, order and weights are compared.
    trained = config.trained_corpora(manifest.step)
    names = dict(zip(trained, manifest.corpora, strict=False))
    now_fixed, moved_fixed = (
        _trained(fixed_settings(config, moved), manifest.step) for moved in ({}, names)
    )
    fixed = _fixed_before(manifest, now_fixed)
    for key in dict.fromkeys((*now_fixed, *(key for key in fixed if key.startswith(STAGES_KEY)))):
        if key not in fixed and not key.startswith(STAGES_KEY):
            raise UserError(
                f"{checkpoint}: its manifest lacks fixed.{key}; the checkpoint is damaged"
            )
        value, before = now_fixed.get(key), fixed.get(key)
        if before not in (value, moved_fixed.get(key)):
            # `_differing` finds nothing if a key of the model is null in one and absent in the
            # other.
            key, now, old = next(_differing(key, value, before), (key, shown(value), shown(before)))
            raise UserError(
                f"{key}: {now}, but the run of {checkpoint} was started with {old}; "
                f"set it back, or start a new run from these weights with --from {checkpoint} and "
                "another --output-dir"
            )


def _trained(fixed: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the settings of `fixed_settings` without stages that begin after `step`.

    Such a stage may still change, and others may follow it.
    """
    return {
        key: value
        for key, value in fixed.items()
        if not (key.startswith(STAGES_KEY) and value["first_step"] > step)
    }


def _fixed_before(manifest: Manifest, now: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a checkpoint was saved with, as `fixed_settings` has them.

    Args:
        now: those of the run that opens it.
    """
    # Checkpoints of earlier versions lack the first two.
    fixed = _trained({PARAM_GROUPS_KEY: {}, RAMP_KEY: None, **manifest.fixed}, manifest.step)
    first = f"{STAGES_KEY}[0]"
    if first in now and first not in fixed:
        # A run without stages has been one, to which others are added now.
        fixed[first] = {
            **now[first],
            "data": fixed.get("zero_tp.data.train"),
            **{name: fixed.get(key) for name, key in STAGE_SETTINGS.items()},
            **UNSTAGED,
        }
    return fixed


def check_saved_by_run(checkpoint: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint of a Trainer, or of another trainer.

    Its manifest lacks the optimizer and the batch size, which a run compares.
    """
    if manifest.imported is not None:
        raise UserError(
            f"{checkpoint}: converted from {manifest.imported.trainer}, and no run has continued "
            "it yet; give its run as --output-dir"
        )
    if "optimizer" not in manifest.fixed:
        raise UserError(
            f"{checkpoint}: saved by a Trainer, without optimizer and batch in its manifest; "
            "export it, and start from "
            f"the weights with {MODEL_KEY}.from_pretrained"
        )


def check_states(checkpoint: Path, manifest: Manifest, config: RunConfig) -> None:
    """Check that the optimizer's states were saved and can be restored. SGD may have no states."""
    if "offload_optimizer" in config.nvme_paths:
        raise UserError(
            "zero_optimization.offload_optimizer.device: a run cannot be resumed or started from a "
            "checkpoint with its "
            'optimizer on NVMe, where DeepSpeed does not restore its states; use "cpu"'
        )
    # Only the master was saved. SGD without momentum has no states, and no count of steps either.
    if len(manifest.kinds) == 1 and manifest.progress.optimizer_steps is not None:
        raise UserError(
            f"{checkpoint}: saved with the optimizer on NVMe, without its states, so it cannot be "
            "resumed; export it "
            "with zero-tp convert to-hf, or give another --output-dir"
        )
