"""Describe a run's config in words."""

from __future__ import annotations

from typing import Any

from zero_tp.config.run_config import RunConfig
from zero_tp.config.schedule import WARMUPS


def describe(config: RunConfig) -> str:
    """Return what `pretrain.py --check` prints about a config that is right."""
    block, batch, raw = config.zero_tp, config.batch, config.resolved()
    tensor, length, steps = block.parallel.tensor, block.data.sequence_length, block.training.steps
    model = config.hf_config()
    sequence = ", sequence parallel" if block.parallel.sequence else ""
    if config.world_size is None:
        ranks = f"a multiple of {tensor} (tensor {tensor} × data ?){sequence}; --world-size N checks the sums"
    else:
        ranks = f"{config.world_size} = tensor {tensor} × data {config.data_parallel}{sequence}"
    factors = (("micro", batch.micro), ("accumulation", batch.accumulation), ("data", batch.data_parallel))
    product = " × ".join(f"{name} {size or '?'}" for name, size in factors)
    params = raw["optimizer"].get("params", {})
    tokens = "?" if batch.total is None else f"{batch.total * length:,}"
    total = "?" if batch.total is None else f"{batch.total * length * steps:,}"
    kind = f"{model.model_type}, {model.num_hidden_layers} layers, hidden {model.hidden_size}"
    weights = f" from {config.pretrained}" if config.pretrained else ""
    lines = (
        ("config", f"{config.path} is right"),
        ("model", f"{kind}, {model.num_attention_heads} heads, vocabulary {model.vocab_size:,}{weights}"),
        ("ranks", ranks),
        ("ZeRO", f"stage {config.zero_stage}, {config.dtype}"),
        ("batch", f"{batch.total or '?'} samples = {product}"),
        ("optimizer", f"{raw['optimizer']['type']}, lr {params['lr']:g}, clip {raw['gradient_clipping']:g}"),
        ("schedule", _schedule(raw, steps)),
        ("steps", f"{steps:,} of {tokens} tokens (sequence length {length:,}): {total} tokens"),
    )
    notes = [("no effect", text) for text in config.without_effect()]
    notes += [("note", text) for text in config.cautions()]
    for path in config.absent():
        asked = " and asks the Hugging Face hub for" if str(path) in config.on_hub else ""
        notes.append(("not here", f"{path}, which a run needs{asked}"))
    return "\n".join(f"{name:<10} {text}" for name, text in (*lines, *notes))


def _schedule(raw: dict[str, Any], steps: int) -> str:
    """Return the schedule's type, and its rates at a few steps."""
    block = raw.get("scheduler")
    if block is None:
        return "none: the rate stays"
    from zero_tp.zero.schedule import rates

    params = block["params"]
    warmup = next((int(params[name]) for name in WARMUPS if name in params), 1)
    at = sorted({1, min(max(1, warmup), steps), (steps + 1) // 2, steps})
    points = zip(at, rates(block, float(raw["optimizer"]["params"]["lr"]), at), strict=True)
    return f"{block['type']}, lr " + ", ".join(f"{rate:.3g} at step {step:,}" for step, rate in points)
