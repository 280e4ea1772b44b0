"""Models have a Hugging Face face: ZeroTPForCausalLM and ZeroTPForPreTraining are PreTrainedModels whose config is the
native one, and pass the contract that transformers' Trainer and accelerate have with a model."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from zero_tp.activations.memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.errors import UserError
from zero_tp.models.architectures import architecture_of
from zero_tp.models.architectures.configs import pretrained_config
from zero_tp.models.backbone import Backbone
from zero_tp.models.causal_lm import CausalLM
from zero_tp.models.masked_lm import FIGURES, MaskedLM
from zero_tp.models.model import ParallelModel
from zero_tp.models.vocabulary import resize_vocabulary, set_word_embedding
from zero_tp.parallel.agreement import agree_on_tokens, random_numbers_of_first
from zero_tp.parallel.layout import whole_shape
from zero_tp.topology import Topology
from zero_tp.validation import validate
from zero_tp.weights.export import MAX_SHARD_SIZE, save_pretrained, save_tensors
from zero_tp.weights.files import resolve
from zero_tp.weights.live import LiveSource, load_native
from zero_tp.weights.load import PretrainedSource

WITHOUT_EFFECT = ("save_function", "save_peft_format", "save_original_format")
"""Arguments of transformers' `save_pretrained` that change nothing here: there is one format, and no adapter."""


