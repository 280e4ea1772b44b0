"""Heads turn hidden states into losses, scores of labels, or logits.

s sequence, b batch, h hidden, v vocabulary, t TP size, n labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.mlp import Activation
from zero_tp.model.norm import NORMS
from zero_tp.parallel.collectives import gather_from_sequence_region
from zero_tp.parallel.elementwise import ElementwiseModule
from zero_tp.parallel.layout import split_vocabulary
from zero_tp.parallel.linear import ReplicatedLinear
from zero_tp.parallel.logits import LogitMap, vocab_parallel_logits
from zero_tp.parallel.loss import TokenLoss, vocab_parallel_cross_entropy
from zero_tp.parallel.parameter import ConstantInit, Normal, ParameterMaker
from zero_tp.parallel.token_scores import TokenScores, vocab_parallel_token_scores


class OutputLayer(ElementwiseModule):
    """The output layer, with one row per token: losses, scores or logits. Its weight is [⌈v/t⌉, h].

    A tied weight, the word embedding, is a parameter of this module too, because ZeRO-3 gathers
    parameters around their modules.

    Args:
        bias: has a bias, as the masked-token decoder does.
    """

    def __init__(
        self,
        make: ParameterMaker,
        spec: TransformerSpec,
        embedding: nn.Parameter,
        *,
        bias: bool = False,
    ):
        super().__init__()
        self.vocabulary = spec.vocabulary
        self.group = make.topology.tensor_group
        self.logit_map = LogitMap(spec.logit_scale, spec.logit_cap)
        # Like the word embedding's, so that a tied weight is the same shard here and there.
        rows = split_vocabulary(spec.vocabulary)
        init = Normal(spec.init_std)
        self.weight = (
            embedding
            if spec.tied
            else make.parameter("weight", (spec.vocabulary, spec.hidden), rows, init)
        )
        self.bias = (
            make.parameter("bias", (spec.vocabulary,), rows, ConstantInit(0.0)) if bias else None
        )

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        *,
        sequence: bool = False,
        per_token: bool = False,
        divisor: Tensor | float | None = None,
        accuracy: bool = False,
        z_loss_weight: float = 0.0,
        keep: int | Tensor = 0,
    ) -> Tensor | TokenLoss | TokenScores:
        """Compute losses, scores or logits from hidden states [s, b, h], a shard when `sequence`.

        Without labels, return the logits [s, b, v] of the last `keep` positions, or of those it
        lists; 0: all. With labels [s, b] and `per_token`, return each label's scores. Otherwise
        return the scalar loss (the sum divided by `divisor`, by default the mean, and the z-loss
        times `z_loss_weight`) and the number of labels that are the argmax (0 unless
        `accuracy`).
        """
        common: dict[str, Any] = {
            "bias": self.bias,
            "vocabulary": self.vocabulary,
            "group": self.group,
            "logit_map": self.logit_map,
        }
        if labels is not None and not per_token:
            common |= {
                "sequence": sequence,
                "divisor": divisor,
                "accuracy": accuracy,
                "z_loss_weight": z_loss_weight,
                "ops": self.elementwise,
            }
            return vocab_parallel_cross_entropy(hidden, self.weight, labels, **common)
        # Only here: the loss, above, gathers in its own function, which makes the hidden states'
        # gradient in forward, block by block, and scatters the sum.
        whole = gather_from_sequence_region(hidden, self.group) if sequence else hidden
        if labels is None:
            chosen = whole[-keep:] if isinstance(keep, int) else whole[keep]  # whole[-0:] is all
            return vocab_parallel_logits(chosen, self.weight, **common)
        return vocab_parallel_token_scores(whole, self.weight, labels, **common)


class MaskedTokenHead(nn.Module):
    """The head of masked tokens: dense layer, the MLP's activation, norm, decoder (arXiv
    1810.04805).

    It works on whole rows that are the same on every TP rank, even under SP.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, embedding: nn.Parameter):
        super().__init__()
        self.dense = ReplicatedLinear(
            make.child("dense"), spec.hidden, spec.hidden, init=Normal(spec.init_std)
        )
        self.activation = Activation(spec.activation)
        # Not sharded under SP either: `gather_rows` has given every rank the same rows.
        self.norm = NORMS[spec.norm](
            make.child("norm"), spec.hidden, spec.norm_epsilon, sharded_input=False
        )
        self.decoder = OutputLayer(make.child("decoder"), spec, embedding, bias=True)

    def forward(
        self,
        rows: Tensor,
        labels: Tensor | None,
        *,
        per_token: bool = False,
        divisor: Tensor | float | None = None,
        z_loss_weight: float = 0.0,
    ) -> Tensor | TokenLoss | tuple[Tensor, Tensor]:
        """Compute logits or losses from hidden states [n, h].

        Without labels, return the logits [n, v]. With labels [n], return the loss and the number of
        labels that are the argmax; with `per_token` both of each label, [n].
        """
        # As [s, b, h] with b = 1, the shape that the output layer takes.
        inputs = self.norm(self.activation(self.dense(rows))).unsqueeze(1)
        if labels is None:
            logits: Tensor = self.decoder(inputs, None)
            return logits.squeeze(1)
        columns = labels.unsqueeze(1)
        if per_token:
            scores: TokenScores = self.decoder(inputs, columns, per_token=True)
            return scores.nll.squeeze(1), scores.greedy.squeeze(1)
        loss: TokenLoss = self.decoder(
            inputs, columns, divisor=divisor, accuracy=True, z_loss_weight=z_loss_weight
        )
        return loss


class SentenceHead(nn.Module):
    """Classify from a row's first token whether its segments are in order: pooler (dense, tanh),
    linear layer.

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
