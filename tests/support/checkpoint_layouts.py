"""Write checkpoints of trainers that no registry has, from the weights of a Hugging Face model.

Each function follows the trainer's own source at a commit, which it names: its modules give the
names and the order of rows, its saving the files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

Tensors = dict[str, Tensor]


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return a vocabulary's matrix with rows of noise after it."""
    noise = torch.randn(rows - tensor.shape[0], *tensor.shape[1:]).to(tensor.dtype)
    return torch.cat([tensor, noise])


def embedding_rows(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def head_rows(model: PreTrainedModel) -> Tensor:
    head = model.get_output_embeddings()
    assert head is not None and isinstance(head.weight, Tensor)
    return head.weight.detach()


def by_group(parts: Sequence[Tensor], groups: int) -> Tensor:
    """Return Q, K and V with the rows of each group one after the other."""
    split = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(split, 1).reshape(-1, *parts[0].shape[1:])


def stacked(parts: Sequence[Tensor], degree: int, rank: int) -> Tensor:
    """Return a rank's shares of some matrices, one after the other."""
    return torch.cat([part.chunk(degree)[rank] for part in parts])


def cut_columns(tensor: Tensor, degree: int, rank: int) -> Tensor:
    return tensor.chunk(degree, 1)[rank].clone()


# microsoft/Megatron-DeepSpeed at f4157be: megatron/model/transformer.py (ParallelMLP,
# ParallelAttention.forward, and of its parent before 676a482 split_tensor),
# megatron/model/language_model.py (state_dict_for_save_checkpoint), megatron/model/gpt_model.py
# (GPTModelPipe), megatron/checkpointing.py (save_checkpoint).


def llama_layer(weights: Mapping[str, Tensor], number: int) -> dict[str, Any]:
    """Return a Llama layer's parts by what they are."""
    prefix = f"model.layers.{number}."
    layer = {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }
    return {
        "qkv": [layer[f"self_attn.{letter}_proj.weight"] for letter in "qkv"],
        "dense": layer["self_attn.o_proj.weight"],
        "gate": layer["mlp.gate_proj.weight"],
        "up": layer["mlp.up_proj.weight"],
        "down": layer["mlp.down_proj.weight"],
        "norms": (layer["input_layernorm.weight"], layer["post_attention_layernorm.weight"]),
    }


def megatron_deepspeed_layer(
    model: PreTrainedModel, number: int, degree: int, rank: int, *, thirds: bool
) -> Tensors:
    """Return a layer's tensors of one TP rank."""
    config = model.config
    weights = model.state_dict()
    if config.model_type == "gpt2":
        return gpt2_layer(weights, config.n_head, number, degree, rank, thirds=thirds)
    layer = llama_layer(weights, number)
    groups = config.num_key_value_heads
    fused = by_group(layer["qkv"], groups).chunk(degree)[rank]
    return {
        "input_layernorm.weight": layer["norms"][0],
        "self_attention.query_key_value.weight": stacked(layer["qkv"], degree, rank)
        if thirds
        else fused.clone(),
        "self_attention.dense.weight": cut_columns(layer["dense"], degree, rank),
        "post_attention_layernorm.weight": layer["norms"][1],
        "mlp.dense_h_to_4h.weight": stacked([layer["gate"], layer["up"]], degree, rank),
        "mlp.dense_4h_to_h.weight": cut_columns(layer["down"], degree, rank),
    }


def gpt2_layer(
    weights: Mapping[str, Tensor], heads: int, number: int, degree: int, rank: int, *, thirds: bool
) -> Tensors:
    """Return GPT-2's, whose matrices are [in, out] in Hugging Face's files."""
    prefix = f"transformer.h.{number}."
    tensors: Tensors = {}
    for part in ("weight", "bias"):
        names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        fused, dense, up, down = (weights[f"{prefix}{name}.{part}"].t() for name in names)
        qkv = fused.chunk(3)
        rows = stacked(qkv, degree, rank) if thirds else by_group(qkv, heads).chunk(degree)[rank]
        is_bias = part == "bias"
        tensors |= {
            f"input_layernorm.{part}": weights[f"{prefix}ln_1.{part}"],
            f"self_attention.query_key_value.{part}": rows.clone(),
            f"self_attention.dense.{part}": dense.clone()
            if is_bias
            else cut_columns(dense, degree, rank),
            f"post_attention_layernorm.{part}": weights[f"{prefix}ln_2.{part}"],
            f"mlp.dense_h_to_4h.{part}": up.chunk(degree)[rank].clone(),
            f"mlp.dense_4h_to_h.{part}": down.clone()
            if is_bias
            else cut_columns(down, degree, rank),
        }
    return tensors


def megatron_deepspeed_args(model: PreTrainedModel, degree: int, padded: int) -> dict[str, Any]:
    """Return the fields of megatron/arguments.py that describe a model."""
    config = model.config
    is_gpt2 = config.model_type == "gpt2"
    heads = config.n_head if is_gpt2 else config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if is_gpt2 else config.num_key_value_heads,
        "kv_channels": config.hidden_size // heads if is_gpt2 else config.head_dim,
        "ffn_hidden_size": config.n_inner if is_gpt2 else config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "padded_vocab_size": padded,
        "vocab_size": None,
        "normalization": "layernorm" if is_gpt2 else "rmsnorm",
        "layernorm_epsilon": config.layer_norm_epsilon if is_gpt2 else config.rms_norm_eps,
        "apply_layernorm_1p": False,
        "add_bias_linear": is_gpt2,
        "swiglu": not is_gpt2,
        "bias_gelu_fusion": is_gpt2,
        "openai_gelu": False,
        "use_rotary_position_embeddings": not is_gpt2,
        "add_position_embedding": is_gpt2,
        "rotary_percent": 1.0,
        "rotary_position_embeddings_theta": 10_000,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "num_experts": [1],
        "tensor_model_parallel_size": degree,
        "params_dtype": model.dtype,
        "use_flash_attn_v2": True,
    }


