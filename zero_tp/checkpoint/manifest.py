"""The manifest says what a checkpoint is: one JSON file with a schema, which holds the hash of its own content."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from zero_tp.errors import ConfigError, shown
from zero_tp.validation import Block, Count, Positive, validate

FORMAT, UNHASHED_FORMAT = 4, 3
"""What is written, and what was before there was a hash of the manifest; both are read."""
OWN_HASH = "sha256"
UNHASHED = "unhashed: saved by a version before there was a hash of it, so what it says is taken as it stands"

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def states_file(tensor_rank: int, data_rank: int) -> str:
    """Name a rank's file, whose metadata `starts` holds each parameter's first element in the TP shard."""
    return f"states_tp{tensor_rank:02d}_dp{data_rank:04d}.safetensors"


class ManifestFile(Block):
    """A file has this many bytes and this hash, the SHA-256 of those of its `parts` of 8 MiB (see tensors/files.py)."""

    bytes: Count
    sha256: Digest
    parts: list[Digest] = Field(default_factory=list)


class ShardedParameter(Block):
    """A parameter is split as `parallel.layout.Sharded` says; `shape` is the whole one."""

    layout: Literal["Sharded"]
    dim: Count
    parts: list[Count]
    padded: bool
    shape: list[Count]

    @model_validator(mode="after")
    def _parts_are_the_shape(self) -> ShardedParameter:
        if self.dim >= len(self.shape) or sum(self.parts) != self.shape[self.dim]:
            raise ValueError("its parts are not its shape")
        return self


class ReplicatedParameter(Block):
    """A parameter is the same on every TP rank (`parallel.layout.Replicated`)."""

    layout: Literal["Replicated"]
    gradient: Literal["identical", "partial"]
    shape: list[Count]


class Progress(Block):
    """The run is this far (see `ZeroEngine.progress`)."""

    optimizer_steps: Count | None
    counters: dict[str, Count]
    schedule: dict[str, Any] | None
    learning_rates: list[float]
    loss_scale: dict[str, Any]


class Manifest(Block):
    """A manifest describes one checkpoint.

    Attributes:
        tensor … dtype: how the run was split over ranks (see `identity.Parallelism`).
        model, generation: Hugging Face's config, and settings of generation; None in what was saved before they were.
        kinds: of the tensors that each parameter has: its master and the optimizer's states.
        fixed, corpora: what the run is, which no resuming may change (see `identity.fixed_of`).
        config: of the start that saved it, resolved; None in what was saved before there was a hash, as is `sha256`.
    """

    format: Literal[3, 4]
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
    progress: Progress
    fixed: dict[str, Any]
    corpora: dict[str, dict[str, Any]]
    validation: dict[str, dict[str, Any]] = Field(default_factory=dict)
    tokenizer: str | None
    versions: dict[str, str]
    config: dict[str, Any] | None = None
    files: dict[str, ManifestFile]
    sha256: Digest | None = None

    @property
    def hashed(self) -> bool:
        """Return whether its content was compared with a hash."""
        return self.sha256 is not None

    def digest(self) -> str:
        """Return the hash of its content."""
        return self.sha256 or content_hash(self.model_dump(mode="json"))


def content_hash(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's JSON, without its own hash, with sorted keys and no blanks.

    Raises:
        ValueError: it holds what JSON cannot say.
    """
    content = {key: value for key, value in manifest.items() if key != OWN_HASH}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


class InvalidManifest(ValueError):
    """An InvalidManifest says what is wrong with an object that should be a manifest."""


class OtherFormat(InvalidManifest):
    """It is whole, but of a format that this version does not read."""


def parse_manifest(raw: dict[str, Any]) -> Manifest:
    """Return the manifest that a JSON object is.

    Raises:
        InvalidManifest: its content has another hash than it says, a key is missing, unknown or of another type, or
            its files are not those of its ranks.
        OtherFormat: the version that wrote it is another.
    """
    if OWN_HASH in raw and raw[OWN_HASH] != (found := content_hash(raw)):
        raise InvalidManifest(f"the {OWN_HASH} of its content is {found[:12]}…, not {shown(raw[OWN_HASH])[1:13]}…")
    if raw.get("format") not in (UNHASHED_FORMAT, FORMAT):
        raise OtherFormat(f"format {shown(raw.get('format'))}, this version reads {UNHASHED_FORMAT} and {FORMAT}")
    try:
        manifest = validate(Manifest, raw, "")
    except ConfigError as error:
        raise InvalidManifest(f"{error.key}: {error.problem}") from None
    for key in (OWN_HASH, "config"):
        if manifest.format == FORMAT and raw.get(key) is None:
            raise InvalidManifest(f"{key}: required, but not given")
    ranks = len(manifest.files)
    files = {states_file(*divmod(rank, manifest.data)) for rank in range(ranks)}
    if ranks != manifest.tensor * manifest.data or manifest.files.keys() != files:
        raise InvalidManifest(f"files: not those of tensor {manifest.tensor} × data {manifest.data} ranks")
    return manifest
