"""The methods of a PreTrainedModel that Trainer and accelerate call, but weights and forward."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from zero_tp.base.errors import UserError, shown
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.base.validation import validate
from zero_tp.model.architectures import architecture_of, native_class_of
from zero_tp.model.huggingface.pretrained import PretrainedWeights
from zero_tp.model.huggingface.vocabulary import resize_vocabulary
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.model.transformer import LAYERS
from zero_tp.parallel.layout import whole_shape
from zero_tp.parallel.topology import Topology


def _loss_type(class_name: str) -> str | None:
    """Return `loss_type` of a class of transformers, by the rule of its PreTrainedModel.

    Trainer counts the labels of a step by it: GPT2LMHeadModel has none, so each row's first label
    counts too.
    """
    return next(iter(re.findall("|".join(LOSS_MAPPING), class_name)), None)


class HuggingFaceModel(PretrainedWeights):
    """The methods of a PreTrainedModel that decoders and encoders share."""

    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    # transformers' name: accelerate keeps each on one device.
    _no_split_modules = [layer.__name__ for layer in LAYERS.values()]  # noqa: RUF012
    _activations: ActivationMemory | None = None
    _checkpointing: tuple[RecomputePolicy, ActivationCheckpointing] | None = None

    def __init__(self, config: PretrainedConfig, topology: Topology | None = None, **options: Any):
        # transformers refuses it by name where it is not computed.
        self._supports_flex_attn = architecture_of(config).spec(config).has_flex_core
        # Past ParallelModel's, whose `super().__init__()` would call this one without a config.
        PreTrainedModel.__init__(self, config)
        self._build(topology, **options)
        self.loss_type: Any = _loss_type(native_class_of(config))
        # Last, because it collects the tied weights and more from finished submodules.
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: layers initialise their parameters when they are built, equally for every
        TP size.
        """

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Accept any choice of transformers' expert kernels. None of them is used."""
        return requested_experts or str(super().get_correct_experts_implementation(None))

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Return whether losses are sums divided by `num_items_in_batch`. If not, Trainer
        averages micro-batches.
        """
        return not self.spec.sentence_head

    def _wants_logits(self, options: Mapping[str, Any]) -> bool:
        """Return whether a forward with these options returns logits: in an evaluation, as
        transformers' models do, unless it asks for losses alone (`reduction="none"`).
        """
        asks_for_losses = (
            options.get("return_logits") is not None or options.get("reduction", "mean") != "mean"
        )
        # In a training step nobody reads the logits: [b, s, v], whole on every TP rank.
        return not (asks_for_losses or self.training or torch.is_grad_enabled())

    def _undefined_means(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the divisors of an evaluation, with nan instead of 0: as in torch, no labels have
        no mean.

        In training a micro-batch without labels has the loss 0, because other micro-batches of its
        step may have some.
        """
        if self.training or torch.is_grad_enabled():
            return {}
        divisors = {name: options.get(name) for name in ("num_items_in_batch", "num_rows_in_batch")}
        return {
            name: torch.where(torch.as_tensor(divisor) == 0, math.nan, divisor)
            for name, divisor in divisors.items()
            if divisor is not None
        }

    def resize_token_embeddings(  # type: ignore[override]
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Resize the vocabulary and return the word embedding. Collective over the TP group.

        The first rows stay. Parameters are replaced, so create optimizers afterwards.

        Args:
            new_num_tokens: by default the present number.
            pad_to_multiple_of: round the number up. TP does not need it.
            mean_resizing: a new row is the mean of the old rows; otherwise it is initialised from
                the seed.
        """
        before = whole_shape(self.get_input_embeddings().weight)[0]  # type: ignore[arg-type]
        tokens = before if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            if pad_to_multiple_of < 1:
                raise UserError(
                    f"pad_to_multiple_of: {pad_to_multiple_of}; give 1 or more, or leave it out"
                )
            tokens = -(-tokens // pad_to_multiple_of) * pad_to_multiple_of
        if tokens != before:
            resize_vocabulary(self, tokens, by_mean=mean_resizing)
            if self._checkpointing is not None:  # the layers are new
                self._activations = ActivationMemory(self, *self._checkpointing, self.device)
        return self.get_input_embeddings()

    @property
    def is_activation_checkpointing(self) -> bool:
        return self._activations is not None

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute activations in backward, all of them by default (docs/training.md).

        `gradient_checkpointing_enable`, transformers' old name, calls it.

        Args:
            activation_checkpointing_kwargs: the policy's keys, such as `{"mode": "selective"}`.
                `use_reentrant` is ignored.
            every_n_layers: recompute every nth layer only.
            offload: keep the inputs of recomputed layers in the host's memory.
        """
        fields = {"mode": "full", **(activation_checkpointing_kwargs or {})}
        fields.pop("use_reentrant", None)
        if every_n_layers != 1 and fields.setdefault("every", every_n_layers) != every_n_layers:
            raise UserError(
                f"every_n_layers: {every_n_layers}, but every is {shown(fields['every'])}; give "
                "one of them"
            )
        policy = validate(RecomputePolicy, fields, "gradient_checkpointing_kwargs")
        beyond = f"the model has {self.spec.layers} layers; use a smaller one"
        for name, is_wrong, reason in (
            (
                "offload",
                offload and policy.mode != "full",
                f'"{policy.mode}" keeps no inputs of layers; use "full"',
            ),
            ("layers", (policy.layers or 0) > self.spec.layers, beyond),
            ("every", (policy.every or 0) > self.spec.layers, beyond),
            (
                "keep_micro_batches",
                policy.keep_micro_batches > 0,
                "only a run counts a step's micro-batches; use 0",
            ),
        ):
            if is_wrong:
                raise UserError(f"gradient_checkpointing_kwargs: {name}: {reason}")
        self.activation_checkpointing_disable()
        if policy.mode != "none":
            self._checkpointing = policy, ActivationCheckpointing(cpu_checkpointing=offload)
            self._activations = ActivationMemory(self, *self._checkpointing, self.device)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        """Move or cast the model; offloading of recomputed layers' inputs depends on the device."""
        before = self.device
        moved = super()._apply(*arguments, **options)
        if (
            self.device != before
            and self._activations is not None
            and self._checkpointing is not None
        ):
            self._activations.remove()
            self._activations = ActivationMemory(self, *self._checkpointing, self.device)
        return moved

    def activation_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        if self._activations is not None:
            self._activations.remove()
            self._activations = self._checkpointing = None
