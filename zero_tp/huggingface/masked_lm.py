"""ZeroTPForPreTraining: encoders as PreTrainedModels."""

from __future__ import annotations

from typing import Any, Literal

from zero_tp.huggingface.arguments import forward_options, trainer_signature
from zero_tp.huggingface.model import HuggingFaceModel
from zero_tp.models.masked_lm import FIGURES, MaskedLM


class ZeroTPForPreTraining(MaskedLM, HuggingFaceModel):
    """A `MaskedLM` as a PreTrainedModel. In an evaluation its forward returns the loss and the logits.

    A config whose `architectures` names the class without a sentence head (`BertForMaskedLM`) has no sentence head.
    """

    _tied_weights_keys = {"head.decoder.weight": "transformer.embedding.word.weight"}  # noqa: RUF012

    def forward(
        self,
        *arguments: Any,
        return_logits: bool | None = None,
        reduction: Literal["mean", "none"] = "mean",
        **options: Any,
    ) -> Any:
        """Run `MaskedLM.forward`; an evaluation returns logits, and no figures.

        Args:
            options: those of `MaskedLM.forward`; arguments of transformers that it lacks may be None or False.

        Raises:
            UserError: another argument has a value; see `MaskedLM.forward`.
        """
        evaluates = self._returns_evaluation_logits(return_logits, reduction)
        output = super().forward(
            *arguments,
            return_logits=True if evaluates else return_logits,
            reduction=reduction,
            **forward_options(self, MaskedLM.forward, options),
        )
        if not evaluates:
            return output
        return type(output)(**{name: value for name, value in output.items() if name not in FIGURES})

    forward.__signature__ = trainer_signature(MaskedLM.forward, "label_places")  # type: ignore[attr-defined]
