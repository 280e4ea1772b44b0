"""Check a run's JSON file without ranks: keys, combinations, batch sizes, and whether its data
exist.

The exit status is 0 if a run can start, 1 if FILE is valid but a file or directory that a run reads
is missing, and 2 if FILE is invalid: one line for each wrong key or, if all keys are valid, for
each refused combination.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zero_tp.base.constants import in_gib
from zero_tp.base.errors import BAD_INPUT, UserError, error_line, show
from zero_tp.base.settings.optimizer import Muon
from zero_tp.commands.options import FILE, add_config, add_parent, add_settings
from zero_tp.run.config.explain import explain

if TYPE_CHECKING:
    from zero_tp.run.config import RunConfig
    from zero_tp.run.run_inputs import RunInputs
    from zero_tp.tools.planning.memory import ModelSize

MISSING = 1
"""The exit status if the config is valid but a file or directory that the run reads is missing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "file", FILE)
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="the number of ranks to check it for"
    )
    parser.add_argument(
        "--explain", metavar="KEY", help="print this key's value, its source and what reads it"
    )
    add_settings(parser)
    add_parent(parser)


def main(options: argparse.Namespace) -> int:
    """Return 0, 1 if only data are missing, or 2 after a line for each error."""
    from deepspeed.accelerator import get_accelerator

    from zero_tp.base.validation import ConfigErrors
    from zero_tp.base.weight_files import find_weights, resolve
    from zero_tp.run.config import RunConfig
    from zero_tp.run.process.connect import check_accelerator
    from zero_tp.tools.monitors.trackers import check_installed

    try:
        config = RunConfig.load(options.file, options.set, options.world_size)
    except ConfigErrors as errors:
        show(*map(error_line, errors.errors), file=sys.stderr)
        return BAD_INPUT
    if options.explain is not None:
        show(explain(config, options.set, options.explain))
        return 0
    check_installed(config)
    check_accelerator(config.dtype, get_accelerator())
    absent = config.missing_files()
    inputs = None
    if config.pretrained is not None and config.pretrained not in absent:
        find_weights(
            resolve(config.pretrained, allow_pickle=options.allow_pickle), options.allow_pickle
        )
    directory = options.output_dir or Path("runs") / config.name
    # The nearest directory that exists decides whether the run can make its own.
    existing = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )
    if not existing.is_dir():
        raise UserError(
            f"{directory}: cannot be a run's directory ({existing} is a file); give another "
            "--output-dir"
        )
    if not absent:
        from zero_tp.run.run_inputs import RunInputs

        # The same checks that each rank makes before it connects.
        inputs = RunInputs(config, directory, allow_pickle=options.allow_pickle)
        if options.parent is not None:
            from zero_tp.run.checkpoint.find import find_checkpoint
            from zero_tp.run.checkpoint.parent import check_parent

            parent = find_checkpoint(options.parent)
            inputs.notes += parent.notes
            inputs.notes += check_parent(parent, config, inputs.model_config, inputs.fingerprint)
        inputs.notes += _export_notes(inputs)
    show(describe(config, directory, inputs, options.parent))
    # What the hub has is not missing: the run downloads it.
    return MISSING if any(str(path) not in config.hub_names for path in absent) else 0


Lines = Iterator[tuple[str, str]]
"""(label, text) of each line."""


def describe(
    config: RunConfig, directory: Path, inputs: RunInputs | None = None, parent: Path | None = None
) -> str:
    """Return the description of a valid config.

    Args:
        directory: of the run.
        inputs: None if something that the run reads is missing.
        parent: the run or checkpoint that the run starts from.
    """
    from zero_tp.tools.planning.memory import run_model_size

    absent = config.missing_files()
    missing = ", ".join(str(path) for path in absent if str(path) not in config.hub_names)
    missing = f", but these are missing: {missing}" if missing else ""
    model = run_model_size(config)
    lines = [
        ("config", f"{config.path} is valid{missing}"),
        *_settings(config, model.num_parameters),
        *(_stages(config, inputs) if config.has_timeline else ()),
        *_model_states(config, model),
        ("weights", _initial_weights(config, directory, parent)),
        *_corpora(config, inputs),
        *(("no effect", text) for text in config.without_effect()),
        *(
            ("note", text)
            for text in (*config.cautions(), *(inputs.notes if inputs is not None else ()))
        ),
        *(("not here", _missing(path, config)) for path in absent),
    ]
    if absent and parent is not None:
        lines.append(("unchecked", f"--from {parent}: first add the missing files"))
    return "\n".join(f"{name:<10} {text}" for name, text in lines)


