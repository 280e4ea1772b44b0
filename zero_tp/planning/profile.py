"""`pretrain.py --profile-steps FIRST:LAST` records rank 0's memory over time by category and its time by operator.

Memory is followed storage by storage (planning/tracking.py), the same way on every device. That costs time, so it is
done in the first of the steps, and the others are timed.
"""

from __future__ import annotations

import gc
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from zero_tp.constants import GIB
from zero_tp.errors import UserError, first_line
from zero_tp.files import write_atomically
from zero_tp.planning.memory import CATEGORIES, Point
from zero_tp.planning.tracking import Allocation, Allocations
from zero_tp.training.callback import Callback, TrainState
from zero_tp.training.engine import TrainingEngine
from zero_tp.zero.states import partition_of

OPERATORS = 15


def step_range(text: str, steps: int) -> tuple[int, int]:
    """Return the first and the last step of FIRST:LAST; both are profiled.

    Args:
        steps: of the run.

    Raises:
        UserError: not two positive numbers in order, or the run has fewer steps.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = (int(match[1][:20]), int(match[2][:20])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"--profile-steps: {text!r} is not FIRST:LAST, two step numbers in order; write it as 3:5")
    if last > steps:
        raise UserError(f"--profile-steps {first}:{last}: zero_tp.training.steps is {steps}; choose earlier steps")
    return first, last


class StepProfiler(Callback):
    """Record rank 0's steps FIRST to LAST and write RUN/profile/steps_FIRST-LAST.html, .json and PNGs.

    Memory is recorded in FIRST and operators in the others, or both when there is one step only. In a run that resumes
    between them, FIRST is its first step.
    """

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self._operators: dict[str, float] = {}
        self._timed = 0
        self._points: list[Point] = []
        self._ended = False
        self._recording = ExitStack()

    def on_start(self, state: TrainState) -> None:
        self.engine, self.directory = state.engine, state.directory / "profile"
        self._enabled = state.is_rank_zero

    def on_step_begin(self, state: TrainState) -> None:
        if not self._enabled:
            return
        step = state.step
        if self.first < step <= self.last and not self._points:
            self.first = step
        if step == self.first:
            self._recording.enter_context(self._following())
        if self.first < step <= self.last or step == self.first == self.last:
            self._recording.enter_context(self._timing())

    def on_step_end(self, state: TrainState) -> None:
        if not self._enabled:
            return
        self._recording.close()
        if state.step >= self.last and not self._ended:
            self._ended = True
            state.print(self._outcome())

    def on_end(self, state: TrainState) -> None:
        self._recording.close()

    def _outcome(self) -> str:
        """Write the files and return a line that says where they are, or why there are none."""
        if not self._points:
            return f"--profile-steps: steps {self.first} to {self.last} came before this start; nothing is recorded"
        try:
            return self._write()
        except (OSError, UserError) as error:
            return f"the profile of steps {self.first} to {self.last} could not be written ({first_line(error)})"

    def _write(self) -> str:
        from zero_tp import page
        from zero_tp.planning import pictures

        name = f"steps_{self.first}-{self.last}"
        largest = sorted(self._operators.items(), key=lambda item: -item[1])[:OPERATORS]
        operators = {
            key.removeprefix("autograd::engine::evaluate_function: "): value / max(1, self._timed)
            for key, value in largest
        }
        peak = max(self._points, key=lambda point: point.total)
        figures = {
            "over_time": pictures.over_time(f"Memory over step {self.first}, measured", {"": self._points}, None)
        }
        if operators:
            figures["operators"] = pictures.seconds("Time by operator, measured", operators, "seconds a step")
        parts = [f"<p>{html.escape(self.engine.topology.describe())}, rank 0; peak {peak.total / GIB:.3g} GiB</p>"]
        parts += [page.svg(figure) for figure in figures.values()]
        written = page.write(self.directory / f"{name}.html", f"{self.directory.parent.name}: {name}", parts, figures)
        record = {
            "peak_bytes": {"phase": peak.phase, "total": peak.total, **peak.bytes},
            "over_time": [{"phase": point.phase, "position": point.position, **point.bytes} for point in self._points],
            "operator_seconds": operators,
        }
        write_atomically(written[0].with_suffix(".json"), json.dumps(record) + "\n")
        return f"profile of steps {self.first} to {self.last}: {written[0]}, peak {peak.total / GIB:.3f} GiB in tensors"

    # ---- time --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _timing(self) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        cuda = self.engine.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=activities) as profiler:
            yield
        self._timed += 1
        for event in profiler.key_averages():
            microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
            self._operators[event.key] = self._operators.get(event.key, 0.0) + microseconds / 1e6

    # ---- memory ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _following(self) -> Iterator[None]:
        with followed(self.engine) as allocations:
            begin = allocations.clock
            yield
        self._points = points(allocations, begin)


@contextmanager
def followed(engine: TrainingEngine) -> Iterator[Allocations]:
    """Give every storage that exists and that the block makes, with the begins of forward, backward and update noted.

    What exists before has its category: parameters, optimizer, gradients or buffers. So have the gradients that
    backward leaves at parameters, how long ever.
    """
    allocations = Allocations(engine.device.type)

    def arrived(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and grad.untyped_storage().nbytes() == grad.nbytes:  # no part of a bucket
            allocations.mark([grad], "gradients")

    handles = [
        engine.model.register_forward_pre_hook(lambda *_: allocations.note("forward")),
        engine.model.register_forward_hook(lambda *_: allocations.note("backward")),
        *(parameter.register_post_accumulate_grad_hook(arrived) for parameter in engine.model.parameters()),
    ]
    step: Callable[..., Any] = engine.engine.step

    def stepping(*args: Any, **kwargs: Any) -> Any:
        if engine.engine.is_gradient_accumulation_boundary():
            allocations.note("step")
        return step(*args, **kwargs)

    engine.engine.step = stepping
    try:
        with allocations:
            _take_in(allocations, engine)
            yield allocations
    finally:
        engine.engine.step = step
        for handle in handles:
            handle.remove()


def _take_in(allocations: Allocations, engine: TrainingEngine) -> None:
    basic = engine.zero.states().optimizer
    states = [value for state in basic.state.values() for value in state.values() if isinstance(value, Tensor)]
    masters = [fragment.flat for fragment in engine.zero.fragments()]
    partitions = getattr(engine.zero.optimizer, "grad_partitions_flat_buffer", None)  # ZeRO-3's
    parameters = [partition_of(parameter) for parameter in engine.model.parameters()]
    allocations.mark(parameters, "parameters")
    allocations.mark(states, "optimizer")
    allocations.mark(masters, "optimizer")
    allocations.mark(parameters, "parameters")  # in fp32 without ZeRO they are their own masters
    allocations.mark([] if partitions is None else [partitions], "gradients")
    allocations.mark(_other_tensors(allocations), "buffers")


def _other_tensors(allocations: Allocations) -> Iterable[Tensor]:
    known, frozen = allocations.known(), gc.get_freeze_count() > 0
    gc.unfreeze()  # what is frozen is not listed
    things = gc.get_objects()
    if frozen:
        gc.collect()  # what has become garbage would stay
        gc.freeze()
    for thing in things:
        if isinstance(thing, Tensor) and not thing.is_meta and thing.untyped_storage()._cdata not in known:
            yield thing


def points(allocations: Allocations, begin: int) -> list[Point]:
    """Return the moments of the last micro-batch and the step, by category.

    What a forward makes and leaves is activations; what a backward makes and leaves, gradients; what was there before,
    parameters, optimizer states and buffers; the rest of forward and backward transients, of the step buffers.
    """
    marks = allocations.marks
    forward = max(clock for name, clock in marks if name == "forward")
    backward = max(clock for name, clock in marks if name == "backward")
    step = max((clock for name, clock in marks if name == "step"), default=allocations.clock)
    end = allocations.clock

    def category(one: Allocation) -> str:
        if one.category is not None:
            return one.category
        freed = one.freed if one.freed is not None else end + 1
        if one.allocated > step:
            return "optimizer" if freed > end else "buffers"
        for name, clock in reversed(marks):
            if one.allocated <= clock:
                continue
            following = min((c for _, c in marks if c > clock), default=step)
            if freed <= following:
                # DeepSpeed's buckets are flat and empty at first; no operation of a layer makes such a tensor.
                bucket = name == "backward" and "empty" in one.operation and len(one.shape) == 1
                return "buffers" if bucket else "transients"
            return "activations" if name == "forward" else "gradients"
        return "buffers"

    kinds = {id(one): category(one) for one in allocations.all}
    sizes = dict.fromkeys(CATEGORIES, 0.0)
    points: list[Point] = []
    for clock, one, sign in allocations.timeline():
        sizes[kinds[id(one)]] += sign * one.bytes
        if clock < max(begin, forward):
            continue
        if clock <= backward:
            phase, position = "forward", (clock - forward) / max(1, backward - forward)
        elif clock <= step:
            phase, position = "backward", 1 + (clock - backward) / max(1, step - backward)
        else:
            phase, position = "step", 2 + (clock - step) / max(1, end - step)
        points.append(Point(phase, position, dict(sizes), 0.0))
    return points
