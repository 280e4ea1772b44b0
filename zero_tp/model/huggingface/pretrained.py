"""`from_pretrained`, `load_state_dict` and `save_pretrained` of our models."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from zero_tp.base.errors import UserError, shown
from zero_tp.base.weight_files import resolve
from zero_tp.model.architectures.configs import config_from_directory, describe_ignored_fields
from zero_tp.model.huggingface.arguments import (
    UNSUPPORTED_IN_FROM_PRETRAINED,
    append_revision,
    refuse_arguments,
)
from zero_tp.model.parallel_model import ParallelModel, parse_dtype
from zero_tp.model.weights.export import MAX_SHARD_SIZE, save_pretrained, save_state_dict
from zero_tp.model.weights.live_weights import load_native
from zero_tp.model.weights.load import PretrainedSource
from zero_tp.parallel.layout import layout_of, stored_buffers, stored_tensors
from zero_tp.parallel.topology import Topology

HUB_OPTIONS = ("token", "cache_dir", "local_files_only", "force_download")
"""Arguments of `from_pretrained` for huggingface_hub."""
IGNORED_SAVE_OPTIONS = ("save_function", "save_peft_format", "save_original_format")
"""Arguments of transformers' `save_pretrained` without effect: there is one format and no
adapter.
"""


class PretrainedWeights(ParallelModel, PreTrainedModel):
    """The methods of a PreTrainedModel that load and save weights."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        directory: str | os.PathLike[str],
        topology: Topology | None = None,
        *,
        allow_pickle: bool = False,
        dtype: torch.dtype | str | None = None,
        attn_implementation: str | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        **options: Any,
    ) -> Any:
        """Build a model from a Hugging Face directory of safetensors; every rank reads its slices.

        Args:
            directory: the directory, or a name on the Hugging Face hub, `owner/name` or
                `owner/name@revision`.
            allow_pickle: read pickled weights where there are no safetensors, with torch's
                restricted unpickler.
            dtype: of the weights, such as "bfloat16"; by default the config's, else fp32; "auto":
                the config's, else that of the files. `torch_dtype` is another name of it.
            attn_implementation: "sdpa" or "eager".
            seed, device: those of the constructor.
            revision: of a name on the hub.
            options: `token`, `cache_dir`, `local_files_only` and `force_download` for
                huggingface_hub.
        """
        torch_dtype = options.pop("torch_dtype", None)
        dtype = torch_dtype if dtype is None else dtype
        hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
        known = (*inspect.signature(cls.from_pretrained).parameters, "torch_dtype", *HUB_OPTIONS)
        refuse_arguments(
            f"{cls.__name__}.from_pretrained", options, known, UNSUPPORTED_IN_FROM_PRETRAINED
        )
        files = resolve(append_revision(directory, revision), allow_pickle=allow_pickle, **hub)
        config = config_from_directory(files)
        if topology is None or topology.rank == 0:
            for line in describe_ignored_fields(files):
                warnings.warn(line, stacklevel=2)
        if attn_implementation not in (None, "eager", "sdpa"):
            problem = f"attn_implementation: {shown(attn_implementation)} is not built"
            raise UserError(
                f'{problem}; give "sdpa", with the fastest kernel of torch\'s that fits, or "eager"'
            )
        if attn_implementation is not None:
            config._attn_implementation = attn_implementation
        source = PretrainedSource(files, config, allow_pickle=allow_pickle, seed=seed)
        if source.new_heads:
            warnings.warn(source.describe_new_heads(), stacklevel=2)
        for line in source.left_out:
            warnings.warn(line, stacklevel=2)
        if dtype == "auto":
            dtype = config.dtype or next(
                tensor.dtype for tensor in source.tensors.values() if tensor.is_floating_point()
            )
        return cls(config, topology, source=source, seed=seed, dtype=dtype, device=device)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights by our names, or by the native class's, which `save_pretrained` writes.

        Trainer loads the files of its own checkpoints one by one. Native names need a model that is
        not split.
        """
        own = dict(self.named_parameters(remove_duplicate=False)) | dict(stored_buffers(self))
        # Our names are loaded as by torch, and ParallelModel refuses `assign`.
        if assign or not state_dict or state_dict.keys() & own.keys():
            return super().load_state_dict(state_dict, strict, assign)
        if self._is_split:
            raise UserError(
                "load_state_dict: a rank of a split model holds shards; open the directory with "
                "from_pretrained(directory, topology)"
            )
        missing, unexpected = load_native(own, self._config_with_ties(), state_dict)
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
        dtype: torch.dtype | str | None = None,
        safe_serialization: bool = True,
        distributed_checkpoint: bool = False,
        **options: Any,
    ) -> None:
        """Write the native Hugging Face model.

        Every rank calls it, and global rank 0 writes. With `is_main_process` or `state_dict`, which
        Trainer and accelerate pass, one rank may call it alone and write, unless the weights must
        be gathered first: without a `state_dict`, from the ranks of TP or ZeRO-3.

        Args:
            is_main_process: whether this rank writes.
            state_dict: whole weights by our names, instead of the model's; an empty one, from
                Trainer, writes only the config.
            max_shard_size: such as "5GB".
            dtype: of the written weights; by default the model's.
        """
        refused = {"variant": variant, "safe_serialization": not safe_serialization, **options}
        refused |= {
            "distributed_checkpoint": distributed_checkpoint,
            "push_to_hub": push_to_hub,
            "token": token,
        }
        for name, value in refused.items():
            if value and name not in IGNORED_SAVE_OPTIONS:
                raise UserError(
                    f"save_pretrained: {name} is not built: it writes one directory of safetensors"
                )
        self.check_config()
        parameters = dict(stored_tensors(self))
        config = self._config_with_ties(state_dict)
        for name, parameter in parameters.items() if state_dict is None else ():
            layout_of(parameter, f"save_pretrained: {name}")
        shared: dict[str, Any] = {
            "generation": self.generation_config,
            "max_shard_size": str(max_shard_size),
        }
        shared["dtype"] = parse_dtype(dtype)
        if state_dict is not None and self._is_split:
            raise UserError(
                "save_pretrained: state_dict holds one rank's shards of a split model; leave it "
                "out, and "
                "call it on every rank"
            )
        # A shard's owner must take part, so one rank cannot write alone.
        sharded = self._is_split or any(
            hasattr(parameter, "ds_tensor") for parameter in parameters.values()
        )
        if state_dict is None and (sharded or is_main_process is None):
            merge = is_main_process is not None
            save_pretrained(directory, parameters, config, self.topology, merge=merge, **shared)
        elif (
            is_main_process is not False and state_dict == {}
        ):  # DeepSpeed's own checkpoint has the weights
            config.save_pretrained(directory)
        elif is_main_process is not False:
            save_state_dict(directory, config, state_dict or parameters, **shared)

    @property
    def _is_split(self) -> bool:
        """Return whether a rank holds only a part of the weights."""
        return self.topology.tensor > 1 or self.topology.expert > 1

    def _config_with_ties(self, state_dict: Mapping[str, Tensor] | None = None) -> PretrainedConfig:
        """Return a config that says whether the weights are tied.

        It is the model's own config, or a copy if someone has changed that.

        Args:
            state_dict: whole weights by our names, which count instead of the model's; FSDP
                replaces parameters.
        """
        tied = self.tied
        if state_dict:
            (alias, source), *_ = self._tied_weights_keys.items()
            differs = alias in state_dict and not torch.equal(state_dict[alias], state_dict[source])
            tied = self.config.tie_word_embeddings and not differs
        if self.config.tie_word_embeddings == tied:
            return self.config
        config = copy.deepcopy(self.config)
        config.tie_word_embeddings = tied
        return config
