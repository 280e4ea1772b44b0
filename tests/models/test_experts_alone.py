"""Mixtures of experts in one process against transformers' own classes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.compare import check_close
from tests.support.experts import LENGTH, OWN, ROUTINGS, fields, inputs, reference_model
from tests.support.native import check_gradients, parallel_model
from zero_tp.architectures import ARCHITECTURES
from zero_tp.config.model_block import check_model
from zero_tp.config.schema import ZeroTP
from zero_tp.errors import ConfigError
from zero_tp.huggingface import ZeroTPForCausalLM
from zero_tp.models.flops import model_flops
from zero_tp.parallel.layout import layout_of
from zero_tp.planning.memory import model_of
from zero_tp.topology import Topology


def chosen_counts(logits: Iterable[torch.Tensor], per_token: int) -> torch.Tensor:
    """How many tokens choose each expert of each layer in transformers' class, [layers, E]."""
    return torch.stack([layer.topk(per_token).indices.flatten().bincount(minlength=7) for layer in logits])


CASES: list[tuple[str, dict[str, Any]]] = [
    *((model_type, {}) for model_type in OWN),
    *(("mixtral", changes) for changes in ({"num_experts_per_tok": 1}, {"num_experts_per_tok": 7})),
    ("mixtral", {"sliding_window": 5}),
    ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 2}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "norm_topk_prob": False}),
    ("olmoe", {"attention_bias": True, "num_key_value_heads": 4, "clip_qkv": None, "norm_topk_prob": True}),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_logits_both_losses_and_every_gradient(
    model_type: str, routing: str, padded: bool, changes: dict[str, Any]
) -> None:
    reference = reference_model(fields(model_type, **changes), 1, routing)
    batch = inputs(61, padded=padded)
    model = parallel_model(reference, Topology(world=1)).train()
    expected, found = reference(**batch), model(**batch, return_logits=True)
    # Padding that sees no token through a window has no defined output.
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    check_close({"logits": found.logits[seen]}, {"logits": expected.logits.detach()[seen]})
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-5)
    counts = chosen_counts(expected.router_logits, reference.config.num_experts_per_tok)
    if routing == "one expert":
        assert (counts[:, 3] == 3 * LENGTH).all()
    elif routing == "unused expert" and reference.config.num_experts_per_tok < 7:
        assert (counts[:, 3] == 0).all()
    elif routing == "ties":
        assert all((logits == 0).all() for logits in expected.router_logits)
    expected.loss.backward()
    found.loss.backward()
    check_gradients(model, reference)


def test_the_loss_is_balanced_only_where_the_config_says_so() -> None:
    reference = reference_model(fields(output_router_logits=False), 1)
    batch = inputs(61, padded=False)
    model = parallel_model(reference, Topology(world=1)).train()
    found = model(**batch)
    assert found.aux_loss is None and model.figures == ()
    assert found.loss.item() == pytest.approx(reference(**batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 8}, "num_experts_per_tok: 8 experts a token, of 7"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1 is refused"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers: no layer has experts"),
        ("qwen3_moe", {"decoder_sparse_step": 4}, "decoder_sparse_step: no layer has experts"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window: 0 is not positive"),
        ("qwen2_moe", {"num_key_value_heads": None}, "num_key_value_heads: null: transformers computes nothing"),
        ("olmoe", {"clip_qkv": -1.0}, "clip_qkv: -1.0 is not positive"),
    ],
)
def test_refusals(model_type: str, changes: dict[str, Any], message: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match=message):
        ARCHITECTURES[model_type].spec(AutoConfig.for_model(**fields(model_type, **changes)))


def test_a_model_in_bf16_counts_as_transformers_does() -> None:
    """The loss's statistics are of probabilities rounded to bf16, and of a choice among these."""
    # torch's grouped product takes rows of 16 bytes.
    reference = reference_model(fields(intermediate_size=24), 1).to(torch.bfloat16)
    batch = inputs(61, padded=True)
    with torch.no_grad():
        model = parallel_model(reference, Topology(world=1), dtype=torch.bfloat16)
        assert model(**batch).aux_loss.item() == pytest.approx(reference(**batch).aux_loss.item(), rel=1e-2)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("model_type", OWN)
def test_a_rank_reads_its_slices_of_published_files(model_type: str, tensor: int, tmp_path: Path) -> None:
    """What transformers saves: one tensor an expert."""
    reference = reference_model(fields(model_type), 1)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    whole = parallel_model(reference, Topology(world=1)).state_dict()
    for rank in range(tensor):
        model = ZeroTPForCausalLM.from_pretrained(tmp_path, Topology(tensor, world=tensor, rank=rank))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, layout_of(parameter).shard(whole[name], rank, tensor)), name


@pytest.mark.parametrize("model_type", OWN)
def test_flops_are_those_that_torch_counts(model_type: str) -> None:
    """In groups that torch multiplies one by one: it counts no product of all groups."""
    odd = {"intermediate_size": 17, "moe_intermediate_size": 17}
    config = parallel_model(reference_model(fields(model_type), 1), Topology(world=1)).config
    for name, size in odd.items():
        if name in vars(config):
            setattr(config, name, size)
    config._attn_implementation = "eager"  # torch counts no fused kernel of a CPU
    model = ZeroTPForCausalLM(config, Topology(world=1), seed=1).train()
    batch = inputs(61, padded=False)
    with FlopCounterMode(display=False) as ran:
        model(batch["input_ids"], shift_labels=batch["labels"]).loss.backward()
    assert ran.get_total_flops() == pytest.approx(model_flops(model.spec, 3, LENGTH), rel=0.03)


@pytest.mark.parametrize("model_type", OWN)
def test_active_parameters_are_those_that_a_token_meets(model_type: str) -> None:
    config = parallel_model(reference_model(fields(model_type), 1), Topology(world=1)).config
    made = model_of(config, 1, False)
    layers = 2 if model_type == "qwen2_moe" else 3
    assert made.whole - made.active == layers * (7 - 2) * 3 * 24 * 20


def test_the_load_balancing_loss_of_a_published_model_can_be_chosen(tmp_path: Path) -> None:
    """Published configs leave it off."""
    reference_model(fields("olmoe", output_router_logits=False), 1).save_pretrained(tmp_path)
    given = {"from_pretrained": str(tmp_path), "output_router_logits": True, "router_aux_loss_coef": 0.2}
    needed: dict[str, Any] = {"data": {"train": "x", "sequence_length": 16}, "training": {"steps": 1}}
    config = check_model(ZeroTP.model_validate({"model": given, **needed}))
    experts = ARCHITECTURES["olmoe"].spec(config).experts
    assert experts is not None and experts.loss_weight == 0.2


def test_shares_of_experts_are_refused_without_experts() -> None:
    needed: dict[str, Any] = {"data": {"train": "x", "sequence_length": 16}, "training": {"steps": 1}}
    block = ZeroTP.model_validate({"model": {"model_type": "gpt2"}, "logging": {"experts": True}, **needed})
    with pytest.raises(ConfigError, match=r"zero_tp\.logging\.experts: gpt2 has no experts"):
        check_model(block)
