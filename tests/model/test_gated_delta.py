"""The gated delta rule against transformers' recurrence and its chunks, and what surrounds it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from tests.support.compare import check_close, grid
from tests.support.decoders import shrink_linear_values, without_router_logits
from tests.support.native import check_gradients, parallel_model, perturbed
from tests.support.pools import Pools
from tests.support.tiny_configs import general_fields
from tests.tiers import in_tiers
from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model.architectures.configs import config_from_block
from zero_tp.model.flops import model_flops
from zero_tp.model.gated_delta import CHUNK, chunked
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.layout import audit
from zero_tp.parallel.topology import Topology

TYPES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]
SIZES = {"keys": 2, "per_key": 3, "key_size": 5, "value_size": 4}
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7)


def drawn(length: int, seed: int) -> dict[str, Tensor]:
    """Inputs in transformers' shapes, [b, s, heads, d]."""
    generator = torch.Generator().manual_seed(seed)
    keys, heads = SIZES["keys"], SIZES["keys"] * SIZES["per_key"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, length, *shape, generator=generator)

    # One value head of a key forgets at once, another keeps what it had a chunk ago.
    shifts = torch.tensor([0.0, 2.0, 5.0]).repeat(keys)
    return {
        "query": normal(keys, SIZES["key_size"]),
        "key": normal(keys, SIZES["key_size"]),
        "value": normal(heads, SIZES["value_size"]),
        "g": -(normal(heads) * 1.5 - shifts).exp(),
        "beta": normal(heads).sigmoid() * 2,
    }


def by_key(tensor: Tensor) -> Tensor:
    """[b, s, heads, *] → [b, a, heads of a, s, *]."""
    grouped = tensor.transpose(1, 2)
    return grouped.unflatten(1, (SIZES["keys"], -1))


def ours(inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    query, key = (theirs.l2norm(by_key(inputs[name])) for name in ("query", "key"))
    scaled = query * SIZES["key_size"] ** -0.5
    rest = (by_key(inputs[name]) for name in ("value", "g", "beta"))
    read, state = chunked(scaled, key, *rest, **options)
    return read.flatten(1, 2).transpose(1, 2), state.flatten(1, 2)


def recurrent(inputs: dict[str, Tensor], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Token by token, in fp32 as transformers' function computes it."""
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    read, last = theirs.torch_recurrent_gated_delta_rule.__wrapped__(
        **inputs, initial_state=state, **options
    )
    return read, last


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("continues", [False, True])
def test_chunks_equal_the_recurrence(length: int, continues: bool, seed: int) -> None:
    """What is read, the last state, and every gradient."""
    outputs: list[dict[str, Any]] = []
    begun = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(seed))
    weights = [torch.randn(2, length, 6, 4), torch.randn(2, 6, 5, 4)]
    for function in (recurrent, ours):
        inputs = {name: one.requires_grad_() for name, one in drawn(length, seed).items()}
        state = begun.clone().requires_grad_() if continues else None
        given_state = state
        if state is not None and function is ours:
            given_state = state.unflatten(1, (SIZES["keys"], -1))
        results = function(inputs, state=given_state)
        torch.autograd.backward(results, weights)
        gradients: dict[str, Any] = {
            f"gradient of {name}": one.grad for name, one in inputs.items()
        }
        if state is not None:
            gradients["gradient of the state"] = state.grad
        outputs.append({"read": results[0], "state": results[1], **gradients})
    check_close(outputs[1], outputs[0], relative=2e-5)


@pytest.mark.parametrize(
    "lengths", [[5, 1, 70, 64, 9, 3], [CHUNK, CHUNK, 1, 2], [3 * CHUNK], [1, 2 * CHUNK - 1, 40]]
)
def test_packed_sequences_are_each_alone(lengths: list[int], seed: int) -> None:
    """Inside a chunk, at its ends, and over several."""
    total = sum(lengths)
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ids = torch.stack((numbers, torch.zeros_like(numbers)), 1).unsqueeze(-1)  # row 1 is one
    outputs: list[dict[str, Any]] = []
    weight = torch.randn(2, total, 6, 4)
    for function in (recurrent, ours):
        inputs = {name: one.requires_grad_() for name, one in drawn(total, seed).items()}
        if function is ours:
            read = ours(inputs, ids=ids)[0]
        else:
            parts = {name: one[:1].split(lengths, 1) for name, one in inputs.items()}
            pieces = [
                recurrent({name: part[number] for name, part in parts.items()})[0]
                for number in range(len(lengths))
            ]
            whole = recurrent({name: one[1:] for name, one in inputs.items()})[0]
            read = torch.cat((torch.cat(pieces, 1), whole))
        (read * weight).sum().backward()
        gradients: dict[str, Any] = {
            f"gradient of {name}": one.grad for name, one in inputs.items()
        }
        outputs.append({"read": read, **gradients})
    check_close(outputs[1], outputs[0], relative=2e-5)


def reference_of(model_type: str, seed: int, **sizes: int) -> Any:
    """Transformers' small model of a type, random everywhere."""
    fields = general_fields(model_type) | without_router_logits(model_type)
    fields |= {"max_position_embeddings": 256, **sizes}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    perturbed(model.eval())
    shrink_linear_values(model)
    return model


@pytest.mark.parametrize("model_type", in_tiers(TYPES, ["qwen3_5_text", "olmo_hybrid"]))
def test_rows_of_several_chunks(model_type: str, seed: int) -> None:
    reference = reference_of(model_type, seed)
    tokens = torch.randint(61, (2, 2 * CHUNK + 9))
    expected = reference(tokens, labels=tokens)
    expected.loss.backward()
    model = parallel_model(reference, Topology(world=1)).train()
    output = model(tokens, labels=tokens)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    output.loss.backward()
    assert check_gradients(model, reference) > 30


def compare_on_ranks(world: int, model_type: str, seed: int) -> list[int]:
    """With and without SP: loss and every gradient; how many gradients."""
    reference = reference_of(model_type, seed, **OF_RANKS)
    tokens = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(seed))
    expected = reference(tokens, labels=tokens)
    expected.loss.backward()
    counts = []
    for sequence in (False, True):
        topology = grid(world, sequence)
        model = parallel_model(reference, topology).train()
        audit(model, topology)
        output = model(tokens, labels=tokens)
        assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
        output.loss.backward()
        counts.append(check_gradients(model, reference))
    return counts


