"""youtu is Hugging Face's YoutuForCausalLM (Youtu-LLM): a dense model with latent attention."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, latent_attention, llama_names
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Weight

FIELDS = common.fields(
    sizes=latent_attention.SIZES,
    positive=("embedding_initializer_range",),
    read=("head_dim", *latent_attention.READ),
    irrelevant=latent_attention.IRRELEVANT,
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return the spec of a config; its embedding has a standard deviation of its own."""
    return common.spec(
        config,
        embedding_std=config.embedding_initializer_range,
        **latent_attention.settings(config),
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return the weights of a spec."""
    return llama_names.weights(spec, latent_attention.weights(spec))


ARCHITECTURE = common.architecture(FIELDS, spec, "YoutuForCausalLM", weights)
