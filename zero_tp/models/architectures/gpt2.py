"""gpt2: Hugging Face's GPT2LMHeadModel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.config.model import ARCHITECTURES as RULES
from zero_tp.errors import UserError
from zero_tp.models.architectures.table import Architecture, Weight
from zero_tp.models.spec import Dropouts, TransformerSpec

# gelu_new is the tanh approximation; torch's fused one saves one tensor where transformers' saves four.
_gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}

_RULES = RULES["gpt2"]
assert set(ACTIVATIONS) == set(_RULES.activations)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """
    Raises:
        UserError: a field whose value this table does not compute.
    """
    for field, (value, reason) in _RULES.fixed.items():
        if getattr(config, field) != value:
            raise UserError(f"zero_tp.model.{field}: only {value} is supported for gpt2, because {reason}")
    if config.activation_function not in ACTIVATIONS:
        raise UserError(
            f"zero_tp.model.activation_function: {config.activation_function!r} is not supported; "
            f"one of {', '.join(ACTIVATIONS)}"
        )
    if config.n_embd % config.n_head:
        raise UserError(f"zero_tp.model.n_head: {config.n_head} heads do not divide n_embd {config.n_embd}")
    return TransformerSpec(
        hidden=config.n_embd,
        layers=config.n_layer,
        heads=config.n_head,
        head_size=config.n_embd // config.n_head,
        mlp_size=config.n_inner or 4 * config.n_embd,
        vocabulary=config.vocab_size,
        positions=config.n_positions,
        norm="layer_norm",
        norm_epsilon=config.layer_norm_epsilon,
        position="learned",
        mlp="mlp",
        activation=ACTIVATIONS[config.activation_function],
        bias=True,
        tied=config.tie_word_embeddings,
        init_std=config.initializer_range,
        dropouts=Dropouts(config.embd_pdrop, config.resid_pdrop, config.attn_pdrop),
        attention="eager" if config._attn_implementation == "eager" else "sdpa",
    )


_LAYER = "transformer.layers.{layer}."
_THEIRS = "transformer.h.{layer}."

ARCHITECTURE = Architecture(
    spec=spec,
    weights=(
        Weight("transformer.embedding.word.weight", "transformer.wte.weight"),
        Weight("transformer.embedding.position.weight", "transformer.wpe.weight"),
        Weight(_LAYER + "attention_norm.weight", _THEIRS + "ln_1.weight"),
        Weight(_LAYER + "attention_norm.bias", _THEIRS + "ln_1.bias"),
        Weight(_LAYER + "attention.qkv.weight", _THEIRS + "attn.c_attn.weight", transposed=True),
        Weight(_LAYER + "attention.qkv.bias", _THEIRS + "attn.c_attn.bias"),
        Weight(_LAYER + "attention.output.weight", _THEIRS + "attn.c_proj.weight", transposed=True),
        Weight(_LAYER + "attention.output.bias", _THEIRS + "attn.c_proj.bias"),
        Weight(_LAYER + "mlp_norm.weight", _THEIRS + "ln_2.weight"),
        Weight(_LAYER + "mlp_norm.bias", _THEIRS + "ln_2.bias"),
        Weight(_LAYER + "mlp.up.weight", _THEIRS + "mlp.c_fc.weight", transposed=True),
        Weight(_LAYER + "mlp.up.bias", _THEIRS + "mlp.c_fc.bias"),
        Weight(_LAYER + "mlp.down.weight", _THEIRS + "mlp.c_proj.weight", transposed=True),
        Weight(_LAYER + "mlp.down.bias", _THEIRS + "mlp.c_proj.bias"),
        Weight("transformer.final_norm.weight", "transformer.ln_f.weight"),
        Weight("transformer.final_norm.bias", "transformer.ln_f.bias"),
        Weight("head.weight", "lm_head.weight"),
    ),
    tied={"lm_head.weight": "transformer.wte.weight"},
    native_class="GPT2LMHeadModel",
    base_prefix="transformer.",
    old=(r"h\.\d+\.attn\.(masked_)?bias",),  # the causal mask and its value
)
