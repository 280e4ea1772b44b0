"""ZeroTPForCausalLM: causal decoders as PreTrainedModels, with transformers' `generate`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from zero_tp.errors import UserError
from zero_tp.huggingface.arguments import forward_options
from zero_tp.huggingface.backbone import Backbone
from zero_tp.huggingface.model import HuggingFaceModel
from zero_tp.models.causal_lm import CausalLM
from zero_tp.parallel.agreement import agree_on_tokens, random_numbers_of_first


class ZeroTPForCausalLM(CausalLM, HuggingFaceModel, GenerationMixin):
    """A `CausalLM` as a PreTrainedModel. Like transformers' models it also returns logits during evaluation."""

    _tied_weights_keys = {"head.weight": "transformer.embedding.word.weight"}  # noqa: RUF012

    @property
    def base_model(self) -> Any:
        return Backbone(self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        return_dict: bool | None = None,
        reduction: Literal["mean", "none"] = "mean",
        num_items_in_batch: Tensor | float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run `CausalLM.forward`, with logits in an evaluation.

        Trainer reads this signature: each batch of an evaluation must have every argument with "label" in its name.
        Therefore `shift_labels` is one of `kwargs`.

        Args:
            kwargs: other arguments of `CausalLM.forward`; those of transformers that it lacks may be None or False.
        """
        if self._returns_evaluation_logits(return_logits, reduction):
            return_logits = True
        return super().forward(
            input_ids,
            attention_mask,
            labels,
            position_ids=position_ids,
            document_ids=document_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            return_logits=return_logits,
            return_dict=return_dict,
            reduction=reduction,
            num_items_in_batch=num_items_in_batch,
            **forward_options(self, CausalLM.forward, kwargs),
        )

    def create_masks_for_generate(self, *, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """Return the mask [b, tokens so far] unchanged: the forward builds the masks of its layers and caches."""
        return attention_mask

    def _get_static_cache_init_shape(self) -> None:
        """Return None, so that a static cache takes its shape from the first keys, which are this rank's heads."""

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse the paged cache of `generate_batch` and of `cache_implementation="paged"`."""
        raise UserError(
            'generate: a paged cache (cache_implementation="paged", generate_batch) is not built; leave it out, or use '
            '"static"'
        )

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *arguments: Any, **options: Any) -> Any:
        """Call transformers' own `generate`. Collective over the TP group.

        All ranks sample with the random numbers of the group's first rank, so they return the same tokens. Different
        prompts and unsupported caches are refused.
        """
        group = self.topology.tensor_group
        prompt = inputs if inputs is not None else options.get("input_ids")
        if prompt is not None and not agree_on_tokens(group, prompt):
            raise UserError("generate: the tensor parallel ranks have different prompts; give all of them the same")
        cache = options.get("cache_implementation") or ""
        if cache.startswith("offloaded") and self.device.type == "cpu":
            raise UserError(
                f'generate: cache_implementation="{cache}" moves it from an accelerator; leave it out on a CPU'
            )
        options.setdefault("disable_compile", True)  # with a static cache, generate would compile the forward on CUDA
        with random_numbers_of_first(group, self.device):
            output: Any = super().generate(inputs, *arguments, **options)  # type: ignore[misc]
        sequences = output if isinstance(output, Tensor) else output.sequences
        if not agree_on_tokens(group, sequences):
            raise RuntimeError("generate: the tensor parallel ranks ended with different tokens")
        return output
