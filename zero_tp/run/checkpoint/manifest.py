"""The manifest of a checkpoint: one JSON file with a schema and the hash of its own content.

It records the keys that no resume may change (same_run.py) and the parallelism, which any resume
may change.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from zero_tp.base.errors import ConfigError, shown
from zero_tp.base.validation import ConfigModel, Count, Positive, validate
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.parallel.topology import describe_grid
from zero_tp.run.checkpoint.imported import Imported

if TYPE_CHECKING:
    from zero_tp.run.config import RunConfig

# The format of this version. Format 4 has files' hashes by SHA-256; earlier ones are refused by
# their number (`parse_manifest`).
FORMAT = 5
FORMATS = (4, 5)
OWN_HASH = "sha256"

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
        fixed, corpora: the keys and corpora that no resume may change (`same_run.fixed_settings`).
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
