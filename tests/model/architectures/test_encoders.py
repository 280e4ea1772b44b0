"""Every encoder against transformers' own classes, for random small configs with padding: in one
process, split over ranks, through DeepSpeed's ZeRO; then what it reads and writes.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.compare import check_close, grid
from tests.support.encoders import (
    ALL_ENCODERS,
    ALONE,
    BATCH,
    LENGTH,
    MODEL_TYPES,
    encoder,
    encoder_fields,
    fields_of,
    losses_and_logits,
    rows_for,
)
from tests.support.native import Native, check_gradients, gradients, parallel_model
from tests.support.pools import Pools
from tests.tiers import examples, in_tiers
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.model.huggingface import ZeroTPForCausalLM, ZeroTPForPreTraining
from zero_tp.parallel.layout import audit

EACH_WORLD = pytest.mark.parametrize("world", in_tiers([2, 4], [4]))


def same_as_native(world: int, fields: dict[str, Any], seed: int, attention: str) -> dict[str, int]:
    """How many gradients were compared, and how many of them are parts that are summed."""
    reference, rows = encoder(fields, seed), rows_for(fields, seed)
    loss, logits = losses_and_logits(reference, rows)
    loss.backward()
    counts = {}
    for sequence in (False, True)[:world]:
        topology = ALONE if world == 1 else grid(world, sequence)
        model = parallel_model(reference, topology, attention=attention).train()
        audit(model, model.topology)
        found = model(**rows, return_logits=True)
        check_close({name: found[name] for name in logits}, logits)
        assert found.loss.item() == pytest.approx(loss.item(), rel=1e-5)
        right = logits["prediction_logits"].argmax(-1) == rows["labels"]
        assert found.masked_accuracy.item() == pytest.approx(
            right[rows["labels"] != -100].float().mean().item()
        )
        found.loss.backward()
        counts[f"gradients, SP {sequence}"] = check_gradients(model, reference)
        assert all(gradient_sum.fired == 1 for gradient_sum in model.gradient_hooks.sums.values())
        counts[f"parts, SP {sequence}"] = len(model.gradient_hooks.sums)
        # A length that does not divide, which is computed without SP where no gradient is taken.
        odd = {
            name: each[:, : LENGTH - 3].contiguous() if each.ndim == 2 else each
            for name, each in rows.items()
        }
        with torch.no_grad():
            each = model(**odd, reduction="none")
            words = losses_and_logits(reference, odd)[1]["prediction_logits"]
        expected = F.cross_entropy(words.transpose(1, 2), odd["labels"], reduction="none")
        check_close({"odd": each.masked_loss}, {"odd": expected})
    return counts


def drawn_case(data: st.DataObject, model_type: str) -> tuple[dict[str, Any], int, str]:
    """Return a config's fields, a seed and an attention."""
    fields = data.draw(encoder_fields(model_type))
    seed = data.draw(st.integers(0, 2**31), label="seed")
    return fields, seed, data.draw(st.sampled_from(["sdpa", "eager"]), label="attention")


def expected_counts(fields: dict[str, Any], *sequences: bool) -> dict[str, int]:
    """Return what `same_as_native` compares of a config. Under SP norms, positions and token
    types see a shard.
    """
    layers, order = fields["num_hidden_layers"], 0 if fields["architectures"] else 4
    # With the one after the embeddings, or the last; that of the head sees all.
    norms = 2 * layers + 1
    counts = {}
    for sequence in sequences:
        counts[f"gradients, SP {sequence}"] = 3 + 8 * layers + 2 * norms + 5 + order
        counts[f"parts, SP {sequence}"] = 2 * norms + 2 if sequence else 0
    return counts


@ALL_ENCODERS
@given(data=st.data())
def test_one_process(model_type: str, data: st.DataObject) -> None:
    fields, seed, attention = drawn_case(data, model_type)
    assert same_as_native(1, fields, seed, attention) == expected_counts(fields, False)


@EACH_WORLD
@ALL_ENCODERS
@hypothesis.settings(max_examples=2)
@given(data=st.data())
def test_logits_losses_and_every_gradient(
    ranks: Pools, world: int, model_type: str, data: st.DataObject
) -> None:
    fields, seed, attention = drawn_case(data, model_type)
    counts = ranks(world).run(same_as_native, world, fields, seed, attention)
    assert counts == [expected_counts(fields, False, True)] * world


RECOMPUTE: list[dict[str, Any]] = [
    {"mode": "none"},
    {"mode": "selective", "modules": ["attention_core", "mlp_activation", "norm"]},
    {"mode": "full"},
]


