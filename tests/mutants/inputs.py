"""Files that others wrote, and what commands write: models, corpora, JSON, code, pipes, and whose files they touch."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CLI = "tests/unit/test_cli.py::"
CONFIG = "tests/unit/test_config.py::"
FIRST_WORD = "tests/unit/test_lifecycle_parts.py::test_the_first_word_deletes_nothing_of_others"
JSON = CONFIG + "test_files_that_are_not_one_json_object"
MODELS = "tests/unit/test_model_directories.py::"
ONE_MODEL = MODELS + "test_what_is_not_one_whole_model_is_refused"
OWN_CODE = MODELS + "test_code_of_a_directory_is_not_run_and_nothing_asks"
PLAN = "tests/unit/test_plan.py::"
PREPARE = "tests/unit/test_data_prepare.py::"
INTERRUPTED = "tests/unit/test_data_interrupted.py::"
REFUSALS = "tests/unit/test_config_refusals.py::"
RUN = "tests/unit/test_run.py::"
RUN_DIRECTORY = "tests/unit/test_run_directory.py::"

MUTANTS: dict[str, Mutant] = {
    # ---- models ----------------------------------------------------------------------------------------------------
    "one-of-two-models-is-taken": Mutant(
        "Of a directory with a file of weights and an index of others, the index is read.",
        "zero_tp/weights/files.py",
        "        if len(there) == 2 and single not in",
        "        if len(there) > 2 and single not in",
        (ONE_MODEL + "[both-evaluation]", ONE_MODEL + "[both-training]"),
    ),
    "tensors-that-nothing-has-a-place-for": Mutant(
        "Evaluation of a model whose config has fewer layers than its files leaves the others out.",
        "zero_tp/weights/load.py",
        'if unexpected := sorted(loading["unexpected_keys"]):',
        'if unexpected := sorted(loading["unexpected_keys"])[:0]:',
        (ONE_MODEL + "[cut-evaluation]",),
    ),
    "shards-from-elsewhere": Mutant(
        "An index leads out of its directory.",
        "zero_tp/weights/files.py",
        "or not name or Path(name).name != name or",
        "or not name or",
        (ONE_MODEL + "[outside-evaluation]", ONE_MODEL + "[absolute-training]"),
    ),
    "weights-that-are-no-numbers": Mutant(
        "NaN and Inf in a model's files are weights.",
        "zero_tp/weights/files.py",
        "    return not tensor.numel() or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))",
        "    return torch.is_tensor(tensor)",
        (ONE_MODEL + "[NaN-evaluation]", ONE_MODEL + "[Inf-training]"),
    ),
    "code-of-a-tokenizer-runs": Mutant(
        "The code that comes with a tokenizer runs once someone says yes.",
        "zero_tp/data/tokenizer.py",
        "local_files_only=True, trust_remote_code=False",
        "local_files_only=True",
        (OWN_CODE,),
    ),
    "code-of-a-model-runs": Mutant(
        "Code that comes with a model runs.",
        "zero_tp/weights/load.py",
        "local_files_only=True, trust_remote_code=False",
        "local_files_only=True, trust_remote_code=True",
        (OWN_CODE,),
    ),
    "ids-fill-memory": Mutant(
        "A tokenizer with an id of 2^31 - 1 is opened.",
        "zero_tp/data/tokenizer.py",
        "or int(digits) >= MOST_IDS):",
        "or int(digits) >= 2**64):",
        (MODELS + "test_ids_beyond_every_vocabulary",),
    ),
    "task-files-run-python": Mutant(
        "A task file runs the Python beside it.",
        "zero_tp/evaluation/catalogue.py",
        "        if OWN not in Path(directory).resolve().parents:",
        "        if not directory:",
        ("tests/unit/test_harness.py::test_task_files_run_no_python",),
    ),
    # ---- corpora ---------------------------------------------------------------------------------------------------
    "a-corpus-is-known-by-64-blocks": Mutant(
        "A run is resumed on a corpus with other bytes between the blocks that are hashed.",
        "zero_tp/data/indexed.py",
        'content = {"content": self.content.sha256} if whole else {}',
        "content: dict[str, str] = {}",
        (RUN + "test_a_byte_that_was_changed_in_a_large_corpus_is_refused",),
    ),
    "ids-beyond-the-vocabulary": Mutant(
        "A corpus may hold an id that the embedding lacks.",
        "zero_tp/data/indexed.py",
        "        if content.smallest < 0 or content.largest >= size:",
        "        if content.smallest < 0 or content.largest > size:",
        (RUN + "test_tokens_outside_the_vocabulary_are_refused",),
    ),
    "as-long-is-up-to-date": Mutant(
        "A prepared corpus is compared by the sizes of its files.",
        "zero_tp/data/settings.py",
        "(found := file_sha256(path)) != expected.sha256:",
        "(found := expected.sha256) != expected.sha256:",
        (PREPARE + "test_a_changed_byte_is_no_output_that_is_up_to_date",),
    ),
    "a-pipe-is-waited-for": Mutant(
        "A device as an input is read, and a pipe waited for.",
        "zero_tp/data/documents.py",
        "        if not stat.S_ISREG(mode):",
        "        if stat.S_ISFIFO(mode):",
        (PREPARE + "test_what_is_no_file_is_never_waited_for",),
    ),
    "an-output-is-in-the-cache": Mutant(
        "A corpus gets its name before the disk has it.",
        "zero_tp/files.py",
        "    sync(written)\n",
        "",
        (INTERRUPTED + "test_an_output_is_on_the_disk_and_takes_its_place_at_once",),
    ),
    "an-output-is-replaced-in-two-steps": Mutant(
        "With --overwrite there is neither the old output nor the new for a moment.",
        "zero_tp/files.py",
        "        exchange(written, output)\n",
        '        output.rename(written.with_name("old"))\n        written.rename(output)\n',
        (INTERRUPTED + "test_an_output_is_on_the_disk_and_takes_its_place_at_once",),
    ),
    "new-weights-go-over-the-old": Mutant(
        "An export with --overwrite writes its files into the directory that it replaces.",
        "zero_tp/files.py",
        "        exchange(written, output)\n",
        '        [shutil.copy2(new, output) for new in written.glob("model*")]\n        exchange(written, output)\n',
        ("tests/unit/test_run_directory.py::test_an_export_takes_the_place_of_a_model_at_once",),
    ),
    "a-person-s-folders-go-with-the-old": Mutant(
        "What a person keeps in an output is removed with what --overwrite replaces.",
        "zero_tp/files.py",
        "        if persons and not (output / directory.name).exists():",
        "        if not persons and not (output / directory.name).exists():",
        (PREPARE + "test_reuse_overwrite_and_refusal",),
    ),
    # ---- JSON and settings -----------------------------------------------------------------------------------------
    "the-last-of-two-keys": Mutant(
        "Of a key that is there twice, the second is taken.",
        "zero_tp/strict_json.py",
        "        if len(found) < len(pairs):",
        "        if len(found) > len(pairs):",
        (JSON,),
    ),
    "integers-of-any-length": Mutant(
        "An integer of JSON is as long as Python converts.",
        "zero_tp/strict_json.py",
        "        if len(number) > _MOST_DIGITS:",
        "        if len(number) > 10**6:",
        (JSON,),
    ),
    "json-of-any-depth": Mutant(
        "JSON is nested as deeply as its parser goes.",
        "zero_tp/strict_json.py",
        "    for _ in range(_MOST_LEVELS):",
        "    for _ in range(10**6):",
        (JSON,),
    ),
    "json-of-any-length": Mutant(
        "A file of any size is read into memory.",
        "zero_tp/files.py",
        "        if size > most:",
        "        if size > 2**60:",
        (CONFIG + "test_what_is_too_long_or_no_file_is_not_read",),
    ),
    "any-json-is-a-report": Mutant(
        "What is compared with a report may be any object.",
        "zero_tp/evaluation/report.py",
        '    if "model" in report and isinstance(tasks, dict) and',
        "    if isinstance(tasks, dict) and",
        ("tests/unit/test_evaluation_of_runs.py::test_reports_that_are_none",),
    ),
    "numbers-of-any-size": Mutant(
        "A learning rate of 1e300 is a setting.",
        "zero_tp/config/resolve.py",
        "    if isinstance(value, (int, float)) and not -LARGEST <= value",
        "    if isinstance(value, int) and not -LARGEST <= value",
        (REFUSALS + "test_numbers_beyond_reason_are_refused",),
    ),
    "what-has-no-effect-is-not-said": Mutant(
        "A file of a task that is not evaluated is nothing to speak of.",
        "zero_tp/config/refusals.py",
        "for task in zero_tp.evaluation.task_data if task not in tasks]",
        "for task in zero_tp.evaluation.task_data if task in NOT_BUILT]",
        (REFUSALS + "test_what_has_no_effect_is_said",),
    ),
    "absent-data-are-found-by-the-run": Mutant(
        "A corpus is there where its first file is.",
        "zero_tp/config/run_config.py",
        'for prefix in corpora for ending in ("bin", "idx")]',
        'for prefix in corpora for ending in ("bin",)]',
        (REFUSALS + "test_what_a_run_reads_and_is_absent_is_said",),
    ),
    "a-sample-of-less-than-nothing": Mutant(
        "A negative count of tokens reaches transformers.",
        "zero_tp/commands/sample.py",
        "        if value is not None and not least <= value < 2**32:",
        "        if value is not None and not value < 2**32:",
        (CLI + "test_a_sample_of_no_such_size_is_one_line",),
    ),
    # ---- what is written, and whose it is --------------------------------------------------------------------------
    "a-link-is-followed": Mutant(
        "What ranks share in the temporary directory is where a link leads.",
        "zero_tp/process/first_word.py",
        "os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_DIRECTORY | os.O_CLOEXEC",
        (FIRST_WORD,),
    ),
    "old-files-are-tidied-up": Mutant(
        "Another program's old lock file is deleted.",
        "zero_tp/process/first_word.py",
        "            if own and found.st_size == 0 and",
        "            if own and",
        (FIRST_WORD,),
    ),
    "another-container-s-lock-is-nobody-s": Mutant(
        "A lock is taken from a build that this container does not see.",
        "zero_tp/zero/ops.py",
        "            held = _is_open(lock)",
        "            held: bool | None = None",
        ("tests/unit/test_ops.py::test_a_lock_of_another_container_stays",),
    ),
    "an-export-is-everybody-s": Mutant(
        "An export's directory can be read by all, whatever the umask is.",
        "zero_tp/files.py",
        "    partial.mkdir(parents=True, exist_ok=True)\n",
        "    partial.mkdir(parents=True, exist_ok=True)\n    partial.chmod(0o755)\n",
        (RUN_DIRECTORY + "test_an_export_follows_the_umask_and_copies_a_tokenizer_alone[63-448-384]",),
    ),
    "all-that-is-beside-a-tokenizer": Mutant(
        "An export copies whatever is in the tokenizer's directory.",
        "zero_tp/weights/export.py",
        "    for name in TOKENIZER_FILES:",
        "    for name in os.listdir(tokenizer):",
        (RUN_DIRECTORY + "test_an_export_follows_the_umask_and_copies_a_tokenizer_alone[18-493-420]",),
    ),
    "a-terminal-obeys": Mutant(
        "Names and libraries' texts reach the terminal as they are.",
        "zero_tp/errors.py",
        "    if text.isprintable():\n        return text",
        "    if text:\n        return text",
        (MODELS + "test_what_acts_on_a_terminal_is_escaped", CLI + "test_what_a_terminal_would_obey_is_shown"),
    ),
    "a-plan-is-written-in-place": Mutant(
        "A disk that is full costs the config that --write was to replace.",
        "zero_tp/planning/search.py",
        'write_named(path, json.dumps(config, indent=2) + "\\n")',
        'path.write_text(json.dumps(config, indent=2) + "\\n")',
        (PLAN + "test_a_config_that_cannot_be_written_leaves_the_one_before",),
    ),
    "sigterm-leaves-half-an-output": Mutant(
        "SIGTERM ends a command before it has cleaned up.",
        "zero_tp/cli.py",
        "    signal.signal(signal.SIGTERM, _terminate)",
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)",
        (INTERRUPTED + "test_sigterm_leaves_no_part_of_an_output",),
    ),
}
