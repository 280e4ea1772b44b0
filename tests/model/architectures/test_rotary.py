"""Cosine and sine of every rope type are, bit for bit, those of transformers' own modules."""

from __future__ import annotations

import random
import re
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.tiny_configs import general_fields
from tests.tiers import in_tiers
from zero_tp.model.architectures import ARCHITECTURES, architecture_of
from zero_tp.model.architectures.common import FULL
from zero_tp.model.architectures.configs import config_from_block
from zero_tp.model.architectures.rotary import ROPE_KEYS
from zero_tp.model.position import compute_rotation
from zero_tp.run.config import ConfigError

ROTARY = [name for name, found in ARCHITECTURES.items() if "rope_parameters" in found.fields.read]
# Whose rotary parameters are nested by the type of layer.
BY_TYPE = ("olmo3", "gemma3_text")
# Whose class refuses all but "default" and "longrope" itself.
SCALED = [name for name in ROTARY if name != "phi3"]
POSITIONS, ORIGINAL = 48, 16
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": ORIGINAL}
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 500000.0},
    {"type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"type": "dynamic", "factor": 4.0, "rope_theta": 777.0},
    YARN,
    {**YARN, "attention_factor": 1.7},
    {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4},
    {**YARN, "mscale": 0.9},
    {**YARN, "beta_fast": 20.0, "beta_slow": 2.0},
    {**YARN, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0},  # the original length is max_position_embeddings
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": 100.0,
    },
)


def fields(model_type: str, **given: Any) -> dict[str, Any]:
    written = {
        **general_fields(model_type),
        "max_position_embeddings": POSITIONS,
        "hidden_size": 128,
        **given,
    }
    for name in ("head_dim", "qk_rope_head_dim"):
        if name in written:
            written[name] = 20
    if model_type in BY_TYPE and "rope_parameters" in given:
        written["layer_types"] = [FULL] * written["num_hidden_layers"]
        written["rope_parameters"] = {FULL: given["rope_parameters"]}
    if "rotary_pct" not in given:
        written.pop("rotary_pct", None)
    return written


def native_module(config: Any) -> Any:
    """The rotary module of the config's class."""
    model: Any = AutoModelForCausalLM
    package = sys.modules[model._model_mapping[type(config)].__module__]
    name = next(name for name in vars(package) if name.endswith("RotaryEmbedding"))
    return getattr(package, name)(config)


def same_as_native(written: dict[str, Any], seed: int) -> None:
    """For lengths within and beyond those the model was made for, and for positions that start
    later.
    """
    config = config_from_block(written)
    spec = architecture_of(config).spec(config)
    # The last kind of layer that rotates.
    number, rotary = [(place, one) for place, one in enumerate(spec.rotaries) if one][-1]
    draw = random.Random(seed)
    own = CONFIG_MAPPING[written["model_type"]](
        **{name: value for name, value in written.items() if name != "model_type"}
    )
    for first, last in (
        (0, 9),
        (0, POSITIONS),
        (0, draw.randint(POSITIONS + 1, 400)),
        (draw.randint(50, 90), 100),
    ):
        module = native_module(own)  # anew: it remembers lengths
        positions = torch.arange(first, last)[None]
        for dtype in (torch.float32, torch.bfloat16):
            kind = (config.layer_types[number],) if config.model_type in BY_TYPE else ()
            expected = module(torch.zeros(1, dtype=dtype), positions, *kind)
            cosine, sine, *_ = compute_rotation(rotary, positions, last, dtype)
            backwards = -1 if config.model_type == "nanochat" else 1
            for ours, theirs in zip((cosine, backwards * sine), expected, strict=True):
                # transformers has each angle twice; a table of its own dtype is widened later.
                twice = (
                    ours.repeat_interleave(2, -1)
                    if config.model_type == "cohere2"
                    else torch.cat((ours, ours), -1)
                )
                # gpt_oss's class has each once.
                twice = ours if config.model_type == "gpt_oss" else twice
                assert torch.equal(twice[:, 0].to(theirs.dtype), theirs), (first, last)
                assert ours.dtype == {"activations": dtype}.get(rotary.arithmetic, torch.float32)


# Each way to rotate: whole heads, a part, neighbours in two precisions, by type, backwards.
WAYS = ["gpt_neox", "llama", "glm4", "cohere2", "olmo3", "gemma3_text", "nanochat"]


@pytest.mark.parametrize("model_type", in_tiers(ROTARY, WAYS))
def test_each_type_is_the_native_one(model_type: str, seed: int) -> None:
    assert {one.get("rope_type", one.get("type")) for one in PARAMETERS} == set(ROPE_KEYS)
    for parameters in PARAMETERS:
        if model_type == "phi3" and parameters.get("rope_type") != "default":
            # Its class takes no other.
            with pytest.raises(ConfigError, match=r"^zero_tp\.model\.rope_parameters"):
                config_from_block(fields(model_type, rope_parameters=dict(parameters)))
            continue
        same_as_native(fields(model_type, rope_parameters=dict(parameters)), seed)
        # As older versions wrote it.
        if model_type in BY_TYPE:
            # With "type" the class would keep its own "default" (see below).
            named = {"type": "rope_type"}
            old = {named.get(name, name): value for name, value in parameters.items()}
            old.pop("rope_theta", None)
            given = {"rope_scaling": old, "rope_theta": 5000.0}
            same_as_native({**fields(model_type), **given, "layer_types": [FULL] * 3}, seed)
            continue
        old = {name: value for name, value in parameters.items() if name != "rope_theta"}
        theta = "rotary_emb_base" if model_type == "gpt_neox" else "rope_theta"
        same_as_native(fields(model_type, rope_scaling=old, **{theta: 5000.0}), seed)


