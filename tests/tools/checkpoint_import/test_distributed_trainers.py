"""Checkpoints that OLMo-core and torchtitan write: the result computes their own logits."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.support import checkpoint_writers_dcp
from tests.support.launched import ROOT
from tests.tiers import THOROUGH
from zero_tp.tools.checkpoint_import.formats import open_checkpoint
from zero_tp.tools.checkpoint_import.importing import ImportResult, import_checkpoint

CLOSE = 1e-5
"""Largest difference of logits, of the largest logit, in fp32."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the packages of checkpoint_packages.txt."""
    folder = tmp_path_factory.mktemp("packages")
    listed = ROOT / "tests/support/checkpoint_packages.txt"
    words = ["install", "--quiet", "--no-deps", "--target", str(folder), "-r", str(listed)]
    subprocess.run(
        [sys.executable, "-m", "pip", *words], check=True, timeout=500, capture_output=True
    )
    yield folder


def write(trainer: str, settings: dict[str, Any], folder: Path, packages: Path, ranks: int) -> Path:
    """Write a checkpoint with the trainer's package; return its folder."""
    source = folder / "settings.json"
    source.write_text(json.dumps(settings))
    target = folder / "run"
    target.mkdir()
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    writer = [checkpoint_writers_dcp.__name__, trainer]
    words = ["-W", "ignore", "-m", *(launcher if ranks > 1 else []), *writer]
    done = subprocess.run(
        [sys.executable, *words, source, target],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{packages}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target


def draw_sizes(chance: random.Random) -> dict[str, int]:
    groups = chance.choice((1, 2, 3))
    return {
        "vocabulary": chance.randrange(30, 60),
        "hidden": 8 * chance.randrange(2, 5),
        "layers": chance.choice((3, 5)),
        "groups": groups,
        "heads": groups * chance.choice((1, 2)),
        "head_size": chance.choice((4, 8, 16)),
        "width": 8 * chance.randrange(3, 7),
    }


def draw_tokens(chance: random.Random, vocabulary: int) -> list[list[int]]:
    return [[chance.randrange(vocabulary) for _ in range(20)] for _ in range(2)]


def writing_ranks(folder: Path) -> int:
    """Return the number of ranks that wrote tensors: files are `__RANK_NUMBER.distcp`."""
    return len({path.name.split("_")[2] for path in folder.rglob("*.distcp")})


def check_logits(written: Path, output: Path, model_type: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(output, attn_implementation="eager").eval()
    assert model.config.model_type == model_type
    settings = json.loads((written.parent / "settings.json").read_text())
    expected = torch.load(written / "logits.pt")
    with torch.no_grad():
        logits = model(torch.tensor(settings["tokens"])).logits
    assert logits.dtype == expected.dtype == torch.float32
    assert (logits - expected).abs().max() <= CLOSE * expected.abs().max()


def convert(source: Path, output: Path, config: PretrainedConfig | None = None) -> ImportResult:
    checkpoint = open_checkpoint(source, config=config)
    return import_checkpoint(checkpoint, output)


OLMO: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True, "use_head_qk_norm": True},
    "olmo2": {"qk_norm": True, "block_name": "reordered_norm"},
    "olmo3": {
        "qk_norm": True,
        "block_name": "reordered_norm",
        # Full attention in the first layer begins the pattern after it.
        "sliding_window": {"pattern": [6, 6, -1], "force_full_attention_on_last_layer": False},
        "n_layers": 5,
    },
}


@THOROUGH
@pytest.mark.parametrize(("family", "ranks"), [*((name, 1) for name in OLMO), ("llama", 2)])
def test_olmo_core(tmp_path: Path, packages: Path, seed: int, family: str, ranks: int) -> None:
    chance = random.Random(seed)
    sizes = draw_sizes(chance)
    tied = chance.random() < 0.5
    arguments = {
        "d_model": sizes["hidden"],
        "vocab_size": sizes["vocabulary"],
        "n_layers": sizes["layers"],
        "n_heads": sizes["heads"],
        "n_kv_heads": sizes["groups"],
        "head_dim": sizes["head_size"],
        "hidden_size_multiple_of": 8,
        "rope_theta": chance.choice((100, 10_000)),
        "layer_norm_eps": chance.choice((1e-6, 1e-3)),
        "tie_word_embeddings": tied,
        **OLMO[family],
    }
    settings = {
        "factory": "llama_like",
        "arguments": arguments,
        "seed": seed,
        "tokens": draw_tokens(chance, sizes["vocabulary"]),
        "length": 32,
    }
    written = write("olmo-core", settings, tmp_path, packages, ranks)
    checkpoint = open_checkpoint(written)
    assert checkpoint.folder.name == "step3"
    assert writing_ranks(checkpoint.folder) == ranks
    assert len(checkpoint.left_out) == (ranks == 1)
    assert all(text.startswith("the optimizer's states") for text in checkpoint.left_out)
    result = convert(written, tmp_path / "model")
    assert (result.unused, result.dtype) == (0, torch.float32)
    check_logits(written, tmp_path / "model", family)


TITAN = {"llama": "llama3", "qwen3": "qwen3"}


@THOROUGH
@pytest.mark.parametrize(
    ("family", "fused", "ranks"),
    [(name, fused, 1) for name in TITAN for fused in (False, True)] + [("llama", True, 3)],
)
def test_torchtitan(
    tmp_path: Path, packages: Path, seed: int, family: str, fused: bool, ranks: int
) -> None:
    chance = random.Random(seed)
    sizes = draw_sizes(chance)
    is_llama = family == "llama"
    head_size = sizes["head_size"]
    # torchtitan's Llama has heads of the whole width.
    hidden = sizes["heads"] * head_size if is_llama else sizes["hidden"]
    theta = chance.choice((100.0, 10_000.0))
    tied = chance.random() < 0.5
    layers = {
        "n_layers": sizes["layers"],
        "dim": hidden,
        "n_heads": sizes["heads"],
        "n_kv_heads": sizes["groups"],
        "hidden_dim": sizes["width"],
        "fuse_qkv": fused,
        **({} if is_llama else {"head_dim": head_size}),
    }
    settings = {
        "family": TITAN[family],
        "layers": layers,
        "vocabulary": sizes["vocabulary"],
        "theta": theta,
        "tied": tied,
        "seed": seed,
        "tokens": draw_tokens(chance, sizes["vocabulary"]),
    }
    written = write("torchtitan", settings, tmp_path, packages, ranks)
    assert writing_ranks(written) == ranks
    config = AutoConfig.for_model(
        family,
        vocab_size=sizes["vocabulary"],
        hidden_size=hidden,
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["groups"],
        head_dim=head_size,
        intermediate_size=sizes["width"],
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5 if is_llama else 1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    result = convert(written, tmp_path / "model", config)
    assert result.unused == 0
    check_logits(written, tmp_path / "model", family)
