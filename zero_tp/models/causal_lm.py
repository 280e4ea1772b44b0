"""CausalLM is the model that trains: a decoder with a language-model head, split over the TP group.

models/wrapper.py gives it the face of a PreTrainedModel. It stays without, as importing that class takes a second of
each rank's start.

s sequence, b batch, v vocabulary, t TP size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from zero_tp.constants import IGNORE_INDEX
from zero_tp.errors import UserError
from zero_tp.models.architectures import architecture_of
from zero_tp.models.context import Pieces
from zero_tp.models.head import OutputLayer
from zero_tp.models.spec import TransformerSpec
from zero_tp.models.transformer import Transformer
from zero_tp.parallel.gradients import GradientHooks
from zero_tp.parallel.layout import whole_shape
from zero_tp.parallel.parameter import Drawn, ParameterMaker, WeightSource
from zero_tp.parallel.random import RandomStreams
from zero_tp.topology import Topology

WITHOUT_GENERATORS = ("meta", "sim")
"""Devices that draw nothing: tensors without data, and the planner's simulated accelerator."""


@dataclass
class ScoredOutput(CausalLMOutputWithPast):
    """This output is what a forward returns.

    Attributes:
        greedy: whether each label is the model's first choice, of the shape of `loss`; only of `reduction="none"`.
    """

    greedy: Tensor | None = None


def shifted(labels: Tensor) -> Tensor:
    """Return the token that each position predicts, from labels as Hugging Face gives them (`labels = input_ids`).
    [b, s] → [b, s]."""
    moved = torch.full_like(labels, IGNORE_INDEX)
    moved[:, :-1] = labels[:, 1:]
    return moved


