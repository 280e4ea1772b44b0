"""The `zero_tp` block of the config file: keys, types, defaults. `docs/config.md` is generated from these classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(min_length=1)]


class Block(BaseModel):
    """A JSON object that refuses unknown keys and can't be changed after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _as_weights(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, str) else value


def _weights_are_usable(value: dict[str, float]) -> dict[str, float]:
    if not value or not all(value):
        raise ValueError("names no corpus: give a prefix, or {prefix: weight}")
    for prefix, weight in value.items():
        if weight <= 0:
            raise ValueError(f'the weight of "{prefix}" must be more than 0')
    return value


Corpora = Annotated[dict[str, float], BeforeValidator(_as_weights), AfterValidator(_weights_are_usable)]


class Parallel(Block):
    tensor: Positive = Field(default=1, description="TP degree: ranks that share one replica of the model.")
    sequence: bool = Field(
        default=False,
        description="Sequence parallelism: activations outside the split regions are sharded over the TP ranks.",
        json_schema_extra={"default": "true when `parallel.tensor` > 1"},
    )

    @model_validator(mode="before")
    @classmethod
    def _sequence_follows_tensor(cls, values: Any) -> Any:
        if isinstance(values, dict) and "sequence" not in values:
            tensor = values.get("tensor", 1)
            return {**values, "sequence": isinstance(tensor, int) and tensor > 1}
        return values


RecomputeMode = Literal["none", "selective", "full"]
RecomputeModule = Literal["attention_core", "mlp_activation", "norm"]


class RecomputePolicy(Block):
    mode: RecomputeMode = Field(description="What backward computes again.")
    modules: list[RecomputeModule] | None = Field(
        default=None,
        min_length=1,
        description="With `selective`: which parts of a layer. `attention_core`: scores, softmax, its dropout, "
        "attention over V. `mlp_activation`: the MLP's elementwise function. `norm`: the norms before attention and "
        "MLP.",
        json_schema_extra={"default": '`["attention_core"]`'},
    )
    layers: Positive | None = Field(
        default=None, description="Recompute the first N layers only.", json_schema_extra={"default": "all"}
    )
    every: Positive | None = Field(
        default=None,
        description="Recompute every Nth layer only: the first, the one N after it, and so on.",
        json_schema_extra={"default": "1"},
    )
    keep_micro_batches: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="When accumulating: the first N micro-batches of a step keep all their activations "
        "(arXiv 2205.05198, appendix C).",
    )

    @model_validator(mode="after")
    def _choices_fit(self) -> RecomputePolicy:
        if self.layers is not None and self.every is not None:
            raise ValueError('"layers" and "every" both choose the layers: give one of them')
        if self.modules is not None and self.mode != "selective":
            raise ValueError(f'"modules" chooses the parts of a layer for "selective": leave it out with "{self.mode}"')
        for name in ("layers", "every", "keep_micro_batches"):
            if self.mode == "none" and getattr(self, name):
                raise ValueError(f'"{name}" narrows what is recomputed: leave it out with "none"')
        return self

    @property
    def chosen_modules(self) -> tuple[RecomputeModule, ...]:
        """The parts of a layer that `selective` recomputes."""
        return tuple(self.modules or ("attention_core",))

    def recomputed_layers(self, layers: int) -> range:
        """Numbers of the layers that this recomputes, of `layers` in all."""
        if self.mode == "none":
            return range(0)
        if self.every is not None:
            return range(0, layers, self.every)
        return range(layers if self.layers is None else self.layers)


class MaskedObjective(Block):
    type: Literal["masked"] = Field(description="Masked language modelling.")
    mask_probability: float = Field(default=0.15, gt=0, lt=1, description="Share of the tokens that is masked.")
    max_ngram: Positive = Field(default=3, description="Longest whole-word n-gram masked at once.")
    sentence_order: bool = Field(default=True, description="Add sentence-order prediction.")


class Data(Block):
    train: Corpora = Field(
        description="Prefix of a `.bin/.idx` corpus, or `{prefix: weight}` for a mixture.",
        json_schema_extra={"type": "prefix, or {prefix: weight}"},
    )
    validation: Corpora | None = Field(
        default=None,
        description="As `data.train`, for the validation loss.",
        json_schema_extra={"type": "prefix, or {prefix: weight}"},
    )
    sequence_length: Positive = Field(description="Tokens of one sample; at most the model's positions.")
    document_attention: Literal["continue", "reset"] = Field(
        default="continue",
        description="Whether attention and positions run on over the documents packed in one sample, or start anew "
        "with each: [documents.md](documents.md).",
    )


class Training(Block):
    steps: Positive = Field(description="Optimizer steps of the whole run; raise it to continue a finished one.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=1234, description="Seed of initialisation, dropout and sample order."
    )
    guard_interval: Positive = Field(
        default=500, description="Steps between checks that the replicas are equal over TP."
    )
    on_nonfinite: Literal["skip", "stop"] = Field(
        default="skip",
        description="A non-finite loss or gradient skips that step (at most 10 in a row), or stops the run.",
    )
    timeout_minutes: float = Field(default=30, gt=0, description="Limit of one collective, in minutes.")


class Checkpoint(Block):
    interval: Positive | None = Field(
        default=None,
        description="Steps between checkpoints; one is always written at the end.",
        json_schema_extra={"default": "only at the end"},
    )
    keep: Positive = Field(default=3, description="How many of the newest checkpoints stay.")
    keep_every: Positive | None = Field(default=None, description="Checkpoints at multiples of N steps stay for ever.")
    async_: bool = Field(default=False, alias="async", description="Write while training goes on.")
    on_corrupt: Literal["stop", "previous"] = Field(
        default="stop", description="A damaged newest checkpoint stops the start, or the one before is used."
    )


class Evaluation(Block):
    interval: Positive | None = Field(
        default=None, description="Steps between validation losses.", json_schema_extra={"default": "off"}
    )
    batches: Positive = Field(default=20, description="Global batches of one validation loss.")
    tasks: list[Name] = Field(default_factory=list, description="Zero-shot tasks on the live model.")


class Logging(Block):
    interval: Positive = Field(default=1, description="Steps a log line.")


class ZeroTP(Block):
    """The block itself."""

    model: dict[str, Any] = Field(
        description='The Hugging Face config\'s fields with `model_type`, or `{"from_pretrained": DIR}`.'
    )
    attention: Literal["sdpa", "eager"] = Field(default="sdpa", description="The attention implementation.")
    parallel: Parallel = Field(default=Parallel())
    recompute: RecomputeMode | RecomputePolicy = Field(
        default="none",
        description="What backward computes again: a mode, or an object that narrows it to modules or layers.",
    )
    objective: Literal["causal", "masked"] | MaskedObjective = Field(
        default="causal", description="What the model predicts."
    )
    data: Data
    tokenizer: Name | None = Field(
        default=None,
        description="Directory of the tokenizer that is copied into exports.",
        json_schema_extra={"default": "beside the data"},
    )
    training: Training
    compile: bool = Field(default=False, description="`torch.compile` of the block.")
    checkpoint: Checkpoint = Field(default=Checkpoint())
    evaluation: Evaluation = Field(default=Evaluation())
    logging: Logging = Field(default=Logging())

    @property
    def recompute_policy(self) -> RecomputePolicy:
        """`recompute` in its long form."""
        return RecomputePolicy(mode=self.recompute) if isinstance(self.recompute, str) else self.recompute
