"""`zero_tp.attention` reaches the model, and decides which kernel computes it."""

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

from tests.support.mistakes import RIGHT
from zero_tp.model import attention_kernel
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import Dropouts, TransformerSpec
from zero_tp.model.attention import CORES, Attention, SDPACore, can_use_varlen
from zero_tp.model.attention_kernel import describe_attention
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


LINE = "attention: sdpa"
EAGER_CAPS = "attention: soft_cap (eager), because"
SLOW = "warning: cuDNN 9.10 is loaded"


@pytest.mark.parametrize(
    ("attention", "facts", "expected"),
    [
        ("sdpa", {"device": "cpu"}, [LINE]),
        ("eager", {}, ["attention: eager"]),
        ("flex_attention", {"device": "cpu"}, [EAGER_CAPS]),
        ("flex_attention", {}, ["attention: flex_attention, which has not been tested"]),
        (
            "flex_attention",
            {"size": 40},
            ["attention: soft_cap (eager), because flex_attention has no heads of 40"],
        ),
        ("sdpa", {"cudnn": 91600, "choice": 3}, [f"{LINE} (cuDNN 9.16)"]),
        ("sdpa", {"choice": 0}, [f"{LINE} (torch's maths"]),
        ("sdpa", {"choice": 1}, [f"{LINE} (FlashAttention 2)", SLOW]),
        ("sdpa", {"choice": 1, "cudnn": 91600}, [f"{LINE} (FlashAttention 2)"]),
        ("sdpa", {"choice": 1, "capability": (8, 0)}, [f"{LINE} (FlashAttention 2)"]),
        ("sdpa", {"choice": 1, "documents": True}, [f"{LINE}, documents and windows by varlen"]),
        ("sdpa", {"choice": 2, "documents": True, "capability": (7, 5)}, [f"{LINE} (memory-"]),
    ],
)
def test_the_first_lines_name_the_kernel(
    attention: Any, facts: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    capability, cudnn = facts.get("capability", (9, 0)), facts.get("cudnn", 91002)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    chosen = SDPBackend(facts.get("choice", 1))
    monkeypatch.setattr(attention_kernel, "_chosen_kernel", lambda *_: chosen)
    devices.runs_flash.cache_clear()
    spec = replace(
        spec_of(use_sliding_window=False), attention=attention, head_size=facts.get("size", 64)
    )
    device = torch.device(facts.get("device", "cuda"))
    lines = describe_attention(
        spec, device, torch.bfloat16, 1024, 2, documents=facts.get("documents", False)
    )
    found = list(lines)
    devices.runs_flash.cache_clear()
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


def test_torch_says_which_kernel_it_chooses() -> None:
    """On a CPU, of the same arguments as on a GPU."""
    spec = spec_of(use_sliding_window=False)
    for dropout, kernel in ((0.0, SDPBackend.FLASH_ATTENTION), (0.1, SDPBackend.MATH)):
        dropped = replace(spec, dropouts=Dropouts(attention=dropout))
        cpu = torch.device("cpu")
        assert attention_kernel._chosen_kernel(dropped, cpu, torch.bfloat16, 64, 2) == kernel
