"""Resize the vocabulary of a built model, on any TP size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from zero_tp.base.errors import UserError, shown
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.model.weights.entries import whole_parameter
from zero_tp.parallel.layout import Layout, layout_of, stored_tensors, whole_shape
from zero_tp.parallel.parameter import Init, SeededInit
from zero_tp.parallel.topology import Topology


class ResizedSource:
    """A `WeightSource` with a model's own weights; those with one row per token are resized.

    Attributes:
        by_mean: a new row is the mean of the old rows; otherwise it is initialised from the seed.
    """

    def __init__(self, parameters: Mapping[str, Tensor], seed: int, *, by_mean: bool):
        self._parameters = parameters
        self._seeded_init = SeededInit(seed)
        self.by_mean = by_mean

    def fill(
        self,
        local: Tensor,
        name: str,
        whole: Sequence[int],
        layout: Layout,
        init: Init,
        topology: Topology,
    ) -> None:
        """Fill a shard. Collective over the TP group, in the order in which parameters are made."""
        old = self._parameters[name]
        if whole_shape(old) == tuple(whole):
            local.copy_(old.detach())
            return
        # Whole, because another vocabulary moves rows between ranks: of 10 tokens on TP 2 rank 0
        # has 0 to 4, of 12 it has 0 to 5.
        rows = whole_parameter(old, topology)
        resized = rows.new_empty(tuple(whole))
        if self.by_mean:
            resized[:] = rows.double().mean(0)
        else:
            # Drawn whole and then sharded, which gives the same bits for every TP size.
            self._seeded_init.fill(resized, name, whole, layout, init, Topology(world=1))
        common = min(len(rows), whole[0])
        resized[:common] = rows[:common]
        local.copy_(layout.shard(resized, topology.tensor_rank, topology.tensor))


def resize_vocabulary(model: ParallelModel, tokens: int, *, by_mean: bool) -> None:
    """Resize the vocabulary to `tokens`; the first rows stay. Collective over the TP group.

    Parameters are replaced, so resize before an optimizer or engine exists.
    """
    old = dict(stored_tensors(model))
    if tokens < 1:
        raise UserError(f"resize_token_embeddings: {tokens} tokens; a vocabulary has at least one")
    if any(hasattr(parameter, "ds_tensor") for parameter in old.values()):
        raise UserError(
            "resize_token_embeddings: ZeRO-3 has partitioned the parameters; resize before "
            "training starts"
        )
    trainable = {name for name, parameter in old.items() if parameter.requires_grad}
    for name, parameter in old.items():
        layout_of(parameter, f"resize_token_embeddings: {name}")
    if model.config.tie_word_embeddings != model.tied:
        state = "tied" if model.tied else "not tied"
        raise UserError(
            f"resize_token_embeddings: the embeddings are {state}, and the config's "
            "tie_word_embeddings was changed to "
            f"{shown(model.config.tie_word_embeddings)}; change it back"
        )
    model.config.vocab_size = model.spec.vocabulary  # some set the new size before they call
    model.check_config()
    sample = next(iter(old.values()))
    # `_build` restarts the streams; dropout has to go on where it was.
    streams = model.streams.state_dict()
    model.config.vocab_size = tokens
    # The padding row stays that of the built model, as in transformers, whatever `pad_token_id` is
    # now.
    padding = model.spec.padding_token
    padding = padding if padding is not None and padding < tokens else None
    spec = replace(model.spec, vocabulary=tokens, padding_token=padding)
    source = ResizedSource(old, model.seed, by_mean=by_mean)
    training = model.training
    options: dict[str, Any] = {
        "seed": model.seed,
        "source": source,
        "dtype": sample.dtype,
        "device": sample.device,
    }
    model._build(model.topology, spec=spec, **options)
    model.streams.load_state_dict(streams)
    model.train(training)
    for name, parameter in model.named_parameters():
        # New parameters are all trainable.
        parameter.requires_grad_(name in trainable)