def megatron_deepspeed(
    model: PreTrainedModel,
    folder: Path,
    *,
    degree: int,
    padded: int,
    pipelines: bool,
    thirds: bool = False,
    args: Mapping[str, Any] | None = None,
) -> Path:
    """Write a step; return the root of its run.

    Args:
        padded: rows of the vocabulary.
        thirds: as releases with FPDT read Q, K and V.
        args: further ones.
    """
    config = model.config
    is_gpt2 = config.model_type == "gpt2"
    weights = model.state_dict()
    head = head_rows(model)
    fields = megatron_deepspeed_args(model, degree, padded) | dict(args or {})
    if thirds:
        fields["ds_sequence_parallel_fpdt"] = False
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    outer = {"word_embeddings": pad_rows(embedding_rows(model), padded)}
    last = "transformer.ln_f" if is_gpt2 else "model.norm"
    norm = {
        name.removeprefix(f"{last}."): tensor
        for name, tensor in weights.items()
        if name.startswith(f"{last}.")
    }
    untied = None if config.tie_word_embeddings else pad_rows(head, padded)
    for rank in range(degree):
        layers = [
            megatron_deepspeed_layer(model, number, degree, rank, thirds=thirds)
            for number in range(config.num_hidden_layers)
        ]
        embedding = {"word_embeddings": {"weight": outer["word_embeddings"].chunk(degree)[rank]}}
        if is_gpt2:
            embedding["position_embeddings"] = {"weight": weights["transformer.wpe.weight"]}
        state = {"args": argparse.Namespace(**fields), "checkpoint_version": 3.0, "iteration": 7}
        if pipelines:
            flat = {f"{name}.weight": inner["weight"] for name, inner in embedding.items()}
            files = [flat, *layers, norm]
            files += [] if untied is None else [{"lm_head.weight": untied.chunk(degree)[rank]}]
            # Number 0 is a function that casts.
            for number, tensors in enumerate(files, 1):
                name = f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
                torch.save({key: tensor.clone() for key, tensor in tensors.items()}, step / name)
            state["module"] = None
        else:
            encoder = {
                f"layers.{n}.{key}": t for n, layer in enumerate(layers) for key, t in layer.items()
            }
            encoder |= {f"final_layernorm.{key}": tensor for key, tensor in norm.items()}
            language_model: dict[str, Any] = {"embedding": embedding, "encoder": encoder}
            if untied is not None:
                language_model["output_layer"] = {"weight": untied.chunk(degree)[rank]}
            state["module"] = {"language_model": {**language_model, "moe_state_dict": {}}}
        torch.save(state, step / f"mp_rank_{rank:02d}_model_states.pt")
        torch.save(
            {"optimizer_state_dict": {}},
            step / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt",
        )
    return folder


# EleutherAI/gpt-neox at ea7aefd: megatron/model/transformer.py (ParallelMLP, Gated_Activation,
# ParallelSelfAttention.forward and gqa_project, ParallelTransformerLayer.forward),
# megatron/model/gpt2_model.py (init_specs), megatron/checkpointing.py (save_ds_checkpoint); names
# of before 0d4bdb9 from its parent's LLaMAParallelMLP.