def test_part_of_a_head_turns(seed: int) -> None:
    for share in (0.25, 0.5, 0.3, 0.1, 1.0):  # of 32 features: 8, 16, 9, 3 and 32
        same_as_native(fields("gpt_neox", rotary_pct=share, rotary_emb_base=250), seed)
        for parameters in PARAMETERS:
            written = fields(
                "gpt_neox", rope_parameters={**parameters, "partial_rotary_factor": share}
            )
            if parameters.get("rope_type") == "yarn" and share == 0.3:
                with pytest.raises(
                    ConfigError, match='"yarn" has no frequencies with these values'
                ):
                    config_from_block(written)  # transformers' own formula fails
            else:
                same_as_native(written, seed)


@pytest.mark.parametrize("model_type", in_tiers(SCALED, ["gpt_neox", "llama", "olmo3"]))
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters"),
        (
            {"rope_scaling": {"type": "su", "factor": 2.0}},
            r'rope_parameters\.rope_type: "su" is not.*one of default, lin',
        ),
        (
            {"rope_parameters": {"rope_type": ["linear"]}},
            r'rope_type: \["linear"\] is not supported; one of default',
        ),
        (
            {"rope_scaling": {"type": {"linear": 2}, "factor": 2.0}},
            r'rope_type: \{"linear": 2\} is not supported',
        ),
        (
            {"rope_parameters": {"rope_theta": float("inf")}},
            r"rope_theta: Infinity is not a positive number",
        ),
        (
            {"rope_parameters": {"rope_type": "axial"}},
            r'rope_type: "axial" is not supported; one of default, linear',
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
            r'factor: "2" is not a positive .*; give one',
        ),
        (
            {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
            r'\.factor: rope_type "default" does not read it',
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            r'\.type: "yarn" and rope_type "\w+" disagree',
        ),
        (
            {"rope_parameters": {**YARN, "attention_factor": "big"}},
            r'\.attention_factor: "big" is not a positive',
        ),
        ({"rope_parameters": {**YARN, "truncate": 3}}, r"\.truncate: 3 is neither true nor false"),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1.0}},
            r'"yarn" has no frequencies with these values',
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
            r"partial_rotary_factor: 1\.5 is",
        ),
        (
            {"rope_parameters": {"rope_theta": 10.0}, "rope_theta": 20.0},
            r"rope_theta: 20\.0, but \w+ takes rope_theta 10",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            r'rope_parameters\.rope_type: "default", but \w+ takes rope_type "linear"',
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_named(model_type: str, given: dict[str, Any], words: str) -> None:
    if model_type in BY_TYPE and "rope_scaling" in given:
        # The class keeps its own rope_type "default" beside the file's "type".
        words = r'full_attention\.type: .* and rope_type "default" disagree; keep one of them'
    with pytest.raises(ConfigError, match=words) as caught:
        config_from_block(fields(model_type, **given))
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and re.search(
        r"[^;]; (change|correct|give|keep|leave|one of|remove)", line
    ), line


@pytest.mark.parametrize("model_type", ["gemma2", "llama", "qwen3"])
def test_parameters_by_type_are_refused_where_the_class_reads_one_for_all(model_type: str) -> None:
    nested = {FULL: {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match=r"full_attention: .* does not read it; remove it"):
        config_from_block(fields(model_type, rope_parameters=nested))


def test_the_older_name_of_local_positions_is_named_in_full() -> None:
    both = {FULL: {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    written = fields("gemma3_text") | {"rope_parameters": both, "rope_local_base_freq": 5.0}
    with pytest.raises(ConfigError, match=r"sliding_attention\.rope_theta alone"):
        config_from_block(written)


def test_gpt_neox_reads_its_own_names() -> None:
    """transformers' class passes over the general ones without a word."""
    with pytest.raises(
        ConfigError, match=r"rope_theta: 500\.0, but GPTNeoXConfig takes rope_theta 10000"
    ):
        config_from_block(fields("gpt_neox", rope_theta=500.0))
    with pytest.raises(
        ConfigError, match=r"partial_rotary_factor: 0\.5, but GPTNeoXConfig takes \w+ 0\.25"
    ):
        config_from_block(fields("gpt_neox", partial_rotary_factor=0.5))
    # As version 4 wrote both.
    config_from_block(fields("gpt_neox", partial_rotary_factor=0.25, rope_theta=10000.0))
