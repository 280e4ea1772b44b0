"""What commands are given with data, models and checkpoints is drawn at random: device files,
--set, and paths.

    python -m tests.tools.fuzz inputs --count 1000

A command ends as every command does. A value given with --set is the value in the file; a device
file that says the same makes the same plan; a path that can't be written or read costs nothing that
was there before.
"""

from __future__ import annotations

import copy
import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.mistakes import with_changes
from tests.tools.fuzz import configs
from tests.tools.fuzz.commands import attempt
from tests.tools.fuzz.damage import ODD, damage_bytes, edit_json, places
from zero_tp.parallel.devices import Device

DEVICE: dict[str, Any] = {
    **{
        "name": "mine",
        "memory_gib": 40,
        "bf16_tflops": 312,
        "fp16_tflops": 312,
        "fp32_tflops": 19.5,
    },
    **{"memory_gbps": 1555, "intra_gbps": 300, "inter_gbps": 25},
    **{
        key: Device.model_fields[key].default
        for key in ("host_gbps", "per_node", "matrix_share", "context_gib")
    },
}
TEXT = "".join(f"some words of document {number}\n\n" for number in range(20))
CHECK = ("check", "run.json", "--world-size", "1")


def make_workplace(workplace: Path) -> Path:
    (workplace / "run.json").write_text(json.dumps(configs.BASE))
    (workplace / "data").symlink_to(configs.base() / "data")
    (workplace / "text.txt").write_text(TEXT)
    return workplace


# --- kinds of cases -------------------------------------------------------------------------------


def plan(workplace: Path, description: str) -> str | None:
    words = ["run.json", "--world-size", "1", "--device", "device.json", "--json"]
    ended = attempt(description, "launch/plan.py", words, workplace)
    return None if ended is None else ended.out


@cache
def undamaged_plan() -> str | None:
    folder = configs.base() / "plan"
    folder.mkdir()
    (make_workplace(folder) / "device.json").write_text(json.dumps(DEVICE))
    return plan(folder, "the undamaged device")


def devices(draw: random.Random, workplace: Path) -> str:
    """A device file, changed or damaged, or the same in another order."""
    kind = draw.random()
    device = copy.deepcopy(DEVICE)
    if kind < 0.2:
        keys = draw.sample(list(device), len(device))
        content = json.dumps(
            {key: device[key] for key in keys}, indent=draw.choice((None, 1, 7))
        ).encode()
        description = "order"
    elif kind < 0.8:
        description = edit_json(device, draw)
        content = json.dumps(device).encode()
    else:
        content, description = damage_bytes(json.dumps(device).encode(), draw)
    (workplace / "device.json").write_bytes(content)
    printed = plan(workplace, f"device: {description}")
    if kind < 0.2:
        assert printed is not None and printed == undamaged_plan(), (
            f"device: {description}: another plan"
        )
    odd: list[str] = []
    json.loads(printed or "null", parse_constant=odd.append)
    assert not odd, f"device: {description}: the plan has {odd}"
    return "refused" if printed is None else "planned"


