"""Checkpoints are damaged at random, and resumed, described, exported, evaluated and sampled from.

    python -m tests.tools.fuzz checkpoints --count 1000

What a command makes of the damaged run equals, bit for bit, what it makes of the whole one, or its error names the
file. A run in the old format, without a hash of its manifest, is held to the same for damage of anything but that
manifest; for that one a command has to end as every command does.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.tools.fuzz.commands import Ended, broken_promise, run
from tests.tools.fuzz.fuzzing import in_a_child, scratch
from zero_tp.errors import BAD_INPUT

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
            **{"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 300},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
        "data": {"train": "data/train", "sequence_length": 16},
        "training": {"steps": SAVED[-1]},
        "checkpoint": {"interval": SAVED[0], "keep": 3},
    },
}


def pretrain(run_directory: str, steps: int) -> list[str]:
    return ["--deepspeed_config", "run.json", "--output-dir", run_directory, "--set", f"zero_tp.training.steps={steps}"]


CONSUMERS: dict[str, tuple[str, Callable[[str], list[str]]]] = {
    "resume": ("launch/pretrain.py", lambda name: pretrain(name, STEPS)),
    "verify": ("launch/convert.py", lambda name: ["inspect", name, "--verify"]),
    "inspect": ("launch/convert.py", lambda name: ["inspect", name]),
    "export": ("launch/convert.py", lambda name: ["to-hf", name, "--output", "export"]),
    "evaluate": (
        "eval/zero_shot.py",
        lambda name: [
            *("--model", name, "--tasks", "perplexity", "--data", "perplexity=text.txt", "--device", "cpu"),
            *("--output", "report.json"),
        ],
    ),
    "sample": ("launch/sample.py", lambda name: ["--model", name, "--prompt", "the people"]),
}
WEIGHTS = {"resume": 2, "verify": 6, "inspect": 3, "export": 6, "evaluate": 6, "sample": 1}


def outcome(consumer: str, ended: Ended, directory: Path, name: str) -> Any:
    """What a command that ended with status 0 has made, as far as it depends on the checkpoint."""
    if consumer == "resume":
        written = directory / name / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json"
        assert written.is_file(), f"step {STEPS} was not saved: {ended.out}{ended.err}"
        manifest = json.loads(written.read_text())
        lines = (directory / name / "metrics.jsonl").read_bytes().splitlines()
        last = json.loads(lines[-1])
        files = {file: each["sha256"] for file, each in manifest["files"].items()}
        return {"loss": last["loss"], "grad_norm": last["grad_norm"], "files": files, "progress": manifest["progress"]}
    if consumer in ("verify", "inspect"):
        return [line for line in ended.out.splitlines() if not line.startswith(("complete", "versions", "skipped"))]
    if consumer == "export":
        # The card tells figures of metrics.jsonl too, which is a log and no part of the checkpoint.
        paths = sorted(path for path in (directory / "export").iterdir() if path.name != "README.md")
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
    if consumer == "evaluate":
        report = json.loads((directory / "report.json").read_text())
        figures = {key: value for key, value in report["tasks"]["perplexity"].items() if "second" not in key}
        return {"figures": figures, "model": {key: report["model"][key] for key in ("class", "parameters", "step")}}
    return ended.out


def begun(consumer: str, directory: Path, name: str) -> Ended:
    script, words = CONSUMERS[consumer]
    return run(script, words(name), directory, limit=60)


def _whole(reader: Any, name: str, kind: str, shape: Sequence[int]) -> Any:
    return reader.whole(name, kind)


def move(directory: Path) -> None:
    """Write both checkpoints again as TP 2 × DP 2 ranks would have."""
    import torch
    from transformers import AutoConfig

    from tests.support.checkpoints import rewritten, write_checkpoint
    from zero_tp.checkpoint.directory import MANIFEST, read_manifest, step_directory
    from zero_tp.checkpoint.reader import CheckpointReader

    torch.set_num_threads(1)
    for step in SAVED:
        source = step_directory(directory / "run", step)
        reader = CheckpointReader(source, read_manifest(source))
        manifest = json.loads((source / MANIFEST).read_text())
        fields = dict(manifest["model"])
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        moved = directory / "moved"
        write_checkpoint(moved, config, tensor=2, data=2, step=step, whole=partial(_whole, reader))
        with rewritten(step_directory(moved, step)) as written:
            for key in ("model", "generation", "progress", "fixed", "corpora", "tokenizer", "versions", "config"):
                written[key] = manifest[key]
    for file in ("config.json", "metrics.jsonl"):
        shutil.copy(directory / "run" / file, directory / "moved" / file)


@cache
def base() -> tuple[Path, dict[tuple[str, str, int], Any]]:
    """A directory with runs, and what each consumer makes of each of them at its steps, whole."""
    import deepspeed  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import zero_tp.checkpoint.convert
    import zero_tp.checkpoint.inspect
    import zero_tp.evaluation.zero_shot
    import zero_tp.training.loop
    import zero_tp.training.run_inputs
    import zero_tp.training.start  # noqa: F401

    directory = scratch()
    chance = random.Random(7)
    texts = [" ".join(chance.choices(WORDS.split(), k=60)) for _ in range(40)]
    (directory / "text.txt").write_text(" ".join(chance.choices(WORDS.split(), k=80)))
    (directory / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--input", "lines.jsonl", "--tokenizer", "bpe:300", "--output", "data"]
    prepared = run("launch/prepare_data.py", words, directory, limit=60)
    assert prepared.status == 0, prepared.err
    (directory / "run.json").write_text(json.dumps(CONFIG))
    trained = run("launch/pretrain.py", pretrain("run", SAVED[-1]), directory, limit=60)
    assert trained.status == 0, trained.err
    in_a_child(lambda: move(directory))
    return directory, {}


def expected(consumer: str, name: str, step: int) -> Any:
    """What a consumer makes of the whole run when `step` is its newest checkpoint."""
    _, known = base()
    if (consumer, name, step) not in known:
        folder = scratch()
        try:
            workplace = folder / "case"
            furnish(workplace, name)
            for other in SAVED:
                if other > step:
                    shutil.rmtree(workplace / name / "checkpoints" / f"step_{other:08d}")
            ended = begun(consumer, workplace, name)
            made = outcome(consumer, ended, workplace, name) if ended.status == 0 else None
            assert made is not None or consumer == "sample", f"{consumer} of a whole run: {ended.err}"
            known[consumer, name, step] = relative(made, workplace)
        finally:
            shutil.rmtree(folder)
    return known[consumer, name, step]


def furnish(workplace: Path, name: str) -> None:
    directory, _ = base()
    workplace.mkdir(exist_ok=True)
    for file in ("run.json", "text.txt", "data"):
        (workplace / file).symlink_to(directory / file)
    shutil.copytree(directory / name, workplace / name, symlinks=True)


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(file: Path, chance: random.Random) -> str:
    content = bytearray(file.read_bytes())
    if not content:
        return extend(file, chance)
    places = [chance.randrange(len(content)) for _ in range(chance.choice((1, 1, 1, 2, 5)))]
    for place in places:
        content[place] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return f"bits flipped at {places}"


def cut(file: Path, chance: random.Random) -> str:
    size = file.stat().st_size
    keep = chance.choice((0, max(0, size - 1), chance.randrange(size + 1)))
    os.truncate(file, keep)
    return f"cut after {keep} of {size} bytes"


def extend(file: Path, chance: random.Random) -> str:
    more = chance.randbytes(chance.choice((1, 8, 1000)))
    with file.open("ab") as stream:
        stream.write(more)
    return f"{len(more)} bytes more"


def overwrite(file: Path, chance: random.Random) -> str:
    content = bytearray(file.read_bytes())
    start = chance.randrange(len(content) + 1)
    block = chance.choice((bytes(64), chance.randbytes(64), bytes(content[:64])))
    content[start : start + 64] = block[: len(content) - start]
    file.write_bytes(content)
    return f"64 bytes overwritten at {start}"


def delete(file: Path, chance: random.Random) -> str:
    file.unlink()
    return "deleted"


def replace(file: Path, chance: random.Random) -> str:
    """By what is no regular file."""
    file.unlink()
    kind = chance.choice(("directory", "pipe", "dangling link", "link to a device"))
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "link to a device" else "nowhere")
    return f"replaced by a {kind}"


def swap(file: Path, chance: random.Random) -> str:
    """With any other file of the run."""
    others = [path for path in files_of(file.parents[2]) if path != file]
    other = chance.choice(others)
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)
    return f"swapped with {other.name} of {other.parent.name}"


def edit(file: Path, chance: random.Random) -> str:
    """A value or a key of JSON; whatever it is in another file."""
    try:
        value = json.loads(file.read_bytes())
    except ValueError:
        return flip(file, chance)
    places: list[tuple[Any, Any]] = []

    def walk(block: Any) -> None:
        for key, inner in list(block.items()) if isinstance(block, dict) else list(enumerate(block)):
            places.append((block, key))
            if isinstance(inner, (dict, list)):
                walk(inner)

    if not isinstance(value, (dict, list)) or not value:
        return flip(file, chance)
    walk(value)
    top = [(block, key) for block, key in places if block is value]
    block, key = chance.choice(chance.choice((places, top)))
    before = block[key]
    how = chance.choice(("delete", "change", "type", "rename"))
    if how == "delete" or (how == "rename" and not isinstance(block, dict)):
        del block[key]
    elif how == "rename":
        block[f"{key}_"] = block.pop(key)
    elif how == "change" and isinstance(before, (int, float)):
        block[key] = not before if isinstance(before, bool) else chance.choice((before + 1, -before, before * 1000, 0))
    elif how == "change" and isinstance(before, str) and before:
        block[key] = before[:-1] + chance.choice("0a/\x07é")
    else:
        block[key] = chance.choice((None, True, -1, 0, 1e300, 2**70, "", "../x", "\x1b[31m", [], {}, [[]], {"a": 1}))
    file.write_text(json.dumps(value))
    return f"{how} of {key!r} ({str(before)[:40]!r} → {str(block[key])[:40] if key in block or (isinstance(block, list) and key < len(block)) else 'gone'!r})"  # noqa: E501


def add(file: Path, chance: random.Random) -> str:
    """Something beside it that does not belong there."""
    name = chance.choice(("states_tp09_dp0000.safetensors", "step_00000099", "notes.txt", "latest.new", ".writing"))
    extra = file.parent / name
    if extra.exists():
        return "nothing added"
    if chance.random() < 0.5:
        extra.mkdir(exist_ok=True)
        shutil.copy(file, extra / file.name)
    else:
        shutil.copy(file, extra)
    return f"{name} added"


DAMAGES = (flip, flip, flip, cut, extend, overwrite, delete, replace, swap, edit, edit, add)


def files_of(run_directory: Path) -> list[Path]:
    return sorted(path for path in run_directory.rglob("*") if path.is_file() and not path.is_symlink())


def target(run_directory: Path, chance: random.Random) -> Path:
    """A file of a run: mostly of its newest checkpoint."""
    files = files_of(run_directory)
    newest = [path for path in files if path.parent.name == f"step_{SAVED[-1]:08d}"]
    manifests = [path for path in newest if path.name == "manifest.json"]
    return chance.choice(chance.choice([found for found in (manifests, newest, newest, files) if found]))


def case(chance: random.Random, directory: Path) -> str:
    name = chance.choice(tuple(GRIDS))
    consumer = chance.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
    workplace = directory / "case"
    furnish(workplace, name)
    damaged: list[Path] = []
    told = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        file = target(workplace / name, chance)
        before = {path: path.read_bytes() for path in files_of(workplace / name)}
        how = chance.choice(DAMAGES)(file, chance)
        damaged += [path for path, content in before.items() if not regular(path) or path.read_bytes() != content]
        told.append(f"{file.relative_to(workplace)}: {how}")
    what = f"{consumer} of {name} ({GRIDS[name]}), {'; '.join(told)}"
    whole = {step: expected(consumer, name, step) for step in SAVED}
    complete = [
        step for step in SAVED if (workplace / name / "checkpoints" / f"step_{step:08d}/manifest.json").is_file()
    ]
    ended = begun(consumer, workplace, name)
    promise = broken_promise(ended)
    assert promise is None, f"{what}: {promise}"
    if ended.status == BAD_INPUT:
        if consumer == "sample":
            return "refused"
        named = [path for path in damaged if path.name in ended.err or path.parent.name in ended.err]
        assert named, f"{what}: {ended.err[-300:]} names none of the files"
        return "named"
    made = relative(outcome(consumer, ended, workplace, name), workplace)
    same = [whole[step] for step in complete[-1:]]
    assert made in same, f"{what}: status 0, but {str(made)[:300]}, not {str(same)[:300]}"
    return "equal"


def regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def relative(made: Any, workplace: Path) -> Any:
    """Without the place where it was made."""
    return json.loads(json.dumps(made).replace(str(workplace), ""))
