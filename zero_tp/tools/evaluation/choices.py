"""Checks of multiple-choice questions. Needs no torch.

lm-eval would report an accuracy of 0 for questions that fail them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_tp.base.errors import UserError, first_line, json_kind, shown
from zero_tp.data.documents import file_format, read_objects
from zero_tp.data.formats import import_optional
from zero_tp.data.records import location
from zero_tp.run.process.quiet import suppress_output
from zero_tp.tools.evaluation.task import CHOICE_FIELDS, MULTIPLE_CHOICE, require_fields

WITHOUT_LISTS = ("csv", "txt")
"""Formats that can't store the list of choices."""
INDEX = "the right choice's index, counted from 0"


def check_choices(
    choices: Any, gold: Any, names: tuple[str, str] = ("doc_to_choice", "doc_to_target")
) -> None:
    """Check that lm-eval can compare the likeliest choice with the right one.

    Args:
        choices: what lm-eval scores.
        gold: an index, one of the choices, or a list of indices.
        names: the fields that choices and gold come from.

    Raises:
        ValueError: the field and what is wrong with it.
    """
    field, gold_field = names
    if not isinstance(choices, list | tuple):
        raise ValueError(f"{field} is {json_kind(type(choices).__name__)}; write a list of texts")
    for number, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise ValueError(
                f"{field}[{number}] is {json_kind(type(choice).__name__)}; write a text"
            )
    # lm-eval looks a text up among the choices, and counts the question as wrong if it is not
    # there.
    if isinstance(gold, str):
        if gold not in choices:
            raise ValueError(
                f"{gold_field} is {shown(gold)}, which is none of the choices; write {INDEX}"
            )
        return
    if isinstance(gold, list) and not gold:
        raise ValueError(f"{gold_field} is empty; write {INDEX}")
    for index in gold if isinstance(gold, list) else [gold]:
        if not isinstance(index, int):
            raise ValueError(f"{gold_field} is {shown(index)}; write {INDEX}")
        if not 0 <= index < len(choices):
            raise ValueError(
                f"{gold_field} is {index}, and there are {len(choices)} choices; write {INDEX}"
            )


def check_texts(choices: Any, field: str = "doc_to_choice") -> None:
    """Raise a ValueError for an empty choice, whose likelihood per character is infinite."""
    for number, choice in enumerate(choices):
        if choice == "":
            raise ValueError(f"{field}[{number}] is empty; write a text")


def check_choice_file(file: Path) -> None:
    """Check every question of a file for `multiple_choice`. UserError: names the file, the line
    and the field.
    """
    require_fields(MULTIPLE_CHOICE, file, CHOICE_FIELDS)
    where = f"--data {MULTIPLE_CHOICE}={file}"
    if file_format(file) in WITHOUT_LISTS:
        raise UserError(
            f"{where}: a .{file_format(file)} file has no lists of choices; write JSON lines"
        )
    _, field, gold_field = CHOICE_FIELDS
    for place, record in _records(file):
        try:
            if missing := [name for name in CHOICE_FIELDS if name not in record]:
                raise ValueError(
                    f"no field {missing[0]}; {MULTIPLE_CHOICE} reads {', '.join(CHOICE_FIELDS)}"
                )
            if not isinstance(query := record[CHOICE_FIELDS[0]], str):
                raise ValueError(
                    f"{CHOICE_FIELDS[0]} is {json_kind(type(query).__name__)}; write a text"
                )
            check_choices(record[field], record[gold_field], (field, gold_field))
            check_texts(record[field], field)
            if len(record[field]) < 2:
                raise ValueError(f"{field} has {len(record[field])} choices; write at least 2")
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line or row, record)."""
    if file_format(file) == "jsonl":
        yield from read_objects(file)
        return
    datasets = import_optional("datasets", f"--data {MULTIPLE_CHOICE}={file}", "eval")
    try:
        with suppress_output(stderr=True):
            rows = datasets.load_dataset(file_format(file), data_files=str(file), split="train")
    except Exception as error:  # datasets and pyarrow raise a dozen types
        raise UserError(
            f"--data {MULTIPLE_CHOICE}={file}: it can't be read ({first_line(error)})"
        ) from error
    for number, record in enumerate(rows, 1):
        yield location(str(file), number), record
