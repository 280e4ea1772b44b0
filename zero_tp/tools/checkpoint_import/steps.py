"""Find the folder of one step in a folder of checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

from zero_tp.base.errors import UserError, shown

LATEST = ("latest_checkpointed_iteration.txt", "latest", "latest_universal", "latest.txt")
"""Files that name the newest step: Megatron's, DeepSpeed's two, nanotron's."""
STEP_FOLDER = re.compile(r"(?:iter_|global_step|step-?)?0*(\d+)(?:_universal)?")
"""Names of a step's folder: Megatron's `iter_0000100`, DeepSpeed's `global_step100`, OLMo-core's
`step100`, torchtitan's `step-100`, nanotron's `100`.
"""


def step_folders(root: Path) -> dict[int, Path]:
    """Return the folders of all steps, by step, in order.

    The universal folder of a step is taken instead of that which it was made of.

    Raises:
        UserError: two are of one step.
    """
    matches = [(STEP_FOLDER.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir()]
    folders: dict[int, Path] = {}
    for step, path in sorted((int(match[1]), path) for match, path in matches if match):
        other = folders.get(step)
        if other is not None and path.name != f"{other.name}_universal":
            raise UserError(
                f"{root}: {other.name} and {path.name} are of one step; give one of them as the "
                "checkpoint"
            )
        folders[step] = path
    return folders


def _named_by_latest(root: Path) -> Path | None:
    """Return the folder that a file such as `latest` names."""
    for name in LATEST:
        if not (root / name).is_file():
            continue
        text = (root / name).read_text(encoding="utf-8", errors="replace").strip()
        # Not as a path: a name such as `..`, or one that is too long, is none of a folder here.
        folders = {path.name: path for path in root.iterdir() if path.is_dir()}
        for folder in (text, f"iter_{text.zfill(7)}"):
            if folder in folders:
                return folders[folder]
        raise UserError(
            f"{root / name}: names {shown(text)}, which is not beside it; give the folder of a step"
        )
    return None


def find_step(source: Path, step: int | None) -> Path:
    """Return the folder of a step: `source` itself, or one in it.

    Args:
        step: by default the one that a file such as `latest` names, else the last.

    Raises:
        UserError: there is no such folder.
    """
    if not source.is_dir():
        raise UserError(f"{source}: no folder there; give a run or a checkpoint")
    if step is not None:
        folders = step_folders(source)
        own = STEP_FOLDER.fullmatch(source.absolute().name)
        if not folders and own and int(own[1]) == step:
            return source
        if step not in folders:
            listed = ", ".join(map(str, folders)) or "none"
            raise UserError(f"--step: {source} has no step {step}; it has {listed}")
        return folders[step]
    named = _named_by_latest(source)
    if named is not None:
        return named
    folders = step_folders(source)
    return list(folders.values())[-1] if folders else source
