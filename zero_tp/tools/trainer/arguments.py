"""Refuse arguments of Trainer that are not exact on tensor-parallel ranks."""

from __future__ import annotations

import os

import torch.distributed as dist
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import TrainingArguments

from zero_tp.base.errors import UserError
from zero_tp.parallel.topology import Topology

REFUSED = {
    "label_smoothing_factor": "the loss is formed without whole logits",
    "neftune_noise_alpha": "ranks would add different noise to one embedding",
    "use_liger_kernel": "its kernels replace layers of transformers' own models",
    "torch_compile": "a compiled tensor-parallel model was not compared with the plain one",
    "auto_find_batch_size": "a rank that runs out of memory leaves the others waiting",
    "save_on_each_node": "a checkpoint is one directory that all ranks see",
    "fsdp": "the model is split by its topology and ZeRO",
    "parallelism_config": "accelerate would split the model again",
    "eval_use_gather_object": "every rank of a tensor-parallel group would add the same samples",
}
"""Training arguments that are not exact here, and why."""


def check_arguments(args: TrainingArguments, tensor: int = 1) -> None:
    """Refuse arguments that are not exact on tensor-parallel ranks.

    Also connects the ranks, and checks their number.

    Args:
        tensor: TP degree.
    """
    for name, why in REFUSED.items():
        if getattr(args, name, None):
            raise UserError(f"TrainingArguments.{name}: {why}; leave it out")
    if getattr(args, "train_sampling_strategy", "random") == "batch_rebalance":
        raise UserError(
            'TrainingArguments.train_sampling_strategy: "batch_rebalance" gives each rank other '
            'samples; use "random"'
        )
    if (
        getattr(args, "lr_scheduler_type", None) in ("reduce_lr_on_plateau", "greedy")
        and args.save_strategy != "no"
    ):
        raise UserError(
            "TrainingArguments.lr_scheduler_type: a checkpoint cannot hold the state of a schedule "
            "that follows a "
            'metric; use another, or save_strategy="no"'
        )
    args.device  # noqa: B018 - connects the ranks
    world = (
        dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    )
    if args.world_size != world:
        raise UserError(
            f"TrainingArguments: accelerate counts {args.world_size} of {world} ranks, and losses "
            "would be divided "
            "by the wrong number; on a machine without accelerators give use_cpu=True"
        )
    if tensor < 1 or world % tensor:
        raise UserError(
            f"ZeroTPTrainer: tensor_parallel is {tensor}, but the number of ranks, {world}, is no "
            "multiple of it; "
            "start more with deepspeed, torchrun --nproc_per_node N or accelerate launch "
            "--multi_gpu --num_processes N"
        )


def refuse_trl(trainer: type) -> None:
    """Refuse a class that derives from one of trl's trainers."""
    # By the classes' module, because trl may not be installed.
    if any(base.__module__.partition(".")[0] == "trl" for base in trainer.__mro__):
        raise UserError(
            "trl's trainers multiply hidden states by the whole output layer, of which a rank "
            "has a shard; give "
            "ZeroTPTrainer rows that a chat template has made, with labels of -100 where there "
            "is no loss"
        )


def check_degrees(topology: Topology, tensor: int, expert: int) -> None:
    """Refuse degrees other than those of a model that is split already."""
    for name, degree, built, short in (
        ("tensor_parallel", tensor, topology.tensor, "TP"),
        ("expert_parallel", expert, topology.expert, "EP"),
    ):
        if degree not in (1, built):
            raise UserError(
                f"ZeroTPTrainer: {name} is {degree}, but the model has {short} {built}; leave "
                f"{name} out"
            )


def check_batch(args: TrainingArguments, topology: Topology) -> None:
    """Refuse a global batch in DeepSpeed's config.

    transformers would accept only one that counts every rank.
    """
    total = (
        HfDeepSpeedConfig(args.deepspeed).get_value("train_batch_size") if args.deepspeed else None
    )
    if topology.tensor > 1 and total not in (None, "auto"):
        raise UserError(
            f"train_batch_size: {total} in DeepSpeed's config: transformers compares it with a "
            "batch of all ranks, but "
            'the ranks of a tensor parallel group have the same samples; use "auto"'
        )
