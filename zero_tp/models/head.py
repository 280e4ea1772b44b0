"""Heads turn hidden states into losses, scores of labels, or logits.

s sequence, b batch, h hidden, v vocabulary, t TP size, n labels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zero_tp.architectures.spec import TransformerSpec
from zero_tp.models.mlp import Activation
from zero_tp.models.norm import NORMS
from zero_tp.parallel.collectives import gather_from_sequence_region
from zero_tp.parallel.elementwise import ElementwiseModule
from zero_tp.parallel.layout import split_vocabulary
from zero_tp.parallel.linear import ReplicatedLinear
from zero_tp.parallel.loss import (
    vocab_parallel_cross_entropy,
    vocab_parallel_logits,
    vocab_parallel_loss_and_choices,
)
from zero_tp.parallel.parameter import Constant, Normal, ParameterMaker
from zero_tp.parallel.scores import TokenScores, vocab_parallel_token_scores


class VocabularyLayer(ElementwiseModule):
    """A layer with a row a token; its weight [⌈v/t⌉, h] is the word embedding when tied.

    A tied weight is a parameter of this module too: ZeRO-3 gathers a parameter around the modules that own it.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, embedding: nn.Parameter):
        super().__init__()
        self.vocabulary = spec.vocabulary
        self.group = make.topology.tensor_group
        self.weight = (
            embedding
            if spec.tied
            else make.make(
                "weight",
                (spec.vocabulary, spec.hidden),
                split_vocabulary(spec.vocabulary),
                Normal(spec.init_std),
            )
        )


class OutputLayer(VocabularyLayer):
    """The output layer of a causal model gives each position's loss, scores or logits."""

    bias = None

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        *,
        sequence: bool,
        each_token: bool = False,
        divisor: Tensor | float | None = None,
        keep: int | Tensor = 0,
    ) -> Tensor | TokenScores:
        """Return the loss, scores or logits of [s, b, h], a shard when `sequence`.

        With labels [s, b] the scalar loss, its sum over `divisor` if that is given, or with `each_token` the scores of
        each label; without labels the logits [s, b, v] of the last `keep` positions, or of those it lists; 0: all.
        """
        if labels is not None and not each_token:
            return vocab_parallel_cross_entropy(
                hidden,
                self.weight,
                labels,
                vocabulary=self.vocabulary,
                group=self.group,
                sequence=sequence,
                divisor=divisor,
                ops=self.elementwise,
            )
        whole = gather_from_sequence_region(hidden, self.group) if sequence else hidden
        if labels is None:
            kept = whole[-keep:] if isinstance(keep, int) else whole[keep]  # whole[-0:] is all
            return vocab_parallel_logits(kept, self.weight, vocabulary=self.vocabulary, group=self.group)
        return vocab_parallel_token_scores(whole, self.weight, labels, vocabulary=self.vocabulary, group=self.group)


class TokenDecoder(VocabularyLayer):
    """The decoder of masked tokens has a bias of its own. It sees hidden states of chosen positions alone, whole on
    every rank."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, embedding: nn.Parameter):
        super().__init__(make, spec, embedding)
        self.bias = make.make("bias", (spec.vocabulary,), split_vocabulary(spec.vocabulary), Constant(0.0))

    def forward(
        self, rows: Tensor, labels: Tensor | None, *, each_token: bool = False, divisor: Tensor | float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (loss, number of labels that are the first choice) of rows [n, 1, h] with labels [n, 1], or with
        `each_token` the scores of each label [n, 1]; without labels (logits [n, 1, v], nothing)."""
        vocabulary, group = self.vocabulary, self.group
        if labels is None:
            logits = vocab_parallel_logits(rows, self.weight, bias=self.bias, vocabulary=vocabulary, group=group)
            return logits, logits.new_empty(0)
        if each_token:
            return vocab_parallel_token_scores(
                rows, self.weight, labels, bias=self.bias, vocabulary=vocabulary, group=group
            )
        return vocab_parallel_loss_and_choices(
            rows,
            self.weight,
            self.bias,
            labels,
            vocabulary=vocabulary,
            group=group,
            divisor=divisor,
            ops=self.elementwise,
        )


class MaskedTokenHead(nn.Module):
    """The head of masked tokens is a dense layer, the MLP's activation, a norm, and the decoder (arXiv 1810.04805).

    Whatever the sequence is split over, it works on whole rows that are the same on every TP rank.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, embedding: nn.Parameter):
        super().__init__()
        self.dense = ReplicatedLinear(make.child("dense"), spec.hidden, spec.hidden, init=Normal(spec.init_std))
        self.activation = Activation(spec.activation)
        self.norm = NORMS[spec.norm](make.child("norm"), spec.hidden, spec.norm_epsilon, part=False)
        self.decoder = TokenDecoder(make.child("decoder"), spec, embedding)

    def forward(
        self, rows: Tensor, labels: Tensor | None, *, each_token: bool = False, divisor: Tensor | float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what the decoder does, of hidden states [n, h] with labels [n], without the dimension of 1."""
        wide = self.norm(self.activation(self.dense(rows)))
        column = None if labels is None else labels.unsqueeze(1)
        found, beside = self.decoder(wide.unsqueeze(1), column, each_token=each_token, divisor=divisor)
        if labels is None or each_token:
            found, beside = found.squeeze(1), beside.squeeze(-1)
        return found, beside


class SentenceHead(nn.Module):
    """The sentence head tells of a row's first token whether its segments are in order: the pooler, a dense layer with
    tanh, and a linear layer with two outputs. [b, h] → [b, 2]; rows are the same on every TP rank."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__()
        init = Normal(spec.init_std)
        self.pooler = ReplicatedLinear(make.child("pooler"), spec.hidden, spec.hidden, init=init)
        self.classifier = ReplicatedLinear(make.child("classifier"), spec.hidden, 2, init=init)

    def forward(self, first: Tensor) -> Tensor:
        scores: Tensor = self.classifier(torch.tanh(self.pooler(first)))
        return scores
