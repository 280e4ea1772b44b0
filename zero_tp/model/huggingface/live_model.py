"""Compare a live model of transformers' own class with its config.

transformers' modules read the config when they are built. A later change of either is a difference:
the module's value counts in a forward. Ties, the padding row, dropout and rounded rotary
frequencies are adopted; every other difference is refused by name.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.loss.loss_utils import LOSS_MAPPING

from zero_tp.base.errors import UserError, shown
from zero_tp.model.architectures import Architecture, architecture_of, weights_of
from zero_tp.model.architectures.spec import Rotary, TransformerSpec
from zero_tp.model.weights.native import native_model

COMPARED = (bool, int, float, str, tuple, list, dict, type(None), FunctionType, BuiltinFunctionType)
"""Types of the attributes of a module that are compared. Others are configs and lists of
modules.
"""
IGNORED = (
    "gradient_checkpointing",
    "name_or_path",
    "loss_type",
    "kernel_config",
    "all_tied_weights_keys",
)
"""Attributes without effect on a forward, or compared elsewhere."""
IGNORED_IN_BASE_MODEL = ("vocab_size", "padding_idx")
"""Attributes of a model without a head that no forward reads; a resize of the vocabulary leaves
them.
"""
HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils")
"""Modules of hooks that change nothing: they record outputs, or let inputs of frozen layers need
gradients.
"""
LIBRARIES = ("torch", "transformers")
_MODULE_ATTRIBUTES = vars(nn.Module()).keys()
_ABSENT = object()


def read_live_model(native: Any, class_name: str) -> tuple[PretrainedConfig, TransformerSpec]:
    """Return a config and a spec of what a live model computes.

    The config is a copy, whose class and ties are those of the model. Dropout, padding row and
    rounding of rotary frequencies are in the spec only.

    Which of a config's fields a module's dropout comes from is seen in a second model, built from a
    config whose dropouts are markers. GPT-2, of which someone has set all attention dropouts to 0:

        field          marker    module of the second model    p there    p in the live model
        resid_pdrop    0.0123    h.0.mlp.dropout               0.0123     0.1
        embd_pdrop     0.0133    drop                          0.0133     0.1
        attn_pdrop     0.0143    h.0.attn.attn_dropout         0.0143     0.0, which is adopted

    Args:
        class_name: the supported class that it is an instance of.

    Raises:
        UserError: a config that our layers can't compute, or another difference between the model
            and its config.
    """
    architecture = architecture_of(native.config)
    config = copy.deepcopy(native.config)
    config.architectures = [class_name]  # it decides about the sentence head
    config.tie_word_embeddings = _is_tied(native, architecture)
    # Refuses what cannot be computed, before a second model is built.
    architecture.spec(config)
    marked = copy.deepcopy(config)
    markers = {
        # Probabilities that nobody sets, a different one for each field.
        0.0123456789 + index / 1024: field
        for index, field in enumerate(architecture.fields.dropouts)
    }
    for marker, field in markers.items():
        setattr(marked, field, marker)
    # Without weights but with buffers, whose values are compared.
    reference = native_model(marked, with_buffers=True)
    _check_class(native, type(reference))
    _check_loss(native, reference)
    dropouts = _check_modules(native, reference, _word_embedding(config), markers)
    _check_parameters(native, reference, architecture)
    weights = {name for weight in weights_of(config) for name in weight.names}
    rounded_to = _check_buffers(native, reference, weights)
    for field, p in dropouts.items():
        setattr(marked, field, p)
    # The module's, because a forward reads no `pad_token_id`.
    padding: int | None = native.get_submodule(_word_embedding(config)).padding_idx
    spec = replace(architecture.spec(marked), padding_token=padding)
    if rounded_to is not None:
        rounded = {rotary: _rounded(rotary, rounded_to) for rotary in spec.rotaries if rotary}
        spec = replace(spec, rotaries=tuple(one and rounded[one] for one in spec.rotaries))
    return config, spec


def _refusal(
    place: str, problem: str, remedy: str = "give a model that its config describes"
) -> UserError:
    return UserError(f"model: {place}: {problem}; {remedy}")


def _is_tied(native: Any, architecture: Architecture) -> bool:
    """Return whether the output layer is the word embedding."""
    parameters = dict(native.named_parameters(remove_duplicate=False))
    tied = {
        alias: parameters.get(alias) is parameters.get(source)
        for alias, source in architecture.tied.items()
    }
    # BERT ties two tensors, the decoder's weight and bias: both or none, and our encoders only
    # both.
    if any(tied.values()) != all(tied.values()) or not (any(tied.values()) or architecture.causal):
        alias = next(alias for alias, is_tied in tied.items() if not is_tied)
        problem = (
            f"is not tied to {architecture.tied[alias]}, and encoders are computed with tied "
            "embeddings"
        )
        raise _refusal(alias, problem, "call its tie_weights()")
    return all(tied.values())


def _word_embedding(config: PretrainedConfig) -> str:
    """Return the name of the word embedding in the native class."""
    (weight,) = (
        weight
        for weight in weights_of(config)
        if weight.our_name == "transformer.embedding.word.weight"
    )
    return weight.names[0].removesuffix(".weight")


def _check_class(native: Any, base: type) -> None:
    """Refuse a subclass of transformers' class that overrides a method."""
    mro = type(native).__mro__
    for subclass in mro[: mro.index(base)]:
        for name, value in vars(subclass).items():
            is_method = isinstance(value, FunctionType | property | classmethod | staticmethod)
            if is_method and name != "__init__" and hasattr(base, name):
                problem = f"its {name} replaces that of {base.__name__}, and would not run"
                raise _refusal(subclass.__name__, problem, f"give a {base.__name__}")


