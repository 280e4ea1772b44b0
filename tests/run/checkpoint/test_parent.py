"""A new run starts from another one's weights and moments, bit for bit, on any topology; its
schedule is its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.support.checkpoint_runs import build, steps_of
from tests.support.checkpoints import rewritten, write_checkpoint
from tests.support.mistakes import written
from tests.support.places import DP2, SPLIT, WHOLE, Place, contents, first_part
from tests.support.pools import Pools
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.run.checkpoint.directory import read_manifest, step_directory
from zero_tp.run.checkpoint.find import RunCheckpoint, find_checkpoint
from zero_tp.run.checkpoint.manifest import Parent
from zero_tp.run.checkpoint.parent import (
    MAX_CHANGE_LINES,
    ONLY_WEIGHTS,
    _shorten,
    check_child,
    check_parent,
    describe_parent,
    inherits_states,
)
from zero_tp.run.checkpoint.same_run import fixed_settings
from zero_tp.run.checkpoint.start_point import Branch, Resume
from zero_tp.run.config import RunConfig

SAVED = 2


def write(place: Place, path: Path, *, constant: bool = False, **model: Any) -> Path:
    """The place's config with another rate, batch and model; a constant rate is the optimizer's
    own.
    """
    config = json.loads(place.write(path, random.Random(1)).read_text())
    config["optimizer"]["params"]["lr"] = 3e-3
    config["train_batch_size"] = 48
    config["scheduler"]["params"] = {
        "warmup_num_steps": 4,
        "warmup_max_lr": 3e-3,
        "warmup_type": "linear",
    }
    config["zero_tp"]["model"] |= model
    if constant:
        del config["scheduler"]
        config["optimizer"]["params"]["lr"], config["train_batch_size"] = 1e-2, 24
    path.write_text(json.dumps(config))
    return path


def begun(path: str, parent: str, run: str) -> dict[str, Any]:
    """Start from a parent, save at once as it is held here, and what is anew."""
    from zero_tp.run.checkpoint.save import run_saver

    engine, config = build(path)
    rate = engine.learning_rate
    checkpoint = find_checkpoint(Path(parent))
    assert check_parent(checkpoint, config, engine.model.config) == ()
    start = Branch(checkpoint)
    generation = engine.model.generation_config
    start.restore(engine.zero, config.zero_tp.training.seed)
    assert engine.model.generation_config is generation, "its own tokens, not the parent's"
    progress = engine.zero.progress()
    saver = run_saver(engine.zero, config, Path(run), parent=start.parent)
    saver.save(SAVED)
    assert saver.outcome() == (SAVED, "")
    return {
        "progress": progress,
        "rates": (rate, engine.learning_rate),
        "model": engine.model.config.to_dict(),
    }


def followed(path: str, parent: str) -> tuple[list[Any], list[Any]]:
    """The steps of a run that goes on from a checkpoint, and of one that starts from it, on the
    same batches.
    """
    checkpoint = find_checkpoint(step_directory(Path(parent), SAVED))
    found = []
    for start in (Resume(checkpoint), Branch(checkpoint)):
        engine, config = build(path)
        start.restore(engine.zero, config.zero_tp.training.seed)
        found.append(steps_of(engine, SAVED + 1, SAVED + 3))
    return found[0], found[1]


@THOROUGH
def test_moments_are_the_parents_on_another_topology_with_another_rope(
    ranks: Pools, tmp_path: Path
) -> None:
    run, child = tmp_path / "run", tmp_path / "child"
    ranks(WHOLE.world).run(
        first_part, str(WHOLE.write(tmp_path / "source.json", random.Random(1))), str(run), SAVED
    )
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e4}
    longer: dict[str, Any] = {"max_position_embeddings": 64, "rope_parameters": rope}
    path = write(SPLIT, tmp_path / "child.json", **longer)
    for found in ranks(SPLIT.world).run(begun, str(path), str(run), str(child)):
        assert found["progress"]["optimizer_steps"] == SAVED
        assert (
            found["progress"]["counters"]["global_steps"] == 0 and found["progress"]["recent"] == []
        )
        assert found["rates"][0] == found["rates"][1], "the schedule begins anew"
        assert found["model"]["rope_parameters"]["factor"] == 4.0
    saved, held = contents(run, SAVED), contents(child, SAVED)
    assert held.keys() == saved.keys() and {kind for _, kind in saved} == {
        "master",
        "exp_avg",
        "exp_avg_sq",
    }
    assert all(torch.equal(held[key], tensor) for key, tensor in saved.items())
    parent = read_manifest(step_directory(child, SAVED)).parent
    assert parent is not None and parent.checkpoint == str(step_directory(run, SAVED).resolve())
    assert (parent.step, parent.tokens, parent.parent) == (SAVED, SAVED * 24 * 16, None)
    assert parent.sha256 == read_manifest(step_directory(run, SAVED)).sha256


@THOROUGH
def test_with_nothing_changed_its_updates_are_those_of_the_parent(
    ranks: Pools, tmp_path: Path
) -> None:
    """Without a schedule; on the same batches, bit for bit."""
    run = tmp_path / "run"
    place = replace(DP2, stage=1)
    path = write(place, tmp_path / "run.json", constant=True)
    ranks(place.world).run(first_part, str(path), str(run), SAVED)
    for resumed, started in ranks(place.world).run(followed, str(path), str(run)):
        assert started == resumed and len(started) == 3


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def config_of(
    tmp_path: Path,
    optimizer: str = "AdamW",
    params: dict[str, Any] | None = None,
    groups: Sequence[dict[str, Any]] = (),
    **model: Any,
) -> RunConfig:
    raw = {
        "train_batch_size": 4,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3, **(params or {})}},
        "zero_tp": {
            "model": {**LLAMA, **model},
            "data": {"train": "nowhere/train", "sequence_length": 16},
            "training": {"steps": 4},
            "param_groups": list(groups),
        },
    }
    return RunConfig.load(written(tmp_path, raw), world_size=1)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A run with one checkpoint, of AdamW."""
    config = LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"})
    run = tmp_path / "parent"
    fixed = {
        "optimizer": {"type": "AdamW"},
        "train_batch_size": 4,
        "zero_tp.data.sequence_length": 16,
    }
    with rewritten(write_checkpoint(run, config)) as manifest:
        manifest["fixed"] = fixed
    return run


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 2),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 4),
        ("vocab_size", 65),
        ("hidden_act", "gelu"),
        ("rms_norm_eps", 1e-3),
        ("tie_word_embeddings", True),
    ],
)
def test_what_makes_another_model_is_refused_by_name(
    tmp_path: Path, parent: Path, field: str, value: Any
) -> None:
    config = config_of(tmp_path, **{field: value})
    with pytest.raises(
        UserError,
        match=rf"^zero_tp\.model\.{field}: .*, but the model of .* has .*; "
        "--from allows changes of dropout",
    ):
        check_parent(find_checkpoint(parent), config, config.hf_config())


