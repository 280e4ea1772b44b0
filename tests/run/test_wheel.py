"""An installed wheel does everything from an empty directory: no file of the checkout is on its
way.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.launched import ROOT, free_port, metrics_of, run

PARTS = (
    "zero_tp",
    "ds_configs",
    "launch",
    "eval",
    "setup.cfg",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip builds it, from a copy: a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PARTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True)
    (built,) = folder.glob("zero_tp-*.whl")
    return built


class Installed:
    """A fresh environment with the wheel, beside the libraries of this one, and an empty
    directory to work in.
    """

    def __init__(self, wheel: Path, folder: Path):
        self.directory = folder / "work"
        self.directory.mkdir()
        venv.create(folder / "env", with_pip=False)
        self.bin = folder / "env" / "bin"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.bin / "python"),
            "install",
            "--no-deps",
            "--no-index",
        ]
        subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
        site = next(folder.glob("env/lib/python*/site-packages"))
        (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, *words: str) -> str:
        path = f"{self.bin}:{os.environ['PATH']}"
        done = run(
            words, self.directory, variables={"PATH": path, "PYTHONPATH": str(self.directory)}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def launch(self, *words: str) -> str:
        launcher = ("python", "-m", "deepspeed.launcher.runner", "-q", "--num_accelerators", "2")
        return self.run(*launcher, "--master_port", str(free_port()), *words)


@pytest.mark.thorough
def test_a_wheel_holds_what_is_shipped_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {
        name.removeprefix("zero_tp/_shipped/")
        for name in names
        if name.startswith("zero_tp/_shipped/")
    }
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "ds_configs").rglob("*.json")}
    corpus = {"launch/corpus/LICENSE.md", "launch/corpus/sotu.jsonl.gz"}
    assert shipped == configs | corpus | {
        "launch/pretrain.py",
        "launch/finetune.py",
        "eval/zero_shot.py",
    }
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "zero_tp").rglob("*.py")}
    assert {name for name in names if name.endswith(".py") and "_shipped" not in name} == sources
    assert "zero_tp/py.typed" in names


@pytest.mark.heavy
def test_an_installed_wheel_prepares_trains_exports_evaluates_and_samples(
    wheel: Path, tmp_path: Path
) -> None:
    here = Installed(wheel, tmp_path)
    found = here.run("python", "-c", "import zero_tp; print(zero_tp.__file__)")
    assert found.startswith(str(tmp_path)), "not the checkout's"
    corpus = here.run("zero-tp", "path", "corpus").strip()
    here.run(
        "zero-tp",
        "prepare",
        "--input",
        corpus,
        "--tokenizer",
        "bpe:512",
        "--output",
        "data/quickstart",
    )
    assert "quickstart.json is valid\n" in here.run(
        "zero-tp", "check", "quickstart", "--world-size", "4"
    )

    small = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    sets = [f"zero_tp.model.{key}={value}" for key, value in small.items()]
    sets += ["zero_tp.data.sequence_length=64", "zero_tp.evaluation.batches=1"]
    sets += ["scheduler.params.total_num_steps=20", "scheduler.params.warmup_num_steps=4"]
    words = [
        "--deepspeed_config",
        "quickstart",
        *(word for each in sets for word in ("--set", each)),
    ]
    script = here.run("zero-tp", "path", "pretrain").strip()
    here.launch(script, *words, "--set", "zero_tp.training.steps=2")
    resumed = here.launch(
        "--module", "zero_tp.pretrain", *words, "--set", "zero_tp.training.steps=3"
    )
    assert "resuming step 2" in resumed
    steps = [
        line["step"]
        for line in metrics_of(here.directory / "runs" / "quickstart")
        if "loss" in line
    ]
    assert steps == [1, 2, 3]

    here.run("zero-tp", "inspect", "runs/quickstart", "--verify")
    here.run("zero-tp", "convert", "to-hf", "runs/quickstart", "--output", "export")
    texts = (
        "--tasks",
        "perplexity",
        "--data",
        "perplexity=data/quickstart/validation.jsonl",
        "--limit",
        "1",
    )
    evaluated = ("--model", "export", *texts, "--output")
    here.run("zero-tp", "evaluate", *evaluated, "one.json")
    here.launch("--module", "zero_tp.evaluate", *evaluated, "two.json")
    one, two = (
        json.loads((here.directory / name).read_text())["tasks"]
        for name in ("one.json", "two.json")
    )
    assert one["perplexity"]["loss"] == pytest.approx(two["perplexity"]["loss"], rel=1e-5)
    assert here.run(
        "python",
        "-m",
        "zero_tp",
        "sample",
        "--model",
        "export",
        "--prompt",
        "My fellow",
        "--tokens",
        "3",
    )
