"""Duplicates and evaluation sets against brute force; the steps' counters."""

from __future__ import annotations

import csv
import json
import random
import re
import unicodedata
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.corpora import run as prepare_texts
from tests.support.launched import ROOT
from zero_tp.base.errors import UserError
from zero_tp.data import Prepared, PrepareSettings, prepare
from zero_tp.data.documents import read_documents
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.records import Document
from zero_tp.tools.corpus.similarity import (
    EvaluationSets,
    exact_duplicates,
    near_duplicates,
    ngram_hashes,
    shingles,
    sketches,
    words,
)

run = partial(prepare_texts, validation=1)


def documents_of(prepared: Prepared) -> int:
    counts = prepared.report["documents"]
    stored = sum(len(IndexedCorpus(prepared.output / split)) for split in ("train", "validation"))
    assert counts["kept"] == stored and counts["read"] == stored + sum(counts["dropped"].values())
    return stored


def removed(prepared: Prepared) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (prepared.output / "removed.jsonl").read_text().splitlines()
    ]


def near_copies(chance: random.Random) -> tuple[list[str], list[set[str]]]:
    """Paragraphs of a real corpus, and copies of some of them with words changed here and there."""
    words = [
        text.split() for text in islice(read_documents(ROOT / "launch/corpus/sotu.jsonl.gz"), 40)
    ]
    paragraphs = [
        " ".join(each[at : at + 80]) for each in words for at in range(0, len(each) - 80, 80)
    ]
    texts = chance.sample(paragraphs, 300)
    for text in chance.sample(texts, 150):
        copy = text.split()
        for _ in range(chance.choice((1, 2, 4, 8))):
            copy[chance.randrange(len(copy))] = "changed"
        texts.append(" ".join(copy))
    return texts, [set(shingles(text)) for text in texts]


@pytest.mark.slow
def test_near_duplicates_against_brute_force(seed: int) -> None:
    """Recall and precision of pairs clearly above and below 0.7, by the Jaccard similarity of
    the shingles itself.
    """
    texts, sets = near_copies(random.Random(seed))
    sketched = sketches(texts)
    pairs = {
        near.document: near for near in near_duplicates(enumerate(sketched), sketched.__getitem__)
    }
    jaccard = lambda a, b: len(sets[a] & sets[b]) / len(sets[a] | sets[b])  # noqa: E731
    above = below = 0
    for number in range(len(texts)):
        best = max(
            (jaccard(number, other) for other in range(number) if other not in pairs), default=0.0
        )
        if best >= 0.85:
            above += 1
            assert number in pairs, best
        elif best <= 0.5:
            below += 1
            assert number not in pairs, best
        if number in pairs:
            near = pairs[number]
            assert near.earlier < number and near.earlier not in pairs
            # 6 standard deviations.
            assert abs(near.similarity - jaccard(number, near.earlier)) < 0.25
    assert above > 10 and below > 200


@given(
    st.lists(st.sampled_from([b"a" * 16, b"a" * 15 + b"\0", b"\0" * 16, b"b" * 16]), max_size=30)
)
def test_exact_duplicates(contents: list[bytes]) -> None:
    firsts = exact_duplicates(np.frombuffer(b"".join(contents), "V16").copy())
    assert firsts.tolist() == [contents.index(each) for each in contents]


def test_duplicates_are_named_and_the_first_stays(tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(60)]
    texts = [
        " ".join(words),
        "another document",
        " ".join(words),
        " ".join([*words[:-1], "end"]),
        "a third document",
    ]
    exact = run(tmp_path, texts=texts, deduplicate="exact")
    source = tmp_path / "out.jsonl"
    assert removed(exact) == [
        {"removed": f"{source}:3", "reason": "duplicate", "copy_of": f"{source}:1"}
    ]
    assert documents_of(exact) == 4
    near = run(tmp_path, "near", texts, deduplicate="near")
    source = tmp_path / "near.jsonl"
    (first, second) = removed(near)
    assert first == {"removed": f"{source}:3", "reason": "duplicate", "copy_of": f"{source}:1"}
    assert (
        second["removed"] == f"{source}:4"
        and second["copy_of"] == f"{source}:1"
        and 0.8 < second["similarity"] <= 1
    )
    assert documents_of(near) == 3 and near.report["documents"]["dropped"] == {
        "duplicate": 1,
        "near-duplicate": 1,
    }


