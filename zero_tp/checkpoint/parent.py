"""A new run starts from another one's checkpoint: its weights, moments and update count; all else is its own file's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.architectures.configs import TOKEN_IDS, fields_of
from zero_tp.architectures.rotary import ROPE
from zero_tp.checkpoint.directory import find_checkpoint, passed_over, read_manifest
from zero_tp.checkpoint.manifest import Manifest, Parallelism, Parent, check_states, differences
from zero_tp.checkpoint.resume import restored_states
from zero_tp.checkpoint.resume_point import ResumePoint
from zero_tp.config import RunConfig
from zero_tp.constants import MODEL_KEY
from zero_tp.errors import ConfigError, UserError, shown
from zero_tp.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
ORDER = ("training.seed", "data.sequence_length")
"""What decides, with the corpora, in which order samples come."""
KEPT = "kept: weights, moments, the optimizer's count of updates, and in fp16 the loss scale"
ANEW = "anew: the schedule, the samples and dropout, from step 1"


def check_parent(source: Path, config: RunConfig, model: PretrainedConfig) -> None:
    """Check that a new run can start from a run or checkpoint.

    Raises:
        UserError: naming what does not fit.
    """
    find_parent(source, config, model)


def find_parent(source: Path, config: RunConfig, model: PretrainedConfig) -> ResumePoint:
    """Find the checkpoint that a new run starts from. No communication.

    Args:
        source: a run, whose newest checkpoint is meant, or a checkpoint.
        model: of the new run.

    Raises:
        UserError: naming what does not fit.
    """
    try:
        checkpoint = find_checkpoint(source)
        manifest = read_manifest(checkpoint)
        check_states(checkpoint, manifest)
        _check_model(checkpoint, manifest, model)
        _check_optimizer(checkpoint, manifest, config)
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror}); give a run or a checkpoint") from error
    return ResumePoint(checkpoint, manifest, passed_over(source, manifest.step))


def _check_model(checkpoint: Path, manifest: Manifest, model: PretrainedConfig) -> None:
    """Check that the weights mean the same in the new model: only what makes no weight another may differ."""
    saved, known = manifest.model, fields_of(model.model_type)
    turned = "rope_parameters" in known.known()
    free = {*known.dropouts, *known.irrelevant, *TOKEN_IDS, *ROPE, *WINDOWS, "initializer_range"}
    free |= {"max_position_embeddings"} if turned else set()
    names = ("model_type", *inspect.get_annotations(type(model)), *known.undeclared)
    for name in names:
        value, before = getattr(model, name, None), saved.get(name)
        if name not in free and value != before:
            may = ["dropout", *(["rope", "max_position_embeddings", "windows"] if turned else [])]
            problem = f"{shown(value)}, but the model of {checkpoint} has {shown(before)}"
            raise ConfigError(f"{MODEL_KEY}.{name}", problem, f"--from keeps the model, but for {', '.join(may)}")


def _check_optimizer(checkpoint: Path, manifest: Manifest, config: RunConfig) -> None:
    """Check that the new optimizer has the states that were saved. What it does with them is its own."""
    if "optimizer" not in manifest.fixed:
        raise UserError(
            f"{checkpoint}: a Trainer saved it, without its optimizer and batch; export it, and start from the "
            f"weights with {MODEL_KEY}.from_pretrained"
        )
    now, before = config.resolved()["optimizer"]["type"], manifest.fixed["optimizer"]["type"]
    if _states_of(now) != _states_of(before):
        problem = f"{shown(now)} has other states than {shown(before)}, with which {checkpoint} was saved"
        raise ConfigError("optimizer.type", problem, "--from keeps the moments: use that one")


def _states_of(optimizer: Any) -> str:
    return "adam" if str(optimizer).lower() == "adamw" else str(optimizer).lower()


def check_child(source: Path, run: Path, manifest: Manifest) -> None:
    """Check that a run that goes on was started from the parent that is given once more.

    Raises:
        UserError: it was started from another one, or from none.
    """
    if manifest.parent is None:
        raise UserError(
            f"--from {source}: {run} is at step {manifest.step} already, and was not started from it; give another "
            "--output-dir to start a new run"
        )
    checkpoint, meant = Path(manifest.parent.checkpoint), source.resolve()
    if meant not in (checkpoint, checkpoint.parent.parent):
        raise UserError(
            f"--from {source}: {run} was started from {checkpoint}; give another --output-dir to start a new run"
        )


class Origin:
    """A new run starts from `source`, a checkpoint or a run, as `--from` asks."""

    def __init__(self, source: Path):
        self.source = source

    def find(self, resumed: ResumePoint, run: Path, config: RunConfig, model: PretrainedConfig) -> ResumePoint:
        """Return the checkpoint that a new run starts from; none for a run that resumes. No communication.

        Raises:
            UserError: the checkpoint does not fit, or the resumed run was not started from it.
        """
        if resumed.manifest is None:
            return find_parent(self.source, config, model)
        check_child(self.source, run, resumed.manifest)
        return ResumePoint()

    def take(self, zero: ZeroEngine, checkpoint: Path) -> None:
        """Take over masters, moments and what counts their updates; check every file. Collective.

        The schedule, the counters, the learning rate and the random streams stay those of a new run.

        Raises:
            Damaged: on every rank, naming the first damaged file; masters and states are then undefined.
            UserError: the model has other parameters than the checkpoint, or elements are missing.
        """
        with restored_states(zero, checkpoint) as manifest:
            zero.restore_updates(manifest.progress.model_dump())

    def told(
        self, found: ResumePoint, config: RunConfig, corpora: Mapping[str, Any], validation: dict[str, dict[str, Any]]
    ) -> list[str]:
        """Return lines on what is kept of it, and each key that is another one than when it was saved.

        Args:
            corpora, validation: of the new run, by prefix.
        """
        checkpoint, manifest = found.checkpoint, found.manifest
        assert checkpoint is not None and manifest is not None
        before, now = Parallelism.saved(manifest), Parallelism.of(config)
        seen = Parent.of(checkpoint, manifest).tokens
        lines = [
            f"started from {checkpoint}, {seen:,} tokens" + ("" if before == now else f", saved at {before} → {now}")
        ]
        lines += [*found.notes, KEPT, ANEW, *differences(manifest, config, validation)]
        block, fixed = config.zero_tp, manifest.fixed
        before_of = (list(manifest.corpora.values()), *(fixed.get(f"zero_tp.{key}") for key in ORDER))
        if before_of == (list(corpora.values()), block.training.seed, block.data.sequence_length):
            lines.append("its samples come again in the same order; another zero_tp.training.seed gives another one")
        return lines
