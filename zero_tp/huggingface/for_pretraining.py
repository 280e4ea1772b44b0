"""ZeroTPForPreTraining: encoders as PreTrainedModels."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from zero_tp.huggingface.arguments import forward_options
from zero_tp.huggingface.model import HuggingFaceModel
from zero_tp.models.masked_lm import FIGURES, MaskedLM


class ZeroTPForPreTraining(MaskedLM, HuggingFaceModel):
    """A `MaskedLM` as a PreTrainedModel. During evaluation it returns the loss and the logits.

    A config whose `architectures` names the class without a sentence head (`BertForMaskedLM`) has no sentence head.
    """

    _tied_weights_keys = {"head.decoder.weight": "transformer.embedding.word.weight"}  # noqa: RUF012

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        *,
        return_logits: bool | None = None,
        return_dict: bool | None = None,
        reduction: Literal["mean", "none"] = "mean",
        num_items_in_batch: Tensor | float | None = None,
        num_rows_in_batch: Tensor | float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run `MaskedLM.forward`; an evaluation returns logits instead of the figures.

        `label_places` is one of `kwargs`, so that Trainer does not require it; see `ZeroTPForCausalLM.forward`.

        Args:
            kwargs: other arguments of `MaskedLM.forward`; those of transformers that it lacks may be None or False.
        """
        scores = self._returns_evaluation_logits(return_logits, reduction)
        output = super().forward(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            labels,
            next_sentence_label,
            return_logits=True if scores else return_logits,
            return_dict=return_dict,
            reduction=reduction,
            num_items_in_batch=num_items_in_batch,
            num_rows_in_batch=num_rows_in_batch,
            **forward_options(self, MaskedLM.forward, kwargs),
        )
        if not scores:
            return output
        return type(output)(**{name: value for name, value in output.items() if name not in FIGURES})
