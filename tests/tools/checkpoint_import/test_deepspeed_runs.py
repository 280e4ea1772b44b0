"""Runs that continue DeepSpeed's: their next losses and weights are DeepSpeed's own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoint_runs import build as build_ours
from tests.support.checkpoints import rewritten, write_checkpoint
from tests.support.deepspeed_runs import (
    DECAY,
    LEARNING_RATE,
    PlainRun,
    hf_config,
    llama,
    load_and_train,
    rows_of,
    train_and_save,
    universal,
    write_hf_config,
)
from tests.support.launched import metrics_of, pretrain, zero_tp
from tests.support.native import to_ours
from tests.support.parallel_run import optimizer_tensors
from tests.support.pools import Pools, RankError
from tests.support.settings import fp16_supported
from tests.support.tiny_configs import tiny_fields
from tests.support.tiny_models import write_corpus
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.run.checkpoint.check_imported import check_imported
from zero_tp.run.checkpoint.directory import read_manifest, step_directory
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.checkpoint.reader import CheckpointReader
from zero_tp.run.checkpoint.same_run import check_same_run
from zero_tp.run.checkpoint.start_point import Resume
from zero_tp.run.config import RunConfig
from zero_tp.tools.checkpoint_import.formats import open_checkpoint
from zero_tp.tools.checkpoint_import.stored_tensors import read_whole
from zero_tp.tools.checkpoint_import.to_run import write_run
from zero_tp.tools.checkpoint_import.to_universal import convert_to_universal

BATCH, LENGTH, SAVED, MORE = 8, 10, 4, 3
SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_num_steps": 6, "warmup_max_lr": LEARNING_RATE, "warmup_type": "linear"},
}


SCALE = {"cur_scale": 32.0, "cur_iter": SAVED, "cur_hysteresis": 2}
"""Of fp16 from 2^4 with a window of 3, after four steps without an overflow."""
ONE_CYCLE = {
    "type": "OneCycle",
    "params": {
        **{"cycle_min_lr": 1e-4, "cycle_max_lr": LEARNING_RATE, "cycle_first_step_size": 6},
        "cycle_momentum": False,
    },
}


def our_config(run: PlainRun, path: Path, **changes: Any) -> Path:
    """The file of a run that continues: DeepSpeed's blocks, and the model."""
    config = run.deepspeed_config(2, BATCH)
    if run.cosine is not None:
        params = {"num_warmup_steps": 2, "num_training_steps": run.cosine}
        config["scheduler"] = {"type": "cosine", "params": params}
    everything = {"pattern": ".", "weight_decay": DECAY}
    block: dict[str, Any] = {
        "model": run.config,
        "data": {"train": str(path.parent / "corpus"), "sequence_length": LENGTH},
        "training": {"steps": SAVED + MORE, "seed": 5},
        # DeepSpeed's one group decays everything; ours does not decay vectors by default.
        **({} if run.grouped else {"param_groups": [everything]}),
        **changes,
    }
    path.write_text(json.dumps(config | {"zero_tp": block}))
    return path


def corpus(run: PlainRun, folder: Path, chance: random.Random) -> None:
    vocabulary = run.config["vocab_size"]
    documents = [[chance.randrange(vocabulary) for _ in range(50)] for _ in range(40)]
    write_corpus(folder / "corpus", documents, vocabulary)


def batches(path: Path, steps: range) -> list[Tensor]:
    """The global batches that a run of the file trains on at these steps, as rows."""
    from zero_tp.run.run_inputs import RunInputs

    config = RunConfig.load(path, world_size=1)
    inputs = RunInputs(config, path.parent / "no-such-run")
    found = []
    for step in steps:
        rows = inputs.samples.batches_from((step - 1) * BATCH, BATCH, 1, 0, 1)[0]
        ids, labels = rows[0], rows[1]
        found.append(torch.cat([ids, labels[:, -1:]], 1).long())
    return found


@fp16_supported()
def continue_run(path: str, run: str, steps: Sequence[Tensor]) -> dict[str, Any]:
    """Resume and train on the batches; whole states under Hugging Face's names, on rank 0."""
    engine, config = build_ours(path)
    start = Resume(find_checkpoint(Path(run)))
    start.restore(engine.zero, config.zero_tp.training.seed)
    before = {kind: optimizer_tensors(engine, *names) for kind, names in KINDS.items()}
    losses, rates = [], []
    topology = engine.topology
    for rows in steps:
        own = rows.chunk(topology.data)[topology.data_rank]
        parts = own.chunk(engine.deepspeed_engine.gradient_accumulation_steps())
        rates.append(engine.learning_rate)
        losses.append(engine.train_step([(part[:, :-1], part[:, 1:]) for part in parts]))
    after = {kind: optimizer_tensors(engine, *names) for kind, names in KINDS.items()}
    return {"before": before, "losses": losses, "rates": rates, "after": after}


