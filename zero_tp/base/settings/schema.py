"""Define the keys, types and defaults of the `zero_tp` block. `docs/config.md` is generated from
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from zero_tp.base.errors import did_you_mean, shown
from zero_tp.base.settings.param_groups import ParamGroup
from zero_tp.base.settings.recompute import RecomputeMode, RecomputePolicy
from zero_tp.base.validation import ConfigModel, Positive

Name = Annotated[str, Field(min_length=1)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Of a part of the loss."""
Minutes = Annotated[float, Field(gt=0, le=10_000_000)]
"""At most 19 years: torch counts nanoseconds in 64 bits, so a longer limit would overflow and
expire at once.
"""


def _as_weights(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, str) else value


Corpora = Annotated[
    dict[Name, Annotated[float, Field(gt=0)]],
    BeforeValidator(_as_weights, json_schema_input_type=str | dict[str, float]),
    Field(min_length=1),
]


class Parallel(ConfigModel):
    tensor: Positive = Field(1, description="TP degree: ranks that share one replica of the model.")
    sequence: bool = Field(
        default_factory=lambda others: others.get("tensor", 1) > 1,
        description="Sequence parallelism: activations outside the split regions are sharded over "
        "the TP ranks.",
        json_schema_extra={"default": "true when `parallel.tensor` > 1"},
    )
    expert: Positive = Field(
        1,
        description="EP degree: replicas that share one set of a model's experts "
        "([experts.md](experts.md#expert-parallelism)).",
    )


class MaskedObjective(ConfigModel):
    type: Literal["masked"] = Field(
        description="Masked language modelling of whole words: 80 % of their tokens become the "
        "mask token, 10 % a "
        "random one.",
    )
    mask_probability: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="Share of a sample's tokens that is masked, special ones not counted.",
    )
    max_ngram: int = Field(
        3,
        gt=0,
        le=1000,
        description="Words of the longest n-gram masked at once; n words with probability ∝ 1/n.",
    )
    sentence_order: bool = Field(
        True,
        description="Samples have two segments, in order or swapped, and a sentence head says "
        "which; else one segment.",
    )


class Data(ConfigModel):
    train: Corpora = Field(
        description="Prefix of a `.bin/.idx` corpus, or `{prefix: weight}` for a mixture."
    )
    validation: Corpora | None = Field(
        None,
        description="As `data.train`, for the validation loss: the mean of the corpora's losses, "
        "weighted. Each corpus "
        "has its weight's share of `evaluation.batches`.",
    )
    sequence_length: Positive = Field(
        description="Tokens of one sample; at most the model's positions."
    )
    max_epochs: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Passes over a training corpus above which the run is refused."
    )
    document_attention: Literal["continue", "reset"] = Field(
        "continue",
        description="Whether attention and positions continue across the documents packed in one "
        "sample, or restart "
        "with each document: [data.md](data.md#packed-documents).",
    )


class BatchRampUp(ConfigModel):
    """The growth of a global batch from `start` to its full size."""

    start: Positive = Field(description="Samples of the first steps.")
    increment: Positive = Field(description="Samples by which the batch grows.")
    tokens: Positive = Field(
        description="Tokens over which it grows to the full batch, in equal parts."
    )