def test_what_keeps_the_weights_meaning_is_accepted(tmp_path: Path, parent: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 1e5,
    }
    changes: dict[str, Any] = {
        "max_position_embeddings": 128,
        "rope_parameters": rope,
        "attention_dropout": 0.1,
    }
    config = config_of(tmp_path, **changes)
    for source in (parent, step_directory(parent, 1)):
        checkpoint = find_checkpoint(source)
        assert checkpoint.path == step_directory(parent, 1)
        assert check_parent(checkpoint, config, config.hf_config()) == ()


def test_the_same_samples_are_the_same_content_wherever_it_lies(
    tmp_path: Path, parent: Path
) -> None:
    config, corpus = config_of(tmp_path), {"tokens": 5, "sha256": "ab"}
    with rewritten(step_directory(parent, 1)) as manifest:
        manifest["corpora"] = {"elsewhere/train": corpus}
        manifest["fixed"] |= {"zero_tp.training.seed": config.zero_tp.training.seed}
        manifest["fixed"] |= {"zero_tp.data.train": [["elsewhere/train", 1.0]]}
    found = RunCheckpoint(step_directory(parent, 1), read_manifest(step_directory(parent, 1)))
    weighted = RunConfig.load(
        tmp_path / "run.json", ['zero_tp.data.train={"nowhere/train": 2.0}'], 1
    )
    for now, there, again in (
        (config, corpus, True),
        (config, corpus | {"sha256": "cd"}, False),
        (weighted, corpus, False),
    ):
        for prefix in ("nowhere/train", "elsewhere/train"):
            lines = describe_parent(found, now, {prefix: there}, {})
            assert (
                any(
                    line.startswith("the parent's samples repeat in the same order")
                    for line in lines
                )
                == again
            )