@given(
    st.lists(st.sampled_from("abcd"), max_size=40), st.lists(st.sampled_from("abcd"), max_size=40)
)
def test_ngrams_are_13_words_in_a_row(first: list[str], second: list[str]) -> None:
    rows = lambda words: {tuple(words[at : at + 13]) for at in range(len(words) - 12)}  # noqa: E731
    hashes = [ngram_hashes(" ".join(words)) for words in (first, second)]
    assert [len(each) for each in hashes] == [max(0, len(words) - 12) for words in (first, second)]
    assert bool(np.isin(hashes[0], hashes[1]).any()) == bool(rows(first) & rows(second))


def test_evaluation_sets(tmp_path: Path) -> None:
    passage = "it was the best of times it was the worst of times it was the age of wisdom"
    (tmp_path / "lambada.jsonl").write_text(
        json.dumps({"context": passage, "choices": ["wisdom", "folly"]})
    )
    (tmp_path / "wiki.txt").write_text(
        " = Valkyria Chronicles III = \n\n = = Plot = = \n\n Some words , few . \n"
    )
    files = (tmp_path / "lambada.jsonl", tmp_path / "wiki.txt")
    sets = EvaluationSets.read(files)
    # The other text has fewer than 13 words.
    wanted = np.unique(ngram_hashes(f"{passage} wisdom folly"))
    assert sets.hashes.tolist() == wanted.tolist() and sets.titles == {"valkyria chronicles iii"}
    thirteen = "He said: It was the BEST of times; it was the worst of times. It!"
    texts = [
        *(
            "a document of its own",
            thirteen,
            thirteen.replace("worst", "best"),
            "the second of its own",
        ),
        *("Valkyria Chronicles III\n\nIs a game.", "I like Valkyria Chronicles III", thirteen),
    ]
    assert [sets.overlap_with(Document(text)) for text in texts] == [
        False,
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    titles = ("Valkyria chronicles III", "Plot")
    assert [sets.overlap_with(Document("text", title)) for title in titles] == [True, False]
    decontaminated = partial(run, tmp_path, texts=texts, decontaminate=files, deduplicate="exact")
    prepared = decontaminated()
    dropped = prepared.report["documents"]["dropped"]
    assert dropped == {"duplicate": 1, "contaminated": 2} and documents_of(prepared) == 4
    assert [each["reason"] for each in removed(prepared)] == [
        "duplicate",
        "contaminated",
        "contaminated",
    ]
    assert decontaminated().reused
    (tmp_path / "wiki.txt").write_text(" = Another = \n words")
    with pytest.raises(UserError, match="was made with another decontaminate"):
        decontaminated()


HELLASWAG: dict[str, Any] = {
    **{
        "ind": 24,
        "activity_label": "Roof shingle removal",
        "ctx_a": "A man is sitting on a roof.",
        "ctx_b": "he",
    },
    "endings": [
        f"is using wrap number {i} to wrap a pair of skis and then rips level tiles off."
        for i in range(4)
    ],
    "choices": {"text": ["one of the first kind", "another of the second"], "label": ["A", "B"]},
    **{
        "turns": [
            {"role": "user", "content": "how is it done"},
            {"role": "assistant", "content": "with some care"},
        ]
    },
    **{"image": {"bytes": None, "path": "a.png"}, "score": None, "label": "3", "split": "val"},
}


def as_table(record: dict[str, Any]) -> pa.Table:
    """The record with Arrow's nested types: list, large_list, fixed_size_list, list_view, map,
    struct, dictionary.
    """
    table = pa.Table.from_pylist([record, record])
    items = pa.array(
        [list(record["choices"].items())] * 2, pa.map_(pa.string(), pa.list_(pa.string()))
    )
    image = pa.array(
        [{"bytes": b"some thirteen words in an image are no text " * 9, "path": "a.png"}] * 2
    )
    columns = {"choices": items, "image": image, "split": pa.array(["val"] * 2).dictionary_encode()}
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table.append_column("bytes", pa.array([b"binary"] * 2))


ENDINGS = {
    "list": pa.list_,
    "large": pa.large_list,
    "fixed": lambda kind: pa.list_(kind, 4),
    "view": pa.list_view,
}


@pytest.mark.parametrize("kind", ENDINGS)
def test_an_evaluation_set_has_the_same_ngrams_in_every_format(tmp_path: Path, kind: str) -> None:
    strings = [
        *("Roof shingle removal", "A man is sitting on a roof.", "he", *HELLASWAG["endings"]),
        *("one of the first kind", "another of the second", "A", "B"),
        *("user", "how is it done", "assistant", "with some care", "a.png", "3", "val"),
    ]
    wanted = np.unique(ngram_hashes(" ".join(strings)))
    assert len(wanted) > 35
    (tmp_path / "a.jsonl").write_text(json.dumps(HELLASWAG))
    (tmp_path / "a.json").write_text(json.dumps([HELLASWAG, HELLASWAG]))
    table = as_table(HELLASWAG)
    endings = pa.array([HELLASWAG["endings"]] * 2, ENDINGS[kind](pa.string()))
    table = table.set_column(table.schema.get_field_index("endings"), "endings", endings)
    if kind != "view":  # Parquet has no such type
        pq.write_table(table, tmp_path / "a.parquet")
    for name, new in (("stream.arrow", pa.ipc.new_stream), ("file.arrow", pa.ipc.new_file)):
        with new(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    pq.write_table(pa.Table.from_pylist([HELLASWAG]), tmp_path / "plain.parquet")
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([[f"column {i}" for i in range(len(strings))], strings])
    for path in tmp_path.iterdir():
        assert np.array_equal(EvaluationSets.read([path]).hashes, wanted), path.name


def test_a_set_without_13_words_has_no_effect_and_is_refused(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"text": [b"thirteen words in a column of bytes " * 9], "id": [1]}),
        tmp_path / "a.parquet",
    )
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"question": "who?", "answers": ["a man", "a woman"] * 2}) + "\n" * 9
    )
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(
            UserError,
            match=rf"{path.name}: no record has 13 words, so it has no effect: leave it out",
        ):
            EvaluationSets.read([path])


