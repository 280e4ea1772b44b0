"""Checkpoints: complete or absent, verified, of one step."""

from __future__ import annotations

from tests.tools.mutants.mutant import Mutant

DIRECTORY = "zero_tp/checkpoint/directory.py::"
SAVE = "zero_tp/checkpoint/save.py::"

BRANCHES = "tests/checkpoint/test_branches.py::test_"
SAVES = "tests/checkpoint/test_saves.py::test_"

MUTANTS: dict[str, Mutant] = {
    "a-failed-write-is-saved": Mutant(
        "A checkpoint is complete without the file of a rank whose disk is full.",
        SAVE + "Saver._finish",
        "raise OSError(0, f\"rank {rank}: {written['error']}\")",
        "continue",
        (SAVES + "a_failed_save_costs_one_checkpoint[1-False]",),
    ),
    "a-background-save-is-of-later-steps": Mutant(
        "A save in the background writes masters that the next steps have changed already.",
        SAVE + "_copy_to_host",
        "data.clone()",
        "data",
        (SAVES + "a_save_in_the_background_holds_its_own_step[0]",),
    ),
    "damage-is-not-compared": Mutant(
        "A start reads a file of a checkpoint whatever its SHA-256 is.",
        DIRECTORY + "check_content",
        "sha256 != listed.sha256",
        "False",
        ("tests/checkpoint/test_damage.py::test_damage_is_named_and_the_checkpoint_before_is_offered[flipped bit]",),
    ),
    "exports-read-damaged-files": Mutant(
        "An export reads a checkpoint's file whatever its hash is.",
        "zero_tp/checkpoint/convert.py::to_huggingface",
        "check_content(checkpoint, manifest.files)",
        "pass",
        ("tests/checkpoint/test_manifest.py::test_an_export_of_damaged_masters_is_no_export",),
    ),
    "half-removed-is-complete": Mutant(
        "A checkpoint whose removal was killed keeps its manifest.",
        DIRECTORY + "_remove",
        "(checkpoint / MANIFEST).unlink()",
        "pass",
        ("tests/checkpoint/test_run_directory.py::test_a_checkpoint_that_is_half_removed_is_not_complete",),
    ),
    "left-branch-is-resumed": Mutant(
        "After going back, the next start takes the newest step of the abandoned branch.",
        DIRECTORY + "start_branch",
        "newer > step",
        "False",
        (BRANCHES + "going_back_starts_a_branch_and_loses_nothing",),
    ),
}