def _check_loss(native: Any, reference: Any) -> None:
    default = LOSS_MAPPING["ForCausalLM"]
    losses = [
        vars(model).get("_loss_function") or LOSS_MAPPING.get(model.loss_type, default)
        for model in (native, reference)
    ]
    if losses[0] is not losses[1]:
        problem = (
            f"its loss_function is replaced by {getattr(losses[0], '__name__', losses[0])}, and "
            "would not run"
        )
        raise _refusal(type(native).__name__, problem, "give a model with the loss of its class")


def _check_modules(
    native: Any, reference: Any, word_embedding: str, markers: Mapping[float, str]
) -> dict[str, float]:
    """Compare the modules' names, classes, methods, hooks and attributes; return the dropout of
    each config field.

    Args:
        markers: the reference's dropout → field of the config.
    """
    live, expected = (
        dict(model.named_modules(remove_duplicate=False)) for model in (native, reference)
    )
    for name, module in live.items():
        if name not in expected:
            problem = (
                f"a {type(module).__name__} that a {type(reference).__name__} of its config lacks"
            )
            raise _refusal(name, f"{problem}, and would be lost")
    dropouts: dict[str, tuple[float, str]] = {}
    for name, other in expected.items():
        if name not in live:
            raise _refusal(name, f"is missing; its config gives a {type(other).__name__}")
        module = live[name]
        place = name or type(native).__name__
        # The model itself may be a subclass, which `_check_class` has looked at.
        if module is not native and type(module) is not type(other):
            raise _refusal(
                place, f"is a {type(module).__name__}; its config gives a {type(other).__name__}"
            )
        if module.training != native.training:
            modes = ("training", "evaluation") if module.training else ("evaluation", "training")
            problem = f"is in {modes[0]} mode, but the model in {modes[1]} mode"
            raise _refusal(place, problem, "call the model's train() or eval()")
        _check_methods(place, module)
        _check_hooks(place, module)
        ignored = {*IGNORED, *(IGNORED_IN_BASE_MODEL if module is native.base_model else ())}
        ignored |= {"padding_idx"} if name == word_embedding else set()
        for attribute, value, default in _attributes(module, other):
            # The second model shows which field this attribute is read from; the live one has the
            # probability.
            if isinstance(default, float) and default in markers:
                p, first = dropouts.setdefault(markers[default], (value, f"{place}: {attribute}"))
                if value != p:
                    problem = f"{attribute} is {shown(value)}, but {first} is {shown(p)}"
                    raise _refusal(
                        place, problem, "give all dropouts of a kind the same probability"
                    )
            elif attribute not in ignored and value is not default and value != default:
                raise _refusal(
                    place, f"{attribute} is {_shown(value)}; its config gives {_shown(default)}"
                )
        if isinstance(getattr(module, "config", None), PretrainedConfig):
            _check_config(place, module.config, native.config)
    return {field: p for field, (p, _) in dropouts.items()}


