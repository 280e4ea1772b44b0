"""A directory is one model for every command, or refused by name; nothing that came with it is
run or waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertForPreTraining

from zero_tp.base.errors import UserError
from zero_tp.base.weight_files import INDEX, SINGLE
from zero_tp.commands import sample
from zero_tp.data.tokenizer_files import open_tokenizer
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.weights.native import open_config, open_model
from zero_tp.tools.evaluation.model_directory import open_directory

FIRST = "transformer.wte.weight"


@pytest.fixture
def model(small_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_model, tmp_path / "model"))


def evaluation(directory: Path) -> Any:
    return open_directory(directory).load("float32", "cpu").module


def training(directory: Path) -> Any:
    return ZeroTPForCausalLM.from_pretrained(directory, dtype=torch.float32)


def in_shards(directory: Path) -> dict[str, Any]:
    """Split the weights into two files with an index; give the index."""
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, directory / file, {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: file for file, some in parts.items() for name in some},
    }
    (directory / INDEX).write_text(json.dumps(index))
    return index


def changed(directory: Path, file: str, **changes: Any) -> None:
    (directory / file).write_text(json.dumps(json.loads((directory / file).read_text()) | changes))


def with_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, {"format": "pt"})


def beside_an_index(directory: Path) -> None:
    shutil.copyfile(directory / SINGLE, directory / "kept")
    in_shards(directory)
    (directory / "kept").rename(directory / SINGLE)


def renamed_shard(directory: Path, name: Any) -> None:
    index = in_shards(directory)
    index["weight_map"][FIRST] = name
    (directory / INDEX).write_text(json.dumps(index))


def outside(directory: Path) -> None:
    renamed_shard(directory, "../model-2.safetensors")
    shutil.copyfile(directory / "model-2.safetensors", directory.parent / "model-2.safetensors")


def unlisted(directory: Path) -> None:
    index = in_shards(directory)
    del index["weight_map"][FIRST]
    (directory / INDEX).write_text(json.dumps(index))


def pipe(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)


def pipe_as_shard(directory: Path) -> None:
    in_shards(directory)
    pipe(directory, "model-2.safetensors")


def without(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).unlink()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "both": (beside_an_index, r"two models in one directory; remove"),
    "outside": (outside, r'"\.\./model-2\.safetensors" is not the name of a file beside it'),
    "absolute": (
        lambda d: renamed_shard(d, "/etc/passwd"),
        r'"/etc/passwd" is not the name of a file beside it',
    ),
    "no name": (lambda d: renamed_shard(d, 5), r"5 is not the name of a file beside it"),
    "no weight_map": (
        lambda d: (in_shards(d), (d / INDEX).write_text("{}")),
        r"not an index with a weight_map",
    ),
    "Inf": (
        lambda d: with_weights(d, lambda t: t[FIRST][3].fill_(-torch.inf)),
        rf"{FIRST} holds NaN or Inf",
    ),
    "long name": (lambda d: renamed_shard(d, "x" * 5000), r"can't be read \(File name too long\)"),
    "another shard": (lambda d: renamed_shard(d, "model-1.safetensors"), rf"tensor {FIRST} is"),
    "unlisted": (unlisted, rf": (no tensor|weights missing in the files: .*) {FIRST}"),
    "NaN": (
        lambda d: with_weights(d, lambda t: t[FIRST][3].fill_(torch.nan)),
        rf"{FIRST} holds NaN or Inf",
    ),
    "integers": (
        lambda d: with_weights(d, lambda t: t.update({FIRST: t[FIRST].int()})),
        rf"{FIRST}: expected one of F64.*found I32",
    ),
    "two names": (
        lambda d: with_weights(d, lambda t: t.update({"wte.weight": t[FIRST].clone()})),
        rf"wte\.weight.* are both {FIRST}",
    ),
    "cut": (lambda d: changed(d, "config.json", n_layer=1), r"unexpected tensor transformer\.h\.1"),
    "layers": (
        lambda d: changed(d, "config.json", n_layer=5000),
        r"its config has 5,000 layers, its files only",
    ),
    "not tied": (
        lambda d: with_weights(d, lambda t: t.update({"lm_head.weight": t[FIRST] + 1})),
        r"differ, but its config ties them",
    ),
    "shape": (
        lambda d: changed(d, "config.json", n_positions=65),
        r"wpe\.weight: expected shape \(65, 32\)",
    ),
    "quantized": (
        lambda d: changed(d, "config.json", quantization_config={"quant_method": "bitsandbytes"}),
        r"quantized weights; give whole ones",
    ),
    "pipe": (pipe_as_shard, r"model-2\.safetensors: not a regular file"),
    "pipe as weights": (lambda d: pipe(d, SINGLE), r"model\.safetensors: not a regular file"),
    "pipe of generation": (lambda d: pipe(d, "generation_config.json"), r"not a regular file"),
    "adapter": (
        lambda d: (d / "adapter_config.json").write_text("{}"),
        r"adapter of another model",
    ),
    "generation": (
        lambda d: (d / "generation_config.json").write_text('{"a": 1, "a": 2}'),
        r'"a" appears twice',
    ),
}


@pytest.mark.parametrize("reader", [evaluation, training])
@pytest.mark.parametrize("name", DAMAGE)
def test_directories_without_one_whole_model_are_refused(
    model: Path, name: str, reader: Callable[[Path], Any]
) -> None:
    damage, message = DAMAGE[name]
    damage(model)
    with pytest.raises(UserError, match=message):
        reader(model)


EVALUATION_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "vocabulary": (
        lambda d: changed(d, "config.json", vocab_size=99),
        r"tokens with ids up to \d+, the model only 99; ",
    ),
    "type": (lambda d: changed(d, "config.json", model_type="no-such-type"), "no-such-type"),
    "not causal": (
        lambda d: changed(d, "config.json", model_type="t5"),
        "t5 is not a causal language model",
    ),
    "more layers": (
        lambda d: changed(d, "config.json", n_layer=3),
        r"weights missing in the files: transformer\.h\.2\.",
    ),
    "zeros": (lambda d: (d / SINGLE).write_bytes(b"\0" * 100), "weights can't be read"),
    "no weights": (lambda d: without(d, SINGLE), "no weights"),
    "no config": (lambda d: without(d, "config.json"), r"no config\.json"),
    "no checkpoint": (lambda d: (d / "checkpoints").mkdir(), "no complete checkpoint there"),
    "no directory": (shutil.rmtree, "no such directory"),
    "heads": (
        lambda d: of_type(d, "gemma", num_key_value_heads=8),
        "fails in forward: The size of tensor",
    ),
}


@pytest.mark.parametrize("name", EVALUATION_DAMAGE)
def test_models_that_cannot_be_evaluated_are_refused(model: Path, name: str) -> None:
    damage, message = EVALUATION_DAMAGE[name]
    damage(model)
    with pytest.raises(UserError, match=message):
        evaluation(model)


@pytest.mark.parametrize("positions", [-32, 0])
def test_a_number_of_positions_is_positive(model: Path, positions: int) -> None:
    opened = open_directory(model)
    opened.config.n_positions = positions
    for requested in (None, 8):
        with pytest.raises(
            UserError, match=r"max_position_embeddings leave \S+ positions; at least 1"
        ):
            opened.sequence_length(requested)


def test_shards_are_the_same_model(small_model: Path, model: Path) -> None:
    in_shards(model)
    expected = load_file(small_model / SINGLE)
    opened = evaluation(model).state_dict()
    assert all(torch.equal(opened[name], tensor) for name, tensor in expected.items())
    assert torch.equal(training(model).transformer.embedding.word.weight, expected[FIRST])


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04]q\x00.", "list"])
def test_pickled_garbage(model: Path, content: bytes | str) -> None:
    (model / SINGLE).unlink()
    if isinstance(content, str):
        torch.save([torch.ones(1)], model / "pytorch_model.bin")
    else:
        (model / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(
        UserError, match=r"pytorch_model\.bin: (torch's restricted unpickler refuses|not a dict)"
    ):
        open_directory(model, allow_pickle=True).load("float32", "cpu")


def test_code_of_a_directory_is_not_run_and_nothing_asks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[object] = []

    def yes(*question: object) -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", yes)
    expected, before = evaluation(model).state_dict(), training(model).state_dict()
    classes = (
        "from transformers import GPT2Config as C, GPT2LMHeadModel as M, PreTrainedTokenizerFast "
        "as T"
    )
    (model / "code.py").write_text(f"open({str(model / 'ran')!r}, 'w')\n{classes}\n")
    names = {
        "AutoConfig": "code.C",
        "AutoModelForCausalLM": "code.M",
        "AutoTokenizer": ["code.T", "code.T"],
    }
    changed(model, "config.json", auto_map=names)
    changed(model, "tokenizer_config.json", auto_map=names)
    opened = evaluation(model).state_dict()
    assert all(torch.equal(opened[name], tensor) for name, tensor in expected.items())
    with pytest.warns(
        UserWarning, match=r"config\.json: auto_map changes nothing: transformers' gpt2 ignores it"
    ):
        trained = training(model).state_dict()
    assert all(torch.equal(trained[name], tensor) for name, tensor in before.items())
    changed(model, "config.json", model_type="mine")
    for read in (evaluation, lambda directory: open_model(directory, open_config(directory))):
        with pytest.raises(
            UserError, match=r'model_type "mine".*code that comes with a model is never run'
        ):
            read(model)
    by_layer = {f"a part of the model with a long name {number}": "sdpa" for number in range(9)}
    for kernel in ("someone/kernel", {**by_layer, "last": "someone/kernel"}):
        changed(model, "config.json", model_type="gpt2", attn_implementation=kernel)
        with pytest.raises(UserError, match="code from elsewhere is never run"):
            evaluation(model)
    (model / "config.json").unlink()
    changed(model, "tokenizer_config.json", tokenizer_class="T")
    with pytest.raises(UserError, match=r"its tokenizer can't be read: .* contains custom code"):
        open_tokenizer(model)
    assert not questions and not (model / "ran").exists()


def of_type(directory: Path, model_type: str, **fields: Any) -> Path:
    """A small model of another type in the place of the directory's, with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    sizes |= {"num_key_value_heads": 2} if "bert" not in model_type else {}
    sizes |= {
        "vocab_size": json.loads((directory / "config.json").read_text())["vocab_size"],
        "pad_token_id": 0,
    }
    config: Any = AutoConfig.for_model(model_type, **{**sizes, **fields})
    native = (
        BertForPreTraining(config)
        if model_type == "bert"
        else AutoModelForCausalLM.from_config(config)
    )
    native.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    return directory


