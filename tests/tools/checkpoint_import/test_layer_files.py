"""Checkpoints of trainers that no registry has, written as their sources do: bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.support import checkpoint_layouts
from tests.tiers import THOROUGH, in_tiers
from zero_tp.tools.checkpoint_import.formats import open_checkpoint
from zero_tp.tools.checkpoint_import.importing import ImportResult, import_checkpoint


def draw_llama(chance: random.Random, **changes: Any) -> PretrainedConfig:
    groups = 2 * chance.choice((1, 2))
    heads = groups * chance.choice((2, 3))
    head_size = chance.choice((4, 8))
    fields = {
        "vocab_size": chance.randrange(33, 60),
        "hidden_size": heads * head_size,
        "num_hidden_layers": chance.choice((3, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_size,
        "intermediate_size": 4 * chance.randrange(5, 12),
        "max_position_embeddings": 64,
        "rms_norm_eps": chance.choice((1e-6, 1e-5)),
        "tie_word_embeddings": chance.random() < 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    return AutoConfig.for_model("llama", **fields)


def draw_gpt2(chance: random.Random) -> PretrainedConfig:
    heads = 2 * chance.choice((1, 3))
    return AutoConfig.for_model(
        "gpt2",
        vocab_size=chance.randrange(33, 60),
        n_embd=heads * chance.choice((4, 8)),
        n_head=heads,
        n_layer=chance.choice((3, 5)),
        n_inner=4 * chance.randrange(5, 12),
        n_positions=32,
        bos_token_id=None,
        eos_token_id=None,
    )


def draw_gpt_neox(chance: random.Random) -> PretrainedConfig:
    heads = 2 * chance.choice((1, 3))
    return AutoConfig.for_model(
        "gpt_neox",
        vocab_size=chance.randrange(33, 60),
        hidden_size=heads * 16,
        num_hidden_layers=9,  # files of one and two digits
        num_attention_heads=heads,
        intermediate_size=8 * chance.randrange(5, 12),
        max_position_embeddings=32,
        hidden_act=chance.choice(("gelu", "gelu_fast")),
        layer_norm_eps=chance.choice((1e-5, 1e-6)),
        use_parallel_residual=chance.random() < 0.5,
        tie_word_embeddings=chance.random() < 0.5,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": chance.choice((0.25, 0.5, 1.0)),
        },
        bos_token_id=None,
        eos_token_id=None,
    )


def draw_model(config: PretrainedConfig, chance: random.Random) -> PreTrainedModel:
    """Return a model of drawn weights, norms and biases too."""
    torch.manual_seed(chance.randrange(2**31))
    dtype = chance.choice((torch.float32, torch.bfloat16))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def check_same(model: PreTrainedModel, output: Path, result: ImportResult) -> None:
    """Check every tensor, its dtype, and the fields that change what the model computes."""
    written = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    expected, state = model.state_dict(), written.state_dict()
    assert expected.keys() == state.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype == result.dtype
        assert torch.equal(state[name], tensor), name
    assert same_fields(model.config) == same_fields(written.config)
    assert result.unused == 0


def same_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a config that a checkpoint tells."""
    foreign = ("architectures", "dtype", "transformers_version", "_name_or_path")
    return {name: value for name, value in config.to_dict().items() if name not in foreign}


@pytest.mark.parametrize(
    ("family", "degree", "pipelines"),
    in_tiers(
        [(f, t, p) for f in ("llama", "gpt2") for t in (1, 2) for p in (False, True)],
        first=[("llama", 2, True)],
    ),
)
def test_megatron_deepspeed(
    tmp_path: Path, seed: int, family: str, degree: int, pipelines: bool
) -> None:
    chance = random.Random(seed)
    model = draw_model(draw_llama(chance) if family == "llama" else draw_gpt2(chance), chance)
    padded = 16 * chance.randrange(4, 6)
    written = checkpoint_layouts.megatron_deepspeed(
        model, tmp_path / "run", degree=degree, padded=padded, pipelines=pipelines
    )
    checkpoint = open_checkpoint(written, vocabulary=model.config.vocab_size)
    assert checkpoint.trainer == "megatron-deepspeed"
    assert checkpoint.left_out == (f"the optimizer's states ({degree} files)",)
    result = import_checkpoint(checkpoint, tmp_path / "model")
    check_same(model, tmp_path / "model", result)


