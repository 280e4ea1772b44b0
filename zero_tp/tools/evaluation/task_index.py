"""The index of task files: a user's directory (`--include-path`), and lm-eval's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager, _yaml_loader
from lm_eval.tasks._index import Entry, Kind, TaskIndex

from zero_tp.base.errors import UserError, first_line, one_line, shown
from zero_tp.base.weight_files import is_regular


def open_task_directory(path: Path) -> TaskManager:
    """Index the task files of `--include-path`, without lm-eval's own.

    A file that lm-eval would skip is refused.
    """
    if not path.is_dir():
        raise UserError(f"--include-path {path}: no such directory")
    index: dict[str, Entry] = {}
    for file in TaskIndex._iter_yaml_files(path):  # without the copies in .ipynb_checkpoints
        is_regular(file)  # a pipe would block
        try:
            config = _yaml_loader.load_yaml(file, resolve_func=False)
            if config.keys() & {"task", "group", "class"}:  # other files are only included
                # lm-eval only logs a second file of a name, and skips it.
                _check_names(config, index)
                TaskIndex.process_cfg(config, file, index)
            if not all(isinstance(name, str) for name in index):
                raise TypeError("a name in it is not a string; write it in quotes")
        except Exception as error:  # YAML, the file system and lm-eval raise anything
            reason = one_line(" ".join(str(error).split()) or first_line(error), 160)
            raise UserError(f"{file} can't be read ({reason}); correct that file") from error
    if not index:
        raise UserError(f"--include-path {path}: no task file (.yaml) of lm-eval in it")
    return TaskManager(include_path=str(path), include_defaults=False)


def _check_names(config: Mapping[str, Any], index: Mapping[str, Entry]) -> None:
    """Check that a task, group and tag of the directory have different names.

    Of equal ones lm-eval would evaluate only one.
    """
    kind = "group" if "group" in config and "class" not in config else "task"
    if isinstance(name := config.get(kind), str) and name in index:
        raise UserError(f"another file has the {_kind(index[name])} {shown(name)} already")
    tags = config.get("tag") or [] if kind == "task" else []
    for tag in [tags] if isinstance(tags, str) else tags:
        if isinstance(tag, str) and tag in index and index[tag].kind is not Kind.TAG:
            raise UserError(
                f"its tag {shown(tag)} is the name of a {_kind(index[tag])} in another file"
            )


def _kind(entry: Entry) -> str:
    """Return what an entry is, in words."""
    return {Kind.GROUP: "group", Kind.TAG: "tag"}.get(entry.kind, "task")


def find_task_manager(names: Sequence[str], directory: TaskManager | None) -> TaskManager:
    """Return an index that has all `names`.

    It is the directory's if that has all of them as tasks, else one with lm-eval's tasks too, which
    takes seconds.

    Groups and tags always get the larger index, because they may name lm-eval's tasks.
    """
    if directory is not None and set(names) <= set(directory.all_subtasks):
        return directory
    defaults = TaskManager(include_defaults=True)
    if directory is None:
        return defaults
    # The right side wins: a user's task replaces lm-eval's of the same name.
    merged = dict(defaults.task_index) | directory.task_index
    if any(name in merged and merged[name].kind in (Kind.TAG, Kind.GROUP) for name in names):
        _check_tags(directory, defaults.task_index)
    return _IndexedManager(merged, directory.include_path)


class _IndexedManager(TaskManager):
    """A TaskManager of an index that exists already: reading lm-eval's files again takes
    seconds.
    """

    def __init__(self, index: dict[str, Entry], include_path: Any) -> None:
        # The attributes below are lm-eval's own; its constructor would fill them from files.
        super().__init__(include_defaults=False)
        self.include_path = include_path
        self._index = index
        self._all_tasks = sorted(index)
        self._all_subtasks = _names_of(index, Kind.TASK, Kind.PY_TASK)
        self._all_groups = _names_of(index, Kind.GROUP)
        self._all_tags = _names_of(index, Kind.TAG)


def _names_of(index: Mapping[str, Entry], *kinds: Kind) -> list[str]:
    return sorted(name for name, entry in index.items() if entry.kind in kinds)


def _check_tags(directory: TaskManager, defaults: Mapping[str, Entry]) -> None:
    """Check that the directory's tags hide none of lm-eval's.

    lm-eval would replace all tasks of a tag.

    A tag that has every task of lm-eval's tag hides nothing.
    """
    for tag in directory.all_tags:
        own = directory.task_index[tag]
        other = defaults.get(tag)
        # lm-eval's tag ai2_arc has arc_easy and arc_challenge. A directory's tag of that name with
        # arc_easy alone would silently make --tasks ai2_arc evaluate half.
        if other is None or (other.kind is Kind.TAG and other.tags <= own.tags):
            continue
        raise UserError(
            f"--include-path {directory.include_path}: the tag {shown(tag)} of "
            f"{', '.join(sorted(own.tags))} is the "
            f"name of a {_kind(other)} of lm-eval, which would be replaced as a whole; give the "
            "tag another name"
        )
