"""The class of a spec's models, and a model for its shapes."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.causal_lm import CausalLM
from zero_tp.model.masked_lm import MaskedLM
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.parallel.topology import Topology


def model_class(spec: TransformerSpec) -> type[ParallelModel]:
    """Return the class of causal decoders, or of encoders."""
    return CausalLM if spec.causal else MaskedLM


def meta_model(config: PretrainedConfig) -> ParallelModel:
    """Build a config's whole model on the meta device, where tensors have shapes and no data."""
    spec = architecture_of(config).spec(config)
    return model_class(spec)(config, Topology(world=1), device="meta")
