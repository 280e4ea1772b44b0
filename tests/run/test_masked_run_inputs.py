"""What is found of a run of the masked objective before any rank is connected, each in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.settings import deepspeed_settings
from tests.support.tiny_models import bert_fields, prepared_speeches, write_corpus
from zero_tp.base.errors import UserError
from zero_tp.data.masked import MaskedSamples, MaskedValidation
from zero_tp.run.checkpoint.same_run import check_same_run, fixed_settings
from zero_tp.run.config import ConfigError, RunConfig
from zero_tp.run.run_inputs import RunInputs

BERT = bert_fields(model_type="bert", max_position_embeddings=32, vocab_size=400)
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 8,
    "n_head": 2,
    "vocab_size": 400,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_speeches(
        tmp_path_factory.mktemp("masked_run"), "wordpiece:400", 6, 4000, validation=1
    )


def config_of(
    folder: Path,
    corpus: Path,
    *,
    model: dict[str, Any] = BERT,
    objective: Any = "masked",
    train: Path | None = None,
    length: int = 32,
    **block: Any,
) -> RunConfig:
    data = {"train": str(train or corpus / "train"), "validation": str(corpus / "validation")}
    block |= {"model": model, "objective": objective, "data": data | {"sequence_length": length}}
    block["training"] = {"steps": 1}
    path = folder / "run.json"
    path.write_text(json.dumps(deepspeed_settings(0, micro_batch=2, zero_tp=block)))
    return RunConfig.load(path, world_size=1)


def run_of(folder: Path, corpus: Path, **options: Any) -> RunInputs:
    return RunInputs(config_of(folder, corpus, **options), folder / "run")


def test_a_run_has_the_samples_that_its_file_says(tmp_path: Path, corpus: Path) -> None:
    objective = {"type": "masked", "mask_probability": 0.4, "max_ngram": 1, "sentence_order": False}
    run = run_of(tmp_path, corpus, objective=objective)
    assert isinstance(run.samples, MaskedSamples) and isinstance(run.validation, MaskedValidation)
    masking = run.samples.row_builder.masking
    assert (masking.probability, masking.max_ngram, run.samples.row_builder.sentence_order) == (
        0.4,
        1,
        False,
    )
    assert masking.vocabulary.mask == 4 and len(masking.vocabulary.special) == 400
    (batch,) = run.samples.batches_from(0, 2, 1, 0, 1)
    assert "next_sentence_label" not in batch and batch["input_ids"].shape == (2, 32)
    defaults = run_of(tmp_path, corpus).samples
    assert isinstance(defaults, MaskedSamples) and defaults.row_builder.sentence_order
    assert (defaults.row_builder.masking.probability, defaults.row_builder.masking.max_ngram) == (
        0.15,
        3,
    )


def test_a_corpus_without_its_tokenizer_cannot_be_masked(tmp_path: Path, corpus: Path) -> None:
    alone = write_corpus(tmp_path / "alone", [range(300)], 400)
    with pytest.raises(
        UserError, match=r"zero_tp\.tokenizer: the masked objective needs the tokenizer"
    ):
        run_of(tmp_path, corpus, train=alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": GPT2}, "zero_tp.objective: .*gpt2 is a causal decoder"),
        ({"objective": "causal"}, "zero_tp.objective: .*bert is no causal decoder"),
        ({"length": 33}, "zero_tp.data.sequence_length: 33 tokens, but the model has 32 positions"),
        ({"length": 5}, "zero_tp.data.sequence_length: 5 tokens, .* use at least 6"),
        (
            {"model": {**BERT, "type_vocab_size": 1}},
            "zero_tp.model.type_vocab_size: 1, but .* 2 segments",
        ),
        (
            {"objective": {"type": "masked", "mask_probability": 1}},
            "zero_tp.objective.mask_probability: 1",
        ),
        ({"objective": {"type": "masked", "max_ngram": 0}}, "zero_tp.objective.max_ngram: 0"),
        ({"objective": {"type": "masked", "ngram": 2}}, "zero_tp.objective.ngram: unknown key"),
    ],
)
def test_what_does_not_fit_is_one_line(
    tmp_path: Path, corpus: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, UserError), match=message) as caught:
        run_of(tmp_path, corpus, **options)
    assert "\n" not in str(caught.value)


def test_a_resumed_run_has_the_same_objective_and_the_same_words(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_of(tmp_path, corpus)
    saved = {
        "fixed": fixed_settings(before.config),
        "kinds": ["a", "b"],
        "step": 1,
        "corpora": before.corpora,
        "model": {},
    }
    manifest: Any = SimpleNamespace(
        imported=None, **json.loads(json.dumps(saved | {"tokenizer_fingerprint": None}))
    )
    check_same_run(tmp_path, manifest, before.config)
    before.check_resumed(tmp_path, manifest)
    other = config_of(tmp_path, corpus, objective={"type": "masked", "max_ngram": 2})
    with pytest.raises(
        UserError,
        match=r"^zero_tp\.objective\.max_ngram: 2, but the run of .* was started with 3; ",
    ):
        check_same_run(tmp_path, manifest, other)

    prepared = json.loads((corpus / "tokenizer" / "tokenizer.json").read_text())
    words = prepared["model"]["vocab"]
    inner = next(token for token in words if token.startswith("##") and token[2:].isalpha())
    words["x" + inner[2:] * 3] = words.pop(inner)
    changed = Path(shutil.copytree(corpus / "tokenizer", tmp_path / "tokenizer"))
    (changed / "tokenizer.json").write_text(json.dumps(prepared))
    with pytest.raises(
        UserError, match=r"^zero_tp\.data\.train: the tokenizer of .* differs from the tokenizer "
    ):
        run_of(tmp_path, corpus, tokenizer=str(changed))
    # An older corpus.
    monkeypatch.setattr("zero_tp.training.run_inputs.corpus_fingerprint", lambda prefix: None)
    after = run_of(tmp_path, corpus, tokenizer=str(changed))
    with pytest.raises(
        UserError, match=r"special tokens and words \w+….* special tokens and words \w+…"
    ):
        after.check_resumed(tmp_path, manifest)