KINDS: dict[str, tuple[str, ...]] = {
    "master": (),
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("exp_avg_sq",),
}


def check_states(ours: dict[str, dict[str, Tensor]], theirs: Any, *, exact: bool) -> None:
    for name, states in theirs.items():
        for kind, expected in states.items():
            actual = ours[kind][name]
            if exact:
                assert torch.equal(actual, expected.float()), (name, kind)
            else:
                assert torch.allclose(actual, expected.float(), rtol=2e-4, atol=2e-6), (name, kind)
    assert ours["master"].keys() == theirs.keys()


PLACES: list[dict[str, Any]] = [{"stage": 2}, {"stage": 3}, {"stage": 1, "tensor": 2}, {"stage": 0}]


@THOROUGH
@pytest.mark.parametrize(
    ("stage", "dtype", "marks"),
    [
        (1, "fp32", ("schedule",)),
        (2, "fp32", ("grouped", "accumulated")),
        (3, "fp32", ("schedule", "grouped")),
        (3, "fp32", ("sub_groups", "universal")),
        (1, "fp32", ("universal", "schedule")),
        (2, "bf16", ()),
        (2, "fp16", ("schedule",)),
        (1, "fp32", ("one cycle",)),
        (3, "fp32", ("cosine",)),
    ],
)
def test_the_next_steps_are_deepspeeds_own(
    ranks: Pools, tmp_path: Path, seed: int, stage: int, dtype: str, marks: tuple[str, ...]
) -> None:
    chance = random.Random(seed)
    fields = llama(chance, tie_word_embeddings=chance.random() < 0.5)
    # Heads that TP 2 divides.
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 20}
    fields |= {"intermediate_size": 2 * fields["intermediate_size"]}
    settings: dict[str, Any] = {"scheduler": SCHEDULE} if "schedule" in marks else {}
    if "one cycle" in marks:
        settings["scheduler"] = ONE_CYCLE
    if "sub_groups" in marks:
        settings["zero_optimization"] = {"stage": 3, "sub_group_size": 300}
    run = PlainRun(
        fields,
        stage,
        dtype,
        chance.randrange(1000),
        grouped="grouped" in marks,
        cosine=10 if "cosine" in marks else None,
        settings=settings,
    )
    corpus(run, tmp_path, chance)
    accumulation = 2 if "accumulated" in marks else 1
    path = our_config(replace(run, accumulation=accumulation), tmp_path / "ours.json")
    source = tmp_path / "source"
    first = rows_of(run, seed, SAVED, BATCH, LENGTH)
    before = ranks(2).run(train_and_save, run, str(source), first)[0]
    steps = batches(path, range(SAVED + 1, SAVED + MORE + 1))
    theirs = ranks(2).run(load_and_train, run, str(source), steps)[0]
    write_hf_config(run, source)
    folder = source / f"global_step{SAVED}"
    if "universal" in marks:
        folder = universal(folder, source / f"global_step{SAVED}_universal")
    checkpoint = open_checkpoint(folder)
    write_run(checkpoint, tmp_path / "run")
    manifest = read_manifest(step_directory(tmp_path / "run", SAVED))
    assert manifest.imported is not None and manifest.imported.trainer == checkpoint.trainer
    scale = {name: manifest.progress.loss_scale.get(name) for name in SCALE}
    assert scale == (SCALE if dtype == "fp16" else dict.fromkeys(SCALE) | {"cur_scale": 1.0})
    config = RunConfig.load(path, world_size=2)
    check_imported(tmp_path / "run", manifest, config, config.hf_config())
    for place in ({}, *chance.sample(PLACES, 2)):
        moved = json.loads(path.read_text())
        moved["zero_optimization"]["stage"] = place.get("stage", stage)
        moved["zero_optimization"].pop("sub_group_size", None)
        moved["zero_tp"]["parallel"] = {"tensor": place.get("tensor", 1)}
        (tmp_path / "moved.json").write_text(json.dumps(moved))
        arguments = str(tmp_path / "moved.json"), str(tmp_path / "run"), steps
        ours = ranks(2).run(continue_run, *arguments)[0]
        check_states(ours["before"], before, exact=True)
        tolerance = 2e-6 if dtype == "fp32" else 2e-3
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance), place
        assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-12), place
        if dtype == "fp32":
            check_states(ours["after"], theirs["after"], exact=False)


