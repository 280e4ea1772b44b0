"""ParallelModel, the base of all models: a Transformer with heads, split over the TP group.

huggingface/ derives PreTrainedModels from them. Importing that class here would add a second to
each rank's start.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from zero_tp.base.errors import UserError, shown
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.fields import FIXED_IN_EVERY_CONFIG
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.position import LearnedEmbedding
from zero_tp.model.transformer import Transformer, TransformerLayer
from zero_tp.model.wrapper_checks import WrapperChecks
from zero_tp.model.z_loss import ZLossWeights, check_z_losses
from zero_tp.parallel.embedding import VocabParallelEmbedding
from zero_tp.parallel.gradients import GradientHooks
from zero_tp.parallel.layout import copy_layout, whole_shape
from zero_tp.parallel.parameter import ParameterMaker, SeededInit, WeightSource
from zero_tp.parallel.random import RandomStreams
from zero_tp.parallel.topology import Topology

UNREAD_BY_BUILT_MODELS = {"tie_word_embeddings", "pad_token_id", "initializer_range"}
"""Fields of a config that count only when a model is built."""


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Parse a name such as "bfloat16". For None and "auto" return None: the caller takes the
    config's.
    """
    if dtype is None or dtype == "auto":
        return None
    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise UserError(
            f'dtype: {shown(dtype)} is no floating dtype of torch; give one, such as "bfloat16", '
            'or "auto"'
        )
    return parsed