class TrainingStage(ConfigModel):
    """A part of a run. What it does not name is as in the stage before."""

    name: Name = Field(description="Its name in the log, the report and errors.")
    tokens: Positive | None = Field(
        None, description="Its length in tokens: this, `steps` or `until`."
    )
    steps: Positive | None = Field(None, description="Its length in steps.")
    until: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Its end, as a share of `training.tokens` or `training.steps`; the last "
        "stage's is 1.0.",
    )
    data: Corpora | None = Field(None, description="As `data.train`.")
    sequence_length: Positive | None = Field(None, description="As `data.sequence_length`.")
    train_batch_size: Positive | None = Field(None, description="Samples of one optimizer step.")
    batch_tokens: Positive | None = Field(
        None, description="Tokens of one optimizer step, instead of `train_batch_size`."
    )
    train_micro_batch_size_per_gpu: Positive | None = Field(
        None, description="Samples of one forward on one replica."
    )
    batch_size_rampup: BatchRampUp | None = Field(
        None, description="Growth of its batch; it counts the tokens of the stage."
    )
    recompute: RecomputeMode | RecomputePolicy | None = Field(
        None, description="As `zero_tp.recompute`."
    )
    rope: dict[str, Any] | None = Field(
        None, description="Fields of the model's `rope_parameters` that change."
    )
    scheduler: dict[str, Any] | None = Field(
        None, description="A `scheduler` block whose steps count from the stage's first."
    )
    lr_scale: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="Factor of the file's learning rate."
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> TrainingStage:
        lengths = [name for name in ("tokens", "steps", "until") if getattr(self, name) is not None]
        if len(lengths) != 1:
            listed = " and ".join(lengths) or "none of them"
            raise ValueError(f"takes one of tokens, steps and until: it has {listed}")
        if self.train_batch_size is not None and self.batch_tokens is not None:
            raise ValueError("has train_batch_size and batch_tokens: give one of them")
        return self


class Spike(ConfigModel):
    loss: float | None = Field(
        None,
        gt=0,
        description="Standard deviations that a loss may be above the mean of the window.",
    )
    grad_norm: float | None = Field(None, gt=0, description="The same for the gradient norm.")
    window: Annotated[int, Field(ge=4, le=10_000)] = Field(
        128,
        description="Steps whose mean and deviation are used; active once half of them have run.",
    )

    @model_validator(mode="after")
    def _bounds_something(self) -> Spike:
        if self.loss is None and self.grad_norm is None:
            raise ValueError("bounds nothing: give loss, grad_norm or both, such as 6")
        return self


class Ema(ConfigModel):
    decay: float = Field(
        gt=0, lt=1, description="The share of the old average that a step keeps, such as 0.999."
    )
    evaluate: bool = Field(
        False,
        description="Validation and tasks run a second time, on the average; its figures are named "
        "`ema/…`.",
    )


class Timeouts(ConfigModel):
    start: Minutes | None = Field(
        None,
        description="Minutes without progress after which a start (reading, connecting, resuming) "
        "fails.",
    )
    step: Minutes = Field(30, description="The same for a step.")
    save: Minutes = Field(30, description="Minutes for a rank to write its part of a checkpoint.")
    evaluation: Minutes = Field(30, description="The same for validation and tasks.")
    heartbeat: Minutes | None = Field(
        5,
        ge=0.5,
        description="Minutes that a rank or the ranks' store may be silent; null: no limit.",
    )

    @property
    def longest(self) -> float:
        """Return the limit of one collective, the longest of all phases [minutes]."""
        return max(self.start or 0, self.step, self.save, self.evaluation)


if TYPE_CHECKING:
    _Steps = int  # `RunConfig.load` fills it in from `tokens`
else:
    _Steps = Positive | None


