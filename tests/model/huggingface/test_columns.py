"""Columns of a data set: Trainer passes those that are arguments of a forward, as with
transformers' own classes.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers

from tests.support.compare import check_close, grid, whole_gradients
from tests.support.encoders import encoder
from tests.support.native import gradients, native_model, parallel_model, perturbed, to_ours
from tests.support.pools import Pools
from tests.support.settings import gpt2_config
from tests.support.tiny_models import bert_fields
from zero_tp.base.errors import UserError
from zero_tp.model.architectures import ARCHITECTURES
from zero_tp.model.huggingface import ZeroTPForCausalLM, ZeroTPForPreTraining
from zero_tp.parallel.topology import Topology

CLASSES = [
    (name, model_type)
    for model_type, table in ARCHITECTURES.items()
    for name in (table.native_class, table.masked_lm_class)
]
OPTIONS = {"cache", "past_key_values", "use_cache", "logits_to_keep", "return_dict"}
OPTIONS |= {"output_attentions", "output_hidden_states", "output_router_logits"}
"""Arguments that are no columns: one value for all rows."""


@pytest.mark.parametrize(("name", "model_type"), [case for case in CLASSES if case[0] is not None])
def test_every_column_of_transformers_reaches_our_forward(name: str, model_type: str) -> None:
    """Trainer drops a column that is no argument: a forward that lacks it would neither use nor
    refuse it.
    """
    ours = ZeroTPForCausalLM if ARCHITECTURES[model_type].causal else ZeroTPForPreTraining
    theirs = inspect.signature(getattr(transformers, name).forward).parameters
    missing = theirs.keys() - inspect.signature(ours.forward).parameters.keys() - OPTIONS
    assert not missing


@pytest.mark.parametrize("kind", ["causal", "masked"])
@pytest.mark.parametrize(
    "name", ["inputs_embeds", "encoder_hidden_states", "encoder_attention_mask"]
)
def test_columns_that_are_not_computed_are_refused(kind: str, name: str) -> None:
    fields = bert_fields(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=40)
    native = native_model(gpt2_config(n_layer=1)) if kind == "causal" else encoder(fields, 0)
    model, tokens = parallel_model(native, Topology(world=1)), torch.arange(8).view(2, 4)
    with pytest.raises(UserError, match=rf"^\w+\.forward: {name} is not supported: "):
        model(tokens, **{name: torch.ones(2, 4, 8)})


def types_on_ranks(sequence: bool) -> list[tuple[float, float, float]]:
    """(our loss, transformers', transformers' without types) of GPT-2, in training and
    evaluation.
    """
    torch.manual_seed(7)
    reference = perturbed(native_model(gpt2_config())).train()
    model = parallel_model(reference, grid(2, sequence)).train()
    tokens, types = torch.randint(61, (2, 3, 8))
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    found = []
    for training in (True, False):
        for each in (reference, model):
            each.train(training)
        with torch.set_grad_enabled(training):
            ours, theirs = (each(**batch, token_type_ids=types) for each in (model, reference))
            found.append((float(ours.loss), float(theirs.loss), float(reference(**batch).loss)))
        if training:
            for output in (ours, theirs):
                output.loss.backward()
            check_close(whole_gradients(model), to_ours(model.config, gradients(reference)))
        else:
            torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    return found


@pytest.mark.parametrize("sequence", [True, False])
def test_token_types_of_gpt2_are_tokens(ranks: Pools, sequence: bool) -> None:
    """transformers adds the word embeddings of `token_type_ids`; the gradients of both look-ups
    add up.
    """
    for losses in ranks(2).run(types_on_ranks, sequence):
        for loss, expected, without in losses:
            assert loss == pytest.approx(expected, rel=1e-6) and abs(without - expected) > 1e-3


def test_other_decoders_ignore_token_types() -> None:
    """As transformers' classes do, whose `**kwargs` take them."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
    }
    ids: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.LlamaConfig(vocab_size=20, **sizes, **ids)
    native, tokens = native_model(config), torch.arange(8).view(2, 4)
    model = parallel_model(native, Topology(world=1))
    for each in (native, model):
        assert torch.equal(each(tokens, token_type_ids=tokens).logits, each(tokens).logits)


def test_generation_continues_token_types() -> None:
    """The last type stands for the new tokens."""
    native = perturbed(native_model(gpt2_config())).eval()
    model = parallel_model(native, Topology(world=1)).eval()
    tokens, types = torch.randint(1, 61, (2, 1, 5), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {
        "token_type_ids": types,
        "attention_mask": torch.ones_like(tokens),
        "pad_token_id": 0,
    }
    options |= {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(tokens, **options), native.generate(tokens, **options))


@pytest.mark.parametrize("sentence_head", [True, False])
def test_an_encoder_has_a_loss_where_transformers_has_one(sentence_head: bool) -> None:
    """With a sentence head from both kinds of labels, without one whatever the rows have beside
    `labels`.
    """
    name = "BertForPreTraining" if sentence_head else "BertForMaskedLM"
    fields = bert_fields(model_type="bert", architectures=[name], vocab_size=40)
    native = encoder(fields, 0).eval()
    assert type(native).__name__ == name
    model = parallel_model(native, Topology(world=1)).eval()
    tokens, order = torch.arange(8).view(2, 4), torch.tensor([0, 1])
    given: list[dict[str, Any]] = [{"labels": tokens}, {"next_sentence_label": order}]
    for labels in (*given, given[0] | given[1]):
        with torch.no_grad():
            ours, theirs = model(tokens, **labels), native(tokens, **labels)
        assert (ours.loss is None) == (theirs.loss is None), labels
        assert ours.loss is None or float(ours.loss) == pytest.approx(float(theirs.loss), rel=1e-6)


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForPreTraining", "BertForMaskedLM"]
)
def test_labels_are_counted_as_those_of_transformers_class(name: str) -> None:
    """Trainer decides by `loss_type` whether the first token of a row is a label: of GPT-2 it
    is, in 5.24.
    """
    sizes = {
        "vocab_size": 40,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    native_class = getattr(transformers, name)
    config = (
        gpt2_config(n_layer=1) if name.startswith("GPT2") else native_class.config_class(**sizes)
    )
    config.architectures = [name]
    assert (
        parallel_model(native_class(config), Topology(world=1)).loss_type
        == native_class(config).loss_type
    )
