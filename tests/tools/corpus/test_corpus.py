"""Preparing a corpus: its files and figures, the split, replacing an output."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.corpora import TEXTS, held_out, run, write_jsonl
from tests.support.launched import ROOT, script
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.commands.prepare import _summary
from zero_tp.data import PrepareSettings, documents, prepare
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.records import Record, Source
from zero_tp.tools.corpus.tokenizer_training import train_bpe


def test_output(tmp_path: Path) -> None:
    """Its files, counts and entropies, and that the tokenizer saw the training documents alone."""
    prepared = run(tmp_path)
    output, report = prepared.output, prepared.report
    assert report == json.loads((output / "report.json").read_text())
    assert report["versions"].keys() >= {"tokenizers", "transformers", "ftfy", "rensa", "sentencex"}
    tokenizer = AutoTokenizer.from_pretrained(str(output / "tokenizer"))
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert len(tokenizer) == report["vocabulary_size"] == 300

    validation = held_out(output)
    train = [text for text in TEXTS if text not in validation]
    assert (len(train), len(validation)) == (36, 4)
    saved = json.loads((output / "tokenizer" / "tokenizer.json").read_text())
    assert (
        saved["model"]
        == json.loads(train_bpe(iter(train), 300).backend_tokenizer.to_str())["model"]
    )
    frequencies = []
    for split, texts in (("train", train), ("validation", validation)):
        corpus = IndexedCorpus(output / split)
        assert len(corpus) == report["splits"][split]["documents"] == len(texts)
        assert corpus.tokens == report["splits"][split]["tokens"]
        frequencies.append(np.bincount(corpus.read(0, corpus.tokens), minlength=300))
        assert report["splits"][split]["characters"] == sum(map(len, texts))
        assert report["splits"][split]["bytes"] == sum(len(text.encode()) for text in texts)
        for i, text in enumerate(texts):
            ids = corpus.document(i)
            assert ids[-1] == tokenizer.eos_token_id
            # The text spells the special token, which stays text: one eos a document.
            assert (ids == tokenizer.eos_token_id).sum() == 1
            assert tokenizer.decode(ids[:-1]) == text
            assert (
                tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
                == ids[:-1].tolist()
            )
    p, q = frequencies[0] / frequencies[0].sum(), (frequencies[0] + 1) / (frequencies[0] + 1).sum()
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    cross = (
        -sum(n * np.log(x) for n, x in zip(frequencies[1], q, strict=True)) / frequencies[1].sum()
    )
    assert report["unigram"]["train_entropy"] == pytest.approx(entropy, rel=1e-12)
    assert report["unigram"]["validation_cross_entropy"] == pytest.approx(cross, rel=1e-12)
    # Nothing is left beside the output.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.jsonl"]


def test_split_does_not_depend_on_order_and_keeps_copies_together(tmp_path: Path) -> None:
    forward, backward = run(tmp_path, "a"), run(tmp_path, "b", texts=TEXTS[::-1])
    assert sorted(held_out(forward.output)) == sorted(held_out(backward.output))
    other = run(tmp_path, "c", seed=5)
    assert sorted(held_out(other.output)) != sorted(held_out(forward.output))
    copies = run(tmp_path, "d", texts=TEXTS + TEXTS)
    out = held_out(copies.output)
    assert all(out.count(text) == 2 for text in out)
    assert len(held_out(run(tmp_path, "e", validation=7).output)) == 7


def test_reuse_overwrite_and_refusal(tmp_path: Path) -> None:
    first = run(tmp_path)
    stamp = (first.output / "train.bin").stat().st_mtime_ns
    again = run(tmp_path)
    assert again.reused and not first.reused
    assert again.report == first.report
    assert (first.output / "train.bin").stat().st_mtime_ns == stamp
    with pytest.raises(
        UserError, match=r"out was made with another seed: choose another --output, .*--overwrite"
    ):
        run(tmp_path, seed=9)
    source = tmp_path / "out.jsonl"
    (first.output / "notes.md").write_text("mine")
    (first.output / "plots").mkdir()
    (first.output / "plots" / "lengths.png").touch()
    replaced = prepare([source], first.output, PrepareSettings("bpe:300", 0.1, 9), overwrite=True)
    assert not replaced.reused
    deduplicated = PrepareSettings("bpe:300", 0.1, 9, deduplicate="exact")
    prepare([source], first.output, deduplicated, overwrite=True)
    assert (first.output / "removed.jsonl").exists()
    prepare([source], first.output, PrepareSettings("bpe:300", 0.1, 9), overwrite=True)
    assert not (first.output / "removed.jsonl").exists(), "a file of the old output"
    assert (first.output / "notes.md").read_text() == "mine" and (
        first.output / "plots" / "lengths.png"
    ).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.jsonl"]
    (first.output / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.bin has 0 bytes instead of .*--overwrite"):
        prepare([source], first.output, PrepareSettings("bpe:300", 0.1, 9))


def test_a_data_set_of_the_hub_is_read_again_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(source: Source) -> Iterator[Record]:
        source.key = "text"
        return (Record(number, {"text": text}) for number, text in enumerate(texts, start=1))

    monkeypatch.setattr(documents, "read_hub", rows)
    texts, again = (
        TEXTS[:10],
        partial(prepare, ["hf:a/b"], tmp_path / "out", PrepareSettings("bpe:300"), processes=1),
    )
    again()
    texts = TEXTS
    reused = again()
    assert reused.reused and "hf: inputs are compared by name only; --overwrite" in "".join(
        _summary(reused)
    )
    assert again(overwrite=True).report["documents"]["read"] == len(TEXTS)


def test_the_command(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    arguments = ["--input", "a.jsonl", "--tokenizer", "bpe:300", "--output", "out"]
    first = script("launch/prepare_data.py", tmp_path, *arguments)
    assert (first.returncode, first.stderr) == (0, "")
    assert "39 documents" in first.stdout and "1 documents" in first.stdout
    wrong = script("launch/prepare_data.py", tmp_path, *arguments, "--seed", "1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1


def test_a_script_without_a_main_guard_is_told(tmp_path: Path) -> None:
    """Each process imports the script."""
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    call = (
        f"prepare([{str(source)!r}], {str(tmp_path / 'out')!r}, PrepareSettings('bpe:300'), "
        "processes=2)"
    )
    (tmp_path / "main.py").write_text(
        f"from zero_tp.data import prepare, PrepareSettings\n{call}\n"
    )
    done = script(str(tmp_path / "main.py"), tmp_path)
    assert done.returncode == 1 and done.stderr.endswith(
        'calls prepare must do so under if __name__ == "__main__":\n'
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "main.py"]


def test_documents_in_are_those_kept_and_those_dropped(tmp_path: Path) -> None:
    good = [f"document {i} of the good ones" for i in range(20)]
    lines = [json.dumps({"text": text}) for text in good]
    lines[3:3] = ['{"text": ', '{"text": " "}', '{"txt": "x"}', '"text"', "", '{"text": "\\ud800"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode())[:-20])
    inputs, given = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"], PrepareSettings("bpe:300", 0.1)
    report = prepare(inputs, tmp_path / "out", given).report["documents"]
    cut = report["dropped"].pop("unreadable")
    assert cut == 1 and report["read"] == report["kept"] + sum(report["dropped"].values()) + cut
    assert report["dropped"]["empty"] in (1, 2) and 20 <= report["kept"] < 40
    assert report["problems"][0] == {
        "where": f"{tmp_path}/a.jsonl:4",
        "reason": "malformed",
        "detail": "not valid JSON: Expecting value at line 1 column 10",
    }
    for output in ("strict", "out"):  # the second one is complete
        with pytest.raises(UserError, match=r"a\.jsonl:4: not valid JSON"):
            prepare(inputs, tmp_path / output, given, strict=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.gz", "out"]


@THOROUGH
@pytest.mark.parametrize("kind", in_tiers(["jsonl", "txt"], ["txt"]))
def test_standard_input(tmp_path: Path, kind: str) -> None:
    texts, name = [f"document {i} of the good ones" for i in range(20)], f"a.{kind}"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "a.txt").write_text("\n".join(texts))
    prepare([tmp_path / name], tmp_path / "file", PrepareSettings("bpe:300", documents="line"))
    command = [
        sys.executable,
        str(ROOT / "launch" / "prepare_data.py"),
        "--tokenizer",
        "bpe:300",
        "--processes",
        "1",
    ]
    command += [
        "--input",
        "-",
        "--stdin-kind",
        kind,
        "--documents",
        "line",
        "--output",
        str(tmp_path / "out"),
    ]
    with open(tmp_path / name, "rb") as given:
        assert subprocess.run(command, stdin=given).returncode == 0
    for file in (
        "train.bin",
        "train.idx",
        "validation.bin",
        "validation.jsonl",
        "tokenizer/tokenizer.json",
    ):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "file" / file).read_bytes(), (
            file
        )
    with pytest.raises(UserError, match=r"made with another inputs: .* --overwrite"):
        prepare(["-"], tmp_path / "out", PrepareSettings("bpe:300"))


def test_links_in_an_output_stay_and_an_output_may_be_one(tmp_path: Path) -> None:
    output, target = run(tmp_path).output, tmp_path / "target"
    sources, other = [tmp_path / "out.jsonl"], PrepareSettings("bpe:300", 0.1, 9)
    output.rename(target)
    output.symlink_to(target.name)
    links = {"link": "report.json", "dangling": "nowhere", "folder": str(tmp_path)}
    for name, destination in links.items():
        (target / name).symlink_to(destination)
    socket.socket(socket.AF_UNIX).bind(str(target / "socket"))
    prepare(sources, output, other, overwrite=True)
    assert {path.name: os.readlink(path) for path in target.iterdir() if path.is_symlink()} == links
    assert (
        output.is_symlink()
        and (target / "socket").is_socket()
        and prepare(sources, target, other).reused
    )
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    output.unlink()
    output.symlink_to(output.name)
    with pytest.raises(UserError, match=r"out: can't be written: Not a directory$"):
        prepare(sources, output, other, overwrite=True)
