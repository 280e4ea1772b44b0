"""The config.json of models that people have: accepted as they were published, with the
published number of weights.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.launched import forked_zero_tp
from tests.support.native import buffers_of_files, native_model, our_class
from tests.tiers import in_tiers
from zero_tp.base.errors import UserError
from zero_tp.model.architectures.configs import (
    config_from_block,
    config_from_directory,
    describe_ignored_fields,
)
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.huggingface.parallelize import parallel_model
from zero_tp.parallel.layout import stored_buffers
from zero_tp.parallel.topology import Topology
from zero_tp.run.config.model_block import ignored_fields
from zero_tp.tools.planning.memory import model_size

PUBLISHED: dict[str, dict[str, Any]] = {
    model["name"]: model
    for model in map(
        json.loads, Path(__file__).with_name("published_configs.jsonl").read_text().splitlines()
    )
}
"""Name → its published config.json, number of parameters and, of newer entries, their source."""


def write_config(directory: Path, name: str, **changes: Any) -> None:
    (directory / "config.json").write_text(json.dumps({**PUBLISHED[name]["config"], **changes}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str, tmp_path: Path) -> None:
    write_config(tmp_path, name)
    config = config_from_directory(tmp_path)
    model = our_class(config)(config, device="meta", dtype=torch.bfloat16)
    # The hub counts routers' biases, and not the constants of an activation.
    biases = [bias for path, bias in stored_buffers(model) if path.endswith("correction_bias")]
    count = sum(weight.numel() for weight in (*model.parameters(), *biases))
    assert count == PUBLISHED[name]["parameters"]


DEEPSEEK_V3 = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1},
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    **{"ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168},
    **{"initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512},
    **{"max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1},
    **{"n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True},
    **{"num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61},
    **{"num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "quantization_config": {
        **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"original_max_position_embeddings": 4096, "type": "yarn"},
    },
    **{"rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5},
    **{"scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4},
    **{"topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True},
    **{"transformers_version": "4.33.1", "vocab_size": 129280},
}
"""The config.json of DeepSeek-V3."""
QWEN3_NEXT = {
    **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643},
    **{"decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4},
    **{"head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02},
    **{"intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128},
    **{"max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512},
    **{"norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512},
    **{"num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2},
    **{"output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06},
    **{"rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001},
    **{"shared_expert_intermediate_size": 512, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True},
    **{"use_sliding_window": False, "vocab_size": 151936},
}
"""The config.json of Qwen3-Next-80B-A3B-Instruct."""


def test_qwen3_next_is_read_as_it_was_published(tmp_path: Path) -> None:
    """Every fourth layer has attention, a quarter of whose heads rotates."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    config = config_from_directory(tmp_path)
    model = our_class(config)(config, device="meta", dtype=torch.bfloat16)
    assert round(sum(weight.numel() for weight in model.parameters()) / 1e9) == 80
    assert model.spec.mixed_by("attention") == tuple(range(3, 48, 4))
    assert {rotary.size for rotary in model.spec.rotaries if rotary is not None} == {64}


