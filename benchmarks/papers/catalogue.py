"""All results of the papers that `python -m benchmarks.papers` reproduces."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Paper:
    """A paper, which has a module of this package.

    Attributes:
        results: the module's functions, with dashes for underscores → descriptions.
    """

    title: str
    results: dict[str, str]


PAPERS = {
    "zero": Paper(
        "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (arXiv 1910.02054)",
        {
            "model-states": "bytes of parameters, gradients and optimizer states by stage (table "
            "1, figure 1)",
            "largest-model": "the largest model that trains in a given memory, by stage",
            "residual": "ZeRO-R: P_a, C_B and M_D on and off: bytes, and fragmentation",
            "volume": "what a rank sends in a step, by stage",
        },
    ),
    "megatron": Paper(
        "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism "
        "(arXiv 1909.08053)",
        {
            "sizes": "parameters of every model (table 1)",
            "scaling": "weak scaling, strong scaling, attention heads (figure 5, appendix D)",
            "learning": "loss, perplexity and last words by size (section 5.3)",
            "same-model": "the same losses on TP 1, 2 and 4",
            "norm-order": "what BERTs of both orders of layer norm learn at growing depth (figure "
            "7)",
        },
    ),
    "recomputation": Paper(
        "Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198)",
        {
            "figure-1": "model states and activations of one device, from 22 B to 1 T",
            "table-2": "bytes of activations that one layer keeps, by technique",
            "figure-7": "share of activations that each technique leaves",
            "table-4": "forward and backward of one layer, by technique",
            "table-5": "time of an iteration, MFU and HFU, from 22 B to 1 T",
            "appendix-c": "memory and time where some micro-batches keep all their activations",
        },
    ),
    "memory": Paper(
        "Where training memory goes",
        {
            "over-time": "memory over the first and later steps, by category, of GPT-2 and Llama",
            "by-length": "activations against sequence length and batch, with attention fused and "
            "not",
            "by-dtype": "model states a parameter, in fp32 and 16 bits",
            "by-recomputation": "activations and peak by what is recomputed, of GPT-2 and Llama",
        },
    ),
}


def names() -> list[str]:
    """Return the names of all results: a paper's, a dash, and the result's."""
    return [f"{paper}-{result}" for paper, each in PAPERS.items() for result in each.results]


def reproduction(name: str) -> Callable[..., Any]:
    """Return the function `(*, measured: bool) -> Reproduction` of a result."""
    paper, result = name.split("-", 1)
    function: Callable[..., Any] = getattr(
        importlib.import_module(f"benchmarks.papers.{paper}"), result.replace("-", "_")
    )
    return function