@THOROUGH
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "phi3", "mixtral", "gpt_oss"])
def test_moments_follow_the_rows_of_their_weights(
    ranks: Pools, tmp_path: Path, seed: int, model_type: str
) -> None:
    """Of matrices that are transposed, interleaved by head or expert, fused or stacked."""
    fields = tiny_fields(model_type, 61)
    run = PlainRun(fields, random.Random(seed).choice((1, 2, 3)), seed=seed % 1000)
    source = tmp_path / "source"
    steps = rows_of(run, seed, 2, BATCH, LENGTH)
    theirs = ranks(2).run(train_and_save, run, str(source), steps)[0]
    write_hf_config(run, source)
    checkpoint = find_checkpoint(write_run(open_checkpoint(source), tmp_path / "run").checkpoint)
    reader = CheckpointReader(checkpoint.path, checkpoint.manifest)
    for kind in KINDS:
        ours = to_ours(hf_config(fields), {name: states[kind] for name, states in theirs.items()})
        for name, tensor in ours.items():
            assert torch.equal(reader.whole(name, kind), tensor), (name, kind)
        assert ours.keys() == reader.parameters.keys()


@THOROUGH
def test_the_command_continues_and_then_checks_as_always(
    ranks: Pools, tmp_path: Path, seed: int
) -> None:
    """On two launched ranks; then the run's own checkpoints fix what the first start took."""
    chance = random.Random(seed)
    run = PlainRun(llama(chance), chance.choice((1, 2, 3)), seed=chance.randrange(1000))
    corpus(run, tmp_path, chance)
    path = our_config(run, tmp_path / "ours.json")
    source = tmp_path / "source"
    ranks(2).run(train_and_save, run, str(source), rows_of(run, seed, SAVED, BATCH, LENGTH))
    steps = batches(path, range(SAVED + 1, SAVED + MORE + 1))
    theirs = ranks(2).run(load_and_train, run, str(source), steps)[0]
    write_hf_config(run, source)
    done = zero_tp(tmp_path, "convert", "to-run", "source", "--output", "run")
    assert done.returncode == 0, done.stderr
    assert "kept: masters, moments, 4 updates" in done.stdout
    tensors = 3 + 9 * run.config["num_hidden_layers"]
    assert f"tensors: {3 * tensors} read, 0 unused" in done.stdout
    again = zero_tp(tmp_path, "convert", "to-run", "source", "--output", "run")
    assert again.returncode == 2 and "exists already; give another --output" in again.stderr
    shown = zero_tp(tmp_path, "inspect", "run", "--verify")
    assert shown.returncode == 0, shown.stderr
    assert f"deepspeed, {source / 'global_step4'}" in shown.stdout
    words = ("--deepspeed_config", "ours.json", "--output-dir", "run")
    trained = pretrain(2, tmp_path, *words, launcher="torchrun")
    assert trained.returncode == 0, trained.stderr
    assert f"resuming step 4 of {source / 'global_step4'} (deepspeed)" in trained.stdout
    losses = [line["loss"] for line in metrics_of(tmp_path / "run") if "loss" in line]
    assert losses == pytest.approx(theirs["losses"], rel=1e-5)
    manifest = read_manifest(step_directory(tmp_path / "run", SAVED + MORE))
    assert manifest.imported is None and manifest.fixed["zero_tp.training.seed"] == 5
    other = our_config(run, tmp_path / "other.json", training={"steps": 9, "seed": 6})
    config = RunConfig.load(other, world_size=2)
    with pytest.raises(UserError, match=r"zero_tp\.training\.seed: 6"):
        check_same_run(tmp_path / "run", manifest, config)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "betas": ({"optimizer.params.betas": [0.9, 0.97]}, r"optimizer\.params\.betas: \[0.9, 0.97\]"),
    "eps": ({"optimizer.params.eps": 1e-8}, r"optimizer\.params\.eps"),
    "rate": ({"optimizer.params.lr": 1e-3}, r"optimizer\.params\.lr: 0.001"),
    "Adam": (
        {"optimizer.type": "Adam", "optimizer.params.adam_w_mode": False},
        r"optimizer\.params\.adam_w_mode",
    ),
    "SGD": (
        {
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "zero_allow_untested_optimizer": True,
        },
        r"optimizer\.type: \"SGD\"",
    ),
    "decay": ({"zero_tp.param_groups": []}, "weight decay 0, but .* was trained with 0.125"),
    "share": (
        {
            "zero_tp.param_groups": [
                {"kind": "embedding", "weight_decay": DECAY, "lr_scale": 0.5},
                {"pattern": ".", "weight_decay": DECAY},
            ]
        },
        "of the highest rate",
    ),
    "size": ({"zero_tp.model.intermediate_size": 31}, r"zero_tp\.model\.intermediate_size: 31"),
    "rope": (
        {"zero_tp.model.rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        r"zero_tp\.model\.rope_parameters",
    ),
}


