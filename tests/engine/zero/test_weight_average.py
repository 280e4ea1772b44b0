"""The average of a run's weights against torch's `AveragedModel` around transformers' class with
torch's optimizers in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.compare import check_close, grid
from tests.support.decoders import decoder
from tests.support.experts import fields
from tests.support.native import Native
from tests.support.parallel_run import optimizer_tensors
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings
from tests.support.torch_optimizers import ROWS, TorchOptimizers, batches, loss_of, own_pieces
from tests.tiers import in_tiers
from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.zero.states import EMA

DECAY = 0.8
ADAMW: dict[str, Any] = {"lr": 4e-3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 1e-2, "adamw": {"lr": 4e-3, "betas": (0.8, 0.9), "eps": 1e-3}}
GPT2 = {
    "model_type": "gpt2",
    **{"n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 32, "vocab_size": 61},
    **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    **{"bos_token_id": 0, "eos_token_id": 0},
}
MIXTRAL = fields(num_local_experts=4)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ALL_OFFLOADED = {**OFFLOAD, "offload_param": {"device": "cpu"}}


def engine_with(
    reference: Any,
    tensor: int,
    stage: int,
    *,
    params: dict[str, Any] = ADAMW,
    zero: dict[str, Any] | None = None,
    expert: int = 1,
    ema: float | None = DECAY,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    topology = grid(tensor, tensor > 1, expert)
    settings = deepspeed_settings(
        stage,
        micro_batch=ROWS // topology.data // 2,
        accumulation=2,
        **{
            "optimizer": {"type": "AdamW" if "betas" in params else "Muon", "params": params},
            "zero_optimization": {"stage": stage, **(zero or {})},
            "gradient_clipping": 0.0,
            **changes,
        },
    )
    return TrainingEngine.from_dict(
        reference.config,
        topology,
        settings,
        seed=0,
        source=Native(reference),
        ema=ema,
        **(options or {}),
    )


def check_average(model: dict[str, Any], tensor: int, stage: int, options: dict[str, Any]) -> None:
    """Every tensor of the average, and of the weights, after each of some steps."""
    reference = decoder(model, 3)
    engine = engine_with(reference, tensor, stage, **options)
    params = dict(options.get("params", ADAMW))
    optimizer = TorchOptimizers(reference, params, 0.0)
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    # The first call copies: ours begins as the initial weights, too.
    averaged.update_parameters(reference)
    for tokens in batches(model, 3):
        reference.zero_grad()
        loss_of(reference, tokens, engine.topology).backward()
        optimizer.step()
        averaged.update_parameters(reference)
        engine.train_step(own_pieces(tokens, engine.topology))
        check_close(optimizer_tensors(engine, EMA), dict(averaged.module.named_parameters()))
    check_close(optimizer_tensors(engine), dict(reference.named_parameters()))


CASES: list[tuple[dict[str, Any], int, int, dict[str, Any]]] = [
    (GPT2, 2, 1, {}),
    (GPT2, 2, 2, {}),
    (GPT2, 2, 3, {}),
    (GPT2, 2, 0, {}),
    (GPT2, 1, 0, {}),
    (GPT2, 1, 3, {}),
    (GPT2, 2, 2, {"zero": OFFLOAD}),
    (GPT2, 2, 3, {"zero": ALL_OFFLOADED}),
    (GPT2, 1, 1, {"params": {**ADAMW, "torch_adam": True, "fused": False}}),
    (GPT2, 2, 2, {"params": MUON}),
    (GPT2, 1, 3, {"params": MUON}),
    (MIXTRAL, 2, 1, {}),
    (MIXTRAL, 2, 2, {"expert": 2}),
    (MIXTRAL, 1, 1, {"expert": 2}),
]


@pytest.mark.parametrize("case", in_tiers([(case,) for case in CASES], [(CASES[1],)]))
def test_the_average_is_that_of_torch(ranks: Pools, case: tuple[Any, ...]) -> None:
    ranks(4).run(check_average, *case)
