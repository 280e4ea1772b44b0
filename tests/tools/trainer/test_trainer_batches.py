"""Micro-batches of transformers' Trainer on a TP group: compared between ranks, padded for
sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, DataCollatorWithFlattening

from tests.support.compare import check_close, grid, whole_gradients
from tests.support.decoders import decoder
from tests.support.encoders import encoder
from tests.support.experts import OWN
from tests.support.experts import fields as expert_fields
from tests.support.native import (
    check_gradients,
    gradients,
    native_model,
    parallel_model,
    perturbed,
    to_ours,
)
from tests.support.packed_documents import dynamic_model
from tests.support.pools import Pools
from tests.support.trainer_scripts import CAUSAL, ENCODER
from tests.tiers import in_tiers
from zero_tp.base.errors import UserError
from zero_tp.parallel.agreement import checksum
from zero_tp.parallel.topology import Topology
from zero_tp.tools.trainer.batches import SampleComparison, pad_for_sequence_parallelism

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 24,
    "vocab_size": 61,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 |= {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}


def compare_samples(attention_mask: list[list[int]], with_types: bool) -> str:
    """Return the error of a rank of a TP group whose second rank has this mask, and maybe a
    tensor more.
    """
    topology, second = Topology(2, True), dist.get_rank() == 1
    SampleComparison({"input_ids": torch.arange(4)}, topology).require_same()
    mask = torch.tensor(attention_mask if second else [[1, 1, 1]] * 2, dtype=torch.bfloat16)
    inputs: dict[str, Any] = {
        "input_ids": torch.arange(6).view(2, 3),
        "attention_mask": mask,
        "return_dict": second,
    }
    if second and with_types:
        inputs["token_type_ids"] = torch.zeros(2, 3, dtype=torch.int64)
    try:
        SampleComparison(inputs, topology).require_same()
    except UserError as error:
        return str(error)
    return ""


def test_different_samples_in_a_tp_group_are_refused_on_all_ranks(ranks: Pools) -> None:
    same = [[1, 1, 1]] * 2
    assert ranks(2).run(compare_samples, same, False) == ["", ""]
    for mask, with_types in (([[1, 1, 1], [1, 1, 0]], False), ([[1, 1]] * 2, False), (same, True)):
        for error in ranks(2).run(compare_samples, mask, with_types):
            assert (
                error.startswith("attention_mask, input_ids")
                and "the samples differ between the ranks" in error
            )


def test_a_byte_in_another_place_or_tensor_gives_another_checksum() -> None:
    places = torch.eye(24, dtype=torch.uint8).view(24, 3, 8)  # one byte of three tensors
    sums = [
        checksum({name: tensor for name, tensor in zip("abc", tensors, strict=True)})
        for tensors in places
    ]
    assert len({int(number) for number in sums}) == 24


def test_rows_without_tokens_reach_the_forward() -> None:
    """It refuses their arguments by name."""
    inputs = {"inputs_embeds": torch.ones(1, 3, 8)}
    assert (
        pad_for_sequence_parallelism(inputs, Topology(2, True, world=2, rank=0), causal=True)
        == inputs
    )


def packed_losses(lengths: list[list[int]], numbered: bool) -> list[tuple[float, float]]:
    """(our loss, that of transformers' model on each document by itself) of rows of documents of
    these lengths.
    """
    fields = dict(CAUSAL)
    torch.manual_seed(7)
    reference = perturbed(
        native_model(AutoConfig.for_model(fields.pop("model_type"), **fields))
    ).train()
    model = parallel_model(reference, grid(2, True)).train()
    found = []
    for row in lengths:
        documents = [torch.randint(101, (length,)) for length in row]
        sums = [
            F.cross_entropy(reference(each[None]).logits[0, :-1], each[1:], reduction="sum")
            for each in documents
        ]
        expected = torch.stack(sums).sum() / sum(length - 1 for length in row)
        reference.zero_grad()
        expected.backward()
        batch = DataCollatorWithFlattening()([{"input_ids": each.tolist()} for each in documents])
        if numbered:
            batch["document_ids"] = (batch["position_ids"] == 0).cumsum(1)
        model.zero_grad()
        loss = model(**pad_for_sequence_parallelism(batch, model.topology, causal=True)).loss
        loss.backward()
        check_close(whole_gradients(model), to_ours(model.config, gradients(reference)))
        found.append((loss.item(), expected.item()))
    return found


@pytest.mark.parametrize("numbered", [False, True])
def test_packed_rows_of_any_length_are_documents_apart(ranks: Pools, numbered: bool) -> None:
    """As flash attention's varlen kernels see them: no document sees another, nor what fills the
    row up.
    """
    lengths = [[5, 1, 7], [2, 3, 4], [9], [4, 4], [3, 2, 1, 1, 2, 2]]
    for losses in ranks(2).run(packed_losses, lengths, numbered):
        for loss, expected in losses:
            assert loss == pytest.approx(expected, rel=1e-6)


def dynamic_losses(length: int) -> tuple[float, float]:
    """(our loss, transformers') of a row just longer than the positions, under frequencies that
    follow the length.
    """
    reference = dynamic_model().train()
    model = parallel_model(reference, grid(2, True)).train()
    tokens = torch.randint(61, (1, length))
    batch = {"input_ids": tokens, "labels": tokens}
    return model(
        **pad_for_sequence_parallelism(batch, model.topology, causal=True)
    ).loss.item(), reference(**batch).loss.item()


def test_padding_does_not_lengthen_a_row(ranks: Pools) -> None:
    for loss, expected in ranks(2).run(dynamic_losses, 19):
        assert loss == pytest.approx(expected, rel=1e-6)


def padded_loss(fields: dict[str, Any], batch: dict[str, Any]) -> tuple[float, float]:
    """(our loss, transformers') of rows that TP 2 does not divide; every gradient is compared."""
    kind = fields["model_type"]
    if kind == "gpt2":
        torch.manual_seed(1)
        reference = perturbed(native_model(AutoConfig.for_model(**fields))).train()
    else:
        reference = (encoder if kind == "bert" else decoder)(fields, 1).train()
    model = parallel_model(reference, grid(2, True)).train()
    # With a cache, its default, transformers does not separate documents.
    expected = reference(**batch, **({} if kind == "bert" else {"use_cache": False})).loss
    loss = model(
        **pad_for_sequence_parallelism(batch, model.topology, causal=model.spec.causal)
    ).loss
    expected.backward()
    loss.backward()
    check_gradients(model, reference)
    return loss.item(), expected.item()


@pytest.mark.parametrize("model_type", in_tiers(list(OWN), ["mixtral"]))
def test_the_balance_of_experts_counts_no_padding_of_ours(ranks: Pools, model_type: str) -> None:
    """Packed rows have no mask: transformers counts each of their tokens."""
    tokens = torch.randint(61, (1, 15), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    for given in (batch, {**batch, "position_ids": torch.arange(15)[None]}):
        for loss, expected in ranks(2).run(padded_loss, expert_fields(model_type), given):
            assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("fields", [GPT2, ENCODER], ids=["gpt2", "bert"])
def test_padding_of_ours_needs_no_positions(ranks: Pools, fields: dict[str, Any]) -> None:
    """Rows as long as the positions, of which TP does not divide the number."""
    names = {"gpt2": "n_positions", "bert": "max_position_embeddings"}
    limited = {**fields, names[fields["model_type"]]: 15}
    tokens = torch.randint(61, (2, 15), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    if fields is ENCODER:
        batch["next_sentence_label"] = torch.tensor([0, 1])
    for loss, expected in ranks(2).run(padded_loss, limited, batch):
        assert loss == pytest.approx(expected, rel=1e-6)
