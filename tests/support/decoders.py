"""Random small decoders of every model_type, as hypothesis draws them."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.compare import norm, tolerances
from tests.support.native import perturbed
from zero_tp.model.architectures import ARCHITECTURES

LENGTH, BATCH = 16, 3
HEADS = 4  # what TP 4 divides
ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def _choices(draw: st.DrawFn, names: dict[str, Any]) -> dict[str, Any]:
    return {name: draw(st.sampled_from(values), label=name) for name, values in names.items()}


BOOLEAN = (False, True)


@st.composite
def decoder_fields(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """Fields of a Hugging Face config: every choice that the table computes can come up."""
    kind = "gpt2" if model_type == "gpt2" else "decoder"
    fields: dict[str, Any] = {"model_type": model_type}
    declared = vars(AutoConfig.for_model(model_type)).keys()
    heads = HEADS * draw(st.integers(1, 3), label="heads / 4")
    sizes = {
        "hidden": heads * 2 * draw(st.integers(1, 3), label="half a head"),
        "mlp": 4 * draw(st.integers(2, 12), label="MLP / 4"),
        "layers": draw(st.integers(1 + (model_type == "olmo_hybrid"), 3), label="layers"),
        "vocab_size": draw(st.integers(11, 70), label="vocabulary"),
    }
    whole_norms = ("olmoe", "olmo2", "olmo3", "olmo_hybrid", "nanochat")
    if model_type in whole_norms:  # see head_dim below
        sizes["hidden"] = heads * max(4, sizes["hidden"] // heads)
    fields["vocab_size"] = sizes["vocab_size"]
    if kind == "gpt2":
        fields |= {
            "n_embd": sizes["hidden"],
            "n_layer": sizes["layers"],
            "n_head": heads,
            "n_inner": sizes["mlp"],
        }
        fields |= {"n_positions": LENGTH, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
        fields |= _choices(
            draw,
            {"activation_function": ("gelu_new", "gelu", "relu"), "tie_word_embeddings": BOOLEAN},
        )
        return fields | {"bos_token_id": 0, "eos_token_id": 0}
    fields |= {
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": heads,
    }
    fields |= {
        "intermediate_size": sizes["mlp"],
        "max_position_embeddings": LENGTH,
        "bos_token_id": 0,
    }
    activation = "hidden_act" if "hidden_act" in declared else "hidden_activation"
    functions: tuple[str, ...] = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")
    if model_type == "apertus":
        functions = ("xielu", "gelu")
    fields |= _choices(draw, {activation: functions, "tie_word_embeddings": BOOLEAN})
    fields |= {
        "eos_token_id": 0,
        "pad_token_id": draw(st.sampled_from([None, 0, 7]), label="padding token"),
    }
    # Phi3Config takes no other type that is computed.
    rope = "default" if model_type == "phi3" else draw(st.sampled_from(list(ROPE)), label="rope")
    fields["rope_parameters"] = {"rope_type": rope, "rope_theta": 100.0, **ROPE[rope]}
    flags = (
        "attention_bias",
        "attention_out_bias",
        "mlp_bias",
        "use_parallel_residual",
        "use_bias",
    )
    factors = {
        name: draw(st.sampled_from(values), label=name)
        for name, values in FACTORS.items()
        if name in declared
    }
    if model_type == "gemma3_text":  # its class never applies it
        factors["attn_logit_softcapping"] = None
    fields |= factors
    fields |= _choices(draw, {name: BOOLEAN for name in flags if name in declared})
    if "n_routed_experts" in declared:
        fields |= _grouped_expert_fields(draw, declared, sizes["layers"])
        fields |= _choices(draw, {name: BOOLEAN for name in ("use_qk_norm",) if name in declared})
    elif "moe_k" in declared:
        del fields["use_bias"]  # refused
        fields |= _biased_expert_fields(draw, sizes["layers"])
    elif "num_experts_per_tok" in declared:
        fields |= _expert_fields(draw, model_type, declared, sizes["layers"])
    if "kv_lora_rank" in declared:
        fields |= _latent_fields(draw, fields)
    elif "num_key_value_heads" in declared:
        divisors = [count for count in range(1, heads + 1) if heads % count == 0]
        fields["num_key_value_heads"] = draw(st.sampled_from(divisors), label="KV heads")
    if "kv_lora_rank" not in declared and (
        "head_dim" in declared or "head_dim" in ARCHITECTURES[model_type].fields.undeclared
    ):
        # The norm of a head of 2 features is ill-conditioned: transformers' own fp32 gradients are
        # then 1e-5 off.
        fields["head_dim"] = 2 * draw(st.integers(2, 5), label="head size / 2")
    if "sliding_window" in declared:
        fields["sliding_window"] = draw(st.integers(2, LENGTH), label="window")
    if "linear_conv_kernel_dim" in declared:
        if "intermediate_size" not in declared:  # all MLPs are experts
            del fields["intermediate_size"]
        fields |= _linear_attention_fields(draw, model_type, sizes["layers"])
    elif "layer_types" in declared:
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        fields["layer_types"] = draw(
            st.lists(kinds, min_size=sizes["layers"], max_size=sizes["layers"])
        )
        if "use_sliding_window" in declared:
            fields["use_sliding_window"] = True
    if "no_rope_layers" in declared:
        fields["no_rope_layers"] = draw(
            st.lists(st.integers(0, 1), min_size=sizes["layers"], max_size=sizes["layers"])
        )
    if model_type == "seed_oss":  # its class's are 0.1
        fields |= {"residual_dropout": 0.0, "attention_dropout": 0.0}
    head_size = fields.get("qk_rope_head_dim", fields.get("head_dim", sizes["hidden"] // heads))
    if "partial_rotary_factor" in (AutoConfig.for_model(model_type).rope_parameters or {}):
        shares = [0.5, 1.0] if head_size > 2 else [1.0]
        # transformers' YaRN fails with an odd number of features.
        if rope == "yarn" and head_size % 4 and head_size > 6:
            shares = [1.0]
        share = draw(st.sampled_from(shares), label="share that turns")
        fields["rope_parameters"]["partial_rotary_factor"] = share
        head_size = int(head_size * share)
    if rope == "dynamic" and head_size <= 2:  # transformers divides by zero
        fields["rope_parameters"]["rope_type"] = "linear"
    if model_type in ("olmo3", "gemma3_text"):
        other = {"rope_type": "default", "rope_theta": 30.0}
        fields["rope_parameters"] = {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": other,
        }
    return fields


def _linear_attention_fields(draw: st.DrawFn, model_type: str, layers: int) -> dict[str, Any]:
    """Those of the gated delta rule; at least one layer has attention."""
    kinds = st.lists(
        st.sampled_from(["linear_attention", "full_attention"]), min_size=layers, max_size=layers
    )
    # OlmoHybridConfig requires both.
    required = {"full_attention", *["linear_attention"] * (model_type == "olmo_hybrid")}
    types = draw(kinds.filter(lambda types: required <= set(types)), label="types of layers")
    heads = HEADS * draw(st.integers(1, 2), label="key heads / 4")
    fields = {
        "layer_types": types,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * draw(st.integers(1, 3), label="values of a key"),
        "linear_conv_kernel_dim": draw(st.integers(1, 5), label="kernel"),
        # A head's output is normed, and near 0 where a query and a key are orthogonal by chance:
        # with the usual 1e-6 transformers' own gradients are 1e-5 off.
        "rms_norm_eps": draw(st.sampled_from([0.01, 0.1]), label="epsilon"),
    }
    for size in ("linear_key_head_dim", "linear_value_head_dim"):
        fields[size] = draw(st.integers(2, 6), label=size)
    if model_type == "olmo_hybrid":
        fields["linear_allow_neg_eigval"] = draw(st.booleans(), label="β up to 2")
    return fields


FACTORS: dict[str, tuple[Any, ...]] = {
    "query_pre_attn_scalar": (3, 16),
    "attn_logit_softcapping": (None, 2.0),
    "final_logit_softcapping": (None, 1.5),
    "embedding_multiplier": (1.0, 3.0),
    "attention_multiplier": (0.3,),
    "residual_multiplier": (0.4,),
    "logits_scaling": (0.6, 3.0),
    "logit_scale": (0.3,),
    # Small enough to act: 7.0, the usual one, never does in a tiny model.
    "swiglu_limit": (0.3, 0.8),
    "swiglu_alpha": (1.702, 0.9),
}
"""Multipliers and soft caps: field → values, none of which is the one that other models have."""


def _expert_fields(draw: st.DrawFn, model_type: str, declared: Any, layers: int) -> dict[str, Any]:
    """Those of a mixture of experts; at least one layer has it."""
    count = draw(st.integers(1, 9), label="experts")
    name = "num_local_experts" if "num_local_experts" in declared else "num_experts"
    chosen = draw(st.integers(1, count), label="experts a token")
    fields: dict[str, Any] = {
        name: count,
        "num_experts_per_tok": chosen,
        "router_aux_loss_coef": 0.3,
    }
    flags = ("norm_topk_prob", "qkv_bias", "output_router_logits")
    fields |= _choices(draw, {name: BOOLEAN for name in flags if name in declared})
    if "clip_qkv" in declared:
        fields["clip_qkv"] = draw(st.sampled_from([None, 0.7]), label="clip")
    for size in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if size in declared:
            fields[size] = 4 * draw(st.integers(1, 8), label=size)
    if "shared_intermediate_size" in declared:
        fields["shared_intermediate_size"] = 4 * draw(st.integers(0, 8), label="shared")
    if "decoder_sparse_step" in declared:
        fields["decoder_sparse_step"] = draw(st.integers(1, layers), label="sparse step")
        dense = st.sets(
            st.integers(0, layers - 1).filter(
                lambda number: number + 1 != fields["decoder_sparse_step"]
            )
        )
        fields["mlp_only_layers"] = sorted(draw(dense, label="dense layers"))
    return fields


def _latent_fields(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    """Those of latent attention; a norm of fewer features is ill-conditioned."""
    if fields["rope_parameters"]["rope_type"] == "yarn":
        factors: tuple[dict[str, float], ...] = ({}, {"mscale": 1.0, "mscale_all_dim": 0.6})
        fields["rope_parameters"] |= draw(st.sampled_from(factors), label="two scales")
    widths = st.integers(8, 14)
    return {
        "num_key_value_heads": fields["num_attention_heads"],
        "q_lora_rank": draw(st.one_of(st.none(), widths), label="latent of queries"),
        "kv_lora_rank": draw(widths, label="latent of keys and values"),
        "qk_nope_head_dim": draw(st.integers(1, 6), label="features that do not turn"),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 3), label="features that turn / 2"),
        "v_head_dim": draw(st.integers(2, 12), label="features of values"),
        "rope_interleave": draw(st.booleans(), label="neighbours turn"),
    }


def _grouped_expert_fields(draw: st.DrawFn, declared: Any, layers: int) -> dict[str, Any]:
    """Those of experts in groups, of which a token chooses some."""
    groups = draw(st.integers(1, 3), label="groups")
    of_group = draw(st.integers(2, 3), label="experts of a group")
    chosen_groups = draw(st.integers(1, groups), label="groups a token")
    dense = draw(st.integers(0, layers - 1), label="dense layers")
    kinds: dict[str, Any] = {"first_k_dense_replace": dense}
    if "mlp_layer_types" in declared:
        kinds = {"mlp_layer_types": ["sparse"] * (layers - dense) + ["dense"] * dense}
    return {
        **kinds,
        "n_routed_experts": groups * of_group,
        "n_group": groups,
        "topk_group": chosen_groups,
        "num_experts_per_tok": draw(
            st.integers(1, chosen_groups * of_group), label="experts a token"
        ),
        "n_shared_experts": draw(st.integers(1, 2), label="shared experts"),
        "moe_intermediate_size": 4 * draw(st.integers(1, 8), label="width of an expert"),
        "norm_topk_prob": draw(st.booleans(), label="normalised"),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5]), label="scale"),
    }


def _biased_expert_fields(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """ERNIE's; at least one layer has experts."""
    count = draw(st.integers(1, 9), label="experts")
    interval = draw(st.integers(1, layers), label="interval")
    first = draw(st.integers(0, layers // interval * interval - 1), label="first layer of experts")
    return {
        "moe_num_experts": count,
        "moe_k": draw(st.integers(1, count), label="experts a token"),
        "moe_num_shared_experts": draw(st.integers(0, 2), label="shared experts"),
        "moe_intermediate_size": 4 * draw(st.integers(1, 8), label="width of an expert"),
        "moe_layer_interval": interval,
        "moe_layer_start_index": first,
        "moe_norm_min": draw(st.sampled_from([1e-12, 0.9]), label="smallest sum"),
        "output_router_logits": draw(st.booleans(), label="balanced"),
        "router_aux_loss_coef": 0.3,
    }


def without_router_logits(model_type: str) -> dict[str, Any]:
    """A field for generation: with a static cache transformers' classes with experts fail if
    they return these.
    """
    return (
        {"output_router_logits": False}
        if "output_router_logits" in vars(AutoConfig.for_model(model_type))
        else {}
    )


def model_type_is_eager(fields: dict[str, Any]) -> bool:
    """Whether transformers computes the model only so: others leave soft caps out, and sinks have
    no SDPA.
    """
    is_eager = fields["model_type"] in ("gemma2", "gpt_oss")
    return is_eager or fields.get("attn_logit_softcapping") is not None


@torch.no_grad()
def shrink_linear_values(model: Any) -> None:
    """Make what OLMo Hybrid's linear attention norms small: its epsilon is the class's 1e-5, and
    no field as in `_linear_attention_fields`.
    """
    if model.config.model_type == "olmo_hybrid":
        for name, weight in model.named_parameters():
            if name.endswith("linear_attn.conv1d.weight"):
                weight.mul_(0.1)


MARGIN = 2e-6
"""Of the choice of experts, see `margin`: measured, rounding decided below 2e-7."""


def margin(logits: torch.Tensor, chosen: int) -> float:
    """The least distance of a token's last chosen expert from the next one, relative to the
    largest logit.
    """
    if chosen == logits.shape[-1]:
        return math.inf
    values = logits.detach().float().topk(chosen + 1, -1).values
    return float((values[:, -2] - values[:, -1]).min() / values.abs().max())


def decoder(fields: dict[str, Any], seed: int, attention: str = "sdpa") -> Any:
    """Hugging Face's model, random everywhere, of `decided_seed`."""
    return seeded_decoder(fields, decided_seed(fields, seed, attention), attention)


def seeded_decoder(fields: dict[str, Any], seed: int, attention: str = "sdpa") -> Any:
    """Hugging Face's model, random everywhere, of this seed."""
    if model_type_is_eager(fields):
        attention = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**fields), attn_implementation=attention, dtype=torch.float32
    ).eval()
    perturbed(model)
    shrink_linear_values(model)
    return model


