"""Models have a Hugging Face face: ZeroTPForCausalLM and ZeroTPForPreTraining are PreTrainedModels whose config is the
native one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from zero_tp.errors import UserError
from zero_tp.models.architectures.configs import pretrained_config
from zero_tp.models.causal_lm import CausalLM
from zero_tp.models.masked_lm import MaskedLM
from zero_tp.models.model import ParallelModel
from zero_tp.parallel.agreement import agree_on_tokens, random_numbers_of_first
from zero_tp.topology import Topology
from zero_tp.weights.export import save_pretrained
from zero_tp.weights.load import PretrainedSource


class HuggingFaceModel(ParallelModel, PreTrainedModel):
    """This is what transformers wants of a model, and both kinds of ours share."""

    main_input_name = "input_ids"
    _supports_sdpa = True
    _no_split_modules = ["SequentialLayer", "ParallelLayer", "PostNormLayer"]  # noqa: RUF012 - transformers' own

    def __init__(self, config: PretrainedConfig, topology: Topology | None = None, **options: Any):
        PreTrainedModel.__init__(self, config)
        self._build(topology, **options)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the layers' constructors have filled their parameters, the same for every TP size."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        directory: str | os.PathLike[str],
        topology: Topology | None = None,
        *,
        allow_pickle: bool = False,
        **options: Any,
    ) -> Any:
        """Build a model from a Hugging Face directory of safetensors; every rank reads its slices.

        Args:
            allow_pickle: read pickled weights where there are no safetensors, with torch's restricted unpickler.
            options: `seed`, `dtype`, `device` of the constructor.

        Raises:
            UserError: no such model there, an unsupported architecture, or weights that do not fit it.
        """
        config = pretrained_config(Path(directory))
        seed = options.get("seed", 0)
        source = PretrainedSource(Path(directory), config, allow_pickle=allow_pickle, seed=seed)
        if source.drawn:
            warnings.warn(source.told(), stacklevel=2)
        return cls(config, topology, source=source, **options)

    def save_pretrained(  # type: ignore[override]
        self, directory: str | os.PathLike[str], **options: Any
    ) -> None:
        """Write the native Hugging Face model. Collective: every rank calls it, global rank 0 writes.

        Args:
            options: `dtype` of the written weights (default: the model's), `max_shard_size` such as "5GB".
        """
        parameters = dict(self.named_parameters())
        save_pretrained(directory, parameters, self.config, self.topology, generation=self.generation_config, **options)


class ZeroTPForCausalLM(CausalLM, HuggingFaceModel, GenerationMixin):
    """This model is a `CausalLM`, which says its arguments, as transformers knows models."""

    _tied_weights_keys = {"head.weight": "transformer.embedding.word.weight"}  # noqa: RUF012

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *arguments: Any, **options: Any) -> Any:
        """Call transformers' own `generate`. Under TP it is collective over the TP group, and every rank returns the
        same: ranks sample with the random numbers of the group's first, whose generators go on as in one process.

        Raises:
            UserError: the TP ranks were given different prompts.
            RuntimeError: they ended with different tokens.
        """
        group = self.topology.tensor_group
        prompt = inputs if inputs is not None else options.get("input_ids")
        if prompt is not None and not agree_on_tokens(prompt, group):
            raise UserError(
                "generate: the tensor parallel ranks were given different prompts; give all of them the same"
            )
        with random_numbers_of_first(group, self.device):
            output: Any = super().generate(inputs, *arguments, **options)  # type: ignore[misc]
        sequences = output if isinstance(output, Tensor) else output.sequences
        if not agree_on_tokens(sequences, group):
            raise RuntimeError("generate: the tensor parallel ranks ended with different tokens")
        return output


class ZeroTPForPreTraining(MaskedLM, HuggingFaceModel):
    """This model is a `MaskedLM`, which says its arguments, as transformers knows models.

    A config whose `architectures` names the class without a sentence head (`BertForMaskedLM`) has none.
    """

    _tied_weights_keys = {"head.decoder.weight": "transformer.embedding.word.weight"}  # noqa: RUF012
