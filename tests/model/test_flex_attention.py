"""Capped scores and sinks by torch's `flex_attention`, whose mathematics run on a CPU, against
eager ones; where it is used, and what the plan counts. tests/cuda has its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from transformers import Gemma2Config, GptOssConfig, PretrainedConfig

from tests.support.decoders import decoder
from tests.support.native import parallel_model
from tests.tiers import examples, in_tiers
from zero_tp.model import flex_attention
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import Dropouts, TransformerSpec
from zero_tp.model.attention import CORES, AttentionCore
from zero_tp.model.context import AttentionMask, PackedSequences
from zero_tp.parallel import devices
from zero_tp.parallel.random import RandomStreams
from zero_tp.parallel.topology import Topology
from zero_tp.tools.planning.dryrun import dry_run
from zero_tp.tools.planning.plan_settings import Workload

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WHOLE = AttentionMask(16, 16)


def config_of(**changes: Any) -> Gemma2Config:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Gemma2Config(**(sizes | heads | {"attn_logit_softcapping": 2.0} | changes))
    config._attn_implementation = "flex_attention"
    return config


def config_with_sinks(**changes: Any) -> GptOssConfig:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.4}
    config = GptOssConfig(**(sizes | heads | experts | changes))
    config._attn_implementation = "flex_attention"
    return config


CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {
    "soft_cap": config_of,
    "sinks": config_with_sinks,
}
"""By the name of the eager core."""
EACH_CORE = pytest.mark.parametrize("eager", CONFIGS)


def spec_of(eager: str = "soft_cap", **changes: Any) -> TransformerSpec:
    config = CONFIGS[eager](**changes)
    return architecture_of(config).spec(config)


@contextmanager
def mathematics_of_flex() -> Iterator[None]:
    """Let a CPU compute what the kernels of an accelerator do; torch has no backward there."""
    with (
        mock.patch.object(flex_attention, "_first_shape", []),
        mock.patch.object(devices, "runs_flash", lambda _: True),
        mock.patch.object(torch_flex, "_validate_device", lambda *_: None),
    ):
        yield


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@EACH_CORE
@examples(3, 25)
@given(
    numbers=st.none()
    | st.lists(st.lists(st.integers(0, 2), min_size=11, max_size=11), min_size=2, max_size=2),
    window=st.none() | st.integers(1, 12),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_outputs_and_gradients_are_those_of_eager_scores(
    eager: str, numbers: list[list[int]] | None, window: int | None, kv_heads: int
) -> None:
    spec = spec_of(eager, **({"query_pre_attn_scalar": 5} if eager == "soft_cap" else {}))
    assert spec.is_flex
    packed = numbers and PackedSequences.from_document_ids(torch.tensor(numbers), CPU)
    facts = AttentionMask(11, 11, packed=packed or None, window=window)
    heads = [torch.randn(2, each, 11, 16) for each in (4, kv_heads, kv_heads)]
    heads += [torch.randn(4)] if spec.sinks else []
    upstream = torch.randn(2, 4, 11, 16)

    def computed(kind: type[AttentionCore]) -> list[Tensor]:
        core = kind(spec, RandomStreams(Topology(world=1), 0))
        own = [each.clone().requires_grad_() for each in heads]
        mask = core.build_mask(facts, spec, torch.empty(11, 2, 64))
        assert isinstance(mask, Tensor) == (kind is CORES[eager])
        output = core(*own, mask=mask)
        output.backward(upstream)
        return [output.detach(), *(each.grad for each in own if each.grad is not None)]

    expected = computed(CORES[eager])
    with mathematics_of_flex():
        found = computed(CORES[spec.attention])
    assert len(found) == 4 + spec.sinks
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@EACH_CORE
def test_a_model_computes_what_transformers_class_does(eager: str) -> None:
    """Both windows of the layers; backward twice, whose mask of blocks is the first's."""
    fields = CONFIGS[eager](sliding_window=5).to_dict()
    reference = decoder(fields, 3)
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = reference(input_ids=tokens, labels=tokens)
    with mathematics_of_flex():
        model = parallel_model(reference, Topology(world=1), attention="flex_attention").train()
        with mock.patch.object(
            torch_flex, "flex_attention", wraps=torch_flex.flex_attention
        ) as kernel:
            flex_attention._kernel.cache_clear()
            for _ in range(2):
                found = model(tokens, labels=tokens)
                found.loss.backward()
            flex_attention._kernel.cache_clear()
    assert kernel.call_count == 4
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("used", "mask", "changes", "capability"),
    [
        (True, {"window": 5}, {}, (8, 0)),
        (False, {}, {}, (7, 5)),
        (False, {"padding_mask": torch.ones(1, 16)}, {}, (9, 0)),
        (False, {"first_query": 8, "keys": 24}, {}, (9, 0)),
        (False, {}, {"dropouts": Dropouts(attention=0.1)}, (9, 0)),
        (False, {}, {"head_size": 8}, (9, 0)),
        (False, {}, {"head_size": 40}, (9, 0)),
    ],
)
def test_which_forwards_use_it(
    used: bool,
    mask: dict[str, Any],
    changes: dict[str, Any],
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    devices.runs_flash.cache_clear()
    facts, spec = replace(WHOLE, **mask), replace(spec_of(), **changes)
    monkeypatch.setattr(flex_attention, "_first_shape", [])
    assert flex_attention.can_use_flex(facts, spec, 2, CUDA) == used
    # One shape of a process, whose kernels are compiled.
    assert flex_attention._first_shape == [(2, 16)] * used
    assert not flex_attention.can_use_flex(facts, spec, 3, CUDA) or not used
    devices.runs_flash.cache_clear()
    assert not flex_attention.can_use_flex(WHOLE, spec_of(), 2, CPU)


@EACH_CORE
def test_it_is_chosen_by_its_name_alone(eager: str) -> None:
    config = CONFIGS[eager]()
    flex = "flex_attention" if eager == "soft_cap" else "flex_sinks"
    for name, expected in (("flex_attention", flex), ("sdpa", eager), ("eager", eager)):
        config._attn_implementation = name
        assert architecture_of(config).spec(config).attention == expected


@pytest.mark.parametrize("eager", in_tiers(list(CONFIGS), ["soft_cap"]))
def test_the_plan_counts_what_the_devices_kernel_keeps(eager: str) -> None:
    """Of a layer the probabilities and the tanh, 2 · 2 bytes of each of b · a · s² scores, on a CPU
    or an old accelerator alone; with sinks the probabilities.
    """
    length = 256
    config = CONFIGS[eager](max_position_embeddings=length)
    workload = Workload(length, 1)

    def kept(workload: Workload) -> float:
        samples = dry_run(config, workload, all_layers=True)
        return max(sample.activations for sample in samples)

    of_two_layers = 2 * (4 if eager == "soft_cap" else 2) * 4 * length**2
    without = kept(workload)
    assert not workload.stores_scores(architecture_of(config).spec(config))
    for other in (replace(workload, varlen=False), replace(workload, cpu=True)):
        assert other.stores_scores(architecture_of(config).spec(config))
        assert kept(other) - without >= 0.9 * of_two_layers


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.1}, {"head_dim": 40}])
def test_the_plan_counts_scores_where_no_kernel_computes_them(changes: dict[str, Any]) -> None:
    config = config_of(max_position_embeddings=256, **changes)
    workload = Workload(256, 1)
    samples = dry_run(config, workload, all_layers=True)
    assert workload.stores_scores(architecture_of(config).spec(config))
    assert max(sample.activations for sample in samples) >= 2 * 2 * 4 * 256**2
