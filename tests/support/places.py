"""Places where a run computes: grid, ZeRO stage, dtype and model."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from tests.support.checkpoint_runs import BATCH, MODEL, VOCABULARY, build, steps_of, write_config
from tests.support.tiny_configs import general_fields
from zero_tp.run.checkpoint.directory import read_manifest, step_directory
from zero_tp.run.checkpoint.reader import CheckpointReader, tensor_name

MORE = 10
MODELS = {
    "gpt2": MODEL | dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    # 2 KV heads: whole at TP 1, split at TP 2, replicated at TP 4; 3: replicated at TP 2 and 4,
    # unevenly used.
    **{
        f"{count} KV heads": {
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 12,
            "num_key_value_heads": count,
            "head_dim": 4,
            "intermediate_size": 40,
            "attention_bias": True,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        for count in (2, 3)
    },
    "linear attention": {
        **general_fields("qwen3_5_text"),
        "vocab_size": VOCABULARY,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "latents": {**general_fields("youtu"), "vocab_size": VOCABULARY},
}


@dataclass(frozen=True)
class Place:
    """Where a run computes; `vocabulary` rows are padded to a multiple of `tensor`."""

    world: int
    tensor: int
    sequence: bool
    stage: int
    dtype: str = "fp32"
    offload: str = "none"
    model: str = "gpt2"
    optimizer: str = "AdamW"

    @property
    def name(self) -> str:
        sp, offload = (
            "SP " if self.sequence else "",
            "" if self.offload == "none" else f" {self.offload}",
        )
        place = (
            f"TP {self.tensor} × DP {self.world // self.tensor} {sp}ZeRO-{self.stage} "
            f"{self.dtype}{offload}"
        )
        place = place if self.optimizer == "AdamW" else f"{self.optimizer} {place}"
        return place if self.model == "gpt2" else f"{self.model} {place}"

    def write(self, path: Path, draw: random.Random) -> Path:
        """Write the config of a run here, with an accumulation that is drawn."""
        rows = BATCH * self.tensor // self.world
        write_config(path, self.stage, self.dtype, self.tensor, self.offload, seed=5)
        config: dict[str, Any] = json.loads(path.read_text())
        config["gradient_accumulation_steps"] = draw.choice(
            [count for count in (1, 2, 3, 4) if rows % count == 0]
        )
        config["gradient_clipping"] = 0.5
        if self.optimizer == "Muon":
            adamw = {"lr": 4e-3, "eps": 1e-3}
            config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2, "adamw": adamw}}
        else:
            config["optimizer"]["params"]["eps"] = 1e-3
        config["scheduler"]["params"]["warmup_num_steps"] = 6
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 100
        config["zero_tp"] |= {"model": MODELS[self.model], "training": {"steps": 12, "seed": 5}}
        config["zero_tp"]["parallel"]["sequence"] = self.sequence
        path.write_text(json.dumps(config))
        return path


DP2, DP4 = Place(2, 1, False, 2), Place(4, 1, False, 1)
WHOLE, SPLIT, REPLICATED = (
    Place(world, tensor, tensor > 1, stage, model="2 KV heads")
    for world, tensor, stage in ((2, 1, 2), (2, 2, 3), (4, 4, 1))
)


def first_part(path: str, run: str, saved: int) -> list[tuple[float, float]]:
    """Save on the way; (loss, gradient norm) of the steps after it."""
    from zero_tp.run.checkpoint.save import run_saver

    engine, config = build(path)
    saver = run_saver(engine.zero, config, Path(run))
    steps_of(engine, 1, saved)
    saver.save(saved)
    assert saver.outcome() == (saved, "")
    return steps_of(engine, saved + 1, saved + MORE)


def contents(run: Path, step: int) -> dict[tuple[str, str], Tensor]:
    """Each parameter's master and states, whole."""
    checkpoint = step_directory(run, step)
    manifest = read_manifest(checkpoint)
    reader = CheckpointReader(checkpoint, manifest)
    saved = set[str]()
    for path in checkpoint.glob("states_*.safetensors"):
        with safe_open(path, framework="pt") as file:
            saved.update(file.keys())
    return {
        (name, kind): reader.whole(name, kind)
        for name in reader.parameters
        for kind in manifest.kinds
        if tensor_name(name, kind) in saved
    }
