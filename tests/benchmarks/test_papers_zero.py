"""ZeRO's results: the plan and what is measured, against the paper's formulas and figures."""

from __future__ import annotations

import pytest

from benchmarks.papers import zero, zero_residual
from benchmarks.papers.engines import small_config
from benchmarks.papers.reproduction import Reproduction
from benchmarks.papers.rows import Row
from benchmarks.papers.steps import measured_steps, planned_steps
from tests.tiers import THOROUGH
from zero_tp.model.recompute.stores import MAX_COPIES_OUT

# What the benchmarks publish.
pytestmark = THOROUGH


def rows_of(made: Reproduction) -> list[Row]:
    return [row for rows in made.tables.values() for row in rows]


def test_deepspeed_allocates_a_little_more_than_the_formula() -> None:
    """The formula is published; what ZeRO-1 reduces and what a partition reaches into come on
    top.
    """
    for row in rows_of(zero.model_states(measured=False)):
        assert row.planned is not None and row.formula is not None
        assert 0.999 * row.formula < row.planned < 1.08 * row.formula, row.label
        assert row.published is None or row.formula == pytest.approx(row.published, rel=0.01), (
            row.label
        )


def test_a_higher_stage_and_more_devices_hold_a_larger_model() -> None:
    few, many = zero.largest_model(measured=False).tables.values()
    for table in (few, many):
        planned = [row.planned or 0 for row in table]
        assert planned == sorted(planned) and all(
            (row.planned or 0) < (row.formula or 0) for row in table
        )
    assert [(a.planned or 0) < (b.planned or 0) for a, b in zip(few, many, strict=True)] == [
        False,
        True,
        True,
        True,
    ]


def test_residual_states_are_split_constant_and_whole() -> None:
    """P_a leaves a t-th of a checkpoint, P_a+cpu what is on its way, C_B does not grow, and M_D
    leaves fewer gaps.
    """
    kept, buffers, printed, gaps = zero.residual(measured=False).tables.values()
    whole, split, host = ((row.planned or 0, row.formula or 0) for row in kept)
    layers = 36
    for column, leaving in ((0, MAX_COPIES_OUT), (1, 0)):
        checkpoint = (whole[column] - split[column]) / layers / (1 - 1 / 8)
        assert (split[column] - host[column]) == pytest.approx(
            (layers - leaving) * checkpoint / 8, rel=0.01
        )
    assert len({row.planned for row in buffers}) == 1
    assert all(row.formula == pytest.approx(row.published, rel=0.04) for row in printed)
    found = {row.label: row.planned or 0 for row in gaps}
    assert found["M_D on: never filled"] < found["M_D off: never filled"] * 0.75
    assert found["M_D on: least memory that runs it"] < found["M_D off: least memory that runs it"]


def test_volume_is_half_as_much_again_under_stage_3() -> None:
    (rows,) = zero.volume(measured=False).tables.values()
    sent = [row.formula or 0 for row in rows]
    assert [each / sent[0] for each in sent] == pytest.approx([1, 1, 1, 1.5])


@pytest.mark.parametrize("most", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("guess", [0, 1, 3, 8, 41])
def test_the_greatest_that_fits_is_found(most: int, guess: int) -> None:
    asked = list[int]()

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= most

    assert zero.last(fits, guess) == most
    assert len(asked) == len(set(asked)) < 16 and min(asked) > 0


def test_measured_states_are_planned() -> None:
    """Gradients on their way to a bucket of a million elements come on top."""
    rows, _ = zero.states_on(2)
    assert len(rows) == 12
    for row in rows:
        assert row.measured is not None and row.planned is not None
        most = row.planned + (2 if "gradients" in row.label else 0.01)
        assert 0.999 * row.planned < row.measured <= most, row.label


WIDER = ("data_types.grad_accum_dtype=fp32", "gradient_accumulation_steps=2")


@pytest.mark.parametrize(
    "changes", [(zero.at_stage(1), *WIDER), (zero.at_stage(2),), (zero.at_stage(3), *WIDER)]
)
def test_both_steps_peaks_of_passes_and_update_are_planned(changes: tuple[str, ...]) -> None:
    """Of a new run's first step, in which the optimizer makes its moments, and of a later one."""
    config = small_config(2, *changes)
    real, plan = measured_steps(config).values(), planned_steps(config, cpu=True).values()
    for found, planned in zip(real, plan, strict=True):
        for phases in (("forward", "backward"), ("step",)):
            most, expected = (
                max(one.total for one in each if one.phase in phases) for each in (found, planned)
            )
            assert expected == pytest.approx(most, rel=0.01), phases


def test_a_constant_buffer_does_not_grow_with_the_model() -> None:
    for row in zero_residual.buffers_measured():
        assert row.measured == pytest.approx(row.formula, rel=0.01), row.label


def test_a_model_that_is_too_large_for_its_ranks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "BUDGET", 128 * 2**20)
    most = zero.most_built(2, 2, guess=3)
    assert 0 < most <= zero.most_planned(2, 2) < 8


def test_stage_3_sends_half_as_much_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "RANKS", (1, 2))
    small, _ = zero.volume(measured=True).tables.values()
    sent = {row.label: row.measured for row in small}
    # ZeRO-3 gathers biases and norms too, and some weights once more.
    assert [sent[name] for name in zero.STAGES.values()] == pytest.approx([2, 3, 3, 3], rel=0.03)
    owners = [each for name, each in sent.items() if "owners" in name]
    assert owners == pytest.approx([2, 2], rel=0.03)