OF_RANKS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}


@pytest.mark.parametrize("model_type", in_tiers(TYPES, ["qwen3_next"]))
@pytest.mark.parametrize("world", in_tiers([2, 4], [2]))
def test_ranks_compute_what_the_class_does(
    ranks: Pools, world: int, model_type: str, seed: int
) -> None:
    """TP 4 also has more ranks than KV heads."""
    counts = ranks(world).run(compare_on_ranks, world, model_type, seed)
    assert counts == counts[:1] * world
    assert min(counts[0]) > 30


@pytest.mark.parametrize("model_type", in_tiers(TYPES, ["qwen3_5_text"]))
def test_padding_on_the_left_writes_nothing(model_type: str, seed: int) -> None:
    """Of tokens that are no padding; what padding outputs differs between kernels of attention."""
    reference = reference_of(model_type, seed)
    tokens = torch.randint(61, (3, 20))
    mask = torch.ones_like(tokens)
    mask[0, :7] = mask[1, :1] = 0
    model = parallel_model(reference, Topology(world=1)).eval()
    with torch.no_grad():
        expected = reference(tokens, attention_mask=mask).logits
        logits = model(tokens, attention_mask=mask).logits
    check_close({"logits": logits[mask == 1]}, {"logits": expected[mask == 1]})


@pytest.mark.parametrize("model_type", in_tiers(TYPES, ["olmo_hybrid"]))
@pytest.mark.parametrize(
    "modules",
    in_tiers([["attention_core"], ["attention_core", "norm"]], [["attention_core", "norm"]]),
)
def test_recomputation_changes_no_bit(model_type: str, modules: list[str], seed: int) -> None:
    reference = reference_of(model_type, seed)
    tokens = torch.randint(61, (2, CHUNK + 9))
    plain = parallel_model(reference, Topology(world=1)).train()
    model = copy.deepcopy(plain)
    policy = RecomputePolicy(mode="selective", modules=modules)
    memory = ActivationMemory(model, policy, ActivationCheckpointing(), torch.device("cpu"))
    assert list(memory.layers) == [0, 1, 2]
    for one in (plain, model):
        one(tokens, labels=tokens).loss.backward()
    for (name, weight), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(weight.grad, other.grad), name


