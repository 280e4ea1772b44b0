#!/usr/bin/env bash
# lm-eval 0.4.13: a task file of the user that carries a tag of lm-eval's own replaces the whole tag.
#
# `tag: ai2_arc` in a YAML file of `include_path` should add the task to the tag. Instead `ai2_arc` then names this task alone:
# ARC easy and challenge are no longer scored. The one message is: Task 'ai2_arc' from None overrides existing task from None.
#
# Seen: tasks of the tag ai2_arc: {'arc_challenge', 'arc_easy'} without the file, {'my_questions'} with it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q lm-eval==0.4.13 datasets==5.2.0
cd "$folder"
mkdir include
cat >include/mine.yaml <<'YAML'
task: my_questions
tag: ai2_arc
dataset_path: json
dataset_kwargs: {data_files: {validation: questions.jsonl}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}]
YAML
echo '{"question": "Is water wet?", "choices": ["yes", "no"], "gold": 0}' >questions.jsonl
HOME="$folder" HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 "$folder/env/bin/python" - <<'PY'
from lm_eval.tasks import TaskManager

alone = TaskManager().task_index["ai2_arc"].tags
together = TaskManager(include_path="include").task_index["ai2_arc"].tags
print("without the file:", sorted(alone), "with it:", sorted(together))
assert alone == {"arc_challenge", "arc_easy"}, alone
assert together == {"my_questions"}, together
PY
