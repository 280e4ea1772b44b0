"""No field of a Hugging Face config is silently ignored: each is used, known to change nothing, or
refused by name.

For every table and every field, values are changed in a `config.json`. Either the file is refused
in a line that names the field, or our model with that config still equals transformers' own: loss,
logits and every gradient, in fp32. What is called irrelevant must change nothing in transformers'
model, what is called used must change something.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.compare import check_close
from tests.support.encoders import rows_for
from tests.support.native import (
    Native,
    buffers_of_files,
    gradients,
    gradients_to_ours,
    native_model,
    our_class,
    to_ours,
)
from tests.support.tiny_configs import GENERAL_SIZES, fields_of, general_fields
from tests.tiers import in_tiers
from zero_tp.base.errors import UserError
from zero_tp.model.architectures import ARCHITECTURES, Architecture
from zero_tp.model.architectures.configs import (
    config_from_block,
    config_from_directory,
    config_from_json,
)
from zero_tp.model.architectures.fields import FIXED_IN_EVERY_CONFIG, IRRELEVANT_IN_EVERY_CONFIG
from zero_tp.parallel.layout import stored_tensors

EACH_TABLE = pytest.mark.parametrize("model_type", ARCHITECTURES)
FULL, SLIDING = "full_attention", "sliding_attention"
ROPES = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "rope_theta": 100.0,
    },
    {"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [2.0] * 5, "factor": 2.0},
    {"rope_type": "default", "factor": 2.0},
    {"rope_type": "linear", "factor": -1.0},
)
# Values to try besides what the field's type suggests. The first of a used field makes a
# difference.
VALUES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (64,),
    **dict.fromkeys(("num_experts", "num_local_experts"), (6, 1, 0)),
    "num_experts_per_tok": (3, 6, 0),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (20, 0)),
    "decoder_sparse_step": (2, 0, 4),
    "n_routed_experts": (6, 5, 2, None),
    "n_shared_experts": (2, 0, None),
    "n_group": (4, 3, 8, None),
    "topk_group": (2, 3, 0, None),
    "first_k_dense_replace": (0, 2, 3, -1, None),
    "mlp_layer_types": (
        ("sparse", "dense", "sparse"),
        ("sparse",) * 3,
        ("dense",) * 3,
        ("sparse",),
        ("odd",) * 3,
    ),
    "q_lora_rank": (12, None, 0),
    "kv_lora_rank": (10, 0),
    "qk_nope_head_dim": (8, 0),
    "qk_rope_head_dim": (6, 0),
    "v_head_dim": (6, 12, None, 0),
    "rope_interleave": (False, None),
    "routed_scaling_factor": (2.5, 1.0),
    "moe_num_experts": (6, 1, 0, None),
    "moe_k": (3, 6, 0, None),
    "moe_num_shared_experts": (0, 2, -1, None),
    "moe_layer_interval": (2, 4, 0, None),
    "moe_layer_start_index": (0, 2, 3, None),
    "moe_layer_end_index": (1, -1, 0, None),
    "moe_norm_min": (1e-12, 0.0, None),
    "swiglu_limit": (0.2, 0.0, None),
    "swiglu_alpha": (0.9, 0.0, None),
    "mlp_only_layers": ([1], [0, 7], None, [0, 1, 2], [-1]),
    "linear_num_key_heads": (4, 1, 3, 0),
    "linear_num_value_heads": (2, 6, 3, 0),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), (4, 0)),
    "linear_conv_kernel_dim": (4, 1, 0),
    "full_attention_interval": (2,),
    "clip_qkv": (0.5, None, -1.0),
    "type_vocab_size": (4, 0),
    "classifier_dropout": (0.3,),
    **dict.fromkeys(("hidden_size", "n_embd"), (32, 22)),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (2, 5)),
    **dict.fromkeys(("num_attention_heads", "n_head"), (2, 8, 5)),
    "num_key_value_heads": (4, 1, 3),
    "head_dim": (8, None, 7, -2),
    **dict.fromkeys(("intermediate_size", "n_inner"), (28, 0)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (40, 0)),
    "sliding_window": (3, None, 0),
    "max_window_layers": (0, 2),
    "layer_types": (
        (SLIDING, FULL, SLIDING),
        (FULL,) * 3,
        ("chunked_attention",) * 3,
        (FULL,),
        (FULL, "odd", FULL),
    ),
    **dict.fromkeys(
        ("hidden_act", "activation_function"),
        ("relu", "gelu", "gelu_new", "gelu_fast", "silu", "mish"),
    ),
    "rope_parameters": ROPES,
    "rope_scaling": (
        {"type": "linear", "factor": 2.0},
        {"type": "default", "rope_theta": 300.0},
        {"type": "su", "factor": 2.0},
        None,
    ),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), (300.0, 0.0)),
    "rotary_pct": (0.5, 1.0, 0.0),
    "partial_rotary_factor": (0.7, 0.5, 0.0),
    "pad_token_id": (5, None, -1),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), (7, None, 200)),
    "model_type": (),  # it chooses the table
    "architectures": (["Other"],),
    "dtype": ("bfloat16",),
    "torch_dtype": ("bfloat16",),
    "id2label": ({"0": "a", "1": "b", "2": "c"},),
    "label2id": ({"a": 0},),
    "num_labels": (5,),
    "problem_type": ("regression",),
    "task_specific_params": ({"a": 1},),
    "summary_activation": ("tanh",),
    "chunk_size_feed_forward": (4,),
    "pruned_heads": ({"0": [1]}, {}),
    "attention_chunk_size": (4, None),
    "per_layer_config": ({"0": {"intermediate_size": 8}}, None),
    "quantization_config": ({"quant_method": "awq"}, None),
    "auto_map": ({"AutoModelForCausalLM": "modeling_own.Own"},),
    "attn_implementation": ("sdpa",),
    "ignore_keys_at_rope_validation": (["mscale"],),
    "output_attentions": (False,),  # true asks transformers for its eager attention
    "return_dict": (True,),  # with false transformers' own classes fail
    "transformers.js_config": ({},),
}
# Used, but for what no output shows: the longest sequence, and how weights are drawn.
# What a field does not fit to.
OTHER_SIDE = (
    "num_experts_per_tok|n_group|topk_group|moe_k|moe_layer_start_index|mlp_layer_types|"
    "rope_parameters|rotary_pct|hidden_size|n_embd|num_key_value_heads|linear_num_value_heads|"
    "layer_types"
)
NOT_IN_OUTPUT = (
    *("max_position_embeddings", "initializer_range", "embedding_initializer_range"),
    *("linear_a_log_min", "linear_a_log_max"),
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
)
ALMOST_ALL = 1 - 1e-12  # of a dropout: nothing is left of what it drops, in both models alike


def is_used(architecture: Architecture, name: str) -> bool:
    fields = architecture.fields
    return name in (
        *fields.sizes,
        *fields.positive,
        *fields.dropouts,
        *fields.choices,
        *fields.read,
    )


def values_of(model_type: str, name: str) -> tuple[Any, ...]:
    """Other values than the field's own."""
    architecture = ARCHITECTURES[model_type]
    if name in architecture.fields.dropouts:
        return (ALMOST_ALL, 1.0)
    if name in VALUES:
        return VALUES[name]
    only = {**FIXED_IN_EVERY_CONFIG, **architecture.fields.fixed}.get(name)
    own = only[0] if only is not None else getattr(CONFIG_MAPPING[model_type], name, None)
    if isinstance(own, bool):
        return (not own, own)
    if isinstance(own, int | float):
        return (3 * own + 0.25,) if isinstance(own, float) else (own + 1,)
    return ("another",) if isinstance(own, str) else (True, "another", 1)


