"""What is refused before any rank is connected: another corpus than the run's, another tokenizer
than the model's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from tests.support import corpora
from tests.support.corpora import run
from tests.support.run_log import train_state
from tests.support.settings import deepspeed_settings, gpt2_config
from tests.support.tiny_models import write_corpus
from zero_tp.base.errors import UserError
from zero_tp.data.indexed import IndexedCorpus, bin_path, content_path
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.run.checkpoint.same_run import check_same_run, fixed_settings
from zero_tp.run.config import RunConfig
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.watch import Watchdog
from zero_tp.run.run_inputs import RunInputs
from zero_tp.run.start import start_training
from zero_tp.tools.corpus.tokenizer_training import train_bpe
from zero_tp.tools.planning.forecast import MemoryForecast

SIZES: dict[str, Any] = {
    "n_layer": 1,
    "n_embd": 8,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 300,
}
GPT2 = {"model_type": "gpt2", **SIZES}


def prepare(prefix: Path, seed: int, documents: int = 20) -> None:
    random = np.random.default_rng(seed)
    write_corpus(
        prefix, (random.integers(0, 300, random.integers(5, 30)) for _ in range(documents)), 300
    )


def run_of(folder: Path, model: Mapping[str, Any] = GPT2, **data: Any) -> RunInputs:
    path, data = (
        folder / "run.json",
        {"train": str(folder / "data" / "train"), "sequence_length": 8, **data},
    )
    block = {"model": model, "data": data, "training": {"steps": 1}}
    path.write_text(json.dumps(deepspeed_settings(0, zero_tp=block)))
    return RunInputs(RunConfig.load(path, world_size=1), folder / "run")


def saved_of(run: RunInputs, **others: Any) -> Any:
    """Return what a start reads of the manifest of a run's checkpoint."""
    recorded = {"corpora": run.corpora, "tokenizer_fingerprint": None, "step": 1}
    return SimpleNamespace(imported=None, **json.loads(json.dumps(recorded | others)))


def test_a_run_goes_on_where_its_forecast_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(config: RunConfig, cpu: bool, varlen: bool) -> Any:
        raise ZeroDivisionError("no such shape\nand more")

    monkeypatch.setattr("zero_tp.tools.planning.forecast.workload_of", fails)
    state = train_state(tmp_path)
    state.engine.device = torch.device("cpu")
    forecast = MemoryForecast()
    forecast.on_start(state)
    forecast.on_end(state)
    assert (
        capsys.readouterr().out
        == "plan: none; the planner failed: ZeroDivisionError: no such shape\n"
    )


def test_a_corpus_that_moved_is_the_same(tmp_path: Path, seed: int) -> None:
    for name in ("a", "b"):
        prepare(tmp_path / "data" / name, seed + ord(name))

    def resumed(folder: str, weights: dict[str, float]) -> None:
        run = run_of(
            tmp_path, train={str(tmp_path / folder / name): each for name, each in weights.items()}
        )
        check_same_run(tmp_path / "step", manifest, run.config)
        run.check_resumed(tmp_path / "step", manifest)

    shares = {"a": 0.25, "b": 0.75}
    before = run_of(
        tmp_path, train={str(tmp_path / "data" / name): each for name, each in shares.items()}
    )
    manifest = saved_of(before, fixed=fixed_settings(before.config), kinds=["a", "b"])
    (tmp_path / "data").rename(tmp_path / "moved")
    resumed("moved", shares)
    for changed in ({"a": 0.5, "b": 0.5}, {"a": 0.25}):
        with pytest.raises(UserError, match=r"^zero_tp\.data\.train: \[\[.* was started with \[\["):
            resumed("moved", changed)
    (tmp_path / "moved").rename(tmp_path / "data")
    prepare(tmp_path / "moved" / "a", seed)
    shutil.copytree(
        tmp_path / "data",
        tmp_path / "moved",
        ignore=lambda *_: ["a.bin", "a.idx"],
        dirs_exist_ok=True,
    )
    with pytest.raises(
        UserError,
        match=r"^zero_tp\.data\.train: .*moved/a holds 20 documents of .* was started with 20 ",
    ):
        resumed("moved", shares)


