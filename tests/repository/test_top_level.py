"""The top level holds what it is known to hold, and each target of the Makefile runs what
exists.
"""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec

from tests.support.launched import ROOT

FOLDERS = {
    *("zero_tp", "ds_configs", "launch", "eval", "tests"),
    *("benchmarks", "docs", "examples", "findings"),
    *(".ci", ".github"),
}
FILES = {
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"),
    *("setup.cfg", "setup.py", "pyproject.toml", "ruff.toml", "constraints.txt"),
    *(".gitignore", ".pre-commit-config.yaml"),
}
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_top_level_has_nothing_else() -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first = {name.split("/", 1)[0] for name in names.stdout.split("\0") if name}
    assert first == FOLDERS | FILES


def test_make_prints_every_target() -> None:
    targets = re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE)
    described = re.findall(r"^([a-z]+): ## \S", MAKEFILE, re.MULTILINE)
    assert targets == described == re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()
    assert {"fast", "test", "types", "format", "docs", "bench"} < {*targets}
    assert targets[0] == "help", "the target of `make` alone"


def test_targets_run_what_exists() -> None:
    modules = re.findall(r"python -m ([\w.]+)", MAKEFILE)
    scripts = re.findall(r"bash (\S+)", MAKEFILE)
    assert modules and not [name for name in modules if find_spec(name) is None]
    assert scripts and not [name for name in scripts if not (ROOT / name).is_file()]