def test_deepseek_v3_is_read_as_it_was_published(tmp_path: Path) -> None:
    """Its weights are in FP8, and its scores have YaRN's factor."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    config = config_from_directory(tmp_path)
    model = our_class(config)(config, device="meta", dtype=torch.bfloat16)
    # arXiv 2412.19437, abstract.
    assert round(sum(weight.numel() for weight in model.parameters()) / 1e9) == 671
    scale = 0.1 * math.log(40) + 1
    assert model.spec.attention_scale == pytest.approx(192**-0.5 * scale**2)


AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": PUBLISHED["gpt-oss-20b"]["config"],
    "qwen3_next": QWEN3_NEXT,
    # The class's defaults.
    **{
        name: {"model_type": name}
        for name in ("glm4_moe_lite", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "youtu")
    },
}
"""Model type → the config.json of a published size."""


@pytest.mark.parametrize("model_type", in_tiers(list(AS_PUBLISHED), ["qwen3_5_text", "youtu"]))
def test_every_weight_of_a_published_size_is_counted(model_type: str, tmp_path: Path) -> None:
    """By the model, and by the plan for two ranks, as by transformers' class."""
    (tmp_path / "config.json").write_text(json.dumps(AS_PUBLISHED[model_type]))
    config = config_from_directory(tmp_path)
    model = our_class(config)(config, device="meta", dtype=torch.bfloat16)
    with torch.device("meta"):
        theirs = native_model(AutoConfig.from_pretrained(tmp_path), attn_implementation="eager")
    expected = theirs.num_parameters()
    assert model.num_parameters() == expected > 1e9
    assert model_size(config, 2, True).num_parameters == expected
    biases = [bias for _, bias in stored_buffers(model)]
    native_biases = buffers_of_files(theirs)
    count = sum(bias.numel() for bias in biases)
    assert count == sum(bias.numel() for _, bias in native_biases)
    assert bool(count) == (model_type in ("deepseek_v3", "glm4_moe_lite"))


@pytest.mark.parametrize(
    ("model_type", "billions", "without_embeddings"),
    [
        ("deepseek_v3", 671, None),  # arXiv 2412.19437, abstract
        ("glm4_moe_lite", 30, None),  # the model card of GLM-4.7-Flash, a 30B-A3B
        ("youtu", 1.96, None),  # the model card of Youtu-LLM-2B
        ("qwen3_next", 80, 79),  # the model card of Qwen3-Next-80B-A3B
        ("qwen3_5_moe_text", 35, None),  # the name Qwen3.5-35B-A3B
        ("olmo_hybrid", 7, None),  # the name Olmo-Hybrid-7B
    ],
)
def test_the_class_s_defaults_are_those_of_a_published_model(
    model_type: str, billions: float, without_embeddings: float | None
) -> None:
    """As its publisher rounds the number of weights."""
    config = config_from_block({"model_type": model_type})
    model = our_class(config)(config, device="meta", dtype=torch.bfloat16)
    count = sum(weight.numel() for weight in model.parameters())
    digits = 2 if billions < 2 else 0
    assert round(count / 1e9, digits) == billions
    if without_embeddings is not None:
        both = 2 * model.spec.vocabulary * model.spec.hidden
        assert round((count - both) / 1e9) == without_embeddings


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "smollm2-135m-instruct",
            {"rope_interleaved": True},
            "rope_interleaved: true is .*; only false is supported$",
        ),
        (
            "llama-7b",
            {"kv_sharing_modes": ["a"]},
            "kv_sharing_modes: .* is no field of LlamaConfig; remove it",
        ),
        (
            "llama-3.2-1b",
            {"rope_scaling": {"type": "su", "factor": 2.0}},
            "one of default, linear, dynamic, yarn, llama3",
        ),
        (
            "llama-3.2-1b",
            {"quantization_config": {"bits": 4}},
            "quantization_config: quantized weights",
        ),
        (
            "qwen2.5-0.5b",
            {"use_mrope": True},
            "use_mrope: true is refused: .*; only false is supported$",
        ),
        (
            "qwen3-0.6b",
            {"layer_types": ["chunked_attention"] * 28},
            'layer_types: "chunked_attention" is not one of full_attention, sliding_attention',
        ),
        (
            "mixtral-8x7b",
            {"router_jitter_noise": 0.1},
            "router_jitter_noise: 0.1 is refused: .*; only 0.0 is",
        ),
        ("starcoder2-3b", {"mlp_type": "gated"}, 'mlp_type: "gated" is refused: '),
        ("phi-4", {"attention_bias": True}, "attention_bias: true is refused: "),
        (
            "pythia-70m",
            {"num_attention_heads": 7},
            "hidden_size: GPTNeoXConfig refuses it .*not divisible",
        ),
    ],
)
def test_what_changes_the_model_is_refused(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_config(tmp_path, name, **changes)
    with pytest.raises(UserError, match=rf"config\.json: .*{words}") as caught:
        config_from_directory(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "ignored"),
    [("llama-7b", "max_sequence_length"), ("phi-3-mini-4k-instruct", "auto_map"), ("phi-4", "")],
)
def test_what_transformers_ignores_is_ignored_with_a_line(
    name: str, ignored: str, tmp_path: Path
) -> None:
    """transformers builds the same model, and its own config may hold the field."""
    changes = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 8,
        "vocab_size": 99,
        "pad_token_id": 0,
    }
    changes |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    write_config(tmp_path, name, **changes)
    lines = describe_ignored_fields(tmp_path)
    expected = (
        [f"{tmp_path}/config.json: {ignored} changes nothing: transformers' "] if ignored else []
    )
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected
    assert ignored_fields({"from_pretrained": str(tmp_path)}) == lines
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path), dtype=torch.float32
    ).eval()
    tokens = torch.arange(12)[None]
    theirs.save_pretrained(tmp_path)
    write_config(tmp_path, name, **changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = ZeroTPForCausalLM.from_pretrained(tmp_path, dtype="float32")
    assert [str(each.message) for each in caught if "changes nothing" in str(each.message)] == lines
    logits = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        parallel_model(theirs, Topology())(tokens).logits, logits, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["max_sequence_length", "auto_map"])