def decided_seed(fields: dict[str, Any], seed: int, attention: str = "sdpa") -> int:
    """Of the next seeds the first whose model rounding does not decide.

    For what `tokens_for` draws then, no expert is chosen by the last bits, and the model's own
    gradients in fp32 are nearer to those in fp64 than a comparison allows.
    """
    for candidate in range(seed, seed + 50):
        model = seeded_decoder(fields, candidate, attention)
        tokens = tokens_for(fields)
        if not chooses_by_rounding(model, tokens) and rounds_little(model, tokens):
            return candidate
    raise AssertionError(
        f"rounding decides all models of the seeds {seed} to {candidate}: {fields}"
    )


def chooses_by_rounding(model: Any, tokens: torch.Tensor) -> bool:
    """Whether a router's choice of an expert could change by rounding."""
    if not hasattr(model.config, "num_experts_per_tok"):
        return False
    with torch.no_grad():
        routers = model(tokens, output_router_logits=True).router_logits
    biased = [gate for gate in model.modules() if hasattr(gate, "e_score_correction_bias")]
    if biased:
        pairs = zip(biased, routers or (), strict=True)
        return min(biased_margin(model, gate, logits) for gate, logits in pairs) <= MARGIN
    return min(margin(logits, model.config.num_experts_per_tok) for logits in routers) <= MARGIN