def _settings(config: RunConfig, parameters: int) -> Lines:
    """Describe the model, the batch and the schedule."""
    block = config.zero_tp
    batch = config.batch
    optimizer = config.settings.optimizer
    tensor = block.parallel.tensor
    length = block.data.sequence_length
    steps = block.training.steps
    model = config.hf_config()
    kind = f"{model.model_type}, {model.num_hidden_layers} layers, hidden {model.hidden_size}"
    sizes = f"{model.num_attention_heads} heads, vocabulary {model.vocab_size:,}"
    yield "model", f"{kind}, {sizes}: {parameters:,} parameters"
    others = ", sequence parallel" if block.parallel.sequence and tensor > 1 else ""
    if block.parallel.expert > 1:
        others += f", expert {block.parallel.expert}"
    if config.world_size is None:
        yield (
            "ranks",
            f"a multiple of {tensor * block.parallel.expert} (tensor {tensor} × data ?){others}; "
            "--world-size N checks batch sizes",
        )
    else:
        yield (
            "ranks",
            f"{config.world_size} = tensor {tensor} × data {config.data_parallel}{others}",
        )
    yield "ZeRO", f"stage {config.zero_stage}, {config.dtype}"
    factors = (
        ("micro", batch.micro),
        ("accumulation", batch.accumulation),
        ("data", batch.data_parallel),
    )
    yield (
        "batch",
        f"{batch.total or '?'} samples = "
        + " × ".join(f"{name} {size or '?'}" for name, size in factors),
    )
    assert optimizer is not None, "a run's config has one"
    rate = optimizer.params.lr
    clip = config.settings.gradient_clipping
    yield "optimizer", f"{optimizer.type}, lr {rate:g}, clip {clip:g}"
    yield from _parameter_groups(config)
    yield "schedule", _schedule(config)
    step_tokens = "?" if batch.total is None else f"{batch.total * length:,}"
    total = f"{config.timeline.tokens:,}" if config.has_timeline else "?"
    if block.training.stages:
        yield "steps", f"{steps:,} of {len(config.stages)} stages: {total} tokens"
    else:
        yield (
            "steps",
            f"{steps:,} of {step_tokens} tokens (sequence length {length:,}): {total} tokens",
        )
    ramp = block.training.batch_size_rampup
    if ramp is not None:
        yield (
            "ramp",
            f"from {ramp.start:,} samples by {ramp.increment:,} over {ramp.tokens:,} tokens",
        )


