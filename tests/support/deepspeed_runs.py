"""Plain DeepSpeed runs of transformers' models on the ranks of a pool, whose checkpoints are read
and written.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.settings import fp16_supported

BETAS, EPS = (0.85, 0.97), 1e-7
LEARNING_RATE, DECAY = 4e-3, 0.125


@dataclass(frozen=True)
class PlainRun:
    """How DeepSpeed trains a model.

    Attributes:
        config: Hugging Face's, as a dict with its model_type.
        frozen: ends of names that are not trained.
        grouped: vectors are a group of their own, without decay.
        wrapped: the model is in a module of the client's.
        backwards: the optimizer has the parameters from the last to the first.
        cosine: transformers' schedule, with this many steps.
        settings: more of DeepSpeed's config.
    """

    config: dict[str, Any]
    stage: int = 1
    dtype: str = "fp32"
    seed: int = 0
    frozen: tuple[str, ...] = ()
    grouped: bool = False
    wrapped: bool = False
    backwards: bool = False
    cosine: int | None = None
    accumulation: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    def deepspeed_config(self, replicas: int, batch: int) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_batch_size": batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": LEARNING_RATE,
                    "betas": BETAS,
                    "eps": EPS,
                    "weight_decay": DECAY,
                    "torch_adam": True,
                },
            },
            "zero_optimization": {"stage": self.stage},
        }
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        if self.dtype == "fp16":
            config["fp16"] |= {"initial_scale_power": 4, "loss_scale_window": 3}
        return config | self.settings


class Wrapped(nn.Module):
    """A client's own module around a model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.net = model

    def forward(self, tokens: Tensor) -> Any:
        return self.net(tokens)


def llama(chance: random.Random, **changes: Any) -> dict[str, Any]:
    """Fields of a Llama of drawn sizes, of which no matrix divides by the ranks as a rule."""
    groups, queries = chance.choice((1, 2, 3)), chance.choice((1, 2, 3))
    heads = groups * queries
    return {
        "model_type": "llama",
        "num_hidden_layers": chance.choice((1, 2, 3)),
        "hidden_size": heads * chance.choice((3, 5, 7)),
        "head_dim": 2 * chance.choice((1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": chance.randrange(9, 30),
        "vocab_size": chance.randrange(31, 90),
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        **changes,
    }


def hf_config(fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    values = dict(fields)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def build(run: PlainRun, batch: int, **changes: Any) -> Any:
    """DeepSpeed's engine around the model. Collective."""
    import deepspeed
    import torch.distributed as dist

    from tests.support.native import native_model, perturbed

    torch.manual_seed(run.seed)
    model: Any = perturbed(native_model(hf_config(run.config)), 0.02)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(run.frozen) if run.frozen else True)
    if run.wrapped:
        model = Wrapped(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: Any = trained[::-1] if run.backwards else trained
    if run.grouped:
        # The vectors first, so that the order of groups is not that of the model.
        groups = [
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY},
        ]
    config = run.deepspeed_config(dist.get_world_size(), batch) | changes
    schedule = None if run.cosine is None else partial(_cosine, run.cosine)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=config, lr_scheduler=schedule
    )
    return engine


def _cosine(steps: int, optimizer: Any) -> Any:
    from transformers import get_scheduler

    return get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=steps)


def loss_of(engine: Any, rows: Tensor) -> Tensor:
    logits = engine(rows[:, :-1]).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(engine: Any, steps: Sequence[Tensor]) -> list[float]:
    """The mean loss of each global batch [batch, length + 1], of all ranks."""
    import torch.distributed as dist

    losses = []
    for rows in steps:
        own = rows.chunk(dist.get_world_size())[dist.get_rank()]
        total = torch.zeros(())
        for micro in own.chunk(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, micro)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / engine.gradient_accumulation_steps()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def rows_of(run: PlainRun, seed: int, steps: int, batch: int, length: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = (batch, length + 1)
    return [
        torch.randint(0, run.config["vocab_size"], size, generator=generator) for _ in range(steps)
    ]


@fp16_supported()
def train_and_save(
    run: PlainRun, folder: str, steps: Sequence[Tensor], client: dict[str, Any] | None = None
) -> dict[str, dict[str, Tensor]]:
    """Train on the batches and save; the states, none without ZeRO."""
    engine = build(run, len(steps[0]))
    train(engine, steps)
    engine.save_checkpoint(folder, client_state=client or {})
    return states_of(engine) if run.stage else {}


def states_of(engine: Any) -> dict[str, dict[str, Tensor]]:
    """Name → whole master and moments of the parameters that are trained. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    whole = safe_get_full_optimizer_state
    if engine.zero_optimization_stage() < 3:
        whole = partial(_whole_moment, engine.optimizer)
    states = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            states[name] = {"master": safe_get_full_fp32_param(parameter).clone()}
            for kind in ("exp_avg", "exp_avg_sq"):
                states[name][kind] = whole(parameter, kind).clone()
    return states


def _whole_moment(optimizer: Any, parameter: Tensor, kind: str) -> Tensor:
    """A moment of stages 1 and 2, where DeepSpeed's own getter misses those of some groups."""
    import torch.distributed as dist

    whole = torch.zeros(parameter.numel())
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is not None:
        part, own = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
        # BF16_Optimizer has the first attribute, the optimizer of stages 1 and 2 the second.
        flats = getattr(optimizer, "fp32_groups_flat_partition", None)
        flats = flats or optimizer.single_partition_of_fp32_groups
        flat = flats[mapping.param_group_index]
        state = optimizer.optimizer.state[flat][kind]
        whole[part.start : part.start + part.numel] = state[own.start : own.start + own.numel]
    dist.all_reduce(whole)
    return whole.view(parameter.shape)


@fp16_supported()
def load_and_train(
    run: PlainRun, folder: str, steps: Sequence[Tensor], tag: str | None = None, **changes: Any
) -> dict[str, Any]:
    """Load a checkpoint and train; the losses and rates of the steps, and the states after them."""
    engine = build(run, len(steps[0]), **changes)
    path, _ = engine.load_checkpoint(folder, tag=tag)
    assert path is not None
    before = states_of(engine)
    number = engine.global_steps
    losses, rates = [], []
    for rows in steps:
        rates.append(float(engine.optimizer.param_groups[0]["lr"]))
        losses += train(engine, [rows])
    states = {"before": before, "after": states_of(engine)}
    return {"steps": number, "losses": losses, "rates": rates, **states}


def write_hf_config(run: PlainRun, folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(hf_config(run.config).to_dict()))
    return path


def reference_weights(folder: Path) -> dict[str, Tensor]:
    """What DeepSpeed's own `zero_to_fp32` reads."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)))


def universal(source: Path, output: Path) -> Path:
    """Convert the folder of a step with DeepSpeed's own tool."""
    words = ["--input_folder", source, "--output_folder", output, "--inject_missing_state"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
            *map(str, words),
            *("--num_extract_workers", "1", "--num_merge_workers", "1"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return output