@dataclasses.dataclass
class Outcome:
    """Of transformers' model: what a field can change."""

    logits: Tensor
    gradients: dict[str, Tensor]

    def equals(self, other: Outcome) -> bool:
        same = self.logits.shape == other.logits.shape and torch.equal(self.logits, other.logits)
        same = same and self.gradients.keys() == other.gradients.keys()
        pairs = (
            [(tensor, other.gradients[name]) for name, tensor in self.gradients.items()]
            if same
            else []
        )
        return same and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def set_weights(model: Any) -> Any:
    """Random weights that depend on the names and shapes alone."""
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *buffers_of_files(model)):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator) * 0.3
            if name.endswith("linear_attn.conv1d.weight"):
                drawn *= 0.02  # see `shrink_linear_values` of decoders.py
            parameter.copy_(
                drawn + 1.0 if parameter.ndim == 1 and name.endswith("weight") else drawn
            )
    return model


def compared(written: dict[str, Any], directory: Path, *, train: bool = False) -> Outcome:
    """Ours equals theirs, each with what its own reader makes of the file.

    Raises:
        UserError: we refuse the file.
    """
    (directory / "config.json").write_text(json.dumps(written))
    config = config_from_directory(directory)
    config._attn_implementation = "sdpa"
    native = AutoConfig.from_pretrained(directory)
    native.architectures = None  # what it says decides nothing
    native._experts_implementation = (
        "eager"  # the default refuses rows that are no multiples of 16 bytes
    )
    causal = ARCHITECTURES[config.model_type].spec(config).causal
    attention = "sdpa" if causal and config.model_type != "gpt_oss" else "eager"
    theirs = set_weights(native_model(native, attn_implementation=attention))
    source = Native(theirs)
    ours = our_class(config)(config, source=source, dtype=torch.float32)
    tokens = torch.arange(2 * 12).view(2, 12) * 5 % 61
    rows = (
        {"input_ids": tokens, "labels": tokens}
        if causal
        else rows_for({**GENERAL_SIZES, "architectures": None}, 1, 2, 12)
    )
    theirs.train(train), ours.train(train)
    expected, found = theirs(**rows), ours(**rows, return_logits=True)
    logits = "logits" if causal else "prediction_logits"
    check_close({"logits": found[logits]}, {"logits": expected[logits].detach()})
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    if train:  # dropout leaves noughts, whose gradients are noughts
        return Outcome(expected[logits].detach(), {})
    expected.loss.backward()
    found.loss.backward()
    check_close(gradients(ours), gradients_to_ours(theirs.config, theirs))
    return Outcome(expected[logits].detach(), gradients(theirs))


