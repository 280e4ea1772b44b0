"""The runs that the papers timed, with the published figures, as inputs of the planner.

The planner uses the papers' machines and programs (benchmarks/papers/programs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.papers.pipelines import PipelineTime, StageView, pipeline_time
from benchmarks.papers.programs import Megatron2019, Megatron2022
from zero_tp.base.shipped import CONFIGS, shipped_path
from zero_tp.model.flops import model_flops
from zero_tp.parallel.devices import Device, named_device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.memory import ModelSize, run_model_size
from zero_tp.tools.planning.plan_settings import ZeroSettings, workload_of
from zero_tp.tools.planning.rates import matrix_flops
from zero_tp.tools.planning.timing import StepTimeEstimator

# 16 V100 at 450 W a node, of which 39 TFLOP/s are 30 %; NVSwitch; 8 InfiniBand ports of 100 Gb/s,
# half a port each.
DGX_2H = named_device("v100-32gb").model_copy(
    update={"name": "dgx-2h", "fp16_tflops": 130.0, "per_node": 16, "inter_gbps": 6.25}
)
A100 = named_device("a100-80gb")


@dataclass(frozen=True)
class Run:
    """A run that a paper timed.

    Attributes:
        file, changes: a config of ds_configs, and overrides.
        devices: of all stages.
        pipeline, interleaving: p and m.
    """

    file: str
    devices: int
    changes: tuple[str, ...] = ()
    pipeline: int = 1
    interleaving: int = 1
    device: Device = A100
    program: type[StepTimeEstimator] = Megatron2022

    def changed(self, *changes: str) -> Run:
        return replace(self, changes=(*self.changes, *changes))

    def under(self, name: str) -> Run:
        """Return the run with another of TECHNIQUES."""
        return self.changed(*technique(name))

    @cached_property
    def config(self) -> RunConfig:
        changes = ("zero_optimization.stage=0", *self.changes)
        return RunConfig.load(
            shipped_path(CONFIGS) / self.file, changes, self.devices // self.pipeline
        )

    @cached_property
    def model(self) -> ModelSize:
        return run_model_size(self.config)

    @cached_property
    def time(self) -> PipelineTime:
        config = self.config
        zero = ZeroSettings.of(config, cpu=False)
        if self.program is Megatron2022:
            # Which DeepSpeed refuses at stage 0.
            zero = replace(zero, grad_accum_itemsize=4, communication_itemsize=4)
        timing = self.program(
            spec=self.model.spec,
            workload=workload_of(config, cpu=False, varlen=self.device.varlen),
            settings=zero,
            parameters=self.model.parameters.total,
            device=self.device,
        )
        return pipeline_time(timing, self.pipeline, self.interleaving)

    @property
    def speed(self) -> float:
        """Return the model FLOP/s per device."""
        length = self.config.zero_tp.data.sequence_length
        return (
            model_flops(self.model.spec, self.config.global_batch, length)
            / self.time.total
            / self.devices
        )

    @property
    def peak(self) -> float:
        """Return the peak FLOP/s of one device."""
        return matrix_flops(self.device, self.config.dtype)

    @property
    def view(self) -> StageView:
        """Return the papers' formulas for a device of the first stage."""
        return StageView(
            self.model, workload_of(self.config, cpu=False), 0, 1, self.pipeline, self.interleaving
        )


def scaled(file: str, tensor: int, data: int = 1, heads: int | None = None) -> Run:
    """Return a run of Megatron-LM's scaling study: fp16, 8 sequences per replica, full
    recomputation.
    """
    changes = [
        "zero_tp.parallel.sequence=false",
        "bf16.enabled=false",
        'fp16={"enabled":true}',
        "zero_tp.attention=eager",
        "zero_tp.model.vocab_size=51200",
    ]
    changes += [
        f"zero_tp.parallel.tensor={tensor}",
        f"train_batch_size={8 * data}",
        "train_micro_batch_size_per_gpu=8",
    ]
    changes += [] if heads is None else [f"zero_tp.model.n_head={heads}"]
    return Run(file, tensor * data, tuple(changes), device=DGX_2H, program=Megatron2019)


B22 = Run("papers/gpt_22b.json", 8)
B175 = Run("papers/gpt_175b.json", 64, pipeline=8, interleaving=3)
B530 = Run("papers/gpt_530b.json", 280, pipeline=35, interleaving=3)
T1 = Run("papers/gpt_1t.json", 512, pipeline=64)
B530_DP8 = replace(B530, devices=2240).changed("train_batch_size=2240")
B1_2 = scaled("papers/gpt2_1.2b.json", 1)
B8_3 = "gpt2_8.3b.json"


MODELS = {"22 B": B22, "175 B": B175, "530 B": B530, "1 T": T1}
SECONDS = {
    "22 B": (1.42, 1.10),
    "175 B": (18.13, 13.75),
    "530 B": (49.05, 37.83),
    "1 T": (94.42, 71.49),
}
"""Of an iteration with full recomputation, and with SP and selective recomputation (2205.05198,
table 5).
"""
SECONDS_DP8 = 39.15
"""Of the second with DP 8 (section 6.3), where 530 B without DP has 37.83."""
UTILISATION = {
    "22 B": (41.5, 43.7),
    "175 B": (51.4, 52.8),
    "530 B": (56.0, 57.0),
    "1 T": (56.3, 57.0),
}
"""Per cent of the devices' peak, with SP and selective recomputation: by the model's FLOPs and by
those that run (2205.05198, table 5).
"""
TECHNIQUES = {
    "TP": ("false", "none"),
    "TP, SP": ("true", "none"),
    "TP, selective": ("false", "selective"),
    "TP, SP, selective": ("true", "selective"),
    "TP, full": ("false", "full"),
}
"""SP and `zero_tp.recompute` of each."""
LAYER_MILLISECONDS = {
    "TP": (7.7, 11.9),
    "TP, SP": (7.2, 11.8),
    "TP, full": (7.7, 19.5),
    "TP, selective": (7.7, 13.2),
    "TP, SP, selective": (7.2, 13.1),
}
"""Forward and backward of one layer of the 22 B model, TP 8 (2205.05198, table 4)."""
LAYER_MIB = {
    "22 B": (6752, 1264, 844, 624, 204, 96),
    "175 B": (2736, 552, 342, 312, 102, 48),
    "530 B": (3920, 840, 490, 520, 170, 80),
    "1 T": (4900, 1050, 612.5, 650, 212.5, 100),
}
"""What one layer keeps without parallelism, and on TP 8 in the order of TECHNIQUES (2205.05198,
table 2 at the sizes of table 3).
"""


def technique(name: str) -> tuple[str, str]:
    """Return the changes of keys that make one of TECHNIQUES."""
    sequence, recompute = TECHNIQUES[name]
    return f"zero_tp.parallel.sequence={sequence}", f"zero_tp.recompute={recompute}"
