"""launch/pretrain.py as a person starts it: the launcher, real ranks, a real corpus.

A launch costs about ten seconds, so each one is asked several questions.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.mistakes import MISTAKES, Mistake
from zero_tp.training.report import METRICS_FILE

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_LINE = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+\] \[[A-Z]+\] \[(launch|runner)\.py:")
METRICS = {
    "step",
    "consumed_samples",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "model_tflops",
    "mfu",
    "memory_gib",
    "seconds",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(command: Sequence[str], directory: Path, limit: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a command of the project in `directory`."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=limit)


def pretrain(world: int, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(world)]
    runner += ["--master_port", str(free_port()), str(ROOT / "launch" / "pretrain.py")]
    return run([*runner, *arguments], directory)


def script(name: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(ROOT / name), *arguments], directory)


def said(output: str) -> list[str]:
    """The lines that are not the launcher's."""
    return [line for line in output.splitlines() if line.strip() and not LAUNCHER_LINE.match(line)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a prepared corpus and a small config; two of its runs are made by the first test."""
    directory = tmp_path_factory.mktemp("workplace")
    (directory / "tests").symlink_to(ROOT / "tests")
    corpus = ROOT / "launch" / "corpus" / "sotu.jsonl.gz"
    prepared = script(
        "launch/prepare_data.py", directory, "--input", str(corpus), "--tokenizer", "bpe:512", "--output", "data"
    )
    assert prepared.returncode == 0, prepared.stderr
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}},
        "zero_optimization": {"stage": 2},
        "csv_monitor": {"enabled": True, "output_path": "csv/", "job_name": "small"},
        "zero_tp": {
            "model": {
                "model_type": "gpt2",
                "n_layer": 2,
                "n_embd": 64,
                "n_head": 4,
                "n_positions": 64,
                "vocab_size": 512,
            },
            "parallel": {"tensor": 2},
            "data": {"train": "data/train", "validation": "data/validation", "sequence_length": 64},
            "training": {"steps": 8},
            "checkpoint": {"interval": 3, "keep": 2},
            "evaluation": {"interval": 4, "batches": 2},
        },
    }
    (directory / "small.json").write_text(json.dumps(config))
    return directory


def metrics_of(run_directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_directory / METRICS_FILE).read_text().splitlines()]


def test_a_run_its_resumption_and_its_export(workplace: Path) -> None:
    done = pretrain(4, workplace, "--deepspeed_config", "small.json")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = said(done.stdout + done.stderr)
    assert lines[0].startswith("gpt2: ") and "TP 2 × DP 2, SP, ZeRO-2" in lines[0]
    assert lines[1].split()[:3] == ["step", "loss", "lr"]
    steps = [line for line in lines if re.match(r"\s*\d+/8 ", line)]
    assert len(steps) == 8 and len({len(line) for line in [lines[1], *steps]}) == 1, "one aligned line a step"
    rest = [line for line in lines[2:] if line not in steps]
    assert [line.split()[0] for line in rest] == ["saved", "validation", "saved", "validation", "saved"], rest

    directory = workplace / "runs" / "small"
    records = metrics_of(directory)
    trained = [record for record in records if "loss" in record]
    assert [record["step"] for record in trained] == list(range(1, 9))
    assert set(trained[0]) == METRICS
    assert trained[-1]["consumed_samples"] == 8 * 8
    assert trained[-1]["loss"] < trained[0]["loss"] - 0.2
    assert [record["step"] for record in records if "validation_loss" in record] == [4, 8]
    assert (workplace / "csv" / "small").is_dir(), "DeepSpeed's monitors write"

    # The same run, stopped after step 6 and started again with the same command.
    again_at: tuple[str, ...] = ("--deepspeed_config", "small.json", "--output-dir", "again")
    again_at += ("--set", "scheduler.params.total_num_steps=8")
    first = pretrain(4, workplace, *again_at, "--set", "zero_tp.training.steps=6")
    assert first.returncode == 0, first.stdout + first.stderr
    second = pretrain(4, workplace, *again_at)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resuming after step 6" in second.stdout
    again = [record for record in metrics_of(workplace / "again") if "loss" in record]
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in again] == [
        (r["step"], r["loss"], r["grad_norm"]) for r in trained
    ], "bit for bit"

    longer = pretrain(4, workplace, "--deepspeed_config", "small.json", "--set", "zero_tp.training.steps=9")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert "schedule ends at step 8; from there to step 9 it holds its minimum" in longer.stdout
    rates = {record["step"]: record["learning_rate"] for record in metrics_of(directory) if "loss" in record}
    assert rates[9] == pytest.approx(3e-3 * 1e-4), "cos_min_ratio's default"
    finished = pretrain(4, workplace, "--deepspeed_config", "small.json", "--set", "zero_tp.training.steps=9")
    assert finished.returncode == 0
    assert "the run is at step 9, zero_tp.training.steps is 9: nothing to do" in finished.stdout
    other = pretrain(2, workplace, "--deepspeed_config", "small.json")
    assert other.returncode != 0
    assert [line for line in said(other.stdout + other.stderr) if "another topology is not built yet" in line]

    converted = script("launch/convert.py", workplace, "to-hf", "runs/small", "--output", "export")
    assert converted.returncode == 0, converted.stderr
    model: Any = AutoModelForCausalLM.from_pretrained(workplace / "export")
    tokenizer = AutoTokenizer.from_pretrained(workplace / "export")
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    tokens = tokenizer("My fellow citizens", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=4, do_sample=False).shape[1] > tokens["input_ids"].shape[1]
    held_out = "perplexity=data/validation.jsonl"
    scored = script("eval/zero_shot.py", workplace, "--model", "export", "--tasks", "perplexity", "--data", held_out)
    assert scored.returncode == 0, scored.stderr
    twice = script("launch/convert.py", workplace, "to-hf", "runs/small", "--output", "export")
    assert twice.returncode == 2 and twice.stderr.count("\n") == 1 and "--overwrite" in twice.stderr
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(workplace)], "no process is left"


def wrong(directory: Path, mistake: Mistake) -> Path:
    path = directory / "wrong.json"
    path.write_text(json.dumps(mistake.config()))
    return path


def one_line(text: str, mistake: Mistake) -> None:
    errors = [line for line in said(text) if line.startswith("error: ")]
    assert len(errors) == 1, text
    assert errors[0].startswith(f"error: {mistake.key}"), errors[0]
    assert all(word in errors[0] for word in mistake.words), (errors[0], mistake.words)
    assert "Traceback" not in text


@pytest.mark.parametrize("mistake", MISTAKES[::12], ids=lambda mistake: mistake.name)
def test_check_names_a_mistake(mistake: Mistake, tmp_path: Path) -> None:
    """Every mistake goes through RunConfig.load in the unit tests; here some of them through the command."""
    done = script("launch/pretrain.py", tmp_path, "--check", str(wrong(tmp_path, mistake)), "--world-size", "4")
    assert done.returncode == 2
    one_line(done.stdout + done.stderr, mistake)


@pytest.mark.parametrize("mistake", [MISTAKES[0], MISTAKES[len(MISTAKES) // 2], MISTAKES[-1]], ids=lambda m: m.name)
def test_the_launcher_shows_a_mistake_once(mistake: Mistake, tmp_path: Path) -> None:
    done = pretrain(4, tmp_path, "--deepspeed_config", str(wrong(tmp_path, mistake)))
    assert done.returncode != 0
    text = done.stdout + done.stderr
    one_line(text, mistake)
    assert said(text) == [line for line in said(text) if line.startswith("error: ")], "nothing else is said"
    assert "exits with return code = 2" in text