def sampling(directory: Path, prompt: str = "some", tokens: int | None = 2) -> str:
    options = argparse.Namespace(
        model=directory, prompt=prompt, tokens=tokens, temperature=0.0, top_k=1, seed=0
    )
    return sample.continue_prompt(options)


def test_a_prompt_that_fills_the_model_is_refused(model: Path) -> None:
    with pytest.raises(
        UserError, match=r"^--prompt: [\d,]+ tokens fill the model's \d+ positions; shorten it$"
    ):
        sampling(model, "some " * 300, tokens=None)


ENCODERS = [
    ("bert", sampling),
    ("bert", evaluation),
    ("roberta", sampling),
    ("roberta", evaluation),
]


@pytest.mark.parametrize(("model_type", "reader"), ENCODERS)
def test_an_encoder_predicts_no_next_token(
    model: Path, model_type: str, reader: Callable[[Path], Any]
) -> None:
    """transformers has causal classes for such configs, in which a token sees those after it."""
    of_type(model, model_type)
    with pytest.raises(UserError, match=rf"model: {model_type} is an encoder, ") as caught:
        reader(model)
    assert "\n" not in str(caught.value)
    of_type(model, model_type, is_decoder=True)
    if model_type == "roberta":
        assert reader(model)
        assert open_directory(model).sequence_length(None) == 511, (
            "position 0 is the padding token's"
        )


