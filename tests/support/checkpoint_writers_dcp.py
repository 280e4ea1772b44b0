"""Write distributed checkpoints with the trainers' own packages, in a process of its own.

    python -m tests.support.checkpoint_writers_dcp TRAINER SETTINGS.json FOLDER

The packages of checkpoint_packages.txt are installed without their requirements; modules that they
import and do not need here, such as loggers, are replaced. Logits of the settings' tokens are
written beside the checkpoint. Ranks of torchrun cut the parameters, as in a real run.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import MutableSequence
from functools import partial
from importlib.abc import Loader
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class _AnyClass(type):
    """The class of a replaced module's names: they have any attribute and any base."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (Exception,), {})


class _ReplacedModule(types.ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012 - as the import system has it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (Exception,), {})


class Replaced(Loader):
    """Finds modules of some names, and what is in them, and gives modules that hold anything."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{replaced}.") for replaced in self.names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _ReplacedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def olmo_core(settings: dict[str, Any], folder: Path) -> None:
    """Write a step as the trainer's checkpointer does, and the config as its callback does.

    Args:
        settings: `factory` is the name of a method of TransformerConfig, `arguments` its arguments.
    """
    sys.meta_path.append(Replaced("bettermap", "cached_path", "rich"))
    checkpoint = importlib.import_module("olmo_core.train.checkpoint")
    configs = importlib.import_module("olmo_core.nn.transformer.config")
    attention = importlib.import_module("olmo_core.nn.attention")
    arguments = dict(settings["arguments"])
    if "block_name" in arguments:
        arguments["block_name"] = configs.TransformerBlockType(arguments["block_name"])
    if "sliding_window" in arguments:
        window = attention.SlidingWindowAttentionConfig(**arguments["sliding_window"])
        arguments["sliding_window"] = window
    config = getattr(configs.TransformerConfig, settings["factory"])(**arguments)
    torch.manual_seed(settings["seed"])
    model = config.build()
    model.init_weights(device=torch.device("cpu"))
    disturb_norms(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.tensor(settings["tokens"])
    model(tokens).float().logsumexp(-1).mean().backward()
    optimizer.step()
    write_logits(model, tokens, folder)
    sharded = shard_over_ranks(model)
    states = importlib.import_module("torch.distributed.checkpoint.state_dict")
    options = states.StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)

    class TrainModule:
        """What the checkpointer asks of TransformerTrainModule."""

        def state_dict_to_save(self) -> dict[str, Any]:
            content = {"model": states.get_model_state_dict(model, options=options)}
            if not sharded:
                content["optim"] = states.get_optimizer_state_dict(
                    model, optimizer, options=options
                )
            return content

    step = folder / "step3"
    checkpoint.Checkpointer(folder / "work").save(step, TrainModule(), {"global_step": 3})
    length = {"max_sequence_length": settings["length"]}
    written = {"model": config.as_config_dict(), "train_module": length}
    (step / "config.json").write_text(json.dumps(written))


def torchtitan(settings: dict[str, Any], folder: Path) -> None:
    """Write a step with the keys of the trainer's CheckpointManager.

    Args:
        settings: `family` is llama3 or qwen3; `layers` are the arguments of its builder of layers.
    """
    absent = ("datasets", "docstring_parser", "einops", "tensorboard", "torch_checkpointing")
    kernels = "torchtitan.distributed.minimal_async_ep"
    sys.meta_path.insert(0, Replaced(*absent, kernels, "torchdata", "tyro", "wandb"))
    models = importlib.import_module(f"torchtitan.models.{settings['family']}")
    common = importlib.import_module("torchtitan.models.common")
    attention = importlib.import_module("torchtitan.models.common.attention")
    checkpoint = importlib.import_module("torchtitan.components.checkpoint")
    optimizers = importlib.import_module("torchtitan.components.optimizer")
    sizes = settings["layers"]
    head_size = sizes.get("head_dim") or sizes["dim"] // sizes["n_heads"]
    is_llama = settings["family"] == "llama3"
    rope = common.ComplexRoPE if is_llama else common.CosSinRoPE
    rotary = rope.Config(dim=head_size, max_seq_len=64, theta=settings["theta"])
    layers = getattr(models, f"_build_{settings['family']}_layers")
    built = layers(**sizes, attn_backend="flex", rope=rotary)
    for layer in built:
        # Flex attention needs masks of documents; of one document it is this.
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    dim, rows = sizes["dim"], settings["vocabulary"]
    drawn = {"weight": partial(torch.nn.init.normal_, std=0.05)}
    epsilon = 1e-5 if is_llama else 1e-6
    config = getattr(models, "Llama3Model" if is_llama else "Qwen3Model").Config(
        dim=dim,
        vocab_size=rows,
        tok_embeddings=common.Embedding.Config(
            num_embeddings=rows, embedding_dim=dim, param_init=drawn
        ),
        norm=common.RMSNorm.Config(normalized_shape=dim, eps=epsilon, param_init=drawn),
        lm_head=common.Linear.Config(in_features=dim, out_features=rows, param_init=drawn),
        layers=built,
        enable_weight_tying=settings["tied"],
    )
    torch.manual_seed(settings["seed"])
    model = config.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.init_states = None
    disturb_norms(model)
    for module in model.modules():
        if isinstance(module, common.RoPE):
            module.cache = module._precompute_cache()
    container = optimizers.default_adamw(lr=1e-3).build(model_parts=[model])
    tokens = torch.tensor(settings["tokens"])
    model(tokens).float().logsumexp(-1).mean().backward()
    container.step()
    write_logits(model, tokens, folder)
    others = {} if shard_over_ranks(model) else {"optimizer": container}
    states = checkpoint.ModelWrapper(model).state_dict()
    train = {"step": 5, "ntokens_seen": 40}
    content = {**states, **others, "train_state": train}
    importlib.import_module("torch.distributed.checkpoint").save(
        content, checkpoint_id=folder / "step-5"
    )


def write_logits(model: torch.nn.Module, tokens: torch.Tensor, folder: Path) -> None:
    """Write what the trained model computes, before it is cut over ranks."""
    with torch.no_grad():
        torch.save(model.eval()(tokens), folder / "logits.pt")


def shard_over_ranks(model: torch.nn.Module) -> bool:
    """Cut the model's parameters over the ranks if there are several, as FSDP does."""
    if not torch.distributed.is_initialized():
        return False
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return True


def disturb_norms(model: torch.nn.Module) -> None:
    """Draw norms, which are all ones at first."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)


if __name__ == "__main__":
    trainer, source, target = sys.argv[1:]
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    with open(source) as file:
        globals()[trainer.replace("-", "_")](json.load(file), Path(target))
