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
from zero_tp.parallel.parameter import ConstantInit, Normal, ParameterMaker
from zero_tp.parallel.scores import TokenScores, vocab_parallel_token_scores


class VocabularyLayer(ElementwiseModule):
    """A layer with one row per token; its weight [⌈v/t⌉, h] is the word embedding when tied.

    A tied weight is a parameter of this module too, because ZeRO-3 gathers parameters around their modules.
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
    """The output layer of a causal model: losses, scores or logits."""

    bias = None

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        *,
        sequence: bool,
        per_token: bool = False,
        divisor: Tensor | float | None = None,
        keep: int | Tensor = 0,
    ) -> Tensor | TokenScores:
        """Return the loss, scores or logits of [s, b, h], a shard when `sequence`.

        With labels [s, b] the scalar loss (its sum over `divisor`, by default the mean), or with `per_token` each
        label's scores; without labels the logits [s, b, v] of the last `keep` positions, or of those it lists; 0: all.
        """
        if labels is not None and not per_token:
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
            chosen = whole[-keep:] if isinstance(keep, int) else whole[keep]  # whole[-0:] is all
            return vocab_parallel_logits(chosen, self.weight, vocabulary=self.vocabulary, group=self.group)
        return vocab_parallel_token_scores(whole, self.weight, labels, vocabulary=self.vocabulary, group=self.group)


class TokenDecoder(VocabularyLayer):
    """The decoder of masked tokens, with a bias, for hidden states of chosen positions, whole on every rank."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, embedding: nn.Parameter):
        super().__init__(make, spec, embedding)
        self.bias = make.make("bias", (spec.vocabulary,), split_vocabulary(spec.vocabulary), ConstantInit(0.0))

    def forward(
        self, rows: Tensor, labels: Tensor | None, *, per_token: bool = False, divisor: Tensor | float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (loss, number of labels that are the argmax) of rows [n, 1, h] with labels [n, 1], or with `per_token`
        each label's scores [n, 1]; without labels (logits [n, 1, v], an empty tensor)."""
        vocabulary, group = self.vocabulary, self.group
        if labels is None:
            logits = vocab_parallel_logits(rows, self.weight, bias=self.bias, vocabulary=vocabulary, group=group)
            return logits, logits.new_empty(0)
        if per_token:
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
    """The head of masked tokens: dense layer, the MLP's activation, norm, decoder (arXiv 1810.04805).

    It works on whole rows that are the same on every TP rank, even under SP.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, embedding: nn.Parameter):
        super().__init__()
        self.dense = ReplicatedLinear(make.child("dense"), spec.hidden, spec.hidden, init=Normal(spec.init_std))
        self.activation = Activation(spec.activation)
        self.norm = NORMS[spec.norm](make.child("norm"), spec.hidden, spec.norm_epsilon, part=False)
        self.decoder = TokenDecoder(make.child("decoder"), spec, embedding)

    def forward(
        self, rows: Tensor, labels: Tensor | None, *, per_token: bool = False, divisor: Tensor | float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the decoder's results for hidden states [n, h] with labels [n], without the dimension of 1."""
        wide = self.norm(self.activation(self.dense(rows)))
        column = None if labels is None else labels.unsqueeze(1)
        scores, counts = self.decoder(wide.unsqueeze(1), column, per_token=per_token, divisor=divisor)
        if labels is None or per_token:
            scores, counts = scores.squeeze(1), counts.squeeze(-1)
        return scores, counts


class SentenceHead(nn.Module):
    """Classify from a row's first token whether its segments are in order: pooler (dense, tanh), linear layer.

    [b, h] → [b, 2]; rows are the same on every TP rank.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__()
        init = Normal(spec.init_std)
        self.pooler = ReplicatedLinear(make.child("pooler"), spec.hidden, spec.hidden, init=init)
        self.classifier = ReplicatedLinear(make.child("classifier"), spec.hidden, 2, init=init)

    def forward(self, first: Tensor) -> Tensor:
        scores: Tensor = self.classifier(torch.tanh(self.pooler(first)))
        return scores
