"""An interrupted preparation of a corpus: what is resumed, what is lost, what is left."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.corpora import TEXTS, output_of, run, texts_of, trained_tokenizer, write_jsonl
from tests.support.launched import ROOT
from tests.tiers import THOROUGH
from zero_tp.base import files
from zero_tp.base.errors import UserError
from zero_tp.base.files import hidden_sibling, partial_directory
from zero_tp.data import PrepareSettings, documents, prepare
from zero_tp.tools.corpus import spool
from zero_tp.tools.corpus.spool import ProcessedBlock, Spool
from zero_tp.tools.corpus.stages import Preparation


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return trained_tokenizer(tmp_path)


STARTED = """
import os, signal, sys
from pathlib import Path
from zero_tp.data import PrepareSettings, documents, prepare
from zero_tp.tools.corpus import spool
spool.COMMIT_SECONDS = 0.0
documents._BLOCK_RECORDS = 50
append = spool.Spool.append
def killed(self, block):
    if len(self.blocks) == int(last):
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, block)
if __name__ == "__main__":
    source, output, tokenizer, processes, last = sys.argv[1:]
    if last != "none":
        spool.Spool.append = killed
    settings = PrepareSettings(tokenizer, 0.1, deduplicate="near")
    print(prepare([source], Path(output), settings, processes=int(processes)).resumed)
"""


class Starts:
    """Starts of a preparation as processes of their own, which may be killed."""

    def __init__(self, directory: Path, texts: list[str], tokenizer: str) -> None:
        self.directory, self.tokenizer = directory, tokenizer
        self.source = write_jsonl(directory / "a.jsonl", texts)
        (directory / "started.py").write_text(STARTED)

    def __call__(self, output: str, processes: int, last: object = "none") -> subprocess.Popen[str]:
        """Start one; it kills itself before the block `last`."""
        words = [
            self.directory / "started.py",
            self.source,
            self.directory / output,
            self.tokenizer,
            processes,
            last,
        ]
        command, environment = (
            [sys.executable, *map(str, words)],
            {**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def left(self) -> set[str]:
        return {
            path.name for path in self.directory.iterdir() if path.name.startswith((".out", "out"))
        }


def test_killed_it_goes_on(tmp_path: Path, seed: int) -> None:
    """A SIGKILL while it reads."""
    chance = random.Random(seed)
    start = Starts(tmp_path, texts_of(chance, 500), "bpe:300")
    last = chance.randrange(1, 11)
    killed = start("out", 1, last)
    assert killed.communicate()[0] == "" and killed.returncode == -signal.SIGKILL
    assert start.left() == {".out.partial", ".out.progress"}
    again = start("out", 1)
    assert again.communicate()[0] == f"{50 * last}\n" and again.returncode == 0
    assert start.left() == {"out"}
    whole = prepare(
        [start.source], tmp_path / "whole", PrepareSettings("bpe:300", 0.1, deduplicate="near")
    )
    assert output_of(tmp_path / "out") == output_of(whole.output)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["bpe:300", "given"])
def test_killed_anywhere_it_goes_on(tmp_path: Path, tokenizer: str, seed: int, kind: str) -> None:
    """20 SIGKILLs at random moments: there is nothing, or progress that the next start uses; the
    end is the same.
    """
    chance = random.Random(seed)
    start = Starts(tmp_path, texts_of(chance, 4000), tokenizer if kind == "given" else kind)
    begun = time.monotonic()
    whole = start("whole", 1)
    assert whole.communicate()[0] == "0\n" and whole.returncode == 0
    longest = time.monotonic() - begun
    killed, output, resumed = 0, tmp_path / "out", 0
    while killed < 20:
        process = start("out", chance.choice((1, 2)))
        time.sleep(chance.random() * longest)
        process.send_signal(signal.SIGKILL)
        output_line = process.communicate()[0]
        killed += process.returncode == -signal.SIGKILL
        resumed += output_line not in ("", "0\n")
        if output.exists():
            assert output_of(output) == output_of(tmp_path / "whole")
            shutil.rmtree(output)
    last = start("out", 2)
    resumed += last.communicate()[0] != "0\n"
    assert last.returncode == 0 and resumed, "no start went on from another"
    assert output_of(output) == output_of(tmp_path / "whole")
    assert start.left() == {"out"}


def test_what_was_read_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    """Also after a full disk; but never where an input has changed."""
    monkeypatch.setattr(spool, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(documents, "_BLOCK_RECORDS", 10)
    texts = texts_of(random.Random(1), 100)
    inputs = [write_jsonl(tmp_path / f"{i}.jsonl", texts[i::2]) for i in range(2)]
    settings, out = PrepareSettings(tokenizer, 0.1), tmp_path / "out"
    append = Spool.append

    def full(self: Spool, block: ProcessedBlock) -> None:
        if (block.source, block.number) == (1, 3):
            self._file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, block)

    def interrupted() -> None:
        with (
            monkeypatch.context() as patch,
            pytest.raises(UserError, match=r"No space left .*; the progress is kept"),
        ):
            patch.setattr(Spool, "append", full)
            prepare(inputs, out, settings)
        assert not out.exists() and hidden_sibling(out, "progress").is_dir()

    interrupted()
    prepared = prepare(inputs, out, settings)
    assert prepared.resumed == 86 and not hidden_sibling(out, "progress").exists()
    whole = prepare(inputs, tmp_path / "whole", settings)
    assert whole.resumed == 0 and output_of(prepared.output) == output_of(whole.output)
    out = tmp_path / "changed"
    interrupted()
    os.utime(inputs[0], (1, 1))
    assert prepare(inputs, out, settings).resumed == 0


@pytest.mark.parametrize("method", ["open", "append"])
def test_no_progress_is_promised_that_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, method: str
) -> None:
    """Before the first block; or after some of standard input, which can't be read again."""
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def full(self: Spool, *_: object) -> None:
        if method == "append":
            self.commit()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Spool, method, full)
    with (
        source.open() as stdin,
        pytest.raises(UserError, match=r"out: can't be written: No space left on device$"),
    ):
        monkeypatch.setattr(sys, "stdin", stdin)
        prepare(
            [source if method == "open" else "-"],
            tmp_path / "out",
            PrepareSettings(tokenizer),
            processes=1,
        )
    assert not list(tmp_path.glob(".*"))


