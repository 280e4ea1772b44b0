#!/usr/bin/env python3
"""Compare the tokens/s of a model_type with transformers' own class, in one process.

Both train on the same tokens from the same weights, by torch's fused AdamW: transformers' class by
itself, ours in the engine at ZeRO-0. They take turns, a few steps each, so that both meet the same
machine. Prints a line for each, the median of the rounds with its range, and the ratio.

    python -m benchmarks.families youtu --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BATCH, LENGTH = 4, 256
STEPS = 3
SIZES: dict[str, Any] = {
    **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 8, "intermediate_size": 1408, "vocab_size": 16_384},
    **{"max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 0},
    **{"attention_dropout": 0.0, "pad_token_id": None},
}
LATENTS = {
    **{"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64},
    **{"qk_rope_head_dim": 32, "v_head_dim": 64},
}
GROUPS = {
    **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2},
    **{"topk_group": 1, "moe_intermediate_size": 704},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 704}
DELTA = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_key_value_heads": 2},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64},
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "youtu": LATENTS,
    "deepseek_v3": {**LATENTS, **GROUPS, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**LATENTS, **GROUPS},
    "gpt_oss": {
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 704},
        **{"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128},
    },
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 704},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 704},
    "olmo_hybrid": {"linear_key_head_dim": 48, "linear_value_head_dim": 96, "pad_token_id": 0},
}
"""model_type → the fields that differ from SIZES."""
ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0}

Step = Callable[[torch.Tensor], float]


def transformers_step(model: Any) -> Step:
    """Return a function that trains transformers' model on a batch [BATCH, LENGTH]."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def our_step(model: dict[str, Any], weights: Path, dtype: str) -> Step:
    """Return the same of our engine, with the weights of a directory."""
    from benchmarks.contenders import connected, engine_of
    from benchmarks.step_launches import load

    run = load(
        {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True, "fused": True}},
            "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": {"stage": 0},
            "zero_tp": {
                "model": model,
                "data": {"train": "unused", "sequence_length": LENGTH},
                "training": {"steps": 1},
            },
        }
    )
    topology, device = connected(run)
    engine = engine_of(run, topology, device, weights)

    def step(tokens: torch.Tensor) -> float:
        labels = torch.full_like(tokens, -100)
        labels[:, :-1] = tokens[:, 1:]
        return engine.train_step([(tokens, labels)])

    return step


def compare(model_type: str, dtype: str, rounds: int) -> dict[str, list[float]]:
    """Return the tokens/s of each contender in every round."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    declared = AutoConfig.for_model(model_type).to_dict()
    sizes = SIZES | FIELDS[model_type]
    fields = {name: value for name, value in sizes.items() if name in declared}
    config = AutoConfig.for_model(model_type, **fields)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        ours = our_step({"model_type": model_type, **fields}, Path(directory), dtype)
    if dtype == "bf16":
        reference.to(torch.bfloat16)
    steps = {"transformers": transformers_step(reference.train()), "zero_tp": ours}
    tokens = [torch.randint(config.vocab_size, (BATCH, LENGTH)) for _ in range(STEPS)]
    for step in steps.values():
        step(tokens[0])
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for batch in tokens:
                step(batch)
            rates[name].append(STEPS * BATCH * LENGTH / (time.perf_counter() - start))
    return rates


def main() -> None:
    """Compare the model type on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_type", choices=FIELDS)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rates = compare(options.model_type, options.dtype, options.rounds)
    for name, values in rates.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{options.model_type} {name}: {middle:.0f} tokens/s ({low:.0f} to {high:.0f})")
    ratios = [ours / other for other, ours in zip(*rates.values(), strict=True)]
    middle = statistics.median(ratios)
    print(f"{options.model_type} ratio {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
