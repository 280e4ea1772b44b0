"""A decoder with a language-model head, split over the TP group.

s sequence, b batch, v vocabulary, t TP size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.model.context import ForwardInputs, PackedSequences, document_ids_from_positions
from zero_tp.model.head import OutputLayer
from zero_tp.model.parallel_model import ParallelModel, check_shape
from zero_tp.model.router_balance import ChoiceCount, RouterBalance
from zero_tp.model.router_loss import RouterLoss
from zero_tp.model.z_loss import RouterZLoss
from zero_tp.parallel.loss import TokenLoss
from zero_tp.parallel.parameter import ParameterMaker
from zero_tp.parallel.topology import Topology

Pack = Callable[[Tensor, torch.device], PackedSequences]
"""(document ids [b, s], device) → the packed documents."""


@dataclass
class ScoredOutput(CausalLMOutputWithPast):
    """transformers' output of a causal model, with what scoring and experts add.

    Attributes:
        greedy: whether each label is the argmax, shaped like `loss`; only with `reduction="none"`.
        aux_loss: the load-balancing loss of experts, without its coefficient, if it is a part of
            `loss`.
        z_loss, router_z_loss: z-losses without their weights, if they are a part of `loss`.
        reported_loss: `loss` without z-losses and gradient, if it has any.
    """

    greedy: Tensor | None = None
    aux_loss: Tensor | None = None
    z_loss: Tensor | None = None
    router_z_loss: Tensor | None = None
    reported_loss: Tensor | None = None


def next_tokens(labels: Tensor) -> Tensor:
    """Return the token that each position predicts. [b, s] → [b, s].

    Args:
        labels: as Hugging Face defines them, with the token of the position itself.
    """
    targets = torch.full_like(labels, IGNORE_INDEX)
    # Labels [5 6 7 8] become targets [6 7 8 -100]: a row's last position predicts nothing.
    targets[:, :-1] = labels[:, 1:]
    return targets


def _tokens(
    input_ids: Tensor, attention_mask: Tensor | None, unpadded_length: int | None
) -> Tensor | None:
    """Return 1 for each token of a batch and 0 for its padding, [b, s]; None without padding."""
    if attention_mask is not None or unpadded_length is None:
        return attention_mask
    tokens = torch.ones_like(input_ids)
    tokens[:, unpadded_length:] = 0
    return tokens


class CausalLM(ParallelModel):
    """A causal decoder with a language-model head; see `ParallelModel` for the other arguments.

    Args:
        pack: reads document ids; another one is for tensors without data.
    """

    causal = True
    _pack: Pack = PackedSequences.from_document_ids

    def __init__(
        self,
        config: PretrainedConfig,
        topology: Topology | None = None,
        *,
        pack: Pack | None = None,
        **options: Any,
    ):
        super().__init__(config, topology, **options)
        if pack is not None:
            self._pack = pack

    def _make_heads(self, make: ParameterMaker) -> None:
        self.head = OutputLayer(
            make.child("head"), self.spec, self.transformer.embedding.word.weight
        )

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    @property
    def metric_names(self) -> tuple[str, ...]:
        experts = self.spec.experts
        is_added = {
            "aux_loss": experts is not None and experts.loss_weight is not None,
            "z_loss": self.z_losses.token > 0,
            "router_z_loss": self.z_losses.router > 0,
        }
        return tuple(name for name, is_part in is_added.items() if is_part)

    def metric_sums(
        self, output: Any, arguments: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            "loss": (output.loss.double().sum(), (arguments["shift_labels"] != IGNORE_INDEX).sum())
        }

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        shift_labels: Tensor | None = None,
        return_logits: bool | None = None,
        return_dict: bool | None = None,
        reduction: Literal["mean", "none"] = "mean",
        num_items_in_batch: Tensor | float | None = None,
        token_type_ids: Tensor | None = None,
        unpadded_length: int | None = None,
    ) -> ScoredOutput:
        """Return the loss and, if requested or without labels, logits.

        Args:
            input_ids: [b, s].
            attention_mask: [b, all tokens so far], 1 for a token and 0 for padding.
            labels: [b, s] as Hugging Face defines them: shifted inside, -100 is ignored.
            position_ids: [b or 1, s]; by default those after the cached tokens. As in transformers,
                if there is neither mask nor cache, a position that does not continue its
                predecessor begins a document.
            document_ids: [b, s] on the CPU (else it synchronises), a row's packed documents; a
                token sees its own.
            cache: keys and values of earlier tokens; the forward appends this call's.
            use_cache: create a cache if none is given, and return it.
            logits_to_keep: positions that get logits: the last n, or those listed; 0: all.
            shift_labels: [b, s], the token that each position predicts; overrides `labels`. With
                `none` also [b, s, k].
            return_logits: also return logits [b, s, v], whole on every TP rank and without
                gradient.
            reduction: `none` returns each token's loss, without gradient; ignored labels skip the
                output layer.
            num_items_in_batch: divisor of the sum of the losses; by default the number of labels
                that are not ignored.
            token_type_ids: [b, s], in GPT-2 token ids whose embeddings are added; other models
                ignore it.
            unpadded_length: tokens of every row; the rest pads it for sequence parallelism and
                counts in no loss.

        Returns:
            `loss`: the mean over the labels that are not ignored, fp32, equal on all TP ranks. With
            `none` it has the labels' shape and is 0 for ignored ones; `greedy` is set. As in
            transformers, `output_router_logits` of a model with experts adds
            `router_aux_loss_coef` times `aux_loss` to the mean. In training mode the model's
            `z_losses` add theirs.
        """
        self._check_call("CausalLMOutputWithPast", reduction, return_dict)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        per_token = reduction == "none"
        targets = self._targets(input_ids, labels, shift_labels, per_token=per_token)
        fields: dict[str, Any] = {"cache": cache}
        router_losses: dict[str, RouterLoss] = {}
        # Losses of routers are a part of the mean only.
        if targets is not None and not per_token:
            router_losses = self._router_losses(input_ids, attention_mask, unpadded_length)
        choice_count = None
        if self.counts_choices:
            choice_count = ChoiceCount(_tokens(input_ids, attention_mask, unpadded_length))
        inputs = (input_ids, attention_mask, position_ids, document_ids, cache, token_type_ids)
        hidden, is_shard = self.hidden_states(
            *inputs,
            router_losses=tuple(router_losses.values()),
            choice_count=choice_count,
            unpadded_length=unpadded_length,
        )
        if choice_count is not None:
            choice_count.complete()
        for name, router_loss in router_losses.items():
            # Before the head, so that its backward runs before those of the layers, whose routers
            # need it.
            hidden, fields[name] = router_loss.loss(hidden)
        if targets is not None:
            # Sequence first, like the hidden states.
            targets = targets.transpose(0, 1).contiguous()
            if per_token:
                scores = self.head(hidden, targets, sequence=is_shard, per_token=True)
                fields["loss"] = scores.nll.transpose(0, 1)
                fields["greedy"] = scores.greedy.transpose(0, 1)
            else:
                fields |= self._losses(hidden, targets, fields, is_shard, num_items_in_batch)
        if return_logits or targets is None:
            logits = self.head(hidden, None, sequence=is_shard, keep=logits_to_keep)
            fields["logits"] = logits.transpose(0, 1)
        return ScoredOutput(**fields)

    def _router_losses(
        self, input_ids: Tensor, attention_mask: Tensor | None, unpadded_length: int | None
    ) -> dict[str, RouterLoss]:
        """Return the losses of the routers' logits, which count no padding, by their names in the
        output.
        """
        experts = self.spec.experts
        losses: dict[str, RouterLoss] = {}
        if experts is None:
            return losses
        common = (
            _tokens(input_ids, attention_mask, unpadded_length),
            self.topology.tensor,
            input_ids.device,
        )
        if experts.loss_weight is not None:
            losses["aux_loss"] = RouterBalance(experts, *common)
        if self.active_z_losses.router:
            losses["router_z_loss"] = RouterZLoss(*common)
        return losses

    def _targets(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        *,
        per_token: bool,
    ) -> Tensor | None:
        """Return the token that each position predicts, [b, s] or [b, s, k], checked; None
        without labels.
        """
        targets = (
            shift_labels if labels is None or shift_labels is not None else next_tokens(labels)
        )
        if targets is None:
            return None
        if targets.shape[:2] != input_ids.shape or targets.ndim > (3 if per_token else 2):
            raise ValueError(
                f"labels are {tuple(targets.shape)}, input ids {tuple(input_ids.shape)}"
            )
        self._check_ids("labels", targets, ignore=IGNORE_INDEX)
        return targets

    def _losses(
        self,
        hidden: Tensor,
        labels: Tensor,
        router_losses: Mapping[str, Tensor],
        sequence: bool,
        divisor: Tensor | float | None,
    ) -> dict[str, Tensor | None]:
        """Return the scalar loss of labels [s, b] that training minimises, and its parts that logs
        show.
        """
        weights = self.active_z_losses
        aux_loss, router_z_loss = map(router_losses.get, ("aux_loss", "router_z_loss"))
        tokens: TokenLoss = self.head(
            hidden, labels, sequence=sequence, divisor=divisor, z_loss_weight=weights.token
        )

        def with_balance(loss: Tensor) -> Tensor:
            if aux_loss is None:
                return loss
            assert self.spec.experts is not None and self.spec.experts.loss_weight is not None
            return loss + self.spec.experts.loss_weight * aux_loss

        loss = with_balance(tokens.loss)
        if router_z_loss is not None:
            loss = loss + weights.router * router_z_loss
        reported = with_balance(tokens.cross_entropy).detach() if any(weights) else None
        return {"loss": loss, "z_loss": tokens.z_loss, "reported_loss": reported}

    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
        token_type_ids: Tensor | None = None,
        *,
        router_losses: tuple[RouterLoss, ...] = (),
        choice_count: ChoiceCount | None = None,
        unpadded_length: int | None = None,
    ) -> tuple[Tensor, bool]:
        """Return the output layer's input, [s, b, h], and whether it is a sequence shard.
        Arguments: see `forward`.

        Args:
            router_losses, choice_count: see `ForwardInputs`.
        """
        self._check_shapes(
            input_ids,
            attention_mask,
            position_ids,
            document_ids,
            cache,
            unpadded_length=unpadded_length,
        )
        self._check_ids("token ids", input_ids)
        types = None
        if token_type_ids is not None and self.spec.word_token_types:
            check_shape("token_type_ids", token_type_ids, (len(input_ids),), input_ids.shape[1])
            self._check_ids("token_type_ids", token_type_ids)
            types = token_type_ids.t().contiguous()
        sequence = self._runs_sequence_parallel(input_ids.shape[1])
        # transformers separates documents under the same conditions (`masking_utils.py`).
        if (
            document_ids is None
            and position_ids is not None
            and attention_mask is None
            and cache is None
        ):
            document_ids = document_ids_from_positions(position_ids.expand(*input_ids.shape))
        packed = None if document_ids is None else self._pack(document_ids, input_ids.device)
        inputs = ForwardInputs(
            attention_mask, position_ids, packed, cache, router_losses, choice_count
        )
        # Sequence first: shards of the sequence are then contiguous, as collectives need them.
        hidden: Tensor = self.transformer(
            input_ids.t().contiguous(), inputs=inputs, types=types, sequence=sequence
        )
        return hidden, sequence

    def _check_shapes(
        self,
        ids: Tensor,
        padding_mask: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        cache: Cache | None,
        *,
        unpadded_length: int | None,
    ) -> None:
        batch, length = ids.shape
        tokens = length if unpadded_length is None else unpadded_length
        past = int(cache.get_seq_length()) if cache is not None else 0
        if cache is not None and torch.is_grad_enabled():
            raise UserError(
                "a KV cache serves generation, not training: wrap the forward in torch.no_grad()"
            )
        if cache is not None and documents is not None:
            raise ValueError(
                "document_ids with a KV cache are not supported; give packed documents in one "
                "forward"
            )
        if (
            documents is not None
            and any(rotary is not None and rotary.by_length for rotary in self.spec.rotaries)
            and tokens > self.spec.positions
        ):
            raise UserError(
                f"document_ids: with rope_type 'dynamic' each document of a row of {tokens} tokens "
                "may need its own "
                f"frequencies; give rows of at most {self.spec.positions} tokens"
            )
        self._check_length(past + tokens)
        check_shape("attention_mask", padding_mask, (batch,), past + length)
        check_shape("position_ids", positions, (1, batch), length)
        check_shape("document_ids", documents, (batch,), length)
