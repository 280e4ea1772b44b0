"""Make what a user's machine may have: corpora, a run and an export in the checkout, and a home
with caches.

`.ci/run` runs all tests beside them, because a test that reads one of them fails on a user's
machine only:

    python -m tests.tools.leftovers make HOME
    python -m tests.tools.leftovers remove HOME

Both run in the root of a checkout. What a developer has there stays untouched.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from tests.support.tiny_models import speeches, tiny_gpt2, write_corpus

ROOT = Path(__file__).resolve().parents[2]
CORPORA = tuple(ROOT / "data" / name for name in ("quickstart", "corpus", "bert_small"))
RUN, EXPORT = ROOT / "runs" / "quickstart", ROOT / "exports" / "quickstart"
MARK = "leftover"
"""A file in each directory that this tool has made, and the first word of each file."""
MODELS = ("gpt2", "somebody/tiny", "somebody/else")
COMMIT = "1" * 40
LAUNCHER_VARIABLES = (
    f"# {MARK}\nDS_ACCELERATOR=cuda\nWORLD_SIZE=64\nRANK=63\nMASTER_ADDR=192.0.2.1\n"
)
"""Of a job on 8 machines that nobody can reach."""


def make(home: Path) -> None:
    """Make everything that is not there."""
    home.mkdir(parents=True)
    (home / MARK).touch()
    model = tiny_gpt2(home / "model", speeches(1, 2000))
    for corpus in filter(_claim, CORPORA):
        for part, size in (("train", 5000), ("validation", 500)):
            write_corpus(corpus / part, [[number % 500 for number in range(size)]], 503)
        shutil.copytree(model, corpus / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    if _claim(RUN):
        (RUN / "checkpoints" / "step_00000600").mkdir(parents=True)
        (RUN / "checkpoints" / "step_00000600" / "manifest.json").write_text("{}")
        shutil.copy(ROOT / "ds_configs" / "quickstart.json", RUN / "config.json")
        (RUN / "metrics.jsonl").write_text(json.dumps({"step": 600, "loss": 3.0}) + "\n")
    if _claim(EXPORT):
        shutil.copytree(model, EXPORT, dirs_exist_ok=True)
    for folder in (home, ROOT):
        if not (folder / ".deepspeed_env").exists():
            (folder / ".deepspeed_env").write_text(LAUNCHER_VARIABLES)
    _fill_caches(home / ".cache", model)
    (home / ".config" / "matplotlib").mkdir(parents=True)
    (home / ".config" / "matplotlib" / "matplotlibrc").write_text(
        "backend: tkagg\nsavefig.format: pdf\n"
    )


def _claim(directory: Path) -> bool:
    """Create a directory and mark it; return whether it was not there."""
    if directory.exists():
        return False
    directory.mkdir(parents=True)
    (directory / MARK).touch()
    return True


def _fill_caches(cache: Path, model: Path) -> None:
    """Write a cache of huggingface_hub, accelerate's default config and a build of DeepSpeed's
    op that was killed.
    """
    hub = cache / "huggingface"
    for name in MODELS:
        repository = hub / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        shutil.copytree(model, repository / "snapshots" / COMMIT)
    (hub / "token").write_text("hf_leftover")
    (hub / "accelerate").mkdir()
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "fp16",
    }
    (hub / "accelerate" / "default_config.yaml").write_text(json.dumps(config))
    build = cache / "torch_extensions" / "cpu_adam"
    build.mkdir(parents=True)
    for name in ("lock", "cpu_adam.so"):
        (build / name).touch()


def remove(home: Path) -> None:
    """Remove what `make` has made."""
    for directory in (*CORPORA, RUN, EXPORT, home):
        if (directory / MARK).exists():
            shutil.rmtree(directory)
            if directory != home and not any(directory.parent.iterdir()):
                directory.parent.rmdir()
    variables = ROOT / ".deepspeed_env"
    if variables.exists() and variables.read_text() == LAUNCHER_VARIABLES:
        variables.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=("make", "remove"))
    parser.add_argument("home", type=Path, help="a directory that does not exist, for HOME")
    arguments = parser.parse_args()
    (make if arguments.action == "make" else remove)(arguments.home)


if __name__ == "__main__":
    main()
