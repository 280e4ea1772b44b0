"""Build transformers' own models, and open those of a Hugging Face directory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)
from transformers.utils import GENERATION_CONFIG_NAME, logging

from zero_tp.base.errors import UserError, first_line, shown
from zero_tp.base.strict_json import read_json
from zero_tp.base.weight_files import is_finite, is_regular, open_weights
from zero_tp.model.architectures import (
    ARCHITECTURES,
    architecture_of,
    file_tensors,
    native_class_of,
    weights_of,
)
from zero_tp.model.architectures.configs import (
    CONFIG,
    MAX_LAYERS,
    QUANTIZATION,
    check_numbers,
    read_config_json,
    refuse_quantized,
)
from zero_tp.model.weights.quantized import join_quantized, whole_tensors
from zero_tp.parallel.safetensors_files import DTYPE_NAMES

FLOATING_DTYPES = ("F64", "F32", "BF16", "F16")
EXTERNAL = (
    "configuration_files",
    "transformers_weights",
    "fusion_config",
    "kernel_config",
    "distributed_config",
)
"""Fields of a config.json that make transformers load other files or code."""
LOADING_PROBLEMS = {
    "missing_keys": "weights missing in the files:",
    "unexpected_keys": "unexpected tensor",
    "mismatched_keys": "tensors of another shape:",
    "error_msgs": "the weights can't be read:",
}
"""Keys of transformers' loading report → descriptions."""
LAYER_COUNT_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def native_model(config: PretrainedConfig, *, with_buffers: bool = False) -> Any:
    """Build transformers' native model on the meta device: the table's class, else
    AutoModelForCausalLM's.

    Args:
        with_buffers: its buffers, such as rotary frequencies, have values.
    """
    # Names and shapes are wanted, not data, so a model larger than the memory costs none.
    with init_empty_weights(include_buffers=not with_buffers):
        if config.model_type in ARCHITECTURES:
            native = getattr(transformers, native_class_of(config))
            # The caller's config keeps its own choice of attention.
            config = copy.deepcopy(config)
            if not native._supports_sdpa:  # MegatronBert
                config._attn_implementation = "eager"
            # Not by `_from_config`, which partitions over ranks where Trainer runs ZeRO-3.
            return native(config)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def stored_shapes(native: Any, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a native model's tensors, by their names in files."""
    return {
        name: tuple(tensor.shape)
        for name, tensor in file_tensors(weights_of(config), native.state_dict()).items()
    }


def non_finite_error(directory: Path, name: str, tensor: Tensor) -> UserError:
    """Return the error of a tensor that was read and holds NaN or Inf."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return UserError(
        f"{directory}: tensor {name} holds NaN or Inf as {dtype}; give another copy of the model"
    )


def generation_config(directory: Path) -> GenerationConfig | None:
    """Return the directory's generation config, or None."""
    path = directory / GENERATION_CONFIG_NAME
    if not is_regular(path):
        return None
    settings = read_json(path)
    try:
        return GenerationConfig.from_dict(settings)
    except Exception as error:  # transformers raises anything from KeyError to its own types here
        raise UserError(f"{path}: {' '.join(str(error).split())}; mend or remove it") from error


def open_any_config(directory: Path) -> PretrainedConfig:
    """Open the config of a Hugging Face directory of any model that transformers has a class for.

    Code that comes with the directory is never run: a config with an `auto_map` is read by
    transformers' own class.
    """
    raw = read_config_json(directory)
    path = directory / CONFIG
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        why = "transformers has no class of its own for it"
        if "auto_map" in raw:
            why += ", and code that comes with a model is never run"
        if raw.get(QUANTIZATION) is not None:
            why += "; its weights are quantized, too"
        raise UserError(f"{path}: model_type {shown(model_type)}: {why}; give another model")
    methods = ARCHITECTURES[model_type].fields.quantizations if model_type in ARCHITECTURES else ()
    refuse_quantized(raw, directory, methods)
    _check_fields(raw, path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises anything from KeyError to its own types here
        raise UserError(f"{path}: {first_line(error)}") from error
    if raw.get(QUANTIZATION) is not None:
        del config.quantization_config  # the weights that are read are whole
    check_numbers(config, path)
    return config


def open_config(directory: Path) -> PretrainedConfig:
    """Open the config of a directory of any causal language model that transformers knows."""
    config = open_any_config(directory)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{directory}: {config.model_type} is not a causal language model")
    return config


def _check_fields(raw: dict[str, Any], path: Path) -> None:
    """Refuse fields that make transformers load other files or run code, and too many layers."""
    for name, value in raw.items():
        if isinstance(value, dict):
            _check_fields(value, path)
        if value is not None and name in EXTERNAL:
            raise UserError(
                f"{path}: {name} {shown(value)}: transformers would load other files; give another "
                "model"
            )
        if name.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise UserError(
                f"{path}: {name} {shown(value)}: code from elsewhere is never run; remove it from "
                "the file"
            )
        if name in LAYER_COUNT_FIELDS and isinstance(value, int) and value > MAX_LAYERS:
            raise UserError(
                f"{path}: {name} {shown(value)}: more layers than any model has; mend the file"
            )


def open_model(
    directory: Path,
    config: PretrainedConfig,
    dtype: torch.dtype | str = "auto",
    *,
    allow_pickle: bool = False,
) -> Any:
    """Open a Hugging Face directory of any causal architecture as transformers' own class.

    The model is on the CPU.

    Args:
        config: of `open_config`.
        dtype: of the weights; "auto": the config's, or that of the files.
        allow_pickle: read pickled weights where there are no safetensors.
    """
    tensors = open_weights(directory, allow_pickle)
    if config.model_type in ARCHITECTURES and architecture_of(config).fields.quantizations:
        methods = architecture_of(config).fields.quantizations
        tensors = whole_tensors(join_quantized(tensors, methods, directory)[0])
    check_layers(directory, config, tensors)
    try:
        native = native_model(config)
    except Exception as error:  # a config can make a class raise anything
        raise UserError(
            f"{directory / CONFIG}: transformers can't make its model: {first_line(error)}"
        ) from error
    if (
        type(config) in MODEL_FOR_MASKED_LM_MAPPING
        and getattr(native.config, "is_decoder", True) is False
    ):
        raise UserError(
            f"{directory}: {config.model_type} is an encoder, whose tokens see those after them; "
            "give a model that "
            "predicts the next token"
        )
    _check_native(directory, native, tensors)
    generation = generation_config(directory)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # LOADING_PROBLEMS reports mismatches in one line
    try:
        # With output_loading_info it returns a pair, which its annotations don't say.
        opened: Any = type(native).from_pretrained(
            None, config=native.config, state_dict=tensors, dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # transformers can raise anything here too
        raise UserError(f"{directory}: the weights can't be read: {first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    model, loading = opened
    for kind, problem in LOADING_PROBLEMS.items():
        if names := sorted(map(str, loading[kind])):
            listed = f"{', '.join(names[:3])} ({len(names)} in all)"
            raise UserError(
                f"{directory}: {problem} {listed}; {type(model).__name__} with this {CONFIG} has "
                "others"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not is_finite(parameter):
            raise non_finite_error(directory, name, parameter)
    model.generation_config = generation or model.generation_config
    return model.eval()


def check_layers(directory: Path, config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a config with more layers than tensors before its layers are made."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(tensors):
        raise UserError(
            f"{directory}: its config has {layers:,} layers, its files only {len(tensors):,} "
            "tensors"
        )


def _check_native(directory: Path, native: Any, tensors: Mapping[str, Tensor]) -> None:
    """Check shapes, dtypes and ties of the tensors that belong to the class.

    Their names may lack its base prefix.
    """
    expected = {
        name: tensor for name, tensor in native.state_dict().items() if tensor.is_floating_point()
    }
    prefix = f"{native.base_model_prefix}."
    stored = dict[str, str]()
    for file_name, tensor in tensors.items():
        name = next((name for name in (file_name, prefix + file_name) if name in expected), None)
        if name is None:
            continue
        if name in stored:
            raise UserError(f"{directory}: tensors {stored[name]} and {file_name} are both {name}")
        stored[name] = file_name
        check_shape_and_dtype(directory, file_name, tensor, tuple(expected[name].shape))
    for alias, source in native.all_tied_weights_keys.items():
        if (
            alias in stored
            and source in stored
            and not torch.equal(tensors[stored[alias]], tensors[stored[source]])
        ):
            raise tie_error(directory, stored[source], stored[alias])


def check_shape_and_dtype(
    directory: Path, name: str, tensor: Tensor, expected: tuple[int, ...]
) -> None:
    """Refuse a tensor of another shape, or of a dtype that is no floating one."""
    if tuple(tensor.shape) != expected:
        raise UserError(
            f"{directory}: tensor {name}: expected shape {expected}, found {tuple(tensor.shape)}"
        )
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    if dtype not in FLOATING_DTYPES:
        raise UserError(
            f"{directory}: tensor {name}: expected one of {', '.join(FLOATING_DTYPES)}, found "
            f"{dtype}"
        )


def tie_error(directory: Path, source: str, alias: str) -> UserError:
    """Return the error of two tensors that a config ties and that differ."""
    return UserError(
        f"{directory}: tensors {source} and {alias} differ, but its config ties them; set "
        "tie_word_embeddings to false "
        f"in its {CONFIG}"
    )
