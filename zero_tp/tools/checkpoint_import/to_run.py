"""`zero-tp convert to-run`: a run's first checkpoint, from another trainer's."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from zero_tp.base.errors import UserError
from zero_tp.base.files import partial_directory, put_in_place
from zero_tp.base.versions import versions
from zero_tp.engine.zero.states import MASTER
from zero_tp.model.architectures import weights_of
from zero_tp.model.model_class import meta_model
from zero_tp.parallel.layout import stored_tensors
from zero_tp.parallel.safetensors_files import Entry, write_tensors
from zero_tp.run.checkpoint import directory
from zero_tp.run.checkpoint.imported import Imported, ImportedGroup, ImportedOptimizer
from zero_tp.run.checkpoint.manifest import Parallelism, states_file
from zero_tp.run.checkpoint.reader import STARTS, ParameterLayout, tensor_name
from zero_tp.run.checkpoint.save import describe_tokenizer
from zero_tp.tools.checkpoint_import.command import read_config
from zero_tp.tools.checkpoint_import.formats import FORMATS, open_checkpoint
from zero_tp.tools.checkpoint_import.source import ParameterReader, SourceCheckpoint, SourceStates

NO_UPDATES = {"global_steps": 0, "global_samples": 0, "skipped_steps": 0}


def convert_to_run(options: argparse.Namespace) -> list[str]:
    """Convert a checkpoint as the options say; return lines on the result."""
    if options.format is not None and options.format not in FORMATS:
        raise UserError(f"--format {options.format}: give one of {', '.join(FORMATS)}")
    checkpoint = open_checkpoint(
        options.source,
        name=options.format,
        step=options.step,
        config=read_config(options.config),
        vocabulary=None,
    )
    result = write_run(checkpoint, options.output, options.ignore)
    states = checkpoint.states
    summary = (
        f"kept: masters, moments, {states.steps} updates"
        + ("" if states.schedule_start is None else ", the schedule's position")
        if states is not None
        else f"kept: weights alone, because {checkpoint.states_problem}"
    )
    return [
        f"{checkpoint.folder} ({checkpoint.trainer}, {checkpoint.config.model_type}) → "
        f"{result.checkpoint}",
        f"tensors: {result.read} read, {result.unused} unused",
        *result.notes,
        summary,
        "next: run zero_tp.pretrain with a --deepspeed_config of this model and "
        f"--output-dir {options.output}",
    ]


@dataclass(frozen=True)
class RunImport:
    """The checkpoint that was written, and how many tensors of the source were read or left."""

    checkpoint: Path
    read: int
    unused: int
    notes: tuple[str, ...]


def write_run(checkpoint: SourceCheckpoint, run: Path, ignored: Sequence[str] = ()) -> RunImport:
    """Write a run's directory with one checkpoint.

    Raises:
        UserError: the directory exists; a tensor is missing, unknown or of another shape; a
            parameter was frozen.
    """
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UserError(f"{run}: exists already; give another --output")
    readers = {MASTER: ParameterReader(checkpoint, ignored)}
    states = checkpoint.states
    names = _trained_names(checkpoint)
    if states is not None:
        _check_trained(checkpoint, states, names)
        for kind, moments in states.moments.items():
            # Buffers have no moments.
            tensors = {**checkpoint.tensors, **moments}
            readers[kind] = ParameterReader(replace(checkpoint, tensors=tensors), ignored)
    described = _layouts(checkpoint)
    entries = [
        Entry(
            tensor_name(name, kind),
            (math.prod(layout.shape),),
            torch.float32,
            partial(_read, reader, name),
        )
        for name, layout in described.items()
        for kind, reader in readers.items()
        if kind == MASTER or name in names
    ]
    step = 0 if states is None else states.counters["global_steps"]
    with partial_directory(run) as temporary:
        writing = directory.begin(temporary)
        file = states_file(0, 0)
        starts = json.dumps(dict.fromkeys(described, 0))
        files = {file: write_tensors(writing / file, entries, {STARTS: starts})}
        manifest = _manifest(checkpoint, described, list(readers))
        directory.commit(temporary, writing, step, manifest, files)
        put_in_place(temporary, run)
    weights = readers[MASTER]
    kinds = len(readers) - 1
    trained = sum(len(native) for native in names.values())
    return RunImport(
        directory.step_directory(run, step),
        len(weights.used) + kinds * trained,
        len(checkpoint.tensors.keys() - weights.used),
        (*checkpoint.notes, *weights.notes),
    )


def _read(reader: ParameterReader, name: str) -> Tensor:
    return reader.read(name).float().flatten().contiguous()


def _trained_names(checkpoint: SourceCheckpoint) -> dict[str, tuple[str, ...]]:
    """Return our parameter → the tensors of transformers' class that it consists of."""
    weights = {weight.our_name: weight for weight in checkpoint.weights}
    return {
        weight.our_name: weights[weight.our_name].names
        for weight in weights_of(checkpoint.config)
        if weight.is_parameter and weight.our_name in weights
    }


