#!/usr/bin/env bash
# bash tests/run.sh [ARGUMENT OF PYTEST…]
#
# Set-up, lint, types, tests. All are run, and the exit status says whether any of them failed.
# Example: bash tests/run.sh tests/unit -k config
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup_env.sh dev eval
export PATH="$PWD/.venv/bin:$PATH"

failed=()
check() {
    local begin=$SECONDS
    echo "== $*"
    "$@" || failed+=("$1")
    echo "== $1: $((SECONDS - begin)) s"
}

# The scripts of eval/ and launch/ are no packages, so the folders are named.
folders=()
for folder in zero_tp launch eval benchmarks tests; do
    if [ -n "$(find "$folder" -name '*.py' -print -quit 2>/dev/null)" ]; then folders+=("$folder"); fi
done

check ruff check .
check mypy "${folders[@]}"
# Two files at a time, the long ones first: ranks wait for each other a fifth of the time, and one process leaves a core
# idle.
check python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
