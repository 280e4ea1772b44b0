"""Routers that choose with a bias against transformers' own classes: in one process, over TP ranks,
in 16 bit, from live models and in files.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from tests.support.compare import check_close, grid, leaf
from tests.support.corrected_routers import (
    LENGTH,
    OWN,
    VOCABULARY,
    bias_of,
    biases,
    corrected_fields,
    gates,
    reference_model,
)
from tests.support.experts import inputs
from tests.support.native import check_gradients, parallel_model
from tests.support.pools import Pools
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import ConfigError
from zero_tp.model.architectures import ARCHITECTURES
from zero_tp.model.architectures.spec import CORRECTED_ROUTERS
from zero_tp.model.flops import model_flops
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.huggingface import parallel_model as adopt
from zero_tp.model.moe import ROUTERS, CorrectedRouter, _LinearFP32
from zero_tp.parallel.layout import audit, stored_buffers
from zero_tp.parallel.topology import Topology
from zero_tp.tools.planning.memory import model_size

EACH_TYPE = pytest.mark.parametrize("model_type", in_tiers(list(OWN), ["ernie4_5_moe"]))


def compare(model_type: str, topology: Topology, padded: bool = False, **changes: Any) -> Any:
    """Logits, loss and every gradient equal those of transformers' class; our model."""
    reference = reference_model(1, model_type=model_type, **changes)
    batch = inputs(VOCABULARY, padded=padded)
    model = parallel_model(reference, topology).train()
    expected, found = reference(**batch), model(**batch, return_logits=True)
    check_close({"logits": found.logits}, {"logits": expected.logits.detach()})
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    expected.loss.backward()
    found.loss.backward()
    check_gradients(model, reference)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_in_fp32_keep_no_fp32_input(seed: int, dtype: torch.dtype) -> None:
    """Logits and gradients have the bits of torch's own operations."""
    torch.manual_seed(seed)
    tensor, weight = torch.randn(37, 24).to(dtype), torch.randn(7, 24).to(dtype)
    outputs = []
    for linear in (_LinearFP32.apply, lambda x, w: F.linear(x.float(), w.float())):
        given, matrix = leaf(tensor), leaf(weight)
        saved: list[torch.dtype] = []

        def pack(kept: torch.Tensor, saved: list[torch.dtype] = saved) -> torch.Tensor:
            saved.append(kept.dtype)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            logits = linear(given, matrix)
        logits.backward(logits.detach().cos())
        outputs.append((logits.detach(), given.grad, matrix.grad))
        if linear == _LinearFP32.apply:
            assert saved == [dtype] * 2
    for own, other in zip(*outputs, strict=True):
        assert own is not None and other is not None and torch.equal(own, other)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    *((model_type, {}) for model_type in OWN),
    ("glm4_moe", {"norm_topk_prob": False}),
    ("glm4_moe", {"topk_group": 3}),
    ("dots1", {"n_group": 1, "topk_group": 1}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_norm_min": 0.9}),
    ("ernie4_5_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.7}),
]


@pytest.mark.parametrize(("model_type", "changes"), in_tiers(CHANGES, CHANGES[:3]))
def test_one_process(model_type: str, changes: dict[str, Any]) -> None:
    compare(model_type, Topology(world=1), padded=True, **changes)


def partial_gradients(model_type: str, world: int, sequence: bool) -> list[str]:
    """Parameters whose gradients a hook sums, of the layers' MLPs."""
    model = compare(model_type, grid(world, sequence))
    audit(model, model.topology)
    sums = model.gradient_hooks.sums
    assert all(gradient_sum.fired == 1 for gradient_sum in sums.values())
    return [name for name in sums if ".mlp." in name]


@pytest.mark.parametrize(
    ("model_type", "world", "sequence"),
    in_tiers(
        [(name, world, sequence) for name in OWN for world in (2, 4) for sequence in (False, True)],
        [("glm4_moe", 2, True)],
        every=3,
    ),
)
def test_every_gradient_over_ranks(
    ranks: Pools, model_type: str, world: int, sequence: bool
) -> None:
    """Of a shared expert without a gate, no parameter has a partial gradient."""
    routers = [f"transformer.layers.{layer}.mlp.router.weight" for layer in (1, 2)]
    assert ranks(world).run(partial_gradients, model_type, world, sequence) == [routers] * world


@THOROUGH
@pytest.mark.parametrize("model_type", OWN)
def test_a_model_in_bf16_chooses_by_biases_in_fp32(model_type: str) -> None:
    """As transformers' class does when it is opened in bf16."""
    # torch's grouped product takes rows of 16 bytes. With this seed rounding decides no choice.
    reference = reference_model(2, model_type=model_type, moe_intermediate_size=16)
    model = parallel_model(reference, Topology(world=1), dtype=torch.bfloat16)
    reference.to(torch.bfloat16)
    for gate, bias in zip(gates(reference), (one for _, one in stored_buffers(model)), strict=True):
        bias_of(gate).data = bias.clone()
    tokens = inputs(VOCABULARY, padded=False)["input_ids"]
    with torch.no_grad():
        expected, found = reference(tokens).logits.float(), model(tokens).logits.float()
    assert (found - expected).norm() <= 0.02 * expected.norm()


@THOROUGH
@pytest.mark.parametrize("model_type", OWN)
def test_flops_and_active_parameters(model_type: str) -> None:
    """FLOPs are those that torch counts, in groups that it multiplies one by one."""
    config = AutoConfig.for_model(**corrected_fields(model_type, moe_intermediate_size=17))
    config._attn_implementation = "eager"  # torch counts no fused kernel of a CPU
    model = ZeroTPForCausalLM(config, Topology(world=1), seed=1).train()
    batch = inputs(VOCABULARY, padded=False)
    with FlopCounterMode(display=False) as ran:
        model(batch["input_ids"], shift_labels=batch["labels"]).loss.backward()
    assert ran.get_total_flops() == pytest.approx(model_flops(model.spec, 3, LENGTH), rel=0.03)
    size = model_size(config, 1, False)
    assert size.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert size.num_parameters - size.active_parameters == 2 * (6 - 3) * 3 * 24 * 17


@EACH_TYPE
def test_a_live_model_is_adopted_with_its_biases(model_type: str) -> None:
    reference = reference_model(1, model_type=model_type)
    model = adopt(reference, Topology(world=1))
    found = torch.stack([bias.flatten() for _, bias in stored_buffers(model)])
    assert torch.equal(found, biases(reference))
    assert all(weight.requires_grad for weight in model.parameters())


def there_and_back(theirs: str, ours: str, world: int) -> None:
    ZeroTPForCausalLM.from_pretrained(theirs, grid(world, True)).save_pretrained(ours)


@pytest.mark.parametrize("model_type", in_tiers(list(OWN), ["ernie4_5_moe"]))
def test_import_and_export_over_ranks_keep_every_bit(
    ranks: Pools, tmp_path: Path, model_type: str
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    reference_model(1, model_type=model_type).save_pretrained(theirs)
    ranks(2).run(there_and_back, str(theirs), str(ours), 2)
    expected, found = (load_file(folder / "model.safetensors") for folder in (theirs, ours))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sum(name.endswith("e_score_correction_bias") for name in found) == 2


@THOROUGH
@pytest.mark.parametrize("model_type", OWN)
def test_a_state_dict_of_the_class_is_read(model_type: str, tmp_path: Path) -> None:
    """It stacks experts, and has ERNIE's biases under another name than files."""
    reference = reference_model(1, model_type=model_type)
    model = ZeroTPForCausalLM(reference.config, Topology(world=1), seed=3)
    model.load_state_dict(reference.state_dict())
    found = torch.stack([bias.flatten() for _, bias in stored_buffers(model)])
    assert torch.equal(found, biases(reference))
    reference.config.save_pretrained(tmp_path)
    tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    opened = ZeroTPForCausalLM.from_pretrained(tmp_path)
    assert all(
        torch.equal(tensor, model.state_dict()[name])
        for name, tensor in opened.state_dict().items()
    )


def test_a_resized_vocabulary_and_a_copy_keep_the_biases() -> None:
    reference = reference_model(1)
    model = adopt(reference, Topology(world=1))
    model.resize_token_embeddings(VOCABULARY + 3)
    for one in (model, copy.deepcopy(model)):
        audit(one, one.topology)
        found = torch.stack([bias for _, bias in stored_buffers(one)])
        assert torch.equal(found, biases(reference))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("glm4_moe", {"n_group": 4}, "n_group: 6 experts ≠ 4 groups × 1.5"),
        ("glm4_moe", {"n_group": 6}, "n_group: 6 experts ≠ 6 groups × 1; give a divisor"),
        ("glm4_moe", {"topk_group": 4}, "topk_group: 4 groups a token, of 3"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok: 5 experts a token, of 4"),
        ("dots1", {"first_k_dense_replace": 3}, "first_k_dense_replace: no layer has experts"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts: null, with which transformers"),
        ("ernie4_5_moe", {"moe_k": 7}, "moe_k: 7 experts a token, of 6"),
        ("ernie4_5_moe", {"moe_layer_start_index": 3}, "moe_layer_start_index: no layer has"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    ],
)
def test_refusals(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ARCHITECTURES[model_type].spec(
            AutoConfig.for_model(**corrected_fields(model_type, **changes))
        )


def test_a_spec_knows_which_routers_have_a_bias() -> None:
    corrected = {name for name, router in ROUTERS.items() if issubclass(router, CorrectedRouter)}
    assert corrected == set(CORRECTED_ROUTERS)
