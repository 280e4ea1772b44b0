"""SmolLM2-135M-Instruct as a Hugging Face directory, and a copy with fewer heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(packaged: Path, directory: Path) -> None:
    """transformers dequantizes the package's GGUF; written as fp32 safetensors. Some seconds,
    540 MB.
    """
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(packaged, gguf_file=FILE, dtype=torch.float32)
    AutoTokenizer.from_pretrained(packaged, gguf_file=FILE).save_pretrained(directory)
    del model.config.quantization_config
    state = {
        name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    _write(directory, state, model.config)


def with_heads(source: Path, directory: Path, heads: int, kv_heads: int) -> None:
    """A copy that keeps the first heads and KV heads of each layer: another model, but one of
    real weights.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    config = model.config
    config.num_attention_heads, config.num_key_value_heads = heads, kv_heads
    kept = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    state = load_file(source / "model.safetensors")
    for name in list(state):
        part = name.split(".")[-2]
        if part in kept:
            state[name] = state[name][: kept[part] * config.head_dim].contiguous()
        elif part == "o_proj":
            state[name] = state[name][:, : heads * config.head_dim].contiguous()
    _write(directory, state, config)


def _write(directory: Path, state: dict[str, Tensor], config: PretrainedConfig) -> None:
    directory.mkdir(exist_ok=True)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