class ParallelModel(WrapperChecks, ABC):
    """A Transformer with heads, split over the topology's TP group.

    Args:
        config: a Hugging Face config of a supported model_type.
        topology: the TP × DP grid; by default one process.
        seed: of the initial weights and of dropout. Initial weights are the same for every TP size.
        source: of the weights, instead of the seed.
        dtype: of the weights, such as "bfloat16"; by default, and with "auto", the config's, else
            fp32.
        device: of the weights; "meta" makes no data.
        random_device: of dropout's generators; by default that of the weights, and the CPU for
            "meta".
        spec: by default that of the config's architecture; another one may have fewer layers, or
            what a live model changed after it was built.

    Attributes:
        generation_config: the weight source's, else derived from the config; None for encoders.
        gradient_hooks: sum partial gradients over TP in every backward.
    """

    causal: ClassVar[bool]
    """Whether the model's architectures are causal decoders."""
    counts_choices = False
    """Whether forwards count the experts that tokens choose (`engine/bias_update.py` sets it)."""
    z_losses = ZLossWeights()
    """Of the training loss (`set_z_losses`)."""
    generation_config: Any = None  # transformers' classes declare its type

    def __init__(self, config: PretrainedConfig, topology: Topology | None = None, **options: Any):
        super().__init__()
        self.config = config
        if self.causal:
            self.generation_config = GenerationConfig.from_model_config(config)
        self._build(topology, **options)

    def _build(
        self,
        topology: Topology | None = None,
        *,
        seed: int = 0,
        source: WeightSource | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        random_device: torch.device | str | None = None,
        spec: TransformerSpec | None = None,
    ) -> None:
        config = self.config
        self.topology = topology or Topology()
        self.topology.check_backend(torch.device(device))
        self.seed = seed
        self.architecture = architecture_of(config)
        # A copy, because values such as `rope_parameters` can be changed in place.
        self._config_as_built = copy.deepcopy(self._config_fields())
        self.spec = spec or self.architecture.spec(config)
        if self.spec.causal != self.causal:
            kind = "a causal decoder" if self.spec.causal else "no causal decoder"
            raise UserError(f"{type(self).__name__}: {config.model_type} is {kind}")
        # Before any parameter is made, so that a size that TP cannot split costs no memory and no
        # time.
        self.spec.check(self.topology.tensor, self.topology.expert, self.topology.data)
        self._random_device = random_device
        if random_device is None:
            # The meta device has no generator.
            random_device = "cpu" if torch.device(device).type == "meta" else device
        self.streams = RandomStreams(self.topology, seed, random_device)
        weight_dtype = parse_dtype(dtype) or parse_dtype(config.dtype) or torch.float32
        make = ParameterMaker(self.topology, source or SeededInit(seed), weight_dtype, device)
        self.transformer = Transformer(make.child("transformer"), self.spec, self.streams)
        self._make_heads(make)
        # Registered before DeepSpeed builds an engine around the model.
        self.gradient_hooks = GradientHooks(self, self.topology.tensor_group)
        self.generation_config = getattr(source, "generation", None) or self.generation_config

    def set_rope(self, config: PretrainedConfig) -> None:
        """Rotate by the `rope_parameters` of a config that is otherwise the model's."""
        rotaries = self.architecture.spec(config).rotaries
        self.config.rope_parameters = copy.deepcopy(config.rope_parameters)
        self._config_as_built = copy.deepcopy(self._config_fields())
        self.spec = replace(self.spec, rotaries=rotaries)
        self.transformer.spec = self.spec
        for layer, rotary in zip(self.transformer.layers, rotaries, strict=True):
            assert isinstance(layer, TransformerLayer)
            layer.attention.rotary = rotary

    def _config_fields(self) -> dict[str, Any]:
        """Return the config's fields that the layers read when they were built.

        They must not change afterwards. A change of the others has no effect on transformers' built
        models either.
        """
        fields = self.architecture.fields
        values = vars(self.config)
        read = {
            *fields.sizes,
            *fields.positive,
            *fields.choices,
            *fields.read,
            *fields.fixed,
            *FIXED_IN_EVERY_CONFIG,
        }
        names = sorted((read & values.keys()) - UNREAD_BY_BUILT_MODELS)
        present = {name: values[name] for name in names if values[name] is not None}
        return {"eager attention": self.config._attn_implementation == "eager", **present}

    def check_config(self) -> None:
        """Check that the config still describes the built layers; transformers' models read some
        fields in a forward.

        Raises:
            UserError: names a field that was changed.
        """
        fields = self._config_fields()
        built = self._config_as_built
        if fields == built:
            return
        name = next(name for name in (*fields, *built) if fields.get(name) != built.get(name))
        values = f"{shown(built.get(name))} to {shown(fields.get(name))}"
        raise UserError(
            f"config: {name} changed from {values} after the model was built, and its layers keep "
            "the old value; "
            "change it back, or build another model"
        )

    @property
    def tied(self) -> bool:
        """Return whether the output layer is the word embedding, whatever the config says now."""
        heads: Any = self
        return heads.get_output_embeddings().weight is self.transformer.embedding.word.weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the model on this rank. The copy is on the same topology, and has layouts and
        gradient hooks of its own.

        Raises:
            UserError: ZeRO-3 has partitioned the parameters.
        """
        if any(hasattr(parameter, "ds_tensor") for parameter in self.parameters()):
            raise UserError(
                "copy.deepcopy: ZeRO-3 has partitioned the parameters, and a rank has a part of "
                "each; copy the model "
                "before training starts, or open its save_pretrained directory"
            )
        topology = self.topology
        # A copy communicates with the same ranks, in the same process groups.
        groups = (
            topology.tensor_group,
            topology.data_group,
            topology.expert_group,
            topology.expert_data_group,
        )
        memo |= {id(shared): shared for shared in (topology, *groups)}
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        # torch copies a parameter's data, but neither attributes nor hooks.
        for name, parameter in self.named_parameters():
            copy_layout(parameter, copied.get_parameter(name))
        copied.gradient_hooks = GradientHooks(copied, topology.tensor_group)
        return copied

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy weights into the parameters. `assign` is refused, because it would replace them."""
        if assign:
            raise UserError(
                "load_state_dict: assign=True would replace parameters by tensors without layouts "
                "and gradient hooks; "
                "leave it out, which copies the values"
            )
        return super().load_state_dict(state_dict, strict)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Refuse, because it would replace the parameters of a model on the meta device."""
        raise UserError(
            "to_empty: it would replace parameters by tensors without layouts and gradient hooks; "
            "build the model with "
            f"device={shown(str(device))}"
        )

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        """Move or cast the model. On another device the random streams restart: dropout draws
        from the device's own.
        """
        moved = super()._apply(*arguments, **options)
        device = next(self.parameters()).device
        self.topology.check_backend(device)
        follows_weights = self._random_device is None and device.type != "meta"
        if follows_weights and device != self.streams.generator_device:
            # In place, because dropout modules and recomputation hold them.
            self.streams.__init__(self.topology, self.seed, device)  # type: ignore[misc]
        return moved

    @abstractmethod
    def _make_heads(self, make: ParameterMaker) -> None:
        """Make the heads, which turn hidden states into losses."""

    def set_z_losses(self, z_loss: float, router_z_loss: float) -> None:
        """Set the weights of the z-losses that training adds to the loss.

        Raises:
            UserError: a weight is negative or not finite, or the model has no routers.
        """
        weights = ZLossWeights(z_loss, router_z_loss)
        check_z_losses(self.spec, self.config.model_type, weights)
        self.z_losses = weights

    @property
    def active_z_losses(self) -> ZLossWeights:
        """Return the weights of this forward's z-losses: an evaluation has none."""
        return self.z_losses if self.training else ZLossWeights()

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of an output's metrics other than the loss; they have the loss's
        divisors.
        """
        return ()

    @abstractmethod
    def metric_sums(
        self, output: Any, arguments: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (sum, count) of each metric of an output with `reduction="none"`, fp64 and int64.

        The loss is the metric "loss", or the sum of the metrics whose names end in "loss".

        Args:
            arguments: the forward's arguments.
        """

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding.word

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count the whole model's parameters, on any number of ranks, as transformers does."""
        # transformers leaves out every nn.Embedding, positions and token types among them.
        kinds = (VocabParallelEmbedding, LearnedEmbedding) if exclude_embeddings else ()
        excluded = {module.weight for module in self.modules() if isinstance(module, kinds)}
        return sum(
            math.prod(whole_shape(parameter))
            for parameter in self.parameters()
            if (parameter.requires_grad or not only_trainable) and parameter not in excluded
        )

    def _runs_sequence_parallel(self, length: int) -> bool:
        """Return whether this forward uses SP. Without gradients, a length that is no multiple
        of t turns it off.
        """
        topology = self.topology
        if not topology.sequence or length % topology.tensor == 0:
            return topology.sequence
        if torch.is_grad_enabled():
            raise UserError(
                f"sequence length {length} does not divide by tensor parallel size "
                f"{topology.tensor}, which training "
                "under sequence parallelism needs; pad it, or set zero_tp.parallel.sequence to "
                "false"
            )
        # A model built for SP draws its dropouts from the per-rank streams. Without SP all ranks
        # have the whole residual stream, and each would drop other elements of it.
        if self.training and any(vars(self.spec.dropouts).values()):
            raise UserError(
                f"sequence length {length} does not divide by tensor parallel size "
                f"{topology.tensor} and dropout is "
                "on; call model.eval() first"
            )
        return False

    def _check_ids(self, what: str, ids: Tensor, *, ignore: int | None = None) -> None:
        # Under TP a token id that no rank holds would silently look up zeros, and as a label get a
        # logit of zero.
        inside = (ids >= 0) & (ids < self.spec.vocabulary)
        if ignore is not None:
            inside |= ids == ignore
        allowed = f"[0, vocab_size = {self.spec.vocabulary})" + (
            "" if ignore is None else f" or {ignore}"
        )
        # Asynchronous: reading the result here would wait for the device in each forward.
        torch._assert_async(inside.all(), f"{what} must be in {allowed}")

    def _check_call(self, output: str, reduction: str, return_dict: bool | None) -> None:
        self.check_config()
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction {reduction!r} is neither 'mean' nor 'none'")
        if return_dict is False:
            raise ValueError(f"return_dict=False: outputs are {output}; take what you need by name")
        topology = self.topology
        has_groups = topology.tensor_group is not None or topology.tensor == 1
        if not has_groups or (topology.expert > 1 and topology.expert_group is None):
            raise RuntimeError(
                "the topology only describes a grid; a forward needs its process groups"
            )

    def _check_length(self, length: int) -> None:
        if self.spec.position == "learned" and length > self.spec.positions:
            raise UserError(
                f"sequence length {length} exceeds the model's {self.spec.positions} positions"
            )


def check_shape(name: str, tensor: Tensor | None, rows: tuple[int, ...], columns: int) -> None:
    """Check that an argument, if given, has the shape [one of `rows`, columns]."""
    if tensor is not None and (
        tensor.ndim != 2 or tensor.shape[0] not in rows or tensor.shape[1] != columns
    ):
        raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {(rows[-1], columns)}")
