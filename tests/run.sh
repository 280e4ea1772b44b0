#!/usr/bin/env bash
# bash tests/run.sh [--newest] [--tests-only] [ARGUMENT OF PYTEST…]
#
# Set-up, lint, types, tests. All are run, and the exit status says whether any of them failed, or no test was selected.
# --newest runs them in .venv-newest, on the newest releases of the day. CUDA's libraries make it 7 GB.
# The tests have three tiers: the first, which this runs, shows every mechanism once;
# -m "thorough and not heavy" has the other cases (.ci/run runs both); -m heavy has long proofs.
# Example: bash tests/run.sh tests/run/config -k schema
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
newest=
tests_only=
environment=.venv
while true; do
    case ${1:-} in
    --newest) newest=$1; environment=.venv-newest ;;
    --tests-only) tests_only=yes ;;
    *) break ;;
    esac
    shift
done
bash launch/setup_env.sh $newest data dev eval
export PATH="$PWD/$environment/bin:$PATH"
if [ -n "$newest" ]; then
    libraries='torch|transformers|accelerate|deepspeed|tokenizers|datasets|lm_eval|trl|pydantic|numpy'
    echo "== $(python -m pip list 2>/dev/null | grep -E "^($libraries) " | tr -s ' \n' ' ')"
fi

# What one process of a test compiles the next one reads: workers, launchers, ranks.
unset PYTHONDONTWRITEBYTECODE
failed=()
check() {
    local begin=$SECONDS
    echo "== $*"
    local status=0
    "$@" || status=$?
    if [ $status = 5 ] && [ "$2 $3" = "-m pytest" ]; then echo "no test is selected" >&2; fi
    if [ $status != 0 ]; then failed+=("$1"); fi
    echo "== $1: $((SECONDS - begin)) s"
}

# The scripts of eval/ and launch/ are no packages, so the folders are named.
folders=()
for folder in zero_tp launch eval benchmarks tests; do
    if [ -n "$(find "$folder" -name '*.py' -print -quit 2>/dev/null)" ]; then folders+=("$folder"); fi
done

types=
if [ -z "$tests_only" ]; then
    check ruff check .
    check ruff format --check .
    # Beside the tests, whose ranks leave a core idle now and then.
    log=$(mktemp)
    nice mypy "${folders[@]}" >"$log" 2>&1 &
    types=$!
    trap 'kill $types 2>/dev/null || :; rm -f "$log"' EXIT
fi
# Two files at a time, the long ones first: ranks wait for each other a fifth of the time, and one process leaves a core
# idle.
check python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

if [ -n "$types" ]; then
    wait $types || failed+=(mypy)
    echo "== mypy ${folders[*]}"
    cat "$log"
fi
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
