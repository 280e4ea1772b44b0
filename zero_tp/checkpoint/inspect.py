"""`inspect` describes a checkpoint, from its manifest and the headers of its files; it reads no tensor."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from zero_tp.checkpoint.directory import (
    MANIFEST,
    Damaged,
    check_content,
    check_sizes,
    complete_steps,
    find_checkpoint,
    incomplete_since,
    passed_over,
    read_manifest,
)
from zero_tp.checkpoint.manifest import Manifest, Parallelism
from zero_tp.checkpoint.reader import RANDOM, tensor_name
from zero_tp.errors import first_line, one_line
from zero_tp.tensors.safetensors_files import read_header

SIZES = (
    *("n_layer", "n_embd", "n_head", "n_positions"),
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "vocab_size"),
)


def inspect(source: Path, *, verify: bool = False) -> dict[str, Any]:
    """Describe `source`, a run (its newest checkpoint) or a checkpoint.

    Args:
        verify: also read every file from end to end and compare its checksum, under a progress bar.

    Returns:
        What `zero-tp inspect --json` prints. `steps`: of the run's complete checkpoints; none if `source` is a
        checkpoint. `incomplete`: a line on each newer directory that is no checkpoint. `bytes`: by kind (masters,
        moments, random streams). `files`: name → bytes and sha256. `parent`: the checkpoint that the run was started
        from. The other keys say what they are called.

    Raises:
        UserError: neither a run nor a checkpoint.
        Damaged: names the first file that is missing, of another size, or with `verify` of other content; with `verify`
            also a newer directory without a manifest.
    """
    checkpoint = find_checkpoint(source)
    manifest = read_manifest(checkpoint)
    if verify and (newer := incomplete_since(source, manifest.step)):
        raise Damaged(newer[-1] / MANIFEST, "is missing")
    check = check_content if verify else check_sizes
    check(checkpoint, manifest.files)
    return {
        "checkpoint": str(checkpoint),
        "steps": complete_steps(source),
        "incomplete": list(passed_over(source, manifest.step)),
        "step": manifest.step,
        "saved_at": Parallelism.saved(manifest)._asdict(),
        "model": manifest.model,
        "parameters": sum(math.prod(entry.shape) for entry in manifest.parameters.values()),
        "bytes": _bytes_by_kind(checkpoint, manifest),
        "files": {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in manifest.files.items()},
        "tokenizer": manifest.tokenizer,
        "versions": manifest.versions,
        "parent": None if manifest.parent is None else manifest.parent.model_dump(),
        "verified": verify,
    }


def _bytes_by_kind(checkpoint: Path, manifest: Manifest) -> dict[str, int]:
    """Add up the bytes of the tensors of each kind, over all files.

    Raises:
        Damaged: a file holds what it should not.
    """
    known = {tensor_name(name, kind): kind for name in manifest.parameters for kind in manifest.kinds}
    kinds: Counter[str] = Counter(dict.fromkeys(manifest.kinds, 0))
    for file in sorted(manifest.files):
        for tensor, size in _tensor_bytes(checkpoint / file).items():
            kind = RANDOM if tensor.startswith(f"{RANDOM}/") else known.get(tensor)
            if kind is None:
                raise Damaged(checkpoint / file, f"holds {tensor}, which is nothing of this checkpoint")
            kinds[kind] += size
    return dict(kinds)


def _tensor_bytes(file: Path) -> dict[str, int]:
    try:
        header = read_header(file)[0]
        offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(file, f"cannot be read ({first_line(error)})") from error
    return {name: stop - start for name, (start, stop) in offsets.items()}


def table(report: dict[str, Any]) -> str:
    """Format a report of `inspect` as a table."""
    model = report["model"]
    sizes = ", ".join(f"{name} {model[name]:,}" for name in SIZES if name in model)
    total = sum(entry["bytes"] for entry in report["files"].values())
    rows = [
        ("checkpoint", report["checkpoint"]),
        ("step", f"{report['step']:,}"),
        ("saved at", str(Parallelism(**report["saved_at"]))),
        ("model", f"{model['model_type']}: {sizes}"),
        ("parameters", f"{report['parameters']:,}"),
        *((kind, _size(size)) for kind, size in report["bytes"].items()),
        ("tokenizer", report["tokenizer"] or "none"),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
        ("manifest", "its content has the hash that it says"),
        ("files", f"{len(report['files'])}, {_size(total)}" + (", every checksum OK" if report["verified"] else "")),
        *(("", f"{name}  {_size(entry['bytes'])}") for name, entry in sorted(report["files"].items())),
    ]
    if report["parent"]:
        parent = f"{report['parent']['checkpoint']}, which had seen {report['parent']['tokens']:,} tokens"
        rows.insert(3, ("parent", parent))
    if report["steps"]:
        rows.insert(1, ("complete", "steps " + ", ".join(f"{step:,}" for step in report["steps"])))
    rows += [("passed over", line) for line in report["incomplete"]]
    return "\n".join(f"{name:<11} {one_line(text)}" for name, text in rows)


def _size(count: int) -> str:
    """Write bytes in MB or GB, powers of ten."""
    return f"{count / 1e9:,.3f} GB" if count >= 1e9 else f"{count / 1e6:,.3f} MB"