def test_the_block_of_a_run_takes_no_such_field(name: str) -> None:
    with pytest.raises(UserError, match=rf"zero_tp\.model\.{name}: "):
        config_from_block({"model_type": "llama", name: 2048})


@pytest.mark.parametrize(
    ("model_type", "problem"), [("mamba2", "is not supported"), ("gpt_osss", "is unknown")]
)
def test_all_reasons_are_given_at_once(model_type: str, problem: str, tmp_path: Path) -> None:
    quantized = {"model_type": model_type, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(
        UserError, match=f'model_type: "{model_type}" {problem}, and its weights are quantized; '
    ):
        config_from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**quantized, "model_type": "llama"}))
    with pytest.raises(
        UserError,
        match=r"^[^:]*config\.json: quantization_config: quantized weights; give whole ones$",
    ):
        config_from_directory(tmp_path)


def test_every_wrong_field_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    """By the file's own names; a command prints a line for each."""
    wrong = {
        "quantization_config": {"quant_method": "awq"},
        "hidden_act": "quick_silu",
        "mlp_bias_scale": 2,
        "pretraining_tp": 2,
        "num_key_value_heads": 0,
        "attention_dropout": 1.5,
    }
    write_config(tmp_path, "llama-3.2-1b", **wrong)
    with pytest.raises(UserError) as caught:
        config_from_directory(tmp_path)
    lines = [str(error) for error in caught.value.errors]
    named = {line.removeprefix(f"{tmp_path / 'config.json'}: ").split(":")[0] for line in lines}
    ignored = {"mlp_bias_scale", "pretraining_tp"}  # transformers reads neither
    assert named == wrong.keys() - ignored
    assert all(line.startswith(f"{tmp_path / 'config.json'}: ") for line in lines)
    del wrong["quantization_config"]
    write_config(tmp_path, "llama-3.2-1b", **wrong)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    done = forked_zero_tp(tmp_path, "sample", "--model", str(tmp_path), "--prompt", "We")
    assert done.returncode == 2
    for line, name in zip(
        done.stderr.splitlines(), ("num_key_value_heads", "attention_dropout"), strict=True
    ):
        assert line.startswith(f"error: {tmp_path / 'config.json'}: {name}: "), done.stderr


def test_a_padding_id_below_0_counts_from_the_end_as_in_torch(tmp_path: Path) -> None:
    """As early Llama files have it; transformers hands it to torch's Embedding."""
    write_config(tmp_path, "llama-3.2-1b", pad_token_id=-1)
    assert (
        config_from_directory(tmp_path).pad_token_id
        == torch.nn.Embedding(128256, 1, -1).padding_idx
    )
