"""Records what short runs compute, so that two versions of the code can be compared bit for bit.

    python -m tests.tools.recorded_runs record before.json [--checkout DIR] [--only NUMBER]…
    python -m tests.tools.recorded_runs compare before.json after.json

A record holds every step's loss and gradient norm, the validation losses, and the SHA-256 of each
exported tensor. The runs are the parity matrix' first cells (tests/support/matrix.py), which
together have every setting, with each causal family in turn. The `deepspeed` launcher starts each
with one thread a rank; it ends in the middle and is resumed. The file is written after each run,
and runs that it holds already are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from itertools import cycle
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.families import ENCODERS, EXPERTS, FAMILIES
from tests.support.launched import ROOT, launch, metrics_of, run, script
from tests.support.matrix import WORLD, config_of, describe, first_cells
from tests.support.mistakes import with_changes
from tests.support.plain_run import STEPS
from tests.support.tiny_models import write_corpus
from zero_tp.base.files import write_atomically

VOCABULARY = 85  # of the smallest model
SETTINGS: dict[str, Any] = {
    "zero_tp.training.guard_interval": 1,
    "zero_tp.checkpoint.interval": STEPS // 2,
    "zero_tp.evaluation": {"interval": STEPS, "batches": 2},
}
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {f"zero_tp.model.{name}_pdrop": 0.1 for name in ("resid", "embd", "attn")},
    "grouped queries": {"zero_tp.data.document_attention": "reset"},
}
"""What the parity matrix leaves out, by family."""


def configs(corpus: Path) -> dict[str, dict[str, Any]]:
    """The JSON config of each run by its name."""
    families = cycle(family for family in (*FAMILIES, *EXPERTS) if family not in ENCODERS)
    data = {f"zero_tp.data.{split}": str(corpus) for split in ("train", "validation")}
    return {
        describe(cell, family): with_changes(
            config_of(cell, family=family), SETTINGS | data | MORE.get(family, {})
        )
        for cell, family in zip(first_cells(), families, strict=False)
    }


def _succeeded(done: CompletedProcess[str]) -> None:
    if done.returncode:
        raise SystemExit(
            f"{done.args}: exit status "
            f"{done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )


def record(checkout: Path, numbers: list[int] | None, file: Path) -> None:
    """Write what runs compute with the code of `checkout`, all or those of these numbers; those
    in `file` stay.
    """
    records: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        tokens = torch.randint(VOCABULARY, (200, 40), generator=torch.Generator().manual_seed(0))
        runs = configs(write_corpus(directory / "corpus", tokens.numpy(), VOCABULARY))
        for number, (name, config) in enumerate(runs.items()):
            if name in records or number not in (numbers or range(len(runs))):
                continue
            run_file, output, exported = (
                directory / f"{kind}{number}" for kind in ("config", "run", "export")
            )
            run_file.write_text(json.dumps(config))
            for steps in (STEPS // 2, STEPS):
                arguments = ["--deepspeed_config", str(run_file), "--output-dir", str(output)]
                arguments += ["--set", f"zero_tp.training.steps={steps}"]
                _succeeded(
                    run([*launch(WORLD, checkout=checkout), *arguments], directory, 900, checkout)
                )
            convert = (
                "launch/convert.py",
                directory,
                "to-hf",
                str(output),
                "--output",
                str(exported),
            )
            _succeeded(script(*convert, checkout=checkout))
            fields = ("step", "loss", "grad_norm", "validation_loss")
            metrics = [
                {key: line[key] for key in fields if key in line} for line in metrics_of(output)
            ]
            records[name] = {"metrics": metrics, "weights": _weights(exported)}
            write_atomically(file, json.dumps(records, indent=1) + "\n")
            print(f"{number} {name}: {metrics[-2]}", flush=True)


def _weights(exported: Path) -> dict[str, str]:
    """SHA-256 of each tensor of a model directory, its dtype and shape included."""
    hashes = {}
    for file in sorted(exported.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            content = tensor.contiguous().view(-1).view(dtype=torch.uint8).numpy().tobytes()
            hashes[name] = hashlib.sha256(
                f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content
            ).hexdigest()
    return hashes


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each run that is not the same in both, or in one of them only."""
    lines = []
    for name in dict.fromkeys((*before, *after)):
        if name not in before or name not in after:
            lines.append(f"{name}: recorded once only")
        elif before[name] != after[name]:
            parts = [part for part in before[name] if before[name][part] != after[name][part]]
            lines.append(f"{name}: other {' and '.join(parts)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--checkout", type=Path, default=ROOT)
    recording.add_argument("--only", action="append", type=int, metavar="NUMBER")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        record(options.checkout.resolve(), options.only, options.file)
        return
    before, after = (json.loads(file.read_text()) for file in (options.before, options.after))
    differences = compare(before, after)
    print("\n".join(differences) or f"{len(before)} runs are equal bit for bit")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
