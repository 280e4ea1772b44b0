"""Convert a run's checkpoint to a Hugging Face model directory. Needs no ranks and no accelerator.

    %(prog)s to-hf runs/quickstart --output exports/quickstart
    %(prog)s to-hf CHECKPOINT --tokenizer DIR --output exports/large
    %(prog)s average runs/large --steps 4000,4500,5000 --output exports/large

The weights are the fp32 masters that the optimizer keeps, or their mean over checkpoints, read one
at a time; AutoModelForCausalLM opens the result. to-hf reads the checkpoints of other trainers,
too, of which no code is run.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from zero_tp.base.constants import DTYPES
from zero_tp.base.errors import UserError, first_line, show
from zero_tp.commands import inspect
from zero_tp.tools.checkpoint_import.steps import step_folders

FORMAT_NAMES = (
    *("megatron", "megatron-deepspeed", "gpt-neox", "nanotron", "deepspeed", "universal"),
    *("olmo-core", "torchtitan"),
)
"""The trainers whose checkpoints are read; the parser needs them before torch is imported."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="to-hf|average|to-run|to-universal"
    )
    to_hf = actions.add_parser("to-hf", help="write a Hugging Face model directory")
    to_hf.add_argument(
        "--ema",
        action="store_true",
        help="export the moving average of the weights that the run kept",
    )
    _add_import_arguments(to_hf)
    _add_export_arguments(to_hf)
    to_hf.add_argument(
        "source",
        type=Path,
        metavar="RUN|CHECKPOINT",
        help="a run (its newest checkpoint), RUN/checkpoints/step_N, or another trainer's folder",
    )
    average = actions.add_parser(
        "average", help="write the mean of a run's checkpoints as a Hugging Face model directory"
    )
    average.add_argument(
        "--steps",
        type=partial(_numbers, int, "steps such as 4000,4500"),
        required=True,
        metavar="STEP,…",
        help="of the checkpoints, saved on any topologies; routers' biases are the last one's",
    )
    average.add_argument(
        "--weights",
        type=partial(_numbers, float, "weights such as 1,2"),
        metavar="W,…",
        help="of each step, of which only proportions count (default: equal ones)",
    )
    _add_export_arguments(average)
    average.add_argument("source", type=Path, metavar="RUN", help="the run's directory")
    to_run = actions.add_parser(
        "to-run", help="write a run that pretrain continues, from another trainer's checkpoint"
    )
    to_run.add_argument(
        "--output", type=Path, required=True, metavar="RUN", help="the run; must not exist yet"
    )
    _add_source_arguments(to_run)
    to_run.add_argument("source", type=Path, metavar="SOURCE", help="the other trainer's folder")
    to_universal = actions.add_parser(
        "to-universal", help="write a checkpoint that DeepSpeed loads with load_universal"
    )
    to_universal.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="where to write; must be empty"
    )
    inspect.add_source(to_universal)
    inspect.add_arguments(actions.add_parser("inspect"))  # is refused: earlier versions had it


def _numbers(kind: Callable[[str], Any], example: str, text: str) -> list[Any]:
    """Return the numbers of a list with commas."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {example}") from None


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="where to write; must not exist yet",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DIR when it exists")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the weights (default: fp32; of another trainer's, what it stores)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="tokenizer's directory or hub name (default: the run's)",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a weights file (default: 5GB)"
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="then upload DIR to the Hugging Face hub, into a private repository if new",
    )


def _add_import_arguments(parser: argparse.ArgumentParser) -> None:
    group = _add_source_arguments(parser)
    group.add_argument(
        "--verify-text",
        type=Path,
        metavar="FILE",
        help="the text on which the result must be better than a guess (default: a shipped page)",
    )
    group.add_argument("--verify-ids", type=Path, metavar="FILE", help="the same, as tokens' ids")
    group.add_argument("--no-verify", action="store_true", help="do not score the result")


def _add_source_arguments(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("checkpoints of other trainers")
    group.add_argument(
        "--format", metavar="NAME", help=f"{', '.join(FORMAT_NAMES)} (default: what the files tell)"
    )
    group.add_argument("--step", type=int, metavar="N", help="which step (default: the last)")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config.json of the model (default: what the trainer recorded)",
    )
    group.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="tensors that the model lacks, such as 'rope.*'; may be repeated",
    )
    return group


def import_other(options: argparse.Namespace) -> None:
    """Convert the checkpoint of another trainer."""
    from zero_tp.tools.checkpoint_import.command import convert

    if options.ema:
        raise UserError("--ema: only checkpoints of zero_tp keep an average; leave it out")
    try:
        lines = convert(options)
    except OSError as error:
        raise _write_error(options.output, error) from error
    show(*lines)
    if options.push:
        show(f"uploaded to {push(options.output, options.push)}")


def import_run(options: argparse.Namespace) -> None:
    """Write a run from the checkpoint of another trainer."""
    if is_own(options.source):
        raise UserError(
            f"{options.source}: no checkpoint of another trainer; start from a run of zero_tp with "
            "pretrain --from"
        )
    from zero_tp.tools.checkpoint_import.to_run import convert_to_run

    show(*convert_to_run(options))


def export_universal(options: argparse.Namespace) -> None:
    """Write a run's checkpoint for DeepSpeed."""
    from zero_tp.run.checkpoint.find import find_checkpoint

    find_checkpoint(options.source)  # report a wrong path before torch is imported
    from zero_tp.tools.checkpoint_import.to_universal import convert_to_universal

    show(*convert_to_universal(options.source, options.output))


