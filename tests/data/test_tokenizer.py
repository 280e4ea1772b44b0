"""Tokenizers: the end of documents, encoded sentences, and ids of any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sentencex import segment
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.corpora import held_out, run
from tests.support.launched import ROOT
from tests.support.tokenizers import BARE, SPEECHES
from zero_tp.base.errors import UserError
from zero_tp.data import tokenizer as tokenizer_module
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.tokenizer import DocumentEncoder, corpus_fingerprint, vocabulary_size
from zero_tp.data.tokenizer_files import open_tokenizer
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.tools.corpus import stages as corpus_stages
from zero_tp.tools.corpus.blocks import token_columns
from zero_tp.tools.corpus.tokenizer_training import train_bpe


def rename_token(tokenizer: Path, old: str, new: str) -> None:
    """Rename a token that no setting names."""
    config, model = tokenizer / "tokenizer_config.json", tokenizer / "tokenizer.json"
    config.write_text(
        json.dumps({"tokenizer_class": json.loads(config.read_text())["tokenizer_class"]})
    )
    model.write_text(model.read_text().replace(json.dumps(old), json.dumps(new)))


def test_the_end_of_a_document_is_found_or_named(tmp_path: Path) -> None:
    given = run(tmp_path, "first").output / "tokenizer"
    rename_token(given, "<|endoftext|>", "</s>")
    found = run(tmp_path, "found", tokenizer=str(given))
    assert found.report["end_of_document"] == "</s>"
    assert AutoTokenizer.from_pretrained(str(found.output / "tokenizer")).eos_token == "</s>"
    corpus = IndexedCorpus(found.output / "train")
    assert all(corpus.document(i)[-1] == 0 for i in range(len(corpus)))
    rename_token(given, "</s>", "<stop>")
    with pytest.raises(
        UserError, match=r"no eos token, .* with --eos \(candidates: none with a well-known name\)"
    ):
        run(tmp_path, "third", tokenizer=str(given))
    named = run(tmp_path, "named", tokenizer=str(given), eos="<stop>")
    assert named.report["end_of_document"] == "<stop>"
    model = json.loads((given / "tokenizer.json").read_text())
    model["model"]["vocab"] |= {"<eos>": 300, "<|end_of_text|>": 301}
    (given / "tokenizer.json").write_text(json.dumps(model))
    with pytest.raises(UserError, match=r"--eos \(candidates: <eos>, <\|end_of_text\|>\)"):
        run(tmp_path, "fourth", tokenizer=str(given))
    with pytest.raises(UserError, match="it has no token '</s>'"):
        run(tmp_path, "fifth", tokenizer=str(given), eos="</s>")
    with pytest.raises(UserError, match="bpe:300 has its own"):
        run(tmp_path, "sixth", eos="<eos>")


@pytest.mark.parametrize("added", [[], [AddedToken("stop")], [AddedToken("stop", special=True)]])
def test_any_token_can_end_documents(tmp_path: Path, added: list[AddedToken]) -> None:
    """A word of the vocabulary too: transformers makes it a special token when it opens the
    corpus's tokenizer.
    """
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "cat": 2, "stop": 3}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_tokens(added)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(
        str(tmp_path / "words")
    )
    texts, directory = ["a cat", "cat cat a", "a a"], str(tmp_path / "words")
    prepared = run(tmp_path, texts=texts, tokenizer=directory, eos="stop", validation=1)
    opened = AutoTokenizer.from_pretrained(str(prepared.output / "tokenizer"))
    corpora = [IndexedCorpus(prepared.output / split) for split in ("train", "validation")]
    documents = [corpus.document(i).tolist() for corpus in corpora for i in range(len(corpus))]
    assert opened.eos_token_id == 3
    assert sorted(documents) == sorted(
        [*opened.encode(text, add_special_tokens=False), 3] for text in texts
    )
    recorded = corpus_fingerprint(str(prepared.output / "train"))
    assert (
        recorded is not None and recorded.difference(TokenizerFingerprint.of(opened), "", "") == ""
    )


def test_a_tokenizer_that_encodes_few_texts_can_be_saved(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "cat": 1, "</s>": 2}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(
        str(tmp_path / "words")
    )
    directory = str(tmp_path / "words")
    report = run(tmp_path, texts=["a cat", "cat cat a"], tokenizer=directory, validation=1).report
    assert sum(split["tokens"] for split in report["splits"].values()) == 7
    with pytest.raises(UserError, match="the tokenizer can't encode a document"):
        run(tmp_path, "out2", texts=["a cat", "a dog"], tokenizer=directory, validation=1)


def test_a_tokenizer_that_cannot_be_saved_is_refused_before_any_document_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run(tmp_path, "first").output / "tokenizer"
    monkeypatch.setattr(tokenizer_module, "match_tokenizer", lambda *arguments: "its model differ")
    monkeypatch.setattr(corpus_stages, "read_blocks", None)
    with pytest.raises(UserError, match="a saved copy of it with other ids: its model differ"):
        run(tmp_path, "out", tokenizer=str(directory))
    assert not (tmp_path / "out").exists()


def test_a_prefix_without_a_name_records_no_tokenizer() -> None:
    assert [corpus_fingerprint(prefix) for prefix in (".", "..", "")] == [None] * 3


def test_what_opens_a_tokenizer_without_torch_is_what_transformers_would_choose(
    tmp_path: Path,
) -> None:
    directory = run(tmp_path).output / "tokenizer"
    ours, theirs = open_tokenizer(directory), AutoTokenizer.from_pretrained(str(directory))
    assert type(ours) is type(theirs)
    for name, tokenizer in (("ours", ours), ("theirs", theirs)):
        tokenizer.save_pretrained(str(tmp_path / name))
    saved = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("ours", "theirs")
    ]
    assert saved[0] == saved[1] and len(saved[0]) >= 2
    done = subprocess.run(
        [sys.executable, "-c", OPENED, str(directory)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert done.stdout == b"False\n"


OPENED = """
import sys
from pathlib import Path
from zero_tp.data.tokenizer_files import open_tokenizer
open_tokenizer(Path(sys.argv[1]))
print("torch" in sys.modules)
"""


@pytest.mark.slow
def test_sentences_are_kept_as_sequences_and_the_tokens_stay_the_same(tmp_path: Path) -> None:
    for name, kind in (("wordpiece", "wordpiece:400"), ("bpe", "bpe:400")):
        plain = run(tmp_path, f"{name}-plain", texts=SPEECHES, tokenizer=kind).output
        split = run(
            tmp_path, f"{name}-split", texts=SPEECHES, tokenizer=kind, sentences="en"
        ).output
        assert (plain / "train.bin").read_bytes() == (split / "train.bin").read_bytes()
        tokenizer = AutoTokenizer.from_pretrained(str(split / "tokenizer"))
        held = held_out(split)
        corpus, number = IndexedCorpus(split / "train"), 0
        assert len(corpus) == len(SPEECHES) - len(held)
        for i, text in enumerate(text for text in SPEECHES if text not in held):
            expected = [sentence.strip() for sentence in segment("en", text) if sentence.strip()]
            begins = corpus.sequence_starts(*corpus.extent(i))
            assert begins[0] == 0
            sentences = [part.tolist() for part in np.split(corpus.document(i), begins[1:])]
            number += len(sentences)
            if name == "wordpiece":
                assert sentences == [
                    tokenizer.encode(sentence, add_special_tokens=False) for sentence in expected
                ]
            else:
                decoded = [
                    str(tokenizer.decode(sentence, skip_special_tokens=True)).strip()
                    for sentence in sentences
                ]
                assert decoded == expected and sentences[-1][-1] == tokenizer.eos_token_id
        assert number > 20 * len(corpus)


def test_no_white_space_ends_the_splitting_of_sentences() -> None:
    encoder = DocumentEncoder(train_bpe(iter(BARE), 300), "en")
    for space in "\x85\xa0\u2003\u2028\u3000":
        ((ids, starts),) = encoder.encode(
            [f"The bill B{space}. It has passed. More text {space}{space}. The end."]
        )
        assert starts[0] and 1 < starts.sum() < len(ids), "not a panic of sentencex"


def test_a_character_that_a_tokenizer_has_no_token_for_is_one_line() -> None:
    backend = Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(
        UserError,
        match=r"can't encode a document \(.*Missing \[UNK\] token.*\); use a tokenizer with",
    ):
        DocumentEncoder(PreTrainedTokenizerFast(tokenizer_object=backend)).encode(["a", "b"])


def test_ids_with_gaps_are_kept() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, "a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    encoder = DocumentEncoder(tokenizer)
    columns = token_columns(encoder, encoder.encode(["a b"]))
    assert encoder.vocabulary_size == vocabulary_size(tokenizer) == 70_001
    assert np.frombuffer(columns["tokens"], np.int32).tolist() == [0, 70_000]
