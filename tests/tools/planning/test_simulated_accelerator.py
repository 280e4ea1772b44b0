"""The activations of a dry run on the simulated accelerator, against those on the CPU and the
papers' formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import checkpoint as distributed
from transformers import GPT2Config

from tests.support.plan_configs import DOCUMENTS, WIDE, WINDOWS, family, load
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model import rms_norm
from zero_tp.model.recompute.stores import MAX_COPIES_OUT
from zero_tp.parallel import elementwise
from zero_tp.tools.planning import simulated_accelerator
from zero_tp.tools.planning.dryrun import dry_run
from zero_tp.tools.planning.formulas import (
    eager_core,
    saved,
    saved_full,
    saved_outside_layers,
    saved_selective,
    sdpa_fused_core,
)
from zero_tp.tools.planning.plan_settings import Layer, Workload, workload_of


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_writes_checkpoints_after_a_dry_run(tmp_path: Path) -> None:
    """It takes the simulated device for this process's accelerator, and waits for its stream."""
    simulated_accelerator._simulated()
    tensor = torch.randn(1000)
    distributed.save({"a": tensor}, checkpoint_id=tmp_path)
    read = {"a": torch.zeros(1000)}
    distributed.load(read, checkpoint_id=tmp_path)
    assert torch.equal(read["a"], tensor)


def test_a_dry_run_computes_representative_chunks_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A piece is one of 4 × 256 rows."""
    monkeypatch.setattr(elementwise, "CACHE_ELEMENTS", 1)
    config = load(family("llama", "zero_tp.parallel.tensor=1"))
    with mock.patch.object(rms_norm, "_rms_norm", wraps=rms_norm._rms_norm) as normed:
        dry_run(config.hf_config(), workload_of(config, cpu=True))
    assert normed.call_count % 3 == 0 and 3 <= normed.call_count <= 60


@THOROUGH
def test_an_accelerator_takes_the_branches_of_its_type() -> None:
    """Keys and values repeated beside a mask, checkpoints in host memory, no mask of attention's
    dropout.
    """

    def kept(overrides: list[str], cpu: bool) -> float:
        config = load(overrides)
        workload = workload_of(config, cpu=cpu, varlen=False)
        return max(one.activations for one in dry_run(config.hf_config(), workload))

    grouped = family("llama", DOCUMENTS, "zero_tp.parallel.tensor=1")
    # K and V of 8 heads instead of 4, [b, 4, s, d] in bf16 more, of 3 layers.
    assert kept(grouped, False) - kept(grouped, True) == pytest.approx(
        3 * 2 * 4 * 256 * 128 * 2, rel=0.01
    )
    checkpoints = ["zero_tp.recompute=full", "zero_tp.parallel.tensor=1", *WIDE]
    on_host = [*checkpoints, 'activation_checkpointing={"cpu_checkpointing":true}']
    stream = 4 * 256 * 256 * 2
    assert kept(checkpoints, False) - kept(on_host, False) == pytest.approx(
        (3 - MAX_COPIES_OUT) * stream, rel=0.01
    )
    assert kept(checkpoints, True) == kept(on_host, True)
    assert kept(WIDE, False) < 0.7 * kept(WIDE, True)


@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=THOROUGH)])
def test_documents_and_windows_cost_no_mask_on_an_accelerator(rows: int) -> None:
    """Of 3 layers, of which 2 have a window: two masks with documents, one mask without, by
    their formulas.
    """
    s, bf16 = 256, 2
    model = {**WINDOWS, "num_key_value_heads": 8}

    def most(*overrides: str, varlen: bool) -> float:
        sizes = ["zero_tp.parallel.tensor=1", f"train_micro_batch_size_per_gpu={rows}"]
        config = load([*family("qwen2", *overrides, model=model), *sizes])
        return max(
            one.activations
            for one in dry_run(config.hf_config(), workload_of(config, cpu=False, varlen=varlen))
        )

    # Several rows are copied into one: the copies stay instead of the product that Q, K and V are
    # parts of, which takes as much.
    state = 16  # of dropout, although there is none
    masks = 2 * bf16 * rows * s * s
    starts = 4 * (rows * s + 1)
    documents = most(DOCUMENTS, varlen=False) - most(DOCUMENTS, varlen=True)
    assert documents == masks - starts - 3 * state
    mask = bf16 * s * s
    starts = 4 * (rows + 1)
    assert most(varlen=False) - most(varlen=True) == mask - starts - 2 * state


EVERYTHING = ["attention_core", "mlp_activation", "norm"]
CORES: dict[str, Callable[[Layer], float]] = {"eager": eager_core, "sdpa": sdpa_fused_core}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=THOROUGH)])
@pytest.mark.parametrize(
    ("tensor", "sequence"), in_tiers([(1, False), (2, False), (2, True), (4, True)], [(2, True)])
)
def test_an_accelerator_keeps_what_the_papers_count(
    tensor: int, sequence: bool, dtype: str
) -> None:
    """To the byte, with the terms that table 2 leaves out."""
    s, b, h, v, count = 128, 2, 192, 1000, 4
    layer = Layer(s, b, h, 8, tensor, sequence)
    policies: list[
        tuple[dict[str, Any], dict[str, Any], Callable[[Callable[[Layer], float]], float]]
    ] = [
        ({"mode": "none"}, {}, lambda core: saved(layer, core)),
        ({"mode": "full"}, {}, lambda core: saved_full(layer)),
        (
            {"mode": "selective", "modules": EVERYTHING},
            {},
            lambda core: saved_selective(layer, core, EVERYTHING),
        ),
    ]
    if tensor > 1 and not sequence:
        split = {"partition_activations": True}
        policies.append(({"mode": "full"}, split, lambda core: saved_full(layer, partitioned=True)))
    shards = tensor if sequence else 1
    # The loss of parallel/loss.py keeps the head's gradient in place of the logits, in bf16 that of
    # one block.
    outside = (
        saved_outside_layers(layer, v)
        - 4 * s * b * v / tensor
        + (2 if dtype == "bf16" else 4) * v * h / tensor
    )
    # The final norm's statistics; token and position numbers, and which tokens are of other ranks;
    # two figures.
    outside += 8 * s * b / shards + 8 * s * b + 8 * s + (s * b if tensor > 1 else 0) + 2 * 4
    for attention, core in CORES.items():
        config = GPT2Config(n_layer=count, n_embd=h, n_head=8, n_positions=s, vocab_size=v)
        config._attn_implementation = attention
        for policy, checkpointing, formula in policies:
            recomputes = policy["mode"] != "none"
            workload = Workload(s, b, tensor, sequence, dtype, policy=RecomputePolicy(**policy))
            samples = dry_run(
                config,
                replace(workload, checkpointing=ActivationCheckpointing(**checkpointing)),
                all_layers=True,
            )
            # Mean and deviation of two norms in fp32, where no layer is recomputed as a whole.
            statistics = 0 if policy["mode"] == "full" else 16 * s * b / shards
            # One for all layers' recomputation.
            mask = 2 * s**2 if attention == "eager" and recomputes else 0
            expected = count * (formula(core) + statistics) + outside + mask
            assert max(one.activations for one in samples) == expected, (
                attention,
                policy,
                checkpointing,
            )
