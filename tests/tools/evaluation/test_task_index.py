"""Names of a user's task files against each other and against lm-eval's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager
from transformers import GPT2Config

from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.base.settings.schema import Evaluation
from zero_tp.tools.evaluation.live_tasks import LiveTasks
from zero_tp.tools.evaluation.settings import TaskOptions
from zero_tp.tools.evaluation.task_index import find_task_manager, open_task_directory
from zero_tp.tools.evaluation.zero_shot import make_tasks


def write(directory: Path, **files: str) -> Path:
    directory.mkdir()
    for name, text in files.items():
        (directory / f"{name}.yaml").write_text(text)
    return directory


@pytest.fixture
def few_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of lm-eval's own task files, which take seconds to read: a tag of two tasks, and
    a group of it.
    """
    defaults = write(
        tmp_path / "defaults",
        easy="task: arc_easy\ntag: ai2_arc",
        challenge="task: arc_challenge\ntag: [ai2_arc, science]",
        exams="group: exams\ntask: [ai2_arc]",
    )

    def few(include_path: str | None = None, *, include_defaults: bool) -> TaskManager:
        return TaskManager(
            include_path=str(defaults) if include_defaults else include_path, include_defaults=False
        )

    monkeypatch.setattr("zero_tp.tools.evaluation.task_index.TaskManager", few)


@pytest.mark.parametrize(
    ("tag", "kind"), [("ai2_arc", "tag"), ("exams", "group"), ("arc_easy", "task")]
)
@pytest.mark.usefixtures("few_defaults")
def test_a_tag_that_hides_a_name_of_lm_evals_is_refused(
    tag: str, kind: str, tmp_path: Path
) -> None:
    directory = open_task_directory(
        write(tmp_path / "mine", mine=f"task: mine\ntag: [{tag}, other]")
    )
    for names in (["ai2_arc"], ["exams"], ["mine", "other"]):
        with pytest.raises(
            UserError, match=rf'the tag "{tag}" of mine is the name of a {kind} of lm-eval, which '
        ):
            find_task_manager(names, directory)
    for names in (["mine"], ["mine", "arc_challenge"]):  # the tag is not used
        assert set(names) <= set(find_task_manager(names, directory).all_tasks)


@pytest.mark.usefixtures("few_defaults")
def test_a_tag_with_all_tasks_of_lm_evals_is_accepted(tmp_path: Path) -> None:
    copies = {
        name: f"task: {name}\ntag: ai2_arc" for name in ("arc_easy", "arc_challenge", "arc_mine")
    }
    manager = find_task_manager(
        ["ai2_arc"], open_task_directory(write(tmp_path / "mine", **copies))
    )
    assert manager.task_index["ai2_arc"].tags == set(copies)
    assert {"exams", "science"} <= set(manager.all_tasks)


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ("task: one", "task: two\ntag: one", 'its tag "one" is the name of a task in another file'),
        ("task: one\ntag: two", "task: two", 'another file has the tag "two" already'),
        (
            "group: one\ntask: [a]",
            "task: two\ntag: one",
            'its tag "one" is the name of a group in another file',
        ),
        ("task: one", "group: one\ntask: [a]", 'another file has the task "one" already'),
        ("task: one\ntag: two", "group: two\ntask: [a]", 'another file has the tag "two" already'),
    ],
)
def test_names_of_a_directory_are_different(
    first: str, second: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        open_task_directory(write(tmp_path / "mine", a=first, b=second))


def test_copies_of_an_editor_are_no_tasks(tmp_path: Path) -> None:
    """lm-eval leaves out the directory in which Jupyter keeps them."""
    directory = write(tmp_path / "mine", mine="task: mine")
    write(directory / ".ipynb_checkpoints", copy="task: mine")
    assert open_task_directory(directory).all_tasks == ["mine"]


@THOROUGH
def test_a_tag_of_lm_evals_is_refused_in_commands_and_runs(
    small_model: Path, tmp_path: Path
) -> None:
    directory = write(tmp_path / "mine", mine="task: mine\ntag: ai2_arc\ndataset_path: json")
    words = r'the tag "ai2_arc" of mine is the name of a tag of lm-eval'
    with pytest.raises(UserError, match=words):
        make_tasks(["ai2_arc"], {}, TaskOptions(include_path=directory))
    block = Evaluation(tasks=["ai2_arc"], task_include_path=str(directory))
    with pytest.raises(UserError, match=rf"zero_tp\.evaluation\.tasks: .*{words}"):
        LiveTasks(block, small_model, GPT2Config(vocab_size=1000), 32)