SENTENCES = {
    "Devanagari": "मेरी किताबें मेज़ पर रखी हैं और दीवारों पर तस्वीरें टँगी हुई हैं",
    "Bengali": "আমার বইগুলি টেবিলের উপরে রাখা আছে এবং দেওয়ালে ছবি টাঙানো আছে",
    "Tamil": "என் புத்தகங்கள் மேசையின் மேல் உள்ளன சுவரில் படங்கள் தொங்குகின்றன இன்று",
    "Thai": "หนังสือ ของฉัน วางอยู่ บนโต๊ะ และ รูปภาพ แขวนอยู่ ที่ผนัง ในห้อง นี้",
    "Arabic": "كِتَابِي عَلَى الطَّاوِلَةِ وَالصُّوَرُ مُعَلَّقَةٌ عَلَى الْحَائِطِ فِي الْغُرْفَةِ الْكَبِيرَةِ",
    "Hebrew": "הַסְּפָרִים שֶׁלִּי עַל הַשֻּׁלְחָן וְהַתְּמוּנוֹת תְּלוּיוֹת עַל הַקִּיר בַּחֶדֶר הַגָּדוֹל",
}


@pytest.mark.parametrize("script", SENTENCES)
def test_words_keep_their_combining_marks(script: str) -> None:
    """Words of text without punctuation are separated by spaces. With other vowels it is another
    text.
    """
    sentence = SENTENCES[script]
    assert words(f"«{sentence}».") == sentence.split()
    eight = " ".join(sentence.split()[:8])
    assert not len(ngram_hashes(eight)) and len(ngram_hashes(f"{eight} {eight}")) == 4
    marks = sorted({letter for letter in sentence if unicodedata.category(letter)[0] == "M"})
    others = sentence.translate(
        {ord(a): b for a, b in zip(marks, [*marks[1:], marks[0]], strict=True)}
    )
    sketched = sketches([sentence, others, sentence])
    (pair,) = near_duplicates(enumerate(sketched), sketched.__getitem__)
    assert (pair.document, pair.earlier, pair.similarity) == (2, 0, 1.0)


