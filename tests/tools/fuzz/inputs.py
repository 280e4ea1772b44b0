"""What commands are given beside data, models and checkpoints is drawn at random: device files, --set, and paths.

    python -m tests.tools.fuzz inputs --count 1000

A command ends as every command does. A value given with --set is the value in the file; a device file that says the
same makes the same plan; a path that can't be written or read costs nothing that was there before.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.tools.fuzz import configs
from tests.tools.fuzz.commands import broken_promise, run
from tests.tools.fuzz.evaluation_inputs import damaged, edited
from zero_tp.devices import Device
from zero_tp.errors import BAD_INPUT

DEVICE: dict[str, Any] = {
    "name": "mine",
    "memory_gib": 40,
    "bf16_tflops": 312,
    "fp16_tflops": 312,
    "fp32_tflops": 19.5,
    "memory_gbps": 1555,
    "intra_gbps": 300,
    "inter_gbps": 25,
    **{key: Device.model_fields[key].default for key in ("host_gbps", "per_node", "matrix_share", "context_gib")},
}
TEXT = "".join(f"some words of document {number}\n\n" for number in range(20))


def furnish(workplace: Path) -> Path:
    (workplace / "run.json").write_text(json.dumps(configs.BASE))
    (workplace / "data").symlink_to(configs.base() / "data")
    (workplace / "text.txt").write_text(TEXT)
    return workplace


def tried(script: str, words: Sequence[str], workplace: Path, what: str) -> str | None:
    """What the command prints, or None where it refuses."""
    ended = run(script, words, workplace)
    assert (problem := broken_promise(ended, check="check" in words)) is None, f"{what}: {problem}"
    return None if ended.status == BAD_INPUT else ended.out


# --- kinds of cases ---------------------------------------------------------------------------------------------------


def plan(workplace: Path, device: str, what: str) -> str | None:
    return tried("launch/plan.py", ["run.json", "--world-size", "1", "--device", device, "--json"], workplace, what)


@cache
def whole_plan() -> str:
    folder = configs.base() / "plan"
    folder.mkdir()
    (furnish(folder) / "device.json").write_text(json.dumps(DEVICE))
    found = plan(folder, "device.json", "the whole device")
    assert found is not None
    return found


def devices(chance: random.Random, workplace: Path) -> str:
    """A device file, changed or damaged, or the same in another order."""
    kind = chance.random()
    device = copy.deepcopy(DEVICE)
    if kind < 0.2:
        keys = list(device)
        chance.shuffle(keys)
        text, what = json.dumps({key: device[key] for key in keys}, indent=chance.choice((None, 1, 7))), "reordered"
    elif kind < 0.8:
        what = edited(device, chance)
        text = json.dumps(device)
    else:
        content, what = damaged(json.dumps(device).encode(), chance)
        text = content.decode("utf-8", "surrogateescape")
    (workplace / "device.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    found = plan(workplace, "device.json", f"device: {what}")
    if kind < 0.2:
        assert found == whole_plan(), f"device: {what}: another plan"
    if found is not None:
        numbers = json.loads(found, parse_constant=lambda word: word)
        odd = [place for place in configs.places(numbers) if configs.at(numbers, place) in ("NaN", "Infinity")]
        assert not odd, f"device: {what}: {odd[0]} of the plan is no number"
    return "refused" if found is None else "planned"


def overrides(chance: random.Random, workplace: Path) -> str:
    """--set of a path and a value, beside a file that has the value in that place."""
    places = [place for place in configs.places(configs.BASE)[1:] if all(isinstance(key, str) for key in place)]
    keys = list(map(str, chance.choice(places)))
    value = chance.choice(configs.ODD)
    name = ".".join(keys)
    drawn = chance.random()
    if drawn < 0.2:
        name = chance.choice(
            (name + ".", "." + name, name.replace(".", "..", 1), name + ".x.y", name[:-1], "=", "a=b=c")
        )
    text = json.dumps(value)
    if drawn > 0.9:
        text = chance.choice(
            ("", "=", "{", "[1,", "NaN", "-Infinity", "1e999", '{"a":1,"a":2}', "[" * 5000, "9" * 5000)
        )
    try:
        os.fsencode(text)
        if "\0" in text + name:
            return "not a word"
    except UnicodeError:
        return "not a word"
    word = f"{name}={text}"
    what = f"--set {word[:100]}"
    found = tried("zero_tp/__main__.py", ["check", "run.json", "--world-size", "1", "--set", word], workplace, what)
    if drawn < 0.2 or drawn > 0.9:
        return "refused odd" if found is None else "accepted odd"
    config = copy.deepcopy(configs.BASE)
    configs.at(config, tuple(keys[:-1]))[keys[-1]] = value
    (workplace / "run.json").write_text(json.dumps(config))
    written = tried("zero_tp/__main__.py", ["check", "run.json", "--world-size", "1"], workplace, f"{name} in the file")
    assert found == written, f"{what}: {found!r}, in the file {written!r}"
    return "refused" if found is None else "accepted"


PLAN = ("launch/plan.py", "run.json", "--world-size", "1", "--device", "cpu")
PREPARE = ("launch/prepare_data.py", "--tokenizer", "bpe:260")
TRAIN = ("launch/pretrain.py", "--deepspeed_config", "run.json")
OUTPUTS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((*PLAN, "--search", "--top", "1"), "--write"),
    (PLAN, "--html"),
    ((*PREPARE, "--input", "text.txt"), "--output"),
    (TRAIN, "--output-dir"),
)
INPUTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("launch/plan.py", "--world-size", "1", "--device", "cpu"), ""),
    (("launch/plan.py", "run.json", "--world-size", "1"), "--device"),
    ((*PREPARE, "--output", "out"), "--input"),
    (("launch/prepare_data.py", "--input", "text.txt", "--output", "out"), "--tokenizer"),
    (("zero_tp/__main__.py", "check", "--world-size", "1"), ""),
    (TRAIN, "--resume-from"),
    (("launch/convert.py", "inspect"), ""),
    (("launch/convert.py", "to-hf", "--output", "out"), ""),
    (("launch/sample.py", "--prompt", "x"), "--model"),
    (("eval/zero_shot.py", "--tasks", "perplexity", "--data", "perplexity=text.txt", "--output", "o.json"), "--model"),
)


KINDS_OF_PATHS = ("pipe", "loop", "dangling", "file", "directory", "under a file", "long", "bytes", "empty")


def odd_path(chance: random.Random, workplace: Path, reads: bool) -> tuple[str, str]:
    """Return a path of something odd, and in words of what."""
    ending = chance.choice(("", ".json", ".txt", ".jsonl", ".gz"))
    path = workplace / f"odd{ending}"
    kind = chance.choice((*KINDS_OF_PATHS, *(("device", "directory of all") if reads else ())))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere/at/all")
    elif kind == "file":
        path.write_text(chance.choice(("", "{}", "null", "kept", "\x1b[31m")))
    elif kind == "directory":
        path.mkdir()
        (path / "kept").write_text("kept")
    elif kind == "under a file":
        path.write_text("kept")
        return f"{path.name}/below{ending}", kind
    elif kind == "long":
        return "x" * 300 + ending, kind
    elif kind == "bytes":
        return os.fsdecode(b"odd\xff\x1b[31m") + ending, kind
    elif kind == "device":
        return chance.choice(("/dev/null", "/dev/full", "/dev/zero", "/proc/self/mem", "/dev/tty")), kind
    else:
        return chance.choice(("", ".", "~", "-", "--") if kind == "empty" else ("..", "/", "/proc", "/dev")), kind
    return path.name, f"{kind}{ending}"


def kept(workplace: Path) -> dict[str, bytes]:
    """The files that stood there before, links not followed."""
    found = [each for each in workplace.rglob("*") if each.is_file() and not each.is_symlink()]
    return {str(each.relative_to(workplace)): each.read_bytes() for each in found}


def paths(chance: random.Random, workplace: Path) -> str:
    """An odd path for something that is read or written."""
    (script, *words), option = chance.choice(OUTPUTS + INPUTS)
    reads = ((script, *words), option) in INPUTS
    odd, what = odd_path(chance, workplace, reads)
    if option == "--input" and what == "directory of all":
        return "not read"  # all texts below it would be
    what = f"{script} {option or 'its argument'}: {what} ({odd[:60]!r})"
    before = kept(workplace)
    found = tried(script, [*words, *([option] if option else []), odd], workplace, what)
    after = kept(workplace)
    replaced = found is not None and not reads  # a file that is named for output may be
    lost = [name for name, content in before.items() if after.get(name) != content and not (replaced and name == odd)]
    assert not lost, f"{what}: {lost[0]} was there before, and is not as it was"
    return "refused" if found is None else "accepted"


KINDS: dict[Callable[[random.Random, Path], str], int] = {devices: 3, overrides: 4, paths: 5}


def case(chance: random.Random, directory: Path) -> str:
    furnish(directory)
    (kind,) = chance.choices(tuple(KINDS), tuple(KINDS.values()))
    return f"{kind.__name__} {kind(chance, directory)}"
