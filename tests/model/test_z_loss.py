"""Z-losses of a model's forward against autograd on transformers' own logits."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.compare import gradient_of, grid
from tests.support.corrected_routers import corrected_fields
from tests.support.decoders import decoder
from tests.support.encoders import encoder, rows_for
from tests.support.encoders import fields_of as encoder_fields
from tests.support.experts import fields, inputs
from tests.support.native import check_gradients, gradients_to_ours, parallel_model
from tests.support.pools import Pools
from tests.support.tiny_configs import general_fields
from tests.support.z_losses import recorded_router_logits, router_z_loss, sum_of_token_z_losses
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model.causal_lm import next_tokens
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.elementwise import compile_elementwise
from zero_tp.parallel.topology import Topology

TOKEN, ROUTER = 0.03, 0.05
"""Weights so large that a wrong z-loss is far from the tolerances."""
VOCABULARY = 61
"""TP 2 and 4 pad it."""

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": general_fields("gpt2"),
    "untied": general_fields("llama") | {"tie_word_embeddings": False},
    # Capped logits, whose z-loss has the slope of the cap in its gradient.
    "capped": general_fields("gemma2") | {"final_logit_softcapping": 3.0},
    "mixtral": fields("mixtral"),
    "scaled": fields("granitemoeshared", logits_scaling=3.0),
    "shared experts": fields("qwen2_moe", output_router_logits=False),
    "sigmoid": corrected_fields("glm4_moe"),
    "biased": fields("gpt_oss"),
}
WITH_EXPERTS = ("mixtral", "scaled", "shared experts", "sigmoid", "biased")


def reference_loss(
    reference: Any, batch: dict[str, Tensor], router: float, divisor: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole loss of transformers' model, and its parts as an output of ours names them."""
    targets = next_tokens(batch["labels"])
    with recorded_router_logits(reference) as routers:
        output = reference(**{name: batch[name] for name in batch if name != "labels"})
    count = float((targets != -100).sum()) if divisor is None else divisor
    total = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
    parts = {"z_loss": sum_of_token_z_losses(output.logits, targets) / count}
    loss = total / count
    if getattr(output, "aux_loss", None) is not None:
        loss = loss + reference.router_aux_loss_coef * output.aux_loss
    parts["reported_loss"] = loss.detach()
    loss = loss + TOKEN * parts["z_loss"]
    if router:
        parts["router_z_loss"] = router_z_loss(routers, batch.get("attention_mask"))
        loss = loss + router * parts["router_z_loss"]
    return loss, parts


def compare(
    name: str, tensor: int, sequence: bool, recompute: str, divisor: float | None
) -> list[str]:
    """The loss, its parts and every gradient; the names of the parts."""
    topology = grid(tensor, sequence) if tensor > 1 else Topology(world=1)
    reference = decoder(MODELS[name], 1)
    batch = inputs(VOCABULARY, padded=True)
    router = ROUTER if name in WITH_EXPERTS else 0.0
    expected, parts = reference_loss(reference, batch, router, divisor)
    model = parallel_model(reference, topology).train()
    model.set_z_losses(TOKEN, router)
    policy = RecomputePolicy(mode=recompute)
    ActivationMemory(model, policy, ActivationCheckpointing(), torch.device("cpu"))
    found = model(**batch, num_items_in_batch=divisor)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for part, value in parts.items():
        assert found[part].item() == pytest.approx(value.item(), rel=1e-5), part
    expected.backward()
    found.loss.backward()
    check_gradients(model, reference)
    return sorted(parts)


CASES = [
    (name, tensor, sequence, recompute, divisor)
    for name in MODELS
    for tensor, sequence in ((1, False), (2, False), (2, True), (4, True))
    for recompute, divisor in (("none", None), ("full", 7.5))
]
FIRST = [
    ("capped", 2, True, "none", None),
    ("gpt2", 1, False, "none", None),
    ("mixtral", 2, True, "full", 7.5),
    ("sigmoid", 2, False, "none", None),
    ("scaled", 1, False, "full", 7.5),
]


@pytest.mark.parametrize(
    ("name", "tensor", "sequence", "recompute", "divisor"), in_tiers(CASES, FIRST)
)
def test_the_loss_its_parts_and_every_gradient(
    ranks: Pools, name: str, tensor: int, sequence: bool, recompute: str, divisor: float | None
) -> None:
    """Rows are padded, and padding counts neither as a label nor as a router's token."""
    arguments = name, tensor, sequence, recompute, divisor
    parts = [compare(*arguments)] if tensor == 1 else ranks(tensor).run(compare, *arguments)
    routers = ["router_z_loss"] if name in WITH_EXPERTS else []
    assert parts == [["reported_loss", *routers, "z_loss"]] * tensor


@THOROUGH
def test_compiled_elementwise_work_has_the_same_gradients() -> None:
    reference = decoder(MODELS["capped"], 1)
    batch = inputs(VOCABULARY, padded=True)
    expected, _ = reference_loss(reference, batch, 0.0, None)
    expected.backward()
    model = parallel_model(reference, Topology(world=1)).train()
    model.set_z_losses(TOKEN, 0.0)
    compile_elementwise(model, torch.device("cpu"))
    model(**batch).loss.backward()
    check_gradients(model, reference)


