"""An encoder with the heads of masked pretraining (arXiv 1810.04805), split over the TP group.

s sequence, b batch, h hidden, v vocabulary, t TP size, n labels that are not ignored.

Only positions with a label, usually 15 %, go through the head of masked tokens. Every TP rank gets
their hidden states, under SP by an all-reduce of [n, h].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.model.context import ForwardInputs
from zero_tp.model.head import MaskedTokenHead, SentenceHead
from zero_tp.model.parallel_model import ParallelModel, check_shape
from zero_tp.parallel.collectives import gather_rows
from zero_tp.parallel.loss import TokenLoss, nonzero_divisor
from zero_tp.parallel.parameter import ParameterMaker


@dataclass
class PreTrainingOutput(ModelOutput):
    """The first three fields are those of transformers' BertForPreTrainingOutput.

    Attributes:
        loss: masked_loss + sentence_loss, or the one that exists, and the weighted z-loss.
        prediction_logits: [b, s, v], whole on every TP rank and without gradient.
        seq_relationship_logits: [b, 2], without gradient.
        masked_loss: of the masked tokens, without the z-loss.
        sentence_loss: of the order of the segments.
        masked_accuracy, sentence_accuracy: share of correct argmaxes, with the losses' divisors,
            fp32 without gradient; with `reduction="none"` bool [b, s] and [b].
        z_loss: of the masked tokens' logits, without its weight, if it is a part of `loss`.
        reported_loss: `loss` without the z-loss and gradient, if it has one.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    masked_loss: Tensor | None = None
    sentence_loss: Tensor | None = None
    masked_accuracy: Tensor | None = None
    sentence_accuracy: Tensor | None = None
    z_loss: Tensor | None = None
    reported_loss: Tensor | None = None


METRIC_NAMES = ("masked_loss", "masked_accuracy", "sentence_loss", "sentence_accuracy")


def labelled_positions(labels: Tensor) -> Tensor:
    """Return the flat indices of labels [b, s] that are not ignored, ascending. [n]"""
    return (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)


def _total(*losses: Tensor | None) -> Tensor | None:
    """Return the sum of the losses that exist; None without one."""
    present = [loss for loss in losses if loss is not None]
    return sum(present[1:], present[0]) if present else None