class Training(ConfigModel):
    steps: _Steps = Field(
        None,  # type: ignore[assignment]
        description="Optimizer steps of the whole run; raise it to continue a finished one "
        "(with stages: append one). Required without `tokens` and `stages`.",
    )
    tokens: Positive | None = Field(
        None, description="Tokens of the whole run, instead of `steps`; with stages, their sum."
    )
    stages: list[TrainingStage] = Field(
        [],
        description="The parts of a run with other data, lengths, batches or rates: "
        "[recipes.md](recipes.md#stages).",
    )
    batch_size_rampup: BatchRampUp | None = Field(
        None,
        description="Growth of the global batch at the run's beginning: "
        "[recipes.md](recipes.md#batch-ramp).",
    )
    seed: Annotated[int, Field(ge=0, le=2**53)] = Field(
        1234, description="Seed of initialisation, dropout and sample order."
    )
    guard_interval: Positive = Field(
        500, description="Steps between comparisons of replicated values, over TP and over DP."
    )
    guard_gradients: bool = Field(
        False,
        description="At those steps, run one micro-batch twice and compare every gradient bit for "
        "bit.",
    )
    on_nonfinite: Literal["skip", "stop"] = Field(
        "skip",
        description="A non-finite loss or gradient skips that step (at most 10 in a row), or stops "
        "the run.",
    )
    spike: Spike | None = Field(
        None,
        description="Skip a step whose loss or gradient norm is far above those of the steps "
        "before.",
    )
    qk_clip_threshold: float | None = Field(
        None,
        gt=0,
        description="QK-clip: scale Q and K of heads whose largest attention score exceeds it: "
        "[muon.md](muon.md#qk-clip).",
    )
    qk_clip_alpha: float = Field(
        0.5, ge=0, le=1, description="The share of QK-clip's scale, as an exponent, that Q gets."
    )
    z_loss: Weight = Field(
        0.0,
        description="Weight of the mean squared log-sum-exp of the logits in the loss; usually "
        "1e-5 or 1e-4: [recipes.md](recipes.md#z-loss).",
    )
    router_z_loss: Weight = Field(
        0.0,
        description="The same of the routers' logits, summed over layers; usually 1e-3: "
        "[experts.md](experts.md).",
    )
    router_bias_update_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0,
        description="After each step, move the bias of each expert by this much towards an equal "
        "load; 0: the biases stay, as in transformers ([experts.md](experts.md)).",
    )
    ema: Ema | None = Field(
        None,
        description="Keep an exponential moving average of the fp32 weights, 4 bytes a parameter: "
        "[recipes.md](recipes.md#averaged-weights).",
    )
    timeout_minutes: Minutes | Timeouts = Field(
        30, description="Limit of one collective, in minutes; or of each phase without progress."
    )
    keep_freed_memory: bool | Literal["auto"] = Field(
        "auto",
        description="On CPUs, reuse freed memory for later tensors: faster, but takes more. "
        '`"auto"`: unless ZeRO-1 or 2 fills buckets with gradients; in fp32, during a step; in 16 '
        "bits below ZeRO-3, blocks under 32 MiB. With `DS_ACCELERATOR=cpu` a run starts itself "
        "once more, with `GLIBC_TUNABLES` that join freed blocks.",
    )

    @property
    def timeouts(self) -> Timeouts:
        """Return `timeout_minutes` in its long form."""
        limit = self.timeout_minutes
        return (
            limit
            if isinstance(limit, Timeouts)
            else Timeouts(step=limit, save=limit, evaluation=limit)
        )


class Checkpoint(ConfigModel):
    interval: Positive | None = Field(
        None, description="Steps between checkpoints; one is always written at the end."
    )
    keep: Positive = Field(3, description="How many of the newest checkpoints are kept.")
    keep_every: Positive | None = Field(
        None, description="Checkpoints at multiples of N steps are never removed."
    )
    async_: bool = Field(False, alias="async", description="Write while training continues.")
    on_corrupt: Literal["stop", "previous"] = Field(
        "stop", description="If the newest checkpoint is damaged, stop, or use the previous one."
    )


class Evaluation(ConfigModel):
    interval: Positive | None = Field(
        None, description="Steps between evaluations; none: only after the last step."
    )
    batches: Positive = Field(20, description="Global batches of one validation loss.")
    tasks: list[Name] = Field(
        [],
        description="Zero-shot tasks (docs/evaluation.md) on the live model, whenever there is a "
        "validation loss.",
    )
    task_data: dict[Name, Name] = Field(
        {}, description="`{task: file}`; the data of other tasks come from the Hugging Face hub."
    )
    task_limit: Positive | None = Field(None, description="Examples of each task; none: all.")
    task_include_path: Name | None = Field(None, description="A directory of lm-eval task files.")


TRACKERS = ("aim", "clearml", "dvclive", "mlflow", "swanlab", "trackio")
"""accelerate's trackers, except those with a DeepSpeed block."""
BLOCK_OF = {"comet_ml": "comet", "tensorboard": "tensorboard", "wandb": "wandb"}