def trained(
    fields: dict[str, Any], seed: int, tensor: int, sequence: bool, stage: int, recompute: int
) -> list[float]:
    """Two steps through DeepSpeed, of two micro-batches with other numbers of labels each: losses,
    norms, figures, and what validation gives, as transformers and torch's optimizer have them.
    """
    from zero_tp.base.settings.recompute import RecomputePolicy
    from zero_tp.data.batch import MaskedBatch
    from zero_tp.engine.engine import TrainingEngine

    topology, reference = grid(tensor, sequence), encoder(fields, seed)
    rows = rows_for(fields, seed, batch=8)
    each = 4 // topology.data
    settings = {
        "train_micro_batch_size_per_gpu": each,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0, "torch_adam": True},
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = TrainingEngine.from_dict(
        transformers.AutoConfig.for_model(**fields),
        topology,
        settings,
        seed=0,
        source=Native(reference),
        recompute=RecomputePolicy(**RECOMPUTE[recompute]),
    )
    own = [
        {name: part.split(each)[2 * topology.data_rank + number] for name, part in rows.items()}
        for number in (0, 1)
    ]
    batches = [MaskedBatch(part).to(engine.device) for part in own]
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    told = []
    for _ in range(2):
        loss, logits = losses_and_logits(reference, rows)
        optimizer.zero_grad()
        loss.backward()
        norm = (
            torch.stack([parameter.grad.double().norm() for parameter in reference.parameters()])
            .norm()
            .item()
        )
        validation = engine.evaluate(batches)
        told.append(engine.train_step(batches))
        assert told[-1] == pytest.approx(loss.item(), rel=1e-5)
        assert engine.gradient_norm == pytest.approx(norm, rel=1e-5)
        assert validation["loss"] == pytest.approx(loss.item(), rel=1e-5)
        expected = figures_of(logits, rows)
        assert engine.figures.keys() == (
            expected.keys() if len(expected) > 2 else {"masked_accuracy"}
        )
        for name, value in expected.items():
            assert validation[name] == pytest.approx(value, rel=1e-5), name
            assert engine.figures.get(name, value) == pytest.approx(value, rel=1e-5), name
        optimizer.step()
    return told


def figures_of(logits: dict[str, Tensor], rows: dict[str, Tensor]) -> dict[str, float]:
    found = {}
    names = {
        "masked": ("prediction_logits", "labels"),
        "sentence": ("seq_relationship_logits", "next_sentence_label"),
    }
    for figure, (words, labels) in names.items():
        if labels not in rows:
            continue
        scores, wanted = logits[words].flatten(0, -2), rows[labels].flatten()
        found[f"{figure}_loss"] = F.cross_entropy(scores, wanted).item()
        found[f"{figure}_accuracy"] = (
            (scores.argmax(1) == wanted)[wanted != -100].float().mean().item()
        )
    return found


STEPS = [
    (model_type, tensor, sequence, stage)
    for model_type in MODEL_TYPES
    for tensor in (1, 2, 4)
    for sequence in ((False, True) if tensor > 1 else (False,))
    for stage in range(4)
]
FIRST = [("megatron-bert", 2, True, 3), ("bert", 1, False, 2)]


@pytest.mark.parametrize(
    ("model_type", "tensor", "sequence", "stage"), in_tiers(STEPS, FIRST, every=3)
)
@examples(1, 2)
@given(data=st.data())
def test_steps_through_zero(
    ranks: Pools, model_type: str, tensor: int, sequence: bool, stage: int, data: st.DataObject
) -> None:
    fields = data.draw(encoder_fields(model_type))
    seed = data.draw(st.integers(0, 2**31), label="seed")
    recompute = (tensor + sequence + stage + (model_type == "bert")) % len(RECOMPUTE)
    found = ranks(4).run(trained, fields, seed, tensor, sequence, stage, recompute)
    assert found == found[:1] * 4
    # Not that it falls: a step of such a small model may overshoot.
    assert found[0][1] != pytest.approx(found[0][0], rel=1e-5)


# ---- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_label(dtype: torch.dtype, seed: int) -> None:
    """Their mean is nan, as transformers' is, their share of a sum 0; every weight has a
    gradient of 0 from it.
    """
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
    assert (
        shared.loss.item()
        == shared.sentence_loss.item()
        == pytest.approx(mean.sentence_loss.item() / 2)
    )
    rows["next_sentence_label"].fill_(IGNORE_INDEX)
    nothing = model(**rows, num_items_in_batch=torch.tensor(0), num_rows_in_batch=0)
    assert (nothing.loss.item(), nothing.sentence_accuracy.item()) == (0, 0)
    nothing.loss.backward()
    assert not any(gradient.any() for gradient in gradients(model).values())


@ALL_ENCODERS
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
    right, in_order = (
        words.argmax(-1) == rows["labels"],
        order.argmax(-1) == rows["next_sentence_label"],
    )
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


def test_the_vocabulary_meets_the_masked_tokens_alone(seed: int) -> None:
    """Forward and both gradients: each label more costs the head's products of one token."""
    fields = fields_of(
        "bert", vocab_size=997, max_position_embeddings=100, architectures=["BertForMaskedLM"]
    )
    model = parallel_model(encoder(fields, seed), ALONE)
    tokens, flops = torch.randint(997, (2, 100)), []
    for masked in (15, 100):
        labels = tokens.masked_fill(torch.arange(100) >= masked, IGNORE_INDEX)
        with FlopCounterMode(display=False) as counter:
            model(tokens, labels=labels).loss.backward()
        flops.append(counter.get_total_flops())
    hidden = fields["hidden_size"]
    assert flops[1] - flops[0] == 2 * 85 * 3 * 2 * hidden * (997 + hidden)


@ALL_ENCODERS
def test_a_row_of_padding_alone_keeps_all_gradients_finite(model_type: str, seed: int) -> None:
    fields = fields_of(model_type)
    model, rows = parallel_model(encoder(fields, seed), ALONE), rows_for(fields, seed)
    rows["attention_mask"][1], rows["labels"][1] = 0, IGNORE_INDEX
    model(**rows).loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_what_does_not_fit_is_refused() -> None:
    config = transformers.AutoConfig.for_model(
        **fields_of("bert", architectures=["BertForMaskedLM"])
    )
    model = ZeroTPForPreTraining(config, ALONE)
    rows = rows_for(fields_of("bert"), 0)
    loss = model(**rows).loss
    del rows["next_sentence_label"]
    assert torch.equal(model(**rows).loss, loss), "BertForMaskedLM ignores this column"
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
