"""Small models of transformers, and handles of their parts, for changes after they are built."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tests.support.encoders import rows_for
from tests.support.families import ENCODERS, EXPERTS, FAMILIES, model_sizes
from tests.support.native import native_model, perturbed


class Inapplicable(Exception):
    """The drawn model has no such part."""


class LiveModel:
    """A small model, random everywhere, in training mode; and handles of its parts."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        family = self.random.choice([*FAMILIES, *EXPERTS])
        self.fields = {**model_sizes(seed, family), "attn_implementation": "sdpa"}
        if family in ("encoder, norms before", "sinks and clamps"):
            self.fields["attn_implementation"] = "eager"
        self.causal = family not in ENCODERS
        if self.causal:
            self.fields["tie_word_embeddings"] = self.random.random() < 0.5
        self.fields["pad_token_id"] = self.random.choice([None, 1])
        self.build(seed)

    def build(self, seed: int, **changes: Any) -> None:
        torch.manual_seed(seed)
        self.model = perturbed(native_model(AutoConfig.for_model(**self.fields | changes))).train()

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def embedding(self) -> Any:
        return self.model.get_input_embeddings()

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def layers(self) -> nn.ModuleList:
        count = self.config.num_hidden_layers
        return next(
            part
            for part in self.model.modules()
            if isinstance(part, nn.ModuleList) and len(part) == count
        )

    def require(self, is_applicable: bool) -> None:
        if not is_applicable:
            raise Inapplicable

    def any_module(self, chosen: Callable[[nn.Module], bool]) -> tuple[str, Any]:
        named = [(name, part) for name, part in self.model.named_modules() if name and chosen(part)]
        self.require(bool(named))
        return self.random.choice(named)

    def batch(self) -> dict[str, Tensor]:
        if not self.causal:
            return rows_for(
                {"type_vocab_size": 2, "architectures": None, **self.fields},
                self.random.randrange(99),
            )
        generator = torch.Generator().manual_seed(self.random.randrange(99))
        tokens = torch.randint(self.fields["vocab_size"], (3, 16), generator=generator)
        tokens[0, 3], tokens[1, 4] = 1, 2
        return {"input_ids": tokens, "labels": tokens}
