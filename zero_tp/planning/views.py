"""From a run's config to its views: the model built on the meta device gives parameters and shape."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from zero_tp.config import RunConfig
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.parallel.layout import whole_shape
from zero_tp.planning.memory import PaperView, TrueView, layer_settings
from zero_tp.planning.shape import Shape
from zero_tp.planning.walk import Setting
from zero_tp.planning.zero import Parameters, ZeroMemory, ZeroSettings
from zero_tp.topology import Topology

ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}


def model_of(config: PretrainedConfig, tensor: int, sequence: bool) -> tuple[Shape, Parameters, int]:
    """(shape, TP rank 0's parameters, elements of the whole model), exact for every architecture table.

    Raises:
        UserError: an architecture or size that is not supported.
    """
    model = ZeroTPForCausalLM(config, Topology(tensor, sequence, world=tensor), device="meta")
    matrices: list[int] = []
    flats: list[int] = []
    whole = 0
    for parameter in model.parameters():
        dimensions = whole_shape(parameter)
        (matrices if len(dimensions) >= 2 else flats).append(parameter.numel())
        product = 1
        for size in dimensions:
            product *= size
        whole += product
    modules: list[tuple[int, ...]] = []
    places: list[int] = []
    for name, module in model.named_modules():
        if sizes := tuple(parameter.numel() for parameter in module.parameters(recurse=False)):
            modules.append(sizes)
            parts = name.split(".")
            after = name == "head" or "final_norm" in parts
            places.append(int(parts[2]) if "layers" in parts else model.spec.layers if after else -1)
    parameters = Parameters(tuple(matrices), tuple(flats), tuple(modules), tuple(places))
    return Shape.of(model.spec), parameters, whole


def base_setting(config: RunConfig, *, cpu: bool) -> Setting:
    parallel, length = config.zero_tp.parallel, config.zero_tp.data.sequence_length
    sequence = parallel.sequence and parallel.tensor > 1
    return Setting(
        length,
        config.micro_batch,
        parallel.tensor,
        sequence,
        ELEMENT[config.dtype],
        cpu,
        documents=config.zero_tp.data.document_attention == "reset",
    )


def true_view(config: RunConfig, *, cpu: bool, model: tuple[Shape, Parameters, int] | None = None) -> TrueView:
    """What one rank of the run allocates.

    Args:
        config: loaded with a world size.
        cpu: the ranks are CPU processes; else accelerators.
        model: what `model_of` gives, if it is known.
    """
    parallel, policy = config.zero_tp.parallel, config.zero_tp.recompute_policy
    shape, parameters, _ = model or model_of(config.hf_config(), parallel.tensor, parallel.sequence)
    deepspeed = config.deepspeed_config()
    settings = layer_settings(
        shape.windows,
        base_setting(config, cpu=cpu),
        policy,
        policy.recomputed_layers(shape.layers),
        deepspeed.get("activation_checkpointing", {}),
    )
    zero = ZeroSettings.of(deepspeed, config.data_parallel, cpu=cpu, recomputed=policy.mode == "full")
    return TrueView(shape, settings, ZeroMemory(parameters, zero))


def paper_view(
    config: RunConfig,
    *,
    pipeline: int = 1,
    interleaving: int = 1,
    model: tuple[Shape, Parameters, int] | None = None,
) -> PaperView:
    """What the papers count for one rank of the run."""
    parallel, policy = config.zero_tp.parallel, config.zero_tp.recompute_policy
    shape, _, whole = model or model_of(config.hf_config(), parallel.tensor, parallel.sequence)
    settings: dict[str, Any] = config.deepspeed_config().get("activation_checkpointing", {})
    base = base_setting(config, cpu=False)
    setting = layer_settings((None,), base, policy, range(1), settings)[0]
    return PaperView(
        shape=shape,
        setting=setting,
        mode=policy.mode,
        parameters=whole,
        stage=config.zero_stage,
        data=config.data_parallel,
        pipeline=pipeline,
        interleaving=interleaving,
        modules=policy.chosen_modules,
    )
