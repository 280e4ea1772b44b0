"""A preparation that is killed or whose disk is full goes on; one in shards ends as one that is not."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import THOROUGH
from tests.unit.test_data_prepare import write_jsonl
from zero_tp.data import sources as reading
from zero_tp.data import spool as spooling
from zero_tp.data.prepare import PrepareSettings, prepare, shard_path
from zero_tp.data.spool import Spool
from zero_tp.errors import UserError
from zero_tp.files import hidden_beside

ROOT = Path(__file__).parents[2]


def texts_of(chance: random.Random, count: int) -> list[str]:
    words = [f"word{i}" for i in range(300)]
    texts = [" ".join(chance.choices(words, k=chance.randrange(1, 60))) for _ in range(count)]
    return [*texts, *chance.sample(texts, count // 10), "", " "]


def output_of(output: Path) -> dict[str, Any]:
    """What an output holds, without times."""
    found: dict[str, Any] = {
        str(path.relative_to(output)): path.read_bytes()
        for path in output.rglob("*")
        if (path.is_file() and path.suffix in (".bin", ".idx", ".jsonl")) or path.parent.name == "tokenizer"
    }
    report = json.loads((output / "report.json").read_text())
    return found | {key: report[key] for key in ("identity", "documents", "splits", "unigram", "files")}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    source = write_jsonl(tmp_path / "sample.jsonl", texts_of(random.Random(1), 50))
    return str(prepare([source], tmp_path / "sample", PrepareSettings("bpe:300")).output / "tokenizer")


@pytest.mark.parametrize("files", [1, 12])
def test_shards_make_what_one_process_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, seed: int, files: int
) -> None:
    """Of one file they take blocks in turns, of many whole files. Damage, duplicates and all."""
    monkeypatch.setattr(reading, "_BLOCK_RECORDS", 7)
    texts = texts_of(random.Random(seed), 200)
    inputs: list[str | Path] = []
    for number in range(files):
        inputs.append(write_jsonl(tmp_path / f"{number:02}.jsonl", texts[number::files]))
        with open(inputs[-1], "a") as file:
            file.write('{"text": \n' * 3)
    settings = PrepareSettings(tokenizer, 0.1, deduplicate="exact", min_tokens=10)
    one = prepare(inputs, tmp_path / "one", settings)
    out = tmp_path / "out"
    for i in (2, 0):
        prepare(inputs, out, settings, shard=(i, 3))
    with pytest.raises(UserError, match=r"shard 1 of 3 is missing: prepare it with --shard 1/3"):
        prepare(inputs, out, settings, merge=True)
    assert not prepare(inputs, out, settings, shard=(1, 3)).reused
    assert prepare(inputs, out, settings, shard=(1, 3)).reused
    merged = prepare(inputs, out, settings, merge=True)
    assert one.report["documents"]["problems"] and one.report["documents"]["dropped"]["duplicate"]
    assert output_of(merged.output) == output_of(one.output)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(("out", ".")))
    assert left == ["out", *(shard_path(out, (i, 3)).name for i in range(3))]


def test_shards_that_do_not_belong_together(tmp_path: Path, tokenizer: str) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", texts_of(random.Random(1), 50)), tmp_path / "out"
    settings = PrepareSettings(tokenizer, 0.1)
    with pytest.raises(UserError, match="there are no shards of it"):
        prepare([source], out, settings, merge=True)
    with pytest.raises(UserError, match="a shard takes a finished tokenizer"):
        prepare([source], out, PrepareSettings("bpe:300"), shard=(0, 2))
    with pytest.raises(UserError, match=r"shard 2/2: from 0/2 to 1/2"):
        prepare([source], out, settings, shard=(2, 2))
    for i in range(2):
        prepare([source], out, settings, shard=(i, 2))
    with pytest.raises(UserError, match="made with another settings: prepare this shard again"):
        prepare([source], out, PrepareSettings(tokenizer, 0.1, seed=3), merge=True)
    with pytest.raises(UserError, match=r"is there, and of other inputs or settings.*--overwrite"):
        prepare([source], out, PrepareSettings(tokenizer, 0.1, seed=3), shard=(0, 2))
    assert not prepare([source], out, settings, merge=True).reused
    assert not out.with_name(".out.progress").exists()


STARTED = """
import sys
from pathlib import Path
from zero_tp.data import prepare, sources, spool
spool.COMMIT_SECONDS = 0.0
sources._BLOCK_RECORDS = 50
if __name__ == "__main__":
    source, output, tokenizer, processes = sys.argv[1:]
    settings = prepare.PrepareSettings(tokenizer, 0.1, deduplicate="near")
    done = prepare.prepare([source], Path(output), settings, processes=int(processes))
    print(done.resumed)
