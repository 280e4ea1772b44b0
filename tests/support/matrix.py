"""The parity matrix: which settings there are, which cells the config refuses, and a covering array
of the others.

A cell is one setting of every factor, and a real JSON config. The covering array has, for every two
settings that some accepted cell has together, a cell that runs them.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.families import ENCODERS, FAMILIES, SEQUENCE, model_sizes
from tests.support.mistakes import with_changes
from tests.support.plain_run import (
    BETAS,
    CLIP,
    EPS,
    GLOBAL_BATCH,
    LEARNING_RATE,
    STEPS,
    WEIGHT_DECAY,
)
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.run.config import ConfigError, RunConfig
from zero_tp.run.config.model_block import check_model

WORLD = 4
LEAST_CELLS = 114

Changes = dict[str, Any]
Setting = tuple[str, str]  # factor, name
Cell = tuple[str, ...]  # the name of one setting for each factor

# DeepSpeed's defaults are made for models a million times as large: every parameter would stay
# whole under ZeRO-3 and every gradient would go into one bucket.
BUCKETS = {"zero_optimization.reduce_bucket_size": "auto"}
PARAMETERS = {
    "zero_optimization.stage3_param_persistence_threshold": "auto",
    "zero_optimization.stage3_prefetch_bucket_size": "auto",
    "zero_optimization.sub_group_size": 2000,
}
P_A = {"activation_checkpointing.partition_activations": True}
HOST = {"activation_checkpointing.cpu_checkpointing": True}
CONTIGUOUS = {"activation_checkpointing.contiguous_memory_optimization": True}
FULL = {"zero_tp.recompute": "full"}
EVERY_MODULE = {"mode": "selective", "modules": ["attention_core", "mlp_activation", "norm"]}
BF16 = {"bf16.enabled": True}
OFFLOADED = {"zero_optimization.offload_optimizer": {"device": "cpu"}}

FACTORS: dict[str, dict[str, Changes]] = {
    "tensor": {f"TP {size}": {"zero_tp.parallel.tensor": size} for size in (1, 2, 4)},
    "sequence": {
        "no SP": {"zero_tp.parallel.sequence": False},
        "SP": {"zero_tp.parallel.sequence": True},
    },
    "stage": {
        "ZeRO-0": {"zero_optimization.stage": 0},
        "ZeRO-1": {"zero_optimization.stage": 1, **BUCKETS},
        "ZeRO-2": {"zero_optimization.stage": 2, **BUCKETS},
        "ZeRO-3": {"zero_optimization.stage": 3, **BUCKETS, **PARAMETERS},
    },
    "recompute": {
        "none": {},
        "selective": {"zero_tp.recompute": "selective"},
        "selective, every module": {"zero_tp.recompute": EVERY_MODULE},
        "full": FULL,
        "full, P_a": {**FULL, **P_A},
        "full, cpu": {**FULL, **HOST},
        "full, P_a, cpu": {**FULL, **P_A, **HOST},
        "full, contiguous": {**FULL, **CONTIGUOUS},
        "full, P_a, contiguous, cpu": {**FULL, **P_A, **CONTIGUOUS, **HOST},
        "full, every 2nd layer": {"zero_tp.recompute": {"mode": "full", "every": 2}},
        "full, 1 micro-batch kept": {
            "zero_tp.recompute": {"mode": "full", "keep_micro_batches": 1}
        },
    },
    "offload": {
        "no offload": {"optimizer.params.torch_adam": True},
        "optimizer offloaded": OFFLOADED,
        "all offloaded": {**OFFLOADED, "zero_optimization.offload_param": {"device": "cpu"}},
    },
    "accumulation": {f"× {count}": {"gradient_accumulation_steps": count} for count in (1, 3)},
    "dtype": {
        "fp32": {},
        "bf16": BF16,
        # With ZeRO-1 this selects BF16_Optimizer, another code path of DeepSpeed.
        "bf16, fp32 accumulation": {**BF16, "data_types.grad_accum_dtype": "fp32"},
    },
}


def config_of(cell: Cell, seed: int = 0, family: str = "gpt2") -> dict[str, Any]:
    """The JSON config of a cell."""
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_clipping": CLIP,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": list(BETAS),
                "eps": EPS,
                "weight_decay": WEIGHT_DECAY,
            },
        },
        "zero_tp": {
            "model": model_sizes(seed, family),
            "objective": "masked" if family in ENCODERS else "causal",
            "data": {"train": "corpus", "sequence_length": SEQUENCE},
            "training": {"steps": STEPS, "seed": seed},
        },
    }
    changes = [settings[name] for settings, name in zip(FACTORS.values(), cell, strict=True)]
    return with_changes(
        config, {path: value for settings in changes for path, value in settings.items()}
    )


def write_config(
    cell: Cell,
    folder: Path,
    seed: int = 0,
    family: str = "gpt2",
    changes: Changes | None = None,
) -> Path:
    path = folder / "run.json"
    path.write_text(json.dumps(with_changes(config_of(cell, seed, family), changes or {})))
    return path


def once_for_equals(check: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `check_model`: call it once for all cells whose blocks that it reads are equal."""
    known: dict[str, Any] = {}

    def checked(block: ZeroTP, saved: None = None, data: int | None = None) -> Any:
        key = f"{block.model} {block.parallel} {block.data} {block.objective} {block.logging}"
        training = block.training
        key += f" {training.router_bias_update_rate} {training.router_z_loss} {data}"
        if key not in known:
            known[key] = check(block, saved, data)
        return known[key]

    return checked