def test_a_model_whose_tokens_see_the_next_is_refused(model: Path) -> None:
    """XLM is among transformers' causal classes, and without `causal` in its config it is an
    encoder.
    """
    from transformers import XLMConfig, XLMWithLMHeadModel

    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    (model / "generation_config.json").unlink(missing_ok=True)
    for causal in (False, True):
        config = XLMConfig(vocab_size=vocabulary, emb_dim=16, n_layers=1, n_heads=2, causal=causal)
        XLMWithLMHeadModel(config).save_pretrained(model)
        refused = pytest.raises(
            UserError, match=r"a token of this XLMWithLMHeadModel sees those after it; give a model"
        )
        with contextlib.nullcontext() if causal else refused:
            open_directory(model).load("float32", "cpu", window=8)


IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "rope_parameters.rope_theta": (0, -3, [1e4], "10000"),
    "rope_parameters.rope_type": (["linear"], {"linear": 2}, 5),
    "rope_parameters.factor": (0, -1.0, [2.0]),
    "rms_norm_eps": (0.0, -1e-6),
    "sliding_window": (0,),
}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        (model_type, name)
        for model_type in ("llama", "gemma")
        for name in IMPOSSIBLE
        if name.startswith("rope")
    ]
    + [("mistral", name) for name in IMPOSSIBLE if not name.startswith("rope")],
)
def test_values_that_no_model_has_are_refused(model: Path, model_type: str, name: str) -> None:
    """With a table of zero_tp's, or computed by transformers alone (gemma), which computes NaN
    of some of them.
    """
    of_type(model, model_type)
    readers = (evaluation, sampling) if model_type == "gemma" else (evaluation, sampling, training)
    assert all(reader(model) for reader in readers)
    block, _, field = name.rpartition(".")
    for value in IMPOSSIBLE[name]:
        rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, field: value}
        changed(model, "config.json", **({block: rope} if block else {field: value}))
        for reader in readers:
            with pytest.raises(
                UserError, match=rf"config\.json: {name}: .* is not (a|supported|positive)"
            ) as caught:
                reader(model)
            assert "\n" not in str(caught.value)