def test_words_of_latin_text_are_runs_of_letters_and_digits() -> None:
    for text in islice(read_documents(ROOT / "launch/corpus/sotu.jsonl.gz"), 20):
        text += " x² naïve_1 ÆØÅ ❤️ 👩‍💻 №5"
        assert words(text) == re.findall(r"\w+", text.lower())


def test_length_and_unicode(tmp_path: Path) -> None:
    texts = [*(f"number {i} " * 9 for i in range(12)), "short", "schÃ¶n â€” fine" * 5, "x"]
    first = run(tmp_path, "first", texts)
    tokenizer = str(first.output / "tokenizer")
    lengths = [
        len(corpus.document(i)) - 1
        for corpus in (IndexedCorpus(first.output / split) for split in ("train", "validation"))
        for i in range(len(corpus))
    ]
    for least in (min(lengths), min(lengths) + 1, 20):
        cut = run(tmp_path, f"cut{least}", texts, tokenizer=tokenizer, min_tokens=least)
        assert documents_of(cut) == sum(length >= least for length in lengths)
        assert cut.report["documents"]["dropped"].get("short", 0) == sum(
            length < least for length in lengths
        )
    texts += ["\x01\x02\x7f"]  # of which ftfy leaves nothing
    mended = run(tmp_path, "mended", texts, tokenizer=tokenizer, repair=True, validation=14)
    assert mended.report["documents"]["dropped"] == {"empty": 1}
    assert "schön — fine" in (mended.output / "validation.jsonl").read_text()


@pytest.mark.slow
def test_all_steps_together_drop_each_planted_document_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    words = [
        text.split() for text in islice(read_documents(ROOT / "launch/corpus/sotu.jsonl.gz"), 20)
    ]
    texts = [
        " ".join(each[at : at + 150]) for each in words for at in range(0, len(each) - 150, 150)
    ]
    texts = chance.sample(texts, 200)
    passage = "it was the best of times it was the worst of times it was the age of wisdom"
    planted = {
        "duplicate": texts[:20],
        "near-duplicate": [f"Indeed, {text}" for text in texts[20:40]],
        "short": ["Too short."] * 20,
        "contaminated": [f"{text} {passage}" for text in texts[40:60]],
        "empty": [" "] * 5,
    }
    rows = texts[60:] + texts[:40]
    tokenizer = str(run(tmp_path, "trained", rows).output / "tokenizer")
    rows += [text for each in planted.values() for text in each]
    rows[0] = f"The schÃ¶n word is mended. {rows[0]}"
    pq.write_table(pa.table({"id": range(len(rows)), "content": rows}), tmp_path / "raw.parquet")
    (tmp_path / "held.jsonl").write_text(json.dumps({"question": passage, "answer": "folly"}))
    settings = PrepareSettings(
        tokenizer,
        1,
        repair=True,
        min_tokens=128,
        deduplicate="near",
        decontaminate=(tmp_path / "held.jsonl",),
    )
    prepared = prepare([tmp_path / "raw.parquet"], tmp_path / "out", settings, processes=2)
    documents_of(prepared)
    dropped = prepared.report["documents"]["dropped"]
    assert dropped.pop("near-duplicate") >= 20
    assert dropped == {
        name: len(planted[name]) for name in ("duplicate", "short", "contaminated", "empty")
    }
    decoder, corpus = (
        AutoTokenizer.from_pretrained(tokenizer),
        IndexedCorpus(prepared.output / "train"),
    )
    mended = [decoder.decode(corpus.document(i)) for i in range(2)]
    assert any(
        "schön" in text for text in (*mended, (prepared.output / "validation.jsonl").read_text())
    )
    assert all(len(corpus.document(i)) > 128 for i in range(len(corpus)))
