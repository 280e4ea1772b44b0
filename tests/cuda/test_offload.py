"""Checkpoints in host memory on a CUDA device: `pytest -m cuda tests/cuda`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config

from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.engine.guards import deterministic_algorithms
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.model.recompute.stores import ContiguousBuffer, HostStore

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("contiguous", [False, True])
def test_tensors_come_back_bit_for_bit_while_their_memory_is_used_again(contiguous: bool) -> None:
    store = HostStore(ContiguousBuffer(8, torch.device("cpu"), pinned=True) if contiguous else None)
    for _ in range(3):
        generator = torch.Generator(DEVICE).manual_seed(1)
        made = [torch.randn(1 << 22, device=DEVICE, generator=generator) for _ in range(8)]
        expected = [tensor.double().sum() for tensor in made]
        tokens = []
        while made:
            tokens.append(store.put(made.pop(0)))
            torch.full((1 << 22,), 7.0, device=DEVICE)  # takes the memory that was just given back
        assert all(token.host.is_pinned() for token in tokens)
        for token, value in zip(reversed(tokens), reversed(expected), strict=True):
            assert torch.equal(store.take(token).double().sum(), value)
        del tokens, token


def gradients(cpu_checkpointing: bool, recompute: RecomputePolicy) -> tuple[list[Tensor], int]:
    """Every gradient of one step, and the peak bytes of forward and backward above what was
    there.
    """
    config = GPT2Config(
        n_layer=12, n_embd=1024, n_head=16, n_positions=1024, vocab_size=1000, bos_token_id=0
    )
    config.eos_token_id = 0
    model = ZeroTPForCausalLM(config, seed=1, dtype=torch.bfloat16, device=DEVICE).train()
    checkpointing = ActivationCheckpointing(cpu_checkpointing=cpu_checkpointing)
    ActivationMemory(model, recompute, checkpointing, DEVICE)
    tokens = torch.randint(0, 1000, (8, 1024), generator=torch.Generator().manual_seed(2)).to(
        DEVICE
    )
    for _ in range(2):  # the first call also makes workspaces, and gradients, which stay
        model.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(tokens, labels=tokens).loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [
        gradient for gradient in found if gradient is not None
    ], torch.cuda.max_memory_allocated() - before


def test_recomputing_from_the_host_changes_nothing_and_takes_less() -> None:
    """Dropout is on: the second call draws other masks than the first, the same in every variant.

    Kernels that add in a fixed order give the same bits; attention's backward has such ones only on
    request.
    """
    with deterministic_algorithms():
        none, most = gradients(False, RecomputePolicy(mode="none"))
        full, less = gradients(False, RecomputePolicy(mode="full"))
        host, least = gradients(True, RecomputePolicy(mode="full"))
    for plain, recomputed, offloaded in zip(none, full, host, strict=True):
        assert torch.equal(recomputed, plain) and torch.equal(offloaded, plain)
    # 2sbh of the layers that wait on the host, but for two on their way.
    checkpoints = 11 * 8 * 1024 * 1024 * 2
    assert most > less > least
    assert less - least > 0.7 * checkpoints
