"""torch's Muon and AdamW on transformers' class in one process, and our engine on its rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.support.compare import grid
from tests.support.decoders import LENGTH
from tests.support.native import Native
from zero_tp.engine.engine import TrainingEngine
from zero_tp.model.architectures import architecture_of, file_tensors, weights_of

STEPS, ROWS = 5, 8
BY_ADAMW = re.compile(
    r"(wte|wpe|embed_tokens|embed_in|embed_out|lm_head|mlp\.gate|block_sparse_moe\.gate"
    r"|router\.layer|mlp\.router|shared_expert_gate|\w+_embeddings|seq_relationship)\.weight$"
)


KERNELS = "conv1d"
"""Of a convolution, which are no matrices."""
QKV = re.compile(
    r"(?<!linear_attn\.)(q_proj|q_b_proj|k_proj|v_proj|qkv_proj|c_attn|query_key_value)\.weight$"
)


@contextmanager
def products_in_fp32() -> Iterator[None]:
    """torch's own Newton-Schulz, as in our fp32 runs: it takes a copy instead of a rounding.

    torch 2.13 calls `Tensor.bfloat16`, 2.15 `Tensor.to` with the dtype.
    """
    names = SimpleNamespace(**(vars(torch) | {"bfloat16": torch.float32}))
    with (
        patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone),
        patch.object(torch.optim._muon, "torch", names),
    ):
        yield


EXPERT = ", expert "


class TorchOptimizers:
    """`torch.optim.Muon` and `torch.optim.AdamW` on the tensors of a model's files.

    Muon takes matrices only: the experts' are views of the class's stacked tensors, and heads views
    of Q, K and V.

    Args:
        params: of our Muon; with `betas`, those of AdamW, which then updates everything.
    """

    def __init__(self, model: Any, params: dict[str, Any], clip: float):
        self.model, self.clip = model, clip
        self.weights = weights_of(model.config)
        self.spec = architecture_of(model.config).spec(model.config)
        self.per_head = bool(params.get("per_head"))
        values = {
            name: value.detach()
            for name, value in model.named_parameters()
            if value.requires_grad  # a router's bias is frozen
        }
        self.leaves = {
            name: torch.nn.Parameter(value) for name, value in self.matrices(values).items()
        }
        groups: list[list[torch.nn.Parameter]] = [[], [], []]
        for name, leaf in self.leaves.items():
            by_adamw = "betas" in params or BY_ADAMW.search(name)
            # The biases of a layer's experts are one tensor.
            is_vector = leaf.dim() < 2 or name.endswith("bias") or KERNELS in name
            kind = 2 if is_vector else 1 if by_adamw else 0
            groups[kind].append(leaf)
        muon = {name: value for name, value in params.items() if name not in ("adamw", "per_head")}
        shared = {"lr": params["lr"], "weight_decay": params.get("weight_decay", 0.1)}
        adamw = shared | params.get("adamw", params)
        decayed = {"params": groups[1], "weight_decay": adamw.pop("weight_decay")}
        self.muon = None if "betas" in params else torch.optim.Muon(groups[0], **muon)
        self.adamw = torch.optim.AdamW(
            [decayed, {"params": groups[2], "weight_decay": 0.0}], **adamw
        )

    def matrices(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """A model's tensors as its files have them, and with `per_head` each head's, as views; of
        experts that a file stacks each one's.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in file_tensors(self.weights, values).items():
            stacked = {f"{name}{EXPERT}{number}": expert for number, expert in enumerate(tensor)}
            is_stacked = tensor.dim() == 3 and KERNELS not in name
            tensors |= stacked if is_stacked else {name: tensor}
        if not self.per_head:
            return tensors
        split: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            # GPT-2's Conv1D has a head's outputs in columns.
            dim = 1 if "c_attn" in name else 0
            heads = [tensor]
            if "kv_b_proj" in name and self.spec.latent is not None:
                value = self.spec.latent.value
                keys = self.spec.head_size - self.spec.latent.rotated
                heads = tensor.split([keys, value] * self.spec.heads)
            elif QKV.search(name):
                heads = tensor.split(self.spec.head_size, dim)
            split |= {f"{name}{number or ''}": head for number, head in enumerate(heads)}
        return split

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Kind of state → the states of parameters that have it, by our names."""
        kinds: dict[str, dict[str, Tensor]] = {}
        for name, leaf in self.leaves.items():
            state = (self.muon and self.muon.state.get(leaf)) or self.adamw.state[leaf]
            name, _, expert = name.partition(EXPERT)
            for kind in state.keys() - {"step"}:
                tensors = kinds.setdefault(kind, {})
                if expert:  # in the order of their numbers
                    others = [tensors[name]] if name in tensors else []
                    tensors[name] = torch.cat([*others, state[kind][None]])
                else:
                    tensors[name] = state[kind]
        return {
            kind: {
                weight.our_name: weight.from_hf(tensors)
                for weight in self.weights
                if all(name in tensors for name in weight.names)
            }
            for kind, tensors in kinds.items()
        }

    def step(
        self,
        computed: Any = None,
        perturbation: torch.Generator | None = None,
        error: float = 2**-9,
    ) -> None:
        """Update the weights.

        Args:
            computed: a model with the gradients, in bf16; by default the model in fp32 itself.
            perturbation: draws the signs of relative errors in gradients.
            error: their size, by default the largest of a rounding to bf16.
        """
        gradients = {
            name: torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.grad is None
            else parameter.grad.float()
            for name, parameter in (computed or self.model).named_parameters()
            if parameter.requires_grad
        }
        if perturbation is not None:
            for gradient in gradients.values():
                signs = torch.randint(0, 2, gradient.shape, generator=perturbation) * 2 - 1
                gradient.mul_(1 + signs * error)
        for name, gradient in self.matrices(gradients).items():
            self.leaves[name].grad = gradient.clone()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.leaves.values(), self.clip)
        if self.muon is not None:
            with nullcontext() if computed is not None else products_in_fp32():
                self.muon.step()
        self.adamw.step()


def engine_of(
    reference: Any,
    tensor: int,
    sequence: bool,
    stage: int,
    params: dict[str, Any],
    clip: float,
    **changes: Any,
) -> Any:
    topology = grid(tensor, sequence)
    settings = {
        "train_micro_batch_size_per_gpu": ROWS // topology.data // 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clip,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **changes,
    }
    return TrainingEngine.from_dict(
        reference.config, topology, settings, seed=0, source=Native(reference)
    )


def batches(fields: dict[str, Any], seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(fields["vocab_size"], (ROWS, LENGTH), generator=draw) for _ in range(STEPS)
    ]


def pieces_of(tokens: Tensor, topology: Any) -> list[tuple[Tensor, Tensor]]:
    """(inputs, shifted targets) of each micro-batch of all replicas: two a replica, because each
    has a balancing loss of its own.
    """
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    count = 2 * topology.data
    return list(zip(tokens.chunk(count), targets.chunk(count), strict=True))


def own_pieces(tokens: Tensor, topology: Any) -> list[tuple[Tensor, Tensor]]:
    return pieces_of(tokens, topology)[2 * topology.data_rank : 2 * topology.data_rank + 2]


def loss_of(model: Any, tokens: Tensor, topology: Any) -> Tensor:
    losses = [model(input_ids=p, labels=p).loss for p, _ in pieces_of(tokens, topology)]
    return torch.stack(losses).mean()
