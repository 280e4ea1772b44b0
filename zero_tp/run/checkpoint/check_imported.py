"""Continue a checkpoint of another trainer: compare what its trainer recorded, and describe it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zero_tp.base.constants import PARAM_GROUPS_KEY
from zero_tp.base.errors import ConfigError, UserError, shown
from zero_tp.run.checkpoint.imported import ImportedOptimizer
from zero_tp.run.checkpoint.manifest import Manifest
from zero_tp.run.checkpoint.parent import check_model
from zero_tp.run.config import RunConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ADAM = ("adam", "adamw")


def check_imported(
    checkpoint: Path, manifest: Manifest, config: RunConfig, model: PretrainedConfig
) -> None:
    """Check that a file continues the run that was imported.

    Raises:
        UserError: another model or optimizer, or another decay of some parameter.
    """
    check_model(checkpoint, manifest, model, f"a run of {checkpoint} allows", has_rope=False)
    assert manifest.imported is not None
    optimizer = manifest.imported.optimizer
    if optimizer is None:
        return
    source = manifest.imported.checkpoint
    for key, value, before in _optimizer_settings(config, optimizer):
        if value != before:
            raise UserError(
                f"{key}: {shown(value)}, but {source} was trained with {shown(before)}; set it to "
                "that, or start a new run from its weights alone (zero-tp convert to-hf)"
            )
    _check_groups(source, optimizer, config, model)


def _optimizer_settings(
    config: RunConfig, before: ImportedOptimizer
) -> Iterator[tuple[str, object, object]]:
    """Yield (key, value, value of the source) of each setting that changes an update."""
    settings = config.settings.optimizer
    kind = "" if settings is None else settings.type
    if settings is None or kind.lower() not in ADAM:
        yield "optimizer.type", kind, "AdamW"
        return
    params = settings.params
    yield "optimizer.params.betas", list(getattr(params, "betas", ())), list(before.betas)
    yield "optimizer.params.eps", getattr(params, "eps", None), before.eps
    for name, default in (("amsgrad", False), ("maximize", False), ("bias_correction", True)):
        yield f"optimizer.params.{name}", getattr(params, name, default), default
    if before.decoupled is not None:
        decoupled = kind.lower() == "adamw" or bool(getattr(params, "adam_w_mode", True))
        yield "optimizer.params.adam_w_mode", decoupled, before.decoupled
    if config.settings.scheduler is None and not before.has_schedule:
        highest = max(group.lr for group in before.groups)
        yield "optimizer.params.lr", params.lr, highest


def _check_groups(
    source: str, optimizer: ImportedOptimizer, config: RunConfig, model: PretrainedConfig
) -> None:
    """Check that each parameter keeps its decay and its share of the rate."""
    from zero_tp.engine.param_groups import config_groups

    assert config.settings.optimizer is not None
    params = config.settings.optimizer.params
    groups = config_groups(model, config.zero_tp.param_groups, params)
    highest = max(group.lr for group in optimizer.groups)
    largest = max(group.lr_scale for group in groups)
    before = {
        name: (group.weight_decay, group.lr / highest if highest else None)
        for group in optimizer.groups
        for name in group.parameters
    }
    for group in groups:
        for name in group.names:
            decay, share = before[name]
            if decay != group.weight_decay:
                raise ConfigError(
                    PARAM_GROUPS_KEY,
                    f"gives {name} the weight decay {group.weight_decay:g}, but {source} was "
                    f"trained with {decay:g}",
                    f'select it with an entry that has "weight_decay": {decay:g}; '
                    '{"pattern": "."} selects all',
                )
            if share is not None and abs(share - group.lr_scale / largest) > 1e-6:
                raise ConfigError(
                    PARAM_GROUPS_KEY,
                    f"gives {name} {group.lr_scale / largest:g} of the highest rate, but {source} "
                    f"was trained with {share:g}",
                    "select it with an entry that has this lr_scale",
                )


def describe_imported(manifest: Manifest, global_batch: int) -> list[str]:
    """Return lines for the log of the first start."""
    imported = manifest.imported
    assert imported is not None
    if imported.optimizer is None:
        return [
            f"weights of {imported.checkpoint} ({imported.trainer}); moments, schedule and samples "
            "start anew"
        ]
    return [
        f"resuming step {manifest.step} of {imported.checkpoint} ({imported.trainer}): masters, "
        f"moments, {manifest.progress.optimizer_steps} updates",
        "data, seed, batch and schedule are this file's from here on; the next sample is number "
        f"{manifest.step * global_batch:,}",
    ]
