"""`zero_tp.attention` reaches the model, and what it computes with is chosen for a reason that a run tells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from transformers import Qwen2Config

from tests.mistakes import RIGHT
from tests.packed import packed_kernels
from zero_tp import devices
from zero_tp.architectures import architecture_of
from zero_tp.architectures.spec import TransformerSpec
from zero_tp.config import RunConfig
from zero_tp.huggingface import ZeroTPForCausalLM
from zero_tp.models.attention import CORES, Attention, SDPACore, described, why_masked
from zero_tp.models.context import AttentionMask, Pieces
from zero_tp.parallel.random import RandomStreams
from zero_tp.topology import Topology


def cores_of(config: RunConfig) -> set[type]:
    model = ZeroTPForCausalLM(config.hf_config())
    return {type(module.core) for module in model.modules() if isinstance(module, Attention)}


@pytest.mark.parametrize("attention", list(CORES))
def test_the_model_has_the_attention_that_the_file_asks_for(attention: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RIGHT))
    config = RunConfig.load(path, [f"zero_tp.attention={attention}"], world_size=4)
    assert cores_of(config) == {CORES[attention]}


def test_sdpa_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RIGHT))
    assert cores_of(RunConfig.load(path, world_size=4)) == {CORES["sdpa"]}


CUDA = torch.device("cuda")
WHOLE = AttentionMask(1024, 1024, window=256)


def spec_of(**fields: Any) -> TransformerSpec:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
    fields = {**sizes, "use_sliding_window": True, "sliding_window": 256, "max_window_layers": 1, **fields}
    config = Qwen2Config(**fields)
    return architecture_of(config).spec(config)


@pytest.mark.parametrize(
    ("why", "mask", "fields", "dtype", "capability"),
    [
        ("", {}, {}, torch.bfloat16, (8, 0)),
        ("", {"padding": None}, {}, torch.float16, (12, 0)),
        ("padding takes one", {"padding": torch.ones(1, 1024)}, {}, torch.bfloat16, (9, 0)),
        ("cached keys take one", {"first_query": 8, "keys": 1032}, {}, torch.bfloat16, (9, 0)),
        ("varlen_attn needs CUDA of capability 8.0", {}, {}, torch.bfloat16, (7, 5)),
        ("varlen_attn computes in 16 bits", {}, {}, torch.float32, (9, 0)),
        ("varlen_attn has no dropout", {}, {"attention_dropout": 0.1}, torch.bfloat16, (9, 0)),
        ("varlen_attn takes head sizes up to 192 that 8 divides", {}, {"hidden_size": 96}, torch.bfloat16, (9, 0)),
        ("varlen_attn takes head sizes up to 192 that 8 divides", {}, {"hidden_size": 2048}, torch.bfloat16, (9, 0)),
    ],
)
def test_why_documents_and_windows_take_a_mask(
    why: str,
    mask: dict[str, Any],
    fields: dict[str, Any],
    dtype: torch.dtype,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    devices.runs_varlen.cache_clear()
    assert why_masked(replace(WHOLE, **mask), spec_of(**fields), dtype, CUDA) == why
    devices.runs_varlen.cache_clear()
    assert not devices.runs_varlen(torch.device("cpu"))


def test_a_run_says_what_computes_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU; what SDPA takes is what torch answers."""
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: True)

    def said(documents: bool = False, **fields: Any) -> str:
        return described(spec_of(**fields), 2, 3, 1024, torch.bfloat16, torch.device("cpu"), documents=documents)

    plain = {"use_sliding_window": False}
    assert said(**plain) == "flash attention by matrix products"
    assert said(**plain, attention_dropout=0.1) == "SDPA, the maths path, which keeps the scores"
    why = "(varlen_attn needs CUDA of capability 8.0)"
    assert said(True, **plain) == f"SDPA, the flash kernel, a mask of 6.0 MiB for documents {why}"
    assert said() == (
        "in 1 of 4 layers flash attention by matrix products; "
        f"in 3 of 4 layers SDPA, the flash kernel, a mask of 2.0 MiB for a window of 256 {why}"
    )
    assert said(sliding_window=1024) == "flash attention by matrix products"
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: False)
    assert said(**plain) == "SDPA, the flash kernel"
    with packed_kernels():
        assert said(True) == (
            "in 1 of 4 layers varlen_attn, the flash kernel for documents, without a mask; "
            "in 3 of 4 layers varlen_attn, the flash kernel for documents and a window of 256, without a mask"
        )
        assert said(True, **plain, attn_implementation="eager") == "eager, a mask of 6.0 MiB for documents"
    # Its bytes are those of the mask that is made.
    facts = AttentionMask(1024, 1024, pieces=Pieces.of_rows(3, 1024, torch.device("cpu")))
    mask = SDPACore.mask(facts, spec_of(), torch.empty(1, 3, 1, dtype=torch.bfloat16))
    assert isinstance(mask, torch.Tensor) and mask.nbytes == 2 * facts.elements == 6 * 2**20


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_no_mask_reaches_cudnn(masked: bool, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask torch chooses as it would without us; afterwards everything is as before."""
    seen: list[tuple[bool, list[int]]] = []

    def kernel(query: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch._C._get_sdp_priority_order()))
        return query

    def choice(query: torch.Tensor, *_: Any, **__: Any) -> int:
        kernel(query)
        return SDPBackend.EFFICIENT_ATTENTION.value

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    order, spec = torch._C._get_sdp_priority_order(), spec_of(use_sliding_window=False)
    heads = torch.zeros(2, spec.heads, 8, spec.head_size)
    mask = torch.zeros(1, 1, 8, 8) if masked else None
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        SDPACore(spec, RandomStreams(Topology(world=1), 0, torch.device("cpu")))(heads, heads, heads, mask)
        described(spec, 1, 2, 8, torch.float32, torch.device("cpu"), documents=masked)
        assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert seen == [(allowed and not masked, order)] * (1 + spec.layers)
