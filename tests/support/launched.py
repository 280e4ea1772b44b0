"""Commands of the project as a person starts them, and a workplace to start them in."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.pools import preloaded_context
from tests.support.waits import patience
from zero_tp.run.metrics_file import METRICS_FILE

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_LINE = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+\] \[[A-Z]+\] \[(launch|runner)\.py:")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def default_interrupts() -> None:
    """Give a child the default of SIGINT, as its `preexec_fn`: a shell's background job inherits
    it as ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def environment(checkout: Path = ROOT) -> dict[str, str]:
    """Return the variables for a command of a checkout, which comes before the installed
    package, on ranks too.
    """
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
    }


def run(
    command: Sequence[str],
    directory: Path,
    limit: float = 240,
    checkout: Path = ROOT,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command of a checkout in `directory`. `limit`: seconds of an idle machine."""
    environ = environment(checkout) | dict(variables or {})
    return subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, timeout=patience(limit)
    )


def zero_tp(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `zero-tp ARGUMENTS` in `directory`."""
    return run([sys.executable, "-m", "zero_tp", *arguments], directory, variables=variables)


def forked_zero_tp(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `zero-tp ARGUMENTS` in a process that does not import the libraries again."""
    with tempfile.TemporaryDirectory() as folder:
        files = (Path(folder, "stdout"), Path(folder, "stderr"))
        process = preloaded_context().Process(
            target=_main_in_fork, args=(directory, arguments, environment(), files)
        )
        process.start()
        process.join(patience(240))
        if process.exitcode is None:
            process.kill()
        assert process.exitcode is not None, f"{arguments} did not end"
        return subprocess.CompletedProcess(
            arguments, process.exitcode, *(file.read_text() for file in files)
        )


def _main_in_fork(
    directory: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    files: tuple[Path, Path],
) -> None:
    from zero_tp import __main__ as module

    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.argv = [str(module.__file__), *arguments]
    module.main()


def launch(
    world: int,
    launcher: str = "deepspeed",
    script: str = "launch/pretrain.py",
    checkout: Path = ROOT,
) -> list[str]:
    """The words that start a script on `world` CPU ranks, by "deepspeed", "launch.py" or
    "torchrun".

    "launch.py" is the process that DeepSpeed's runner starts: the runner's imports take as long as
    all the rest.
    """
    machines = json.dumps({"localhost": list(range(world))}).encode()
    words = {
        "deepspeed": ["deepspeed.launcher.runner", "--num_accelerators", str(world)],
        "launch.py": [
            "deepspeed.launcher.launch",
            f"--world_info={base64.urlsafe_b64encode(machines).decode()}",
            "--master_addr=127.0.0.1",
        ],
        "torchrun": ["torch.distributed.run", "--nproc_per_node", str(world)],
    }[launcher]
    port = f"--master_port={free_port()}"
    return [sys.executable, "-m", *words, port, str(checkout / script)]


def pretrain(
    world: int, directory: Path, *arguments: str, launcher: str = "deepspeed"
) -> subprocess.CompletedProcess[str]:
    return run([*launch(world, launcher), *arguments], directory)


def script(
    name: str, directory: Path, *arguments: str, checkout: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(checkout / name), *arguments], directory, checkout=checkout)


def said(output: str) -> list[str]:
    """The lines that are not the launcher's."""
    return [line for line in output.splitlines() if line.strip() and not LAUNCHER_LINE.match(line)]


def metrics_of(run_directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_directory / METRICS_FILE).read_text().splitlines()]


def furnish(directory: Path) -> Path:
    """Put a prepared corpus and a small config, small.json, into `directory`."""
    (directory / "tests").symlink_to(ROOT / "tests")
    # The first page of each speech: all of them would take a launch's time to tokenise.
    with gzip.open(ROOT / "launch" / "corpus" / "sotu.jsonl.gz", "rt") as speeches:
        texts = [json.loads(line)["text"][:3000] for line in speeches]
    lines = [json.dumps({"text": text}) for text in texts]
    (directory / "texts.jsonl").write_text("\n".join(lines))
    words = (
        "--input",
        "texts.jsonl",
        "--tokenizer",
        "bpe:512",
        "--output",
        "data",
        "--processes",
        "1",
    )
    prepared = script("launch/prepare_data.py", directory, *words)
    assert prepared.returncode == 0, prepared.stderr
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": 2},
        },
        "zero_optimization": {"stage": 2},
        "csv_monitor": {"enabled": True},
        "zero_tp": {
            "model": {
                **{
                    "model_type": "gpt2",
                    "n_layer": 2,
                    "n_embd": 64,
                    "n_head": 4,
                    "n_positions": 64,
                },
                "vocab_size": 512,
            },
            "parallel": {"tensor": 2},
            "data": {"train": "data/train", "validation": "data/validation", "sequence_length": 64},
            "training": {"steps": 8},
            "checkpoint": {"interval": 3, "keep": 2},
            "evaluation": {"interval": 4, "batches": 2},
        },
    }
    (directory / "small.json").write_text(json.dumps(config))
    return directory