def is_own(source: Path) -> bool:
    """Return whether this is a run or a checkpoint of zero_tp, or nothing at all."""
    if not source.is_dir() or any(
        (source / name).exists() for name in ("manifest.json", "run.json")
    ):
        return True
    inside = source / "checkpoints"
    # Another trainer's folder may have one of this name, with steps of other names than ours.
    return inside.is_dir() and not step_folders(inside)


_IMPORT_OPTIONS = ("format", "step", "config", "ignore", "verify_text", "verify_ids", "no_verify")


def _refuse_import_options(options: argparse.Namespace) -> None:
    """Refuse options that only checkpoints of other trainers have."""
    for name in _IMPORT_OPTIONS:
        value = getattr(options, name, None)  # `average` has none of them
        if value is not None and value is not False and value != []:
            remedy = "give the checkpoint's folder" if name == "step" else "leave it out"
            raise UserError(
                f"--{name.replace('_', '-')}: {options.source} is of zero_tp, and the option is "
                f"for other trainers' checkpoints; {remedy}"
            )


def _write_error(output: Path, error: OSError) -> Exception:
    """Return the error to raise. One that names its file says enough; a full disk names none."""
    if error.filename is not None:
        return error
    return UserError(f"{output}: can't be written ({error.strerror}); give another --output")


def export(options: argparse.Namespace) -> None:
    from zero_tp.run.checkpoint.find import find_checkpoint

    find_checkpoint(options.source)  # report a wrong path before torch is imported
    _refuse_import_options(options)
    import torch

    from zero_tp.run.checkpoint.convert import average_checkpoints, to_huggingface
    from zero_tp.tools.report.card import model_card

    arguments: dict[str, Any] = {
        "dtype": getattr(torch, DTYPES[options.dtype or "fp32"]),
        "tokenizer": options.tokenizer,
        "max_shard_size": options.max_shard_size,
        "overwrite": options.overwrite,
        "card": model_card,
    }
    source, output = options.source, options.output
    try:
        if options.action == "average":
            steps, weights = options.steps, options.weights
            converted = average_checkpoints(source, steps, output, weights=weights, **arguments)
        else:
            converted = to_huggingface(source, output, ema=options.ema, **arguments)
    except OSError as error:
        raise _write_error(options.output, error) from error
    show(
        f"{converted.checkpoint} → {options.output} ({converted.parameters:,} parameters, "
        f"{options.dtype or 'fp32'})"
    )
    show(*([f"weights: {converted.weights}"] if converted.weights else []))
    show(*converted.notes)
    show(
        f"tokenizer from {converted.tokenizer}"
        if converted.tokenizer
        else "without a tokenizer; --tokenizer DIR adds one"
    )
    if options.push:
        show(f"uploaded to {push(options.output, options.push)}")
    if converted.causal and converted.tokenizer is not None:
        show(f'next: run zero-tp sample --model {shlex.quote(str(options.output))} --prompt "TEXT"')


def push(directory: Path, name: str) -> str:
    """Upload an exported model to the Hugging Face hub; return its address.

    It uses the token of `hf auth login`.

    Raises:
        UserError: the name is invalid, the hub cannot be reached, or it refuses the model.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        # Private, because publishing is a decision of its own.
        repository = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository.repo_id, folder_path=directory)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        remedy = f"after `hf auth login`, upload {directory} with `hf upload {name} {directory}`"
        raise UserError(f"--push {name}: {first_line(error)}; {remedy}") from error
    return str(repository)


def main(options: argparse.Namespace) -> None:
    if options.action == "inspect":
        source = shlex.quote(str(options.source))
        raise UserError(
            f"inspect: convert does not describe checkpoints; run zero-tp inspect {source}"
        )
    if options.action == "to-run":
        import_run(options)
    elif options.action == "to-universal":
        export_universal(options)
    elif options.action == "to-hf" and not is_own(options.source):
        import_other(options)
    else:
        export(options)
