# `make` prints the targets. They use the environment that is active, else .venv.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export DS_ACCELERATOR ?= cpu
# What one worker compiles, the other and the next run read.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help fast test types format docs bench

help: ## print the targets
	@grep -E '^[a-z]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1|/' \
		| awk -F '|' '{ printf "make %-8s %s\n", $$1, $$2 }'

fast: ## the tests that start no ranks, of every package (a minute)
	python -m pytest -n 2 --dist loadfile --fast

test: ## set-up, lint, types and the plain tests (8 minutes on 2 idle cores)
	bash tests/run.sh

types: ## mypy
	mypy zero_tp launch eval benchmarks tests

format: ## sort imports, mend what ruff can mend, format
	ruff check --fix .
	ruff format .

docs: ## write the pages that are generated: docs/config.md
	python -m tests.tools.config_page --write docs/config.md

bench: ## count the operations of a training step (a minute; more in benchmarks/results/README.md)
	python -m benchmarks.step_launches