def _stages(config: RunConfig, inputs: RunInputs | None) -> Lines:
    """Describe what each stage trains on, and its rates at its first and last step."""
    from zero_tp.engine.zero.lr_schedules import rates

    optimizer = config.settings.optimizer
    assert optimizer is not None, "a run's config has one"
    timeline = config.timeline
    head = ("stage", "steps", "tokens", "length", "batch", "lr", "corpora: tokens, epochs")
    table = [head]
    for index, stage in enumerate(config.stages if config.zero_tp.training.stages else ()):
        steps = timeline.stage_steps(index)
        origin = timeline.first_steps[stage.schedule_stage] if stage.schedule is not None else 1
        own_steps = [step - origin + 1 for step in (steps[0], steps[-1])]
        schedule = stage.schedule or config.settings.scheduler
        points = rates(schedule, optimizer.params.lr, own_steps)
        tokens = timeline.stage_tokens(index)
        shares = sum(stage.data.values())
        corpora = [
            f"{prefix}: {round(tokens * weight / shares):,}"
            + ("" if inputs is None else f", {inputs.epochs(prefix, [index]):.3g}")
            for prefix, weight in stage.data.items()
        ]
        first = timeline.step_samples(steps[0]).samples
        grown = timeline.step_samples(steps[-1]).samples
        table.append(
            (
                stage.name,
                f"{steps[0]:,}-{steps[-1]:,}",
                f"{tokens:,}",
                f"{stage.length:,}",
                f"{first:,}" if first == grown else f"{first:,}-{grown:,}",
                " → ".join(f"{stage.lr_scale * rate:.3g}" for rate in points),
                "; ".join(corpora),
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table if len(table) > 1 else ():
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield "", "  ".join(cells).rstrip()
    if len(table) > 1 and config.zero_tp.data.validation:
        yield "", f"validation has samples of {config.zero_tp.data.sequence_length:,} in all stages"


def _parameter_groups(config: RunConfig) -> Lines:
    """Describe each group of `zero_tp.param_groups`, and Muon's. The two groups that every run has
    are no lines.
    """
    optimizer = config.settings.optimizer
    has_muon = optimizer is not None and isinstance(optimizer.params, Muon)
    for group in config.parameter_groups() if config.zero_tp.param_groups or has_muon else ():
        name = ("Muon, " if group.is_muon else "AdamW, ") if has_muon else ""
        yield (
            "group",
            f"{group.selector}: {name}tensors {group.num_tensors:,}, parameters "
            f"{group.num_parameters:,}, decay {group.weight_decay:g}, lr × {group.lr_scale:g}",
        )


def _schedule(config: RunConfig) -> str:
    """Return the schedule's type, and its rates at a few steps."""
    schedule = config.settings.scheduler
    optimizer = config.settings.optimizer
    steps = config.zero_tp.training.steps
    if schedule is None or optimizer is None:
        return "none: constant rate"
    if config.zero_tp.training.stages:
        return f"{schedule.type}; the table has the rates"
    from zero_tp.base.settings.schedule import WARMUPS
    from zero_tp.engine.zero.lr_schedules import rates

    written = schedule.arguments
    warmup = next((int(written[name]) for name in WARMUPS if name in written), 1)
    chosen = sorted({1, min(max(1, warmup), steps), (steps + 1) // 2, steps})
    points = zip(chosen, rates(schedule, optimizer.params.lr, chosen), strict=True)
    return f"{schedule.type}, lr " + ", ".join(
        f"{rate:.3g} at step {step:,}" for step, rate in points
    )


def _initial_weights(config: RunConfig, directory: Path, parent: Path | None) -> str:
    from zero_tp.run.checkpoint.directory import complete_steps

    if steps := complete_steps(directory):
        return f"of {directory}, which the run resumes from step {steps[-1]:,}"
    if parent is not None:
        return f"of {parent}, with its moments"
    return (
        f"of {config.pretrained}"
        if config.pretrained
        else f"drawn from the seed {config.zero_tp.training.seed}"
    )


def _model_states(config: RunConfig, model: ModelSize) -> Lines:
    """Describe a rank's memory for weights, gradients and optimizer, by ZeRO's formula."""
    from zero_tp.tools.planning.formulas import model_states_of_shares

    data = config.batch.data_parallel
    zero = config.settings.zero_optimization
    if data is None:
        return
    element_bytes = 4 if config.dtype == "fp32" else 2
    # The replicated parameters are few (norms, some biases), so the formula splits all.
    parallel = config.zero_tp.parallel
    shares = model.shares(parallel.tensor, parallel.expert, data)
    states = model_states_of_shares(shares, config.zero_stage, element_bytes)
    parts = [f"{name} {in_gib(size)}" for name, size in states.items()]
    devices = {"offload_optimizer": zero.optimizer_device, "offload_param": zero.param_device}
    parts += [f"{block} to {device}" for block, device in devices.items() if device != "none"]
    total = in_gib(sum(states.values()))
    yield "memory", f"{total} GiB a rank ({', '.join(parts)}), without activations: zero-tp plan"


def _corpora(config: RunConfig, inputs: RunInputs | None) -> Lines:
    """Describe each corpus and its number of epochs."""
    if inputs is None:
        return
    every = range(len(config.stages))
    corpora = {one.prefix: one for samples in inputs.sequences for one in samples.corpora}
    for prefix, corpus in corpora.items():
        epochs = f"{inputs.epochs(prefix, every):.3g}" if config.has_timeline else "?"
        yield "data", f"{prefix}: {corpus.tokens:,} tokens, {epochs} epochs"
    for corpus in inputs.validation.corpora if inputs.validation else ():
        yield "validation", f"{corpus.prefix}: {corpus.tokens:,} tokens"


def _export_notes(inputs: RunInputs) -> list[str]:
    """Return a line if an export of the run would lack its tokenizer (see `match_tokenizer`)."""
    import tempfile

    from zero_tp.data.tokenizer_files import copy_tokenizer, match_tokenizer, open_tokenizer

    if inputs.tokenizer is None:
        return []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # transformers chooses the tokenizer's class by the config.json beside it.
        inputs.model_config.save_pretrained(directory)
        copy_tokenizer(inputs.tokenizer, directory, None)
        problem = match_tokenizer(directory, open_tokenizer(inputs.tokenizer))
    model_type = inputs.model_config.model_type
    line = (
        f"an export will lack the tokenizer {inputs.tokenizer}, which transformers opens with "
        "other ids beside a "
    )
    return [f"{line}{model_type}: {problem}"] if problem else []


def _missing(path: Path, config: RunConfig) -> str:
    """Describe a missing file.

    If there is a directory of the same name, suggest the corpora in it.
    """
    on_hub = " and asks the Hugging Face hub for" if str(path) in config.hub_names else ""
    corpora = sorted(str(index.with_suffix("")) for index in path.with_suffix("").glob("*.idx"))
    return f"{path}, which a run needs{on_hub}" + (
        f"; did you mean {' or '.join(corpora)}?" if corpora else ""
    )
