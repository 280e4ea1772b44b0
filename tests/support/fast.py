"""Which tests are fast: they reach nothing of SLOW, neither themselves nor through a helper or a
fixture of the tests.

def test_a(ranks): ...              slow: `ranks` is a Pools
def test_b(tmp_path):
    done = zero_tp(tmp_path, ...)   slow: tests.support.launched.zero_tp → run → subprocess
def test_c(): ...                   fast
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

from _pytest.fixtures import FixtureFunctionDefinition

SLOW = {
    *("subprocess", "multiprocessing", "tests.support.pools.Pool", "tests.support.pools.Pools"),
    "time.sleep",
    *("zero_tp.tools.planning.plan.plan", "zero_tp.tools.planning.search.Search"),
    *("zero_tp.tools.planning.dryrun.dry_run", "zero_tp.tools.planning.tracking.measure"),
    "zero_tp.tools.planning.memory.rank_memory",
    *("tests.support.simulated_steps.watched", "tests.support.simulated_steps.watched_step"),
    *("transformers.trainer.Trainer", "tests.support.harness.reference"),
    *("tests.conftest._packaged", "tests.conftest.shared_file", "tests.conftest.workplace"),
    *("tests.conftest.ranks", "tests.conftest.own_ranks"),
}
"""Processes, pauses, dry runs, whole trainings, the reference harness, real checkpoints and real
texts.
"""


def is_fast(test: Any) -> bool:
    """Return whether a test function reaches nothing that takes seconds."""
    seen: set[int] = set()
    waiting = [test]
    while waiting:
        reached = _function(waiting.pop())
        if _name(reached) in SLOW:
            return False
        if id(reached) not in seen:
            seen.add(id(reached))
            if isinstance(reached, type | types.FunctionType):
                waiting += _references(reached)
    return True


def _name(reached: Any) -> str:
    if isinstance(reached, types.ModuleType):
        return reached.__name__
    if isinstance(reached, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{reached.__module__}.{reached.__qualname__}"
    return ""


def _function(reached: Any) -> Any:
    """Return the function inside a hypothesis test, a fixture, a cache or a partial; else
    `reached` itself.
    """
    if isinstance(reached, functools.partial):
        return _function(reached.func)
    if isinstance(reached, FixtureFunctionDefinition):
        return _function(reached._get_wrapped_function())
    if isinstance(reached, types.FunctionType) and "hypothesis" in vars(reached):
        return _function(vars(reached)["hypothesis"].inner_test)
    if isinstance(reached, types.FunctionType | functools._lru_cache_wrapper):
        return inspect.unwrap(reached)
    return reached


@functools.cache  # the same helpers and fixtures serve many tests
def _references(reached: type | types.FunctionType) -> list[Any]:
    """Return what a function or a class of the tests refers to: globals, and fixtures by its
    parameters' names.
    """
    if not reached.__module__.startswith("tests."):
        return []
    if isinstance(reached, type):
        return [
            member for member in vars(reached).values() if isinstance(member, types.FunctionType)
        ]
    fixtures = vars(importlib.import_module("tests.conftest")) | reached.__globals__
    own = [fixtures.get(name) for name in inspect.signature(reached).parameters]
    return [
        *(fixture for fixture in own if isinstance(fixture, FixtureFunctionDefinition)),
        *_globals(reached.__code__, reached.__globals__),
    ]


def _globals(code: types.CodeType, namespace: dict[str, Any]) -> Iterator[Any]:
    """Yield the global values that a function's code names; of a module, also what it names there.

    Which attribute is of which module the names do not tell, so a few tests too many are slow.
    """
    for name in code.co_names:
        value = namespace.get(name)
        yield value
        if isinstance(value, types.ModuleType):
            yield from map(vars(value).get, code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant, namespace)
