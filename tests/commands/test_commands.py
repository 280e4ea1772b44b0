"""The commands of zero-tp, and what the package offers: lazy names, configs by name, the shells'
completion.
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
import tomllib
import warnings
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import zero_tp
from tests.support import launched
from tests.support.launched import ROOT
from zero_tp.base import shipped
from zero_tp.base.errors import ConfigError
from zero_tp.commands import COMMANDS, command_module
from zero_tp.commands.path import PATHS
from zero_tp.run.config import RunConfig

SCRIPTS = {**{name: f"launch/{name}.py" for name in ("pretrain", "plan", "convert", "sample")}} | {
    "prepare": "launch/prepare_data.py",
    "evaluate": "eval/zero_shot.py",
}
HEAVY = {"torch", "transformers", "deepspeed", "numpy", "pydantic", "psutil"}


def test_the_table_the_modules_and_the_scripts_are_the_same_commands() -> None:
    files = {path.stem for path in (ROOT / "zero_tp" / "commands").glob("*.py")}
    assert files - {"__init__", "options"} == COMMANDS.keys()
    for name, command in COMMANDS.items():
        assert callable(command_module(name).add_arguments)
        assert callable(command_module(name).start if command.ranks else command_module(name).main)
    for name, script in SCRIPTS.items():
        assert f'start("{name}")' in (ROOT / script).read_text()
    started = re.compile(r"from zero_tp\.commands import start")
    thin = {
        path
        for path in [*ROOT.glob("launch/*.py"), *ROOT.glob("eval/*.py")]
        if started.search(path.read_text())
    }
    assert thin == {ROOT / script for script in SCRIPTS.values()}


def test_importing_the_package_imports_no_library() -> None:
    """They take seconds: the names are there all the same, and the shells' completion waits for
    none of them.
    """
    code = "import sys, zero_tp; print(*sys.modules); assert 'plan' in dir(zero_tp)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in done.stdout.split()} & HEAVY


@pytest.mark.parametrize(
    ("words", "restarts"),
    [
        (["-m", "zero_tp.pretrain", "--help"], 1),
        (["launch/pretrain.py", "--help"], 1),
        (["-m", "zero_tp", "path", "pretrain"], 0),
    ],
)
def test_training_on_cpus_begins_once_more_with_its_heap(
    words: list[str], restarts: int, tmp_path: Path
) -> None:
    """As the environment of glibc's allocator is read when a process begins."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'GLIBC_TUNABLES' in os.environ: print('restarted', flush=True)\n"
    )
    variables = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = launched.run([sys.executable, *words], ROOT, variables=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("restarted") == restarts


def test_the_public_names_are_what_they_say() -> None:
    import zero_tp.data
    import zero_tp.tools.planning.plan  # the modules of the functions don't take their place

    public = {name: getattr(zero_tp, name) for name in zero_tp.__all__}
    functions = {"connect", "parallel_model", "plan", "prepare", "stream"}
    assert all(value.__name__ == name for name, value in public.items())
    assert {name for name, value in public.items() if not isinstance(value, type)} == functions
    assert public["plan"] is zero_tp.tools.planning.plan.plan
    assert {
        name: getattr(zero_tp.data, name) for name in zero_tp.data.__all__
    }.items() <= public.items()
    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        _ = zero_tp.plam


def test_modules_are_imported_by_their_former_names() -> None:
    """Scripts that follow the docs of earlier versions go on; each name is the same module, so
    the same state.
    """
    from zero_tp import _OLD_MODULES

    with pytest.warns(DeprecationWarning, match=r"zero_tp.models.norm is zero_tp.model.norm now"):
        module = import_module("zero_tp.models.norm")
    assert module is import_module("zero_tp.model.norm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert all(import_module(old) is import_module(new) for old, new in _OLD_MODULES.items())
        assert import_module("zero_tp.process.connect") is import_module(
            "zero_tp.run.process.connect"
        )


def test_one_version() -> None:
    assert launched.zero_tp(ROOT, "--version").stdout == f"zero-tp {zero_tp.__version__}\n"
    assert "version = attr: zero_tp.__version__\n" in (ROOT / "setup.cfg").read_text()


def test_uv_takes_the_versions_that_pip_takes() -> None:
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"][
        "constraint-dependencies"
    ]
    assert len(pinned) == 4 and set(pinned) <= set(
        (ROOT / "constraints.txt").read_text().splitlines()
    )


def test_requirements_allow_the_constraints_and_no_untested_release() -> None:
    """The bounded libraries change names and internals that this package reads in minor
    releases.
    """
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lists = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    requirements = [Requirement(line) for text in lists for line in text.strip().splitlines()]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    for requirement in requirements:
        assert requirement.specifier.contains(pinned[requirement.name]), requirement
    bounded = {
        each.name for each in requirements if any(bound.operator == "<" for bound in each.specifier)
    }
    assert bounded == {
        "torch",
        "deepspeed",
        "transformers",
        "accelerate",
        "datasets",
        "datatrove",
        "lm-eval",
    }


def test_what_is_no_command_is_one_line() -> None:
    done = launched.forked_zero_tp(ROOT, "pretain")
    told = 'error: "pretain" is no command of python -m zero_tp: did you mean "pretrain"?\n'
    assert (done.returncode, done.stderr) == (2, told)
    listed = launched.forked_zero_tp(ROOT).stdout
    assert all(re.search(rf"^    {name} ", listed, re.MULTILINE) for name in COMMANDS)


def test_what_is_shipped_has_a_path() -> None:
    assert {"quickstart", "gpt2_355m", "gpt2_2.5b"} <= set(shipped.config_names())
    for name in PATHS:
        assert shipped.shipped_path(PATHS[name]).exists()
    done = launched.forked_zero_tp(ROOT, "path", "gpt2_2.5b")
    assert json.loads(Path(done.stdout.rstrip("\n")).read_text())["zero_tp"]


def test_a_config_is_found_by_its_name_where_no_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunConfig.load(shipped.find_config("gpt2_2.5b"), world_size=8).name == "gpt2_2.5b"
    papers = shipped.shipped_path(shipped.CONFIGS) / "papers"
    assert {shipped.find_config(name) for name in ("gpt_22b", "papers/gpt_22b")} == {
        papers / "gpt_22b.json"
    }
    with pytest.raises(
        ConfigError, match=r'^lama_135m: no such file; .* did you mean "llama_135m"\?$'
    ):
        RunConfig.load(shipped.find_config("lama_135m"))
    (tmp_path / "quickstart").write_text("{}")
    assert shipped.find_config("quickstart") == Path("quickstart")
    assert shipped.find_config("ds_configs/quickstart.json") == Path("ds_configs/quickstart.json")
    checked = launched.forked_zero_tp(ROOT, "check", "gpt2_2.5", "--world-size", "8")
    assert checked.returncode == 2
    remedy = 'give the path of a JSON config, or a name of ds_configs: did you mean "gpt2_2.5b"?'
    assert checked.stderr == f"error: gpt2_2.5: no such file; {remedy}\n"


def test_an_editor_s_schema_is_nothing_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    written = json.loads(shipped.find_config("quickstart").read_text())
    path.write_text(json.dumps(written))
    before = RunConfig.load(path, world_size=4)
    path.write_text(json.dumps({"$schema": "zero_tp.schema.json", **written}))
    config = RunConfig.load(path, world_size=4)
    assert (
        config.engine_settings.written() == before.engine_settings.written()
        and config.resolved() == before.resolved()
    )
    with pytest.raises(ConfigError, match=r"\$schema: expected a string"):
        RunConfig.load(path, ["$schema=1"], world_size=4)


def test_convert_names_the_command_that_describes_a_checkpoint(tmp_path: Path) -> None:
    done = launched.script("launch/convert.py", tmp_path, "inspect", "runs/a b", "--verify")
    assert done.returncode == 2
    line = "error: inspect: convert does not describe checkpoints; run zero-tp inspect 'runs/a b'\n"
    assert done.stderr == line
