"""Checkpoints are damaged at random, and resumed, described, exported, evaluated and sampled from.

    python -m tests.tools.fuzz checkpoints --count 1000

What a command makes of the damaged run equals, bit for bit, what it makes of the undamaged one, or
its error names the file.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.tools.fuzz.commands import PERPLEXITY, Ended, broken_promise, in_a_child, run, scratch
from tests.tools.fuzz.damage import damage
from zero_tp.base.errors import BAD_INPUT

STEPS, SAVED = 5, (2, 4)
WORDS = "peace war union states congress people government of the and to in a public law treaty"
GRIDS = {"run": "as 1 rank saved it", "moved": "as if TP 2 × DP 2 ranks had saved it"}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}},
    "zero_optimization": {"stage": 1},
    "zero_tp": {
        "model": {
            **{
                "model_type": "gpt2",
                "n_layer": 1,
                "n_embd": 16,
                "n_head": 2,
                "n_positions": 32,
                "vocab_size": 300,
            },
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
        "data": {"train": "data/train", "sequence_length": 16},
        "training": {"steps": SAVED[-1]},
        "checkpoint": {"interval": SAVED[0], "keep": 3},
    },
}


def pretrain(run_directory: str, steps: int) -> list[str]:
    return [
        "--deepspeed_config",
        "run.json",
        "--output-dir",
        run_directory,
        "--set",
        f"zero_tp.training.steps={steps}",
    ]


CONSUMERS: dict[str, tuple[str, Callable[[str], list[str]]]] = {
    "resume": ("launch/pretrain.py", lambda name: pretrain(name, STEPS)),
    "verify": ("zero_tp/__main__.py", lambda name: ["inspect", name, "--verify"]),
    "inspect": ("zero_tp/__main__.py", lambda name: ["inspect", name]),
    "export": ("launch/convert.py", lambda name: ["to-hf", name, "--output", "export"]),
    "evaluate": ("eval/zero_shot.py", lambda name: ["--model", name, *PERPLEXITY]),
    "sample": (
        "launch/sample.py",
        lambda name: ["--model", name, "--prompt", "the people", "--temperature", "0"],
    ),
}
WEIGHTS = {"resume": 4, "verify": 6, "inspect": 3, "export": 6, "evaluate": 6, "sample": 1}


def outcome(consumer: str, ended: Ended, directory: Path, name: str) -> Any:
    """What a command that ended with status 0 has made, as far as it depends on the checkpoint."""
    if consumer == "resume":
        written = directory / name / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json"
        assert written.is_file(), f"step {STEPS} was not saved: {ended.out}{ended.err}"
        manifest = json.loads(written.read_text())
        log = directory / name / "metrics.jsonl"
        files = {file: each["xxh3_128"] for file, each in manifest["files"].items()}
        return {
            "logged": last_logged(log) if log.is_file() else None,
            "files": files,
            "progress": manifest["progress"],
        }
    if consumer in ("verify", "inspect"):
        return [
            line
            for line in ended.out.splitlines()
            if not line.startswith(("complete", "versions", "skipped"))
        ]
    if consumer == "export":
        # The card tells figures of metrics.jsonl too, which is a log and no part of the checkpoint.
        paths = sorted(
            path for path in (directory / "export").iterdir() if path.name != "README.md"
        )
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in paths
            if path.is_file()
        }
    if consumer == "evaluate":
        report = json.loads((directory / "report.json").read_text())
        figures = {
            key: value
            for key, value in report["tasks"]["perplexity"].items()
            if "second" not in key
        }
        return {
            "figures": figures,
            "model": {key: report["model"][key] for key in ("class", "parameters", "step")},
        }
    return ended.out


def last_logged(log: Path) -> dict[str, float]:
    last = json.loads(log.read_bytes().splitlines()[-1])
    return {name: last[name] for name in ("loss", "grad_norm")}


def _whole(reader: Any, name: str, kind: str, shape: Sequence[int]) -> Any:
    return reader.whole(name, kind)


def move(directory: Path) -> None:
    """Write both checkpoints again as TP 2 × DP 2 ranks would have."""
    import torch
    from transformers import AutoConfig

    from tests.support.checkpoints import rewritten, write_checkpoint
    from zero_tp.run.checkpoint.directory import MANIFEST, read_manifest, step_directory
    from zero_tp.run.checkpoint.reader import CheckpointReader

    torch.set_num_threads(1)
    for step in SAVED:
        source = step_directory(directory / "run", step)
        reader = CheckpointReader(source, read_manifest(source))
        manifest = json.loads((source / MANIFEST).read_text())
        config = AutoConfig.for_model(**manifest["model"])
        moved = directory / "moved"
        write_checkpoint(moved, config, tensor=2, data=2, step=step, whole=partial(_whole, reader))
        with rewritten(step_directory(moved, step)) as written:
            for key in (
                "model",
                "generation",
                "progress",
                "fixed",
                "corpora",
                "tokenizer",
                "versions",
                "config",
            ):
                written[key] = manifest[key]
    for file in ("config.json", "metrics.jsonl"):
        shutil.copy(directory / "run" / file, directory / "moved" / file)


@cache
def base() -> Path:
    """Make a directory with undamaged runs."""
    directory = scratch()
    chance = random.Random(7)
    texts = [" ".join(chance.choices(WORDS.split(), k=60)) for _ in range(40)]
    (directory / "text.txt").write_text(" ".join(chance.choices(WORDS.split(), k=80)))
    (directory / "lines.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    words = ["--input", "lines.jsonl", "--tokenizer", "bpe:300", "--output", "data"]
    prepared = run("launch/prepare_data.py", words, directory, limit=60)
    assert prepared.status == 0, prepared.err
    (directory / "run.json").write_text(json.dumps(CONFIG))
    trained = run("launch/pretrain.py", pretrain("run", SAVED[-1]), directory, limit=60)
    assert trained.status == 0, trained.err
    in_a_child(lambda: move(directory))
    return directory


def consume(consumer: str, workplace: Path, name: str) -> tuple[Ended, Any]:
    """Run a command → its end, and what it made, without the place where it was made; None where
    it did not make it.
    """
    script, words = CONSUMERS[consumer]
    ended = run(script, words(name), workplace, limit=60)
    made = outcome(consumer, ended, workplace, name) if ended.status == 0 else None
    return ended, json.loads(json.dumps(made).replace(str(workplace), ""))


@cache
def expected(consumer: str, name: str, step: int) -> Any:
    """Return what a consumer makes of the undamaged run when `step` is its newest checkpoint."""
    workplace = scratch() / "case"
    make_workplace(workplace, name)
    for later in SAVED:
        if later > step:
            shutil.rmtree(workplace / name / "checkpoints" / f"step_{later:08d}")
    ended, made = consume(consumer, workplace, name)
    assert made is not None or consumer == "sample", f"{consumer} of an undamaged run: {ended.err}"
    return made


def make_workplace(workplace: Path, name: str) -> None:
    directory = base()
    workplace.mkdir()
    for file in ("run.json", "text.txt", "data"):
        (workplace / file).symlink_to(directory / file)
    shutil.copytree(directory / name, workplace / name, symlinks=True)


# --- damage ---------------------------------------------------------------------------------------


def swap(file: Path, draw: random.Random) -> str:
    """Swap a file with another one of the run."""
    other = draw.choice([path for path in regular_files(file.parents[2]) if path != file])
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)
    return f"swapped with {other.name} of {other.parent.name}"


def add(file: Path, draw: random.Random) -> str:
    """Add something that does not belong there."""
    name = draw.choice(
        ("states_tp09_dp0000.safetensors", "step_00000099", "notes.txt", "latest.new", ".writing")
    )
    extra = file.parent / name
    if extra.exists():
        return "nothing added"
    if draw.random() < 0.5:
        extra.mkdir()
    shutil.copy(file, extra)
    return f"{name} added"


DAMAGES = (*[damage] * 10, swap, add)


def regular_files(run_directory: Path) -> list[Path]:
    return sorted(
        path for path in run_directory.rglob("*") if path.is_file() and not path.is_symlink()
    )


def target(run_directory: Path, draw: random.Random) -> Path:
    """Draw a file of a run: mostly of its newest checkpoint."""
    files = regular_files(run_directory)
    newest = [path for path in files if path.parent.name == f"step_{SAVED[-1]:08d}"]
    manifests = [path for path in newest if path.name == "manifest.json"]
    return draw.choice(
        draw.choice([group for group in (manifests, newest, newest, files) if group])
    )


def case(draw: random.Random, directory: Path) -> str:
    name = draw.choice(tuple(GRIDS))
    consumer = draw.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
    workplace = directory / "case"
    make_workplace(workplace, name)
    before = {path: path.read_bytes() for path in regular_files(workplace / name)}
    changes = []
    for _ in range(draw.choice((1, 1, 1, 2))):
        file = target(workplace / name, draw)
        changes.append(f"{file.relative_to(workplace)}: {draw.choice(DAMAGES)(file, draw)}")
    description = f"{consumer} of {name} ({GRIDS[name]}), {'; '.join(changes)}"
    left = {path: path.read_bytes() for path in regular_files(workplace / name)}
    checkpoints = workplace / name / "checkpoints"
    complete = [
        step for step in SAVED if (checkpoints / f"step_{step:08d}/manifest.json").is_file()
    ]
    ended, made = consume(consumer, workplace, name)
    problem = broken_promise(ended)
    assert problem is None, f"{description}: {problem}"
    damaged = [path for path, content in before.items() if left.get(path) != content]
    if ended.status == BAD_INPUT:
        named = [
            path for path in damaged if path.name in ended.err or path.parent.name in ended.err
        ]
        assert named or consumer == "sample", (
            f"{description}: {ended.err[-300:]} names none of the files"
        )
        return "named" if named else "refused"
    if consumer == "verify" and complete:  # its output is the same whatever it has read
        verified = [
            path
            for path in damaged
            if path.parent.name == f"step_{complete[-1]:08d}" and "states" in path.name
        ]
        assert not verified, f"{description}: verified"
    undamaged: Any = expected(consumer, name, complete[-1]) if complete else None
    if consumer == "resume" and complete and made["logged"] is None:
        # Where the log is no regular file, a run goes on without it, and says so.
        assert "metrics.jsonl" in ended.out + ended.err, f"{description}: not said"
        undamaged = {**undamaged, "logged": None}
    assert complete and made == undamaged, (
        f"{description}: status 0, but {str(made)[:300]}, not {str(undamaged)[:300]}"
    )
    return "equal"
