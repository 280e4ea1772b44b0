"""Parameters of optimizers and schedulers that are mistakes, or unusual."""

from __future__ import annotations

from zero_tp.config.view import Door, Note, Refusal, View

OPTIMIZER, SCHEDULER = "optimizer.params", "scheduler.params"
MOST_EPS, USUAL_EPS, USUAL_RATE = 1.0, 1e-2, 1.0


def _value(view: View, name: str, default: float = 0.0) -> float:
    """Return a parameter of the scheduler."""
    return float(view.get(f"{SCHEDULER}.{name}", default))


def _rate(view: View) -> float:
    return float(view.get(f"{OPTIMIZER}.lr", 0.0))


def _highest(view: View) -> float:
    """Return the highest rate that the run trains at; of a range test, which has none, the lowest."""
    kind = view.get("scheduler.type")
    if kind == "OneCycle":
        return _value(view, "cycle_max_lr")
    if kind == "LRRangeTest":
        return _value(view, "lr_range_test_min_lr", 1e-3)
    return _value(view, "warmup_max_lr", _rate(view))


def _adds_decay_to_gradients(view: View) -> bool:
    """Tell whether an Adam has L2 in place of weight decay."""
    return str(view.get("optimizer.type")).lower() == "adam" and view.get(f"{OPTIMIZER}.adam_w_mode", True) is False


def _cycles_momentum(view: View) -> bool:
    return bool(
        view.get("scheduler.type") == "OneCycle"
        and view.get(f"{SCHEDULER}.cycle_momentum", True)
        and view.get("optimizer.type") != "SGD"
    )


def _ends_early(view: View, name: str, default: int) -> bool:
    """Tell whether the run ends before so many steps; only a run's file says how long it is."""
    return view.door is Door.RUN and _value(view, name, default) > view.zero_tp.training.steps


def _betas(view: View) -> tuple[float, float]:
    first, second = view.get(f"{OPTIMIZER}.betas", (0.9, 0.999))
    return first, second


def _unused_rate(view: View) -> bool:
    return view.get("scheduler.type") in ("OneCycle", "LRRangeTest") or _highest(view) != _rate(view)


MISTAKES: tuple[Refusal, ...] = (
    Refusal(
        f"{OPTIMIZER}.maximize",
        "as true",
        lambda view: bool(view.get(f"{OPTIMIZER}.maximize")),
        "it would train towards the greatest loss",
    ),
    Refusal(
        f"{OPTIMIZER}.eps",
        f"from {MOST_EPS:g} on",
        lambda view: view.get(f"{OPTIMIZER}.eps", 0.0) >= MOST_EPS,
        "the update is divided by it and would vanish",
        "use a small number such as 1e-8",
    ),
    Refusal(
        f"{OPTIMIZER}.weight_decay",
        "when the highest rate × weight_decay is 1 or more",
        lambda view: (
            _highest(view) * view.get(f"{OPTIMIZER}.weight_decay", 0.0) >= 1 and not _adds_decay_to_gradients(view)
        ),
        "one step would take all of a weight away",
        "use a smaller one such as 0.1",
    ),
    Refusal(
        f"{OPTIMIZER}.nesterov",
        "without momentum, or with dampening",
        lambda view: bool(
            view.get(f"{OPTIMIZER}.nesterov")
            and (view.get(f"{OPTIMIZER}.momentum", 0) <= 0 or view.get(f"{OPTIMIZER}.dampening", 0) != 0)
        ),
        "torch's SGD has no such step",
        "give a momentum and no dampening, or leave it out",
    ),
    Refusal(
        f"{OPTIMIZER}.foreach",
        "with fused",
        lambda view: bool(view.get(f"{OPTIMIZER}.foreach") and view.get(f"{OPTIMIZER}.fused")),
        "they are two implementations of one step",
        "give one of them",
    ),
    Refusal(
        f"{SCHEDULER}.warmup_min_lr",
        "above the rate at the warm-up's end",
        lambda view: _value(view, "warmup_min_lr") > _highest(view),
        "the warm-up would lower the rate",
        "use a smaller one such as 0",
    ),
    Refusal(
        f"{SCHEDULER}.cycle_min_lr",
        "above cycle_max_lr",
        lambda view: _value(view, "cycle_min_lr") > _value(view, "cycle_max_lr"),
        "the cycle would be upside down",
        "exchange the two",
    ),
    Refusal(
        f"{SCHEDULER}.cycle_min_mom",
        "above cycle_max_mom",
        lambda view: _value(view, "cycle_min_mom", 0.8) > _value(view, "cycle_max_mom", 0.9),
        "the cycle would be upside down",
        "exchange the two",
    ),
    Refusal(
        f"{SCHEDULER}.decay_mom_rate",
        "above 0",
        lambda view: _value(view, "decay_mom_rate") > 0,
        "DeepSpeed raises the momentum by it after the cycle, to 1 and beyond",
    ),
)
"""Values that no one can have meant."""

ODD: tuple[Note, ...] = (
    Note((f"{OPTIMIZER}.lr",), lambda view: _rate(view) == 0, "at rate 0 nothing is trained"),
    Note(
        (f"{OPTIMIZER}.lr",),
        _unused_rate,
        "the schedule has rates of its own, and this one is not used",
    ),
    Note(
        (f"{OPTIMIZER}.betas",),
        lambda view: _betas(view)[0] > _betas(view)[1],
        "the first is usually below the second",
    ),
    Note(
        (f"{OPTIMIZER}.lr", f"{SCHEDULER}.*max_lr"),
        lambda view: _highest(view) > USUAL_RATE and view.get("optimizer.type") != "SGD",
        "a rate above 1 is unusual for Adam, whose steps are about as long",
    ),
    Note((f"{OPTIMIZER}.eps",), lambda view: view.get(f"{OPTIMIZER}.eps", 0.0) > USUAL_EPS, "1e-8 is usual"),
    Note(
        ("scheduler.type",),
        _cycles_momentum,
        "OneCycle sets the betas, the first between cycle_min_mom and cycle_max_mom, the second to 0.99; "
        "cycle_momentum false leaves them",
    ),
    Note(
        (f"{SCHEDULER}.total_num_steps",),
        lambda view: view.door is Door.RUN and 0 < _value(view, "total_num_steps") < view.zero_tp.training.steps,
        "the run is longer, and trains at the lowest rate from there on",
    ),
    Note(
        (f"{SCHEDULER}.warmup_num_steps", "scheduler.type"),
        lambda view: (
            str(view.get("scheduler.type")).startswith("Warmup") and _ends_early(view, "warmup_num_steps", 1000)
        ),
        "the run ends before the warm-up, of 1,000 steps unless warmup_num_steps says it, does",
    ),
    Note(
        ("fp16.initial_scale_power",),
        lambda view: view.get("fp16.initial_scale_power", 16) > 24,
        "the first steps overflow and are skipped until the scale has come down",
    ),
)
"""Values that are allowed and unusual: what they do."""
