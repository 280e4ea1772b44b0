"""Arguments of transformers' methods: refuse by name those that our models do not support."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from zero_tp.base.errors import UserError, shown
from zero_tp.base.weight_files import is_hub_name

UNSUPPORTED_COLUMNS = {
    "inputs_embeds": "each rank looks up the tokens whose embeddings it holds; give input_ids",
    **dict.fromkeys(
        ("encoder_hidden_states", "encoder_attention_mask"),
        "there is no attention to an encoder; leave the column out",
    ),
}
"""Arguments that rows of a data set may have, and transformers' classes read."""
UNSUPPORTED_IN_FORWARD = {
    **UNSUPPORTED_COLUMNS,
    "output_hidden_states": "no layer's output is kept; register a forward hook on the layers that "
    "you want",
    "output_attentions": "attention weights are not formed",
    "cu_seq_lens_q": "give document_ids, or position_ids that restart with each document",
    "seq_idx": "give document_ids, or position_ids that restart with each document",
}
UNSUPPORTED_IN_FROM_PRETRAINED = {
    "config": "the directory's config.json is read; change a copy of it",
    "device_map": "a model is split by its topology; give topology and device, such as "
    'device="cuda"',
    "quantization_config": "weights are floating-point; quantize what save_pretrained writes",
    "state_dict": "weights come from the directory; call load_state_dict on the model",
    "subfolder": "the files of the directory itself are read; download the folder and give its "
    "path",
    "tp_plan": "give topology, such as Topology(2, sequence=True)",
    "trust_remote_code": "code that comes with a model is never run; leave it out",
    "use_safetensors": "leave it out for safetensors; allow_pickle=True reads pickled weights too",
    "variant": "the files without a variant are read; leave it out",
}
Method = TypeVar("Method", bound=Callable[..., Any])


def refuse_arguments(
    method: str, unknown: Mapping[str, Any], known: Iterable[str], reasons: Mapping[str, str]
) -> None:
    """Refuse arguments that a method does not have. The values None and False change nothing."""
    for name, value in unknown.items():
        # Callers pass the defaults of transformers' methods on, which ask for nothing.
        if value is not None and value is not False:
            reason = reasons.get(name, f"its arguments are {', '.join(known)}")
            raise UserError(f"{method}: {name} is not supported: {reason}")


def forward_options(
    model: nn.Module, forward: Callable[..., Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the options that are arguments of `forward`. Others may be None or False, and are
    left out.
    """
    known = [name for name in inspect.signature(forward).parameters if name != "self"]
    unknown = {name: value for name, value in options.items() if name not in known}
    refuse_arguments(f"{type(model).__name__}.forward", unknown, known, UNSUPPORTED_IN_FORWARD)
    return {name: value for name, value in options.items() if name in known}


def with_signature_of(forward: Callable[..., Any], *, hidden: str) -> Callable[[Method], Method]:
    """Give a method of `*args, **kwargs` the signature of `forward`, without the argument `hidden`.

    Trainer and `generate` read the signature. In an evaluation Trainer requires every argument with
    "label" in its name, so an optional one of our own must not show. Trainer drops columns that are
    no arguments, so those that are refused must show.
    """
    signature = inspect.signature(forward)
    shown_parameters = [
        parameter for name, parameter in signature.parameters.items() if name != hidden
    ]
    for name in UNSUPPORTED_COLUMNS:
        shown_parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        )
    shown_parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))

    def decorate(method: Method) -> Method:
        method.__signature__ = signature.replace(parameters=shown_parameters)  # type: ignore[attr-defined]
        return method

    return decorate


def append_revision(model: str | os.PathLike[str], revision: str | None) -> str:
    """Append a revision to a model's name on the hub, as `owner/name@revision`."""
    name = os.fspath(model)
    if revision is None or name.endswith(f"@{revision}"):
        return name
    if not is_hub_name(name) or "@" in name:
        state = "names its own" if is_hub_name(name) else "is a directory, which has none"
        raise UserError(f"revision: {shown(revision)}, but {name} {state}; leave revision out")
    return f"{name}@{revision}"
