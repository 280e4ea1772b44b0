"""`zero-tp convert to-hf` of another trainer's checkpoint: what it asks for, says, and leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_tp.__main__ import main

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
ROWS = 48
VOCABULARY = 40


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """A run of Megatron-LM on one rank, with steps 3 and 12."""
    shapes = {
        "embedding.word_embeddings.weight": (ROWS, 16),
        "decoder.final_layernorm.weight": (16,),
        "output_layer.weight": (ROWS, 16),
    }
    for layer in range(2):
        prefix = f"decoder.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (16,),
            f"{prefix}self_attention.linear_qkv.weight": (48, 16),
            f"{prefix}self_attention.linear_proj.weight": (16, 16),
            f"{prefix}pre_mlp_layernorm.weight": (16,),
            f"{prefix}mlp.linear_fc1.weight": (48, 16),
            f"{prefix}mlp.linear_fc2.weight": (16, 24),
        }
    args = {
        **SIZES,
        **{"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"},
        **{"max_position_embeddings": 32, "padded_vocab_size": ROWS, "vocab_size": VOCABULARY},
        "untie_embeddings_and_output_weights": True,
    }
    for step in (3, 12):
        torch.manual_seed(step)
        model = {name: torch.randn(shape) for name, shape in shapes.items()}
        folder = tmp_path / "theirs" / f"iter_{step:07d}" / "mp_rank_00"
        folder.mkdir(parents=True)
        saved = {"model": model, "args": args, "checkpoint_version": 3.0}
        torch.save(saved, folder / "model_optim_rng.pt")
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("12\n")
    return tmp_path / "theirs"


def convert(
    capsys: pytest.CaptureFixture[str], *words: Any, action: str = "to-hf"
) -> tuple[int, str, str]:
    """Return status, output and errors of the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["zero-tp", "convert", action, *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
            raise SystemExit(0)
    printed = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, printed.out, printed.err


def test_the_last_step_is_converted_and_said(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    status, said, _ = convert(capsys, megatron, "--output", output, "--no-verify")
    assert status == 0
    assert "iter_0000012 (megatron, llama)" in said
    assert "tensors: 15 read, 0 unused, 21 made" in said
    assert "40 rows of 48, the vocabulary; the rest is padding" in said
    assert (output / "model.safetensors").is_file()
    status, said, _ = convert(
        capsys, megatron, "--output", tmp_path / "third", "--no-verify", "--step", 3
    )
    assert status == 0 and "iter_0000003" in said


def test_the_proof_decides(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random weights predict worse than a guess; what they would say themselves they predict."""
    ids = tmp_path / "ids.txt"
    ids.write_text("[" + ", ".join(str(number * 7 % VOCABULARY) for number in range(30)) + "]")
    output = tmp_path / "out"
    status, _, error = convert(capsys, megatron, "--output", output, "--verify-ids", ids)
    assert status == 2
    assert "a uniform guess 3.6889" in error and "read wrongly" in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
    assert convert(capsys, megatron, "--output", output, "--no-verify")[0] == 0
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(output)
    page = [1]
    for _ in range(20):
        page.append(int(model(torch.tensor([page])).logits[0, -1].argmax()))
    ids.write_text(" ".join(map(str, page)))
    again = (megatron, "--output", output, "--overwrite", "--verify-ids", ids)
    status, said, _ = convert(capsys, *again)
    assert status == 0 and "proof: loss" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "without --tokenizer no text can be scored"),
        (("--verify-ids", "absent"), "--verify-ids: absent: cannot be read"),
        (("--no-verify", "--verify-text", "page"), "give one of them"),
        (("--no-verify", "--step", 4), "has no step 4; it has 3, 12"),
        (("--no-verify", "--format", "megatrn"), "--format megatrn: give one of"),
        (("--no-verify", "--ema"), "--ema: only checkpoints of zero_tp"),
        (("--no-verify", "--format", "torchtitan"), "torchtitan"),
        (("--no-verify", "--format", "deepspeed"), "--format deepspeed"),
        (("--no-verify", "--format", "universal"), "--format universal"),
        (("--no-verify", "--config", "absent.json"), "--config"),
    ],
)
def test_wrong_options_are_one_line(
    words: tuple[Any, ...],
    message: str,
    megatron: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(tmp_path.iterdir())
    status, said, error = convert(capsys, megatron, "--output", tmp_path / "out", *words)
    assert (status, said) == (2, "")
    assert message in error and error.count("\n") == 1 and "UserError" not in error
    assert sorted(tmp_path.iterdir()) == before


def test_an_unknown_tensor_is_an_error_unless_it_is_ignored(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = megatron / "iter_0000012" / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    saved["model"]["decoder.adapter.weight"] = torch.ones(3)
    torch.save(saved, file)
    words = (megatron, "--output", tmp_path / "out", "--no-verify")
    status, _, error = convert(capsys, *words)
    assert status == 2 and "--ignore 'decoder.adapter.weight'" in error
    status, said, _ = convert(capsys, *words, "--ignore", "decoder.adapter*")
    assert status == 0 and "15 read, 1 unused" in said


def test_another_trainers_folder_of_our_name(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron.rename(tmp_path / "checkpoints")
    words = (tmp_path, "--output", tmp_path / "out", "--no-verify")
    assert "no checkpoint of megatron" in convert(capsys, *words)[2]
    for step in (tmp_path / "checkpoints").iterdir():
        step.rename(tmp_path / "checkpoints" / f".{step.name}")
    assert "no complete checkpoint there" in convert(capsys, *words)[2]


def test_a_folder_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    words = (tmp_path / "texts", "--output", tmp_path / "out", "--no-verify")
    status, _, error = convert(capsys, *words)
    assert status == 2 and "no checkpoint of megatron" in error and error.count("\n") == 1
