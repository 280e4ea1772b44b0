"""Check the model of a `zero_tp` block and the keys that depend on it.

Architectures are imported inside functions, because they load torch and transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError, shown
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.base.weight_files import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from zero_tp.model.architectures.spec import TransformerSpec

FROM_PRETRAINED = "from_pretrained"
BALANCING_LOSS_FIELDS = ("output_router_logits", "router_aux_loss_coef")
"""Fields of the load-balancing loss, which may be given with `from_pretrained`: published
configs omit them.
"""
DEEPSEEK_V3_RATE = 0.001
"""By the documentation of Megatron Core's `--moe-router-bias-update-rate`."""
SET_BY_OTHER_KEYS = {
    "attn_implementation": "zero_tp.attention",
    "_attn_implementation": "zero_tp.attention",
    **dict.fromkeys(("dtype", "torch_dtype"), "bf16.enabled or fp16.enabled"),
}
"""Arguments of transformers' `from_pretrained` that other keys of the file replace."""


def check_model(
    zero_tp: ZeroTP, saved: dict[str, Any] | None = None, data: int | None = None
) -> PreTrainedConfig:
    """Return the Hugging Face config of `zero_tp.model`.

    Args:
        saved: the config to use if the directory of `from_pretrained` is gone.
        data: DP degree, if it is known.
    """
    from zero_tp.model.architectures import architecture_of

    config = model_config(zero_tp.model, saved)
    spec = architecture_of(config).spec(config)
    _check_objective(zero_tp, spec, config)
    spec.check(zero_tp.parallel.tensor, zero_tp.parallel.expert, data)
    check_length(zero_tp, config)
    if zero_tp.attention == "flex_attention" and not spec.has_flex_core:
        problem = (
            f'"flex_attention" is for soft caps and sinks of scores; a {config.model_type} has none'
        )
        raise ConfigError("zero_tp.attention", problem, 'take "sdpa"')
    if zero_tp.training.qk_clip_threshold is not None:
        spec.check_qk_clip()
    if zero_tp.logging.experts and spec.experts is None:
        raise ConfigError(
            "zero_tp.logging.experts", f"{config.model_type} has no experts", "leave it out"
        )
    if zero_tp.training.router_z_loss and spec.experts is None:
        key = "zero_tp.training.router_z_loss"
        raise ConfigError(key, f"a {config.model_type} has no experts", "leave it out")
    if zero_tp.training.router_bias_update_rate and not spec.has_correction_bias:
        key = "zero_tp.training.router_bias_update_rate"
        raise ConfigError(key, f"no router of a {config.model_type} has a bias", "leave it out")
    return config


def model_config(model: dict[str, Any], saved: dict[str, Any] | None = None) -> PreTrainedConfig:
    """Return the Hugging Face config of `zero_tp.model`, without checks against other keys."""
    from zero_tp.model.architectures import supported_types
    from zero_tp.model.architectures.configs import config_from_block

    if not {"model_type", FROM_PRETRAINED} & model.keys():
        remedy = f'give {supported_types()}; or {{"{FROM_PRETRAINED}": DIR}}'
        raise ConfigError(f"{MODEL_KEY}.model_type", "required, but not given", remedy)
    for name in model.keys() & SET_BY_OTHER_KEYS.keys():
        raise ConfigError(
            f"{MODEL_KEY}.{name}", "is not a field of a model", f"use {SET_BY_OTHER_KEYS[name]}"
        )
    return (
        config_from_block(model)
        if FROM_PRETRAINED not in model
        else _pretrained_config(model, saved)
    )


def _check_objective(zero_tp: ZeroTP, spec: TransformerSpec, config: PreTrainedConfig) -> None:
    masked = zero_tp.masked
    key = "zero_tp.objective"
    if masked is not None and spec.causal:
        problem = f'"masked" does not train this model: {config.model_type} is a causal decoder'
        raise ConfigError(key, problem, "leave it out, or train another model")
    if masked is None and not spec.causal:
        problem = f'"causal" does not train this model: {config.model_type} is no causal decoder'
        raise ConfigError(key, problem, 'set it to "masked"')
    if masked is not None and masked.sentence_order and spec.token_types < 2:
        problem = f"{spec.token_types}, but the samples of zero_tp.objective have 2 segments"
        remedy = "use 2, or set zero_tp.objective.sentence_order to false"
        raise ConfigError(f"{MODEL_KEY}.type_vocab_size", problem, remedy)


