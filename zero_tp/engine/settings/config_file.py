"""The types and defaults of all keys of a config file. Importing this module imports DeepSpeed: about two seconds."""

from __future__ import annotations

import logging

from pydantic import Field

from zero_tp.base.settings.deepspeed import ActivationCheckpointing, Aio, DataTypes, FlopsProfiler, Scalars
from zero_tp.base.settings.optimizer import OptimizerBlock
from zero_tp.base.settings.schedule import SchedulerBlock
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.base.validation import ConfigModel

disabled_level = logging.root.manager.disable
logging.disable(logging.WARNING)  # DeepSpeed logs on import, but a user's error must be the only line
try:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
finally:
    logging.disable(disabled_level)


class Throughput(DeepSpeedThroughputTimerConfig):
    """Off by default: DeepSpeed's default, true, synchronises with the device twice per micro-batch."""

    enabled: bool = False


class Timers(ConfigModel):
    throughput: Throughput = Field(default_factory=Throughput)


class ConfigFile(Scalars):
    """A whole file: DeepSpeed's keys and blocks, and the `zero_tp` block.

    `optimizer`, `scheduler` and `zero_tp` are None if the file has no such block.
    """

    optimizer: OptimizerBlock = None  # type: ignore[assignment]  # null is refused
    scheduler: SchedulerBlock = None  # type: ignore[assignment]

    zero_optimization: DeepSpeedZeroConfig = Field(default_factory=DeepSpeedZeroConfig)
    bf16: DeepSpeedBF16Config = Field(default_factory=DeepSpeedBF16Config)
    fp16: DeepSpeedFP16Config = Field(default_factory=DeepSpeedFP16Config)
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig)
    timers: Timers = Field(default_factory=Timers)

    activation_checkpointing: ActivationCheckpointing = Field(default_factory=ActivationCheckpointing)
    data_types: DataTypes = Field(default_factory=DataTypes)
    aio: Aio = Field(default_factory=Aio)
    flops_profiler: FlopsProfiler = Field(default_factory=FlopsProfiler)

    zero_tp: ZeroTP = None  # type: ignore[assignment]