@EACH_TABLE
def test_every_field_is_in_one_class(model_type: str) -> None:
    architecture = ARCHITECTURES[model_type]
    listed = [*architecture.fields.names(), *IRRELEVANT_IN_EVERY_CONFIG, *FIXED_IN_EVERY_CONFIG]
    declared = [field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])]
    assert len(declared) > 20
    assert sorted(set(listed)) == sorted(listed), "a field is in two classes"
    assert set(architecture.fields.undeclared) <= set(architecture.fields.names()) - set(declared)
    # What transformers takes out of a config as settings of generation is of no table.
    assert not set(GenerationConfig._get_default_generation_params()) & set(
        architecture.fields.names()
    ) - {"use_cache"}


@EACH_TABLE
def test_all_fields_of_a_config_are_read_again(model_type: str) -> None:
    """A checkpoint of a run that began from a Hugging Face directory holds every field, and no
    directory.
    """
    # Some classes have no default of a size, or sizes that do not fit.
    required: dict[str, dict[str, int]] = {
        "dots1": {"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 6},
        "glm4_moe": {"head_dim": 128},
        "ministral": {"head_dim": 128},
        "nemotron": {"num_key_value_heads": 8},
    }
    config = config_from_block({"model_type": model_type, **required.get(model_type, {})})
    assert config_from_json(config.to_dict(), Path("gone")).to_dict() == config.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", in_tiers(list(ARCHITECTURES), ["qwen3"], every=4))
def test_every_field_does_what_its_class_says(model_type: str, tmp_path: Path) -> None:
    architecture, base = ARCHITECTURES[model_type], general_fields(model_type)
    plain = compared(base, tmp_path)
    plain_train = compared(base, tmp_path, train=True)
    tried = 0
    # Those that every file may have, all at once: a test for each would take minutes.
    notes = {
        name: values_of(model_type, name)[0]
        for name in IRRELEVANT_IN_EVERY_CONFIG
        if values_of(model_type, name)
    }
    assert compared({**base, **notes}, tmp_path).equals(plain)
    for name in fields_of(model_type):
        if name in notes:
            continue
        used, train = is_used(architecture, name), name in architecture.fields.dropouts
        changed = []
        for value in values_of(model_type, name):
            if value == base.get(name):
                continue
            tried += 1
            try:
                outcome = compared({**base, name: value}, tmp_path, train=train)
            except UserError as error:
                assert re.search(rf"config\.json: ({name}|{OTHER_SIDE})\b", str(error)), (
                    name,
                    error,
                )
                assert len(str(error).splitlines()) == 1
                continue
            except Exception as error:
                raise AssertionError(f"{name} = {value!r}: {error}") from error
            changed.append(not outcome.equals(plain_train if train else plain))
        if not used:
            assert not any(changed), (
                f"{name} changes the model, but its class is not one of those used"
            )
        elif name not in (*NOT_IN_OUTPUT, "n_positions"):
            assert any(changed) or not changed, f"{name} is called used, but changes nothing"
    assert tried > 30 and len(notes) > 30


@EACH_TABLE
def test_new_weights_are_drawn_as_the_class_draws_them(model_type: str) -> None:
    """Mean and standard deviation of every matrix, of linear attention's decays and of other drawn
    vectors, zeros for padding tokens; norms and other biases bit for bit.
    """
    sizes = {"hidden_size": 256, "vocab_size": 211, "initializer_range": 0.07}
    wide = {
        "intermediate_size": 512,
        "head_dim": 64,
        "qk_rope_head_dim": 64,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "linear_num_key_heads": 32,
        "linear_num_value_heads": 128,
    }
    small = general_fields(model_type)
    written = small | sizes | {name: size for name, size in wide.items() if name in small}
    config = CONFIG_MAPPING[model_type](
        **{name: value for name, value in written.items() if name != "model_type"}
    )
    expected = to_ours(config, native_model(config).state_dict())
    ours = dict(stored_tensors(our_class(config)(copy.deepcopy(config), seed=1)))
    assert ours.keys() == expected.keys()
    for end in ("sinks", "router.bias"):  # small ones: those of all layers together
        names = [name for name in ours if name.endswith(end)]
        if names and model_type == "gpt_oss":
            drawn = torch.cat([ours.pop(name).detach() for name in names])
            assert 0.5 < drawn.std().item() / sizes["initializer_range"] < 1.8
            assert drawn.abs().min() > 0 and expected[names[0]].std() > 0
    for name, parameter in ours.items():
        theirs = expected[name]
        if parameter.ndim == 1 and not name.endswith(("A_log", "dt_bias")):
            assert torch.equal(parameter, theirs), name
            continue
        # Of two estimates from n numbers: the ratio of deviations has one of 1/√n, the difference
        # of means of σ·√(2/n).
        mean, deviation, few = theirs.mean().item(), theirs.std().item(), parameter.numel() ** -0.5
        assert parameter.std().item() == pytest.approx(deviation, rel=max(0.05, 4 * few)), name
        assert parameter.mean().item() == pytest.approx(mean, abs=1e-6 + 6 * deviation * few), name
        zeros, wanted = (
            (rows.abs().sum(-1) == 0).nonzero().tolist() for rows in (parameter, theirs)
        )
        assert zeros == wanted, name