def count_solve(matrix: Any, sides: Any, *_: Any, **__: Any) -> int:
    """A multiply-add for half of the pairs of the system's rows."""
    return math.prod(matrix) * sides[-1]


def count_convolution_backward(gradient: Any, tokens: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Of each channel by itself: for the gradients of the tokens and of the weight."""
    return 4 * math.prod(gradient) * weight[-1]


COUNTED = {
    torch.ops.aten.linalg_solve_triangular: count_solve,
    torch.ops.aten.convolution_backward: count_convolution_backward,
}
"""What torch does not count, or as if it were dense."""


@pytest.mark.parametrize(("key_heads", "value_heads"), in_tiers([(4, 4), (2, 8)], [(4, 4)]))
def test_flops_are_those_that_torch_counts(key_heads: int, value_heads: int) -> None:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 24,
        "vocab_size": 300,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    config = AutoConfig.for_model("qwen3_5_text", **sizes)
    config._attn_implementation = "eager"  # torch counts no fused kernel of a CPU
    model = ZeroTPForCausalLM(config, Topology(world=1), seed=1).train()
    tokens = torch.randint(300, (2, 3 * CHUNK))
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as ran:
        model(tokens, shift_labels=tokens).loss.backward()
    assert ran.get_total_flops() == pytest.approx(model_flops(model.spec, 2, 3 * CHUNK), rel=0.03)
    if key_heads == value_heads:  # else transformers multiplies repeated keys
        native = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with FlopCounterMode(display=False, custom_mapping=COUNTED) as ran:
            native(tokens, labels=tokens).loss.backward()
        expected = model_flops(model.spec, 2, 3 * CHUNK)
        assert ran.get_total_flops() == pytest.approx(expected, rel=0.03)


def test_what_is_refused() -> None:
    config = decoder_config(linear_num_key_heads=3, linear_num_value_heads=6)
    spec = ZeroTPForCausalLM(config, device="meta").spec
    with pytest.raises(UserError, match=r"tensor: linear key heads 3 ≠ .* that divides 3$"):
        spec.check(2)
    with pytest.raises(UserError, match=r"qk_clip_threshold: .* leave it out"):
        spec.check_qk_clip()
    for fields, message in (
        ({"linear_num_value_heads": 5}, r"linear_num_value_heads: 5 value heads ≠ 2 key heads"),
        ({"layer_types": ["linear_attention"] * 3}, r"layer_types: no layer has full_attention"),
    ):
        with pytest.raises(UserError, match=message):
            ZeroTPForCausalLM(decoder_config(**fields), device="meta")
    without_linear = decoder_config(linear_num_key_heads=3, linear_num_value_heads=6)
    without_linear.layer_types = ["full_attention"] * 3
    ZeroTPForCausalLM(without_linear, device="meta").spec.check(2)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("qwen3_next", {"full_attention_interval": 0}, r"model\.full_attention_interval: "),
        ("olmo_hybrid", {"linear_a_log_min": -5.0}, "linear_a_log_min: -5 is negative"),
        ("olmo_hybrid", {"linear_a_log_max": 0.0}, "linear_a_log_max: 0 is the end of a range"),
        ("olmo_hybrid", {"linear_dt_min": 1.0}, "linear_dt_max: 0.1 is the end .* begins at 1;"),
    ],
)
def test_values_without_a_model_are_refused(
    model_type: str, fields: dict[str, Any], message: str
) -> None:
    written = general_fields(model_type) | fields
    if "full_attention_interval" in fields:
        del written["layer_types"]
    with pytest.raises(UserError, match=message):
        config_from_block(written)


def decoder_config(**fields: Any) -> Any:
    return AutoConfig.for_model(**general_fields("qwen3_5_text") | fields)
