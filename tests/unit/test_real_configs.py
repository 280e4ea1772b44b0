"""The config.json of models that people have: accepted as they were published, with the published number of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_tp.errors import UserError
from zero_tp.models.architectures.configs import pretrained_config
from zero_tp.models.wrapper import ZeroTPForCausalLM

PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
LLAMA3_ROPE = {
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
}
QWEN = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": (
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    "smollm2-135m-instruct": (
        {
            **LLAMA,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pad_token_id": 2,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
            "vocab_size": 49152,
        },
        134_515_008,
    ),
    "llama-3.2-1b": (
        {
            **LLAMA,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rope_scaling": {"factor": 32.0, **LLAMA3_ROPE},
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        1_235_814_400,
    ),
    "llama-3.1-8b-instruct": (
        {
            **LLAMA,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rope_scaling": {"factor": 8.0, **LLAMA3_ROPE},
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    "mistral-7b": (
        {
            "architectures": ["MistralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0",
            "use_cache": True,
            "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "qwen2.5-0.5b": (
        {
            **QWEN,
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
        },
        494_032_768,
    ),
    "qwen3-0.6b": (
        {
            **QWEN,
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "pythia-70m": (PYTHIA, 70_426_624),
    "gpt-neox-20b": (
        {
            **PYTHIA,
            "attention_probs_dropout_prob": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu_fast",
            "hidden_dropout_prob": 0,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 64,
            "num_hidden_layers": 44,
            "vocab_size": 50432,
        },
        20_554_567_680,
    ),
    "starcoder2-3b": (
        {
            "architectures": ["Starcoder2ForCausalLM"],
            "attention_dropout": 0.1,
            "attention_softmax_in_fp32": True,
            "bos_token_id": 0,
            "embedding_dropout": 0.1,
            "eos_token_id": 0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 3072,
            "initializer_range": 0.018042,
            "intermediate_size": 12288,
            "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 16384,
            "mlp_type": "default",
            "model_type": "starcoder2",
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "num_attention_heads": 24,
            "num_hidden_layers": 30,
            "num_key_value_heads": 2,
            "residual_dropout": 0.1,
            "rope_theta": 999999.4420358813,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
            "sliding_window": 4096,
            "use_bias": True,
            "vocab_size": 49152,
        },
        3_030_371_328,
    ),
    "phi-4": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 100257,
            "embd_pdrop": 0.0,
            "eos_token_id": 100265,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "model_type": "phi3",
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384,
            "pad_token_id": 100349,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 250000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.47.0",
            "use_cache": True,
            "vocab_size": 100352,
        },
        14_659_507_200,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str, tmp_path: Path) -> None:
    written, weights = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    model = ZeroTPForCausalLM(pretrained_config(tmp_path), device="meta", dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("smollm2-135m-instruct", {"rope_interleaved": True}, "rope_interleaved: true is .*; give another model$"),
        ("smollm2-135m-instruct", {"num_experts": 8}, "num_experts: 8 is no field of LlamaConfig"),
        (
            "llama-3.2-1b",
            {"rope_scaling": {"type": "su", "factor": 2.0}},
            "one of default, linear, dynamic, yarn, llama3",
        ),
        ("llama-3.2-1b", {"quantization_config": {"bits": 4}}, "quantization_config: quantized weights"),
        (
            "llama-3.2-1b",
            {"auto_map": {"AutoModel": "own.Own"}},
            "auto_map: .* is refused: code that comes with a model.*; give another model$",
        ),
        ("qwen2.5-0.5b", {"use_mrope": True}, "use_mrope: true is refused: .*; give another model$"),
        (
            "qwen3-0.6b",
            {"layer_types": ["chunked_attention"] * 28},
            'layer_types: "chunked_attention" is not one of full_attention, sliding_attention',
        ),
        ("starcoder2-3b", {"mlp_type": "gated"}, 'mlp_type: "gated" is refused: '),
        ("phi-4", {"attention_bias": True}, "attention_bias: true is refused: "),
        ("pythia-70m", {"num_attention_heads": 7}, "hidden_size: GPTNeoXConfig refuses it .*not divisible"),
    ],
)
def test_what_changes_the_model_is_refused(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name][0], **changes}))
    with pytest.raises(UserError, match=rf"config\.json: .*{words}") as caught:
        pretrained_config(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_padding_id_below_0_counts_from_the_end_as_in_torch(tmp_path: Path) -> None:
    """As early Llama files have it; transformers hands it to torch's Embedding."""
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["llama-3.2-1b"][0], "pad_token_id": -1}))
    assert pretrained_config(tmp_path).pad_token_id == torch.nn.Embedding(128256, 1, -1).padding_idx