@THOROUGH
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_megatron_deepspeed_with_fpdt(tmp_path: Path, seed: int, family: str, degree: int) -> None:
    """Releases since December 2024 read a rank's rows as its Q, its K and its V."""
    chance = random.Random(seed)
    config = draw_gpt2(chance)
    if family == "llama":
        heads = 2 * chance.choice((1, 2))
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads}
        config = draw_llama(chance, **sizes, hidden_size=8 * heads, head_dim=8)
    model = draw_model(config, chance)
    written = checkpoint_layouts.megatron_deepspeed(
        model,
        tmp_path / "run",
        degree=degree,
        padded=64,
        pipelines=chance.random() < 0.5,
        thirds=True,
        args={"force_ds_sequence_parallel": True},
    )
    checkpoint = open_checkpoint(written, vocabulary=config.vocab_size)
    result = import_checkpoint(checkpoint, tmp_path / "model")
    check_same(model, tmp_path / "model", result)


@pytest.mark.parametrize(
    ("family", "degree", "pipelines"),
    in_tiers(
        [(f, t, p) for f in ("gpt_neox", "llama") for t in (1, 2) for p in (False, True)],
        first=[("gpt_neox", 2, True)],
    ),
)
def test_gpt_neox(tmp_path: Path, seed: int, family: str, degree: int, pipelines: bool) -> None:
    chance = random.Random(seed)
    model = draw_model(draw_llama(chance) if family == "llama" else draw_gpt_neox(chance), chance)
    check_gpt_neox(model, tmp_path, degree, pipelines=pipelines, former=chance.random() < 0.5)


@THOROUGH
@pytest.mark.parametrize("former", [False, True])
def test_gpt_neox_llama_of_equal_heads(tmp_path: Path, seed: int, former: bool) -> None:
    """With as many keys as queries the rows are head by head."""
    chance = random.Random(seed)
    heads = 2 * chance.choice((1, 2))
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads}
    model = draw_model(draw_llama(chance, **sizes, hidden_size=8 * heads, head_dim=8), chance)
    check_gpt_neox(model, tmp_path, 2, pipelines=chance.random() < 0.5, former=former)


@THOROUGH
@pytest.mark.parametrize("parallel", [False, True])
def test_gpt_neox_biases(tmp_path: Path, seed: int, parallel: bool) -> None:
    """Ranks' biases of the second matrices are summed if both branches are summed at once."""
    chance = random.Random(seed)
    config = draw_gpt_neox(chance)
    config.use_parallel_residual = parallel
    model = draw_model(config, chance)
    check_gpt_neox(model, tmp_path, 2, pipelines=True, former=False)


def check_gpt_neox(
    model: PreTrainedModel, tmp_path: Path, degree: int, *, pipelines: bool, former: bool
) -> None:
    written = checkpoint_layouts.gpt_neox(
        model, tmp_path / "run", degree=degree, padded=64, pipelines=pipelines, former=former
    )
    checkpoint = open_checkpoint(written, vocabulary=model.config.vocab_size)
    assert checkpoint.trainer == "gpt-neox"
    result = import_checkpoint(checkpoint, tmp_path / "model")
    check_same(model, tmp_path / "model", result)


def draw_nanotron(family: str, chance: random.Random) -> PretrainedConfig:
    """Return a config of a family that nanotron trains."""
    changes: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    if family == "smollm3":
        changes |= {"num_hidden_layers": 6, "no_rope_layer_interval": 3}
        changes["no_rope_layers"] = [1, 1, 0, 1, 1, 0]
    fields = draw_llama(chance, **changes).to_dict()
    foreign = ("head_dim", "attention_bias", "mlp_bias", "model_type", "pretraining_tp")
    shared = {name: value for name, value in fields.items() if name not in foreign}
    return AutoConfig.for_model(family, **shared)


@pytest.mark.parametrize(
    ("family", "degree", "interleaved"),
    in_tiers(
        [(f, t, i) for f in ("llama", "qwen2", "smollm3") for t in (1, 2) for i in (False, True)],
        first=[("llama", 2, True)],
    ),
)
def test_nanotron(tmp_path: Path, seed: int, family: str, degree: int, interleaved: bool) -> None:
    chance = random.Random(seed)
    model = draw_model(draw_nanotron(family, chance), chance)
    written = checkpoint_layouts.nanotron(
        model,
        tmp_path / "run",
        degree=degree,
        stages=chance.choice((1, 2)),
        interleaved=interleaved,
        padded=64,
        numpy_sizes=chance.random() < 0.5,
        fields={"no_rope_layer": 3} if family == "smollm3" else None,
    )
    checkpoint = open_checkpoint(written, vocabulary=model.config.vocab_size)
    assert (checkpoint.trainer, checkpoint.folder.name) == ("nanotron", "9")
    result = import_checkpoint(checkpoint, tmp_path / "model")
    check_same(model, tmp_path / "model", result)
