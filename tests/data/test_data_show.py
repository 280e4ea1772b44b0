"""A corpus as text again; a tokenizer's end of documents, and what it is trained on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.data.test_data_steps import run
from tests.support.corpora import TEXTS, held_out
from tests.tiers import THOROUGH
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.show import shown
from zero_tp.data.tokenizer_training import suggested_size, train_bpe
from zero_tp.errors import UserError

ROOT = Path(__file__).parents[2]


def test_documents_and_samples_are_text_again(tmp_path: Path) -> None:
    prepared = run(tmp_path, TEXTS)
    out = held_out(prepared.output)
    train = [text for text in TEXTS if text not in out]
    lines = list(shown(prepared.output, 100, 64))
    documents = [i for i, line in enumerate(lines) if line.startswith("--- train, document")]
    assert [lines[i + 1] for i in documents] == [f"{text}<|endoftext|>" for text in train]
    # All samples together are the whole stream, but for the tail that fills none.
    begin = next(i for i, line in enumerate(lines) if "train, sample 0" in line)
    end = next(i for i, line in enumerate(lines) if line.startswith("=== validation"))
    stream = "".join(line for line in lines[begin:end] if not line.startswith(("--- train, sample", "[document ")))
    corpus = IndexedCorpus(prepared.output / "train")
    tokenizer = AutoTokenizer.from_pretrained(str(prepared.output / "tokenizer"))
    whole = tokenizer.decode(corpus.read(0, corpus.tokens // 64 * 64))
    # A character of several tokens may lie on both sides of an edge.
    ascii_ = lambda text: "".join(letter for letter in text if letter.isascii())  # noqa: E731
    assert ascii_(stream) == ascii_(whole)
    marks = [line for line in lines[begin:end] if line.startswith("[document ")]
    assert marks[0] == "[document 0]" and any(", from its token " in mark for mark in marks)
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match=r"no tokenizer/|no train\.idx"):
            list(shown(path, 1, 8))


@THOROUGH
def test_the_command_shows(tmp_path: Path) -> None:
    prepared = run(tmp_path, TEXTS)
    words = [sys.executable, "launch/prepare_data.py", "--show", str(prepared.output)]
    done = subprocess.run([*words, "--sample", "1"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "--- train, document 0:" in done.stdout
    done = subprocess.run(words[:2], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "required: --input, --tokenizer, --output" in done.stderr


def test_a_tokenizer_is_trained_on_a_sample(tmp_path: Path) -> None:
    """Of the training documents alone, whatever their order."""
    texts = [f"{chr(97 + i) * 6} {chr(122 - i) * 4} number {i}" for i in range(26)]
    found = run(tmp_path, texts, tokenizer_documents=5)
    backward = run(tmp_path, texts[::-1], "backward", tokenizer_documents=5)
    models = [
        json.loads((each.output / "tokenizer" / "tokenizer.json").read_text())["model"] for each in (found, backward)
    ]
    train = [text for text in texts if text not in held_out(found.output)]
    whole = json.loads(train_bpe(iter(train), 300).backend_tokenizer.to_str())["model"]
    assert models[0]["vocab"].keys() == models[1]["vocab"].keys() and models[0] != whole
    assert len(IndexedCorpus(found.output / "train")) == len(train)
    with pytest.raises(UserError, match="at least 1, for a tokenizer that is trained"):
        run(tmp_path, texts, "given", tokenizer=str(found.output / "tokenizer"), tokenizer_documents=5)


def test_suggested_sizes() -> None:
    assert [suggested_size(size) for size in (1, 128, 129, 50_257)] == [128, 128, 256, 50_304]
