"""Token files that the formats' own packages write: the corpus has their documents."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import token_writers
from tests.support.launched import ROOT
from tests.support.token_files import corpus_sha256, import_tokens, join_after, write_flat
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError

EOS = token_writers.EOS
SETTINGS: dict[str, Any] = {"eos_id": EOS, "vocab_size": 40_000}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the packages of token_packages.txt."""
    folder = tmp_path_factory.mktemp("packages")
    listed = ROOT / "tests/support/token_packages.txt"
    words = ["install", "--quiet", "--no-deps", "--target", str(folder), "-r", str(listed)]
    subprocess.run(
        [sys.executable, "-m", "pip", *words], check=True, timeout=500, capture_output=True
    )
    yield folder


@pytest.fixture
def documents(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    lengths = chance.choices((1, 2, 40, 255, 256, 300), k=200)
    drawn = [[chance.randrange(2**15) for _ in range(length)] for length in lengths]
    return [[token if token != EOS else 7 for token in ids] for ids in drawn]


def write(form: str, documents: list[list[int]], folder: Path, packages: Path) -> str:
    """Write files with the format's package; return what it prints."""
    (folder / "files").mkdir()
    source = folder / "documents.json"
    source.write_text(json.dumps(documents))
    words = ["-W", "ignore", "-m", token_writers.__name__]
    done = subprocess.run(
        [sys.executable, *words, form, source, folder / "files"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{packages}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected_sha256(documents: list[list[int]], folder: Path) -> str:
    path = write_flat(folder / "raw.bin", join_after(documents, EOS))
    raw = {"format": "raw", "token_type": "uint16", "eos_position": "after"}
    return corpus_sha256(import_tokens([path], folder / "raw", **SETTINGS | raw).output)


@THOROUGH
@pytest.mark.parametrize("form", ["litdata", "mds", "megatron", "datatrove", "olmo-core"])
def test_the_packages_own_files(
    tmp_path: Path, packages: Path, documents: list[list[int]], form: str
) -> None:
    printed = write(form, documents, tmp_path, packages)
    expected = expected_sha256(documents, tmp_path)
    endings = {"megatron": "*.idx", "datatrove": "*.ds", "olmo-core": "*.npy"}
    inputs = sorted((tmp_path / "files").glob(endings.get(form, "*")))
    assert (
        len(inputs)
        == {"litdata": 11, "mds": 8, "megatron": 8, "datatrove": 2, "olmo-core": 2}[form]
    )
    for path in inputs:
        settings = {"format": form}
        if path.name == "bytes" or form == "olmo-core":
            settings["token_type"] = "uint16" if path.name == "bytes" else path.stem
        if path.name == "br":
            with pytest.raises(UserError, match="compressed with br, which can't be read here"):
                import_tokens([path], tmp_path / "br", **SETTINGS | settings)
            continue
        output = import_tokens([path], tmp_path / f"of {path.name}", **SETTINGS | settings).output
        assert corpus_sha256(output) == expected, path.name
    # OLMo-core's own reader finds the same documents.
    for line in printed.splitlines():
        assert json.loads(line) == [[*ids, EOS] for ids in documents]
