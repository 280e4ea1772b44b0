"""QK-clip under TP, SP and every ZeRO stage against transformers' class with eager attention and
torch's optimizers in one process.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support.compare import check_close, grid
from tests.support.decoders import LENGTH, decoder
from tests.support.native import Native, native_tensors
from tests.support.parallel_run import optimizer_tensors, stale_weights
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings, fp16_supported, gpt2_config, rows
from tests.support.torch_optimizers import ROWS, TorchOptimizers, batches
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.data.batch import Batch
from zero_tp.engine.engine import TrainingEngine
from zero_tp.model.architectures import architecture_of, file_tensors
from zero_tp.parallel.layout import layout_of

HEADS = 12
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "vocab_size": 61,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        **{"n_layer": 2, "n_embd": 48, "n_head": HEADS, "n_inner": 24, "vocab_size": 61},
        **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
        **{"n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0},
    },
    "gpt_neox": {"model_type": "gpt_neox", **SIZES},
    "phi3": {"model_type": "phi3", **SIZES, "num_key_value_heads": 4, "pad_token_id": 0},
    # 3 KV heads, which TP 2 and 4 replicate; biases; a window in one of two layers.
    "qwen2": {
        "model_type": "qwen2",
        **SIZES,
        "num_key_value_heads": 3,
        "layer_types": ["full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    # A scale of its own instead of 1/√d.
    "granite": {
        "model_type": "granite",
        **SIZES,
        "num_key_value_heads": 4,
        "attention_multiplier": 0.7,
    },
    "mixtral": {
        "model_type": "mixtral",
        **SIZES,
        "num_key_value_heads": 6,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.0,
    },
    # Latents; a part of each head turns, its keys shared by all heads.
    "youtu": {
        "model_type": "youtu",
        **SIZES,
        "num_key_value_heads": HEADS,
        **{"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 3},
        **{"qk_rope_head_dim": 4, "v_head_dim": 5, "attention_bias": True},
    },
    # Sinks stay as they are.
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SIZES,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.0,
        "swiglu_limit": 0.4,
        "sliding_window": 5,
    },
}
MUON: dict[str, Any] = {"lr": 1e-2, "adamw": {"lr": 4e-3, "betas": (0.8, 0.9), "eps": 1e-3}}
ADAMW: dict[str, Any] = {"lr": 4e-3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
ALPHA = 0.3
SKIPPED = 2


@contextmanager
def recorded_scores(model: Any, largest: dict[int, Tensor]) -> Iterator[None]:
    """The largest visible score of each layer's heads, of transformers' eager attention."""
    module = sys.modules[type(model).__module__]
    eager = module.eager_attention_forward

    def attend(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **others: Any
    ) -> Any:
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scale = others.get("scaling") or query.shape[-1] ** -0.5
        scores = query @ keys.transpose(-1, -2) * scale
        scores = scores.masked_fill(mask < 0, -torch.inf).detach().amax((0, 2, 3))
        number = layer.layer_idx
        largest[number] = torch.maximum(scores, largest.get(number, scores))
        return eager(layer, query, key, value, mask, **others)

    with patch.object(module, "eager_attention_forward", attend):
        yield


def query_and_key_rows(name: str, spec: Any) -> Iterator[tuple[slice | Tensor, int, float]]:
    """(Rows, KV head, power of its γ) of each head in a tensor of a file."""
    if spec.latent is not None:
        yield from latent_rows(name, spec)
        return
    size, group = spec.head_size, spec.heads // spec.kv_heads
    is_key = "k_proj" in name
    for head in range(spec.kv_heads if is_key else spec.heads):
        own = slice(head * size, (head + 1) * size)
        if "q_proj" in name or is_key:
            yield own, head if is_key else head // group, 1 - ALPHA if is_key else ALPHA
        elif "query_key_value" in name:  # Q, K and V of a head follow each other
            yield slice(3 * head * size, (3 * head + 1) * size), head, ALPHA
            yield slice((3 * head + 1) * size, (3 * head + 2) * size), head, 1 - ALPHA
        else:  # Q of all heads, then K of all
            yield own, head // group, ALPHA
    if "c_attn" in name or "qkv_proj" in name:
        for head in range(spec.kv_heads):
            start = (spec.heads + head) * size
            yield slice(start, start + size), head, 1 - ALPHA


def latent_rows(name: str, spec: Any) -> Iterator[tuple[slice, int, float]]:
    """As Kimi K2 does it: the keys' features that all heads share stay."""
    keys = spec.head_size - spec.latent.rotated
    size = keys + spec.latent.value if "kv_b_proj" in name else spec.head_size
    for head in range(spec.heads):
        start = head * size
        if "kv_b_proj" in name:
            yield slice(start, start + keys), head, 1 - ALPHA
        elif "q_b_proj" in name:
            yield slice(start, start + keys), head, ALPHA
            yield slice(start + keys, start + size), head, 1


