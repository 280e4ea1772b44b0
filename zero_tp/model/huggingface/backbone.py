"""Hidden states of an unsplit decoder.

Losses of other libraries (trl) multiply them by the output layer themselves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from zero_tp.base.errors import UserError
from zero_tp.model.causal_lm import CausalLM
from zero_tp.model.huggingface.arguments import UNSUPPORTED_IN_FORWARD, refuse_arguments


class Backbone:
    """The model's `base_model`, which trl's trainers call to get hidden states."""

    _tp_plan = _pp_plan = (
        None  # transformers asks every base model for its own kinds of parallelism
    )

    def __init__(self, model: CausalLM):
        self._model = model

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        **refused: Any,
    ) -> BaseModelOutputWithPast:
        """Return the input of the output layer, [b, s, h]. A split model and other arguments are
        refused.
        """
        model = self._model
        refuse_arguments(
            "base_model",
            refused,
            ("input_ids", "attention_mask", "position_ids"),
            UNSUPPORTED_IN_FORWARD,
        )
        if model.topology.tensor > 1:
            raise UserError(
                "a loss that multiplies hidden states by the output layer (trl's trainers) needs "
                "the whole layer, but "
                f"this model is split over {model.topology.tensor} ranks; give ZeroTPTrainer rows "
                "that a chat template "
                "has made, with labels of -100 where there is no loss"
            )
        model.check_config()
        hidden, _ = model.hidden_states(input_ids, attention_mask, position_ids)
        return BaseModelOutputWithPast(last_hidden_state=hidden.transpose(0, 1))
