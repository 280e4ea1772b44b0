"""`ZeroTPTrainer(z_loss=…, router_z_loss=…)` against plain Trainer whose loss adds both by autograd
on the logits of transformers' own class.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, Trainer

from tests.support.compare import check_close
from tests.support.experts import fields
from tests.support.native import native_model, perturbed
from tests.support.pools import Pools
from tests.support.trainer_scripts import (
    FIELDS,
    ROWS,
    collate,
    deepspeed,
    save_model,
    script,
)
from tests.support.z_losses import recorded_router_logits, router_z_loss, sum_of_token_z_losses
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.model.causal_lm import next_tokens
from zero_tp.tools.trainer import ZeroTPTrainer

TOKEN, ROUTER = 0.03, 0.05
EXPERTS: dict[str, Any] = fields(
    num_local_experts=4,
    num_hidden_layers=2,
    vocab_size=101,
    max_position_embeddings=64,
    # Each micro-batch has a load-balancing loss of its own, so it depends on the grid.
    output_router_logits=False,
)
SHORTEST = 6
"""Tokens of the shortest row of the script."""


class PlainZLosses(Trainer):
    """transformers' Trainer with both z-losses; that of routers is the mean of a step's
    micro-batches.
    """

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any
    ) -> Any:
        with recorded_router_logits(model) as routers:
            loss, output = super().compute_loss(model, inputs, True, **options)
        if model.training:
            z_loss = sum_of_token_z_losses(output.logits, next_tokens(inputs["labels"]))
            loss = loss + TOKEN * z_loss / options["num_items_in_batch"]
            if routers:
                each = router_z_loss(routers, inputs["attention_mask"])
                loss = loss + ROUTER * each / self.current_gradient_accumulation_steps
        return (loss, output) if return_outputs else loss


def collate_short(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Without padding, so that the mean over a micro-batch's tokens does not depend on the grid."""
    return {name: part[:, :SHORTEST] for name, part in collate(rows).items()}


def save_experts(folder: Path) -> str:
    config = AutoConfig.for_model(**EXPERTS)
    torch.manual_seed(3)
    perturbed(native_model(config)).save_pretrained(folder)
    return str(folder)


def train(
    directory: str, folder: str, tensor: int, stage: int, routers: float, **options: Any
) -> list[dict[str, float]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        weights: dict[str, Any] = {"z_loss": TOKEN, "router_z_loss": routers}
        history, _ = script(
            partial(ZeroTPTrainer, tensor_parallel=tensor, **weights),
            "causal",
            directory,
            folder,
            ROWS // 2 // (2 // tensor),
            2,
            deepspeed=deepspeed(stage),
            per_device_eval_batch_size=2 * tensor,
            **options,
        )
        return history
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@THOROUGH
@pytest.mark.parametrize(
    ("kind", "tensor", "stage"),
    [("causal", 1, 2), ("causal", 2, 1), ("experts", 2, 1), ("short experts", 1, 2)],
)
def test_the_same_script_gives_the_same(
    ranks: Pools, tmp_path: Path, kind: str, tensor: int, stage: int
) -> None:
    """Losses, norms, validations, which have no z-loss, and the weights after four steps."""
    start = tmp_path / "start"
    has_experts = kind != "causal"
    directory = save_experts(start) if has_experts else str(save_model("causal", start))
    options: dict[str, Any] = {"collator": collate_short} if kind == "short experts" else {}
    plain = tmp_path / "plain"
    expected, _ = script(
        PlainZLosses,
        "causal",
        directory,
        str(plain),
        ROWS // 2,
        2,
        per_device_eval_batch_size=4,
        **options,
    )
    arguments = directory, str(tmp_path / "ours"), tensor, stage, ROUTER if has_experts else 0.0
    for history in ranks(2).run(train, *arguments, timeout=90, **options):
        assert [sorted(line) for line in history] == [sorted(line) for line in expected]
        for line, wanted in zip(history, expected, strict=True):
            assert line == pytest.approx(wanted, rel=1e-5), (line, wanted)
    check_close(
        load_file(tmp_path / "ours" / "model" / "model.safetensors"),
        load_file(plain / "model" / "model.safetensors"),
    )


def refusal(directory: str, folder: str, *arguments: Any) -> str:
    with pytest.raises(UserError) as refused:
        train(directory, folder, *arguments)
    return str(refused.value)


@THOROUGH
def test_a_weight_of_routers_that_a_model_lacks_is_refused(ranks: Pools, tmp_path: Path) -> None:
    directory = str(save_model("causal", tmp_path / "start"))
    name = FIELDS["causal"]["model_type"]
    for found in ranks(2).run(refusal, directory, str(tmp_path), 2, 1, ROUTER):
        assert found == f"router_z_loss: 0.05, but a {name} has no experts; leave it out"
