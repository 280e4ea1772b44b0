"""Memory of one rank over a step: the dry run's activations (dryrun.py) and DeepSpeed's model
states (zero.py). `PaperMemory` is the papers' account, for comparison alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from zero_tp.base.settings.optimizer import Muon, OptimizerParams
from zero_tp.base.settings.param_groups import ParamGroup
from zero_tp.engine.param_groups import divide_parameters
from zero_tp.engine.zero.matrices import matrices_of
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.model_class import model_class
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.parallel.layout import layout_of
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning import formulas
from zero_tp.tools.planning.dryrun import dry_run
from zero_tp.tools.planning.matrix_update import MatrixGroup
from zero_tp.tools.planning.plan_settings import CheckpointBytes, Layer, Workload, ZeroSettings
from zero_tp.tools.planning.tracking import MemorySample
from zero_tp.tools.planning.zero import RankParameters, StateBytes, ZeroMemory

STATE_CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "buffers")
CATEGORIES = (*STATE_CATEGORIES, "activations", "transients")


class ModelSize(NamedTuple):
    """A model's spec, the parameters of TP rank 0, and the number of parameters of the whole
    model.
    """

    spec: TransformerSpec
    parameters: RankParameters
    num_parameters: int

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that compute one token.

        Experts that the token does not choose are left out.
        """
        return self.num_parameters - self.spec.idle_parameters

    def shares(self, tensor: int, expert: int, data: int) -> list[tuple[float, int]]:
        """Return the parameters of one rank before ZeRO partitions them, each with the number of
        replicas that have the same ones.

        By the papers these are Ψ/t and N_d. With EP degree E a rank has an E-th of the experts, as
        N_d/E others do.
        """
        if expert == 1:
            return [(self.num_parameters / tensor, data)]
        experts = self.parameters.experts
        # TP splits every expert, so the whole model has t·E times a rank's.
        others = self.num_parameters / tensor - expert * experts
        return [(others, data), (experts, data // expert)]


def model_size(
    config: PretrainedConfig,
    tensor: int,
    sequence: bool,
    param_groups: Sequence[ParamGroup] = (),
    params: OptimizerParams | None = None,
    *,
    expert: int = 1,
) -> ModelSize:
    """Build a model on the meta device and count its parameters.

    Args:
        tensor, sequence, expert: the TP degree, whether SP is on, and the EP degree.
        param_groups, params: of the run and its optimizer; they decide what DeepSpeed flattens
            together, and what Muon updates.
    """
    spec = architecture_of(config).spec(config)
    # On the meta device weights have shapes and no memory, so a model of any size is counted on a
    # laptop.
    topology = Topology(tensor, sequence, expert=expert, world=tensor * expert)
    model = model_class(spec)(config, topology, device="meta")
    params = params or OptimizerParams(lr=0.0)
    divided = divide_parameters(model, param_groups, params)
    by_muon = list[MatrixGroup | None]()
    groups = list[tuple[int, ...]]()
    are_experts = list[bool]()
    for group in divided:
        # As DeepSpeed wants them, experts are groups of their own (engine/zero/expert_groups.py).
        for names, has_experts in _split_by_expert(model, group.names):
            groups.append(tuple(model.get_parameter(name).numel() for name in names))
            are_experts.append(has_experts)
            by_muon.append(
                _matrix_group(model, names, params)
                if group.is_muon and isinstance(params, Muon)
                else None
            )
    modules: list[tuple[int, ...]] = []
    layers: list[int] = []
    for name, module in model.named_modules():
        if numels := tuple(parameter.numel() for parameter in module.parameters(recurse=False)):
            modules.append(numels)
            parts = name.split(".")
            # "transformer.layers.3.norm" is of layer 3, "transformer.embedding" of -1; the final
            # norm and the head, whose name does not begin with "transformer", are of L.
            is_after_layers = parts[0] != "transformer" or "final_norm" in parts
            layers.append(
                int(parts[2]) if "layers" in parts else spec.layers if is_after_layers else -1
            )
    num_parameters = model.num_parameters()
    # The last module of an encoder is not its tied output layer.
    tied = bool(config.tie_word_embeddings) and modules[-1] == modules[0]
    parameters = RankParameters(
        tuple(groups), tuple(modules), tuple(layers), tied, tuple(by_muon), tuple(are_experts)
    )
    return ModelSize(spec, parameters, num_parameters)


def _split_by_expert(
    model: ParallelModel, names: Sequence[str]
) -> Iterator[tuple[Sequence[str], bool]]:
    """Yield the names of parameters that every replica has, and those of experts that are divided
    over expert ranks, each with whether they are experts; none that is empty.
    """
    for has_experts in (False, True):
        chosen = [
            name
            for name in names
            if (layout_of(model.get_parameter(name)).experts > 1) == has_experts
        ]
        if chosen:
            yield chosen, has_experts


def _matrix_group(model: ParallelModel, names: Sequence[str], muon: Muon) -> MatrixGroup:
    parameters = {name: model.get_parameter(name) for name in names}
    tensor = model.topology.tensor
    matrices = matrices_of(model.config, parameters, tensor, per_head=muon.per_head)
    sizes = tuple(parameter.numel() for parameter in parameters.values())
    return MatrixGroup(tuple(names), sizes, tuple(matrices), tensor)


def params_of(config: RunConfig) -> OptimizerParams | None:
    """Return the arguments of the run's optimizer, if its config has one."""
    optimizer = config.settings.optimizer
    return None if optimizer is None else optimizer.params


def run_model_size(config: RunConfig) -> ModelSize:
    """Return the `model_size` of a run's model."""
    block = config.zero_tp
    parallel = block.parallel
    groups = block.param_groups
    params = params_of(config)
    sizes = parallel.tensor, parallel.sequence
    return model_size(config.hf_config(), *sizes, groups, params, expert=parallel.expert)


@dataclass(frozen=True)
class Point:
    """All bytes at one moment of a step: those of a `MemorySample` and the model states.

    Attributes:
        phase: "forward", "backward", "reduce" or "step".
        position: on a time axis: forward from 0 to 1, backward from 1 to 2, the rest from 2 to 3.
        bytes: on the device, by category of CATEGORIES.
        host: bytes in host memory.
    """

    phase: str
    position: float
    bytes: dict[str, float]
    host: float

    @property
    def total(self) -> float:
        return sum(self.bytes.values())

    def as_json(self) -> dict[str, Any]:
        return {"phase": self.phase, "total": self.total, "host": self.host, **self.bytes}


@dataclass(frozen=True)
class RankMemory:
    """The memory that one rank allocates over a step.

    Attributes:
        samples: of one micro-batch.
        checkpoints: see `Workload.activation_checkpoint_bytes`.
    """

    zero: ZeroMemory
    samples: list[MemorySample]
    checkpoints: CheckpointBytes = field(default_factory=CheckpointBytes)

    @cached_property
    def points(self) -> list[Point]:
        """Return the memory at the moments of a step.

        These are the last micro-batch, the end of backward, the update's peaks and the end of the
        update.
        """
        zero = self.zero
        points = list[Point]()
        forward = sum(sample.phase == "forward" for sample in self.samples)
        backward = len(self.samples) - forward
        for number, sample in enumerate(self.samples):
            position = number / forward if number < forward else 1 + (number - forward) / backward
            states = zero.in_micro_batch(
                sample.phase, sample.finished_elements, sample.layer, sample.transients
            )
            points.append(
                self.point(sample.phase, position, states, sample.activations, sample.transients)
            )
        return [
            *points,
            self.point("reduce", 2.0, zero.in_last_reduction()),
            self.point("step", 2.25, zero.in_grad_conversion()),
            self.point("step", 2.5, zero.in_update()),
            self.point("step", 3.0, zero.states),
        ]

    @cached_property
    def peak(self) -> Point:
        """Return the point with the most bytes on the device.

        The host memory of a CPU rank counts too.
        """
        return max(
            self.points,
            key=lambda point: point.total + (point.host if self.zero.settings.cpu else 0.0),
        )

    @cached_property
    def host(self) -> float:
        """Return the most bytes of one rank in host memory."""
        return max(self.zero.states.host, self.zero.in_update().host) + self.checkpoints.host

    def point(
        self,
        phase: str,
        position: float,
        states: StateBytes,
        activations: float = 0.0,
        transients: float = 0.0,
    ) -> Point:
        """Return a point with these model states."""
        sizes = {name: float(getattr(states, name)) for name in STATE_CATEGORIES}
        sizes |= {
            "activations": self.checkpoints.device + activations,
            "transients": transients,
        }
        return Point(phase, position, sizes, states.host + self.checkpoints.host)


class StageMemory(NamedTuple):
    """The memory of a rank in one stage of a run.

    Attributes:
        config: of that stage alone.
        name: the stage's, "" if the run has no stages.
    """

    config: RunConfig
    name: str
    memory: RankMemory


def largest_stage(config: RunConfig, memory_of: Callable[[RunConfig], RankMemory]) -> StageMemory:
    """Return the stage of a run that needs the most memory."""
    if not config.zero_tp.training.stages:
        return StageMemory(config, "", memory_of(config))
    configs = [config.stage_config(index) for index in range(len(config.stages))]
    memories: dict[tuple[Any, ...], RankMemory] = {}
    stages = []
    for stage, one in zip(config.stages, configs, strict=True):
        # Stages differ in data and rates, too, which take no memory.
        key = (stage.batch, stage.length, stage.recompute)
        if key not in memories:
            memories[key] = memory_of(one)
        stages.append(StageMemory(one, stage.name, memories[key]))
    return max(stages, key=lambda stage: stage.memory.peak.total)


def rank_memory(
    config: RunConfig, workload: Workload, model: ModelSize | None = None
) -> RankMemory:
    """Return the memory of one rank of the run.

    Args:
        config: loaded with a world size.
        workload: `workload_of(config, …)`.
        model: `run_model_size(config)`, if the caller has it.
    """
    model = model or run_model_size(config)
    recomputed = workload.fully_recomputed_layers(model.spec.layers)
    settings = ZeroSettings.of(config, cpu=workload.cpu)
    zero = ZeroMemory(model.parameters, settings, recomputed)
    checkpoints = workload.activation_checkpoint_bytes(model.spec.hidden, model.spec.layers)
    return RankMemory(zero, dry_run(config.hf_config(), workload), checkpoints)


# ---- the papers' formulas ------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperMemory:
    """The memory of one rank by the papers' formulas [bytes], at a ZeRO stage and with N_d =
    `data`.
    """

    model: ModelSize
    workload: Workload
    stage: int
    data: int

    @property
    def shares(self) -> list[tuple[float, int]]:
        """Return `ModelSize.shares` of this run's degrees."""
        return self.model.shares(self.workload.tensor, self.workload.expert, self.data)

    @property
    def layer(self) -> Layer:
        return Layer.of(self.model.spec, self.workload)

    def layer_bytes(self, *, recomputes: bool) -> float:
        """Return the activations that one layer keeps of one micro-batch, with or without
        recomputation.
        """
        layer = self.layer
        policy = self.workload.policy
        stores_scores = self.workload.stores_scores(self.model.spec)
        of_attention = formulas.eager_core if stores_scores else formulas.sdpa_fused_core
        spec = self.model.spec
        share = spec.attention_share

        def core(layer: Layer) -> float:
            return share * of_attention(layer) + (1 - share) * formulas.delta_core(layer, spec)

        if not recomputes or policy.mode == "none":
            return formulas.saved(layer, core)
        # Offloaded checkpoints are in host memory, and the plan counts them there.
        if policy.mode == "full":
            if self.workload.offloads_checkpoints:
                return 0.0
            return formulas.saved_full(layer, partitioned=self.workload.partitions_checkpoints)
        return formulas.saved_selective(layer, core, policy.chosen_modules)

    def all_layers_bytes(self) -> float:
        """Return the activations that all layers keep, in the micro-batch that keeps the most."""
        layers = self.model.spec.layers
        policy = self.workload.policy
        # The micro-batch that keeps its activations has the peak, however many others recompute.
        recomputed = 0 if policy.keep_micro_batches else len(policy.recomputed_layers(layers))
        saved = (layers - recomputed) * self.layer_bytes(recomputes=False)
        return saved + recomputed * self.layer_bytes(recomputes=True)

    def outside_bytes(self) -> float:
        """Return the activations that are kept outside the layers."""
        spec = self.model.spec
        vocabulary = self.workload.label_fraction * spec.vocabulary
        return formulas.saved_outside_layers(
            self.layer, vocabulary, dropout=spec.dropouts.embedding > 0
        )

    def bytes(self) -> dict[str, float]:
        """Return the bytes by category: parameters, gradients, optimizer, activations, those
        outside the layers.
        """
        return {
            **formulas.model_states_of_shares(self.shares, self.stage, self.workload.itemsize),
            "activations": self.all_layers_bytes(),
            "outside layers": self.outside_bytes(),
        }
