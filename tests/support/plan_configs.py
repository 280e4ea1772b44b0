"""The configs whose planned memory is held to dry runs of all layers and to real steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import THOROUGH
from zero_tp.run.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "ds_configs/gpt2_124m_zero1.json"
BASE = [
    "zero_tp.model.n_layer=3",
    "zero_tp.model.n_embd=256",
    "zero_tp.model.n_head=8",
    "zero_tp.model.vocab_size=1000",
    "zero_tp.model.n_positions=256",
    "zero_tp.data.sequence_length=64",
    "train_micro_batch_size_per_gpu=2",
    "train_batch_size=auto",
    "optimizer.params.torch_adam=true",
    "zero_optimization.reduce_bucket_size=400000",
]
OFFLOAD = '={"device":"cpu"}'
WIDE = ["zero_tp.data.sequence_length=256", "train_micro_batch_size_per_gpu=4"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "mistral": {"num_key_value_heads": 1, "sliding_window": None},
    "qwen2": {"num_key_value_heads": 4, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 32, "use_sliding_window": False},
    "gpt_neox": {},
    "mixtral": {"num_key_value_heads": 4, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **{
            "num_key_value_heads": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
        },
        **{
            "shared_expert_intermediate_size": 256,
            "mlp_only_layers": [1],
            "output_router_logits": True,
        },
    },
    "qwen3_moe": {
        **{
            "num_key_value_heads": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 128,
        },
        **{"decoder_sparse_step": 2, "head_dim": 32},
    },
    "olmoe": {
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "output_router_logits": True,
        "clip_qkv": 3.0,
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "sliding_window": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_next": {
        **{"num_key_value_heads": 4, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "full_attention_interval": 2},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 64},
    },
    "olmo_hybrid": {"linear_key_head_dim": 16, "pad_token_id": 0, "eos_token_id": 0},
    "bert": {"hidden_act": "gelu"},
    "megatron-bert": {},
    "youtu": {
        **{"num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64},
        **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    },
    "deepseek_v3": {
        **{"num_key_value_heads": 8, "q_lora_rank": None, "kv_lora_rank": 64},
        **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64},
        **{"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 128, "first_k_dense_replace": 1, "attention_bias": True},
    },
}
DOCUMENTS = "zero_tp.data.document_attention=reset"
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32}
WINDOWS |= {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
LAYERS_OF_7 = [WINDOWS["layer_types"][number % 2] for number in range(7)]
WINDOWS_OF_7 = f"zero_tp.model.layer_types={json.dumps(LAYERS_OF_7)}"
MASKED = 'zero_tp.objective={"type": "masked", "mask_probability": 0.15}'
WIDER = [
    "data_types.grad_accum_dtype=fp32",
    "gradient_accumulation_steps=2",
    "zero_tp.parallel.tensor=1",
]
BUFFER = (
    'activation_checkpointing={"contiguous_memory_optimization": true, "number_checkpoints": 24}'
)


MUON = 'optimizer={"type": "Muon", "params": {"lr": 0.001}}'


def family(name: str, *overrides: str, model: dict[str, Any] | None = None) -> list[str]:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
    }
    limits = {"vocab_size": 1000, "max_position_embeddings": 256}
    whole: dict[str, Any] = {
        "model_type": name,
        **sizes,
        **limits,
        **FAMILIES[name],
        **(model or {}),
    }
    return [f"zero_tp.model={json.dumps(whole)}", *overrides, *WIDE]


# What differs from BASE (GPT-2, TP 2, SP, ZeRO-1, bf16, sdpa with dropout), and in a run of how
# many ranks.
CONFIGS = [
    ["zero_optimization.stage=0", "zero_tp.parallel.tensor=1"],
    ["zero_optimization.stage=0", 'bf16={"enabled":false}', *WIDE],
    ["zero_optimization.stage=1", "zero_tp.recompute=full", *WIDE],
    [
        "zero_optimization.stage=1",
        "gradient_accumulation_steps=2",
        "zero_tp.parallel.sequence=false",
    ],
    [
        "zero_optimization.stage=1",
        "zero_optimization.overlap_comm=true",
        "zero_tp.attention=eager",
        *WIDE,
    ],
    ["zero_optimization.stage=2", "zero_tp.parallel.tensor=4", *WIDE],
    ["zero_optimization.stage=2", "zero_tp.recompute=selective", "zero_tp.attention=eager", *WIDE],
    [
        "zero_optimization.stage=2",
        "gradient_accumulation_steps=2",
        "zero_tp.model.attn_pdrop=0.0",
        *WIDE,
    ],
    ["zero_optimization.stage=2", f"zero_optimization.offload_optimizer{OFFLOAD}"],
    [
        "zero_optimization.stage=2",
        "zero_tp.model.tie_word_embeddings=false",
        "optimizer.params.torch_adam=false",
    ],
    ["zero_optimization.stage=3", "zero_tp.recompute=full", "zero_tp.model.attn_pdrop=0.0", *WIDE],
    [
        "zero_optimization.stage=3",
        "zero_optimization.stage3_max_reuse_distance=300000",
        "zero_tp.parallel.tensor=1",
    ],
    [
        "zero_optimization.stage=3",
        f"zero_optimization.offload_optimizer{OFFLOAD}",
        "gradient_accumulation_steps=2",
    ],
    [
        "zero_optimization.stage=3",
        f"zero_optimization.offload_optimizer{OFFLOAD}",
        f"zero_optimization.offload_param{OFFLOAD}",
        'zero_tp.recompute={"mode":"selective","modules":["attention_core","mlp_activation","norm"]}',
        *WIDE,
    ],
    family("llama", "zero_optimization.stage=1"),
    family(
        "llama", "zero_optimization.stage=3", "zero_tp.attention=eager", "zero_tp.parallel.tensor=1"
    ),
    family("mistral", "zero_optimization.stage=2", "zero_tp.recompute=full"),
    family(
        "qwen2",
        "zero_optimization.stage=2",
        "zero_tp.recompute=selective",
        "zero_tp.attention=eager",
    ),
    family("qwen3", "zero_optimization.stage=3", "zero_tp.parallel.sequence=false"),
    family("gpt_neox", "zero_optimization.stage=1"),
    family(
        "gpt_neox", "zero_optimization.stage=2", "zero_tp.recompute=full", "zero_tp.attention=eager"
    ),
    family("llama", "zero_optimization.stage=1", DOCUMENTS),
    ["zero_optimization.stage=2", "zero_tp.attention=eager", DOCUMENTS, *WIDE],
    ["zero_optimization.stage=3", "zero_tp.recompute=selective", DOCUMENTS, *WIDE],
    family("qwen2", "zero_optimization.stage=1", model=WINDOWS),
    family(
        "qwen3",
        "zero_optimization.stage=2",
        "zero_tp.recompute=selective",
        "zero_tp.attention=eager",
        model=WINDOWS,
    ),
    [
        "zero_optimization.stage=2",
        "zero_optimization.contiguous_gradients=true",
        "zero_tp.parallel.tensor=4",
        *WIDE,
    ],
    family("megatron-bert", "zero_optimization.stage=1", MASKED),
    family(
        "bert",
        "zero_optimization.stage=2",
        'zero_tp.recompute={"mode":"selective","modules":["norm"]}',
        MASKED,
    ),
    ["zero_optimization.stage=1", *WIDER],
    ["zero_optimization.stage=2", *WIDER, *WIDE],
    ["zero_optimization.stage=3", *WIDER],
    ["zero_optimization.stage=3", "zero_tp.parallel.tensor=1"],
    ["zero_optimization.stage=1", "zero_tp.parallel.tensor=1", "optimizer.params.fused=false"],
    ["zero_optimization.stage=3", "zero_tp.recompute=full", BUFFER, *WIDE],
    [
        "zero_optimization.stage=2",
        "zero_tp.recompute=full",
        BUFFER,
        "zero_tp.parallel.sequence=false",
        *WIDE,
    ],
    [
        "zero_optimization.stage=2",
        f"zero_optimization.offload_optimizer{OFFLOAD}",
        "gradient_accumulation_steps=2",
    ],
    [
        "zero_optimization.stage=2",
        f"zero_optimization.offload_optimizer{OFFLOAD}",
        'bf16={"enabled":false}',
    ],
    family("mixtral", "zero_optimization.stage=1"),
    family("qwen2_moe", "zero_optimization.stage=2", "zero_tp.recompute=selective"),
    family("qwen3_moe", "zero_optimization.stage=1", "zero_tp.recompute=full"),
    family("olmoe", "zero_optimization.stage=3", "zero_tp.attention=eager"),
]
GATHERED = ["zero_optimization.stage=3", "zero_tp.parallel.tensor=1"]
GATHERED += [
    f"zero_optimization.stage3_{name}=0"
    for name in ("param_persistence_threshold", "prefetch_bucket_size")
]
GROUPS = [
    {"pattern": "attn", "lr_scale": 0.5},
    {"kind": "embedding", "weight_decay": 0},
    {"kind": "norm", "weight_decay": 0.1},
]
PARAM_GROUPS = f"zero_tp.param_groups={json.dumps(GROUPS)}"
CONFIGS += [
    ["zero_optimization.stage=2", PARAM_GROUPS],
    ["zero_optimization.stage=3", PARAM_GROUPS],
    [*GATHERED, "zero_tp.recompute=full"],
    ["zero_optimization.stage=1", "optimizer.params.amsgrad=true"],
    ["zero_optimization.stage=2", f"zero_optimization.offload_optimizer{OFFLOAD}", WIDER[0]],
    ["zero_optimization.stage=1", *WIDER, "communication_data_type=fp32"],
    ["zero_optimization.stage=0", "gradient_accumulation_steps=2", "communication_data_type=fp32"],
]
CONFIGS += [
    [f"zero_optimization.stage={stage}", f"zero_tp.parallel.tensor={tensor}", MUON]
    for stage in range(4)
    for tensor in (1, 2)
]
CONFIGS += [family("qwen2_moe", "zero_optimization.stage=1", MUON)]
EXPERTS = ["zero_tp.parallel.expert=2", "zero_tp.parallel.tensor=1"]
CONFIGS += [
    family("mixtral", "zero_optimization.stage=1", *EXPERTS, model={"num_local_experts": 4}),
    family("qwen2_moe", "zero_optimization.stage=2", *EXPERTS, "gradient_accumulation_steps=2"),
    family("qwen3_moe", "zero_optimization.stage=2", EXPERTS[0], "zero_tp.recompute=full"),
    family("olmoe", "zero_optimization.stage=1", *EXPERTS, "optimizer.params.fused=false"),
]
CONFIGS += [
    family("youtu", "zero_optimization.stage=1"),
    family("youtu", "zero_optimization.stage=3", "zero_tp.parallel.sequence=false"),
    family("deepseek_v3", "zero_optimization.stage=2", "zero_tp.recompute=selective"),
    family("deepseek_v3", "zero_optimization.stage=1", EXPERTS[0]),
    family("gpt_oss", "zero_optimization.stage=2", "zero_tp.recompute=selective"),
    family("gpt_oss", "zero_optimization.stage=1", *EXPERTS),
]
AVERAGE = 'zero_tp.training.ema={"decay": 0.9}'
CONFIGS += [
    ["zero_optimization.stage=2", AVERAGE],
    ["zero_optimization.stage=0", AVERAGE],
    ["zero_optimization.stage=2", f"zero_optimization.offload_optimizer{OFFLOAD}", AVERAGE],
    ["zero_optimization.stage=3", f"zero_optimization.offload_optimizer{OFFLOAD}", AVERAGE],
]
SELECTIVE = '{"mode":"selective","modules":["attention_core","mlp_activation","norm"]}'
CONFIGS += [
    family("qwen3_next", "zero_optimization.stage=1"),
    family("qwen3_next", "zero_optimization.stage=2", f"zero_tp.recompute={SELECTIVE}", DOCUMENTS),
    family("olmo_hybrid", "zero_optimization.stage=3", "zero_tp.recompute=full"),
]
WORLD = 4
NAMES = [
    " ".join(re.sub(r'.*"model_type": "([\w-]+)".*', r"\1", one).split(".")[-1] for one in config)
    for config in CONFIGS
]


# The second tier has every eighth, ZeRO-3 with offload, M_D under SP, full recomputation with
# ZeRO-2, windows, the last five of AdamW, groups of parameters, Muon, expert parallelism, latent
# attention, linear attention, and averages of the weights; of the newest families one each.
SECOND = (29, 34, 35, 37, 41, 43, *range(len(CONFIGS) - 33, len(CONFIGS)))
RARE = ("youtu stage=3", "deepseek_v3 stage=1", "gpt_oss stage=2", "qwen3_next stage=1")
TIERS = {
    number: "thorough"
    for number in (*range(0, len(CONFIGS), 8), *SECOND)
    if not NAMES[number].startswith(RARE)
}
MARKS: dict[str, Any] = {"thorough": THOROUGH, "heavy": pytest.mark.heavy}
CASES = [
    pytest.param(number, id=name, marks=MARKS[TIERS.get(number, "heavy")])
    for number, name in enumerate(NAMES)
]


def load(overrides: list[str]) -> RunConfig:
    return RunConfig.load(FILE, BASE + overrides, WORLD)