class MaskedLM(ParallelModel):
    """An encoder with a head of masked tokens and, if its spec has it, a sentence head."""

    causal = False

    def _make_heads(self, make: ParameterMaker) -> None:
        self.head = MaskedTokenHead(
            make.child("head"), self.spec, self.transformer.embedding.word.weight
        )
        self.sentence_head = (
            SentenceHead(make.child("sentence_head"), self.spec)
            if self.spec.sentence_head
            else None
        )

    def get_output_embeddings(self) -> nn.Module:
        return self.head.decoder

    @property
    def metric_names(self) -> tuple[str, ...]:
        names = METRIC_NAMES if self.spec.sentence_head else ("masked_accuracy",)
        return (*names, "z_loss") if self.z_losses.token else names

    def metric_sums(
        self, output: Any, arguments: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        labels = {"masked": arguments["labels"], "sentence": arguments.get("next_sentence_label")}
        counts = {
            kind: (label != IGNORE_INDEX).sum()
            for kind, label in labels.items()
            if label is not None
        }
        kinds = {name: name.partition("_")[0] for name in METRIC_NAMES}
        return {
            name: (getattr(output, name).double().sum(), counts[kind])
            for name, kind in kinds.items()
            if kind in counts
        }

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        *,
        label_places: Tensor | None = None,
        return_logits: bool | None = None,
        return_dict: bool | None = None,
        reduction: Literal["mean", "none"] = "mean",
        num_items_in_batch: Tensor | float | None = None,
        num_rows_in_batch: Tensor | float | None = None,
        unpadded_length: int | None = None,
    ) -> PreTrainingOutput:
        """Return the losses and, if requested or without labels, logits.

        Args:
            input_ids: [b, s].
            attention_mask: [b, s], 1 for a token and 0 for padding, which no token sees.
            token_type_ids: [b, s], by default 0.
            position_ids: [b or 1, s], by default from 0.
            labels: [b, s], the token at a masked position; -100 is ignored.
            next_sentence_label: [b], 0 where a row's segments are in order, 1 where they are
                swapped; -100 is ignored.
            label_places: `labelled_positions(labels)`, [n], below b·s; if absent, forward
                synchronises with the device.
            return_logits: also return both kinds of logits.
            reduction: `none` returns each token's and each row's loss, for evaluation, without
                gradient.
            num_items_in_batch, num_rows_in_batch: divisors of the sums of the losses; by default
                the numbers of labels.
            unpadded_length: tokens of every row without padding for sequence parallelism, which
                needs no positions.

        Returns:
            Losses are means, fp32, equal on all TP ranks; nan if every label is ignored, as in
            torch, but 0 with a divisor. With `none`, `masked_loss` is [b, s], 0 for ignored labels,
            `sentence_loss` [b] and `loss` None.

        Raises:
            UserError: under SP with gradients, s is not a multiple of t; or s exceeds the
                positions.
            ValueError: a wrong shape or reduction, a sentence label without a sentence head,
                `return_dict=False`.
            RuntimeError: a token id, type or label out of its range (accelerators raise at their
                next synchronisation).
        """
        self._check_call("PreTrainingOutput", reduction, return_dict)
        if next_sentence_label is not None and self.sentence_head is None:
            raise ValueError("next_sentence_label, but the model has no sentence head")
        self._check_length(input_ids.shape[1] if unpadded_length is None else unpadded_length)
        self._check_inputs(input_ids, attention_mask, token_type_ids, position_ids, labels)
        sequence = self._runs_sequence_parallel(input_ids.shape[1])
        inputs = ForwardInputs(attention_mask, position_ids)
        types = None if token_type_ids is None else token_type_ids.t().contiguous()
        hidden = self.transformer(
            input_ids.t().contiguous(), inputs=inputs, types=types, sequence=sequence
        )
        output = PreTrainingOutput()
        token_loss = None
        if labels is not None:
            # `nonzero` waits for the device, because its result's length is data. A run counts on
            # the host.
            places = labelled_positions(labels) if label_places is None else label_places
            token_loss = self._score_tokens(
                output, hidden, labels, places, sequence, reduction, num_items_in_batch
            )
        returns_logits = bool(return_logits) or labels is None
        if self.sentence_head is not None and (next_sentence_label is not None or returns_logits):
            self._score_sentences(
                output, hidden, next_sentence_label, sequence, reduction, num_rows_in_batch
            )
        if reduction == "mean":
            output.loss = _total(token_loss, output.sentence_loss)
        if output.z_loss is not None:
            reported = _total(output.masked_loss, output.sentence_loss)
            output.reported_loss = None if reported is None else reported.detach()
        if returns_logits:
            output.prediction_logits = self._all_logits(hidden, input_ids.shape, sequence)
        return output

    def _check_inputs(
        self,
        ids: Tensor,
        mask: Tensor | None,
        types: Tensor | None,
        positions: Tensor | None,
        labels: Tensor | None,
    ) -> None:
        batch, length = ids.shape
        for name, tensor in {
            "attention_mask": mask,
            "token_type_ids": types,
            "labels": labels,
        }.items():
            check_shape(name, tensor, (batch,), length)
        check_shape("position_ids", positions, (1, batch), length)
        self._check_ids("token ids", ids)
        if types is not None:
            inside = (types >= 0) & (types < self.spec.token_types)
            torch._assert_async(
                inside.all(),
                f"token types must be in [0, type_vocab_size = {self.spec.token_types})",
            )
        if labels is not None:
            self._check_ids("labels", labels, ignore=IGNORE_INDEX)

    @torch.no_grad()
    def _all_logits(self, hidden: Tensor, shape: torch.Size, sequence: bool) -> Tensor:
        """Return the logits of every position, [b, s, v], whole on every TP rank."""
        batch, length = shape
        every = torch.arange(batch * length, device=hidden.device)
        logits: Tensor = self.head(
            gather_rows(hidden, every, self.topology.tensor_group, sequence=sequence), None
        )
        return logits.unflatten(0, (length, batch)).transpose(0, 1)

    def _score_tokens(
        self,
        output: PreTrainingOutput,
        hidden: Tensor,
        labels: Tensor,
        places: Tensor,
        sequence: bool,
        reduction: str,
        divisor: Tensor | float | None,
    ) -> Tensor | None:
        """Fill in the losses of the labels at `places`, and return what training minimises of
        them; None for `reduction="none"`.
        """
        batch, length = labels.shape
        if not len(places):
            # Score an ignored label, so that every weight gets a gradient of 0.
            places = places.new_zeros(1)
        # Labels are [b, s], hidden states [s, b, h]. With b 2 and s 3, place 4 is position 1 of row
        # 1, which is row 1·2 + 1 = 3 of the flattened hidden states.
        row = places // length
        position = places % length
        rows = gather_rows(
            hidden, position * batch + row, self.topology.tensor_group, sequence=sequence
        )
        targets = labels.flatten()[places]
        if reduction == "mean":
            weight = self.active_z_losses.token
            tokens: TokenLoss = self.head(rows, targets, divisor=divisor, z_loss_weight=weight)
            output.masked_loss, output.z_loss = tokens.cross_entropy, tokens.z_loss
            output.masked_accuracy = tokens.correct / (
                len(targets) if divisor is None else nonzero_divisor(divisor)
            )
            return tokens.loss
        loss, correct = self.head(rows, targets, per_token=True)
        output.masked_loss = (
            loss.new_zeros(batch * length).index_put((places,), loss).view(batch, length)
        )
        output.masked_accuracy = (
            correct.new_zeros(batch * length).index_put((places,), correct).view(batch, length)
        )
        return None

    def _score_sentences(
        self,
        output: PreTrainingOutput,
        hidden: Tensor,
        labels: Tensor | None,
        sequence: bool,
        reduction: str,
        divisor: Tensor | float | None,
    ) -> None:
        """Fill in the rows' scores, and the losses of their labels [b]."""
        assert self.sentence_head is not None
        # The first tokens of all rows are the first b rows of [s, b, h]. Under SP only one rank has
        # them.
        first = torch.arange(hidden.shape[1], device=hidden.device)
        scores = self.sentence_head(
            gather_rows(hidden, first, self.topology.tensor_group, sequence=sequence)
        )
        output.seq_relationship_logits = scores.detach()
        if labels is None:
            return
        if labels.shape != scores.shape[:1]:
            raise ValueError(
                f"next_sentence_label is {tuple(labels.shape)}, expected {tuple(scores.shape[:1])}"
            )
        counted = labels != IGNORE_INDEX
        valid = (labels == 0) | (labels == 1) | ~counted
        torch._assert_async(valid.all(), f"next_sentence_label must be 0, 1 or {IGNORE_INDEX}")
        correct = scores.detach().argmax(1) == labels
        # With a divisor the losses of several micro-batches add up to one mean.
        torch_reduction = "sum" if divisor is not None else reduction
        loss = F.cross_entropy(
            scores.float(), labels, ignore_index=IGNORE_INDEX, reduction=torch_reduction
        )
        rows = counted.sum() if divisor is None else nonzero_divisor(divisor)
        output.sentence_loss = loss if divisor is None else (loss / rows).float()
        output.sentence_accuracy = correct if reduction == "none" else correct.sum() / rows
