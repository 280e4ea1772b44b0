"""Runs that start from a Hugging Face directory, and a real checkpoint there and back."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2LMHeadModel

from tests.support.checkpoint_runs import OFFLOADS, build
from tests.support.compare import grid
from tests.support.gpt2_reference import NO_DROPOUT
from tests.support.launched import pretrain, run, script
from tests.support.native import native_tensors, perturbed
from tests.support.pools import Pools
from tests.support.settings import gpt2_config
from tests.tiers import THOROUGH, in_tiers
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.checkpoint.directory import read_manifest, step_directory
from zero_tp.run.checkpoint.inspect import inspect

ROOT = Path(__file__).resolve().parents[3]


def random_model() -> Any:
    torch.manual_seed(4)
    model = GPT2LMHeadModel(gpt2_config(n_embd=64, n_positions=32, vocab_size=509))
    return perturbed(model, 0.02).eval()


def config_file(path: Path, directory: str) -> Path:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.0, "weight_decay": 0.1, "torch_adam": True},
        },
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "zero_tp": {
            "model": {"from_pretrained": directory, **NO_DROPOUT},
            "parallel": {"tensor": 2},
            "data": {"train": "data/train", "sequence_length": 32},
            "training": {"steps": 1},
        },
    }
    path.write_text(json.dumps(config))
    return path


def weights_in_the_engine(path: str) -> tuple[dict[str, Tensor], float]:
    """(the weights that the engine starts with, its loss)."""
    engine, config = build(path)
    assert config.pretrained is not None
    weights = {name: tensor.clone() for name, tensor in native_tensors(engine.model)}
    tokens = torch.arange(2 * 33).view(2, 33) % 509
    return weights, engine.evaluate([(tokens[:, :-1], tokens[:, 1:])])["loss"]


@pytest.mark.parametrize(
    ("stage", "dtype", "offload"),
    in_tiers(
        [
            *((stage, dtype, "none") for stage in range(4) for dtype in ("fp32", "bf16")),
            (3, "bf16", "parameters"),
        ],
        [(0, "fp32", "none"), (2, "bf16", "none")],
    ),
)
def test_an_engine_starts_from_the_directory(
    ranks: Pools, tmp_path: Path, stage: int, dtype: str, offload: str
) -> None:
    reference = random_model()
    reference.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    path = config_file(tmp_path / "run.json", str(tmp_path / "model"))
    config = json.loads(path.read_text())
    config["zero_optimization"] |= {"stage": stage, **OFFLOADS[offload]}
    if offload != "none":
        del config["optimizer"]["params"]["torch_adam"]
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    path.write_text(json.dumps(config))
    tokens = torch.arange(2 * 33).view(2, 33) % 509
    with torch.no_grad():
        logits = reference(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten()
    ).item()
    for weights, loss in ranks(4).run(weights_in_the_engine, str(path)):
        for name, tensor in weights.items():
            assert torch.equal(tensor, reference.state_dict()[name].to(tensor.dtype)), name
        assert loss == pytest.approx(expected, rel=1e-5 if dtype == "fp32" else 2e-2)


@THOROUGH
def test_a_run_from_a_directory(tmp_path: Path) -> None:
    with gzip.open(ROOT / "launch" / "corpus" / "sotu.jsonl.gz", "rt") as lines:
        (tmp_path / "some.jsonl").write_text("".join(next(lines) for _ in range(8)))
    prepared = script(
        "launch/prepare_data.py",
        tmp_path,
        "--input",
        "some.jsonl",
        "--tokenizer",
        "bpe:500",
        "--output",
        "data",
    )
    assert prepared.returncode == 0, prepared.stderr
    path = config_file(tmp_path / "run.json", "model")
    missing = run([sys.executable, "-m", "zero_tp", "check", str(path)], tmp_path)
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: zero_tp.model.from_pretrained: no directory model;")
    model = random_model()
    model.generation_config.update(do_sample=True, temperature=0.5)
    model.save_pretrained(tmp_path / "model")
    checked = run(
        [sys.executable, "-m", "zero_tp", "check", str(path), "--world-size", "4"], tmp_path
    )
    assert checked.returncode == 0, checked.stderr
    assert "weights    of model\n" in checked.stdout

    done = pretrain(2, tmp_path, "--deepspeed_config", "run.json")
    assert done.returncode == 0, done.stdout + done.stderr
    to_huggingface(
        tmp_path / "runs" / "run", tmp_path / "export", tokenizer=tmp_path / "data" / "tokenizer"
    )
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model", "export")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before), (
        "a step of size 0 changes no bit"
    )
    settings = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert (settings["do_sample"], settings["temperature"]) == (True, 0.5)

    found = inspect(tmp_path / "runs" / "run", verify=True)
    for words in (
        "ZeRO-3",
        "data/tokenizer",
        f"{sum(tensor.numel() for tensor in before.values()):,}",
    ):
        assert words in found

    other = pretrained_fields(tmp_path / "model", n_layer=1)
    changed = pretrain(
        2, tmp_path, "--deepspeed_config", "run.json", "--set", "zero_tp.training.steps=2"
    )
    assert changed.returncode != 0
    assert (
        "error: zero_tp.model.from_pretrained: n_layer in model is 1, but the run was started with "
        "2" in changed.stdout + changed.stderr
    )
    (tmp_path / "model" / "config.json").write_text(other)

    (tmp_path / "model" / "model.safetensors").unlink()
    anew = pretrain(2, tmp_path, "--deepspeed_config", "run.json", "--output-dir", "runs/new")
    assert anew.returncode != 0
    assert "error: model: no weights in it: no model.safetensors" in anew.stdout + anew.stderr
    shutil.rmtree(tmp_path / "model")  # the checkpoint has all of it now
    again = pretrain(
        2, tmp_path, "--deepspeed_config", "run.json", "--set", "zero_tp.training.steps=2"
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming step 1" in again.stdout
    first, second = (
        read_manifest(step_directory(tmp_path / "runs" / "run", step)).model for step in (1, 2)
    )
    assert first == second, "the config too"


def pretrained_fields(directory: Path, **changes: Any) -> str:
    """Change fields of the directory's config.json; what it held before."""
    before = (directory / "config.json").read_text()
    (directory / "config.json").write_text(json.dumps(json.loads(before) | changes))
    return before


