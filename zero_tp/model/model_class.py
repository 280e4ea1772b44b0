"""The class of a spec's models."""

from __future__ import annotations

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.causal_lm import CausalLM
from zero_tp.model.masked_lm import MaskedLM
from zero_tp.model.parallel_model import ParallelModel


def model_class(spec: TransformerSpec) -> type[ParallelModel]:
    """Return the class of causal decoders, or of encoders."""
    return CausalLM if spec.causal else MaskedLM
