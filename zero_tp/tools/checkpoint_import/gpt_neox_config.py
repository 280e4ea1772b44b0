"""The Hugging Face config of a model that GPT-NeoX's settings describe.

Source: EleutherAI/gpt-neox at ea7aefd (`megatron/neox_arguments/neox_args.py` for defaults,
`megatron/model/transformer.py` for sizes); `mlp_type` from releases before September 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from zero_tp.base.errors import UserError, first_line, shown
from zero_tp.tools.checkpoint_import.recorded_fields import RecordedFields, derive_config

# A setting that no family of these has → its values in those that are read; the first is the
# trainer's default.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "pos_emb": ("learned", "rotary"),
    "gpt_j_tied": (False,),
    "use_qk_layernorm": (False,),
    "use_mup": (False,),
    "sliding_window_width": (None,),
    "moe_num_experts": (1, 0),
    "train_impl": ("normal", "dpo", "kto", "reinforce"),
    "soft_prompt_tuning": (None,),
    "expansion_factor": (None,),
    "te_mha": (False,),
    "te_layernorm_mlp": (False,),
    "te_columnparallel": (False,),
    "te_rowparallel": (False,),
}


def recorded_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the YAML files that the trainer copies into a step's folder.

    Raises:
        UserError: a file is no YAML of settings.
    """
    settings: dict[str, Any] = {}
    for path in sorted((folder / "configs").glob("*")):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            raise UserError(
                f"{path}: cannot be read ({first_line(error)}); copy the checkpoint again"
            ) from error
        if not isinstance(content, dict):
            raise UserError(f"{path}: holds no settings; give the model's config.json by --config")
        settings |= {str(key).replace("-", "_"): value for key, value in content.items()}
    return settings


def config_of(
    recorded: Mapping[str, Any], vocabulary: int | None, folder: Path
) -> PretrainedConfig:
    """Return the config of a model, from its settings and what the checkpoint's args repeat.

    Args:
        vocabulary: of the tokenizer; by default that of the args, which is padded.

    Raises:
        UserError: a setting is missing, or no family that is derived here has such layers.
    """
    settings = RecordedFields(recorded, folder)
    if "pos_emb" not in recorded:
        raise UserError(
            f"{folder}: has no configs/ with pos_emb; give a config.json of the model with --config"
        )
    for name, values in _PLAIN.items():
        settings.require(name, values, values[0])
    settings.require("pos_emb", ("rotary",), "learned")
    _check_attention(settings)
    norm = settings.get("norm", "layernorm")
    settings.require("norm", ("layernorm", "rmsnorm"), "layernorm")
    heads = settings["num_attention_heads"]
    known = {
        "vocab_size": vocabulary or settings["padded_vocab_size"],
        "hidden_size": settings["hidden_size"],
        "num_hidden_layers": settings["num_layers"],
        "num_attention_heads": heads,
        "max_position_embeddings": settings["max_position_embeddings"],
        "tie_word_embeddings": not settings.get("no_weight_tying", False),
        "attention_bias": settings.get("use_bias_in_attn_linear", True),
    }
    model_type = "gpt_neox" if norm == "layernorm" else "llama"
    known |= (_neox if norm == "layernorm" else _llama)(settings)
    return derive_config(model_type, folder, known)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of nested lists, such as [[["global", "flash"], 12]]."""
    if isinstance(value, str):
        yield value
    for inner in value if isinstance(value, list) else ():
        yield from _texts(inner)


def _check_attention(settings: RecordedFields) -> None:
    """Refuse sparse and linear attention."""
    for kind in _texts(settings.get("attention_config", [])):
        if kind not in ("global", "flash"):
            raise UserError(
                f"{settings.path}: attention_config {shown(kind)}: no family is derived from it; "
                "give a config.json of the model with --config"
            )


def _neox(settings: RecordedFields) -> dict[str, Any]:
    """Return the fields of GPTNeoXForCausalLM."""
    settings.require("activation", ("gelu",), "gelu")
    settings.require("mlp_type", ("regular",), "regular")
    settings.require("use_bias_in_mlp", (True,), True)
    heads = settings["num_attention_heads"]
    settings.require("num_kv_heads", (heads, 0), heads)
    fused = settings.get("bias_gelu_fusion", False)
    rotary = {
        "rope_type": "default",
        "rope_theta": settings.number("rotary_emb_base", 10_000),
        "partial_rotary_factor": settings.number("rotary_pct", 1.0),
    }
    return {
        "intermediate_size": _width(settings),
        "layer_norm_eps": settings.number("layernorm_epsilon", 1e-5),
        "use_parallel_residual": settings.get("gpt_j_residual", False),
        # The fused one is the tanh approximation.
        "hidden_act": "gelu_fast" if fused else "gelu",
        "rope_parameters": rotary,
    }


def _llama(settings: RecordedFields) -> dict[str, Any]:
    """Return the fields of LlamaForCausalLM."""
    former = settings.get("mlp_type", "regular") == "llama"
    activations = ("silu", "swiglu") if former else ("swiglu",)
    settings.require("activation", activations, "gelu")
    settings.require("gpt_j_residual", (False,), False)
    settings.require("rotary_pct", (1, 1.0), 1.0)
    base = settings.number("rotary_emb_base", 10_000)
    return {
        "intermediate_size": _former_width(settings) if former else _gated_width(settings),
        "num_key_value_heads": settings.get("num_kv_heads") or settings["num_attention_heads"],
        "rms_norm_eps": settings.number("rms_norm_epsilon", 1e-8),
        "mlp_bias": not former and settings.get("use_bias_in_mlp", True),
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
    }


def _rounded(size: int, multiple: int) -> int:
    return multiple * ((size + multiple - 1) // multiple)


def _width(settings: RecordedFields) -> int:
    """Return the width of an MLP without a gate."""
    size = settings.size("intermediate_size", 4 * settings.size("hidden_size"))
    return _rounded(size, 2 * settings.size("mlp_multiple_of", 1))


def _gated_width(settings: RecordedFields) -> int:
    """Return the width of a gated MLP, a third of what is set, so that parameters stay equal."""
    size = settings.size("intermediate_size", 4 * settings.size("hidden_size"))
    return _rounded(int(size * 2 / 3) // 2, settings.size("mlp_multiple_of", 1))


def _former_width(settings: RecordedFields) -> int:
    """Return the width of releases before September 2024."""
    default = _rounded(int(2 * settings.size("hidden_size") * 4 / 3), 256)
    return settings.size("intermediate_size", default)
