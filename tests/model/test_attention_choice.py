"""`zero_tp.attention` reaches the model, and decides which kernel computes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2Config

from tests.support.mistakes import RIGHT
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.attention import CORES, Attention, SDPACore, can_use_varlen
from zero_tp.model.context import AttentionMask
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel import devices
from zero_tp.parallel.random import RandomStreams
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig


@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
def test_the_model_has_the_attention_of_the_file_or_sdpa(
    attention: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RIGHT))
    changes = [] if attention is None else [f"zero_tp.attention={attention}"]
    model = ZeroTPForCausalLM(RunConfig.load(path, changes, world_size=4).hf_config())
    cores = {type(module.core) for module in model.modules() if isinstance(module, Attention)}
    assert cores == {CORES[attention or "sdpa"]}


CUDA = torch.device("cuda")
WHOLE = AttentionMask(1024, 1024, window=256)


def spec_of(**fields: Any) -> TransformerSpec:
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
    }
    fields = {
        **sizes,
        "use_sliding_window": True,
        "sliding_window": 256,
        "max_window_layers": 1,
        **fields,
    }
    config = Qwen2Config(**fields)
    return architecture_of(config).spec(config)


@pytest.mark.parametrize(
    ("unmasked", "mask", "fields", "dtype", "capability"),
    [
        (True, {}, {}, torch.bfloat16, (8, 0)),
        (True, {"padding_mask": None}, {}, torch.float16, (12, 0)),
        (False, {"padding_mask": torch.ones(1, 1024)}, {}, torch.bfloat16, (9, 0)),
        (False, {"first_query": 8, "keys": 1032}, {}, torch.bfloat16, (9, 0)),
        (False, {}, {}, torch.bfloat16, (7, 5)),
        (False, {}, {}, torch.float32, (9, 0)),
        (False, {}, {"attention_dropout": 0.1}, torch.bfloat16, (9, 0)),
        (False, {}, {"hidden_size": 96}, torch.bfloat16, (9, 0)),
        (False, {}, {"hidden_size": 2048}, torch.bfloat16, (9, 0)),
    ],
)
def test_which_documents_and_windows_take_a_mask(
    unmasked: bool,
    mask: dict[str, Any],
    fields: dict[str, Any],
    dtype: torch.dtype,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    devices.runs_flash.cache_clear()
    assert can_use_varlen(replace(WHOLE, **mask), spec_of(**fields), dtype, CUDA) == unmasked
    devices.runs_flash.cache_clear()
    assert not devices.runs_flash(torch.device("cpu"))


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_no_mask_reaches_cudnn(
    masked: bool, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mask torch chooses as it would without us; afterwards everything is as before."""
    seen: list[tuple[bool, list[int]]] = []

    def kernel(query: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch._C._get_sdp_priority_order()))
        return query

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    order, spec = torch._C._get_sdp_priority_order(), spec_of(use_sliding_window=False)
    heads = torch.zeros(2, spec.heads, 8, spec.head_size)
    mask = torch.zeros(1, 1, 8, 8) if masked else None
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        SDPACore(spec, RandomStreams(Topology(world=1), 0, torch.device("cpu")))(
            heads, heads, heads, mask
        )
        assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert seen == [(allowed and not masked, order)]