class CausalLM(nn.Module):
    """This model is a decoder with a language-model head, split over the topology's TP group.

    Args:
        config: a Hugging Face config of a supported model_type.
        topology: the TP × DP grid; by default one process.
        seed: of the initial weights and of dropout. Initial weights are the same for every TP size.
        source: where the weights come from instead of the seed.
        dtype: of the weights; by default the config's, else fp32.
        device: where the weights live; "meta" makes no data.
        spec: what is built, by default what the config's architecture says; another one may have fewer layers.

    Attributes:
        config: as it was given. generation_config: what it implies, or the source has.
        gradient_hooks: what sums partial gradients over TP, in any backward.

    Raises:
        UserError: an architecture, a field or a size that is not supported.
    """

    def __init__(self, config: PretrainedConfig, topology: Topology | None = None, **options: Any):
        super().__init__()
        self.config = config
        self.generation_config = GenerationConfig.from_model_config(config)
        self._build(topology, **options)

    def _build(
        self,
        topology: Topology | None = None,
        *,
        seed: int = 0,
        source: WeightSource | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        spec: TransformerSpec | None = None,
    ) -> None:
        config = self.config
        self.topology = topology or Topology()
        self.architecture = architecture_of(config)
        self.spec = spec or self.architecture.spec(config)
        self.spec.check(self.topology.tensor)
        draws = torch.device(device).type not in WITHOUT_GENERATORS
        self.streams = RandomStreams(self.topology, seed, device if draws else "cpu")
        chosen = dtype or config.dtype or torch.float32
        assert isinstance(chosen, torch.dtype)
        make = ParameterMaker(self.topology, source or Drawn(seed), chosen, device)
        self.transformer = Transformer(make.child("transformer"), self.spec, self.streams)
        self.head = OutputLayer(make.child("head"), self.spec, self.transformer.embedding.word.weight)
        # Here, so that every backward is right, and before DeepSpeed makes an engine around the model.
        self.gradient_hooks = GradientHooks(self, self.topology.tensor_group)
        self.generation_config = getattr(source, "generation", None) or self.generation_config

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        """Register a hook as any module does.

        Raises:
            UserError: the hook is that of a DeepSpeed engine which does not know the model's topology.
        """
        _refuse_engine_without_topology(hook, self.topology)
        return super().register_forward_pre_hook(hook, **options)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> tuple[str, ...]:
        """Name nothing; torch's DistributedDataParallel asks when it is made around a module.

        Raises:
            UserError: the model is split.
        """
        _refuse_data_parallel_wrapper(self.topology)
        return ()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding.word

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count the elements of parameters as transformers does, those of the whole model on however many ranks."""
        embeddings = set(self.get_input_embeddings().parameters()) if exclude_embeddings else set()
        return sum(
            math.prod(whole_shape(parameter))
            for parameter in self.parameters()
            if (parameter.requires_grad or not only_trainable) and parameter not in embeddings
        )

    def _runs_sequence_parallel(self, length: int) -> bool:
        """Decide on SP for this forward: without gradients a length that does not divide runs without it."""
        topology = self.topology
        if not topology.sequence or length % topology.tensor == 0:
            return topology.sequence
        if torch.is_grad_enabled():
            raise UserError(
                f"sequence length {length} does not divide by tensor parallel size {topology.tensor}, which training "
                "under sequence parallelism needs; pad it, or set zero_tp.parallel.sequence to false"
            )
        if self.training and any(vars(self.spec.dropouts).values()):
            raise UserError(
                f"sequence length {length} does not divide by tensor parallel size {topology.tensor} and dropout is "
                "on; call model.eval() first"
            )
        return False

    def _check_ids(self, what: str, ids: Tensor, *, ignore: int | None = None) -> None:
        # Under TP a token that no rank holds would silently look up zeros, a label be given a logit of zero.
        inside = (ids >= 0) & (ids < self.spec.vocabulary)
        if ignore is not None:
            inside |= ids == ignore
        allowed = f"[0, vocab_size = {self.spec.vocabulary})" + ("" if ignore is None else f" or {ignore}")
        torch._assert_async(inside.all(), f"{what} must be in {allowed}")

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
        shift_labels: Tensor | None = None,
        return_logits: bool | None = None,
        return_dict: bool | None = None,
        reduction: Literal["mean", "none"] = "mean",
        num_items_in_batch: Tensor | float | None = None,
    ) -> ScoredOutput:
        """Return the loss and, when asked or when there are no labels, logits.

        Args:
            input_ids: [b, s].
            attention_mask: [b, all tokens so far], 1 for a token and 0 for padding.
            labels: [b, s] as Hugging Face defines them: shifted inside, -100 is ignored.
            position_ids: [b or 1, s]; by default those after the cached tokens.
            document_ids: [b, s], numbers of the documents packed in a row; a token sees its own document alone, which
                are its neighbours of the same number. Best on the host: an accelerator would be waited for.
            past_key_values: keys and values of the tokens before, which gets the present ones too.
            use_cache: start such a cache where none is given, and return it.
            logits_to_keep: logits of the last so many positions, or of those it lists; 0: of all.
            shift_labels: [b, s], already shifted: the token that each position predicts. Wins over `labels`. With
                `reduction="none"` also [b, s, k]: k alternatives at each position.
            return_logits: also return logits [b, s, v], whole on every TP rank and without gradient.
            reduction: `none` gives each token's loss, for evaluation, without gradient; ignored labels cost nothing in
                the output layer.
            num_items_in_batch: what the sum of the losses is divided by, instead of the number of labels that are not
                ignored: the forwards of one step can share a number.

        Returns:
            `loss`: the mean over the labels that are not ignored, fp32, equal on all TP ranks; with `none` of the
            labels' shape, 0 where a label is ignored, and `greedy` beside it.

        Raises:
            UserError: s does not divide by t while gradients are taken under SP, or exceeds learned positions, a
                cache is used while gradients are taken, or documents may each need rotary frequencies of their own.
            ValueError: a shape that does not fit, an unknown reduction, documents beside a cache, `return_dict=False`.
            RuntimeError: a token id or label outside the vocabulary (on an accelerator: when it is next synchronised).
        """
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction {reduction!r}: it is 'mean' or 'none'")
        if return_dict is False:
            raise ValueError("return_dict=False: outputs are CausalLMOutputWithPast; take what you need by name")
        if self.topology.tensor > 1 and self.topology.tensor_group is None:
            raise RuntimeError("the topology only describes a grid; a forward needs its process groups")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        self._check_shapes(input_ids, attention_mask, position_ids, document_ids, past_key_values)
        self._check_ids("token ids", input_ids)
        sequence = self._runs_sequence_parallel(input_ids.shape[1])
        targets = shift_labels if shift_labels is not None else shifted(labels) if labels is not None else None
        if targets is not None:
            if targets.shape[:2] != input_ids.shape or targets.ndim > (3 if reduction == "none" else 2):
                raise ValueError(f"labels are {tuple(targets.shape)}, input ids {tuple(input_ids.shape)}")
            self._check_ids("labels", targets, ignore=IGNORE_INDEX)
        hidden = self.transformer(
            input_ids.t().contiguous(),
            attention_mask,
            positions=position_ids,
            pieces=None if document_ids is None else Pieces.of(document_ids, input_ids.device),
            cache=past_key_values,
            sequence=sequence,
        )
        loss = logits = greedy = None
        if targets is not None:
            labelled = targets.transpose(0, 1).contiguous()
            if reduction == "none":
                scores = self.head(hidden, labelled, sequence=sequence, each_token=True)
                loss, greedy = (score.transpose(0, 1) for score in scores)
            else:
                loss = self.head(hidden, labelled, sequence=sequence, divisor=num_items_in_batch)
        if return_logits or targets is None:
            logits = self.head(hidden, None, sequence=sequence, keep=logits_to_keep).transpose(0, 1)
        return ScoredOutput(loss=loss, logits=logits, past_key_values=past_key_values, greedy=greedy)

    def _check_shapes(
        self,
        ids: Tensor,
        padding: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        cache: Cache | None,
    ) -> None:
        batch, length = ids.shape
        past = int(cache.get_seq_length()) if cache is not None else 0
        if cache is not None and torch.is_grad_enabled():
            raise UserError("a KV cache serves generation, not training: wrap the forward in torch.no_grad()")
        if cache is not None and documents is not None:
            raise ValueError("document_ids beside a cache: give packed documents in one forward")
        rotary = self.spec.rotary
        if documents is not None and rotary is not None and rotary.by_length and length > self.spec.positions:
            raise UserError(
                f"document_ids: under rope_type 'dynamic' the documents of a row of {length} tokens may each need "
                f"frequencies of their own; give rows of at most {self.spec.positions} tokens"
            )
        if self.spec.position == "learned" and past + length > self.spec.positions:
            raise UserError(f"sequence length {past + length} exceeds the model's {self.spec.positions} positions")
        shapes = {"attention_mask": (padding, past + length), "position_ids": (positions, length)}
        for name, (given, columns) in {**shapes, "document_ids": (documents, length)}.items():
            rows = (1, batch) if name == "position_ids" else (batch,)
            if given is not None and (given.ndim != 2 or given.shape[0] not in rows or given.shape[1] != columns):
                raise ValueError(f"{name} is {tuple(given.shape)}, expected {(batch, columns)}")


# ---- engines that others build around a split model without knowing its topology are refused -------------------------


def _refuse_engine_without_topology(hook: Any, topology: Topology) -> None:
    """Refuse the forward hook of a DeepSpeed engine that knows another topology than the model.

    DeepSpeed's engine registers a hook on the module that it is made around. `Accelerator.prepare` and `Trainer` call
    `deepspeed.initialize` without an mpu. Its data-parallel group is then the whole world, and it averages the
    gradients of different tensor parallel shards, without an error.

    Raises:
        UserError: the hook is that of an engine which knows another topology than the model, and the model is split.
    """
    free = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    held = dict(zip(free, getattr(hook, "__closure__", None) or (), strict=False))
    engine = held["self"].cell_contents if "self" in held else None
    if topology.tensor == 1 or not type(engine).__module__.startswith("deepspeed."):
        return
    if getattr(engine, "mpu", None) is not topology:
        raise _refusal(topology, "a DeepSpeed engine that does not know its topology")


def _refuse_data_parallel_wrapper(topology: Topology) -> None:
    """Refuse torch's DistributedDataParallel, which averages gradients over the whole world.

    Raises:
        UserError: the model is split.
    """
    if topology.tensor > 1:
        raise _refusal(topology, "torch's DistributedDataParallel, which does not know its topology")


def _refusal(topology: Topology, where: str) -> UserError:
    return UserError(
        f"a model of tensor parallel size {topology.tensor} in {where}, as Accelerator.prepare and Trainer make it, "
        "would average the gradients of different shards; train it with launch/pretrain.py, call "
        "deepspeed.initialize(mpu=topology), or use tensor parallel size 1"
    )
