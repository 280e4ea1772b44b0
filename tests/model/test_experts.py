"""Mixtures of experts against transformers' own classes, in one process and over TP ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.checkpoint_runs import (
    VOCABULARY,
    batch_of,
    resume_and_train,
    train_and_save,
    write_config,
)
from tests.support.compare import check_close, grid
from tests.support.experts import LENGTH, OWN, ROUTINGS, fields, inputs, reference_model
from tests.support.native import Native, check_gradients, parallel_model
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import ConfigError
from zero_tp.base.settings.schema import Logging, ZeroTP
from zero_tp.model.architectures import ARCHITECTURES
from zero_tp.model.flops import model_flops
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.layout import audit
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.config.model_block import check_model
from zero_tp.tools.planning.memory import model_size

CASES: list[tuple[str, dict[str, Any]]] = [
    *((model_type, {}) for model_type in OWN),
    *(("mixtral", changes) for changes in ({"num_experts_per_tok": 1}, {"num_experts_per_tok": 7})),
    ("mixtral", {"sliding_window": 5}),
    ("gpt_oss", {"attention_bias": False, "num_key_value_heads": 4, "swiglu_alpha": 0.9}),
    ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 2}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "norm_topk_prob": False}),
    (
        "olmoe",
        {
            "attention_bias": True,
            "num_key_value_heads": 4,
            "clip_qkv": None,
            "norm_topk_prob": True,
        },
    ),
]


def compare(
    model_type: str, topology: Topology, routing: str, padded: bool, changes: dict[str, Any]
) -> tuple[Any, Any]:
    """Logits, both losses and every gradient against transformers' class; our model and its
    output.
    """
    reference = reference_model(fields(model_type, **changes), 1, routing)
    batch = inputs(61, padded=padded)
    model = parallel_model(reference, topology).train()
    expected, found = reference(**batch), model(**batch, return_logits=True)
    check_close({"logits": found.logits}, {"logits": expected.logits.detach()})
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-5)
    expected.loss.backward()
    found.loss.backward()
    check_gradients(model, reference)
    return model, expected


ONE_PROCESS = [
    (*case, routing, padded) for case in CASES for routing in ROUTINGS for padded in (False, True)
]
ONE_PROCESS_FIRST = [
    (model_type, changes, routing, padded)
    for model_type, changes, routing, padded in ONE_PROCESS
    if (
        padded and (list(OWN).index(model_type) - ROUTINGS.index(routing)) % len(ROUTINGS) < 2
        if not changes
        else routing == "random" and not padded
    )
]
"""Of each model_type's own config two of the routings."""


@pytest.mark.parametrize(
    ("model_type", "changes", "routing", "padded"), in_tiers(ONE_PROCESS, ONE_PROCESS_FIRST)
)
def test_one_process(model_type: str, changes: dict[str, Any], routing: str, padded: bool) -> None:
    model, expected = compare(model_type, Topology(world=1), routing, padded, changes)
    per_token = model.spec.experts.per_token
    counts = [
        layer.topk(per_token).indices.flatten().bincount(minlength=7)
        for layer in expected.router_logits
    ]
    if routing == "one expert":
        assert all(count[3] == 3 * LENGTH for count in counts)
    elif routing == "unused expert" and per_token < 7:
        assert all(count[3] == 0 for count in counts)
    elif routing == "ties":
        assert all((logits == 0).all() for logits in expected.router_logits)


def partial_gradients(model_type: str, world: int, sequence: bool, routing: str) -> tuple[int, ...]:
    """Routers, their biases and gates of shared experts whose gradients a hook sums."""
    model, _ = compare(model_type, grid(world, sequence), routing, True, {})
    audit(model, model.topology)
    sums = model.gradient_hooks.sums
    assert all(gradient_sum.fired == 1 for gradient_sum in sums.values())
    return tuple(
        sum(name.endswith(end) for name in sums)
        for end in ("router.weight", "router.bias", "shared.gate")
    )


ON_RANKS = list(itertools.product(OWN, [2, 4], [False, True], ROUTINGS))
ON_RANKS_FIRST = [
    ("mixtral", 4, True, "random"),
    ("mixtral", 2, False, "unused expert"),
    ("qwen2_moe", 2, True, "ties"),
    ("qwen2_moe", 2, False, "random"),
    ("qwen3_moe", 2, True, "one expert"),
    ("qwen3_moe", 4, False, "ties"),
    ("olmoe", 2, True, "unused expert"),
    ("olmoe", 2, False, "one expert"),
    ("gpt_oss", 4, True, "random"),
]
"""Each model_type with and without SP, gpt_oss with it; each routing twice."""