@cache
def judged() -> tuple[tuple[Cell, ...], dict[Cell, ConfigError]]:
    """The cells of the full product that RunConfig accepts, and its error for each other one."""
    accepted, refused = [], {}
    with (
        tempfile.TemporaryDirectory() as folder,
        # Checking the model is most of a load's time.
        patch("zero_tp.run.config.check_keys.check_model", once_for_equals(check_model)),
    ):
        for cell in itertools.product(*FACTORS.values()):
            try:
                RunConfig.load(write_config(cell, Path(folder)), world_size=WORLD)
                accepted.append(cell)
            except ConfigError as error:
                refused[cell] = error
    return tuple(accepted), refused


def idle(cell: Cell) -> set[Setting]:
    """Settings that are accepted in this cell but do nothing there, as Topology and
    ActivationMemory say.

    Without TP there is no SP. Checkpoints are partitioned only where every TP rank holds the same:
    with TP, without SP.
    """
    settings = dict(zip(FACTORS, cell, strict=True))
    found = set()
    if settings["tensor"] == "TP 1" and settings["sequence"] == "SP":
        found.add(("sequence", "SP"))
    partitions = FACTORS["recompute"][settings["recompute"]].keys() >= P_A.keys()
    if partitions and (settings["tensor"] == "TP 1" or settings["sequence"] == "SP"):
        found.add(("recompute", settings["recompute"]))
    return found


@cache
def proofs(size: int) -> dict[Cell, frozenset[tuple[Setting, ...]]]:
    """What running each accepted cell proves: the groups of `size` settings that work together in
    it.

    A group with an idle setting counts only if there is no accepted cell in which all of it acts.
    """
    accepted, _ = judged()
    groups = {
        cell: set(itertools.combinations(zip(FACTORS, cell, strict=True), size))
        for cell in accepted
    }
    acting = {
        cell: {group for group in groups[cell] if not idle(cell) & set(group)} for cell in accepted
    }
    somewhere = set().union(*acting.values())
    return {cell: frozenset(acting[cell] | (groups[cell] - somewhere)) for cell in accepted}


@cache
def covering_array() -> tuple[Cell, ...]:
    """The cells that are run: first all pairs of settings, then whichever has the most new
    triples, to LEAST_CELLS.
    """
    return tuple(sorted(chosen_cells()[0], key=list(proofs(2)).index))


@cache
def chosen_cells() -> tuple[list[Cell], int]:
    """The cells of the covering array as they are chosen, and how many of them have all pairs.

    Greedy and without chance, so that every run has the same cells.
    """
    pairs, triples = proofs(2), proofs(3)
    new_pairs, new_triples = set().union(*pairs.values()), set().union(*triples.values())
    chosen: list[Cell] = []
    left = list(pairs)
    with_all_pairs = 0
    while new_pairs or len(chosen) < LEAST_CELLS:
        with_all_pairs += bool(new_pairs)
        best = max(
            left, key=lambda cell: (len(pairs[cell] & new_pairs), len(triples[cell] & new_triples))
        )
        chosen.append(best)
        left.remove(best)
        new_pairs -= pairs[best]
        new_triples -= triples[best]
    return chosen, with_all_pairs


IN_16_BIT = "grouped queries"
"""The family of the first cells in 16 bit: each such family has thirty plain runs, one in fp32."""


@cache
def first_cells() -> list[Cell]:
    """A few of the cells with all pairs, which together have every setting at work, every family,
    and every TP with and without SP, in fp32 and in 16 bit. Greedy like `chosen_cells`.
    """
    cells, with_all_pairs = chosen_cells()
    shown: dict[Cell, set[Any]] = {}
    for cell in cells[:with_all_pairs]:
        named = dict(zip(FACTORS, cell, strict=True))
        exact = named["dtype"] == "fp32"
        if exact or families()[cell] == IN_16_BIT:
            split = {(exact, named["sequence"])} if named["tensor"] != "TP 1" else set()
            settings = set(zip(FACTORS, cell, strict=True)) - idle(cell)
            shown[cell] = {*settings, cell[:2], *split, ("family", families()[cell])}
    new, chosen = set().union(*shown.values()), []
    while new:
        chosen.append(max(shown, key=lambda cell: (len(shown[cell] & new), cell[-1] == "fp32")))
        new -= shown[chosen[-1]]
    return chosen


@cache
def families() -> dict[Cell, str]:
    """The model that each cell of the covering array trains: every family with every setting that
    can be.

    No setting is refused for a family's sake, so that families need no place in the product.
    Greedy: a cell gets the family that has met the fewest of its settings, the one with the fewest
    cells among equals.
    """
    chosen: dict[Cell, str] = {}
    met: dict[str, set[Setting]] = {family: set() for family in FAMILIES}
    # The settings that are in few cells first, so that none is left with cells that are all given
    # away.
    cells = covering_array()
    count = Counter(setting for cell in cells for setting in zip(FACTORS, cell, strict=True))
    for cell in sorted(
        cells, key=lambda cell: min(count[setting] for setting in zip(FACTORS, cell, strict=True))
    ):
        settings = set(zip(FACTORS, cell, strict=True)) - idle(cell)
        given = Counter(chosen.values())
        chosen[cell] = max(
            FAMILIES, key=lambda family: (len(settings - met[family]), -given[family])
        )
        met[chosen[cell]] |= settings
    return chosen


def describe(cell: Cell, family: str = "") -> str:
    return " | ".join((*cell, family or families()[cell]))
