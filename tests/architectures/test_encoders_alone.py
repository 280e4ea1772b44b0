"""Every encoder in one process against transformers' own class, for random small configs, and what it reads and
writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.compare import check_close
from tests.support.encoders import (
    BATCH,
    LENGTH,
    MODEL_TYPES,
    config_of,
    encoder,
    encoder_fields,
    losses_and_logits,
    rows_for,
    without_sentences,
)
from tests.support.native import check_gradients, gradients, parallel_model, to_ours
from tests.support.tiny_models import bert_fields
from zero_tp.constants import IGNORE_INDEX
from zero_tp.errors import UserError
from zero_tp.huggingface import ZeroTPForCausalLM, ZeroTPForPreTraining
from zero_tp.topology import Topology

FEW = settings(max_examples=4)
EACH_TYPE = pytest.mark.parametrize("model_type", MODEL_TYPES)
ALONE = Topology(world=1)


def fields_of(model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": LENGTH}
    rest = {"type_vocab_size": 2, "pad_token_id": 0, "architectures": None}
    return bert_fields(model_type=model_type, **{**sizes, **rest, **changes})


@EACH_TYPE
@given(data=st.data())
def test_logits_losses_and_every_gradient(model_type: str, data: st.DataObject) -> None:
    fields = data.draw(encoder_fields(model_type))
    seed = data.draw(st.integers(0, 2**31), label="seed")
    reference, rows = encoder(fields, seed), rows_for(fields, seed)
    model = parallel_model(reference, ALONE, data.draw(st.sampled_from(["sdpa", "eager"]), label="attention"))
    loss, logits = losses_and_logits(reference, rows)
    output = model(**rows, return_logits=True)
    check_close({name: output[name] for name in logits}, logits)
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    output.loss.backward()
    check_gradients(model, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_label(dtype: torch.dtype, seed: int) -> None:
    """Their mean is nan, as transformers' is, their share of a sum 0; every weight has a gradient of 0 from it."""
    fields = fields_of("megatron-bert")
    reference, rows = encoder(fields, seed).to(dtype), rows_for(fields, seed)
    rows["labels"].fill_(IGNORE_INDEX)
    model = parallel_model(reference, ALONE, dtype=dtype)
    expected = reference(**rows)
    mean, each = model(**rows), model(**rows, reduction="none")
    assert expected.loss.isnan() and mean.loss.isnan() and mean.masked_loss.isnan()
    assert not each.masked_loss.any() and not each.masked_accuracy.any()
    shared = model(**rows, num_items_in_batch=0, num_rows_in_batch=torch.tensor(2 * BATCH))
    assert (shared.masked_loss.item(), shared.masked_accuracy.item()) == (0, 0)
    assert shared.loss.item() == shared.sentence_loss.item() == pytest.approx(mean.sentence_loss.item() / 2)
    rows["next_sentence_label"].fill_(IGNORE_INDEX)
    nothing = model(**rows, num_items_in_batch=torch.tensor(0), num_rows_in_batch=0)
    assert (nothing.loss.item(), nothing.sentence_accuracy.item()) == (0, 0)
    nothing.loss.backward()
    assert not any(gradient.any() for gradient in gradients(model).values())


@EACH_TYPE
def test_figures_and_each_tokens_loss(model_type: str, seed: int) -> None:
    fields = fields_of(model_type)
    reference, rows = encoder(fields, seed), rows_for(fields, seed)
    # The rows' own tokens are what a model with such a decoder would say, so that some are right.
    model = parallel_model(reference, ALONE)
    _, logits = losses_and_logits(reference, rows)
    words, order = logits["prediction_logits"], logits["seq_relationship_logits"]
    rows["labels"][0, 1] = words[0, 1].argmax()
    rows["next_sentence_label"][1] = order[1].argmax()
    chosen = rows["labels"] != IGNORE_INDEX
    right, in_order = words.argmax(-1) == rows["labels"], order.argmax(-1) == rows["next_sentence_label"]
    assert right[chosen].any() and in_order.any()
    output = model(**rows)
    assert output.masked_accuracy.item() == pytest.approx(right[chosen].float().mean().item())
    assert output.sentence_accuracy.item() == pytest.approx(in_order.float().mean().item())
    each = model(**rows, reduction="none")
    expected = F.cross_entropy(words.transpose(1, 2), rows["labels"], reduction="none")
    check_close({"masked": each.masked_loss}, {"masked": expected})
    assert torch.equal(each.masked_accuracy, right & chosen)
    of_rows = F.cross_entropy(order, rows["next_sentence_label"], reduction="none")
    check_close({"sentence": each.sentence_loss}, {"sentence": of_rows})
    assert torch.equal(each.sentence_accuracy, in_order)
    shared = model(**rows, num_items_in_batch=7.0)
    assert shared.masked_loss.item() == pytest.approx(expected.sum().item() / 7, rel=1e-5)
    assert shared.masked_accuracy.item() == pytest.approx(right[chosen].sum().item() / 7)


def test_nothing_that_is_padded_or_ignored_changes_a_bit(seed: int) -> None:
    """Tokens of padding, and labels' places that are given or found."""
    fields = fields_of("bert")
    model, rows = parallel_model(encoder(fields, seed), ALONE), rows_for(fields, seed)
    before = model(**rows)
    places = (rows["labels"].flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    assert model(**rows, label_places=places).loss == before.loss
    other = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, 1)
    assert not torch.equal(other, rows["input_ids"])
    assert model(**{**rows, "input_ids": other}).loss == before.loss