TOO_LARGE = 2**31 - 1


def test_an_id_beyond_every_vocabulary_is_refused(model: Path) -> None:
    fields = json.loads((model / "tokenizer.json").read_text())["model"]
    changed(model, "tokenizer.json", model=fields | {"vocab": fields["vocab"] | {"x x": TOO_LARGE}})
    with pytest.raises(UserError, match="the tokenizer's id 2,147,483,647 is too large"):
        open_tokenizer(model)


def test_a_panic_of_tokenizers_is_one_line(model: Path) -> None:
    parts = [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    template = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": {}}
    changed(model, "tokenizer.json", post_processor=template)
    with pytest.raises(UserError, match=r"its tokenizer can't be read: .*no entry found for key"):
        open_tokenizer(model)


def test_a_damaged_config_is_not_called_a_damaged_tokenizer(model: Path) -> None:
    changed(model, "config.json", dtype="float30")
    with pytest.raises(UserError, match=r"config\.json: .*float30"):
        _ = open_directory(model).tokenizer


@pytest.mark.parametrize("tokens", [TOO_LARGE, "x", {"id": TOO_LARGE}, None])
def test_files_that_are_no_tokenizer_are_refused(model: Path, tokens: Any) -> None:
    if tokens is None:
        pipe(model, "tokenizer_config.json")
    else:
        changed(model, "tokenizer.json", added_tokens=tokens, added_tokens_decoder=tokens)
    with pytest.raises(
        UserError, match="its tokenizer can't be read" if tokens else "not a regular file"
    ):
        open_tokenizer(model)
