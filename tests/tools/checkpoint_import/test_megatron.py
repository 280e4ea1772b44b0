"""Checkpoints that megatron-core writes: the converted model has Megatron's own logits."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import megatron_writer
from tests.support.launched import ROOT
from tests.support.tiny_configs import tiny_config
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.model.architectures import architecture_of
from zero_tp.tools.checkpoint_import import megatron_names
from zero_tp.tools.checkpoint_import.formats import open_checkpoint
from zero_tp.tools.checkpoint_import.importing import import_checkpoint

pytestmark = THOROUGH


def options(seed: int, **changes: Any) -> dict[str, Any]:
    """Options of megatron_writer with drawn sizes. The vocabulary is padded to 16 × TP."""
    chance = random.Random(seed)
    groups = changes.pop("groups", 2)
    heads = changes.pop("heads", groups * chance.choice([1, 2, 3]) if groups > 1 else 4)
    head_size = 2 * chance.randint(2, 5)
    layers = changes.get("stages", 1) * changes.get("chunks", 1) * chance.choice([1, 2])
    width = 4 * chance.randint(3, 8)
    tensor = changes.get("tensor", 2)
    vocabulary = chance.randint(33, 90)
    padded = -(-vocabulary // (16 * tensor)) * 16 * tensor
    hidden = heads * (head_size if changes.get("learned") else 2 * chance.randint(2, 6))
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    sizes |= {"num_query_groups": groups, "kv_channels": head_size, "ffn_hidden_size": width}
    gated = not changes.pop("learned", False)
    bias = changes.pop("bias", not gated)
    tied = changes.pop("tied", chance.random() < 0.5 or not gated)
    normed = changes.pop("qk_layernorm", False)
    qkv_bias = changes.pop("qkv_bias", False)
    experts = changes.pop("experts", 0)
    config = {**sizes, "gated_linear_unit": gated, "add_bias_linear": bias}
    config |= {"layernorm_epsilon": 1e-5, "qk_layernorm": normed, "add_qkv_bias": qkv_bias}
    args = {
        **{name: value for name, value in config.items() if name != "gated_linear_unit"},
        **{"swiglu": gated, "group_query_attention": True, "norm_epsilon": 1e-5},
        **{"max_position_embeddings": 32, "padded_vocab_size": padded, "vocab_size": vocabulary},
        "normalization": "RMSNorm" if gated else "LayerNorm",
        "position_embedding_type": "rope" if gated else "learned_absolute",
        "untie_embeddings_and_output_weights": not tied,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": changes.get("stages", 1),
        "expert_model_parallel_size": changes.get("expert", 1),
        "num_experts": experts or None,
    }
    if experts:
        of_experts = {"moe_router_topk": 2, "moe_ffn_hidden_size": 4 * chance.randint(2, 6)}
        args |= of_experts
        changes["num_moe_experts"] = experts
        changes["experts"] = {
            **of_experts,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    written = {"tensor": tensor, "stages": 1, "layout": "torch_dist", "seed": seed, "tied": tied}
    written |= {"padded": padded, "vocabulary": vocabulary, "positions": 32}
    return {
        **written,
        "normalization": args["normalization"],
        "config": config,
        "args": args,
        **changes,
    }


def write(chosen: dict[str, Any], folder: Path) -> None:
    """Let megatron-core write a checkpoint and compute its logits."""
    folder.mkdir()
    file = folder / "options.json"
    file.write_text(json.dumps(chosen))
    words = ["-W", "ignore", "-m", megatron_writer.__name__, str(file), str(folder)]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def check_logits(folder: Path, output: Path, rel: float = 1e-5) -> None:
    """Compare the converted model with Megatron's logits on the real tokens."""
    import_checkpoint(open_checkpoint(folder), output)
    model = AutoModelForCausalLM.from_pretrained(
        output, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.load(folder / "ids.pt", weights_only=True)
    expected = torch.load(folder / "logits.pt", weights_only=True)
    with torch.no_grad():
        logits = model(ids).logits
    expected = expected[..., : logits.shape[-1]]
    assert float((logits - expected).abs().max() / expected.abs().max()) < rel


ONE_BY_ONE = {"non_homogeneous_layers": True}
CASES: dict[str, dict[str, Any]] = {
    "stacked layers": {},
    "one by one": {"metadata": ONE_BY_ONE, "qk_layernorm": True},
    "gate and up apart": {"metadata": {**ONE_BY_ONE, "singleton_local_shards": True}},
    "a group on two ranks": {"groups": 1, "qkv_bias": True, "bias": False},
    "learned positions": {"learned": True, "groups": 4, "heads": 4},
    "stacked experts": {"experts": 4, "tensor": 1},
    "experts one by one": {
        "experts": 4,
        "tensor": 1,
        "data": 2,
        "expert": 2,
        "metadata": {**ONE_BY_ONE, "singleton_local_shards": True},
    },
    "ranks": {"layout": "ranks"},
    "ranks, a group on two": {"layout": "ranks", "groups": 1, "qkv_bias": True, "bias": False},
    "ranks, biases": {"layout": "ranks", "learned": True, "groups": 4, "heads": 4},
    "ranks, stages": {"layout": "ranks", "stages": 2, "qk_layernorm": True},
    "ranks, experts": {"layout": "ranks", "experts": 4, "tensor": 1, "data": 2, "expert": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_megatron(case: str, seed: int, tmp_path: Path) -> None:
    write(options(seed, **CASES[case]), tmp_path / "megatron")
    check_logits(tmp_path / "megatron", tmp_path / "model")


def test_the_table_takes_each_tensor_once() -> None:
    """No tensor is read as two parameters, and each has the name of the same part."""
    for model_type in ("llama", "qwen3", "gpt2", "mixtral"):
        config = tiny_config(model_type, 50)
        spec = architecture_of(config).spec(config)
        table = [
            weight
            for weight in megatron_names.weights(spec)
            if "qkv" not in weight.our_name and ".up." not in weight.our_name
        ]
        names = [name for weight in table for name in weight.names]
        assert len(names) == len(set(names))
        parts = {weight.our_name.split(".")[-2]: weight.names[0] for weight in table}
        assert "q_layernorm" in parts["query_norm"] and "k_layernorm" in parts["key_norm"]
        assert "input_layernorm" in parts["attention_norm"]


def test_virtual_stages_hold_layers_in_turns(seed: int, tmp_path: Path) -> None:
    """2 stages of 2 chunks: from a checkpoint of one stage, whose layers are dealt out."""
    folder = tmp_path / "megatron"
    chosen = options(seed, layout="ranks", tensor=1)
    for block in (chosen["config"], chosen["args"]):
        block["num_layers"] = 4
    write(chosen, folder)
    step = folder / f"iter_{megatron_writer.STEP:07d}"
    old = step / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(old, weights_only=False)
    saved["args"].pipeline_model_parallel_size = 2
    model = saved.pop("model")
    old.unlink()
    old.parent.rmdir()
    for stage in range(2):
        chunks: dict[str, dict[str, Any]] = {"model0": {}, "model1": {}}
        for name, tensor in model.items():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                chunk, owner = divmod(int(parts[2]), 2)
                if owner == stage:
                    chunks[f"model{chunk}"][name.replace(f".{parts[2]}.", ".0.")] = tensor
            elif stage == 0 and name.startswith("embedding"):
                chunks["model0"][name] = tensor
            elif stage == 1 and not name.startswith("embedding"):
                chunks["model1"][name] = tensor
        (step / f"mp_rank_00_{stage:03d}").mkdir()
        torch.save({**saved, **chunks}, step / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt")
    check_logits(folder, tmp_path / "model")


def test_what_is_wrong_is_one_line(seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "megatron"
    write(options(seed, layout="ranks"), folder)
    step = folder / f"iter_{megatron_writer.STEP:07d}"
    file = step / "mp_rank_01" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    changes: dict[str, Any] = {
        "has no tensor": lambda model, args: model.pop("decoder.layers.0.mlp.linear_fc2.weight"),
        "cannot be read": lambda model, args: None,
    }
    for message, change in changes.items():
        model = dict(content["model"])
        change(model, content["args"])
        torch.save({**content, "model": model}, file)
        if message == "cannot be read":
            file.write_bytes(file.read_bytes()[:300])
        with pytest.raises(UserError, match=message):
            import_checkpoint(open_checkpoint(folder), tmp_path / "model")
    file.unlink()
    with pytest.raises(UserError, match="no model_optim_rng"):
        open_checkpoint(folder)
    file.parent.rmdir()
    with pytest.raises(UserError, match="files of 1 tensor ranks, and its args say 2"):
        open_checkpoint(folder)
    with pytest.raises(UserError, match="has no step 8; it has 7"):
        open_checkpoint(folder, step=8)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("multi_latent_attention", True),
        ("swiglu", False),
        ("rotary_percent", 0.5),
        ("hidden_size", None),
        ("checkpoint_version", 1.0),
        ("rotary_interleaved", True),
    ],
)
def test_a_family_that_is_not_derived_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    """Before any tensor is read: there is none."""
    step = tmp_path / "iter_0000003" / "mp_rank_00"
    step.mkdir(parents=True)
    args = {**options(0, layout="ranks", tensor=1)["args"], field: value}
    torch.save({"model": {}, "args": args}, step / "model_optim_rng.pt")
    with pytest.raises(UserError, match=field):
        open_checkpoint(tmp_path)