def _check_trained(
    checkpoint: SourceCheckpoint, states: SourceStates, names: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuse frozen parameters, and parameters whose parts are in groups of different decay."""
    parts = {part for native in names.values() for part in native}
    frozen = sorted(parts.intersection(states.frozen))
    if frozen:
        raise UserError(
            f"{checkpoint.folder}: {frozen[0]} was frozen, and a run trains all parameters; export "
            "the weights with to-hf, and start from them with zero_tp.model.from_pretrained"
        )


def _layouts(checkpoint: SourceCheckpoint) -> dict[str, ParameterLayout]:
    """Return the layout of each parameter and buffer of a run on one rank."""
    model = meta_model(checkpoint.config)
    return {name: ParameterLayout.of(tensor) for name, tensor in stored_tensors(model)}


def _manifest(
    checkpoint: SourceCheckpoint, described: Mapping[str, ParameterLayout], kinds: list[str]
) -> dict[str, Any]:
    """Return a manifest without format, step, files and hash."""
    states = checkpoint.states
    stage, dtype = (0, "fp32") if states is None else (states.zero_stage, states.dtype)
    config = checkpoint.config
    imported = Imported(
        trainer=checkpoint.trainer,
        checkpoint=str(checkpoint.folder.absolute()),
        optimizer=None if states is None else _optimizer(checkpoint, states),
    )
    start = states.schedule_start if states is not None else None
    return {
        **Parallelism(1, 1, False, stage, dtype).to_json(),
        "model": config.to_dict(),
        "generation": GenerationConfig.from_model_config(config).to_dict(),
        "parameters": {name: layout.to_json() for name, layout in described.items()},
        "kinds": kinds,
        "progress": {
            "optimizer_steps": None if states is None else states.steps,
            "counters": NO_UPDATES if states is None else dict(states.counters),
            "schedule": None,
            "learning_rates": [],
            "loss_scale": {} if states is None else dict(states.loss_scale),
            **({"schedule_start": start} if start else {}),
        },
        "fixed": {},
        "corpora": {},
        **describe_tokenizer(None, None, Path()),
        "versions": versions(),
        "imported": imported.model_dump(),
        "config": {},
    }


def _optimizer(checkpoint: SourceCheckpoint, states: SourceStates) -> ImportedOptimizer:
    """Return the settings of the source's Adam, with our names."""
    owners = {name: number for number, (_, names) in enumerate(states.groups) for name in names}
    members: dict[int, list[str]] = {number: [] for number in range(len(states.groups))}
    for our_name, names in _trained_names(checkpoint).items():
        numbers = {owners[name] for name in names}
        values = {
            (states.groups[number][0]["lr"], states.groups[number][0]["weight_decay"])
            for number in numbers
        }
        if len(values) > 1:
            raise UserError(
                f"{checkpoint.folder}: {' and '.join(names)} are one parameter here, and were in "
                "groups of different rates or decay; only equal ones can be continued"
            )
        members[min(numbers)].append(our_name)
    first = states.groups[0][0]
    return ImportedOptimizer(
        betas=tuple(first["betas"]),
        eps=first["eps"],
        decoupled=states.decoupled,
        has_schedule=states.schedule_start is not None,
        groups=[
            ImportedGroup(
                lr=settings["lr"],
                weight_decay=settings["weight_decay"],
                parameters=members[number],
            )
            for number, (settings, _) in enumerate(states.groups)
        ],
    )
