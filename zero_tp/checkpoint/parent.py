"""A new run starts from another one's checkpoint: its weights, moments and update count; all else is its own file's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.checkpoint.directory import find_checkpoint, read_manifest, taken_as_it_stands
from zero_tp.checkpoint.found import Found
from zero_tp.checkpoint.manifest import Manifest, Parallelism, Parent, check_states, differences
from zero_tp.checkpoint.resume import restored_states
from zero_tp.config import RunConfig
from zero_tp.constants import MODEL_KEY
from zero_tp.errors import ConfigError, UserError, shown
from zero_tp.models.architectures.configs import TOKEN_IDS, fields_of
from zero_tp.models.architectures.rotary import ROPE
from zero_tp.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
ORDER = ("training.seed", "data.sequence_length")
"""What decides, with the corpora, in which order samples come."""
KEPT = "kept: weights, moments, the optimizer's count of updates, and in fp16 the loss scale"
ANEW = "anew: the schedule, the samples and dropout, from step 1"


def check_parent(given: Path, config: RunConfig, model: PretrainedConfig) -> None:
    """Check that a new run can start from a run or checkpoint.

    Raises:
        UserError: naming what does not fit.
    """
    found = find_parent(given, config, model)
    if found.refusal is not None:
        raise found.refusal


def find_parent(given: Path, config: RunConfig, model: PretrainedConfig) -> Found:
    """Look at the checkpoint that a new run is to start from. No communication; `agree` raises what is wrong with it.

    Args:
        given: a run, whose newest checkpoint is meant, or a checkpoint.
        model: of the new run.
    """
    try:
        checkpoint = find_checkpoint(given)
        manifest = read_manifest(checkpoint)
        check_states(checkpoint, manifest)
        _check_model(checkpoint, manifest, model)
        _check_optimizer(checkpoint, manifest, config)
        with taken_as_it_stands(checkpoint, manifest):
            Parent.of(checkpoint, manifest)  # what the new run records of it
    except UserError as error:
        return Found(refusal=error)
    except OSError as error:
        return Found(refusal=UserError(f"{given}: cannot be read ({error.strerror}); give a run or a checkpoint"))
    return Found(checkpoint, manifest)


def _check_model(checkpoint: Path, manifest: Manifest, model: PretrainedConfig) -> None:
    """Check that the weights mean the same in the new model: only what makes no weight another may differ."""
    saved, known = manifest.model, fields_of(model.model_type)
    turned = "rope_parameters" in known.known()
    free = {*known.dropouts, *known.irrelevant, *TOKEN_IDS, *ROPE, *WINDOWS, "initializer_range"}
    free |= {"max_position_embeddings"} if turned else set()
    names = ("model_type", *inspect.get_annotations(type(model)), *known.undeclared)
    for name in names:
        found, before = getattr(model, name, None), saved.get(name)
        if name not in free and found != before:
            may = ["dropout", *(["rope", "max_position_embeddings", "windows"] if turned else [])]
            problem = f"{shown(found)}, but the model of {checkpoint} has {shown(before)}"
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


def check_child(given: Path, run: Path, manifest: Manifest) -> None:
    """Check that a run that goes on was started from the parent that is given once more.

    Raises:
        UserError: it was started from another one, or from none.
    """
    if manifest.parent is None:
        raise UserError(
            f"--from {given}: {run} is at step {manifest.step} already, and was not started from it; give another "
            "--output-dir to start a new run"
        )
    checkpoint, meant = Path(manifest.parent.checkpoint), given.resolve()
    if meant not in (checkpoint, checkpoint.parent.parent):
        raise UserError(
            f"--from {given}: {run} was started from {checkpoint}; give another --output-dir to start a new run"
        )


class Origin:
    """A new run starts from `given`, a checkpoint or a run, as `zero_tp.training.tools.Origin` says."""

    def __init__(self, given: Path):
        self.given = given

    def look(self, resumed: Found, run: Path, config: RunConfig, model: PretrainedConfig) -> Found:
        """Return what this rank finds. A run that is resumed has started from it before: nothing is to be found then.

        No communication; what is wrong is the finding's `refusal`.
        """
        if resumed.manifest is None:
            return find_parent(self.given, config, model)
        try:
            check_child(self.given, run, resumed.manifest)
        except UserError as error:
            return Found(refusal=error)
        return Found()

    def take(self, zero: ZeroEngine, checkpoint: Path) -> None:
        """Take over masters, moments and what counts their updates; check every file. Collective.

        The schedule, the counters, the learning rate and the random streams stay those of a new run.

        Raises:
            Damaged: on every rank, naming the first damaged file; masters and states are then undefined.
            UserError: the model has other parameters than the checkpoint, or elements are missing.
        """
        with restored_states(zero, checkpoint) as manifest, taken_as_it_stands(checkpoint, manifest):
            zero.restore_updates(manifest.progress.model_dump())

    def told(
        self, found: Found, config: RunConfig, corpora: Mapping[str, Any], validation: dict[str, dict[str, Any]]
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
        lines += [KEPT, ANEW, *differences(manifest, config, manifest.config, validation)]
        block, fixed = config.zero_tp, manifest.fixed
        before_of = (manifest.corpora.keys(), *(fixed.get(f"zero_tp.{key}") for key in ORDER))
        if before_of == (corpora.keys(), block.training.seed, block.data.sequence_length):
            lines.append("its samples come again in the same order; another zero_tp.training.seed gives another one")
        return lines
