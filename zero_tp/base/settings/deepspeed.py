"""The typed sections of DeepSpeed's part of a run's config, with the defaults of DeepSpeed 0.19.8.

A test compares names, types and defaults with those that DeepSpeed reads. Keys of `REFUSED_KEYS`
have no field here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from zero_tp.base.settings.optimizer import Optimizer, OptimizerBlock
from zero_tp.base.settings.schedule import Schedule, SchedulerBlock
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.base.validation import ConfigModel, Count, NonNegative, Positive

ZERO = "zero_optimization"
Dtype = Literal["fp32", "fp16", "bf16"]
Samples = Annotated[int, Field(gt=0, lt=2**31)]
"""A number of samples, which kernels count in 32 bits."""
Share = Annotated[float, Field(ge=0, le=1)]
Device = Literal["none", "cpu", "nvme"]


def _as_integer(value: Any) -> Any:
    """Return 2 for 2.0, which a `Literal` would refuse."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_as_integer)]


class ActivationCheckpointing(ConfigModel):
    partition_activations: bool = False
    number_checkpoints: Positive | None = None
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    profile: bool = False
    synchronize_checkpoint_boundary: bool = False


class DataTypes(ConfigModel):
    # None is the dtype of the weights. With "fp32", micro-batches are added up in fp32: other
    # numbers, so it is a choice of the run (`facts.sums_in_fp32`).
    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: Literal["auto"] | list[str] = "auto"


class Aio(ConfigModel):
    block_size: Positive = 1048576
    queue_depth: Positive = 8
    intra_op_parallelism: Positive = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class FlopsProfiler(ConfigModel):
    enabled: bool = False
    recompute_fwd_factor: NonNegative = 0.0
    profile_step: Positive = 1
    module_depth: int = -1
    top_modules: Positive = 1
    detailed: bool = True
    output_file: str | None = None


class CommsLogger(ConfigModel):
    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[Any] = Field([])
    verbose: bool = False
    debug: bool = False


class TensorBoard(ConfigModel):
    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CSVMonitor(TensorBoard):
    pass


class Wandb(ConfigModel):
    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class Comet(ConfigModel):
    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor")
"""Blocks that zero_tp handles itself; DeepSpeed's engine would log the learning rate a second
time.
"""


class Throughput(ConfigModel):
    """Off by default: DeepSpeed's default, true, synchronises with the device twice per
    micro-batch.
    """

    enabled: bool = False
    synchronized: bool = True


class Timers(ConfigModel):
    throughput: Throughput = Throughput()


class BF16(ConfigModel):
    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class FP16(ConfigModel):
    """The loss scale is dynamic if `loss_scale` is 0."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Annotated[NonNegative, Field(allow_inf_nan=False)] = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @model_validator(mode="after")
    def _dynamic_scale_can_move(self) -> FP16:
        for name in ("loss_scale_window", "min_loss_scale"):
            if self.enabled and self.loss_scale == 0 and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0 while the loss scale is dynamic")
        return self


class OffloadParam(ConfigModel):
    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Count = 5
    buffer_size: Count = 100_000_000
    max_in_cpu: Count = 1_000_000_000
    pin_memory: bool = True


class OffloadOptimizer(ConfigModel):
    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Count = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Share = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: Share = 0.8


class Zero(ConfigModel):
    """ZeRO's block; sizes are numbers of elements."""

    stage: Stage = 0
    contiguous_gradients: bool = True
    # False sends as much, because DeepSpeed 0.19.8 all-reduces either way (benchmarks/tried.md).
    reduce_scatter: bool = True
    # In 16 bits this takes 0.93 GiB of a device at each backward, twice that with `overlap_comm`;
    # in a smaller model as much as its gradients (`ZeroEngine`). With 50 million, 4,096 ranks would
    # wait for 160 rings a step of 8 B parameters.
    reduce_bucket_size: Positive = 500_000_000
    # With it ZeRO-1 and -2 send 3Ψ(N-1)/N elements a step, without it the paper's 2Ψ(N-1)/N in more
    # collectives (docs/training.md).
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: Count = 500_000_000
    # On a CPU, which has no streams, it only adds a second bucket and changes when ZeRO-1 reduces
    # (benchmarks/tried.md).
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    sub_group_size: Count = 1_000_000_000
    stage3_prefetch_bucket_size: Count = 50_000_000
    # Parameters below it stay gathered after their first use (`ZeroStage3`).
    stage3_param_persistence_threshold: Count = 100_000
    stage3_model_persistence_threshold: Count = sys.maxsize
    stage3_max_live_parameters: Count = 1_000_000_000
    stage3_max_reuse_distance: Count = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: bool = False
    stage3_module_granularity_threshold: int = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: Count = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False

    @property
    def overlaps(self) -> bool:
        """Return whether gradients are reduced during backward; by default at stage 3 only."""
        return self.stage == 3 if self.overlap_comm is None else self.overlap_comm

    @property
    def optimizer_device(self) -> Device:
        """Return where the optimizer's states are: "none" for the rank's own device."""
        return "none" if self.offload_optimizer is None else self.offload_optimizer.device

    @property
    def param_device(self) -> Device:
        """Return where the parameters are while no layer needs them: "none" for the rank's own
        device.
        """
        return "none" if self.offload_param is None else self.offload_param.device

    @property
    def nvme_paths(self) -> dict[str, Path | None]:
        """Return the directories of the offload blocks whose device is "nvme", by the block's
        name.
        """
        blocks = {"offload_optimizer": self.offload_optimizer, "offload_param": self.offload_param}
        return {
            name: None if block.nvme_path is None else Path(block.nvme_path)
            for name, block in blocks.items()
            if block is not None and block.device == "nvme"
        }


