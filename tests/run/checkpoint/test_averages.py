"""Averages of weights in checkpoints: resumed and started on any topology, exported, and the mean
of several checkpoints.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.checkpoint_runs import (
    VOCABULARY,
    build,
    steps_of,
    write_config,
)
from tests.support.checkpoints import KINDS, drawn, write_checkpoint
from tests.support.compare import check_close
from tests.support.corrected_routers import corrected_fields
from tests.support.launched import forked_zero_tp
from tests.support.native import to_theirs
from tests.support.parallel_run import optimizer_tensors
from tests.support.pools import Pools
from tests.support.tiny_models import tiny_gpt2_config
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.run.checkpoint.convert import average_checkpoints, to_huggingface
from zero_tp.run.checkpoint.directory import step_directory
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.checkpoint.inspect import inspect
from zero_tp.run.checkpoint.reader import CheckpointReader
from zero_tp.run.checkpoint.start_point import Branch, Resume, describe_average

SAVED, LAST = 2, 4
EMA = {"decay": 0.7}


def run_file(
    path: Path,
    tensor: int,
    stage: int,
    *,
    dtype: str = "fp32",
    offload: str = "none",
    ema: dict[str, Any] | None = EMA,
    **model: Any,
) -> Path:
    config = json.loads(write_config(path, stage, dtype, tensor, offload).read_text())
    names = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
    config["zero_tp"]["model"] |= dict.fromkeys(names, 0.0) if not model else {}
    config["zero_tp"]["model"] = model or config["zero_tp"]["model"]
    # Key biases have a gradient of exactly zero, whose rounding a smaller eps would blow up.
    config["optimizer"]["params"]["eps"] = 1e-3
    config["zero_tp"]["training"]["ema"] = ema
    path.write_text(json.dumps(config))
    return path


def trained(path: str, run: str) -> dict[str, Tensor]:
    """Train and save on the way; the average after the last step."""
    from zero_tp.run.checkpoint.save import run_saver

    engine, config = build(path)
    saver = run_saver(engine.zero, config, Path(run))
    for step in range(1, LAST + 1):
        steps_of(engine, step, step)
        if step == SAVED:
            saver.save(step)
            assert saver.outcome() == (step, "")
    return optimizer_tensors(engine, "ema") if engine.zero.average else {}


def started(path: str, run: str, kind: type[Resume | Branch]) -> tuple[dict[str, Tensor], ...]:
    """The masters and the average of a run that starts from a checkpoint, and the latter after
    the last step.
    """
    engine, config = build(path)
    kind(find_checkpoint(Path(run))).restore(engine.zero, config.zero_tp.training.seed)
    masters = optimizer_tensors(engine)
    if engine.zero.average is None:
        assert "ema" not in engine.zero.states().kinds()
        return masters, {}, {}
    restored = optimizer_tensors(engine, "ema")
    steps_of(engine, SAVED + 1, LAST)
    return masters, restored, optimizer_tensors(engine, "ema")


def saved(run: Path, kind: str) -> dict[str, Tensor]:
    checkpoint = find_checkpoint(run)
    reader = CheckpointReader(checkpoint.path, checkpoint.manifest)
    tensors = {name: reader.whole(name, kind) for name in reader.parameters}
    return to_theirs(checkpoint.hf_config(), tensors)


Place = tuple[int, int, str, str]
PLACES: list[tuple[Place, Place]] = [
    ((2, 1, "fp32", "none"), (1, 3, "fp32", "none")),
    ((1, 3, "fp32", "none"), (4, 2, "fp32", "none")),
    ((4, 0, "fp32", "none"), (2, 2, "fp32", "optimizer")),
    ((2, 2, "fp32", "optimizer"), (2, 0, "fp32", "none")),
    ((2, 1, "bf16_fp32_accumulation", "none"), (2, 1, "bf16_fp32_accumulation", "none")),
    ((2, 3, "bf16", "parameters"), (1, 1, "bf16", "none")),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), PLACES)
def test_an_average_resumes_on_another_grid(
    ranks: Pools, tmp_path: Path, before: Place, after: Place
) -> None:
    """Bit for bit; the steps after it move it as in the whole run."""
    paths = [
        run_file(tmp_path / f"{name}.json", tensor, stage, dtype=dtype, offload=offload)
        for name, (tensor, stage, dtype, offload) in (("before", before), ("after", after))
    ]
    run = tmp_path / "run"
    whole = ranks(4).run(trained, str(paths[0]), str(run))[0]
    masters, restored, again = ranks(4).run(started, str(paths[1]), str(run), Resume)[0]
    for found, kind in ((masters, "master"), (restored, "ema")):
        expected = saved(run, kind)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(torch.equal(masters[name], restored[name]) for name in masters)
    check_close(again, whole, relative=1e-5 if before[2] == "fp32" else 5e-3)


@THOROUGH
def test_an_average_starts_where_a_checkpoint_has_none(ranks: Pools, tmp_path: Path) -> None:
    """As the weights, at a resume and at another run's start; a run without one drops it."""
    with_average = run_file(tmp_path / "with.json", 2, 1)
    without = run_file(tmp_path / "without.json", 2, 1, ema=None)
    for name, path in (("with", with_average), ("without", without)):
        ranks(2).run(trained, str(path), str(tmp_path / name))
    manifests = [find_checkpoint(tmp_path / name).manifest for name in ("with", "without")]
    assert [manifest.ema for manifest in manifests] == [EMA["decay"], None]
    for run, kind in (("without", Resume), ("with", Branch), ("without", Branch)):
        start = str(with_average), str(tmp_path / run), kind
        masters, restored, after = ranks(2).run(started, *start)[0]
        assert all(torch.equal(masters[name], restored[name]) for name in masters)
        assert not any(torch.equal(after[name], restored[name]) for name in masters)
    assert ranks(2).run(started, str(without), str(tmp_path / "with"), Resume)[0][1] == {}
    # What a resume says of it.
    assert describe_average(manifests[1], has_average=True) == [
        "the average (ema) starts as the weights of step 2, which has none"
    ]
    assert describe_average(manifests[0], has_average=False) == [
        "the average (ema) of step 2 is dropped: none is kept from here on"
    ]
    for manifest, has_average in ((manifests[0], True), (manifests[1], False)):
        assert describe_average(manifest, has_average=has_average) == []