"""


@THOROUGH
@pytest.mark.parametrize("kind", ["bpe:300", "given"])
def test_killed_anywhere_it_goes_on(tmp_path: Path, tokenizer: str, seed: int, kind: str) -> None:
    """SIGKILLs at random moments: there is nothing, or progress that the next start uses; the end is the same."""
    chance = random.Random(seed)
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(chance, 4000))
    (tmp_path / "started.py").write_text(STARTED)
    given = tokenizer if kind == "given" else kind

    def start(output: Path, processes: int) -> subprocess.Popen[str]:
        words = [sys.executable, str(tmp_path / "started.py"), str(source), str(output), given, str(processes)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)

    begun = time.monotonic()
    whole = start(tmp_path / "whole", 1)
    assert whole.communicate()[0] == "0\n" and whole.returncode == 0
    longest = time.monotonic() - begun
    killed, output, resumed = 0, tmp_path / "out", 0
    while killed < 10:
        process = start(output, chance.choice((1, 2)))
        time.sleep(chance.random() * longest)
        process.send_signal(signal.SIGKILL)
        told = process.communicate()[0]
        killed += process.returncode == -signal.SIGKILL
        resumed += told not in ("", "0\n")
        if output.exists():
            assert output_of(output) == output_of(tmp_path / "whole")
            shutil.rmtree(output)
    last = start(output, 2)
    resumed += last.communicate()[0] != "0\n"
    assert last.returncode == 0 and resumed, "no start went on from another"
    assert output_of(output) == output_of(tmp_path / "whole")
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))}
    assert left == {"out"}


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str) -> None:
    """Also after a full disk; but never where an input has changed."""
    monkeypatch.setattr(spooling, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(reading, "_BLOCK_RECORDS", 10)
    texts = texts_of(random.Random(1), 100)
    inputs = [write_jsonl(tmp_path / f"{i}.jsonl", texts[i::2]) for i in range(2)]
    settings, out = PrepareSettings(tokenizer, 0.1), tmp_path / "out"
    append = Spool.append

    def full(self: Spool, source: int, number: int, *rest: Any) -> None:
        if (source, number) == (1, 3):
            self._files["texts"].write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, source, number, *rest)

    def interrupted() -> None:
        with monkeypatch.context() as patch, pytest.raises(UserError, match=r"No space left .*; what was read is kept"):
            patch.setattr(Spool, "append", full)
            prepare(inputs, out, settings)
        assert not out.exists() and hidden_beside(out, "progress").is_dir()

    interrupted()
    found = prepare(inputs, out, settings)
    assert found.resumed == 86 and not hidden_beside(out, "progress").exists()
    whole = prepare(inputs, tmp_path / "whole", settings)
    assert whole.resumed == 0 and output_of(found.output) == output_of(whole.output)
    for change in ("input", "settings"):
        out = tmp_path / change
        interrupted()
        if change == "input":
            os.utime(inputs[0], (1, 1))
        else:
            settings = PrepareSettings(tokenizer, 0.1, seed=9)
        assert prepare(inputs, out, settings).resumed == 0
