"""Reading documents of data sets of the Hugging Face hub."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import zstandard

from tests.support.documents import ROWS, TEXTS, as_parquet
from tests.tiers import THOROUGH

HUB = """
import sys
from zero_tp.data import stream
from zero_tp.base.errors import UserError
for word in sys.argv[1:]:
    try:
        print([getattr(document, "text", "a problem") for _, document in stream([word])])
    except UserError as error:
        print("refused:", error)
"""


def from_hub(home: Path, *words: str) -> list[str]:
    variables = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HUB, *words], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@THOROUGH
def test_a_data_set_of_the_hub_from_the_cache(tmp_path: Path) -> None:
    """The cache is laid by hand, as huggingface_hub's download leaves it."""
    commit = "0" * 40
    repository = tmp_path / "hub" / "datasets--someone--some-texts"
    folder = repository / "snapshots" / commit / "data"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (folder / "train-00000-of-00001.parquet").write_bytes(as_parquet(ROWS))
    (folder / "test-00000-of-00001.parquet").write_bytes(as_parquet(ROWS[:2]))
    words = ("hf:someone/some-texts", "hf:someone/some-texts:default:test", "hf:someone/others")
    whole, test, refused, split = from_hub(tmp_path, *words, "hf:someone/some-texts:default:no")
    assert whole == repr(TEXTS) and test == repr(TEXTS[:2])
    assert refused.startswith("refused: hf:someone/others: can't be read")
    assert "without a network it must be in this machine's cache" in refused
    assert split.endswith("Available splits: ['train', 'test']")


@THOROUGH
def test_another_field_of_a_data_set_of_the_hub_may_change_its_type(tmp_path: Path) -> None:
    """datasets decides the types of JSON by the first 10 MB, and its own reader ends at another
    one.
    """
    folder = tmp_path / "hub/datasets--someone--mixed/snapshots" / ("0" * 40)
    (folder / "data").mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs/main").write_text("0" * 40)
    rows = [
        {"text": f"text {i}", "meta": 1 if i < 120 else {"a": ["b"]}, "other": "x" * 10**5}
        for i in range(130)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "data/train-0.jsonl").write_text(lines)
    (folder / "data/train-1.jsonl.zst").write_bytes(zstandard.compress(lines.encode())[:-3])
    (folder / "data/train-2.json").write_text(json.dumps(rows[-2:]))
    (line,) = from_hub(tmp_path, "hf:someone/mixed")
    texts, (*read, problem, second, last) = [row["text"] for row in rows], ast.literal_eval(line)
    assert read == [*texts, *texts[: len(read) - len(texts)]] and [problem, second, last] == [
        "a problem",
        *texts[-2:],
    ]
