"""Reading a corpus: many samples at once, ahead of the step, from an index of any size, and from Megatron's files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import THOROUGH
from zero_tp.data import indexed
from zero_tp.data.indexed import DTYPES, IndexedCorpus, IndexedWriter, pack_header
from zero_tp.data.permutation import Permutation
from zero_tp.data.read_ahead import ReadAhead
from zero_tp.data.samples import PackedSamples
from zero_tp.errors import UserError

ROOT = Path(__file__).parents[2]


@given(st.integers(1, 10**13), st.integers(0, 2**64 - 1), st.data())
def test_many_entries_are_each_entry(size: int, key: int, data: st.DataObject) -> None:
    order = Permutation(size, key, 3)
    numbers = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    assert order.entries(np.array(numbers, np.int64)).tolist() == [order[i] for i in numbers]
    with pytest.raises(IndexError):
        order.entries(np.array([size]))


def write(prefix: Path, lengths: list[int]) -> str:
    with IndexedWriter(prefix, 1000) as writer:
        for length in lengths:
            writer.add_document(np.arange(length) % 1000)
    return str(prefix)


def test_many_samples_are_each_sample(tmp_path: Path, seed: int) -> None:
    """Of a blend, over the ends of passes."""
    chance = np.random.default_rng(seed)
    prefixes = {
        write(tmp_path / name, chance.integers(0, 40, 30).tolist()): weight
        for name, weight in {"a": 1, "b": 2, "c": 9}.items()
    }
    samples = PackedSamples(dict(prefixes), 7, 5, separate=True)
    numbers = chance.integers(0, 10**6, 300)
    wanted = np.concatenate([samples.sources(numbers[i : i + 1]) for i in range(len(numbers))], axis=1)
    assert np.array_equal(samples.sources(numbers), wanted)
    for batch, first in zip(samples.rank_batches(10, 12, 3, 2, 1, 2), (123, 129), strict=True):
        assert batch.input_ids.tolist() == [samples[k][:-1].tolist() for k in range(first, first + 3)]


def test_reading_ahead_gives_what_reading_gives() -> None:
    read, there = list[int](), threading.Event()

    def reading(step: int) -> list[int]:
        read.append(step)
        if step == 4:
            raise UserError("step 4 can't be read")
        if step == 3:
            there.set()
        return [step]

    with ReadAhead(reading, 3) as ahead:
        assert ahead.take(2) == [2] and there.wait(60), "it reads while nobody asks"
        assert ahead.take(3) == [3] and ahead.take(2) == [2]
    assert sorted(read) in ([2, 2, 3], [2, 2, 3, 3]), "and not beyond the last"
    with ReadAhead(reading, 9) as ahead:
        assert ahead.take(3) == [3]
        with pytest.raises(UserError, match="step 4"):
            ahead.take(4)


def test_a_trillion_tokens_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 2·10¹² bytes: opening it looks at 64 blocks of the index; the first and the last window."""
    sequences, size = 1_000_000, 1_000_000
    header = pack_header(DTYPES[8], sequences, sequences + 1)
    with open(tmp_path / "c.idx", "wb") as file:
        file.write(header)
        file.write(np.full(sequences, size, "<i4").tobytes())
        file.write((np.arange(sequences, dtype="<i8") * size * 2).tobytes())
        file.write(np.arange(sequences + 1, dtype="<i8").tobytes())
    with open(tmp_path / "c.bin", "wb") as file:
        file.truncate(sequences * size * 2)
    looked_at = list[int]()
    blocks = indexed._blocks

    def counted(count: int, most: int | None = None) -> Iterator[slice]:
        for block in blocks(count, most):
            looked_at.append(block.stop - block.start)
            yield block

    monkeypatch.setattr(indexed, "_blocks", counted)
    monkeypatch.setattr(indexed, "_INDEX_BLOCK", 2**10)
    corpus = IndexedCorpus(tmp_path / "c")
    assert corpus.tokens == 10**12 and len(corpus) == sequences
    assert sum(looked_at) <= 2 * 64 * 2**10
    assert corpus.documents(0, 3).tolist() == [0, 0, 0]
    assert corpus.documents(10**12 - size - 1, 3).tolist() == [sequences - 2, sequences - 1, sequences - 1]
    samples = PackedSamples({str(tmp_path / "c"): 1.0}, 2048, 1, separate=True)
    (batch,) = samples.rank_batches(10**6, 4, 4, 1, 0, 1)
    assert batch.input_ids.shape == (4, 2048) and not batch.input_ids.any()


def test_damage_between_the_blocks_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_INDEX_BLOCK", 4)
    monkeypatch.setattr(indexed, "_SPREAD", 3)
    write(tmp_path / "c", [5] * 40)
    (tmp_path / "c.content.json").unlink()
    index = bytearray((tmp_path / "c.idx").read_bytes())
    index[34 + 4 * 6] += 1
    (tmp_path / "c.idx").write_bytes(index)
    corpus = IndexedCorpus(tmp_path / "c")
    with pytest.raises(UserError, match="don't follow each other without gaps"):
        corpus.check_vocabulary(1000)


MEGATRON = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
folder, kind = sys.argv[1:]
documents = [[[1, 2, 3], [4]], [[5]], [[6, 7], [8, 9], [10]]]
if kind == "read":
    found = IndexedDataset(f"{folder}/ours")
    print([each.tolist() for each in found], found.document_indices.tolist(), found.index.dtype.__name__)
else:
    for name in ("uint8", "int8", "int16", "int32", "int64", "uint16"):
        for modes in (False, True):
            prefix = f"{folder}/{name}{'-modes' if modes else ''}"
            builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, name), multimodal=modes)
            for document in documents:
                tokens = [token for sentence in document for token in sentence]
                lengths = [len(sentence) for sentence in document]
                builder.add_document(tokens, lengths, [0] * len(lengths) if modes else None)
            builder.finalize(f"{prefix}.idx")
"""


def megatron(folder: Path, kind: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", MEGATRON, str(folder), kind], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@THOROUGH
def test_megatrons_files_are_read_and_ours_by_megatron(tmp_path: Path) -> None:
    """megatron-core's own builder and reader, in all integer types, with and without modes."""
    megatron(tmp_path, "write")
    for dtype in DTYPES.values():
        for modes in ("", "-modes"):
            corpus = IndexedCorpus(tmp_path / f"{dtype.name}{modes}")
            found = [corpus.document(i).tolist() for i in range(len(corpus))]
            assert found == [[1, 2, 3, 4], [5], [6, 7, 8, 9, 10]] and corpus.dtype == dtype, dtype.name
            assert corpus.documents(3, 4).tolist() == [0, 1, 2, 2]
            assert (corpus.content.smallest, corpus.content.largest) == (1, 10)
            with pytest.raises(UserError, match="holds token id 10, outside the model's vocabulary of 10"):
                corpus.check_vocabulary(10)
    with IndexedWriter(tmp_path / "ours", 1000) as writer:
        for document in ([1, 2, 3], [], [999]):
            writer.add_document(document)
    assert megatron(tmp_path, "read") == "[[1, 2, 3], [], [999]] [0, 1, 2, 3] uint16"