def as_trainer_reads(forward: Callable[..., Any], *hidden: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a method the signature of `forward` without some arguments, which it still takes.

    Trainer takes every argument with "label" in its name for a label that each batch of an evaluation must have.
    """
    shown = inspect.signature(forward)
    signature = shown.replace(parameters=[each for name, each in shown.parameters.items() if name not in hidden])

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(method, forward)
        del method.__wrapped__  # type: ignore[attr-defined]
        method.__signature__ = signature  # type: ignore[attr-defined]
        return method

    return decorate


class HuggingFaceModel(ParallelModel, PreTrainedModel):
    """This is what transformers wants of a model, and both kinds of ours share."""

    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["SequentialLayer", "ParallelLayer", "PostNormLayer"]  # noqa: RUF012 - transformers' own
    _activations: ActivationMemory | None = None

    def __init__(self, config: PretrainedConfig, topology: Topology | None = None, **options: Any):
        PreTrainedModel.__init__(self, config)
        self._build(topology, **options)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the layers' constructors have filled their parameters, the same for every TP size."""

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Tell Trainer whether a step's loss is one sum over `num_items_in_batch`; else it takes means of means."""
        return not self.spec.sentence_head

    def _scored(self, options: dict[str, Any]) -> bool:
        """Tell whether a forward is one of an evaluation that wants logits beside the loss, as transformers gives."""
        asked = options.get("return_logits") is None and options.get("reduction", "mean") == "mean"
        return asked and not self.training and not torch.is_grad_enabled()

    # ---- embeddings ----------------------------------------------------------------------------------------------

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Write the rows of another embedding into this one, which a tied output layer shares.

        Args:
            value: torch's Embedding of the whole vocabulary, or the word embedding of a model such as this one.

        Raises:
            UserError: it has other sizes.
        """
        set_word_embedding(self, value)

    def resize_token_embeddings(  # type: ignore[override]
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Give the model a row for each of so many tokens, and say so in its config. Collective over the TP group.

        The first rows stay; the parameters are new ones, so that optimizers are made afterwards.

        Args:
            new_num_tokens: by default as many as there are.
            pad_to_multiple_of: round their number up. TP sizes need no rounding: what a rank pads is no token.
            mean_resizing: a new row is the mean of the old ones; otherwise it is drawn as at the model's start.

        Returns:
            The word embedding.

        Raises:
            UserError: the size is not positive, or a ZeRO-3 engine has the parameters.
        """
        before = whole_shape(self.get_input_embeddings().weight)[0]  # type: ignore[arg-type]
        tokens = before if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            tokens = -(-tokens // pad_to_multiple_of) * pad_to_multiple_of
        if tokens != before:
            policy = self._activations.policy if self._activations is not None else None
            resize_vocabulary(self, tokens, by_mean=mean_resizing)
            if policy is not None:
                self._activations = ActivationMemory(self, policy, {}, self.device)
        return self.get_input_embeddings()

    # ---- activations ---------------------------------------------------------------------------------------------

    @property
    def is_activation_checkpointing(self) -> bool:
        return self._activations is not None

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute in backward by a policy of `zero_tp.recompute`, `full` by default (docs/memory.md).

        Args:
            activation_checkpointing_kwargs: the policy's keys, such as `{"mode": "selective"}`. `use_reentrant` is
                taken and changes nothing: there is one mechanism, which is exact with every ZeRO stage.
            every_n_layers: recompute every nth layer only.
            offload: keep the inputs of recomputed layers in the host's memory.

        Raises:
            ConfigError: another key, or keys that do not fit.
        """
        fields = {"mode": "full", **(activation_checkpointing_kwargs or {})}
        fields.pop("use_reentrant", None)
        if every_n_layers != 1:
            fields.setdefault("every", every_n_layers)
        policy = validate(RecomputePolicy, fields, "gradient_checkpointing_kwargs")
        self.activation_checkpointing_disable()
        if policy.mode != "none":
            self._activations = ActivationMemory(self, policy, {"cpu_checkpointing": offload}, self.device)

    def activation_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        if self._activations is not None:
            self._activations.begin_micro_batch(-1)  # one that keeps everything
            self._activations = None

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Do what `activation_checkpointing_enable` does, of which this is transformers' older name."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    gradient_checkpointing_disable = activation_checkpointing_disable

    # ---- weights -------------------------------------------------------------------------------------------------

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
            directory: or a name on the Hugging Face hub, `owner/name` or `owner/name@revision`.
            allow_pickle: read pickled weights where there are no safetensors, with torch's restricted unpickler.
            options: `seed`, `dtype`, `device` of the constructor.

        Raises:
            UserError: no such model there, an unsupported architecture, or weights that do not fit it.
        """
        found = resolve(os.fspath(directory), allow_pickle=allow_pickle).directory
        config, seed = pretrained_config(found), options.get("seed", 0)
        source = PretrainedSource(found, config, allow_pickle=allow_pickle, seed=seed)
        if source.drawn:
            warnings.warn(source.told(), stacklevel=2)
        return cls(config, topology, source=source, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights by our names, or by those of the native class, which `save_pretrained` writes.

        Trainer reads the files that it has saved so, one after another.

        Raises:
            UserError: native names for a model that is split.
            RuntimeError: `strict`, and names are missing or unexpected.
        """
        own = dict(self.named_parameters(remove_duplicate=False))
        if not state_dict or state_dict.keys() & own.keys():
            return super().load_state_dict(state_dict, strict, assign)
        if self.topology.tensor > 1:
            raise UserError(
                "load_state_dict: a rank of a split model holds shards; open the directory with "
                "from_pretrained(directory, topology)"
            )
        missing, unexpected = load_native(own, self.config, state_dict)
        if strict and (missing or unexpected):
            raise RuntimeError(f"{type(self).__name__}: missing {missing}, unexpected {unexpected}")
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def save_pretrained(  # type: ignore[override]
        self,
        directory: str | os.PathLike[str],
        is_main_process: bool | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: str | int = MAX_SHARD_SIZE,
        variant: str | None = None,
        token: str | bool | None = None,
        *,
        dtype: torch.dtype | None = None,
        safe_serialization: bool = True,
        distributed_checkpoint: bool = False,
        **options: Any,
    ) -> None:
        """Write the native Hugging Face model.

        By default every rank calls it, and global rank 0 writes while the others wait for it. Called as Trainer and
        accelerate do, with `is_main_process` or `state_dict`, each rank is by itself as long as it has all weights;
        where they are split or partitioned and no `state_dict` is given, every rank has to call it then too.

        Args:
            is_main_process: whether this rank writes. state_dict: the whole weights by our names, which some rank
                gathered, instead of the model's; an empty one writes the config alone, as Trainer means by it.
            max_shard_size: such as "5GB". dtype: of the written weights; by default the model's.

        Raises:
            UserError: what is not written exactly, a `state_dict` of a split model's shards among it; see
                `write_native`.
        """
        for name in WITHOUT_EFFECT:
            options.pop(name, None)
        refused = {"variant": variant, "safe_serialization": not safe_serialization, **options}
        refused |= {"distributed_checkpoint": distributed_checkpoint, "push_to_hub": push_to_hub, "token": token}
        for name, given in refused.items():
            if given:
                raise UserError(f"save_pretrained: {name} is not built: it writes one directory of safetensors")
        parameters = dict(self.named_parameters())
        common: dict[str, Any] = {"generation": self.generation_config, "max_shard_size": str(max_shard_size)}
        if state_dict is not None and self.topology.tensor > 1:
            raise UserError(
                "save_pretrained: state_dict holds one rank's shards of a split model; leave it out, and "
                "call it on every rank"
            )
        together = self.topology.tensor > 1 or any(hasattr(each, "ds_tensor") for each in parameters.values())
        if state_dict is None and (together or is_main_process is None):
            among = is_main_process is not None
            save_pretrained(directory, parameters, self.config, self.topology, dtype=dtype, among=among, **common)
        elif is_main_process is not False and state_dict == {}:  # DeepSpeed's own checkpoint has the weights
            self.config.save_pretrained(directory)
        elif is_main_process is not False:
            save_tensors(directory, self.config, state_dict or parameters, dtype=dtype, **common)


class ZeroTPForCausalLM(CausalLM, HuggingFaceModel, GenerationMixin):
    """This model is a `CausalLM`, which says its arguments, as transformers knows models.

    In an evaluation its forward gives logits beside the loss, as transformers' models do.
    """

    _tied_weights_keys = {"head.weight": "transformer.embedding.word.weight"}  # noqa: RUF012

    @property
    def base_model(self) -> Any:
        return Backbone(self)

    @as_trainer_reads(CausalLM.forward, "shift_labels")
    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self._scored(options):
            options["return_logits"] = True
        return CausalLM.forward(self, *arguments, **options)

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
        if prompt is not None and not agree_on_tokens(group, prompt):
            raise UserError(
                "generate: the tensor parallel ranks were given different prompts; give all of them the same"
            )
        with random_numbers_of_first(group, self.device):
            output: Any = super().generate(inputs, *arguments, **options)  # type: ignore[misc]
        sequences = output if isinstance(output, Tensor) else output.sequences
        if not agree_on_tokens(group, sequences):
            raise RuntimeError("generate: the tensor parallel ranks ended with different tokens")
        return output


class ZeroTPForPreTraining(MaskedLM, HuggingFaceModel):
    """This model is a `MaskedLM`, which says its arguments, as transformers knows models.

    A config whose `architectures` names the class without a sentence head (`BertForMaskedLM`) has none. In an
    evaluation its forward gives what transformers' models do: the loss and the logits.
    """

    _tied_weights_keys = {"head.decoder.weight": "transformer.embedding.word.weight"}  # noqa: RUF012

    @as_trainer_reads(MaskedLM.forward, "label_places")
    def forward(self, *arguments: Any, **options: Any) -> Any:
        if not self._scored(options):
            return MaskedLM.forward(self, *arguments, **options)
        output = MaskedLM.forward(self, *arguments, **{**options, "return_logits": True})
        return type(output)(**{name: each for name, each in output.items() if name not in FIGURES})


def parallel_model(
    native: Any, topology: Topology, *, seed: int = 0, device: torch.device | str = "cpu"
) -> HuggingFaceModel:
    """Return ours with the weights of a live model of transformers' own class. Each rank takes its shards.

    Args:
        native: the same on every rank.

    Raises:
        UserError: an architecture without a table, or sizes that do not fit the topology.
    """
    chosen = ZeroTPForCausalLM if architecture_of(native.config).spec(native.config).causal else ZeroTPForPreTraining
    found: HuggingFaceModel = chosen(
        native.config, topology, source=LiveSource(native), seed=seed, dtype=native.dtype, device=device
    )
    return found