def biased_margin(model: Any, gate: Any, logits: torch.Tensor) -> float:
    """`margin` of the choice of groups, and of experts in them."""
    if not hasattr(gate, "num_group"):  # ERNIE's probabilities, and their bias
        (count,) = {module.top_k for module in model.modules() if hasattr(module, "norm_min")}
        return margin(logits.softmax(-1) + gate.e_score_correction_bias, count)
    corrected = logits.sigmoid() + gate.e_score_correction_bias
    by_group = corrected.unflatten(-1, (gate.num_group, -1))
    scores = by_group.topk(2, -1).values.sum(-1)
    chosen = scores.topk(gate.topk_group, -1).indices
    eligible = by_group.gather(1, chosen[..., None].expand(-1, -1, by_group.shape[-1])).flatten(1)
    return min(margin(scores, gate.topk_group), margin(eligible, gate.top_k))


def rounds_little(model: Any, tokens: torch.Tensor) -> bool:
    """Whether each gradient's own rounding error is at most half of what `check_close` allows."""
    exact = copy.deepcopy(model).double()
    if hasattr(model.config, "num_experts_per_tok"):
        exact.set_experts_implementation("eager")  # the others are not for fp64
    for each in (model, exact):
        each(input_ids=tokens, labels=tokens).loss.backward()
    expected = {
        name: weight.grad for name, weight in exact.named_parameters() if weight.grad is not None
    }
    found = dict(model.named_parameters())
    close = [
        norm(found[name].grad.double() - expected[name]) <= allowed / 2
        for name, allowed in tolerances(expected).items()
    ]
    model.zero_grad(set_to_none=True)
    return all(close)


def tokens_for(fields: dict[str, Any]) -> torch.Tensor:
    """Random ones, the padding token surely among them: its row gets no gradient from the
    look-up. [BATCH, LENGTH]
    """
    tokens = torch.randint(fields["vocab_size"], (BATCH, LENGTH))
    tokens[0, 3] = fields.get("pad_token_id") or 0
    return tokens


MODEL_TYPES = sorted(name for name, table in ARCHITECTURES.items() if table.causal)
PLAIN_TYPES = (
    *("gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmoe", "phi3", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "starcoder2"),
)
"""Each kind of attention, MLP and position, with the usual norms, scales and rotations."""
