"""Checkpoints that are read or left behind, what ranks agree on, and what a run checks of itself."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BRANCHES = "tests/distributed/test_branches.py::"
DAMAGE = "tests/distributed/test_damage.py::"
GUARDS = "tests/distributed/test_guards.py::"
SPIKES = "tests/distributed/test_spikes.py::"
MANIFEST = "tests/unit/test_manifest.py::"
SAVES = "tests/distributed/test_saves.py::"
METRICS = "tests/unit/test_metrics.py::"
RUN_DIRECTORY = "tests/unit/test_run_directory.py::"
WATCH = "tests/unit/test_watch.py::"
ONE_BIT = GUARDS + "test_one_changed_bit_of_what_replicas_hold_twice_names_the_odd_one[1-fp32-weight]"
SPIKE = SPIKES + "test_a_spike_is_skipped_alike_on_a_run_and_one_that_was_resumed"

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
        "zero_tp/parallel/agreement.py",
        "        if len(holders) > 1:",
        "        if len(holders) > len(ranks):",
        (BRANCHES + "test_ranks_agree_on_what_they_resume", BRANCHES + "test_ranks_agree_on_what_they_read"),
    ),
    "looking-at-a-rank-collects-garbage": Mutant(
        "A rank's own watch hangs it for ever, under Python 3.11.",
        "zero_tp/process/garbage.py",
        "        gc.disable()",
        "        pass",
        ("tests/unit/test_watch.py::test_looking_starts_no_collection",),
    ),
    "damage-is-not-compared": Mutant(
        "A file of a checkpoint is read whatever its SHA-256 is.",
        "zero_tp/checkpoint/directory.py",
        "    if found.sha256 != manifested.sha256:",
        "    if not found.sha256:",
        (DAMAGE + "test_damage_is_named_and_the_checkpoint_before_is_offered[flipped bit]",),
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
        "zero_tp/zero/engine.py",
        "        if self._veto is not None and self._veto(norm):",
        "        if self._veto is not None and self._veto(norm) is None:",
        (SPIKE,),
    ),
    "skipped-steps-move-the-bound": Mutant(
        "The window of a spike's bound starts anew at a resume, and another step is skipped.",
        "zero_tp/zero/engine.py",
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
    "exports-read-what-is-damaged": Mutant(
        "A part of a checkpoint's file is taken whatever its hash is.",
        "zero_tp/checkpoint/reader.py",
        "            if digest != self._parts[part]:",
        "            if not digest:",
        (MANIFEST + "test_an_export_of_damaged_masters_is_no_export",),
    ),
    "evaluation-reads-what-is-damaged": Mutant(
        "A run is evaluated from files that nothing compares.",
        "zero_tp/evaluation/pretrained.py",
        "source = CheckpointReader(self.path, manifest)",
        "source = CheckpointReader(self.path, manifest, compared=False)",
        ("tests/unit/test_evaluation_of_runs.py::test_a_damaged_run_is_not_evaluated",),
    ),
    "changes-are-not-said": Mutant(
        "A setting that is another one than at the last start is taken without a word.",
        "zero_tp/checkpoint/manifest.py",
        "    elif now != before:",
        "    elif type(now) is not type(before):",
        (BRANCHES + "test_what_differs_from_the_last_start_is_said",),
    ),
    "a-damaged-copy-is-replaced": Mutant(
        "What is set aside takes the place of what was set aside before.",
        "zero_tp/checkpoint/directory.py",
        "    while os.path.lexists(aside):\n        count += 1\n",
        "    while os.path.lexists(aside):\n        shutil.rmtree(aside)\n",
        (BRANCHES + "test_what_is_set_aside_replaces_nothing",),
    ),
    "latest-names-what-is-gone": Mutant(
        "The file `latest` still names a step that was set aside.",
        "zero_tp/checkpoint/directory.py",
        "        (checkpoints_of(run) / LATEST).unlink(missing_ok=True)",
        "        pass",
        (BRANCHES + "test_what_is_set_aside_replaces_nothing",),
    ),
    "keys-of-saves-stay": Mutant(
        "What ranks told each other of a save stays in the job's store for ever.",
        "zero_tp/checkpoint/save.py",
        '            self._store.delete_key(f"{self._count}/{rank}")',
        "            pass",
        (BRANCHES + "test_going_back_starts_a_branch_and_loses_nothing",),
    ),
    "no-locks-no-run": Mutant(
        "A file system without locks refuses every run.",
        "zero_tp/files.py",
        "        if error.errno not in _NO_LOCKS:",
        "        if error.errno:",
        (RUN_DIRECTORY + "test_a_file_system_without_locks_holds_one_run",),
        guard="cannot be a run's directory (Operation not supported)",
    ),
    "half-removed-is-complete": Mutant(
        "A checkpoint whose removal was killed keeps its manifest.",
        "zero_tp/checkpoint/directory.py",
        "        (checkpoint / MANIFEST).unlink()",
        "        pass",
        (RUN_DIRECTORY + "test_a_checkpoint_that_is_half_removed_is_not_complete",),
    ),
    "a-failed-write-is-saved": Mutant(
        "A checkpoint is whole without the file of a rank whose disk is full.",
        "zero_tp/checkpoint/save.py",
        "raise OSError(0, f\"rank {rank}: {told['error']}\")",
        "continue",
        (SAVES + "test_a_full_disk_costs_one_checkpoint[False-1]",),
    ),
    "a-log-ends-the-run": Mutant(
        "A log that cannot be written ends the run.",
        "zero_tp/training/report.py",
        "        except errors as error:\n",
        "        except errors as error:\n            raise\n",
        (METRICS + "test_a_log_that_cannot_be_written_ends_nothing",),
        guard="not a regular file",
    ),
    "half-a-line-stays": Mutant(
        "Of a line of the log that the disk has no room for, the first bytes stay, and the next line follows them.",
        "zero_tp/training/metrics_file.py",
        "                file.truncate(end)",
        "                file.flush()",
        (METRICS + "test_a_disk_that_fills_up_costs_whole_lines",),
        guard="Unterminated string",
    ),
    "damaged-lines-are-thrown-away": Mutant(
        "A damaged log is mended, and nothing of what it held is kept.",
        "zero_tp/training/metrics_file.py",
        "        path.rename(aside)",
        "        aside.touch()",
        (METRICS + "test_a_damaged_file_is_mended_and_kept_aside",),
    ),
    "every-phase-is-a-step": Mutant(
        "The limit of a step ends a start and a save, whatever limit they have.",
        "zero_tp/process/watch.py",
        "limit = self._limits.get(position.phase)",
        'limit = self._limits.get("step")',
        (WATCH + "test_only_a_phase_without_marks_reaches_its_limit",),
    ),
    "who-waits-is-waited-for": Mutant(
        "Of ranks that hang, those that have come furthest are named.",
        "zero_tp/process/positions.py",
        "    least = min(",
        "    least = max(",
        (WATCH + "test_who_is_behind_is_waited_for",),
    ),
    "silence-is-for-ever": Mutant(
        "A machine that dies while nobody waits for it ends the job after the phase's limit, 30 minutes.",
        "zero_tp/process/positions.py",
        "max(self._same.values()) < self._looks",
        "max(self._same.values()) < 1000 * self._looks",
        (WATCH + "test_a_rank_whose_word_stays_the_old_one_ends_the_job",),
    ),
    "who-leaves-says-nothing": Mutant(
        "A rank that has ended its work is missed by the others, which end with an error.",
        "zero_tp/process/watch.py",
        '        self.enter("end")\n',
        "",
        (WATCH + "test_a_rank_that_has_left_is_not_missed",),
    ),
    "who-served-the-store-goes-first": Mutant(
        "Where another rank of the first machine says why, other machines find no store and say something else.",
        "zero_tp/process/lifecycle.py",
        "self.across.ended or self.first_word.said()",
        "self.across.ended",
        ("tests/unit/test_across.py::test_the_store_stays_until_the_other_machines_have_heard_what_another_rank_said",),
    ),
    "a-broken-connection-stays": Mutant(
        "A rank whose connection to the store broke once says nothing more, and ends the job.",
        "zero_tp/process/watch.py",
        'self._store, lost = None, ""',
        'lost = ""',
        (WATCH + "test_a_connection_that_breaks_is_made_anew",),
    ),
    "nobody-need-wait-for-a-straggler": Mutant(
        "A rank is slow that nobody waits for.",
        "zero_tp/process/positions.py",
        "        if share >= AT_WORK and share >=",
        "        if share >=",
        (WATCH + "test_a_rank_at_work_twice_as_long_is_slow",),
    ),
    "an-empty-config-stops-a-resume": Mutant(
        "A start reads the run's config.json, although the checkpoint carries the config.",
        "zero_tp/checkpoint/run.py",
        "    if manifest is not None and manifest.config is not None:",
        "    if manifest is not None and not manifest.config:",
        (MANIFEST + "test_a_checkpoint_carries_what_a_start_needs",),
        guard="not a run's config",
    ),
    "the-last-is-traced": Mutant(
        "Of what is not finite, what follows is told instead of what it follows from.",
        "zero_tp/training/guards.py",
        "        _, what, rank, host = min(there,",
        "        _, what, rank, host = max(there,",
        (SPIKES + "test_what_is_not_finite_is_traced_to_its_layer_and_rank[3]",),
    ),
}