def test_a_model_of_another_tokenizer_is_refused(tmp_path: Path, seed: int) -> None:
    """Of two that agree on the tokens that both have, one may have more."""
    prepare(tmp_path / "data" / "train", seed)
    directory = tmp_path / "model"
    GPT2LMHeadModel(gpt2_config(**SIZES)).save_pretrained(directory)
    texts = [
        "to be, or not to be, that is the question " * 3,
        "whether it is nobler in the mind to suffer " * 3,
    ]
    train_bpe(iter(texts), 280).save_pretrained(tmp_path / "data" / "tokenizer")
    model = {"from_pretrained": str(directory)}
    run_of(tmp_path, model)  # the directory has none to compare
    train_bpe(iter(texts), 270).save_pretrained(directory)
    run_of(tmp_path, model)
    train_bpe(iter(["a completely different sample of some english"] * 2), 280).save_pretrained(
        directory
    )
    with pytest.raises(UserError) as caught:
        run_of(tmp_path, model)
    error = str(caught.value)
    assert (
        error.startswith("zero_tp.model.from_pretrained: token ")
        and f"in {tmp_path}/data/tokenizer, the" in error
    )
    assert error.endswith(f"prepare the corpus with --tokenizer {directory}") and "\n" not in error
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"model: its tokenizer can't be read"):
        run_of(tmp_path, model)


def test_a_corpus_that_records_no_tokenizer_gets_a_note(tmp_path: Path) -> None:
    """A run without a tokenizer still compares the records of its corpora."""
    model = GPT2 | {"vocab_size": 400}
    prefixes = [str(corpora.run(tmp_path, name).output / "train") for name in ("a", "b")]
    other = corpora.run(tmp_path, "c", tokenizer="bpe:290").output
    run = run_of(tmp_path, model, train=dict.fromkeys(prefixes, 1.0))
    assert run.notes == [] and run.fingerprint is not None
    with pytest.raises(
        UserError,
        match=rf"zero_tp\.data\.train: the tokenizer of {other}/train differs from the tok",
    ):
        run_of(tmp_path, model, train=dict.fromkeys([*prefixes, str(other / "train")], 1.0))
    for output in (tmp_path / "a", tmp_path / "b"):
        shutil.rmtree(output / "tokenizer")
    untold = run_of(tmp_path, model, train=dict.fromkeys(prefixes, 1.0))
    assert (untold.tokenizer, untold.notes, untold.fingerprint) == (None, [], run.fingerprint)
    with pytest.raises(
        UserError,
        match=r"zero_tp\.data\.validation: the tokenizer of .*/c/validation differs from the",
    ):
        run_of(tmp_path, model, train=prefixes[0], validation=str(other / "validation"))
    report = json.loads((tmp_path / "b" / "report.json").read_text())
    del report["tokenizer"]
    (tmp_path / "b" / "report.json").write_text(json.dumps(report))
    older = run_of(tmp_path, model, train=dict.fromkeys(prefixes, 1.0))
    assert older.notes == [
        f"no tokenizer is recorded with {prefixes[1]}, so it was not compared with the tokenizer "
        f"of {prefixes[0]}"
    ]
    assert run_of(tmp_path, model, train=prefixes[1]).notes == [], (
        "a run without tokenizers, as before"
    )
    saved = saved_of(run, fingerprint=None)
    saved.tokenizer_fingerprint = TokenizerFingerprint.of(train_bpe(iter(["other words"] * 9), 280))
    with pytest.raises(
        UserError, match=r"the run's tokenizer differs from the one that step was trained with: "
    ):
        older.check_resumed(Path("step"), saved)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "vocab_size": 300,
}


@pytest.mark.parametrize(
    ("model", "padding"),
    [(LLAMA, None), (LLAMA | {"pad_token_id": 7}, 7), (GPT2, "the tokenizer's")],
)
def test_a_tokenizer_never_decides_what_training_depends_on(
    tmp_path: Path, model: dict[str, Any], padding: int | str | None
) -> None:
    """A Llama's padding token gets no gradient from the look-up, and tokenizers pad with the
    token that ends a text.
    """
    prepare(tmp_path / "data" / "train", 1)
    tokenizer = train_bpe(iter(["a few words of text"] * 5), 270)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "data" / "tokenizer")
    config = run_of(tmp_path, model).model_config
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == (tokenizer.pad_token_id if isinstance(padding, str) else padding)


def test_ranks_that_cannot_meet_leave_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `srun` starts them: it tells ranks their numbers, not where they meet."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    prepare(tmp_path / "data" / "train", seed)
    run = run_of(tmp_path)
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "12"}
    error = (
        "^MASTER_ADDR is not set: 2 ranks need it to meet; export it before srun, as "
        r"launch/slurm\.sbatch does$"
    )
    environment = RankEnvironment.of_this_process(slurm)
    with pytest.raises(UserError, match=error), start_training(run, environment, Watchdog()):
        pass
    assert not run.directory.exists()


