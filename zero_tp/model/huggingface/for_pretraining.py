"""ZeroTPForPreTraining: encoders as PreTrainedModels."""

from __future__ import annotations

import inspect
from typing import Any

from zero_tp.model.huggingface.arguments import forward_options, with_signature_of
from zero_tp.model.huggingface.model import HuggingFaceModel
from zero_tp.model.masked_lm import METRIC_NAMES, MaskedLM


class ZeroTPForPreTraining(MaskedLM, HuggingFaceModel):
    """A `MaskedLM` as a PreTrainedModel. During evaluation it returns the loss and the logits.

    A config whose `architectures` names the class without a sentence head (`BertForMaskedLM`) has
    no sentence head.
    """

    _tied_weights_keys = {"head.decoder.weight": "transformer.embedding.word.weight"}  # noqa: RUF012

    @with_signature_of(MaskedLM.forward, hidden="label_places")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `MaskedLM.forward`; an evaluation returns logits, and no other metric than the loss.

        As in transformers, a model with a sentence head has a loss only with both kinds of labels,
        and a model without one ignores `next_sentence_label`.

        Args:
            kwargs: transformers' arguments that `MaskedLM.forward` lacks may be None or False.
        """
        call = inspect.signature(MaskedLM.forward).bind(
            self, *args, **forward_options(self, MaskedLM.forward, kwargs)
        )
        options = dict(call.arguments)
        del options["self"]
        labels = ("labels", "next_sentence_label")
        if not self.spec.sentence_head:
            options.pop("next_sentence_label", None)
        elif (
            any(options.get(name) is None for name in labels)
            and options.get("reduction", "mean") == "mean"
        ):
            options |= dict.fromkeys(labels)
        options |= self._undefined_means(options)
        if not self._wants_logits(options):
            return super().forward(**options)
        output = super().forward(**options | {"return_logits": True})
        return type(output)(
            **{name: value for name, value in output.items() if name not in METRIC_NAMES}
        )