@pytest.mark.parametrize(
    ("model_type", "world", "sequence", "routing"), in_tiers(ON_RANKS, ON_RANKS_FIRST, every=3)
)
def test_both_losses_and_every_gradient(
    ranks: Pools, model_type: str, world: int, sequence: bool, routing: str
) -> None:
    """The router of each layer with experts has a partial gradient, and a hook sums it; under SP
    the shared expert's gate too.
    """
    layers = 2 if model_type == "qwen2_moe" else 3
    shared = layers if sequence and model_type == "qwen2_moe" else 0
    found = ranks(world).run(partial_gradients, model_type, world, sequence, routing)
    biases = layers if model_type == "gpt_oss" else 0
    assert found == [(layers, biases, shared)] * world


def test_the_loss_is_balanced_only_where_the_config_says_so() -> None:
    reference = reference_model(fields(output_router_logits=False), 1)
    batch = inputs(61, padded=False)
    model = parallel_model(reference, Topology(world=1)).train()
    found = model(**batch)
    assert found.aux_loss is None and model.metric_names == ()
    assert found.loss.item() == pytest.approx(reference(**batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 8}, "num_experts_per_tok: 8 experts a token, of 7"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers: no layer has experts"),
        ("qwen3_moe", {"decoder_sparse_step": 4}, "decoder_sparse_step: no layer has experts"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 0},
            "sliding_window: 0 is not positive",
        ),
        (
            "qwen2_moe",
            {"num_key_value_heads": None},
            "num_key_value_heads: null, with which transformers fails",
        ),
        ("olmoe", {"clip_qkv": -1.0}, "clip_qkv: -1.0 is not positive"),
    ],
)
def test_refusals(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ARCHITECTURES[model_type].spec(AutoConfig.for_model(**fields(model_type, **changes)))


def test_a_model_in_bf16_counts_as_transformers_does() -> None:
    """The loss's statistics are of probabilities rounded to bf16, and of a choice among these."""
    # torch's grouped product takes rows of 16 bytes.
    reference = reference_model(fields(intermediate_size=24), 1).to(torch.bfloat16)
    batch = inputs(61, padded=True)
    with torch.no_grad():
        model = parallel_model(reference, Topology(world=1), dtype=torch.bfloat16)
        assert model(**batch).aux_loss.item() == pytest.approx(
            reference(**batch).aux_loss.item(), rel=1e-2
        )


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
    made = model_size(config, 1, False)
    layers = 2 if model_type == "qwen2_moe" else 3
    biases = 2 * 20 + 24 if model_type == "gpt_oss" else 0
    expected = layers * (7 - 2) * (3 * 24 * 20 + biases)
    assert made.num_parameters - made.active_parameters == expected


def test_the_load_balancing_loss_of_a_published_model_can_be_chosen(tmp_path: Path) -> None:
    """Published configs leave it off."""
    reference_model(fields("olmoe", output_router_logits=False), 1).save_pretrained(tmp_path)
    given = {
        "from_pretrained": str(tmp_path),
        "output_router_logits": True,
        "router_aux_loss_coef": 0.2,
    }
    needed: dict[str, Any] = {
        "data": {"train": "x", "sequence_length": 16},
        "training": {"steps": 1},
    }
    config = check_model(ZeroTP.model_validate({"model": given, **needed}))
    experts = ARCHITECTURES["olmoe"].spec(config).experts
    assert experts is not None and experts.loss_weight == 0.2


def test_shares_of_experts_are_refused_without_experts() -> None:
    needed: dict[str, Any] = {
        "data": {"train": "x", "sequence_length": 16},
        "training": {"steps": 1},
    }
    block = ZeroTP.model_validate(
        {"model": {"model_type": "gpt2"}, "logging": {"experts": True}, **needed}
    )
    with pytest.raises(ConfigError, match=r"zero_tp\.logging\.experts: gpt2 has no experts"):
        check_model(block)


def train_guarded(guarded: bool) -> str:
    """The message on a rank of a step in which rank 1's second router has its rows in another
    order, or "".
    """
    from zero_tp.base.errors import UserError
    from zero_tp.engine.engine import TrainingEngine

    config = AutoConfig.for_model(**fields())
    batch = inputs(61, padded=False)["input_ids"]
    engine = TrainingEngine.from_dict(
        config, grid(2, False), deepspeed_settings(1, micro_batch=3), seed=1
    )
    engine.train_step([(batch[:, :-1], batch[:, 1:])], guarded=1)
    if engine.topology.tensor_rank == 1:
        weight = engine.model.get_parameter("transformer.layers.1.mlp.router.weight").data
        weight.copy_(weight.flip(0))
    try:
        engine.train_step([(batch[:, :-1], batch[:, 1:])], guarded=2 if guarded else None)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("guarded", [True, False])
def test_ranks_that_choose_otherwise_are_stopped(ranks: Pools, guarded: bool) -> None:
    expected = "in step 2 transformer.layers.1.mlp.router chose other experts" if guarded else ""
    for message in ranks(2).run(train_guarded, guarded):
        assert message.startswith(expected) and bool(message) == guarded


def there_and_back(theirs: str, ours: str, world: int) -> None:
    ZeroTPForCausalLM.from_pretrained(theirs, grid(world, True)).save_pretrained(ours)


@pytest.mark.parametrize("world", in_tiers([2, 4], [4]))
@pytest.mark.parametrize("model_type", OWN)
def test_import_and_export_keep_every_bit(
    ranks: Pools, tmp_path: Path, model_type: str, world: int
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    reference_model(fields(model_type), 1).save_pretrained(theirs)
    ranks(world).run(there_and_back, str(theirs), str(ours), world)
    expected, found = (load_file(folder / "model.safetensors") for folder in (theirs, ours))
    # Granite's files stack a layer's experts.
    stacked = sum(tensor.dim() == 3 and len(tensor) == 7 for tensor in found.values())
    listed = sum(".experts.6." in name for name in found)
    assert found.keys() == expected.keys() and (stacked if stacked else listed) >= 2 * 3
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def run_file(path: Path, model_type: str, tensor: int, stage: int) -> Path:
    """A run whose loss does not depend on the micro-batch: without the load-balancing loss."""
    config = json.loads(write_config(path, stage, "fp32", tensor).read_text())
    config["zero_tp"]["model"] = fields(
        model_type, vocab_size=VOCABULARY, output_router_logits=False
    )
    path.write_text(json.dumps(config))
    return path


@THOROUGH
@pytest.mark.parametrize(
    ("model_type", "tensor", "stage"),
    in_tiers(
        [(kind, *grid) for kind in ("qwen2_moe", "olmoe") for grid in ((1, 3), (4, 2))],
        [("olmoe", 4, 2)],
    ),
)
def test_a_checkpoint_resumes_on_another_grid(
    ranks: Pools, tmp_path: Path, model_type: str, tensor: int, stage: int
) -> None:
    """From TP 2 × DP 2 at ZeRO-1; its export opens in transformers and computes the same."""
    before, after = (
        run_file(tmp_path / f"{name}.json", model_type, *of)
        for name, of in (("before", (2, 1)), ("after", (tensor, stage)))
    )
    run = tmp_path / "run"
    whole = ranks(4).run(train_and_save, str(before), str(run), [3], 6)
    again = ranks(4).run(resume_and_train, str(after), str(run), 6)
    for found, expected in zip(again[0]["steps"], whole[0]["steps"][3:], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    to_huggingface(run, tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert model.config.model_type == model_type
    assert (model(batch_of(0)[:2, :-1]).logits - whole[0]["logits"]).abs().max() < 1e-5


def shares_of_a_step(seed: int) -> tuple[dict[str, float], list[torch.Tensor]]:
    """What a step of TP 2 × DP 2 logs, and transformers' counts of its tokens' choices."""
    from zero_tp.base.settings.recompute import RecomputePolicy
    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.run.run_callbacks import ExpertShares

    reference, topology = reference_model(fields("qwen2_moe"), seed), grid(2, True)
    settings, full = (
        deepspeed_settings(1, micro_batch=2, accumulation=2, lr=0.0),
        RecomputePolicy(mode="full"),
    )
    engine = TrainingEngine.from_dict(
        reference.config, topology, settings, seed=0, source=Native(reference), recompute=full
    )
    logged: list[dict[str, float]] = []
    logging = SimpleNamespace(zero_tp=SimpleNamespace(logging=Logging(interval=2)))
    state: Any = SimpleNamespace(
        engine=engine, topology=topology, step=1, is_last_step=False, log=logged.append
    )
    state.config, state.is_due = logging, lambda interval: state.step % interval == 0
    shares = ExpertShares()
    shares.on_start(state)
    tokens = inputs(61, padded=False, batch=8)["input_ids"]
    own = tokens.chunk(topology.data)[topology.data_rank].chunk(2)
    with torch.no_grad():
        logits = reference(tokens, output_router_logits=True).router_logits
    for state.step in (1, 2):  # at a rate of 0: both of the weights that transformers has
        shares.on_step_begin(state)
        engine.run_step([(rows, rows) for rows in own])
        shares.on_step_end(state)
        engine.evaluate([(rows, rows) for rows in own])
    (line,) = logged
    return line, [
        layer.topk(2).indices.flatten().bincount(minlength=7) / tokens.numel() for layer in logits
    ]


@THOROUGH
def test_the_share_of_each_expert_is_logged(ranks: Pools) -> None:
    for line, expected in ranks(4).run(shares_of_a_step, 3):
        assert line.pop("step") == 2
        rows = zip((0, 2), expected, strict=True)
        wanted = {f"experts/layer_{n}/{e}": share for n, row in rows for e, share in enumerate(row)}
        assert line == {name: pytest.approx(float(share)) for name, share in wanted.items()}
        assert sum(line.values()) == pytest.approx(2 * 2)
