"""A corpus as text again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.corpora import TEXTS, held_out, run
from tests.support.launched import zero_tp
from tests.support.tiny_models import write_corpus
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.tools.corpus.show import show_corpus


def test_documents_and_samples_are_text_again(tmp_path: Path) -> None:
    prepared = run(tmp_path)
    out = held_out(prepared.output)
    train = [text for text in TEXTS if text not in out]
    lines = list(show_corpus(prepared.output, 100, 64))
    documents = [i for i, line in enumerate(lines) if line.startswith("--- train, document")]
    assert [lines[i + 1] for i in documents] == [f"{text}<|endoftext|>" for text in train]
    # All samples together are the whole stream, but for the tail that fills none.
    begin = next(i for i, line in enumerate(lines) if "train, sample 0" in line)
    end = next(i for i, line in enumerate(lines) if line.startswith("=== validation"))
    stream = "".join(
        line
        for line in lines[begin:end]
        if not line.startswith(("--- train, sample", "[document "))
    )
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
            list(show_corpus(path, 1, 8))


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    texts = [f"{i} " + "word " * 300 for i in range(3)]
    prepared = run(tmp_path, texts=texts, validation=1)
    lines = list(show_corpus(prepared.output, 3, 4096))
    documents = [
        lines[i + 1] for i, line in enumerate(lines) if line.startswith("--- train, document")
    ]
    train = [text for text in texts if text not in held_out(prepared.output)]
    whole = [f"{text}<|endoftext|>" for text in train]
    assert documents == [f"{text[:400]}… {len(text) - 400:,} more characters" for text in whole]
    assert max(map(len, lines)) < 450


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 9}, "a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="a").save_pretrained(
        str(tmp_path / "tokenizer")
    )
    write_corpus(tmp_path / "train", [[0, 9]], 10)
    assert "a b" in list(show_corpus(tmp_path, 1, 2))
    write_corpus(tmp_path / "train", [[0, 10]], 11)
    with pytest.raises(
        UserError, match="id 10, outside the tokenizer's vocabulary of 10: put the corpus's own"
    ):
        list(show_corpus(tmp_path, 1, 2))


@THOROUGH
def test_the_command_shows(tmp_path: Path) -> None:
    run(tmp_path)
    done = zero_tp(tmp_path, "prepare", "--show", "out", "--sample", "1")
    assert (done.returncode, done.stderr) == (0, "") and "--- train, document 0:" in done.stdout
    done = zero_tp(tmp_path, "prepare")
    assert done.returncode == 2 and "required: --input, --tokenizer, --output" in done.stderr