@THOROUGH
def test_an_export_has_the_average_and_the_last_biases(ranks: Pools, tmp_path: Path) -> None:
    model = corrected_fields(vocab_size=VOCABULARY)
    path = run_file(tmp_path / "run.json", 2, 1, **model)
    config = json.loads(path.read_text())
    config["zero_tp"]["training"]["router_bias_update_rate"] = 0.01
    path.write_text(json.dumps(config))
    run = tmp_path / "run"
    ranks(4).run(trained, str(path), str(run))
    for ema in (False, True):
        to_huggingface(run, tmp_path / str(ema), ema=ema)
    averaged, last = (load_file(tmp_path / str(ema) / "model.safetensors") for ema in (True, False))
    checkpoint = find_checkpoint(run)
    reader = CheckpointReader(checkpoint.path, checkpoint.manifest)
    expected = {
        name: reader.whole(name, "master" if name.endswith("correction_bias") else "ema")
        for name in reader.parameters
    }
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "True")
    tensors = opened.state_dict()
    for name, tensor in to_theirs(checkpoint.hf_config(), expected).items():
        assert torch.equal(tensors[name], tensor), name
    biases = [name for name in averaged if name.endswith("e_score_correction_bias")]
    assert biases and all(averaged[name].any() for name in biases)
    same = [name for name in averaged if torch.equal(averaged[name], last[name])]
    assert sorted(same) == sorted(biases)
    assert "average     of the weights, decay 0.7" in inspect(run)


def at_step(step: int, name: str, kind: str, shape: Any) -> Tensor:
    return drawn(f"{name} {step}", kind, shape)


def three_checkpoints(run: Path, model: Any) -> None:
    for step, tensor, data in ((10, 1, 1), (20, 2, 3), (30, 4, 1)):
        write_checkpoint(
            run, model, tensor=tensor, data=data, step=step, whole=partial(at_step, step)
        )