class Sections(ConfigModel):
    """DeepSpeed's part of a config without the optimizer and the schedule."""

    train_batch_size: Samples | None = None
    train_micro_batch_size_per_gpu: Samples | None = None
    gradient_accumulation_steps: Positive | None = None
    managed_gradient_accumulation: bool = True
    # A config without this key is clipped, because that is DeepSpeed's default.
    gradient_clipping: NonNegative = 1.0
    communication_data_type: Dtype | None = None
    sequence_parallel_size: Positive = 1
    prescale_gradients: bool = False
    gradient_predivide_factor: Annotated[float, Field(gt=0)] = 1.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    disable_allgather: bool = False
    steps_per_print: Positive | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    disable_python_gc: bool = False
    dataloader_drop_last: bool = False
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    use_data_before_expert_parallelism: bool = False
    vocabulary_size: Positive | None = None
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None

    zero_optimization: Zero = Zero()
    bf16: BF16 = BF16()
    fp16: FP16 = FP16()
    tensorboard: TensorBoard = TensorBoard()
    wandb: Wandb = Wandb()
    csv_monitor: CSVMonitor = CSVMonitor()
    comet: Comet = Comet()
    comms_logger: CommsLogger = CommsLogger()
    timers: Timers = Timers()

    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    data_types: DataTypes = DataTypes()
    aio: Aio = Aio()
    flops_profiler: FlopsProfiler = FlopsProfiler()

    @property
    def dtype(self) -> Dtype:
        """Return the dtype of weights and activations."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def stage(self) -> int:
        """Return the stage of ZeRO."""
        return self.zero_optimization.stage


class ConfigFile(Sections):
    """The keys of a whole file, as written: `params` are not typed yet.

    `optimizer`, `scheduler` and `zero_tp` are None if the file has no such block.
    """

    optimizer: OptimizerBlock = None  # type: ignore[assignment]  # null is refused
    scheduler: SchedulerBlock = None  # type: ignore[assignment]
    zero_tp: ZeroTP = None  # type: ignore[assignment]


class DeepSpeedSettings(Sections):
    """DeepSpeed's part of a config, typed and checked; `parse_settings` and `check_settings` make
    it.

    Attributes:
        optimizer: None if a Trainer makes the optimizer.
    """

    optimizer: SerializeAsAny[Optimizer] | None = None
    scheduler: SerializeAsAny[Schedule] | None = None

    def written(self) -> dict[str, Any]:
        """Return the keys that were written or filled in, as JSON; see `deepspeed_dict`."""
        return self.model_dump(mode="json", exclude_unset=True)

    def without(self, *keys: str) -> DeepSpeedSettings:
        """Return the settings with these top-level keys at their defaults."""
        names = self.model_fields_set - set(keys)
        return DeepSpeedSettings.model_construct(
            names, **{name: getattr(self, name) for name in names}
        )
