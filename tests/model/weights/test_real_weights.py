"""SmolLM2-135M on 1, 2 and 3 tensor parallel ranks is transformers' own model: on real text,
there and back.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.checkpoint_runs import build
from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.smollm2 import with_heads
from tests.support.tiny_models import speeches
from tests.tiers import THOROUGH
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.topology import Topology
from zero_tp.tools.evaluation import zero_shot
from zero_tp.tools.evaluation.eval_model import EvalModel, ParallelScorer
from zero_tp.tools.evaluation.perplexity import perplexity

LENGTH = 96  # tokens; 2 and 3 divide it
GREATEST = 1e-4  # difference of any logit; they reach 30


@pytest.fixture(scope="module")
def tokens(smollm2: Path) -> Tensor:
    """[2, LENGTH] of two speeches."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return torch.tensor([tokenizer.encode(text)[:LENGTH] for text in speeches(2, 1000)])


@pytest.fixture(scope="module")
def cut(smollm2: Path) -> Iterator[Path]:
    """8 heads and 2 KV heads, which 2 ranks divide."""
    directory = smollm2 / "cut"
    with_heads(smollm2, directory, 8, 2)
    yield directory
    shutil.rmtree(directory)


def native_logits(directory: Path, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.no_grad():
        logits: Tensor = model(tokens).logits
    return logits


def logits_and_export(
    directory: Path, tensor: int, tokens: Tensor, dtype: torch.dtype, output: Path
) -> list[Tensor]:
    """SP off and on; the model with SP is exported in fp32, and one read as bf16 in bf16."""
    found = []
    for sequence in (False, True):
        model = ZeroTPForCausalLM.from_pretrained(
            directory, grid(tensor, sequence), dtype=dtype
        ).eval()
        with torch.no_grad():
            found.append(model(tokens).logits)
    model.to(torch.float32)  # fp64 holds its values too
    model.save_pretrained(output / "fp32", max_shard_size="200MB")
    half = ZeroTPForCausalLM.from_pretrained(directory, grid(tensor, True), dtype=torch.bfloat16)
    half.save_pretrained(output / "bf16")
    return found if torch.distributed.get_rank() == 0 else []


def stored(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def greatest(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and expected.abs().max() > 10
    return float((found - expected).abs().max())


@pytest.mark.heavy
def test_one_rank(smollm2: Path, tokens: Tensor) -> None:
    model = ZeroTPForCausalLM.from_pretrained(smollm2, Topology(world=1)).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    with torch.no_grad():
        assert greatest(model(tokens).logits, native_logits(smollm2, tokens)) < GREATEST


@THOROUGH
@pytest.mark.parametrize("tensor", [pytest.param(2, marks=pytest.mark.heavy), 3])
def test_more_ranks(
    ranks: Pools, smollm2: Path, cut: Path, tokens: Tensor, tmp_path: Path, tensor: int
) -> None:
    # In fp64: fp32 sums in another order move the model's logits by 1.1e-4, the copy's by 2e-3.
    directory, dtype = (smollm2 if tensor == 3 else cut), torch.float64
    found = ranks(tensor).run(logits_and_export, directory, tensor, tokens, dtype, tmp_path)[0]
    expected = native_logits(directory, tokens, dtype)
    differences = [greatest(logits, expected) for logits in found]
    assert len(differences) == 2 and max(differences) < GREATEST, differences
    before, after, half = stored(directory), stored(tmp_path / "fp32"), stored(tmp_path / "bf16")
    assert len(list((tmp_path / "fp32").glob("*.safetensors"))) > 2
    assert before.keys() == after.keys() == half.keys() and len(before) == 272
    for name, tensor_before in before.items():
        assert torch.equal(after[name], tensor_before), name
        assert torch.equal(half[name], tensor_before.to(torch.bfloat16)), name
    shutil.rmtree(tmp_path)


# ---- perplexity ----------------------------------------------------------------------------------


def parallel_perplexity(
    directory: Path, tensor: int, texts: list[str], length: int, overlap: int
) -> float:
    """Through the library's function, scored by our model."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    topology = grid(tensor, True)
    model = ZeroTPForCausalLM.from_pretrained(directory, topology).eval()
    eval_model = EvalModel(
        ParallelScorer(model),
        model,
        tokenizer,
        model.config,
        window=length,
        batch_size=4,
        topology=topology,
    )
    return float(perplexity(texts, eval_model, overlap=overlap)["perplexity"])


def plain_perplexity(directory: Path, texts: list[str], length: int, overlap: int) -> float:
    """By transformers' own loss, one window after another."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    total = count = 0.0
    for text in texts:
        ids = [
            tokenizer.bos_token_id,
            *tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True),
        ]
        done = 1  # ids that are scored, or stand before the text
        for start in range(0, len(ids), overlap):
            if done == len(ids):
                break
            window = ids[start : start + length + 1]
            labels = [IGNORE_INDEX] * (done - start) + window[done - start :]
            scored = len(window) - (done - start)
            with torch.no_grad():
                loss = model(torch.tensor([window]), labels=torch.tensor([labels])).loss
            total, count, done = total + loss.item() * scored, count + scored, start + len(window)
    return math.exp(total / count)


def same_perplexity(
    ranks: Pools, directory: Path, texts: list[str], length: int, overlap: int, folder: Path
) -> tuple[float, float, float]:
    """(ours on 3 ranks, transformers' own, the command's)."""
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    found = ranks(3).run(parallel_perplexity, directory, 3, texts, length, overlap)
    assert len(set(found)) == 1
    settings = zero_shot.EvaluationSettings(sequence_length=length, device="cpu", overlap=overlap)
    report = zero_shot.evaluate(
        directory, ["perplexity"], {"perplexity": folder / "texts.jsonl"}, settings
    )
    return (
        found[0],
        plain_perplexity(directory, texts, length, overlap),
        report["tasks"]["perplexity"]["perplexity"],
    )


@pytest.mark.parametrize(
    ("count", "characters", "length", "overlap"),
    [
        pytest.param(3, 700, 96, 64, marks=THOROUGH),
        pytest.param(8, 3000, 512, 256, marks=pytest.mark.heavy),
    ],
)
def test_perplexity(
    ranks: Pools,
    smollm2: Path,
    tmp_path: Path,
    count: int,
    characters: int,
    length: int,
    overlap: int,
) -> None:
    ours, plain, command = same_perplexity(
        ranks, smollm2, speeches(count, characters), length, overlap, tmp_path
    )
    assert 5 < plain < 100
    assert ours == pytest.approx(plain, rel=1e-4) and command == pytest.approx(plain, rel=1e-4)


# ---- training ------------------------------------------------------------------------------------

STEP: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0}


def trained(path: Path, tokens: Tensor, steps: int) -> list[float]:
    """Losses of a run that starts from a directory."""
    engine, config = build(path)
    assert config.pretrained is not None
    return [engine.train_step([(tokens[:, :-1], tokens[:, 1:])]) for _ in range(steps)]


@pytest.mark.heavy
def test_training_goes_on(ranks: Pools, smollm2: Path, tokens: Tensor, tmp_path: Path) -> None:
    """TP 3, SP, ZeRO-1 takes the steps of transformers' model under torch's AdamW."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {**STEP, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "zero_tp": {
            "model": {"from_pretrained": str(smollm2)},
            "parallel": {"tensor": 3},
            "data": {"train": "data/train", "sequence_length": LENGTH},
            "training": {"steps": 3},
        },
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    inputs = torch.cat((tokens, tokens[:, :1]), 1)
    found = ranks(3).run(trained, tmp_path / "run.json", inputs, 3)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **{**STEP, "betas": tuple(STEP["betas"])})
    expected = []
    for _ in range(3):
        loss = model(
            inputs[:, :-1], labels=inputs[:, :-1], shift_labels=inputs[:, 1:].contiguous()
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert expected[2] < expected[0] - 0.1, "it learns"
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-4)
