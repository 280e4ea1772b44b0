"""Random damage to bytes, files and JSON values. Each function says in words what it has done."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, 8, 16, 64, 100, 999, -1, 0.5, 1.5, 1e-300, 1e-7, 1e5, 1e20, 1e300, -0.0),
    *(2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63, 10**30, 10**99, 10**400),
    *(
        True,
        False,
        None,
        "",
        "auto",
        "8",
        "nan",
        "x" * 300,
        "a\0b",
        "\x1b[31m",
        "é…\u202e",
        "../..",
        "data/absent",
    ),
    *(
        [],
        {},
        [1],
        [0.9, 0.95],
        [[]],
        {"": 1},
        {"a": {"b": 1}},
        ["auto"],
        "fp32",
        "bf16",
        "cpu",
        "none",
    ),
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of everything within a JSON value, the empty one first."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def edit_json(tree: Any, draw: random.Random, odd: Sequence[Any] = ODD) -> str:
    """Change, rename or drop one value of a JSON object or list that has some, often one of its
    top level.
    """
    inner = places(tree)[1:]
    *parents, key = draw.choice(draw.choice((inner, [path for path in inner if len(path) == 1])))
    block, before = at(tree, tuple(parents)), at(tree, (*parents, key))
    name = ".".join(map(str, (*parents, key)))
    how = draw.choice(("odd", "odd", "odd", "nearby", "nearby", "drop", "rename"))
    if how == "drop":
        del block[key]
        return f"without {name}"
    if how == "rename" and isinstance(block, dict):
        letters = list(key) or ["x"]
        letters[draw.randrange(len(letters))] = draw.choice("abz_.\0é\x1b")
        block["".join(letters)] = block.pop(key)
        return f"{name} mistyped"
    if how == "nearby" and isinstance(before, int | float) and not isinstance(before, bool):
        block[key] = draw.choice([before * 2, before + 1, before - 1, -before, before * 10**6])
    elif how == "nearby" and isinstance(before, str) and before:
        block[key] = before[:-1] + draw.choice("0a/\x07é")
    else:
        block[key] = copy.deepcopy(draw.choice(odd))
    return f"{name}: {str(before)[:40]!r} → {str(block[key])[:60]!r}"


def edit_json_file(file: Path, draw: random.Random, odd: Sequence[Any] = ODD) -> str:
    """Edit a value of a JSON file; damage the bytes of any other."""
    try:
        tree = json.loads(file.read_bytes())
    except ValueError:
        return damage_file(file, draw)
    if not isinstance(tree, dict | list) or not tree:
        return damage_file(file, draw)
    description = edit_json(tree, draw, odd)
    file.write_text(json.dumps(tree))
    return description


def damage_bytes(
    content: bytes, draw: random.Random, limit: int | None = None
) -> tuple[bytes, str]:
    """Flip bits, cut, overwrite, insert or append, before `limit` where there is one."""
    end = len(content) if limit is None else limit
    place = draw.randrange(end + 1)
    how = draw.choice((*["flip"] * 5, "overwrite", "overwrite", "cut", "insert", "append"))
    if how == "flip" and content:
        damaged = bytearray(content)
        flipped = [draw.randrange(end) for _ in range(draw.choice((1, 1, 1, 2, 5)))]
        for each in flipped:
            damaged[each] ^= 1 << draw.randrange(8)
        return bytes(damaged), f"bits flipped at {flipped}"
    if how == "cut":
        keep = draw.choice((0, max(0, end - 1), max(0, end - 3), place))
        return content[:keep], f"cut after {keep} of {len(content)} bytes"
    if how == "overwrite":
        block = draw.choice((bytes(64), draw.randbytes(64), content[:64]))[: end - place]
        return content[:place] + block + content[
            place + len(block) :
        ], f"{len(block)} bytes overwritten at {place}"
    place = place if how == "insert" else len(content)
    more = draw.choice(
        (b"\0", b"\xff", b"\x1b[31m", b'"', b"\n\n", b"{" * 300, b"9" * 5000, draw.randbytes(8))
    )
    return content[:place] + more + content[place:], f"{more[:8]!r} at {place}"


def damage(file: Path, draw: random.Random) -> str:
    """Damage a file, mostly its bytes."""
    how = draw.choice(
        (*[damage_file] * 6, delete_file, replace_file, edit_json_file, edit_json_file)
    )
    return f"{file.name}: {how(file, draw)}"


def damage_file(file: Path, draw: random.Random) -> str:
    damaged, description = damage_bytes(file.read_bytes(), draw)
    file.write_bytes(damaged)
    return description


def delete_file(file: Path, draw: random.Random) -> str:
    file.unlink()
    return "deleted"


def replace_file(file: Path, draw: random.Random) -> str:
    """Replace a file by what is no regular one."""
    file.unlink(missing_ok=True)
    kind = draw.choice(("directory", "pipe", "dangling link", "link to a device"))
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "link to a device" else "nowhere")
    return f"replaced by a {kind}"