def overrides(draw: random.Random, workplace: Path) -> str:
    """--set of a path and a value, beside a file that has the value in that place."""
    keys = draw.choice(
        [place for place in places(configs.BASE)[1:] if all(isinstance(key, str) for key in place)]
    )
    value = draw.choice(ODD)
    name, text = ".".join(keys), json.dumps(value)
    drawn = draw.random()
    if drawn < 0.2:
        name = draw.choice(
            (
                f"{name}.",
                f".{name}",
                name.replace(".", "..", 1),
                f"{name}.x.y",
                name[:-1],
                "=",
                "a=b=c",
            )
        )
    elif drawn > 0.9:
        text = draw.choice(
            (
                "",
                "=",
                "{",
                "[1,",
                "NaN",
                "-Infinity",
                "1e999",
                '{"a":1,"a":2}',
                "[" * 5000,
                "9" * 5000,
            )
        )
    description = f"--set {name}={text}"[:100]
    ended = attempt(
        description,
        "zero_tp/__main__.py",
        [*CHECK, "--set", f"{name}={text}"],
        workplace,
        check=True,
    )
    if drawn < 0.2 or drawn > 0.9:
        return "refused odd" if ended is None else "accepted odd"
    (workplace / "run.json").write_text(json.dumps(with_changes(configs.BASE, {name: value})))
    written = attempt(f"{name} in the file", "zero_tp/__main__.py", CHECK, workplace, check=True)
    same = ended == written if ended is None or written is None else ended.out == written.out
    assert same, f"{description}: {ended}, in the file {written}"
    return "refused" if ended is None else "accepted"


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
    (("zero_tp/__main__.py", "inspect"), ""),
    (("launch/convert.py", "to-hf", "--output", "out"), ""),
    (("launch/sample.py", "--prompt", "x"), "--model"),
    (
        (
            "eval/zero_shot.py",
            "--tasks",
            "perplexity",
            "--data",
            "perplexity=text.txt",
            "--output",
            "o.json",
        ),
        "--model",
    ),
)
OUTSIDE: dict[str, tuple[str, ...]] = {
    "empty": ("", ".", "~", "-", "--"),
    "long": ("x" * 300,),
    "bytes": (os.fsdecode(b"odd\xff\x1b[31m"),),
    "under a file": ("text.txt/below",),
}
READ: dict[str, tuple[str, ...]] = {
    "device": ("/dev/null", "/dev/full", "/dev/zero", "/proc/self/mem", "/dev/tty"),
    "directory of all": ("..", "/", "/proc", "/dev"),
}


def odd_path(draw: random.Random, workplace: Path, reads: bool) -> tuple[str, str]:
    """Return a path of something odd, and in words of what."""
    ending = draw.choice(("", ".json", ".txt", ".jsonl", ".gz"))
    path = workplace / f"odd{ending}"
    names = OUTSIDE | (READ if reads else {})
    kind = draw.choice(("pipe", "loop", "dangling", "file", "directory", *names))
    if kind in names:
        return draw.choice(names[kind]) + (
            ending if kind in ("long", "bytes", "under a file") else ""
        ), kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "file":
        path.write_text(draw.choice(("", "{}", "null", "kept", "\x1b[31m")))
    elif kind == "directory":
        path.mkdir()
        (path / "kept").write_text("kept")
    else:
        path.symlink_to(path.name if kind == "loop" else "nowhere/at/all")
    return path.name, f"{kind}{ending}"


def contents(workplace: Path) -> dict[str, bytes]:
    """Return the files at or below a directory, links not followed."""
    files = [each for each in workplace.rglob("*") if each.is_file() and not each.is_symlink()]
    return {str(each.relative_to(workplace)): each.read_bytes() for each in files}


def paths(draw: random.Random, workplace: Path) -> str:
    """An odd path for something that is read or written."""
    number = draw.randrange(len(OUTPUTS + INPUTS))
    (script, *words), option = (OUTPUTS + INPUTS)[number]
    reads = number >= len(OUTPUTS)
    odd, description = odd_path(draw, workplace, reads)
    if option == "--input" and description == "directory of all":
        return "not read"  # all texts below it would be
    description = f"{script} {option or 'its argument'}: {description} ({odd[:60]!r})"
    before = contents(workplace)
    ended = attempt(
        description,
        script,
        [*words, *([option] if option else []), odd],
        workplace,
        check="check" in words,
    )
    after = contents(workplace)
    replaceable = odd if ended is not None and not reads else None
    lost = [
        name
        for name, content in before.items()
        if after.get(name) != content and name != replaceable
    ]
    assert not lost, f"{description}: {lost[0]} was there before, and is not as it was"
    return "refused" if ended is None else "accepted"


def case(draw: random.Random, directory: Path) -> str:
    make_workplace(directory)
    (kind,) = draw.choices((devices, overrides, paths), (3, 4, 5))
    return f"{kind.__name__} {kind(draw, directory)}"