def gpt_neox_qkv(
    parts: Sequence[Tensor], heads: int, groups: int, degree: int, rank: int
) -> Tensor:
    """Return a rank's rows: head by head, or Q, K and V one after the other if K has fewer."""
    if groups != heads:
        return stacked(parts, degree, rank)
    return by_group(parts, heads).chunk(degree)[rank].clone()


def gpt_neox_layer(
    model: PreTrainedModel, number: int, degree: int, rank: int, *, former: bool
) -> Tensors:
    """Return a layer's tensors of one TP rank."""
    config = model.config
    weights = model.state_dict()
    heads = config.num_attention_heads
    if config.model_type == "llama":
        layer = llama_layer(weights, number)
        groups = config.num_key_value_heads
        gate, up = (layer[name].chunk(degree)[rank] for name in ("gate", "up"))
        mlp = (
            {"mlp.w1.weight": gate.clone(), "mlp.w3.weight": up.clone()}
            if former
            else {"mlp.linear1.weight": torch.cat([up, gate])}
        )
        down = "mlp.w2.weight" if former else "mlp.linear2.weight"
        return {
            "input_layernorm.scale": layer["norms"][0],
            "attention.query_key_value.weight": gpt_neox_qkv(
                layer["qkv"], heads, groups, degree, rank
            ),
            "attention.dense.weight": cut_columns(layer["dense"], degree, rank),
            "post_attention_layernorm.scale": layer["norms"][1],
            **mlp,
            down: cut_columns(layer["down"], degree, rank),
        }
    prefix = f"gpt_neox.layers.{number}."
    up_name, down_name = (
        ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h") if former else ("mlp.linear1", "mlp.linear2")
    )
    tensors: Tensors = {}
    for part in ("weight", "bias"):
        names = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h")
        fused, dense, up = (weights[f"{prefix}{name}.{part}"] for name in names)
        last = weights[f"{prefix}mlp.dense_4h_to_h.{part}"]
        if part == "weight":
            dense, last = (cut_columns(tensor, degree, rank) for tensor in (dense, last))
        elif config.use_parallel_residual:
            # Every rank adds its own to its part of the output, which are summed then.
            dense, last = (share_of_sum(tensor, degree, rank) for tensor in (dense, last))
        tensors |= {
            f"input_layernorm.{part}": weights[f"{prefix}input_layernorm.{part}"],
            # Its rows are those of transformers' class.
            f"attention.query_key_value.{part}": fused.chunk(degree)[rank].clone(),
            f"attention.dense.{part}": dense.clone(),
            f"post_attention_layernorm.{part}": weights[f"{prefix}post_attention_layernorm.{part}"],
            f"{up_name}.{part}": up.chunk(degree)[rank].clone(),
            f"{down_name}.{part}": last.clone(),
        }
    return tensors


def share_of_sum(tensor: Tensor, degree: int, rank: int) -> Tensor:
    """Return what a rank has of a sum; the ranks' shares differ and add up exactly."""
    if degree == 1:
        return tensor
    return tensor * (0.25 if rank == 0 else 0.75 / (degree - 1))


def gpt_neox_settings(model: PreTrainedModel, *, former: bool) -> dict[str, Any]:
    """Return the settings that describe a model."""
    config = model.config
    common = {
        "pos_emb": "rotary",
        "rotary-emb-base": config.rope_parameters["rope_theta"],
        "no_weight_tying": not config.tie_word_embeddings,
        "attention_config": [[["flash", "global"], 2]],
        "mlp_multiple_of": 4,
    }
    if config.model_type == "llama":
        width = config.intermediate_size
        return common | {
            "rotary_pct": 1,
            "norm": "rmsnorm",
            "rms-norm-epsilon": config.rms_norm_eps,
            "num_kv_heads": config.num_key_value_heads,
            "use_bias_in_attn_linear": False,
            "use_bias_in_mlp": False,
            # A gated one is a third as wide as it is set.
            **(
                {"mlp_type": "llama", "activation": "silu", "intermediate_size": width}
                if former
                else {"activation": "swiglu", "intermediate_size": 3 * width}
            ),
        }
    return common | {
        "rotary-pct": config.rope_parameters["partial_rotary_factor"],
        "layernorm-epsilon": config.layer_norm_eps,
        "gpt_j_residual": config.use_parallel_residual,
        "bias-gelu-fusion": config.hidden_act == "gelu_fast",
        "intermediate_size": config.intermediate_size,
    }