def _as_arguments(value: Any) -> Any:
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return {name: {} for name in value} if is_list else value


def _are_trackers(value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for name in value:
        if name in BLOCK_OF:
            raise ValueError(
                f'"{name}" has a block of its own: write "{BLOCK_OF[name]}": {{"enabled": true}}'
            )
        if name not in TRACKERS:
            raise ValueError(
                f"{shown(name)} is not a tracker of accelerate; {did_you_mean(name, TRACKERS)}"
            )
    return value


Trackers = Annotated[
    dict[Name, dict[str, Any]], BeforeValidator(_as_arguments), AfterValidator(_are_trackers)
]


class Logging(ConfigModel):
    interval: Positive | Literal["auto"] = Field(
        1,
        description='Steps per log line. `"auto"`: each step is measured and written to '
        "metrics.jsonl, and a line "
        "is printed every 5 seconds.",
    )
    experts: bool = Field(
        False,
        description="Log the share of tokens that chose each expert, as `experts/layer_N/E`: "
        "[experts.md](experts.md).",
    )
    update_norms: bool = Field(
        False,
        description="Log the norm of each optimizer group's update, as `update_norm/group_N` in "
        "the order of `zero-tp check`. The update of a logged step then holds a copy of a rank's "
        "masters.",
    )
    trackers: Trackers = Field(
        {},
        description="accelerate's trackers, which receive the values of metrics.jsonl, as `[name, "
        "…]` or "
        "`{name: {argument: value}}`: [training.md](training.md#logs-monitors-pictures).",
    )

    @property
    def measured_interval(self) -> int:
        """Return the number of steps per line of metrics.jsonl."""
        return 1 if self.interval == "auto" else self.interval


class ZeroTP(ConfigModel):
    """The `zero_tp` block."""

    model: dict[str, Any] = Field(
        description='The Hugging Face config\'s fields with `model_type`, or `{"from_pretrained": '
        "DIR}`."
    )
    attention: Literal["sdpa", "eager", "flex_attention"] = Field(
        "sdpa",
        description="The attention implementation: [training.md](training.md#activation-memory). "
        'Of scores with a soft cap (Gemma 2) or sinks (gpt-oss), which SDPA lacks, "sdpa" and '
        '"eager" compute all; '
        '"flex_attention" stores none on a CUDA device of capability 8.0, and no GPU has tested it '
        "yet.",
    )
    parallel: Parallel = Parallel()
    recompute: RecomputeMode | RecomputePolicy = Field(
        "none",
        description="What backward recomputes: a mode, or an object that selects modules or "
        "layers.",
    )
    objective: Literal["causal", "masked"] | MaskedObjective = Field(
        "causal", description="What the model predicts."
    )
    data: Data
    tokenizer: Name | None = Field(
        None,
        description="Directory of the tokenizer that is copied into exports, or its "
        "[name on the hub](checkpoints.md#export-and-import); none: the data's tokenizer.",
    )
    training: Training
    param_groups: list[ParamGroup] = Field(
        [],
        description="Parameters with a weight decay or a factor of the learning rate of their own; "
        "the first group that matches counts: [config.md](config.md#param_groups).",
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="In training, run elementwise work (RMS norm, rotary, gate, softmax of the "
        "loss) in kernels that "
        '`torch.compile` makes. `"auto"`: on CUDA, not on CPU.',
    )
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()

    @property
    def recompute_policy(self) -> RecomputePolicy:
        """Return `recompute` in its long form."""
        return (
            RecomputePolicy(mode=self.recompute)
            if isinstance(self.recompute, str)
            else self.recompute
        )

    @property
    def masked(self) -> MaskedObjective | None:
        """Return `objective` in its long form if it is masked, else None."""
        if isinstance(self.objective, MaskedObjective):
            return self.objective
        return MaskedObjective(type="masked") if self.objective == "masked" else None
