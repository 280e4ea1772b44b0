"""Checkpoints that are read or left behind, what ranks agree on, and what a run checks of itself."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BRANCHES = "tests/distributed/test_branches.py::"
GUARDS = "tests/distributed/test_guards.py::"
MANIFEST = "tests/unit/test_manifest.py::"
ONE_BIT = GUARDS + "test_one_changed_bit_of_what_replicas_hold_twice_names_the_odd_one[1-fp32-weight]"
SPIKE = GUARDS + "test_a_spike_is_skipped_alike_on_a_run_and_one_that_was_resumed"

MUTANTS: dict[str, Mutant] = {
    "what-was-saved-is-pruned": Mutant(
        "The step that was just saved is removed, because older branches have higher numbers.",
        "zero_tp/checkpoint/directory.py",
        "if step == saved or (keep_every is not None and step % keep_every == 0):",
        "if keep_every is not None and step % keep_every == 0:",
        (BRANCHES + "test_what_was_just_saved_is_never_pruned",),
    ),
    "left-branch-is-resumed": Mutant(
        "After going back, the next start takes the newest step of the branch that was left.",
        "zero_tp/checkpoint/directory.py",
        "        if newer > step:",
        "        if newer > step + 10**6:",
        (BRANCHES + "test_going_back_starts_a_branch_and_loses_nothing",),
    ),
    "ranks-resume-what-each-sees": Mutant(
        "Ranks train on with the masters of different steps.",
        "zero_tp/checkpoint/resume.py",
        "        if len(holders) > 1:",
        "        if len(holders) > len(ranks):",
        (BRANCHES + "test_ranks_agree_on_what_they_resume", BRANCHES + "test_ranks_agree_on_what_they_read"),
    ),
    "damage-is-not-compared": Mutant(
        "A file of a checkpoint is read whatever its SHA-256 is.",
        "zero_tp/checkpoint/directory.py",
        "    if found.sha256 != manifested.sha256:",
        "    if not found.sha256:",
        ("tests/distributed/test_damage.py::test_damage_is_named_and_the_checkpoint_before_is_offered[flipped bit]",),
    ),
    "an-edited-manifest-is-taken": Mutant(
        "A manifest whose content is not what its hash says is believed.",
        "zero_tp/checkpoint/manifest.py",
        "    if OWN_HASH in raw and raw[OWN_HASH] != (found := content_hash(raw)):",
        "    if OWN_HASH in raw and not (found := content_hash(raw)):",
        (MANIFEST + "test_an_edited_value_is_found",),
    ),
    "a-spike-is-taken": Mutant(
        "A step beyond the bound is told of, and updates the weights all the same.",
        "zero_tp/zero/stages.py",
        "        if self._veto is not None and self._veto(norm):",
        "        if self._veto is not None and self._veto(norm) is None:",
        (SPIKE,),
    ),
    "skipped-steps-move-the-bound": Mutant(
        "The window of a spike's bound starts anew at a resume, and another step is skipped.",
        "zero_tp/zero/stages.py",
        'self.recent = [list(pair) for pair in progress.get("recent", [])]',
        "self.recent = []",
        (SPIKE,),
    ),
    "replicas-are-not-compared": Mutant(
        "A bit that flips in one replica's weights stays there.",
        "zero_tp/training/engine.py",
        "            check_duplicates(self.zero, guarded)",
        "            pass",
        (ONE_BIT,),
    ),
    "one-run-is-compared-with-itself": Mutant(
        "The micro-batch that is run twice draws the gradients of the first run again.",
        "zero_tp/training/guards.py",
        "            found.append([0 if gradient is None else digest(gradient) for gradient in gradients])",
        "            found.append(found[0] if found else [0 if each is None else digest(each) for each in gradients])",
        (GUARDS + "test_a_gradient_that_does_not_come_again_names_the_rank[1]",),
    ),
}