def there_and_back(directory: Path, tensor: int, output: Path) -> None:
    model = ZeroTPForCausalLM.from_pretrained(
        directory, grid(tensor, tensor > 1), allow_pickle=True
    )
    model.save_pretrained(output, max_shard_size="5MB")


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_real_checkpoint_there_and_back(
    ranks: Pools, tmp_path: Path, microformer: Path, tensor: int
) -> None:
    reference: Any = GPT2LMHeadModel.from_pretrained(microformer)
    assert sum(parameter.numel() for parameter in reference.parameters()) == 8_924_928
    ranks(max(tensor, 2)).run(there_and_back, microformer, tensor, tmp_path / "back")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    back: Any = GPT2LMHeadModel.from_pretrained(tmp_path / "back")
    assert not differing(back.state_dict(), reference.state_dict())
    for name in (
        "n_layer",
        "n_embd",
        "n_head",
        "vocab_size",
        "attn_pdrop",
        "bos_token_id",
        "eos_token_id",
        "dtype",
    ):
        assert getattr(back.config, name) == getattr(reference.config, name), name


def differing(found: dict[str, Tensor], reference: dict[str, Tensor]) -> list[str]:
    """Names that only one has, or whose tensors differ in any bit."""
    both = found.keys() & reference.keys()
    return sorted(
        (found.keys() ^ reference.keys())
        | {name for name in both if not torch.equal(found[name], reference[name])}
    )