def test_what_was_read_with_other_settings_is_not_lost_without_a_word(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "out.jsonl", TEXTS), tmp_path / "out"
    settings, other = PrepareSettings("bpe:300", 0.1), PrepareSettings("bpe:300", 0.1, seed=9)

    def interrupted(self: Preparation, directory: Path) -> None:
        self.spool.commit()
        raise KeyboardInterrupt

    def kept() -> int:
        return Spool(hidden_sibling(out, "progress")).counts.read

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Preparation, "select", interrupted)
        prepare([source], out, settings)
    with pytest.raises(
        UserError,
        match=r"keeps 40 documents .* other settings \(seed\): give the same .* --overwrite",
    ):
        prepare([source], out, other)
    assert kept() == 40 and not prepare([source], tmp_path / "of others", other).resumed
    os.rename(tmp_path / "of others", out)
    assert prepare([source], out, other).reused and kept() == 40
    assert prepare([source], out, settings, overwrite=True).resumed == 40 and not kept()


def test_an_output_is_on_the_disk_and_takes_its_place_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = run(tmp_path).output
    before = {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
    flushed, fsync = set[int](), os.fsync

    def noting(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def killed(new: Path, old: Path) -> None:
        assert {path.stat().st_ino for path in (new, *new.rglob("*"))} <= flushed
        assert {name: (old / name).read_bytes() for name in before} == before
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr("zero_tp.base.files.replace_directory", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(
            [tmp_path / "out.jsonl"], output, PrepareSettings("bpe:300", 0.1, 9), overwrite=True
        )
    assert run(tmp_path).reused, "the one before"


def test_what_a_killed_preparation_leaves_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".out.partial"
    (left / "tokenizer").mkdir(parents=True)
    (left / "tokenizer" / "a.json").touch()
    (left / "train.bin").write_bytes(b"half")
    with (
        partial_directory(tmp_path / "out"),
        pytest.raises(UserError, match="another process writes it now"),
    ):
        run(tmp_path)
    assert not left.exists()
    left.mkdir()
    (left / "old").touch()
    files = {path.name for path in run(tmp_path).output.iterdir()}
    assert files == {
        *("report.json", "tokenizer", "train.bin", "train.content.json", "train.idx"),
        *("validation.bin", "validation.content.json", "validation.idx", "validation.jsonl"),
    }
    assert not left.exists()
    left.mkdir()
    (left / "old").touch()
    assert run(tmp_path).reused and not left.exists()
    left.symlink_to(tmp_path / "out")
    with pytest.raises(UserError, match="can't be written"):
        prepare(
            [tmp_path / "out.jsonl"],
            tmp_path / "out",
            PrepareSettings("bpe:300", 0.1, 7),
            overwrite=True,
        )
    assert run(tmp_path).reused, "nothing is cleared through a link"


@THOROUGH
def test_sigterm_leaves_no_part_of_an_output(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"{i} " + "word " * 50 for i in range(200_000)])
    arguments = ["--input", source, "--tokenizer", "bpe:300", "--output", tmp_path / "out"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch/prepare_data.py"), *map(str, arguments)]
    )
    partial = tmp_path / ".out.partial"
    while not partial.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == 143
    # Which is there after some seconds.
    left = {path.name for path in tmp_path.iterdir()} - {".out.progress"}
    assert left == {"a.jsonl"}


@pytest.mark.parametrize("when", ["made", "locked"])
def test_a_signal_before_the_first_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    take, locked = files.lock, []

    def lock(file: int, kind: int) -> bool:
        locked.append(file)
        if when == "locked" or len(locked) > 1:
            take(file, kind)
        if len(locked) == 1:
            raise SystemExit(143)
        return True

    monkeypatch.setattr(files, "lock", lock)
    with pytest.raises(SystemExit), partial_directory(tmp_path / "out"):
        pytest.fail("the block is not entered")
    assert len(locked) == 2 and not list(tmp_path.iterdir())