@pytest.mark.parametrize("weights", [None, [1.0, 1.0, 2.0]])
def test_a_mean_of_checkpoints_is_that_of_their_masters(
    tmp_path: Path, weights: list[float] | None
) -> None:
    """Of any topologies, in any order; only the weights' proportions count."""
    run, model = tmp_path / "run", tiny_gpt2_config()
    three_checkpoints(run, model)
    steps = [30, 10, 20]
    result = average_checkpoints(run, steps, tmp_path / "mean", weights=weights)
    assert result.checkpoint == step_directory(run, 30)
    shares = [1 / 3] * 3 if weights is None else [0.25, 0.25, 0.5]
    exports = []
    for step in steps:
        to_huggingface(step_directory(run, step), tmp_path / str(step))
        exports.append(load_file(tmp_path / str(step) / "model.safetensors"))
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert found.keys() == exports[0].keys()
    for name, tensor in found.items():
        parts = zip(exports, shares, strict=True)
        expected: Any = sum(export[name].double() * share for export, share in parts)
        # The last bit depends on the order of fp64's sum.
        torch.testing.assert_close(tensor, expected.float(), rtol=2**-23, atol=0)


def test_a_mean_has_the_last_biases(tmp_path: Path) -> None:
    model = AutoConfig.for_model(**corrected_fields())
    three_checkpoints(tmp_path / "run", model)
    result = average_checkpoints(tmp_path / "run", [20, 10], tmp_path / "mean")
    assert result.weights.endswith("(0.5); buffers and routers' biases of step 20")
    to_huggingface(step_directory(tmp_path / "run", 20), tmp_path / "last")
    mean, last = (load_file(tmp_path / name / "model.safetensors") for name in ("mean", "last"))
    same = [name for name in mean if torch.equal(mean[name], last[name])]
    assert same == [name for name in mean if name.endswith("e_score_correction_bias")] != []


MISTAKES: dict[str, tuple[list[int], list[float] | None]] = {
    "has no complete checkpoint of step 15; it has 10, 20, 30": ([10, 15], None),
    "a mean needs two steps or more; export one with convert to-hf": ([10], None),
    "step 10 is there twice; give it a larger --weights": ([10, 20, 10], None),
    "2 for 3 steps; give one for each": ([10, 20, 30], [1.0, 2.0]),
    "0.0 is no positive number; leave its step out": ([10, 20], [1.0, 0.0]),
    "nan is no positive number; leave its step out": ([10, 20], [1.0, float("nan")]),
    "inf is no positive number; leave its step out": ([10, 20], [float("inf"), 1.0]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_mean_is_refused(tmp_path: Path, mistake: str) -> None:
    three_checkpoints(tmp_path / "run", tiny_gpt2_config())
    steps, weights = MISTAKES[mistake]
    with pytest.raises(UserError) as caught:
        average_checkpoints(tmp_path / "run", steps, tmp_path / "mean", weights=weights)
    assert mistake in str(caught.value) and not (tmp_path / "mean").exists()


def test_an_export_without_an_average_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", tiny_gpt2_config())
    with pytest.raises(UserError, match="has no average of the weights; leave out --ema, or train"):
        to_huggingface(tmp_path / "run", tmp_path / "export", ema=True)


@THOROUGH
def test_the_commands(tmp_path: Path) -> None:
    model = tiny_gpt2_config()
    kinds = (*KINDS, "ema")
    write_checkpoint(tmp_path / "run", model, step=10, kinds=kinds)
    write_checkpoint(tmp_path / "run", model, step=20, kinds=kinds, whole=partial(at_step, 20))
    words = "convert average run --steps 10,20 --weights 1,3 --output mean"
    done = forked_zero_tp(tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    assert "weights: mean of the steps 10 (0.25), 20 (0.75)\n" in done.stdout
    done = forked_zero_tp(tmp_path, *["convert", "to-hf", "run", "--ema", "--output", "ema"])
    assert "weights: moving average of the weights, decay 0.999\n" in done.stdout
    for wrong, message in (
        ("--steps 10,x", "'10,x' is no list of steps such as 4000,4500"),
        ("--steps 10,20 --weights 1;2", "'1;2' is no list of weights such as 1,2"),
        ("--steps 10,25", "run has no complete checkpoint of step 25; it has 10, 20"),
    ):
        words = f"convert average run {wrong} --output other"
        done = forked_zero_tp(tmp_path, *words.split())
        assert done.returncode == 2 and message in done.stderr.splitlines()[-1]
        assert not (tmp_path / "other").exists()
