"""The tokenizer of a corpus: given or trained, the end of its documents, and its sentences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sentencex import segment
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertTokenizer

from tests.support.corpora import TEXTS, held_out, run
from tests.support.tiny_models import speeches
from tests.tiers import in_tiers
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.tokenizer import open_tokenizer
from zero_tp.data.tokenizer_training import EOS, LONGEST_WORD, SMALLEST, TokenizerSpec, train_bpe, train_wordpiece
from zero_tp.errors import UserError

ROOT = Path(__file__).parents[2]
SPEECHES = speeches(12, 20_000)


def test_the_tokenizer_sees_no_validation_text(tmp_path: Path) -> None:
    base = run(tmp_path, "base")
    held = held_out(base.output)
    # Trained on the training documents alone, it is the same tokenizer.
    alone = train_bpe(iter([text for text in TEXTS if text not in held]), 300)
    saved = json.loads((base.output / "tokenizer" / "tokenizer.json").read_text())
    assert saved["model"] == json.loads(alone.backend_tokenizer.to_str())["model"]


def test_a_word_of_a_million_letters_is_cut_for_training() -> None:
    """In one piece, whose letters differ, it takes hours; of this one a token would be half of it."""
    word = "a" * 10**6
    trained = (train_bpe(iter([word]), 300), train_wordpiece(lambda: iter([word]), 30, cased=True))
    for tokenizer in trained:
        longest = max(len(token.removeprefix("##")) for token in tokenizer.get_vocab())
        assert longest == LONGEST_WORD, "the pieces, whole"
    assert json.loads(trained[0].backend_tokenizer.to_str())["pre_tokenizer"]["type"] == "ByteLevel"
    assert trained[0].decode(trained[0](word).input_ids) == word


def test_words_that_are_not_cut_give_what_tokenizers_give() -> None:
    texts = ["x" * 1023 + " " + "y" * 1023, *SPEECHES]
    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    whole.train_from_iterator(texts, trainer)
    found = json.loads(train_bpe(iter(texts), 700).backend_tokenizer.to_str())
    assert found["model"]["merges"] == json.loads(whole.to_str())["model"]["merges"]


def test_a_given_tokenizer(tmp_path: Path) -> None:
    first = run(tmp_path, "first")
    second = run(tmp_path, "second", tokenizer=str(first.output / "tokenizer"))
    assert second.report["splits"] == first.report["splits"]
    assert (second.output / "train.bin").read_bytes() == (first.output / "train.bin").read_bytes()
    ids = AutoTokenizer.from_pretrained(str(second.output / "tokenizer"))("the café").input_ids
    assert ids == AutoTokenizer.from_pretrained(str(first.output / "tokenizer"))("the café").input_ids


@pytest.mark.parametrize("cased", in_tiers([False, True], [False]))
def test_a_wordpiece_vocabulary_is_that_of_tokenizers_and_the_same_each_time(tmp_path: Path, cased: bool) -> None:
    kind = "wordpiece-cased:400" if cased else "wordpiece:400"
    texts = [*SPEECHES, "Ünïcode \u4f60\u597d €"]
    first, second = (run(tmp_path, name, texts=texts, tokenizer=kind, validation=2) for name in ("a", "b"))
    assert first.report["files"] == second.report["files"], "tokenizers alone gives other ids each time"
    tokenizer = AutoTokenizer.from_pretrained(str(first.output / "tokenizer"))
    assert isinstance(tokenizer, BertTokenizer) and len(tokenizer) == 400
    assert tokenizer.convert_ids_to_tokens(list(range(5))) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert ("The" in tokenizer.get_vocab()) == cased

    # Which merge comes first of several that are as frequent is chance in tokenizers, so a few pieces may differ.
    held = held_out(first.output)
    other = BertTokenizer(do_lower_case=not cased).train_new_from_iterator(
        iter([text for text in texts if text not in held]), 400, show_progress=False
    )
    assert len(other.get_vocab().keys() ^ tokenizer.get_vocab().keys()) <= 8
    corpus = IndexedCorpus(first.output / "validation")
    for i, text in enumerate(held):
        assert corpus.document(i).tolist() == tokenizer.encode(text, add_special_tokens=False), "no token ends it"


def test_sentences_are_kept_as_sequences_and_the_tokens_stay_the_same(tmp_path: Path) -> None:
    for name, kind in (("wordpiece", "wordpiece:400"), ("bpe", "bpe:400")):
        plain = run(tmp_path, f"{name}-plain", texts=SPEECHES, tokenizer=kind).output
        split = run(tmp_path, f"{name}-split", texts=SPEECHES, tokenizer=kind, sentences="en").output
        assert (plain / "train.bin").read_bytes() == (split / "train.bin").read_bytes()
        tokenizer = AutoTokenizer.from_pretrained(str(split / "tokenizer"))
        held = held_out(split)
        corpus, number = IndexedCorpus(split / "train"), 0
        assert len(corpus) == len(SPEECHES) - len(held)
        for i, text in enumerate(text for text in SPEECHES if text not in held):
            expected = [sentence.strip() for sentence in segment("en", text) if sentence.strip()]
            begins = corpus.sequences(*corpus.extent(i))
            assert begins[0] == 0
            found = [part.tolist() for part in np.split(corpus.document(i), begins[1:])]
            number += len(found)
            if name == "wordpiece":
                assert found == [tokenizer.encode(sentence, add_special_tokens=False) for sentence in expected]
            else:
                told = [str(tokenizer.decode(sentence, skip_special_tokens=True)).strip() for sentence in found]
                assert told == expected and found[-1][-1] == tokenizer.eos_token_id
        assert number > 20 * len(corpus)


def renamed(tokenizer: Path, old: str, new: str) -> None:
    """Give a token another name, which no setting names."""
    config, model = tokenizer / "tokenizer_config.json", tokenizer / "tokenizer.json"
    config.write_text(json.dumps({"tokenizer_class": json.loads(config.read_text())["tokenizer_class"]}))
    model.write_text(model.read_text().replace(json.dumps(old), json.dumps(new)))


def test_the_end_of_a_document_is_found_or_named(tmp_path: Path) -> None:
    given = run(tmp_path, "first").output / "tokenizer"
    renamed(given, "<|endoftext|>", "</s>")
    found = run(tmp_path, "found", tokenizer=str(given))
    assert found.report["end_of_document"] == "</s>"
    assert AutoTokenizer.from_pretrained(str(found.output / "tokenizer")).eos_token == "</s>"
    corpus = IndexedCorpus(found.output / "train")
    assert all(corpus.document(i)[-1] == 0 for i in range(len(corpus)))
    renamed(given, "</s>", "<stop>")
    with pytest.raises(UserError, match=r"no eos token, .* name it with --eos \(found: none of a well-known name\)"):
        run(tmp_path, "third", tokenizer=str(given))
    named = run(tmp_path, "named", tokenizer=str(given), eos="<stop>")
    assert named.report["end_of_document"] == "<stop>"
    model = json.loads((given / "tokenizer.json").read_text())
    model["model"]["vocab"] |= {"<eos>": 300, "<|end_of_text|>": 301}
    (given / "tokenizer.json").write_text(json.dumps(model))
    with pytest.raises(UserError, match=r"--eos \(found: <eos>, <\|end_of_text\|>\)"):
        run(tmp_path, "fourth", tokenizer=str(given))
    with pytest.raises(UserError, match="it has no token '</s>'"):
        run(tmp_path, "fifth", tokenizer=str(given), eos="</s>")
    with pytest.raises(UserError, match="bpe:300 has its own"):
        run(tmp_path, "sixth", eos="<eos>")


def test_what_opens_a_tokenizer_without_torch_is_what_transformers_would_choose(tmp_path: Path) -> None:
    directory = run(tmp_path).output / "tokenizer"
    ours, theirs = open_tokenizer(directory), AutoTokenizer.from_pretrained(str(directory))
    assert type(ours) is type(theirs)
    for name, tokenizer in (("ours", ours), ("theirs", theirs)):
        tokenizer.save_pretrained(str(tmp_path / name))
    saved = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("ours", "theirs")]
    assert saved[0] == saved[1] and len(saved[0]) >= 2
    told = subprocess.run(
        [sys.executable, "-c", OPENED, str(directory)], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert told.stdout == b"False\n"


OPENED = """
import sys
from pathlib import Path
from zero_tp.data.tokenizer import open_tokenizer
from zero_tp.data.tokenizer_training import EOS, LONGEST_WORD, train_bpe, train_wordpiece
open_tokenizer(Path(sys.argv[1]))
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("kind", sorted(SMALLEST))
def test_every_trained_tokenizer_has_a_padding_token(kind: str) -> None:
    tokenizer = TokenizerSpec(kind=kind, size=400).train(lambda: iter(SPEECHES))
    assert tokenizer.pad_token_id is not None
    batch = tokenizer(["a", "two words and more"], padding=True)["input_ids"]
    assert len(batch[0]) == len(batch[1])