def clip(leaves: dict[str, Any], largest: dict[int, Tensor], spec: Any, threshold: float) -> int:
    """Scale Q and K of the leaves; the number of groups that were scaled."""
    clipped = 0
    for number, scores in largest.items():
        gamma = threshold / scores.view(spec.kv_heads, -1).amax(1).double()
        gamma = gamma.clamp(max=1)
        clipped += int((gamma < 1).sum())
        for name, leaf in leaves.items():
            parts = name.split(".")
            names = ("q_proj", "k_proj", "qkv", "query_", "c_attn", "b_proj")
            is_qkv = any(part in name for part in names)
            if str(number) not in parts[:4] or not is_qkv:
                continue
            matrix = leaf.data.T if "c_attn" in name else leaf.data
            for along, head, power in query_and_key_rows(name, spec):
                matrix[along] *= float(gamma[head] ** power)
    return clipped


def pieces(tokens: Tensor, count: int, kind: str) -> list[Batch]:
    """Rows of two documents each, of lengths that differ, as `count` micro-batches. transformers'
    gpt_oss would see the other document, so its rows are whole.
    """
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    if kind == "gpt_oss":
        pairs = zip(tokens.chunk(count), labels.chunk(count), strict=True)
        return [Batch(*pair) for pair in pairs]
    lengths = torch.arange(len(tokens)) + 3
    columns = torch.arange(tokens.shape[1])[None]
    documents = (columns >= lengths[:, None]).long()
    positions = columns - documents * lengths[:, None]
    parts = (tensor.chunk(count) for tensor in (tokens, labels, positions, documents))
    return [Batch(*part) for part in zip(*parts, strict=True)]


def reference_step(model: Any, batches_of_step: list[Batch], largest: dict[int, Tensor]) -> None:
    with recorded_scores(model, largest):
        for batch in batches_of_step:
            loss = model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                shift_labels=batch.labels,
                labels=batch.labels,
                use_cache=False,
            ).loss
            (loss / len(batches_of_step)).backward()


def engine_of(
    reference: Any,
    topology: Any,
    stage: int,
    params: dict[str, Any],
    threshold: float,
    **options: Any,
) -> Any:
    config = copy.deepcopy(reference.config)
    config._attn_implementation = options.pop("attention", "sdpa")
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if "offload" in options:
        zero["offload_optimizer"] = options.pop("offload")
    if "betas" in params:
        params = params | {"torch_adam": True, "fused": True}
    settings = {
        "train_micro_batch_size_per_gpu": ROWS // topology.data // 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW" if "betas" in params else "Muon", "params": params},
        "zero_optimization": zero,
    }
    return TrainingEngine.from_dict(
        config,
        topology,
        settings,
        seed=0,
        source=Native(reference),
        qk_clip_threshold=threshold,
        qk_clip_alpha=ALPHA,
        **options,
    )


