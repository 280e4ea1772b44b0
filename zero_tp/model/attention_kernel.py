"""Which kernel computes a run's attention, for its first lines."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.attention import can_use_varlen
from zero_tp.model.context import AttentionMask
from zero_tp.parallel import devices

KERNELS = {
    SDPBackend.MATH: "torch's maths, no fused kernel",
    SDPBackend.FLASH_ATTENTION: "FlashAttention 2",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}
CUDNN_FROM = 91501
"""torch 2.13 takes cuDNN's kernel by itself from this version on: 9.15 is not enough."""


def describe_attention(
    spec: TransformerSpec,
    device: torch.device,
    dtype: torch.dtype,
    length: int,
    tensor: int,
    *,
    documents: bool,
) -> Iterator[str]:
    """Yield the line on a run's attention, and a warning where torch takes a slower kernel because
    of a cuDNN that is too old.

    Args:
        dtype, length: of the activations.
        tensor: TP size.
        documents: attention stays inside a document.
    """
    if spec.is_flex:
        if devices.runs_flash(device) and spec.fits_flex:
            yield (
                "attention: flex_attention, which has not been tested on a GPU yet; batches of "
                "another shape than the first are computed eagerly"
            )
            return
        reason = "dropout" if spec.dropouts.attention else f"heads of {spec.head_size} features"
        reason = reason if devices.runs_flash(device) else "training on this device"
        eager = "sinks" if spec.sinks else "soft_cap"
        yield f"attention: {eager} (eager), because flex_attention has no {reason}"
        return
    if spec.attention != "sdpa" or device.type != "cuda":
        yield f"attention: {spec.attention}"
        return
    whole = AttentionMask(length, length)
    window = next((window for window in spec.windows if window is not None), None)
    if (documents or window is not None) and can_use_varlen(whole, spec, dtype, device):
        yield "attention: sdpa, documents and windows by varlen_attn (FlashAttention 2)"
        return
    kernel = _chosen_kernel(spec, device, dtype, length, tensor)
    version = torch.backends.cudnn.version() or 0
    known = f" {version // 10000}.{version // 100 % 100}" if "CUDNN" in kernel.name else ""
    yield f"attention: sdpa ({KERNELS[kernel]}{known})"
    # Measured on an H200: 2,199 µs instead of 1,302 for 8 × 2,048 tokens and 16 heads of 128.
    if (
        kernel == SDPBackend.FLASH_ATTENTION
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and version < CUDNN_FROM
        and "TORCH_CUDNN_SDPA_DEPRIORITIZED" not in os.environ
    ):
        yield (
            f"warning: cuDNN {version // 10000}.{version // 100 % 100} is loaded, with which torch "
            "computes attention 1.7 to 2.3 times slower than with a newer one; if "
            "LD_LIBRARY_PATH names a system's cuDNN, remove it, so that torch loads its own"
        )


def _chosen_kernel(
    spec: TransformerSpec, device: torch.device, dtype: torch.dtype, length: int, tensor: int
) -> SDPBackend:
    """Return what `scaled_dot_product_attention` chooses for one causal row of a rank's heads."""

    def heads(count: int, size: int) -> Tensor:
        return torch.empty(1, count, length, size, dtype=dtype, device=device)

    query = heads(spec.heads // tensor, spec.head_size).requires_grad_()
    kv_heads = max(1, spec.kv_heads // tensor)
    key = heads(kv_heads, spec.head_size)
    choice = torch._fused_sdp_choice(
        query,
        key,
        heads(kv_heads, spec.value_size),
        None,
        spec.dropouts.attention,
        spec.causal,
        scale=spec.attention_scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return SDPBackend(choice)
