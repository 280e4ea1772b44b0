"""Small runs of several stages: their configs, their steps on the ranks of a pool, and the same
run of transformers in one process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support.native import to_theirs
from tests.support.settings import engine_of
from tests.support.tiny_models import write_corpus
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.permutation import Permutation
from zero_tp.model.causal_lm import CausalLM

VOCABULARY = 97
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
WSD = {"warmup_tokens": 700, "num_training_steps": "auto", "decay_tokens": 500}
STAGES: list[dict[str, Any]] = [
    {"name": "main", "steps": 8, "batch_size_rampup": {"start": 4, "increment": 4, "tokens": 400}},
    {
        "name": "mixed",
        "tokens": 700,
        "data": {"a": 1.0, "b": 3.0},
        "rope": {"rope_theta": 300.0},
        "lr_scale": 0.5,
        "recompute": "full",
    },
    {
        "name": "long",
        "steps": 3,
        "sequence_length": 32,
        "batch_tokens": 512,
        "train_micro_batch_size_per_gpu": 4,
        "recompute": "none",
        "scheduler": {
            "type": "linear",
            "params": {"num_warmup_steps": 1, "num_training_steps": "auto"},
        },
    },
]
FIRST_STEPS = (1, 9, 13, 16)
"""Of each stage, and the one after the run."""


def write_staged(folder: Path, **changes: Any) -> Path:
    """Write the corpora a and b, and a run of three stages on them; return its config."""
    random = np.random.default_rng(5)
    for name, documents in (("a", 60), ("b", 9)):
        lengths = random.integers(3, 60, documents)
        tokens = [random.integers(1, VOCABULARY, size) for size in lengths]
        write_corpus(folder / name, tokens, VOCABULARY)
    stages = [
        {**stage, "data": {str(folder / name): share for name, share in stage["data"].items()}}
        if "data" in stage
        else stage
        for stage in STAGES
    ]
    config: dict[str, Any] = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "warmup_stable_decay", "params": WSD},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 1},
        "zero_tp": {
            "model": MODEL,
            "data": {"train": str(folder / "a"), "sequence_length": 16},
            "training": {"stages": stages, "seed": 11},
            "checkpoint": {"keep": 100},
        },
    }
    path = folder / "run.json"
    path.write_text(json.dumps(config | changes))
    return path


def run_stages(
    path: str, overrides: list[str], run: str, last: int, resume: int | None = None
) -> dict[str, Any]:
    """Train to step `last` and save it, from the start or from a saved step, on this pool's ranks.

    Returns the figures of each step, the weights, and this rank's samples.
    """
    import torch.distributed as dist

    from tests.support.parallel_run import optimizer_tensors
    from zero_tp.run.callback import TrainState
    from zero_tp.run.checkpoint.directory import step_directory
    from zero_tp.run.checkpoint.find import find_checkpoint
    from zero_tp.run.checkpoint.same_run import check_same_run
    from zero_tp.run.checkpoint.save import run_saver
    from zero_tp.run.checkpoint.start_point import Resume
    from zero_tp.run.config import RunConfig
    from zero_tp.run.run_inputs import RunInputs
    from zero_tp.run.stages import StageChanges

    config = RunConfig.load(path, overrides, world_size=dist.get_world_size())
    inputs = RunInputs(config, Path(run))
    engine = engine_of(config, recompute=config.zero_tp.recompute_policy)
    first = 0
    if resume is not None:
        start = Resume(find_checkpoint(step_directory(Path(run), resume)))
        check_same_run(start.checkpoint.path, start.checkpoint.manifest, config)
        inputs.check_resumed(start.checkpoint.path, start.checkpoint.manifest)
        start.restore(engine.zero, config.zero_tp.training.seed)
        first = start.step
    state = TrainState(inputs, engine, first)
    stages = StageChanges(state)
    figures: dict[int, tuple[float, float, float]] = {}
    samples: dict[int, list[Tensor]] = {}
    with inputs.read_ahead(engine.topology, last) as batches:
        for step in range(first + 1, last + 1):
            state.step = step
            stages.before_step(state)
            rate = engine.learning_rate
            micro = batches.take(step)
            engine.run_step(micro)
            figures[step] = (engine.loss, engine.gradient_norm, rate)
            samples[step] = [batch.input_ids for batch in micro]
    saver = run_saver(engine.zero, config, Path(run), corpora=inputs.corpora)
    saver.save(last)
    assert saver.outcome() == (last, "")
    return {
        "figures": figures,
        "samples": samples,
        "weights": optimizer_tensors(engine),
        "averages": {} if config.zero_tp.training.ema is None else optimizer_tensors(engine, "ema"),
        "rope": engine.model.config.rope_parameters,
    }


def steps_as_documented(
    config: dict[str, Any], data: str
) -> Iterator[tuple[dict[str, float], int, int]]:
    """Yield (corpora, length, batch) of each step by docs/recipes.md, step after step."""
    source, length, full = {data: 1.0}, 16, 12
    for stage in config["zero_tp"]["training"]["stages"]:
        source = stage.get("data", source)
        length = stage.get("sequence_length", length)
        if "batch_tokens" in stage:
            full = stage["batch_tokens"] // length
        steps = consumed = 0
        while steps < stage["steps"] if "steps" in stage else consumed < stage["tokens"]:
            batch = full
            if ramp := stage.get("batch_size_rampup"):
                increments = (full - ramp["start"]) // ramp["increment"]
                grown = consumed * increments // ramp["tokens"]
                batch = min(full, ramp["start"] + ramp["increment"] * grown)
            yield source, length, batch
            steps += 1
            consumed += batch * length


def samples_as_documented(config: dict[str, Any], data: str) -> Iterator[Tensor]:
    """Yield the rows of each step, int64 [batch, s + 1], by docs/recipes.md, one after another."""
    seed = config["zero_tp"]["training"]["seed"]
    numbers: dict[str, int] = {}
    read: dict[str, tuple[int, int]] = {}
    source: Any = None
    for weights, length, batch in steps_as_documented(config, data):
        if source != (weights, length):
            source, taken, counts = (weights, length), 0, dict.fromkeys(weights, 0)
            for prefix in weights:
                numbers.setdefault(prefix, len(numbers))
                before, windows = read.get(prefix, (length, 0))
                if before != length:
                    epochs = math.ceil(windows / (len(stream(prefix)) // before))
                    windows = epochs * (len(stream(prefix)) // length)
                read[prefix] = (length, windows)
        rows = []
        for _ in range(batch):
            taken += 1
            shares = {
                one: Fraction(weights[one]) / Fraction(sum(weights.values())) for one in weights
            }
            prefix = max(weights, key=lambda one: shares[one] * taken - counts[one])
            counts[prefix] += 1
            windows = (len(stream(prefix)) - 1) // length
            epoch, position = divmod(read[prefix][1], windows)
            order = Permutation(windows, seed, epoch, numbers[prefix])
            window = int(order.entries(np.array([position]))[0])
            rows.append(stream(prefix)[window * length : window * length + length + 1])
            read[prefix] = (length, read[prefix][1] + 1)
        yield torch.from_numpy(np.stack(rows).astype(np.int64))


def stream(prefix: str) -> Any:
    """Return all tokens of a corpus."""
    corpus = IndexedCorpus(prefix)
    return corpus.read(0, corpus.tokens)


def plain_figures(path: Path) -> dict[str, Any]:
    """Train the same run with transformers' class and torch's AdamW in this process.

    The rates are transformers' own, of a schedule made anew where a stage brings one.
    """
    config = json.loads(path.read_text())
    data = config["zero_tp"]["data"]["train"]
    hf_config = LlamaConfig(**{key: value for key, value in MODEL.items() if key != "model_type"})
    hf_config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    model = LlamaForCausalLM(hf_config)
    ours = CausalLM(hf_config, seed=config["zero_tp"]["training"]["seed"])
    weights = {name: tensor.detach() for name, tensor in ours.named_parameters()}
    model.load_state_dict(to_theirs(hf_config, weights), strict=True)
    params = config["optimizer"]["params"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=params["lr"], eps=params["eps"], weight_decay=0.0
    )
    # The steps of the file's schedule have 4 × 64, 2 × 128 and 6 × 192 tokens. Its warm-up of 700
    # takes 7 of them, its decay over 500 the last 3 of 12; the length counts one more.
    file_rate = get_wsd_schedule(optimizer, 7, 3, num_training_steps=13).lr_lambdas[0]
    last_rate = get_linear_schedule_with_warmup(optimizer, 1, 4).lr_lambdas[0]
    figures = {}
    for step, rows in enumerate(samples_as_documented(config, data), 1):
        rate = params["lr"] * (file_rate(step) if step < 13 else last_rate(step - 12))
        if step >= 9:
            rate *= 0.5
        if step == 9:
            hf_config.rope_parameters = {"rope_type": "default", "rope_theta": 300.0}
            model.model.rotary_emb = LlamaRotaryEmbedding(hf_config)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        figures[step] = (loss.item(), norm.item(), rate)
    return {"figures": figures, "weights": dict(model.named_parameters())}
