"""Build models with the weights of a Hugging Face directory; each rank reads its slices."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    Architecture,
    Weight,
    aliases_of,
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
from zero_tp.model.weights.stacked_experts import divide_by_sizes, unstack_experts
from zero_tp.parallel.layout import Layout
from zero_tp.parallel.parameter import Init, SeededInit, whole_slice
from zero_tp.parallel.safetensors_files import DTYPE_NAMES
from zero_tp.parallel.spans import Index, Spans, overlaps, zero_padding
from zero_tp.parallel.topology import Topology

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


class PretrainedSource:
    """A `WeightSource` that reads this rank's slices of a Hugging Face directory.

    The constructor checks names, shapes and dtypes; `fill` reads a parameter when it is made.

    Args:
        config: the model's, of a supported model_type.
        allow_pickle: read pickled weights if there are no safetensors.
        seed: of heads that the files lack.

    Attributes:
        new_heads: descriptions of those heads.
        quantized: descriptions of weights that are dequantised where they are read.
        left_out: descriptions of parts of the files that the model lacks.
    """

    def __init__(
        self,
        directory: Path,
        config: PretrainedConfig,
        *,
        allow_pickle: bool = False,
        seed: int = 0,
    ):
        self.directory = directory
        named = _with_usual_prefixes(
            open_weights(directory, allow_pickle), architecture_of(config), directory
        )
        methods = architecture_of(config).fields.quantizations
        tensors, self.quantized = join_quantized(named, methods, directory)
        _check_layers(directory, config, tensors)
        self.weights = {weight.our_name: weight for weight in weights_of(config)}
        self.generation = generation_config(directory)
        native = native_model(config)
        expected = stored_shapes(native, config)
        unstacked = unstack_experts(tensors, self.weights.values(), native, directory)
        self.tensors = divide_by_sizes(unstacked, self.weights.values(), directory)
        self.file_names = _match_names(
            self.tensors, expected.keys(), architecture_of(config), directory
        )
        self.left_out = [
            f"{directory}: left out: {part}; exports lack it"
            for part in _untrained(
                self.tensors.keys() - self.file_names.values(), architecture_of(config)
            )
        ]
        aliases = aliases_of(config)
        # Old files hold an alias as well as its source, those of `safetensors.torch.save_model` one
        # of them.
        self.aliases = {
            source: alias for alias, source in aliases.items() if alias in self.file_names
        }
        for source, alias in self.aliases.items():
            # A file with the alias alone is the tied weight under its other name.
            self.file_names.setdefault(source, self.file_names[alias])
        heads = architecture_of(config).optional_heads
        self.new_heads = [
            head
            for head, pattern in heads.items()
            if _has_none_of(pattern, expected, self.file_names)
        ]
        absent_heads = "|".join(heads[head] for head in self.new_heads)
        self._seeded_init = SeededInit(seed)
        for name, shape in expected.items():
            if name in self.file_names:
                _check_shape_and_dtype(
                    directory, self.file_names[name], self.tensors[self.file_names[name]], shape
                )
            # Without new heads the pattern is empty and fits no name.
            elif name not in aliases and not re.fullmatch(absent_heads, name):
                raise UserError(f"{directory}: no tensor {name}; expected shape {shape}")

    def notes(self) -> Iterator[str]:
        """Yield lines on heads that are drawn, weights that are dequantised, and what is left
        out.
        """
        if self.new_heads:
            heads = ", ".join(self.new_heads)
            yield f"{self.directory}: has no weights of {heads}: drawn from the seed"
        for weights in self.quantized:
            yield f"{self.directory}: {weights} are dequantised to bf16"
        yield from self.left_out

    def fill(
        self,
        local: Tensor,
        name: str,
        whole: Sequence[int],
        layout: Layout,
        init: Init,
        topology: Topology,
    ) -> None:
        weight = self.weights[name]
        if weight.names[0] not in self.file_names:
            self._seeded_init.fill(local, name, whole, layout, init, topology)
            return
        rank = topology.tensor_rank, topology.tensor, topology.expert_rank
        spans = layout.spans(whole, *rank)
        # The last ranks' rows beyond the vocabulary are in no file, and `local` is uninitialised.
        zero_padding(local, spans)
        if weight.experts:
            # Files have one tensor an expert, our parameter a rank's experts: TP splits each
            # matrix, and expert parallelism their number.
            own = list(weight.matrices())[whole_slice(spans[0])]
            for matrix, target in zip(own, local, strict=True):
                self._read(target, matrix, spans[1:])
        else:
            self._read(local, weight, spans)
        # Each rank checks the slices that it has read; none reads a whole file.
        if not is_finite(local):
            raise non_finite_error(self.directory, ", ".join(weight.names), local)

    def _read(self, target: Tensor, weight: Weight, spans: Sequence[Spans]) -> None:
        """Read a part of one matrix, or of a vector, into `target`.

        Gate and up of width 4 are one parameter here and two tensors in files. Rank 1 of TP 2:

            parameter [8, h]    g0 g1 g2 g3 u0 u1 u2 u3
            target [4, h]       g2 g3 u2 u3
            it reads            gate_proj[2:4] → target[0:2],  up_proj[2:4] → target[2:4]

        Args:
            spans: the part's map along each dimension. Hugging Face's tensors split the rows, too.
        """
        rows, *columns = spans
        # A row layer is split along columns, which no file splits.
        whole_columns = [Spans.identity(along.whole_length) for along in columns]
        for name, stored_rows in weight.spans(rows.whole_length).items():
            for stored_index, index in overlaps((stored_rows, *whole_columns), spans):
                target[index] = self._slice(weight, name, stored_index)

    def _slice(self, weight: Weight, hf_name: str, index: Index) -> Tensor:
        """Return a slice of a Hugging Face tensor; `index` is that of our parameter's form."""

        def read(name: str) -> Tensor:
            # A memory-mapped file: the transpose is a view, and only the slice's pages are read.
            return weight.slice_stored(self.tensors[self.file_names[name]], index)

        source = read(hf_name)
        alias = self.aliases.get(hf_name)
        # Compared slice by slice, so no rank reads a whole embedding for it.
        if alias is not None and not torch.equal(source, read(alias)):
            raise _tie_error(self.directory, hf_name, alias)
        return source


