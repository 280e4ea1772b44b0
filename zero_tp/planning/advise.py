"""What launch/plan.py does beyond one plan: the dry run beside it, and the search with configs that runs accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zero_tp.config.source import apply_overrides
from zero_tp.errors import UserError
from zero_tp.files import read_json
from zero_tp.planning.dryrun_result import Comparison
from zero_tp.planning.plan import Plan, as_on_the_cpu
from zero_tp.planning.search import Candidate, Found, accepted, changed, refuse_if_nothing_fits, search, write

__all__ = ["candidate_json", "candidates", "compare", "search_and_check", "write"]


def compare(plan: Plan) -> Comparison:
    """A dry run of the plan's config beside the true view of the same kernels."""
    from zero_tp.planning import dryrun

    fused = not plan.device.is_cpu
    run = dryrun.dry_run(plan.config, fused_attention=fused)
    view = as_on_the_cpu(plan.config, plan.model, fused_attention=fused)
    measured = max(dryrun.points(run, view.zero), key=lambda point: point.total)
    return Comparison(measured, view.peak, run.seconds)


def search_and_check(
    plan: Plan, overrides: Sequence[str], top: int, found: Found | None = None
) -> tuple[Found, list[Candidate], dict[str, Any]]:
    """(what was found, the fastest `top` that a run accepts, the first one's config).

    Args:
        found: what `search` gave, if it has been asked already.

    Raises:
        UserError: nothing fits; says what is short and by how much.
    """
    config = plan.config
    found = found or search(config, plan.device)
    refuse_if_nothing_fits(found, config, plan.device)
    raw = read_json(config.path)
    apply_overrides(raw, overrides)
    shown: list[Candidate] = []
    best: dict[str, Any] = {}
    refused = None
    assert config.world_size is not None
    for candidate in found.fitting:
        written = changed(raw, candidate.choice, config.global_batch)
        refusal = accepted(written, config.world_size)
        if refusal is not None:
            refused = refusal
            continue
        best = best or written
        shown.append(candidate)
        if len(shown) == top:
            break
    if not shown:
        raise UserError(f"--search: every setting that fits is refused, the last one because: {refused}")
    return found, shown, best


def candidates(plan: Plan, overrides: Sequence[str], top: int) -> tuple[Found, list[Candidate]]:
    """As `search_and_check`, with an empty list where nothing fits."""
    found = search(plan.config, plan.device)
    if not found.fitting:
        return found, []
    _, shown, _ = search_and_check(plan, overrides, top, found)
    return found, shown


def candidate_json(one: Candidate) -> dict[str, Any]:
    return {
        **vars(one.choice),
        "needed_bytes": one.needed,
        "host_node_bytes": one.host,
        "peak_bytes": {"phase": one.peak.phase, "total": one.peak.total, "host": one.peak.host, **one.peak.bytes},
        "step_seconds": {**one.time.terms(), "total": one.time.total},
    }