def test_what_is_no_parent_is_one_line(tmp_path: Path, parent: Path) -> None:
    config = config_of(tmp_path)
    newer = step_directory(parent, 2)
    newer.mkdir()
    checkpoint = find_checkpoint(parent)
    lines = describe_parent(checkpoint, config, {}, {})
    assert f"{newer}: not a checkpoint (no manifest.json)" in lines
    with pytest.raises(UserError, match="no complete checkpoint there"):
        find_checkpoint(tmp_path / "none")
    sgd = config_of(tmp_path, optimizer="SGD")
    assert not inherits_states(checkpoint.manifest, sgd)
    assert ONLY_WEIGHTS in describe_parent(checkpoint, sgd, {}, {})
    amsgrad = config_of(tmp_path, params={"torch_adam": True, "amsgrad": True})
    assert not inherits_states(checkpoint.manifest, amsgrad)
    assert inherits_states(checkpoint.manifest, config)
    offload = f'{{"device": "nvme", "nvme_path": "{tmp_path}"}}'
    on_nvme = ["zero_optimization.stage=3", f"zero_optimization.offload_optimizer={offload}"]
    nvme = RunConfig.load(tmp_path / "run.json", on_nvme, 1)
    with pytest.raises(
        UserError,
        match=r"^zero_optimization\.offload_optimizer\.device: a run cannot be .* started",
    ):
        check_parent(checkpoint, nvme, nvme.hf_config())
    manifest = checkpoint.manifest
    with rewritten(step_directory(parent, 1)) as changed:
        del changed["fixed"]["optimizer"]
    with pytest.raises(UserError, match=r"saved by a Trainer, .* export it"):
        check_parent(find_checkpoint(parent), config, config.hf_config())
    with pytest.raises(UserError, match="is already at step 1 and was not started from it"):
        check_child(parent, tmp_path / "run", manifest)
    child = manifest.model_copy(update={"parent": Parent.of(step_directory(parent, 1), manifest)})
    check_child(parent, tmp_path / "run", child)
    check_child(step_directory(parent, 1), tmp_path / "run", child)
    with pytest.raises(UserError, match="was started from"):
        check_child(tmp_path, tmp_path / "run", child)


def test_what_differs_from_the_parent_is_five_lines_and_names_every_key() -> None:
    changes = [f"key{number}: 1, was 2" for number in range(8)]
    assert _shorten(changes[:MAX_CHANGE_LINES]) == changes[:MAX_CHANGE_LINES]
    *listed, last = _shorten(changes)
    assert listed == changes[:4] and last.endswith(": key4, key5, key6, key7")


def test_matrices_that_another_optimizer_updates_inherit_no_states(
    tmp_path: Path, parent: Path
) -> None:
    muon = config_of(tmp_path, optimizer="Muon", groups=[{"kind": "matrix", "lr_scale": 0.5}])
    moved = config_of(tmp_path, optimizer="Muon", groups=[{"kind": "matrix", "optimizer": "adamw"}])
    saved = find_checkpoint(parent).manifest.model_copy(update={"fixed": fixed_settings(muon)})
    assert inherits_states(saved, muon) and not inherits_states(saved, moved)
