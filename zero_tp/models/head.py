"""The output layer turns hidden states into a loss, scores of labels, or logits.

s sequence, b batch, h hidden, v vocabulary, t TP size.
"""

from __future__ import annotations

from torch import Tensor, nn

from zero_tp.constants import IGNORE_INDEX
from zero_tp.models.spec import TransformerSpec
from zero_tp.parallel.collectives import gather_from_sequence_region
from zero_tp.parallel.elementwise import ElementwiseModule
from zero_tp.parallel.layout import split_vocabulary
from zero_tp.parallel.loss import vocab_parallel_cross_entropy, vocab_parallel_logits
from zero_tp.parallel.parameter import Normal, ParameterMaker
from zero_tp.parallel.scores import TokenScores, vocab_parallel_token_scores


class OutputLayer(ElementwiseModule):
    """The output layer; its weight [⌈v/t⌉, h] is the word embedding when tied.

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
                ignore_index=IGNORE_INDEX,
                divisor=divisor,
                run=self.elementwise,
            )
        whole = gather_from_sequence_region(hidden, self.group) if sequence else hidden
        if labels is None:
            kept = whole[-keep:] if isinstance(keep, int) else whole[keep]  # whole[-0:] is all
            return vocab_parallel_logits(kept, self.weight, vocabulary=self.vocabulary, group=self.group)
        return vocab_parallel_token_scores(
            whole, self.weight, labels, vocabulary=self.vocabulary, group=self.group, ignore_index=IGNORE_INDEX
        )
