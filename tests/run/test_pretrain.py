"""launch/pretrain.py as a person starts it: the launcher, real ranks, a real corpus.

A launch costs about ten seconds, so each one is asked several questions.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.launched import metrics_of, pretrain, said, script, zero_tp
from tests.support.mistakes import MISTAKES, Mistake
from tests.tiers import THOROUGH
from zero_tp.run.checkpoint.find import find_checkpoint

METRICS = {
    *(
        "step",
        "consumed_samples",
        "consumed_tokens",
        "loss",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
        "model_tflops",
    ),
    *("mfu", "hfu", "memory_gib", "seconds", "loss_scale", "skipped_steps"),
}
SLOW_TO_IMPORT = {
    *("datasets", "lm_eval", "matplotlib", "pandas", "scipy", "sklearn"),
    *("torch._inductor.compile_fx", "transformers.generation.utils", "transformers.modeling_utils"),
    *("zero_tp.tools.evaluation.eval_model", "zero_tp.model.huggingface", "zero_tp.run.profiler"),
}
"""What a plain run of pretraining has no use for."""

Output = list[str]


def succeed(
    world: int, directory: Path, *words: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run small.json with more words, and check that it ends well."""
    done = pretrain(world, directory, "--deepspeed_config", "small.json", *words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


@pytest.fixture(scope="module")
def finished(workplace: Path) -> Output:
    """What a run of 8 steps said; it lies in runs/small."""
    done = succeed(2, workplace, launcher="launch.py")
    return said(done.stdout + done.stderr)


def trained_steps(run: Path) -> list[dict[str, Any]]:
    return [record for record in metrics_of(run) if "loss" in record]


def test_a_run(workplace: Path, finished: Output) -> None:
    lines = list(finished)
    assert lines[0].startswith("gpt2: ") and "TP 2 × DP 1, SP, ZeRO-2" in lines[0]
    assert lines.pop(1) == "weights: drawn from the seed 1234"
    assert lines.pop(1) == "devices: 2 × CPU"
    if Path("/dev/nvidia0").exists():
        assert lines.pop(1).startswith(
            "warning: this machine has /dev/nvidia0, but the run is on CPU: DS_ACCELERATOR"
        )
    assert lines.pop(1) == "attention: sdpa"
    assert lines.pop(1) == 'compile: off ("auto")'
    planned = re.fullmatch(r"plan: at most (\d\S*) GiB of tensors a rank, in .*", lines.pop(1))
    assert planned and lines.pop().startswith(
        f"memory: {planned[1]} GiB of tensors planned; the process held "
    )
    lines.remove(
        "next: zero-tp report runs/small, zero-tp convert to-hf runs/small --output exports/small"
    )
    assert lines[1].split()[:3] == ["step", "loss", "lr"]
    steps = [line for line in lines if re.match(r"\s*\d+/8 ", line)]
    assert len(steps) == 8 and len({len(line) for line in [lines[1], *steps]}) == 1, (
        "one aligned line a step"
    )
    rest = [line for line in lines[2:] if line not in steps]
    assert [line.split()[0] for line in rest] == [
        "saved",
        "validation",
        "saved",
        "validation",
        "saved",
    ], rest

    directory = workplace / "runs" / "small"
    manifest = find_checkpoint(directory).manifest
    recorded = json.loads((workplace / "data" / "report.json").read_text())["tokenizer"]
    assert (
        manifest.tokenizer_fingerprint is not None
        and manifest.tokenizer_fingerprint.model_dump() == recorded
    )
    assert manifest.tokenizer == str(workplace / "data" / "tokenizer")
    assert manifest.tokenizer_from_run == "../../data/tokenizer"
    records = metrics_of(directory)
    trained = [record for record in records if "loss" in record and record["step"] <= 8]
    assert [record["step"] for record in trained] == list(range(1, 9))
    assert set(trained[0]) == METRICS
    assert trained[-1]["consumed_samples"] == 8 * 4
    assert trained[-1]["consumed_tokens"] % (8 * 4) == 0 < trained[-1]["consumed_tokens"]
    assert trained[-1]["loss"] < trained[0]["loss"] - 0.2
    validated = [
        record["step"] for record in records if "validation_loss" in record and record["step"] <= 8
    ]
    assert validated == [4, 8]
    for name in {name for record in records for name in record} - {"step"}:
        logged = [
            (record["step"], record[name]) for record in records if record.get(name) is not None
        ]
        if logged:
            header, *rows = (directory / "csv" / "small" / f"{name}.csv").read_text().splitlines()
            assert header == f"step,{name}"
            assert [
                (int(step), float(value)) for step, value in (row.split(",") for row in rows)
            ] == logged, name


@THOROUGH
def test_a_stopped_run_goes_on_bit_for_bit(
    workplace: Path, finished: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after step 6 and started again with the same command. The first says what its
    processes import.
    """
    again_at = ("--output-dir", "again", *sets("scheduler.params.total_num_steps=9"))
    with monkeypatch.context() as context:
        context.setenv("PYTHONPROFILEIMPORTTIME", "1")
        first = succeed(2, workplace, *again_at, *sets("zero_tp.training.steps=6"))
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", first.stderr, re.MULTILINE))
    assert {"torch", "deepspeed", "zero_tp.run.loop"} <= imported
    assert not imported & SLOW_TO_IMPORT, "each rank pays for it at every start"
    assert "resuming step 6" in succeed(2, workplace, *again_at).stdout
    again = trained_steps(workplace / "again")
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in again] == [
        (r["step"], r["loss"], r["grad_norm"])
        for r in trained_steps(workplace / "runs" / "small")[:8]
    ], "bit for bit"
    done = succeed(2, workplace, *again_at)
    assert "the run is at step 8, zero_tp.training.steps is 8: nothing to do" in done.stdout


@THOROUGH
def test_a_decay_begins_at_a_checkpoint_of_the_stable_phase(workplace: Path) -> None:
    """With the losses of a run that planned it so; the line that says the new length is printed."""
    params = {
        "num_warmup_steps": 2,
        "num_training_steps": "auto",
        "num_decay_steps": 3,
        "min_lr_ratio": 0.1,
    }
    block = json.dumps({"type": "warmup_stable_decay", "params": params})
    changes = [f"scheduler={block}", "zero_tp.checkpoint.interval=4", "zero_tp.checkpoint.keep=3"]

    def ended(output: str, steps: int, *others: str) -> str:
        changed = sets(*changes, f"zero_tp.training.steps={steps}")
        return succeed(2, workplace, "--output-dir", output, *others, *changed).stdout

    ended("planned", 7)
    ended("long", 9)
    output = ended(
        "decayed", 7, "--resume-from", str(workplace / "long" / "checkpoints" / "step_00000004")
    )
    assert (
        "scheduler.params.num_training_steps: 8, which follows zero_tp.training.steps (10 before)"
        in output
    )
    planned, decayed = (
        [
            (r["step"], r["loss"], r["learning_rate"])
            for r in trained_steps(workplace / name)
            if r["step"] > 4
        ]
        for name in ("planned", "decayed")
    )
    assert len(planned) == 3 and planned == decayed
    assert (
        planned
        != [(r["step"], r["loss"], r["learning_rate"]) for r in trained_steps(workplace / "long")][
            4:7
        ]
    )


@THOROUGH
def test_a_new_run_starts_from_another_one(workplace: Path, finished: Output) -> None:
    """With another rate, batch and topology; the same command again resumes it, and another
    parent is refused.
    """
    small = [
        record for record in metrics_of(workplace / "runs" / "small") if "validation_loss" in record
    ]
    changes: tuple[str, ...] = (
        "optimizer.params.lr=1e-4",
        "zero_tp.parallel.tensor=1",
        "zero_tp.training.steps=2",
    )
    changes += (
        "zero_tp.training.seed=7",
        "csv_monitor.enabled=false",
        "train_micro_batch_size_per_gpu=4",
    )
    words = ("--output-dir", "child", *sets(*changes))
    lines = said(succeed(2, workplace, *words, "--from", "runs/small").stdout)
    step = find_checkpoint(workplace / "runs" / "small").step
    (start,) = [
        number
        for number, line in enumerate(lines)
        if line.startswith("started from runs/small/checkpoints/")
    ]
    assert (
        f"{step * 4 * 64:,} tokens, saved at TP 2 × DP 1, SP, ZeRO-2, fp32 → TP 1 × DP 2, ZeRO-2, "
        "fp32" in lines[start]
    )
    assert lines[start + 1].startswith("kept: weights, moments")
    assert lines[start + 2].startswith("restarted: the schedule")
    assert f"optimizer.params.lr: 0.0001, was 0.003 when step {step} was saved" in lines
    trained = metrics_of(workplace / "child")
    assert [record["step"] for record in trained if "loss" in record] == [1, 2] and trained[0][
        "consumed_samples"
    ] == 16
    assert trained[-1]["validation_loss"] < small[0]["validation_loss"], (
        "it has what its parent had learned"
    )
    parent = find_checkpoint(workplace / "child").manifest.parent
    assert parent is not None and parent.step == step
    inspected = zero_tp(workplace, "inspect", "child")
    assert f"trained on {step * 4 * 64:,} tokens" in inspected.stdout, inspected.stderr
    assert "the run is at step 2" in succeed(2, workplace, *words, "--from", "runs/small").stdout
    other = pretrain(2, workplace, "--deepspeed_config", "small.json", *words, "--from", "child")
    assert other.returncode == 2, "a run is no child of its own"
    (refusal,) = said(other.stderr)
    assert refusal.startswith("error: --from child: child was started from ")


@pytest.mark.heavy
def test_a_run_goes_on_elsewhere_and_is_exported(workplace: Path, finished: Output) -> None:
    changed = sets(
        "zero_tp.training.steps=9", "zero_tp.parallel.tensor=1", "zero_optimization.stage=3"
    )
    other = succeed(2, workplace, *changed, launcher="torchrun")
    moved = "resuming step 8 saved at TP 2 × DP 1, SP, ZeRO-2, fp32 → TP 1 × DP 2, ZeRO-3, fp32"
    assert moved in said(other.stdout)
    assert (
        "total_num_steps: stays 9, because the rate has been falling since step 2" in other.stdout
    )
    rates = {
        record["step"]: record["learning_rate"]
        for record in trained_steps(workplace / "runs" / "small")
    }
    assert rates[9] == pytest.approx(3e-3 * 1e-4), "cos_min_ratio's default"

    converted = script("launch/convert.py", workplace, "to-hf", "runs/small", "--output", "export")
    assert converted.returncode == 0, converted.stderr
    model: Any = AutoModelForCausalLM.from_pretrained(workplace / "export")
    tokenizer = AutoTokenizer.from_pretrained(workplace / "export")
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    tokens = tokenizer("My fellow citizens", return_tensors="pt")
    assert (
        model.generate(**tokens, max_new_tokens=4, do_sample=False).shape[1]
        > tokens["input_ids"].shape[1]
    )
    held_out = "perplexity=data/validation.jsonl"
    scored = script(
        "eval/zero_shot.py",
        workplace,
        "--model",
        "export",
        "--tasks",
        "perplexity",
        "--data",
        held_out,
    )
    assert scored.returncode == 0, scored.stderr
    twice = script("launch/convert.py", workplace, "to-hf", "runs/small", "--output", "export")
    assert twice.returncode == 2 and twice.stderr.count("\n") == 1 and "--overwrite" in twice.stderr
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(workplace)], (
        "no process is left"
    )


@THOROUGH
@pytest.mark.parametrize(
    "mistake",
    [MISTAKES[0], MISTAKES[len(MISTAKES) // 2], MISTAKES[-1]],
    ids=lambda mistake: mistake.name,
)
def test_the_launcher_shows_a_mistake_once(mistake: Mistake, tmp_path: Path) -> None:
    """Every mistake goes through RunConfig.load in the unit tests; here some of them through the
    command.
    """
    (tmp_path / "wrong.json").write_text(json.dumps(mistake.config()))
    done = pretrain(4, tmp_path, "--deepspeed_config", "wrong.json")
    text = done.stdout + done.stderr
    assert done.returncode != 0 and "exits with return code = 2" in text and "Traceback" not in text
    (line,) = said(text)
    assert line.startswith(f"error: {mistake.key}") and all(word in line for word in mistake.words)
