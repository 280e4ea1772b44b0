"""Shipped configs of memory savings, fp16 and a stable learning rate train as the same file
without them does.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.settings import fp16_supported
from tests.tiers import in_tiers

ROOT = Path(__file__).resolve().parents[3]
GPT2 = (
    *(
        "zero_tp.model.n_layer=2",
        "zero_tp.model.n_embd=64",
        "zero_tp.model.n_head=4",
        "zero_tp.model.vocab_size=211",
    ),
    *("zero_tp.model.resid_pdrop=0", "zero_tp.model.embd_pdrop=0", "zero_tp.model.attn_pdrop=0"),
)
LLAMA = (
    *(
        "zero_tp.model.num_hidden_layers=2",
        "zero_tp.model.hidden_size=64",
        "zero_tp.model.intermediate_size=96",
    ),
    *(
        "zero_tp.model.num_attention_heads=4",
        "zero_tp.model.num_key_value_heads=2",
        "zero_tp.model.vocab_size=211",
    ),
)
SMALL = (
    "train_batch_size=8",
    "train_micro_batch_size_per_gpu=2",
    "zero_tp.data.sequence_length=32",
)
FP32 = "bf16.enabled=false"
CHECKPOINTING = ("zero_tp.recompute=none", "activation_checkpointing={}")


class Case(NamedTuple):
    """A shipped config, what makes it small, and what takes its speciality away.

    Attributes:
        tolerance: of losses and norms, relative; 0 where recomputation repeats the same sums.
    """

    changes: tuple[str, ...]
    plain: tuple[str, ...]
    tolerance: float = 0.0


CASES = {
    "gpt2_124m_cpu_checkpointing": Case((*GPT2, FP32), CHECKPOINTING),
    "gpt2_124m_contiguous": Case((*GPT2, FP32), CHECKPOINTING),
    # fp16 keeps 11 bits of each product; two steps at the warm-up's rates hardly move the weights.
    "gpt2_124m_fp16": Case(GPT2, ("fp16.enabled=false",), 2e-3),
    # A step at the warm-up's rates decays the embedding by a ten-millionth.
    "llama_135m_no_embedding_decay": Case((*LLAMA, FP32), ("zero_tp.param_groups=[]",), 1e-5),
    "llama_135m_wsd": Case(
        (*LLAMA, FP32),
        ('scheduler={"type": "constant_with_warmup", "params": {"num_warmup_steps": 1000}}',),
    ),
}


def two_steps(name: str, changes: tuple[str, ...]) -> list[tuple[float, float, float]]:
    """Return loss, gradient norm and learning rate of the first two steps."""
    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.run.config import RunConfig

    world = torch.distributed.get_world_size()
    config = RunConfig.load(ROOT / "ds_configs" / f"{name}.json", (*SMALL, *changes), world)
    topology = grid(config.zero_tp.parallel.tensor, config.zero_tp.parallel.sequence)
    with fp16_supported():
        engine = TrainingEngine(
            config.hf_config(),
            topology,
            config.engine_settings,
            seed=config.zero_tp.training.seed,
            recompute=config.zero_tp.recompute_policy,
            param_groups=config.zero_tp.param_groups,
        )
        draw = torch.Generator().manual_seed(1)
        steps = []
        for _ in range(2):
            rows = torch.randint(
                0,
                211,
                (config.global_batch, config.zero_tp.data.sequence_length + 1),
                generator=draw,
            )
            own = rows.chunk(topology.data)[topology.data_rank].split(config.micro_batch)
            rate = engine.learning_rate
            loss = engine.train_step([(part[:, :-1], part[:, 1:]) for part in own])
            steps.append((loss, engine.gradient_norm, rate))
        return steps


@pytest.mark.parametrize("name", in_tiers(list(CASES), ["gpt2_124m_fp16", "gpt2_124m_contiguous"]))
def test_a_shipped_config_trains_as_the_plain_one_does(ranks: Pools, name: str) -> None:
    case = CASES[name]
    (trained, *_), (plain, *_) = (
        ranks(4).run(two_steps, name, changes)
        for changes in (case.changes, (*case.changes, *case.plain))
    )
    assert len(trained) == 2 and all(rate > 0 and norm > 0 for _, norm, rate in trained)
    for mine, other in zip(trained, plain, strict=True):
        assert mine == (pytest.approx(other, rel=case.tolerance) if case.tolerance else other)


@pytest.mark.nvme
def test_offload_to_nvme_trains_as_to_the_cpu(ranks: Pools, tmp_path: Path) -> None:
    changes = (*GPT2, "zero_optimization.offload_param.nvme_path=" + str(tmp_path))
    small_buffers = "zero_optimization.offload_param.buffer_size=1000000"
    on_cpu = 'zero_optimization.offload_param={"device": "cpu"}'
    trained, plain = (
        ranks(4).run(two_steps, "gpt2_124m_zero3_nvme", (*changes, last), timeout=300)
        for last in (small_buffers, on_cpu)
    )
    assert trained == plain