def _attributes(module: nn.Module, other: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each compared attribute, its value, and its value in the other module."""
    for name, default in vars(other).items():
        if (
            name not in _MODULE_ATTRIBUTES
            and not name.startswith("_")
            and isinstance(default, COMPARED)
        ):
            yield name, vars(module).get(name, _ABSENT), default


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "missing"
    return value.__name__ if isinstance(value, FunctionType | BuiltinFunctionType) else shown(value)


def _check_methods(place: str, module: nn.Module) -> None:
    """Refuse methods that replace those of transformers' class, on the module or in its class."""
    # Only the module's own attributes: what its class has is transformers'.
    for name in () if _has_device_hook(module) else vars(module):
        if callable(getattr(type(module), name, None)):
            raise _refusal(
                place,
                f"its {name} is replaced, and would not run",
                "give a model with its class's own",
            )
    forward: Any = type(module).forward
    # Kernels of other libraries replace the forward of transformers' class itself, for all its
    # models.
    if forward.__globals__["__name__"].partition(".")[0] not in LIBRARIES:
        problem = (
            f"the forward of {type(module).__name__} is {forward.__globals__['__name__']}'s, and "
            "would not run"
        )
        raise _refusal(place, problem, "give a model with its class's own")


def _has_device_hook(module: nn.Module) -> bool:
    """Return whether accelerate has replaced the forward only to move inputs to its device.

    `device_map` does so. The class's own forward still runs.
    """
    hooks = sys.modules.get("accelerate.hooks")
    hook: Any = vars(module).get("_hf_hook")
    forward = vars(module).get("_old_forward")
    is_own = getattr(forward, "__func__", None) is type(module).forward
    return (
        is_own and hooks is not None and type(hook) is hooks.AlignDevicesHook and not hook.offload
    )


def _check_hooks(place: str, module: nn.Module) -> None:
    for attribute, kind in HOOKS.items():
        for hook in vars(module)[attribute].values():
            if getattr(hook, "__module__", "") not in HARMLESS_HOOKS:
                raise _refusal(place, f"has a {kind}, which would not run", "remove it")
    for name, parameter in module.named_parameters(recurse=False):
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise _refusal(
                f"{place}.{name}", "has a gradient hook, which would not run", "remove it"
            )


def _check_config(place: str, config: PretrainedConfig, expected: PretrainedConfig) -> None:
    """Refuse a module that reads another config than the model's."""
    if config is expected:
        return
    theirs = vars(config)
    ours = vars(expected)
    for name in (*ours, *theirs):
        if theirs.get(name) != ours.get(name):
            problem = (
                f"its own config has {name} {shown(theirs.get(name))}, the model's "
                f"{shown(ours.get(name))}"
            )
            raise _refusal(place, problem, "give all modules one config")


def _check_parameters(native: Any, reference: Any, architecture: Architecture) -> None:
    """Compare names, shapes, dtypes and shared parameters."""
    live, expected = (
        dict(model.named_parameters(remove_duplicate=False)) for model in (native, reference)
    )
    first = next(iter(live.values()))
    names: dict[int, str] = {}
    addresses: dict[int, str] = {}
    for name, parameter in live.items():
        if name not in expected:
            raise _refusal(
                name, f"a {type(reference).__name__} of its config has none, and it would be lost"
            )
        shape, other = (
            # A parameter that ZeRO-3 has partitioned is empty; DeepSpeed keeps its shape apart.
            tuple(getattr(weight, "ds_shape", weight.shape))
            for weight in (parameter, expected[name])
        )
        if shape != other:
            raise _refusal(name, f"shape {shape}; its config gives {other}")
        if parameter.is_meta:
            raise _refusal(
                name, "has no data: it is on the meta device", "load the whole model into memory"
            )
        if parameter.dtype != first.dtype:
            raise _refusal(
                name,
                f"is {parameter.dtype}, others {first.dtype}",
                "give one dtype, such as by model.to",
            )
        # Two names of one parameter are a tie. Ours would be two parameters, unless the
        # architecture ties them too.
        sharing = names.setdefault(id(parameter), name)
        if (
            sharing != name
            and architecture.tied.get(name) != sharing
            and architecture.tied.get(sharing) != name
        ):
            raise _refusal(
                name,
                f"is the same parameter as {sharing}, and would be another",
                "give each its own",
            )
        # Two parameters of one memory change together, which our copies of them would not.
        if parameter.numel() and addresses.setdefault(parameter.data_ptr(), sharing) != sharing:
            problem = (
                f"shares its memory with {addresses[parameter.data_ptr()]}, which is another "
                "parameter"
            )
            raise _refusal(name, problem, "tie the parameters themselves, or copy the values")
    for name in expected:
        if name not in live:
            raise _refusal(name, f"is missing; a {type(reference).__name__} of its config has it")


def _check_buffers(native: Any, reference: Any, weights: Set[str]) -> torch.dtype | None:
    """Compare the buffers' values; return the narrower dtype to which a cast has rounded rotary
    frequencies.

    Args:
        weights: names of tensors that are weights, whose values no config gives.
    """
    live, expected = (
        {name: buffer for name, buffer in model.named_buffers() if name not in weights}
        for model in (native, reference)
    )
    rounded_to = None
    for name in (*expected, *live):
        buffer = live.get(name)
        other = expected.get(name)
        if buffer is None or other is None:
            state = "is missing" if buffer is None else "is a buffer that its config does not give"
            raise _refusal(name, state)
        # `.bfloat16()` rounds buffers as well, loading in bf16 does not. A rounding is adopted, any
        # other difference refused.
        if not _is_equal(buffer, other.to(buffer.dtype)):
            raise _refusal(name, "its values differ from those that its config gives")
        # Other buffers, such as the scale of embeddings, are rounded by the class itself.
        if name.endswith("inv_freq") and not _is_equal(buffer, other):
            rounded_to = buffer.dtype
    rotaries = architecture_of(reference.config).spec(reference.config).rotaries
    if rounded_to is not None and any(one is not None and one.by_length for one in rotaries):
        problem = (
            f"rotary frequencies in {rounded_to}, which 'dynamic' computes again in torch.float32"
        )
        raise _refusal(type(native).__name__, problem, f"open the model with dtype={rounded_to}")
    return rounded_to


def _is_equal(buffer: Tensor, other: Tensor) -> bool:
    # fp64 holds the values of both dtypes.
    return buffer.shape == other.shape and bool((buffer.cpu().double() == other.double()).all())


def _rounded(rotary: Rotary, dtype: torch.dtype) -> Rotary:
    """Return the rotary positions with rounded frequencies, as transformers' model after a cast."""

    def frequencies(length: int, device: torch.device) -> tuple[Tensor, float]:
        exact, scale = rotary.frequencies(length, device)
        # Rounded, but computed with in fp32, as transformers does with a rounded buffer.
        return exact.to(dtype).to(exact.dtype), scale

    return replace(rotary, frequencies=frequencies)
