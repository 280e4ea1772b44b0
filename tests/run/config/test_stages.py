"""Mistakes in the stages of a run, each named with its stage; and the shipped recipes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.staged_runs import write_staged
from zero_tp.base.errors import UserError
from zero_tp.base.shipped import CONFIGS, shipped_path
from zero_tp.run.config import RunConfig
from zero_tp.run.run_inputs import RunInputs

RECIPES = sorted(shipped_path(CONFIGS).glob("recipes/*.json"))
WORLDS = {"olmo3_7b": 128, "smollm3_3b": 384, "wsd_small": 2}
Change = Callable[[dict[str, Any], list[Any]], Any]
STAGES = r"zero_tp.training.stages"
MISTAKES: list[tuple[Change, str]] = [
    (
        lambda t, s: s[1].pop("tokens"),
        f"{STAGES}[1]: …: takes one of tokens, steps and until: it has",
    ),
    (
        lambda t, s: s[1].update(steps=3),
        f"{STAGES}[1]: …: takes one of tokens, steps and until: it has",
    ),
    (lambda t, s: s[1].update(tokns=3), f'{STAGES}[1].tokns: unknown key; did you mean "tokens"?'),
    (lambda t, s: s[0].update(steps=-1), f"{STAGES}[0].steps: -1: must be greater than 0"),
    (
        lambda t, s: s[1].update(name="main"),
        f'{STAGES}[1].name: "main" is the name of {STAGES}[0], too',
    ),
    (lambda t, s: s.__setitem__(0, "main"), f'{STAGES}[0]: expected an object, got "main"'),
    (
        lambda t, s: s[2].update(steps=None, until=0.5),
        f"{STAGES}[2].until: a share of a length that",
    ),
    (
        lambda t, s: (t.update(steps=20), s[2].update(steps=None, until=0.5)),
        f"{STAGES}[2].until: is not 1.0: the last stage ends with the run; set it to 1.0",
    ),
    (
        lambda t, s: (
            t.update(steps=20),
            s[1].update(tokens=None, until=0.1),
            s[2].update(steps=None, until=1.0),
        ),
        f"{STAGES}[1]: has no step: the stages before it reach its end",
    ),
    (lambda t, s: t.update(steps=20), "zero_tp.training.steps: 20, but its stages have 15 steps"),
    (
        lambda t, s: t.update(tokens=9),
        "zero_tp.training.tokens: 9, but its stages have 3132 tokens",
    ),
    (
        lambda t, s: s[1].update(train_batch_size=13),
        f"{STAGES}[1].train_batch_size: 13 ≠ micro 2 × ",
    ),
    (
        lambda t, s: s[2].update(batch_tokens=100),
        f"{STAGES}[2].batch_tokens: 100 tokens ≠ samples of",
    ),
    (
        lambda t, s: s[2].update(train_batch_size=8),
        f"{STAGES}[2]: …: has train_batch_size and batch_",
    ),
    (
        lambda t, s: s[0]["batch_size_rampup"].update(start=12),
        f"{STAGES}[0].batch_size_rampup.start: 12 samples, but the full batch has 12",
    ),
    (
        lambda t, s: s[0]["batch_size_rampup"].update(increment=5),
        f"{STAGES}[0].batch_size_rampup.increment: 4 + n × 5 is never the full batch of 12 samples",
    ),
    (
        lambda t, s: t.update(batch_size_rampup={"start": 4, "increment": 4, "tokens": 9}),
        f"zero_tp.training.batch_size_rampup: given with {STAGES}[0].batch_size_rampup",
    ),
    (
        lambda t, s: s[2].update(train_micro_batch_size_per_gpu=3),
        f"{STAGES}[2].batch_tokens: 16 ≠ micro 3 × data 2 × accumulation",
    ),
    (
        lambda t, s: s[1].update(train_micro_batch_size_per_gpu=5),
        f"{STAGES}[1].train_micro_batch_size_per_gpu: 12 ≠ micro 5 × data 2",
    ),
    (
        lambda t, s: s[0].update(scheduler={"type": "constant"}),
        f"{STAGES}[0].scheduler: replaces the file's scheduler from the first step on; leave one",
    ),
    (
        lambda t, s: s[2].update(
            scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
        ),
        f"{STAGES}[2].scheduler.params.cycle_momentum: sets the optimizer's betas, which the next",
    ),
    (
        lambda t, s: s[2].update(scheduler={"type": "linear", "params": {"num_warmup_steps": 0}}),
        f'{STAGES}[2].scheduler.params.num_training_steps: required, but not given; write "auto"',
    ),
    (
        lambda t, s: s[2].update(sequence_length=128, batch_tokens=1024),
        f"{STAGES}[2].sequence_length: 128 tokens, but the model has 64 positions",
    ),
    (
        lambda t, s: s[1].update(rope={"rope_theta": -1}),
        f"{STAGES}[1].rope.rope_theta: -1 is not a pos",
    ),
    (lambda t, s: s[1].update(rope={"rope_typ": "a"}), f"{STAGES}[1].rope.rope_typ: rope_type "),
    (
        lambda t, s: s[1].update(rope={"rope_type": "yarn"}),
        f"{STAGES}[1].rope.factor: null is not a",
    ),
    (
        lambda t, s: s[2]["scheduler"].update(type="lin"),
        f'{STAGES}[2].scheduler.type: "lin" is unknown; did you mean "linear"?',
    ),
    (
        lambda t, s: s[2]["scheduler"]["params"].update(warmup_tokens=100),
        f"{STAGES}[2].scheduler.params.warmup_tokens: given with num_warmup_steps; give",
    ),
    (
        lambda t, s: s[2]["scheduler"]["params"].update(decay_tokens=100),
        f'{STAGES}[2].scheduler.params.decay_tokens: a "linear" schedule has no decay phase',
    ),
    (
        lambda t, s: s[1].update(recompute={"mode": "full", "layers": 9}),
        f"{STAGES}[1].recompute.layers: refused above the model's layers",
    ),
    (
        lambda t, s: s[2].update(recompute={"mode": "full", "keep_micro_batches": 2}),
        f"{STAGES}[2].recompute.keep_micro_batches: refused from a step's micro-batches on",
    ),
    (lambda t, s: s[1].update(lr_scale=0), f"{STAGES}[1].lr_scale: 0: must be greater than 0"),
    (lambda t, s: s[1].update(data={}), f"{STAGES}[1].data: is empty"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_staged(tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize(("change", "message"), MISTAKES)
def test_a_mistake_is_named_with_its_stage(
    change: Change, message: str, config: Path, tmp_path: Path
) -> None:
    raw = json.loads(config.read_text())
    training = raw["zero_tp"]["training"]
    change(training, training["stages"])
    path = tmp_path / "run.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError) as caught:
        RunConfig.load(path, world_size=2)
    (line,) = map(str, caught.value.errors)
    begin, _, end = message.partition("…")
    assert line.startswith(begin) and end in line and len(line) <= 400


def errors_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        RunConfig.load(path, overrides, world_size=2)
    return [str(error) for error in caught.value.errors]


def test_equal_mistakes_of_two_stages_are_two_lines(config: Path) -> None:
    """One that a stage has from the stage before is told once."""
    policy = f'{STAGES}[1].recompute={{"mode": "full", "layers": 9}}'
    again = f'{STAGES}[2].recompute={{"mode": "full", "layers": 9}}'
    assert len(errors_of(config, policy, again)) == 2
    rope = f"{STAGES}[1].rope.rope_theta=-1"
    assert [line.partition(": ")[0] for line in errors_of(config, rope)] == [
        f"{STAGES}[1].rope.rope_theta"
    ]
    ramp = [f"{STAGES}[0].batch_size_rampup.{name}=2" for name in ("start", "increment")]
    assert [line.partition(": ")[0].rpartition(".")[2] for line in errors_of(config, *ramp)] == [
        "start",
        "increment",
    ]
    # An item of another type does not move the numbers of those after it.
    items = errors_of(config, f"{STAGES}[0]=main", f"{STAGES}[2].steps=many")
    assert [line.partition(": ")[0] for line in items] == [f"{STAGES}[0]", f"{STAGES}[2].steps"]
    assert "the list has 3 items" in errors_of(config, f"{STAGES}[3].steps=2")[0]


def test_another_type_of_rope_has_only_its_own_fields(config: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    overrides = [
        f"{STAGES}[1].rope={json.dumps(yarn)}",
        f'{STAGES}[2].rope={{"rope_type": "default"}}',
    ]
    run = RunConfig.load(config, overrides, world_size=2)
    ropes = [run.stage_config(index).hf_config().rope_parameters for index in range(3)]
    assert ropes[1] == {"rope_theta": 10000.0, **yarn}
    assert ropes[2] == {"rope_theta": 10000.0, "rope_type": "default"} == ropes[0]


def test_a_ramp_that_its_stage_does_not_end_is_noted(config: Path) -> None:
    run = RunConfig.load(config, [f"{STAGES}[0].batch_size_rampup.tokens=4000"], world_size=2)
    assert f"{STAGES}[0].batch_size_rampup.tokens: 4000, but the stage ends after 512" in "\n".join(
        run.cautions()
    )


def test_all_mistakes_are_told_at_once(config: Path, tmp_path: Path) -> None:
    raw = json.loads(config.read_text())
    stages = raw["zero_tp"]["training"]["stages"]
    stages[0]["lr_scale"], stages[1]["tokens"], stages[2]["sequence_length"] = -1, "many", 0
    raw["zero_optimization"]["stage"] = 7
    (tmp_path / "run.json").write_text(json.dumps(raw))
    with pytest.raises(UserError) as caught:
        RunConfig.load(tmp_path / "run.json", world_size=2)
    keys = {str(error).partition(": ")[0] for error in caught.value.errors}
    wrong = {f"{STAGES}[0].lr_scale", f"{STAGES}[1].tokens", f"{STAGES}[2].sequence_length"}
    assert keys == {*wrong, "zero_optimization.stage"}


def test_a_resolved_config_means_the_same(config: Path, tmp_path: Path) -> None:
    """Its lengths are in steps, and "auto" has values."""
    first = RunConfig.load(config, world_size=2)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(first.resolved()))
    second = RunConfig.load(path, world_size=2)
    assert second.resolved() == first.resolved()
    assert second.stages == first.stages
    for step in range(1, 17):
        assert second.timeline.step_samples(step) == first.timeline.step_samples(step)


def test_too_many_epochs_are_refused(config: Path, tmp_path: Path) -> None:
    """Corpus b has 17 windows of 16 tokens, of which `mixed` reads 36, and 8 of 32."""
    raw = json.loads(config.read_text())
    for limit, is_refused in ((6.7, False), (6.5, True)):
        limited = copy.deepcopy(raw)
        limited["zero_tp"]["data"]["max_epochs"] = limit
        (tmp_path / "run.json").write_text(json.dumps(limited))
        run = RunConfig.load(tmp_path / "run.json", world_size=2)
        if not is_refused:
            RunInputs(run, tmp_path / "run")
            continue
        message = r"^zero_tp\.data\.max_epochs: 6\.5, but the run reads \S+/b 6\.61\d times"
        with pytest.raises(UserError, match=message):
            RunInputs(run, tmp_path / "run")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid(path: Path) -> None:
    run = RunConfig.load(path, world_size=WORLDS[path.stem])
    assert len(run.stages) == len(run.zero_tp.training.stages) >= 2


def test_the_published_recipes_have_the_published_lengths() -> None:
    """5.93 T tokens by OLMo 3's model card, and the steps in the names of its checkpoints
    (stage1/step1413814, stage2/step47684); 11.1 T tokens by SmolLM3's.
    """
    olmo, smollm = (
        RunConfig.load(shipped_path(CONFIGS) / f"recipes/{name}.json", world_size=WORLDS[name])
        for name in ("olmo3_7b", "smollm3_3b")
    )
    lengths = [len(olmo.timeline.stage_steps(index)) for index in range(3)]
    assert lengths == [1413814, 47684, 11921]
    assert round(olmo.timeline.stage_tokens(0) / 1e12, 2) == 5.93
    assert round(smollm.timeline.tokens / 1e12, 1) == 11.1
    rope = olmo.stage_config(2).hf_config().rope_parameters
    assert rope["full_attention"]["rope_type"] == "yarn"
    assert rope["sliding_attention"]["rope_type"] == "default"
