"""Every decoder's model_type against transformers' own class, for random small configs.

In one process and split over ranks: a bare backward, DeepSpeed's ZeRO, import and export.
test_generate.py has generation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.compare import check_close, grid
from tests.support.decoders import (
    LENGTH,
    MODEL_TYPES,
    decided_seed,
    decoder,
    decoder_fields,
    seeded_decoder,
    tokens_for,
)
from tests.support.families import ENCODERS, FAMILIES, model_sizes
from tests.support.native import Native, check_gradients, parallel_model
from tests.support.pools import Pools
from tests.tiers import examples, in_tiers
from zero_tp.model.architectures import architecture_of
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.norm import NORMS
from zero_tp.model.transformer import LAYERS
from zero_tp.parallel.layout import Replicated, audit, layout_of
from zero_tp.parallel.topology import Topology

EACH_TYPE = pytest.mark.parametrize("model_type", MODEL_TYPES)
RECOMPUTED = ("attention_core", "mlp_activation", "norm")


def compare(model: Any, reference: Any, tokens: torch.Tensor, expected: Any) -> int:
    """Logits, loss and every gradient against those of transformers, whose backward has run; how
    many gradients.
    """
    found = model(tokens, labels=tokens, return_logits=True)
    check_close({"logits": found.logits}, {"logits": expected.logits.detach()})
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    found.loss.backward()
    return check_gradients(model, reference)


@EACH_TYPE
@examples(2, 25)
@given(data=st.data())
def test_one_process(model_type: str, data: st.DataObject) -> None:
    fields = data.draw(decoder_fields(model_type))
    attention = data.draw(st.sampled_from(["sdpa", "eager"]), label="attention")
    reference = decoder(fields, data.draw(st.integers(0, 2**31), label="seed"), attention)
    tokens = tokens_for(fields)
    expected = reference(input_ids=tokens, labels=tokens)
    expected.loss.backward()
    compare(parallel_model(reference, Topology(world=1)), reference, tokens, expected)


def same_as_native(world: int, fields: dict[str, Any], seed: int, attention: str) -> dict[str, int]:
    """With and without SP; how many gradients were compared, and how many of them are parts that a
    hook sums.

    Args:
        seed: a `decided_seed`, which each rank would look for again.
        attention: that of the config.
    """
    reference = seeded_decoder(fields, seed, attention)
    tokens = tokens_for(fields)
    expected = reference(input_ids=tokens, labels=tokens)
    expected.loss.backward()
    # The length that does not divide, which is computed without SP where no gradient is taken.
    odd = tokens[:, : LENGTH - 3]
    with torch.no_grad():
        expected_odd = reference(input_ids=odd).logits
    counts = {}
    for sequence in (False, True):
        topology = grid(world, sequence)
        model = parallel_model(reference, topology).train()
        audit(model, topology)
        counts[f"gradients, SP {sequence}"] = compare(model, reference, tokens, expected)
        assert all(gradient_sum.fired == 1 for gradient_sum in model.gradient_hooks.sums.values())
        counts[f"hooks, SP {sequence}"] = len(model.gradient_hooks.sums)
        with torch.no_grad():
            check_close({"odd": model(odd).logits}, {"odd": expected_odd})
    return counts


SPLIT_FIRST = [
    *("gpt2", "gpt_neox", "phi3", "qwen3", "qwen2_moe", "olmoe", "youtu"),
    *("deepseek_v3", "glm4_moe_lite", "gpt_oss"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
]
"""Every way to split a layer: one fused weight and learned positions, interleaved heads and a
parallel residual, fused queries and MLP, norms of heads, a shared expert, a norm of all keys,
latents, sinks, linear attention. Of each type `test_one_process` has the maths.
"""


@pytest.mark.parametrize("world", in_tiers([2, 4], [2]))
@pytest.mark.parametrize("model_type", in_tiers(MODEL_TYPES, SPLIT_FIRST, every=2))
@examples(2, 3)
@given(data=st.data())
def test_logits_loss_and_every_gradient(
    ranks: Pools, world: int, model_type: str, data: st.DataObject
) -> None:
    fields = data.draw(decoder_fields(model_type))
    attention = data.draw(st.sampled_from(["sdpa", "eager"]), label="attention")
    seed = decided_seed(fields, data.draw(st.integers(0, 2**31), label="seed"), attention)
    counts = ranks(world).run(same_as_native, world, fields, seed, attention)
    assert counts == counts[:1] * world
    layers = fields.get("num_hidden_layers") or fields["n_layer"]
    replicated = bool(fields.get("num_key_value_heads", world) % world)
    parts = attention_layers(fields) * (2 + 2 * biases_of_keys(fields)) * replicated
    positions = model_type == "gpt2"
    assert counts[0]["gradients, SP True"] == counts[0]["gradients, SP False"] >= 6 * layers + 2
    for sequence in (False, True):
        others = partial_norms(fields, world, sequence=sequence) + partial_mlps(
            fields, sequence=sequence
        )
        others += sequence * latents(fields)
        assert counts[0][f"hooks, SP {sequence}"] == parts + sequence * positions + others


@pytest.mark.parametrize("world", in_tiers([2, 4], [4]))
@pytest.mark.parametrize(
    "family",
    in_tiers(
        [family for family in FAMILIES if family not in ENCODERS],
        ["grouped queries", "fewer KV heads than TP", "output norms"],
    ),
)
def test_each_family(ranks: Pools, seed: int, world: int, family: str) -> None:
    """The same for what has to come up: grouped, replicated and unevenly used KV heads, windows,
    a padding token.
    """
    fields = model_sizes(seed, family)
    decided = decided_seed(fields, seed)
    counts = ranks(world).run(same_as_native, world, fields, decided, "sdpa")
    assert counts == counts[:1] * world
    # Keys, values and their biases.
    replicated = bool(fields.get("num_key_value_heads", world) % world)
    parts = attention_layers(fields) * (2 + 2 * biases_of_keys(fields)) * replicated
    assert counts[0]["hooks, SP False"] == parts + partial_norms(fields, world, sequence=False)


def partial_mlps(fields: dict[str, Any], *, sequence: bool) -> int:
    """Routers, their biases and learnt activations, of which a rank sees its part of the outputs,
    and the gates of shared experts on a sequence shard.
    """
    config = AutoConfig.for_model(**fields)
    spec = architecture_of(config).spec(config)
    kind = fields["model_type"]
    gated = spec.experts is not None and spec.experts.shared and spec.experts.shared_gate
    others = bool(sequence and gated) + (kind == "gpt_oss")
    return len(spec.expert_layers) * (1 + others) + 2 * spec.mlps.count("xielu")


def latents(fields: dict[str, Any]) -> int:
    """Parameters of latents and their norms, which see all tokens, or those of a sequence shard."""
    if "kv_lora_rank" not in fields:
        return 0
    each = 2 + bool(fields.get("attention_bias"))
    return fields["num_hidden_layers"] * each * (1 + (fields["q_lora_rank"] is not None))


def partial_norms(fields: dict[str, Any], world: int, *, sequence: bool) -> int:
    """Parameters of norms of which a rank sees a part of the rows: its own heads, or its sequence
    shard. Of the norm of all keys together it sees a part where ranks share KV heads.
    """
    config = AutoConfig.for_model(**fields)
    spec = architecture_of(config).spec(config)
    attention = len(spec.mixed_by("attention"))
    norms = 2 * attention * (spec.query_key_norm == "heads")
    if sequence:
        layers = [LAYERS[name] for name in spec.layer_names]
        norms += sum(len(layer.attention_norms + layer.mlp_norms) for layer in layers) + 1
    shared = attention * (spec.query_key_norm == "whole" and spec.kv_heads % world > 0)
    of_outputs = len(spec.mixed_by("gated_delta"))
    return norms * len(NORMS[spec.norm].parameter_names) + shared + of_outputs


def attention_layers(fields: dict[str, Any]) -> int:
    """The number of layers with queries, keys and values."""
    config = AutoConfig.for_model(**fields)
    return len(architecture_of(config).spec(config).mixed_by("attention"))


def biases_of_keys(fields: dict[str, Any]) -> bool:
    flags = ("attention_bias", "use_bias", "qkv_bias")
    return fields["model_type"] == "qwen2" or any(fields.get(name) for name in flags)


def trained(
    fields: dict[str, Any], seed: int, tensor: int, sequence: bool, stage: int
) -> list[float]:
    """One step through DeepSpeed; what it makes of the gradients' norm and of the loss."""
    from zero_tp.base.settings.recompute import RecomputePolicy
    from zero_tp.engine.engine import TrainingEngine

    topology, reference = grid(tensor, sequence), decoder(fields, seed)
    settings = {
        "train_micro_batch_size_per_gpu": 4 // topology.data,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0, "torch_adam": True},
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    policy = (
        RecomputePolicy(mode="selective", modules=list(RECOMPUTED))
        if stage == 1
        else RecomputePolicy(mode="full")
    )
    engine = TrainingEngine.from_dict(
        reference.config, topology, settings, seed=0, source=Native(reference), recompute=policy
    )
    tokens = torch.randint(
        fields["vocab_size"], (4, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    replicas = tokens.chunk(topology.data)
    own = replicas[topology.data_rank], targets.chunk(topology.data)[topology.data_rank]
    losses = [engine.train_step([own])]
    norms = [engine.gradient_norm]
    losses.append(engine.train_step([own]))
    norms.append(engine.gradient_norm)

    weights = [weight for weight in reference.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, eps=1e-3, weight_decay=0.0)
    for step in range(2):
        reference.zero_grad()
        # The balancing loss is not linear in the tokens: each replica has its own.
        loss = torch.stack(
            [reference(input_ids=part, labels=part).loss for part in replicas]
        ).mean()
        loss.backward()
        whole = torch.stack([parameter.grad.double().norm() for parameter in weights]).norm().item()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-5)
        assert norms[step] == pytest.approx(whole, rel=1e-5)
        optimizer.step()
    replicated = [
        name
        for name, parameter in engine.model.named_parameters()
        if isinstance(layout_of(parameter), Replicated)
        and layout_of(parameter).gradient == "partial"  # type: ignore[union-attr]
    ]
    return [*losses, *norms, float(len(replicated))]


@pytest.mark.parametrize(
    ("tensor", "sequence", "stage"),
    in_tiers([(2, True, 3), (4, False, 1), (4, True, 3)], [(2, True, 3)]),
)
@pytest.mark.parametrize(
    "model_type", in_tiers(MODEL_TYPES, ["gpt2", "gpt_neox", "phi3", "qwen3"], every=3)
)
@examples(1, 2)
@given(data=st.data())
def test_steps_through_zero(
    ranks: Pools, model_type: str, tensor: int, sequence: bool, stage: int, data: st.DataObject
) -> None:
    """The losses and norms of two steps, of which the second shows the first one's update."""
    fields = data.draw(decoder_fields(model_type))
    seed = data.draw(st.integers(0, 2**31), label="seed")
    found = ranks(4).run(trained, fields, seed, tensor, sequence, stage)
    assert found == found[:1] * 4
    # Not that it falls: a step of such a small model may overshoot.
    assert found[0][1] != pytest.approx(found[0][0], rel=1e-5)


@EACH_TYPE
@examples(1, 10)
@given(data=st.data())
def test_import_and_export_keep_every_bit(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("models")
    reference = decoder(
        data.draw(decoder_fields(model_type)), data.draw(st.integers(0, 2**31), label="seed")
    )
    reference.save_pretrained(
        folder / "theirs", max_shard_size=data.draw(st.sampled_from(["5GB", "20KB"]))
    )
    reference.generation_config.update(temperature=0.5, do_sample=True, eos_token_id=[0, 3])
    reference.generation_config.save_pretrained(folder / "theirs")
    model = ZeroTPForCausalLM.from_pretrained(folder / "theirs", Topology(world=1))
    model.save_pretrained(folder / "ours")
    again = AutoModelForCausalLM.from_pretrained(folder / "ours")
    assert type(again) is type(reference)
    ours, theirs = stored_weights(folder / "ours"), stored_weights(folder / "theirs")
    assert ours.keys() == theirs.keys()
    expected = reference.state_dict()
    if model_type == "youtu":
        # Its class reads the padding row as zeros, whatever the file has.
        assert same(ours, theirs)
        expected = AutoModelForCausalLM.from_pretrained(folder / "theirs").state_dict()
    assert same(again.state_dict(), expected)
    assert again.generation_config.to_diff_dict() == reference.generation_config.to_diff_dict()
    assert differing(again.config.to_dict(), reference.config.to_dict()) <= {
        "_name_or_path",
        "architectures",
    }


def stored_weights(directory: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in directory.glob("*.safetensors")]
    return {name: weight for file in files for name, weight in file.items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def differing(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    return {
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    }