def _match_names(
    tensors: Mapping[str, Tensor],
    expected: Collection[str],
    architecture: Architecture,
    directory: Path,
) -> dict[str, str]:
    """Return name in the native class → name in the files.

    Files of the bare model lack the prefix of the class with a head. Tensors that the architecture
    ignores are dropped.

        in files                            in the class
        wte.weight (a bare GPT2Model)       transformer.wte.weight
        embed_out.weight (GPT-NeoX)         lm_head.weight
        bert.….LayerNorm.gamma              bert.….LayerNorm.weight
        h.0.attn.bias (a causal mask)       dropped
    """
    file_names: dict[str, str] = {}
    native_names = {file_name: name for name, file_name in architecture.file_names.items()}
    for file_name, tensor in tensors.items():
        name = native_names.get(file_name, file_name)
        for old, new in architecture.obsolete_suffixes.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        # An unknown name gets the prefix too; `_is_ignorable` tries it with and without.
        name = name if name in expected else architecture.base_prefix + name
        if name in file_names:
            raise UserError(
                f"{directory}: tensors {file_names[name]} and {file_name} are both {name}"
            )
        if name in expected:
            file_names[name] = file_name
        elif not _is_ignorable(name, architecture):
            raise UserError(
                f"{directory}: unexpected tensor {file_name} of shape {tuple(tensor.shape)}; "
                f"{architecture.native_class} with this config.json has none of that name"
            )
    return file_names


def _with_usual_prefixes(
    tensors: Mapping[str, Tensor], architecture: Architecture, directory: Path
) -> Mapping[str, Tensor]:
    """Return the tensors with names as if no file had `other_prefixes`."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        usual = name
        for prefix, other in architecture.other_prefixes.items():
            if name.startswith(prefix):
                usual = other + name.removeprefix(prefix)
        if usual in renamed:
            raise UserError(f"{directory}: tensor {name}: there is a second {usual}")
        renamed[usual] = tensor
    return renamed


def _untrained(tensors: Collection[str], architecture: Architecture) -> Iterator[str]:
    """Yield a description of each part of the files that is left out.

    Args:
        tensors: names of those that the model lacks.
    """
    for pattern, part in architecture.untrained_parts.items():
        if names := sorted(name for name in tensors if re.fullmatch(pattern, name)):
            yield f"{part} (tensors such as {names[0]}, {len(names)} in all)"


def _is_ignorable(name: str, architecture: Architecture) -> bool:
    """Return whether a tensor belongs to an optional head or an untrained part, or is an obsolete
    buffer.

    Args:
        name: with the prefix.
    """
    patterns = [
        *architecture.optional_heads.values(),
        *architecture.untrained_parts,
        *(re.escape(architecture.base_prefix) + old for old in architecture.obsolete_tensors),
    ]
    bare = name.removeprefix(architecture.base_prefix)
    return any(re.fullmatch(pattern, form) for pattern in patterns for form in (name, bare))


def _has_none_of(pattern: str, expected: Collection[str], present: Collection[str]) -> bool:
    """Return whether the files have none of a head's tensors."""
    names = [name for name in expected if re.fullmatch(pattern, name)]
    return bool(names) and not any(name in present for name in names)


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
    _check_layers(directory, config, tensors)
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


def _check_layers(directory: Path, config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> None:
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
        _check_shape_and_dtype(directory, file_name, tensor, tuple(expected[name].shape))
    for alias, source in native.all_tied_weights_keys.items():
        if (
            alias in stored
            and source in stored
            and not torch.equal(tensors[stored[alias]], tensors[stored[source]])
        ):
            raise _tie_error(directory, stored[source], stored[alias])


def _check_shape_and_dtype(
    directory: Path, name: str, tensor: Tensor, expected: tuple[int, ...]
) -> None:
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


def _tie_error(directory: Path, source: str, alias: str) -> UserError:
    return UserError(
        f"{directory}: tensors {source} and {alias} differ, but its config ties them; set "
        "tie_word_embeddings to false "
        f"in its {CONFIG}"
    )