def changed(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for name in parents:
        values = values[name]
    values[last] = value


@THOROUGH
def test_another_optimizer_or_model_is_refused_by_name(
    ranks: Pools, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    run = PlainRun(llama(chance), chance.choice((1, 2, 3)), seed=chance.randrange(1000))
    source = tmp_path / "source"
    ranks(2).run(train_and_save, run, str(source), rows_of(run, seed, 2, BATCH, LENGTH))
    write_hf_config(run, source)
    write_run(open_checkpoint(source), tmp_path / "run")
    checkpoint = find_checkpoint(tmp_path / "run")
    for number, (name, (changes, message)) in enumerate(REFUSED.items()):
        path = our_config(run, tmp_path / f"{number}.json")
        values = json.loads(path.read_text())
        for key, value in changes.items():
            changed(values, key, value)
        path.write_text(json.dumps(values))
        config = RunConfig.load(path, world_size=2)
        with pytest.raises(UserError, match=message) as refusal:
            check_imported(checkpoint.path, checkpoint.manifest, config, config.hf_config())
        assert "\n" not in str(refusal.value), name


@THOROUGH
def test_what_cannot_be_continued_keeps_weights_alone_or_is_refused(
    ranks: Pools, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    fields = llama(chance)
    run = PlainRun(fields, chance.choice((1, 3)), frozen=("embed_tokens.weight",))
    ranks(2).run(train_and_save, run, str(tmp_path / "frozen"), rows_of(run, seed, 2, BATCH))
    write_hf_config(run, tmp_path / "frozen")
    with pytest.raises(UserError, match=r"embed_tokens\.weight was frozen"):
        write_run(open_checkpoint(tmp_path / "frozen"), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    plain = PlainRun(fields, 0)
    ranks(2).run(train_and_save, plain, str(tmp_path / "plain"), rows_of(plain, seed, 2, BATCH))
    write_hf_config(plain, tmp_path / "plain")
    done = zero_tp(tmp_path, "convert", "to-run", "plain", "--output", "run")
    assert done.returncode == 0, done.stderr
    assert "kept: weights alone, because stage 0 records no names" in done.stdout
    checkpoint = find_checkpoint(tmp_path / "run")
    assert (checkpoint.step, checkpoint.manifest.kinds) == (0, ["master"])
    ours = ranks(2).run(
        continue_weights, str(our_config(plain, tmp_path / "o.json")), str(tmp_path)
    )
    assert torch.equal(ours[0], ours[1])


def continue_weights(path: str, folder: str) -> Tensor:
    """An embedding of a run with imported weights, and of the file they come from."""
    engine, config = build_ours(path)
    start = Resume(find_checkpoint(Path(folder, "run")))
    start.restore(engine.zero, config.zero_tp.training.seed)
    assert engine.zero.states().steps is None and engine.zero.updates == 0
    saved = torch.load(next(Path(folder, "plain").glob("*/mp_rank_00*")), weights_only=False)
    name = "model.embed_tokens.weight"
    assert torch.equal(optimizer_tensors(engine)[name], saved["module"][name])
    return optimizer_tensors(engine)[name]


GOING_ON = [(1, 3, "fp32", False), (2, 1, "bf16", True), (2, 2, "fp32", True)]


@THOROUGH
@pytest.mark.parametrize(("stage", "world", "dtype", "scheduled"), GOING_ON)
def test_deepspeed_continues_a_run_of_ours(
    ranks: Pools, tmp_path: Path, seed: int, stage: int, world: int, dtype: str, scheduled: bool
) -> None:
    """On another number of ranks, with masters and moments bit for bit."""
    chance = random.Random(seed)
    fields = llama(chance, tie_word_embeddings=chance.random() < 0.5)
    settings: dict[str, Any] = {"scheduler": SCHEDULE} if scheduled else {}
    run = PlainRun(fields, stage, dtype, chance.randrange(1000), grouped=True, settings=settings)
    batch = 12
    path = our_config(run, tmp_path / "ours.json")
    values = json.loads(path.read_text())
    values |= {"train_batch_size": batch}
    values["zero_optimization"]["stage"] = chance.choice((0, 1, 2, 3))
    path.write_text(json.dumps(values))
    first = rows_of(run, seed, SAVED, batch, LENGTH)
    steps = rows_of(run, seed + 1, 2, batch, LENGTH)
    ours = ranks(2).run(train_ours, str(path), str(tmp_path / "run"), first, steps)[0]
    lines = convert_to_universal(tmp_path / "run", tmp_path / "universal")
    assert "4 updates" in lines[0]
    load = {"checkpoint": {"load_universal": True}}
    universal_run = replace(run, settings=run.settings | load)
    arguments = universal_run, str(tmp_path / "universal"), steps
    theirs = ranks(world).run(load_and_train, *arguments)[0]
    check_states(ours["before"], theirs["before"], exact=True)
    assert theirs["steps"] == SAVED
    assert theirs["rates"] == pytest.approx(ours["rates"], rel=1e-12)
    tolerance = 2e-6 if dtype == "fp32" else 2e-3
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=tolerance)
    if dtype == "fp32":
        check_states(ours["after"], theirs["after"], exact=False)
    back = open_checkpoint(tmp_path / "universal", config=hf_config(fields))
    assert back.states is None and "lack betas" in back.states_problem
    for name, tensor in back.tensors.items():
        assert torch.equal(read_whole(tensor), ours["before"]["master"][name])


@THOROUGH
def test_deepspeeds_stage_3_finds_no_file_to_load(ranks: Pools, tmp_path: Path, seed: int) -> None:
    """Its loader would count the updates of two groups twice."""
    run = PlainRun(llama(random.Random(seed)), 3, grouped=True)
    write_checkpoint(tmp_path / "run", hf_config(run.config))
    with rewritten(step_directory(tmp_path / "run", 1)) as manifest:
        manifest["progress"]["learning_rates"] = [1e-3, 1e-3]
        names = ("global_steps", "global_samples", "skipped_steps")
        manifest["progress"]["counters"] = dict.fromkeys(names, 1)
    convert_to_universal(tmp_path / "run", tmp_path / "universal")
    run = replace(run, settings={"checkpoint": {"load_universal": True}})
    steps = rows_of(run, seed, 1, BATCH, LENGTH)
    with pytest.raises(RankError, match=r"len\(self\.ckpt_list\) > 0"):
        ranks(2).run(load_and_train, run, str(tmp_path / "universal"), steps)


def train_ours(
    path: str, folder: str, first: Sequence[Tensor], steps: Sequence[Tensor]
) -> dict[str, Any]:
    """Train, save, and train on; the states and losses of the steps after."""
    from zero_tp.run.checkpoint.save import run_saver

    engine, config = build_ours(path)
    saver = run_saver(engine.zero, config, Path(folder))
    results: dict[str, Any] = {"losses": [], "rates": []}
    topology = engine.topology
    for step, rows in enumerate([*first, *steps]):
        if step == len(first):
            saver.save(step)
            assert saver.outcome() == (step, "")
            results["before"] = whole_states(engine)
        rate = engine.learning_rate
        own = rows.chunk(topology.data)[topology.data_rank]
        loss = engine.train_step([(own[:, :-1], own[:, 1:])])
        if step >= len(first):
            results["losses"].append(loss)
            results["rates"].append(rate)
    return results | {"after": whole_states(engine)}


def whole_states(engine: Any) -> dict[str, dict[str, Tensor]]:
    return {kind: optimizer_tensors(engine, *names) for kind, names in KINDS.items()}


@THOROUGH
def test_what_deepspeed_would_not_load_is_refused(tmp_path: Path) -> None:
    config = hf_config(tiny_fields("deepseek_v3", 71))
    write_checkpoint(tmp_path / "run", config)
    with pytest.raises(UserError, match=r"has the buffer .*bias.* DeepSpeed loads no buffers"):
        convert_to_universal(tmp_path / "run", tmp_path / "out")
    plain = hf_config(tiny_fields("llama", 71))
    write_checkpoint(tmp_path / "sgd", plain, kinds=("master", "momentum_buffer"))
    with pytest.raises(UserError, match="has momentum_buffer, and only Adam's moments"):
        convert_to_universal(tmp_path / "sgd", tmp_path / "out")
    write_checkpoint(tmp_path / "adam", plain)
    with pytest.raises(UserError, match="its groups have 0 learning rates"):
        convert_to_universal(tmp_path / "adam", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out" / "something").mkdir(parents=True)
    with pytest.raises(UserError, match="exists already"):
        convert_to_universal(tmp_path / "adam", tmp_path / "out")
