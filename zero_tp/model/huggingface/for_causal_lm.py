"""ZeroTPForCausalLM: causal decoders as PreTrainedModels, with transformers' `generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.utils.deprecation import deprecate_kwarg

from zero_tp.base.errors import UserError
from zero_tp.model.causal_lm import CausalLM
from zero_tp.model.huggingface.arguments import forward_options, with_signature_of
from zero_tp.model.huggingface.backbone import Backbone
from zero_tp.model.huggingface.model import HuggingFaceModel
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.parallel.agreement import agree_on_tokens, broadcast_rng_state
from zero_tp.parallel.lock_step import uneven_forwards


class ZeroTPForCausalLM(CausalLM, HuggingFaceModel, GenerationMixin):
    """A `CausalLM` as a PreTrainedModel. Like transformers' models it also returns logits during
    evaluation, unless losses alone are asked for (`reduction="none"`).
    """

    _tied_weights_keys = {"head.weight": "transformer.embedding.word.weight"}  # noqa: RUF012

    @property
    def base_model(self) -> Any:
        return Backbone(self)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # as transformers' own models
    @with_signature_of(CausalLM.forward, hidden="shift_labels")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `CausalLM.forward`, with logits in an evaluation that does not ask for losses alone.

        Args:
            kwargs: transformers' arguments that `CausalLM.forward` lacks may be None or False.
        """
        options = forward_options(self, CausalLM.forward, kwargs)
        if self._wants_logits(options):
            # Trainer computes its metrics from them.
            options["return_logits"] = True
        options |= self._undefined_means(options)
        return super().forward(*args, **options)

    def create_masks_for_generate(
        self, *, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor | None:
        """Return the mask [b, tokens so far] unchanged: the forward builds the masks of its
        layers and caches.
        """
        return attention_mask

    def _get_static_cache_init_shape(self) -> None:
        """Return None: a static cache then takes its shape from the first keys, which have this
        rank's heads only.
        """

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse the paged cache of `generate_batch` and of `cache_implementation="paged"`."""
        raise UserError(
            'generate: a paged cache (cache_implementation="paged", generate_batch) is not built; '
            "leave it out, or use "
            '"static"'
        )

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Call transformers' own `generate`. Collective over the TP group, and over the expert
        group.

        All ranks of a TP group sample with the random numbers of the group's first rank, so they
        return the same tokens. Those of an expert group may have different prompts and lengths.

        Raises:
            UserError: on every rank of the TP group: the ranks' prompts differ or one has none; an
                unsupported cache, time limit, early exit or assistant.
        """
        topology = self.topology
        if topology.expert == 1:
            return self._generate(inputs, generation_config, *arguments, **options)
        # By `uneven_forwards`; transformers' own way would go on past the end of a static cache.
        options["synced_gpus"] = False
        with uneven_forwards(self, topology.expert_group, self.device, self._join_forward):
            return self._generate(inputs, generation_config, *arguments, **options)

    def _join_forward(self) -> None:
        """Take part in a forward of the expert group, with one row whose output is dropped."""
        self(torch.zeros(1, self.topology.tensor, dtype=torch.long, device=self.device))

    def _generate(
        self,
        inputs: Tensor | None,
        generation_config: GenerationConfig | None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        settings = generation_config or self.generation_config
        if self.topology.tensor > 1 and (options.get("max_time") or settings.max_time):
            raise UserError(
                "generate: max_time would end each rank at another token; use max_new_tokens"
            )
        if options.get("assistant_early_exit") or settings.assistant_early_exit:
            raise UserError(
                "generate: assistant_early_exit is not built: a forward runs all layers; give an "
                "assistant_model, or "
                "prompt_lookup_num_tokens"
            )
        assistant = options.get("assistant_model")
        looks_up = options.get("prompt_lookup_num_tokens") or settings.prompt_lookup_num_tokens
        if self.spec.gated_delta is not None and (assistant is not None or looks_up):
            raise UserError(
                "generate: assistant_model and prompt_lookup_num_tokens need a cache that can drop "
                "tokens, and the state of linear attention cannot; leave them out"
            )
        if isinstance(assistant, ParallelModel) and assistant.topology.expert > 1:
            raise UserError(
                "generate: an assistant_model with expert parallelism is not built; give one that "
                "is whole on each rank"
            )
        group = self.topology.tensor_group
        prompt = inputs if inputs is not None else options.get("input_ids")
        # An empty tensor, so that this rank takes part in the comparison and the others can name
        # the fault.
        if prompt is None:
            prompt = torch.empty(0, dtype=torch.long, device=self.device)
        if not agree_on_tokens(group, prompt):
            raise UserError(
                "generate: the tensor parallel ranks have different prompts; give all of them the "
                "same"
            )
        cache = options.get("cache_implementation") or settings.cache_implementation or ""
        if cache.startswith("offloaded") and self.device.type == "cpu":
            raise UserError(
                f'generate: cache_implementation="{cache}" needs an accelerator; leave it out on a '
                "CPU"
            )
        # With a static cache, generate would compile the forward on CUDA.
        options.setdefault("disable_compile", True)
        with broadcast_rng_state(group, self.device):
            output: Any = super().generate(inputs, generation_config, *arguments, **options)
        sequences = output if isinstance(output, Tensor) else output.sequences
        if not agree_on_tokens(group, sequences):
            raise RuntimeError("generate: the tensor parallel ranks ended with different tokens")
        return output