def masked(model_type: str, tensor: int, sequence: bool, sentence: bool) -> float:
    """The z-loss of an encoder, whose loss and gradients are compared with transformers'."""
    topology = grid(tensor, sequence) if tensor > 1 else Topology(world=1)
    changes = {} if sentence else {"architectures": ["BertForMaskedLM"]}
    fields = encoder_fields(model_type, **changes)
    reference = encoder(fields, 1)
    rows = rows_for(fields, 2)
    output = reference(**rows)
    logits = output.prediction_logits if sentence else output.logits
    count = (rows["labels"] != -100).sum()
    z_loss = sum_of_token_z_losses(logits, rows["labels"]) / count
    model = parallel_model(reference, topology).train()
    model.set_z_losses(TOKEN, 0.0)
    found = model(**rows)
    assert found.reported_loss.item() == pytest.approx(output.loss.item(), rel=1e-5)
    assert found.z_loss.item() == pytest.approx(z_loss.item(), rel=1e-5)
    loss = output.loss + TOKEN * z_loss
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert ("z_loss" in model.metric_names) and found.masked_loss < found.loss
    loss.backward()
    found.loss.backward()
    check_gradients(model, reference)
    return float(found.z_loss)


@pytest.mark.parametrize(
    ("model_type", "tensor", "sequence", "sentence"),
    in_tiers(
        [
            (model_type, *split, sentence)
            for model_type in ("bert", "megatron-bert")
            for split in ((1, False), (2, False), (2, True))
            for sentence in (False, True)
            if sentence or model_type == "bert"
        ],
        [("bert", 2, True, True)],
    ),
)
def test_masked_tokens_have_a_z_loss_and_orders_of_segments_none(
    ranks: Pools, model_type: str, tensor: int, sequence: bool, sentence: bool
) -> None:
    arguments = model_type, tensor, sequence, sentence
    found = [masked(*arguments)] if tensor == 1 else ranks(tensor).run(masked, *arguments)
    assert found == found[:1] * tensor


def test_an_evaluation_has_no_z_loss() -> None:
    """Of a model whose training has both; also after its weights were taken back."""
    reference = decoder(MODELS["mixtral"], 1)
    batch = inputs(VOCABULARY, padded=True)
    model = parallel_model(reference, Topology(world=1))
    plain = model.eval()(**batch)
    model.set_z_losses(TOKEN, ROUTER)
    assert torch.equal(model(**batch).loss, plain.loss)
    scores = model.train()(**batch, reduction="none")
    for output in (model.eval()(**batch), scores):
        assert not {"z_loss", "router_z_loss", "reported_loss"} & output.keys()
    trained = model.train()(**batch)
    assert trained.loss > trained.reported_loss and torch.equal(trained.reported_loss, plain.loss)
    model.set_z_losses(0.0, 0.0)
    assert torch.equal(model(**batch).loss, plain.loss) and model.metric_names == ("aux_loss",)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_batch_without_labels_has_no_gradient(name: str) -> None:
    """As a micro-batch of a step whose other ones have labels; its routers still have tokens."""
    model = parallel_model(decoder(MODELS[name], 1), Topology(world=1)).train()
    model.set_z_losses(TOKEN, 0.0)
    ignored = inputs(VOCABULARY, padded=False)
    ignored["labels"] = torch.full_like(ignored["labels"], -100)
    found = model(**ignored, num_items_in_batch=5.0)
    assert found.z_loss.item() == 0.0
    if name == "gpt2":
        found.loss.backward()
        assert all(not weight.grad.any() for weight in model.parameters())


IN_BF16 = {"mixtral": {"intermediate_size": 24}, "sigmoid": {"moe_intermediate_size": 16}}
"""Sizes that transformers' product of groups takes in bf16."""


def all_gradients(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


@pytest.mark.parametrize("name", in_tiers(["untied", "capped", "mixtral", "sigmoid"], ["untied"]))
def test_bf16_rounds_no_more_than_transformers(name: str) -> None:
    """The distance of all gradients from those in fp32 is at most 1.2 times that of transformers'
    class in bf16.
    """
    exact = decoder(MODELS[name] | IN_BF16.get(name, {}), 1)
    with torch.no_grad():
        for weight in exact.parameters():
            weight.copy_(weight.bfloat16())
    rounded = copy.deepcopy(exact)
    for weight in rounded.parameters():  # transformers keeps routers' biases in fp32
        weight.data = weight.bfloat16()
    batch = inputs(VOCABULARY, padded=True)
    router = ROUTER if name in WITH_EXPERTS else 0.0
    expected, parts = reference_loss(exact, batch, router, None)
    expected.backward()
    reference_loss(rounded, batch, router, None)[0].backward()
    model = parallel_model(exact, Topology(world=1), dtype="bfloat16").train()
    model.set_z_losses(TOKEN, router)
    found = model(**batch)
    found.loss.backward()
    for part, value in parts.items():
        assert found[part].item() == pytest.approx(value.item(), rel=1e-2), part
    in_fp32 = all_gradients(gradients_to_ours(model.config, exact))
    theirs = all_gradients(gradients_to_ours(model.config, rounded))
    ours = all_gradients({name: gradient_of(weight) for name, weight in model.named_parameters()})
    assert (ours - in_fp32).norm() <= 1.2 * (theirs - in_fp32).norm()


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("gpt2", (-1e-5, 0.0), "z_loss: -1e-05 is not a finite number of at least 0"),
        ("gpt2", (math.nan, 0.0), "z_loss: NaN is not a finite number of at least 0"),
        (
            "mixtral",
            (0.0, math.inf),
            "router_z_loss: Infinity is not a finite number of at least 0",
        ),
        ("gpt2", (0.0, 1e-3), "router_z_loss: 0.001, but a gpt2 has no experts; leave it out"),
    ],
)
def test_wrong_weights_are_refused(name: str, weights: tuple[float, float], message: str) -> None:
    model = parallel_model(decoder(MODELS[name], 1), Topology(world=1))
    with pytest.raises(UserError) as error:
        model.set_z_losses(*weights)
    assert str(error.value) == message
    assert not any(model.z_losses)