def test_a_byte_that_was_changed_in_a_large_corpus_is_refused(tmp_path: Path, seed: int) -> None:
    """Between the blocks that the quick identity reads, and with the file's times set back."""
    prefix = tmp_path / "data" / "train"
    write_corpus(prefix, [np.random.default_rng(seed).integers(0, 300, 700_000)], 300)
    saved = saved_of(run_of(tmp_path))
    data = bin_path(prefix)
    times = data.stat()
    with data.open("r+b") as file:
        file.seek(17_000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
    quick = IndexedCorpus(prefix).identity(hash_tokens=False)
    assert quick.items() <= saved.corpora[str(prefix)].items(), "the quick identity sees nothing"
    with pytest.raises(UserError) as caught:
        run_of(tmp_path).check_resumed(tmp_path / "step", saved)
    error = str(caught.value)
    assert error.startswith(f"zero_tp.data.train: {prefix} holds 1 documents of 700,000 tokens ")
    assert f"but the run of {tmp_path}/step was started with 1 documents of " in error
    assert (
        error.endswith("prepare it as it was, or give another --output-dir") and "\n" not in error
    )
    del saved.corpora[str(prefix)]["content"]  # as saved before it was noted
    run_of(tmp_path).check_resumed(tmp_path / "step", saved)


def test_all_of_a_corpus_is_read_once(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "train"
    prepare(prefix, seed)
    reads, read_content = list[str](), IndexedCorpus._read_content

    def counted(corpus: IndexedCorpus) -> object:
        reads.append(corpus.prefix)
        return read_content(corpus)

    monkeypatch.setattr(IndexedCorpus, "_read_content", counted)
    written = IndexedCorpus(prefix).content
    assert IndexedCorpus(prefix).content == written and IndexedCorpus(prefix).content == written
    assert written.sha256 == hashlib.sha256(bin_path(prefix).read_bytes()).hexdigest()
    ids = np.fromfile(bin_path(prefix), np.uint16)
    assert (written.smallest, written.largest) == (ids.min(), ids.max())
    assert len(reads) == 1
    memory = json.loads(content_path(prefix).read_text())
    memory["content"]["largest"] = 7
    for damaged in (json.dumps(memory), "{", "[]", '{"content": 1}'):
        content_path(prefix).write_text(damaged)
        assert IndexedCorpus(prefix).content == written
    assert len(reads) == 5
    os.utime(prefix.with_suffix(".idx"), (1, 1))
    assert IndexedCorpus(prefix).content == written and len(reads) == 6


@pytest.mark.parametrize(
    ("file", "at"), [("train.bin", 1000), ("validation.bin", 3), ("train.idx", -16)]
)
def test_a_bit_flipped_in_a_prepared_corpus_is_refused_at_the_first_start(
    tmp_path: Path, file: str, at: int
) -> None:
    run(tmp_path, "data")
    path, validation = tmp_path / "data" / file, str(tmp_path / "data" / "validation")
    content, whole = (
        bytearray(path.read_bytes()),
        run_of(tmp_path, validation=validation).fingerprints(),
    )
    content[at] ^= 1
    path.write_bytes(content)
    for _ in range(2):  # what is damaged is not remembered
        with pytest.raises(
            UserError,
            match=rf"^{path} is damaged: its SHA-256 is \w{{12}}…, not \w{{12}}… as in "
            r"report\.json",
        ):
            run_of(tmp_path, validation=validation).fingerprints()
    content[at] ^= 1
    path.write_bytes(content)
    assert run_of(tmp_path, validation=validation).fingerprints() == whole
    (tmp_path / "data" / "report.json").unlink()
    content[at] ^= 1
    path.write_bytes(content)
    assert run_of(tmp_path, validation=validation).fingerprints() != whole, (
        "nothing says what it was"
    )


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, seed: int) -> None:
    prepare(tmp_path / "data" / "train", seed)
    rows = ([1, 2, 3, 4, 5, 6, 7, 8, token] for token in (5, 299, 300))
    late = str(write_corpus(tmp_path / "data" / "late", rows, 400))
    for data in ({"train": late}, {"validation": late}):
        with pytest.raises(
            UserError,
            match=r"late\.bin holds token id 300, outside the model's vocabulary of 300: ",
        ):
            run_of(tmp_path, GPT2, **data)
    run_of(tmp_path, GPT2 | {"vocab_size": 301}, train=late)
