"""Pipelines of the papers: memory of a device of the first stage, and the time that stages add to a
step.

Runs of this library have no pipeline. Letters: p stages, m interleaved stages of each device, L
layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero_tp.tools.planning.memory import PaperMemory
from zero_tp.tools.planning.plan_settings import Layer
from zero_tp.tools.planning.timing import StepTime, StepTimeEstimator


def activation_factor(p: int, m: int = 1) -> float:
    """Return the layers of activations on the first stage over L: 1, interleaved 1 + (p-1)/(pm)
    (2205.05198, 4.2.3).

    The first stage holds p micro-batches of its L/p layers, so L layers in all.
    """
    return 1.0 if m == 1 else 1.0 + (p - 1) / (p * m)


def bubble_share(p: int, micro_batches: int, m: int = 1) -> float:
    """Return idle time over working time: (p-1)/(m·micro-batches) (arXiv 2104.04473, section
    2.2).
    """
    return (p - 1) / (m * micro_batches)


def embedding_bytes(layer: Layer, p: int) -> float:
    """Return sbhp/t: the masks of the embedding's dropout of p micro-batches in flight
    (2205.05198, section 4.3).
    """
    return layer.residual * p


@dataclass(frozen=True)
class StageView(PaperMemory):
    """The papers' formulas for a device of the first stage [bytes].

    Attributes:
        pipeline, interleaving: p and m.
    """

    pipeline: int = 1
    interleaving: int = 1

    @property
    def shares(self) -> list[tuple[float, int]]:
        """Return the first stage's part of what a rank of one stage would have."""
        return [(parameters / self.pipeline, ranks) for parameters, ranks in super().shares]

    def all_layers_bytes(self) -> float:
        """Return the layers' activations of p micro-batches in flight, some of which may keep
        everything.
        """
        layers = self.model.spec.layers
        policy = self.workload.policy
        recomputed = len(policy.recomputed_layers(layers))
        everything = layers * self.layer_bytes(recomputes=False)
        less = recomputed * self.layer_bytes(recomputes=True)
        less += (layers - recomputed) * self.layer_bytes(recomputes=False)
        share = min(policy.keep_micro_batches, self.pipeline) / self.pipeline
        return (share * everything + (1 - share) * less) * activation_factor(
            self.pipeline, self.interleaving
        )

    def outside_bytes(self) -> float:
        """Return the activations outside the layers; the output layer is on the last stage."""
        if self.pipeline == 1:
            return super().outside_bytes()
        return (
            embedding_bytes(self.layer, self.pipeline)
            if self.model.spec.dropouts.embedding
            else 0.0
        )


@dataclass(frozen=True)
class PipelineTime(StepTime):
    """The seconds of one step of a pipeline, by term.

    Attributes:
        stages: transfers between stages.
        bubble: idle time.
    """

    stages: float
    bubble: float

    def terms(self) -> dict[str, float]:
        return {
            **super().terms(),
            "pipeline transfers": self.stages,
            "pipeline bubble": self.bubble,
        }


def pipeline_time(whole: StepTimeEstimator, p: int, m: int = 1) -> PipelineTime:
    """Return the seconds of one step with p stages.

    The last stage computes the head after its layers. The others wait for it in every micro-batch.

    Args:
        whole: of the model without a pipeline.
    """
    layers, rest = divmod(whole.spec.layers, p)
    assert rest == 0, "each stage has as many layers"
    stage = replace(whole, spec=replace(whole.spec, layers=layers), parameters=whole.parameters / p)
    time = stage.estimate()
    micro = whole.settings.accumulation
    transfers = micro * transfer_time(whole, p, m)
    computing = time.products + time.recompute + time.elementwise + time.tp_communication
    working = computing - micro * stage.head_time().total + transfers
    return PipelineTime(**vars(time), stages=transfers, bubble=bubble_share(p, micro, m) * working)


def transfer_time(whole: StepTimeEstimator, p: int, m: int) -> float:
    """Return the seconds in which one micro-batch's activations and gradients move between
    stages.
    """
    if p == 1:
        return 0.0
    workload = whole.workload
    device = whole.device
    near = workload.tensor * whole.settings.data * p <= device.per_node
    speed = (
        device.intra_gbps * device.link_share if near else device.inter_gbps * device.inter_share
    )
    # Each TP rank sends its part.
    part = (
        workload.itemsize * workload.length * workload.batch * whole.spec.hidden / workload.tensor
    )
    return 2 * m * part / (speed * 1e9)