def compared(
    kind: str,
    params: dict[str, Any],
    tensor: int,
    sequence: bool,
    stage: int,
    options: dict[str, Any],
) -> list[int]:
    """Weights after five steps of both, of which the third is skipped; the clipped heads."""
    reference = decoder(KINDS[kind], 7, "eager")
    topology = grid(tensor, sequence)
    spec = architecture_of(reference.config).spec(reference.config)
    steps = batches(KINDS[kind], 7)
    before: dict[int, Tensor] = {}
    reference_step(copy.deepcopy(reference), pieces(steps[0], 2 * topology.data, kind), before)
    # Between the largest scores of the groups, so that some are clipped.
    groups = [scores.view(spec.kv_heads, -1).amax(1) for scores in before.values()]
    in_order = torch.cat(groups).sort().values
    threshold = float(in_order[len(in_order) // 2 - 1 :][:2].mean())
    engine = engine_of(reference, topology, stage, params, threshold, **options)
    optimizers = TorchOptimizers(reference, params, 0.3)
    counts = []
    for number, tokens in enumerate(steps):
        micro_batches = pieces(tokens, 2 * topology.data, kind)
        own = micro_batches[2 * topology.data_rank : 2 * topology.data_rank + 2]
        is_skipped = number == SKIPPED
        with broken_gradients(engine, topology, is_skipped):
            engine.train_step(own)
        assert engine.skipped == is_skipped
        reference.zero_grad()
        largest: dict[int, Tensor] = {}
        reference_step(reference, micro_batches, largest)
        if not is_skipped:
            optimizers.step()
            clipped = clip(optimizers.leaves, largest, spec, threshold)
            assert engine.qk_clip.clipped_heads == clipped * spec.heads // spec.kv_heads
            assert engine.qk_clip.largest_score == pytest.approx(
                max(float(scores.max()) for scores in largest.values()), rel=1e-5
            )
        counts.append(engine.qk_clip.clipped_heads)
    ours = dict(native_tensors(engine.model))
    theirs = {name: value.detach() for name, value in reference.named_parameters()}
    check_close(ours, file_tensors(optimizers.weights, theirs))
    check_moments(engine, optimizers.states())
    return counts


@contextmanager
def broken_gradients(engine: Any, topology: Any, is_broken: bool) -> Iterator[None]:
    """The last rank's gradient of one weight is not finite."""
    factor = math.nan if is_broken and topology.rank == topology.world - 1 else 1.0
    parameter = engine.model.get_parameter("transformer.layers.0.attention.output.weight")
    hook = parameter.register_hook(lambda gradient: gradient * factor)
    yield
    hook.remove()


def check_moments(engine: Any, expected: dict[str, dict[str, Tensor]]) -> None:
    """They are torch's: QK-clip does not scale them."""
    states, topology = engine.zero.states(), engine.topology
    for fragment in states.fragments:
        layout = layout_of(engine.model.get_parameter(fragment.name))
        for moment, tensors in expected.items():
            if fragment.name in tensors:
                whole = tensors[fragment.name]
                shard = layout.shard(whole, topology.tensor_rank, topology.tensor).flatten()
                error = states.get(fragment, moment) - shard[fragment.span.whole]
                assert error.norm() <= 1e-5 * whole.norm() + 1e-9, (fragment.name, moment)


@pytest.mark.parametrize(
    ("kind", "tensor", "stage"),
    in_tiers(
        [(kind, *cell) for kind in KINDS for cell in ((2, 1), (4, 3), (1, 2), (2, 3), (4, 0))],
        [("qwen2", 2, 1)],
        every=4,
    ),
)
def test_muon_with_qk_clip_equals_torchs(ranks: Pools, kind: str, tensor: int, stage: int) -> None:
    found = ranks(4).run(compared, kind, MUON, tensor, tensor > 1, stage, {})
    assert found == found[:1] * 4
    assert 0 < found[0][0] < 2 * HEADS


@THOROUGH
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {"recompute": RecomputePolicy(mode="full")}),
        (1, {"attention": "eager"}),
        (1, {"compiled": True}),
        (2, {"recompute": RecomputePolicy(mode="selective")}),
        (2, {"offload": {"device": "cpu"}}),
        (3, {"recompute": RecomputePolicy(mode="full")}),
        (3, {"offload": {"device": "cpu"}}),
    ],
    ids=lambda value: value if isinstance(value, int) else next(iter(value)),
)
def test_adamw_with_qk_clip_equals_torchs(
    ranks: Pools, stage: int, options: dict[str, Any]
) -> None:
    found = ranks(4).run(compared, "qwen2", ADAMW, 2, False, stage, options)
    assert found == found[:1] * 4


def clipped_in_16_bit(stage: int, dtype: str) -> int:
    """Masters are those of a run without QK-clip, Q and K scaled by head; weights are the masters
    rounded; how many heads were clipped.
    """
    masters = []
    with fp16_supported():
        for threshold in (None, 1e-3):
            # At stages 1 and 2 the class whose update is fused, unless sums are in fp32 at 1.
            settings = deepspeed_settings(stage, micro_batch=2, dtype=dtype)
            settings["optimizer"]["params"]["fused"] = True
            engine = TrainingEngine.from_dict(
                gpt2_config(n_layer=1, vocab_size=50),
                grid(2, True),
                settings,
                seed=1,
                qk_clip_threshold=threshold,
                qk_clip_alpha=ALPHA,
            )
            engine.train_step(rows(engine))
            masters.append(optimizer_tensors(engine))
        assert stale_weights(engine, masters[-1]) == []
    assert engine.qk_clip is not None and engine.qk_clip.clipped_heads == 4
    name = "transformer.h.0.attn.c_attn.weight"
    query, key, value = (masters[1][name] / masters[0][name]).T.contiguous().chunk(3)
    torch.testing.assert_close(value, torch.ones_like(value))
    for head in range(4):
        gamma = query.view(4, -1)[head].mean() ** (1 / ALPHA)
        assert gamma < 0.5
        for part, exponent in ((query, ALPHA), (key, 1 - ALPHA)):
            scale = part.view(4, -1)[head]
            torch.testing.assert_close(scale, (gamma**exponent).expand_as(scale))
    return engine.qk_clip.clipped_heads


@pytest.mark.parametrize(
    ("stage", "dtype"),
    in_tiers(
        [
            (stage, dtype)
            for stage in range(4)
            for dtype in ("bf16", "bf16_fp32_accumulation", "fp16")
            if stage > 0 or dtype != "bf16_fp32_accumulation"
        ],
        [(0, "bf16"), (1, "bf16")],
    ),
)
def test_weights_are_the_scaled_masters_rounded(ranks: Pools, stage: int, dtype: str) -> None:
    assert ranks(4).run(clipped_in_16_bit, stage, dtype) == [4] * 4