def _pretrained_config(model: dict[str, Any], saved: dict[str, Any] | None) -> PreTrainedConfig:
    """Return the config of `{"from_pretrained": DIR, …}`, or the saved one if DIR is gone.

    Other fields in the block may change dropout probabilities and the load-balancing loss.
    """
    from zero_tp.model.architectures import ARCHITECTURES
    from zero_tp.model.architectures.configs import config_from_directory, config_from_json

    directory = model[FROM_PRETRAINED]
    key = f"{MODEL_KEY}.{FROM_PRETRAINED}"
    if not isinstance(directory, str) or not directory:
        raise ConfigError(
            key, f"expected a string, got {shown(directory)}", "give a Hugging Face model directory"
        )
    changes = {name: value for name, value in model.items() if name != FROM_PRETRAINED}
    allowed = dict.fromkeys(
        name for entry in ARCHITECTURES.values() for name in entry.fields.dropouts
    )
    allowed |= dict.fromkeys(BALANCING_LOSS_FIELDS)
    for name in changes:
        if name not in allowed:
            problem = f"given with {FROM_PRETRAINED}, but {directory} decides it"
            raise ConfigError(
                f"{MODEL_KEY}.{name}",
                problem,
                f"leave it out; only {', '.join(allowed)} can be given",
            )
    # A resumed run reads its weights from the checkpoint, so the directory may be gone.
    if saved is not None and not Path(directory).exists():
        return config_from_json(saved, Path(directory), **changes)
    return config_from_directory(resolve(directory, key, weights=False), key, **changes)


def router_bias_note(zero_tp: ZeroTP, config: PreTrainedConfig) -> list[str]:
    """Return a line if a run leaves the biases of its routers as they are."""
    from zero_tp.model.architectures import architecture_of

    key = "zero_tp.training.router_bias_update_rate"
    spec = architecture_of(config).spec(config)
    if not spec.has_correction_bias or zero_tp.training.router_bias_update_rate:
        return []
    return [
        f"{key}: 0, so the biases of the routers stay as they are, as transformers trains a "
        f"{config.model_type}; DeepSeek-V3's rate was {DEEPSEEK_V3_RATE:g}"
    ]


def ignored_fields(model: dict[str, Any]) -> list[str]:
    """Return a line on fields of config.json that have no effect.

    The file is that of `from_pretrained`; without it there is no line.
    """
    from zero_tp.model.architectures.configs import describe_ignored_fields

    if FROM_PRETRAINED not in model:
        return []
    directory = resolve(model[FROM_PRETRAINED], f"{MODEL_KEY}.{FROM_PRETRAINED}", weights=False)
    return describe_ignored_fields(directory) if directory.exists() else []


def check_length(zero_tp: ZeroTP, config: PreTrainedConfig) -> None:
    """Check that the model has the positions of a sample, and that SP can split them."""
    from zero_tp.model.architectures import architecture_of

    positions = architecture_of(config).spec(config).positions
    key = "zero_tp.data.sequence_length"
    tensor = zero_tp.parallel.tensor
    length = zero_tp.data.sequence_length
    if length > positions:
        problem = f"{length} tokens, but the model has {positions} positions"
        name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        longer = (
            "use another model" if FROM_PRETRAINED in zero_tp.model else f"raise {MODEL_KEY}.{name}"
        )
        raise ConfigError(key, problem, f"shorten it, or {longer}")
    # Each rank holds length / tensor positions of every row.
    if zero_tp.parallel.sequence and length % tensor:
        inequality = f"{length} ≠ tensor {tensor} × {length / tensor:.4g} tokens a rank"
        remedy = f"use a multiple of {tensor}, or set zero_tp.parallel.sequence to false"
        raise ConfigError(key, inequality + ", which sequence parallelism needs", remedy)
