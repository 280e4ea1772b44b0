"""Files of encoders against transformers' own classes: what a model reads and writes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.compare import grid, piece_of
from tests.support.encoders import (
    ALL_ENCODERS,
    ALONE,
    LENGTH,
    encoder,
    encoder_fields,
    fields_of,
    without_sentences,
)
from tests.support.native import parallel_model, to_ours
from tests.support.pools import Pools
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.model.context import ForwardInputs
from zero_tp.model.huggingface import ZeroTPForPreTraining
from zero_tp.parallel.topology import Topology


def there_and_back(source: Path, folder: Path, tensor: int) -> tuple[list[str], float]:
    """What is said of the heads, and how far hidden states are from transformers' own; exports
    the model.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ZeroTPForPreTraining.from_pretrained(
            source, grid(tensor, tensor > 1), seed=3
        ).eval()
    model.save_pretrained(folder / f"tp{tensor}")
    reference: Any = transformers.BertModel.from_pretrained(source).eval()
    tokens = torch.randint(30522, (2, 32), generator=torch.Generator().manual_seed(tensor))
    padding = (torch.arange(32) < torch.tensor([32, 20])[:, None]).long()
    with torch.no_grad():
        expected = reference(tokens, attention_mask=padding).last_hidden_state.transpose(0, 1)
        hidden = model.transformer(
            tokens.t().contiguous(), inputs=ForwardInputs(padding), sequence=tensor > 1
        )
    own = piece_of(expected, model.topology)
    return [str(one.message) for one in caught], float((hidden - own).norm() / own.norm())


@THOROUGH
@pytest.mark.parametrize("tensor", in_tiers([1, 2, 4], [4]))
def test_a_real_model_there_and_back(
    ranks: Pools, minilm: Path, tmp_path: Path, tensor: int
) -> None:
    """A trained BertModel, whose heads are drawn: all of it bit for bit at any TP, the drawn
    heads at TP 1's bits.
    """
    for said, far in ranks(4).run(there_and_back, minilm, tmp_path, tensor):
        heads = "the head of masked tokens, the sentence head"
        assert [text.partition(": has no ")[2] for text in said] == [
            f"weights of {heads}: drawn from the seed"
        ]
        assert far < 1e-5
    before: Any = transformers.BertModel.from_pretrained(minilm)
    after: Any = transformers.BertForPreTraining.from_pretrained(tmp_path / f"tp{tensor}")
    for name, weight in before.state_dict().items():
        assert torch.equal(after.bert.state_dict()[name], weight), name
    drawn = parallel_model(after, Topology(world=1))
    fresh = ZeroTPForPreTraining(drawn.config, Topology(world=1), seed=3)
    for name, weight in drawn.named_parameters():
        if name.startswith(("head.", "sentence_head.classifier")):
            assert torch.equal(weight, fresh.get_parameter(name)), name


@ALL_ENCODERS
@hypothesis.settings(max_examples=4)
@given(data=st.data())
def test_import_and_export_keep_every_bit(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files of the class with both heads and of the bare model, whose heads are drawn and said
    to be.
    """
    folder = tmp_path_factory.mktemp("models")
    reference = encoder({**data.draw(encoder_fields(model_type)), "architectures": None}, 1)
    bare = data.draw(st.booleans(), label="bare")
    (reference.bert if bare else reference).save_pretrained(
        folder / "theirs", max_shard_size="20KB"
    )
    if bare:
        with pytest.warns(
            UserWarning, match="the head of masked tokens, the sentence head: drawn from the seed"
        ):
            model = ZeroTPForPreTraining.from_pretrained(folder / "theirs", ALONE, seed=5)
    else:
        model = ZeroTPForPreTraining.from_pretrained(folder / "theirs", ALONE)
    model.save_pretrained(folder / "ours")
    again = getattr(transformers, type(reference).__name__).from_pretrained(folder / "ours")
    expected = reference.state_dict()
    found = again.state_dict()
    assert found.keys() == expected.keys()
    read = [name for name in expected if name.startswith("bert.") or not bare]
    assert all(torch.equal(found[name], expected[name]) for name in read)
    if bare:
        drawn = dict(ZeroTPForPreTraining(model.config, ALONE, seed=5).named_parameters())
        for name, parameter in model.named_parameters():
            if name.startswith(("head.", "sentence_head.classifier")):
                assert torch.equal(parameter, drawn[name]), name


OPENED = (
    "AutoModel",
    "AutoModelForPreTraining",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
)


@ALL_ENCODERS
@pytest.mark.parametrize("sentences", [True, False])
def test_an_export_opens_as_every_class_that_takes_from_it(
    model_type: str, sentences: bool, tmp_path: Path
) -> None:
    """What each needs is in it, and no more is missing than what it trains anew."""
    architectures = None if sentences else [without_sentences(model_type)]
    config = transformers.AutoConfig.for_model(**fields_of(model_type, architectures=architectures))
    ZeroTPForPreTraining(config, ALONE, seed=1).save_pretrained(tmp_path / "ours")
    stored = {
        name.removeprefix("bert.") for name in load_file(tmp_path / "ours" / "model.safetensors")
    }
    for name in OPENED:
        opened, loading = getattr(transformers, name).from_pretrained(
            tmp_path / "ours", output_loading_info=True
        )
        own = {each for each in loading["missing_keys"] if not each.startswith("classifier.")}
        poolers = {
            f"{prefix}pooler.dense.{part}"
            for prefix in ("", "bert.")
            for part in ("weight", "bias")
        }
        order = {f"cls.seq_relationship.{part}" for part in ("weight", "bias")}
        assert own <= (set() if sentences else poolers | order), name
        assert not loading["mismatched_keys"]
        tensors = {key.removeprefix("bert."): tensor for key, tensor in opened.state_dict().items()}
        assert len(stored & tensors.keys()) > 20


@ALL_ENCODERS
def test_names_of_old_files_and_what_has_no_weights(model_type: str, tmp_path: Path) -> None:
    """`gamma` and `beta`, a decoder's bias of both names, position ids; a class with another
    head is refused.
    """
    reference = encoder(fields_of(model_type), 3)
    reference.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if model_type == "bert":
        for name in [name for name in tensors if "LayerNorm" in name]:
            tensors[name.replace("weight", "gamma").replace("bias", "beta")] = tensors.pop(name)
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    tensors["bert.embeddings.position_ids"] = torch.arange(LENGTH)[None]
    save_file(tensors, path, {"format": "pt"})
    found = ZeroTPForPreTraining.from_pretrained(tmp_path, ALONE)
    for name, tensor in to_ours(reference.config, reference.state_dict()).items():
        assert torch.equal(found.get_parameter(name), tensor), name
    bias = "cls.predictions.transform.dense.bias"
    others: list[tuple[dict[str, Tensor], str]] = [
        (
            {"cls.predictions.decoder.bias": tensors["cls.predictions.bias"] + 1},
            r"predictions\.bias and .* differ",
        ),
        ({bias: torch.zeros(0)}, rf"no tensor {bias}"),
        ({"classifier.weight": torch.zeros(2, 24)}, r"unexpected tensor classifier\.weight"),
    ]
    for changed, message in others:
        save_file(
            {name: each for name, each in (tensors | changed).items() if each.numel()},
            path,
            {"format": "pt"},
        )
        with pytest.raises(UserError, match=message):
            ZeroTPForPreTraining.from_pretrained(tmp_path, ALONE)