class Products(TorchDispatchMode):
    """The FLOPs of matrix products that have a dimension of one size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.flops = size, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._opname in ("mm", "addmm"):
            left, right = args[-2:]
            sizes = {*left.shape, *right.shape}
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1] * (self.size in sizes)
        return function(*args, **(kwargs or {}))


def test_the_vocabulary_meets_the_masked_tokens_alone(seed: int) -> None:
    """Forward and both gradients: 15 % of the labels are 15 % of the FLOPs of all."""
    fields = fields_of("bert", vocab_size=997, max_position_embeddings=100, architectures=["BertForMaskedLM"])
    model = parallel_model(encoder(fields, seed), ALONE)
    tokens = torch.randint(997, (2, 100))
    flops = []
    for masked in (15, 100):
        labels = tokens.masked_fill(torch.arange(100) >= masked, IGNORE_INDEX)
        with Products(997) as products:
            model(tokens, labels=labels).loss.backward()
        flops.append(products.flops)
    assert flops[1] == 3 * 2 * (2 * 100) * 997 * fields["hidden_size"]
    assert flops[0] == 0.15 * flops[1]


@EACH_TYPE
def test_a_row_of_padding_alone_keeps_all_gradients_finite(model_type: str, seed: int) -> None:
    fields = fields_of(model_type)
    model, rows = parallel_model(encoder(fields, seed), ALONE), rows_for(fields, seed)
    rows["attention_mask"][1], rows["labels"][1] = 0, IGNORE_INDEX
    model(**rows).loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@EACH_TYPE
@FEW
@given(data=st.data())
def test_import_and_export_keep_every_bit(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files of the class with both heads and of the bare model, whose heads are drawn and said to be."""
    folder = tmp_path_factory.mktemp("models")
    reference = encoder({**data.draw(encoder_fields(model_type)), "architectures": None}, 1)
    bare = data.draw(st.booleans(), label="bare")
    (reference.bert if bare else reference).save_pretrained(folder / "theirs", max_shard_size="20KB")
    if bare:
        with pytest.warns(UserWarning, match="the head of masked tokens, the sentence head: drawn from the seed"):
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


OPENED = ("AutoModel", "AutoModelForPreTraining", "AutoModelForMaskedLM", "AutoModelForSequenceClassification")


@EACH_TYPE
@pytest.mark.parametrize("sentences", [True, False])
def test_an_export_opens_as_every_class_that_takes_from_it(model_type: str, sentences: bool, tmp_path: Path) -> None:
    """What each needs is in it, and no more is missing than what it trains anew."""
    architectures = None if sentences else [without_sentences(model_type)]
    config = config_of(fields_of(model_type, architectures=architectures))
    ZeroTPForPreTraining(config, ALONE, seed=1).save_pretrained(tmp_path / "ours")
    stored = {name.removeprefix("bert.") for name in load_file(tmp_path / "ours" / "model.safetensors")}
    for name in OPENED:
        opened, loading = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
        own = {each for each in loading["missing_keys"] if not each.startswith("classifier.")}
        poolers = {f"{prefix}pooler.dense.{part}" for prefix in ("", "bert.") for part in ("weight", "bias")}
        order = {f"cls.seq_relationship.{part}" for part in ("weight", "bias")}
        assert own <= (set() if sentences else poolers | order), name
        assert not loading["mismatched_keys"]
        tensors = {key.removeprefix("bert."): tensor for key, tensor in opened.state_dict().items()}
        assert len(stored & tensors.keys()) > 20


@EACH_TYPE
def test_names_of_old_files_and_what_has_no_weights(model_type: str, tmp_path: Path) -> None:
    """`gamma` and `beta`, a decoder's bias of both names, position ids; a class with another head is refused."""
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
    tensors["cls.predictions.decoder.bias"] += 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"cls\.predictions\.bias and cls\.predictions\.decoder\.bias differ"):
        ZeroTPForPreTraining.from_pretrained(tmp_path, ALONE)
    tensors["cls.predictions.decoder.bias"] -= 1
    del tensors["cls.predictions.transform.dense.bias"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"no tensor cls\.predictions\.transform\.dense\.bias"):
        ZeroTPForPreTraining.from_pretrained(tmp_path, ALONE)
    tensors["cls.predictions.transform.dense.bias"], tensors["classifier.weight"] = torch.zeros(24), torch.zeros(2, 24)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"unexpected tensor classifier\.weight"):
        ZeroTPForPreTraining.from_pretrained(tmp_path, ALONE)


def test_what_does_not_fit_is_refused() -> None:
    model = ZeroTPForPreTraining(config_of(fields_of("bert", architectures=["BertForMaskedLM"])), ALONE)
    rows = rows_for(fields_of("bert"), 0)
    with pytest.raises(ValueError, match="no sentence head"):
        model(**rows)
    del rows["next_sentence_label"]
    with pytest.raises(RuntimeError, match=r"token types must be in \[0, type_vocab_size = 2\)"):
        model(**{**rows, "token_type_ids": rows["token_type_ids"] + 1})
    with pytest.raises(ValueError, match=r"attention_mask is \(3, 15\), expected \(3, 16\)"):
        model(**{**rows, "attention_mask": rows["attention_mask"][:, 1:]})
    with pytest.raises(UserError, match="sequence length 17 exceeds the model's 16 positions"):
        model(torch.zeros(BATCH, LENGTH + 1, dtype=torch.long))
    with pytest.raises(UserError, match="ZeroTPForCausalLM: bert is no causal decoder"):
        ZeroTPForCausalLM(model.config, ALONE)
    with pytest.raises(UserError, match="ZeroTPForPreTraining: gpt2 is a causal decoder"):
        ZeroTPForPreTraining(transformers.GPT2Config(), ALONE)