def gpt_neox(
    model: PreTrainedModel,
    folder: Path,
    *,
    degree: int,
    padded: int,
    pipelines: bool,
    former: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a step; return the root of its run.

    Args:
        padded: rows of the vocabulary.
        former: with the names of releases before September 2024.
        settings: further ones.
    """
    config = model.config
    is_llama = config.model_type == "llama"
    weights = model.state_dict()
    step = folder / "global_step7"
    (step / "configs").mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    recorded = gpt_neox_settings(model, former=former) | dict(settings or {})
    names = sorted(recorded)
    for file, chosen in (("model.yml", names[::2]), ("rest.yml", names[1::2])):
        content = {name: recorded[name] for name in chosen}
        (step / "configs" / file).write_text(json.dumps(content))
    embedding = pad_rows(embedding_rows(model), padded)
    last = "model.norm" if is_llama else "gpt_neox.final_layer_norm"
    norm = {
        f"norm.{'scale' if is_llama else part}": weights[f"{last}.{part}"]
        for part in ("weight", "bias")
        if f"{last}.{part}" in weights
    }
    head = pad_rows(head_rows(model), padded)
    args = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "padded_vocab_size": padded,
        "tokenizer_type": "HFTokenizer",
        "model_parallel_size": degree,
    }
    for rank in range(degree):
        layers = [
            gpt_neox_layer(model, number, degree, rank, former=former)
            for number in range(config.num_hidden_layers)
        ]
        # Functions have numbers, too: one before the layers, one after them.
        files: list[Tensors] = [{"word_embeddings.weight": embedding.chunk(degree)[rank]}, {}]
        files += [*layers, {}, norm]
        if not config.tie_word_embeddings:
            files.append({"final_linear.weight": head.chunk(degree)[rank]})
        state = {"iteration": 7, "args": args, "module": None}
        if pipelines:
            for number, tensors in enumerate(files):
                name = f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
                if tensors:
                    content = {key: tensor.clone() for key, tensor in tensors.items()}
                    torch.save(content, step / name)
        else:
            state["module"] = {
                f"sequential.{number}.{name}": tensor.clone()
                for number, tensors in enumerate(files)
                for name, tensor in tensors.items()
            }
        torch.save(state, step / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


# huggingface/nanotron at 2411b02: src/nanotron/parallel/sharded_parameters.py
# (create_sharded_parameter_from_config), src/nanotron/parallel/parameters.py (SlicesPair),
# src/nanotron/serialize/ (weights.py, utils.py, metadata.py), src/nanotron/models/llama.py,
# src/nanotron/trainer.py (save_checkpoint).


def slice_text(bounds: tuple[int, int] | None) -> str:
    return "None,None,None" if bounds is None else f"{bounds[0]},{bounds[1]},None"


def nanotron_shards(
    parts: Sequence[Tensor], degree: int, dim: int, *, numpy_sizes: bool
) -> list[tuple[Tensor, dict[str, str]]]:
    """Return each rank's tensor and its metadata.

    Args:
        parts: chunks of `dim`, each of which is cut.
        numpy_sizes: write sizes as numpy 2 does.
    """
    sizes = [part.shape[dim] for part in parts]
    shape: list[Any] = list(parts[0].shape)
    shape[dim] = sum(sizes)
    texts = [f"np.int64({size})" if numpy_sizes and len(parts) > 1 else str(size) for size in shape]
    shards = []
    for rank in range(degree):
        pairs = []
        for number, size in enumerate(sizes):
            before, length = sum(sizes[:number]), size // degree
            local = (before // degree, before // degree + length)
            whole = (before + rank * length, before + (rank + 1) * length)
            sides = [
                "|".join(slice_text(bounds if axis == dim else None) for axis in range(len(shape)))
                for bounds in (None if len(parts) == 1 else local, whole)
            ]
            pairs.append("#".join(sides))
        tensor = torch.cat([part.chunk(degree, dim)[rank] for part in parts], dim).contiguous()
        metadata = {
            "version": "1.5",
            "local_global_slices_pairs": ";".join(pairs),
            "unsharded_shape": f"({', '.join(texts)}{',' * (len(shape) == 1)})",
        }
        shards.append((tensor, metadata))
    return shards


def neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Return rows whose rotary halves become pairs, head by head."""
    head = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return head.transpose(1, 2).reshape(tensor.shape)


def nanotron_config(config: PretrainedConfig, padded: int, *, interleaved: bool) -> dict[str, Any]:
    """Return the fields of the trainer's LlamaConfig or Qwen2Config."""
    is_llama = config.model_type == "llama"
    return {
        "is_llama_config" if is_llama else "is_qwen2_config": True,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_interleaved": interleaved,
        "rope_scaling": None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": padded,
        "attention_bias": config.model_type == "qwen2",
    }


@dataclass
class NanotronWriter:
    """Writes the files of tensors.

    Attributes:
        stages: of the pipeline.
        numpy_sizes: see `nanotron_shards`.
    """

    folder: Path
    degree: int
    stages: int
    numpy_sizes: bool

    def write(self, name: str, stage: int, parts: Sequence[Tensor], dim: int | None = 0) -> None:
        """Write a tensor that is cut along `dim`, or is the same on all ranks."""
        *path, own = name.split(".")
        place = self.folder / Path(*path)
        place.mkdir(parents=True, exist_ok=True)
        if dim is None:
            save_file({"data": parts[0].contiguous()}, place / f"model_{own}.safetensors")
            return
        shards = nanotron_shards(parts, self.degree, dim, numpy_sizes=self.numpy_sizes)
        for rank, (tensor, metadata) in enumerate(shards):
            text = f"pp-rank-{stage}-of-{self.stages}_tp-rank-{rank}-of-{self.degree}"
            save_file({"data": tensor}, place / f"model_{own}_{text}.safetensors", metadata)


def write_nanotron_layer(
    writer: NanotronWriter, model: PreTrainedModel, number: int, *, interleaved: bool
) -> None:
    """Write a decoder layer."""
    config, weights = model.config, model.state_dict()
    heads = (config.num_attention_heads, config.num_key_value_heads)
    layer = llama_layer(weights, number)
    prefix = f"model.decoder.{number}.pp_block."
    stage = number * writer.stages // config.num_hidden_layers
    for part in ("weight", "bias"):
        names = [f"model.layers.{number}.self_attn.{letter}_proj.{part}" for letter in "qkv"]
        if names[0] not in weights:
            continue
        qkv = [weights[name] for name in names]
        if interleaved:
            qkv[0], qkv[1] = neighbours(qkv[0], heads[0]), neighbours(qkv[1], heads[1])
        writer.write(f"{prefix}attn.qkv_proj.{part}", stage, qkv)
    writer.write(f"{prefix}attn.o_proj.weight", stage, [layer["dense"]], 1)
    writer.write(f"{prefix}mlp.gate_up_proj.weight", stage, [layer["gate"], layer["up"]])
    writer.write(f"{prefix}mlp.down_proj.weight", stage, [layer["down"]], 1)
    for name, norm in zip(("input", "post_attention"), layer["norms"], strict=True):
        writer.write(f"{prefix}{name}_layernorm.weight", stage, [norm], None)


def nanotron(
    model: PreTrainedModel,
    folder: Path,
    *,
    degree: int,
    stages: int,
    interleaved: bool,
    padded: int,
    numpy_sizes: bool = False,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write a step; return the root of its run.

    Args:
        stages: of the pipeline, over which layers are spread.
        interleaved: neighbouring features rotate together.
        padded: rows of the vocabulary.
        fields: further ones of the config.
    """
    config, weights = model.config, model.state_dict()
    step = folder / "9"
    writer = NanotronWriter(step / "model", degree, stages, numpy_sizes)
    embedding = pad_rows(embedding_rows(model), padded)
    writer.write("model.token_position_embeddings.pp_block.token_embedding.weight", 0, [embedding])
    for number in range(config.num_hidden_layers):
        write_nanotron_layer(writer, model, number, interleaved=interleaved)
    norm = weights["model.norm.weight"]
    writer.write("model.final_layer_norm.pp_block.weight", stages - 1, [norm], None)
    if not config.tie_word_embeddings:
        head = pad_rows(head_rows(model), padded)
        writer.write("model.lm_head.pp_block.weight", stages - 1, [head])
    recorded = nanotron_config(config, padded, interleaved=interleaved) | dict(fields or {})
    (step / "model_config.json").write_text(json.dumps(recorded))
    (step / "config.yaml").write_text("model:\n  init_method:\n    std: 0.025\n")
    (step / "optimizer").mkdir()
    (step / "optimizer" / "optimizer_pp-0-of-1_tp-0-of-1.pt").write_bytes(b"")
    (folder / "latest.txt").write_text("9")
    return folder
