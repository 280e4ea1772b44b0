"""What no table computes, or transformers' own class fails with, is refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.tiny_configs import fields_of, general_fields
from tests.tiers import in_tiers
from zero_tp.base.errors import UserError
from zero_tp.model.architectures import ARCHITECTURES
from zero_tp.model.architectures.common import FULL
from zero_tp.model.architectures.configs import config_from_block, config_from_directory
from zero_tp.model.architectures.granite import MULTIPLIERS
from zero_tp.model.huggingface import ZeroTPForCausalLM


def undeclared_names(model_type: str) -> Iterator[str]:
    """Attributes of a config that transformers' generic code and the model's own read."""
    root = Path(transformers.__file__).parent
    generic = (
        "masking_utils",
        "modeling_utils",
        "modeling_rope_utils",
        "cache_utils",
        "modeling_layers",
    )
    for name in (*generic, "integrations/sdpa_attention", "integrations/eager_paged"):
        if (root / f"{name}.py").exists():
            yield from re.findall(
                r'(?:get|has)attr\((?:\w+\.)*\w*config, "(\w+)"', (root / f"{name}.py").read_text()
            )
    module = CONFIG_MAPPING[model_type].__module__.split(".")[2]
    own = (root / "models" / module / f"modeling_{module}.py").read_text()
    yield from re.findall(r"\bconfig\.([a-z]\w*)", own)
    yield from re.findall(r'attr\((?:\w+\.)*config, "(\w+)"', own)


@pytest.mark.parametrize(
    "model_type",
    in_tiers(list(ARCHITECTURES), ["bert", "gemma3_text", "glm4_moe", "gpt2", "llama", "olmo3"]),
)
def test_what_transformers_obeys_without_declaring_it_is_refused(
    model_type: str, tmp_path: Path
) -> None:
    base = general_fields(model_type)
    config_class: Any = CONFIG_MAPPING[model_type]
    own = config_class.__name__
    known = {*fields_of(model_type), *config_class.attribute_map, "sep_token_id"}
    names = {name for name in undeclared_names(model_type) if name not in known}
    names -= {name for name in names if callable(getattr(config_class, name, None))}
    assert {"kv_sharing_modes"} <= names, "the pattern finds them"
    fields = {name: value for name, value in base.items() if name != "model_type"}
    for name in names:
        (tmp_path / "config.json").write_text(json.dumps({**base, name: 1}))
        with pytest.raises(UserError, match=rf"config\.json: {name}\b"):
            config_from_directory(tmp_path)
        config = config_class(**fields)
        setattr(config, name, 1)
        with pytest.raises(
            UserError, match=rf"^{own}\.{name}: 1 is unknown to zero_tp's {model_type}"
        ):
            ARCHITECTURES[model_type].spec(config)
    causal = ARCHITECTURES[model_type].spec(config_class(**fields)).causal
    other: dict[str, Any] = {
        "is_causal": not causal,
        "use_bidirectional_attention": causal,
        "attention_chunk_size": 4,
    }
    for name, value in other.items():
        config = config_class(**fields, **{name: value})
        with pytest.raises(UserError, match=rf"^{own}\.{name}: {json.dumps(value)} is refused: "):
            ARCHITECTURES[model_type].spec(config)
    widths = ("intermediate_size", "moe_intermediate_size")
    mlp = "n_inner" if model_type == "gpt2" else next(name for name in widths if name in fields)
    config = config_class(**fields, per_layer_config={0: {mlp: 8}})
    with pytest.raises(
        UserError, match=rf"^{own}\.per_layer_config: refused: all layers .*; leave it out"
    ):
        ARCHITECTURES[model_type].spec(config)


@pytest.mark.parametrize("model_type", ["gemma", "phi", "roberta", "mamba2"])
def test_another_model_type_is_refused_with_the_supported_ones(
    model_type: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    listed = rf'give one of {len(ARCHITECTURES)}, which docs/config.md lists, such as "gpt2"'
    with pytest.raises(UserError, match=rf'model_type: "{model_type}" is not supported; {listed}$'):
        config_from_directory(tmp_path)
    with pytest.raises(UserError, match=rf"{model_type!r} is not supported; {listed}"):
        ZeroTPForCausalLM(CONFIG_MAPPING[model_type]())


FULL_ONLY = {"num_hidden_layers": 2, "layer_types": [FULL] * 2}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        *(
            ({"model_type": name, "sliding_window": None, **FULL_ONLY}, "sliding_window: null")
            for name in ("cohere2", "gemma2", "gemma3_text", "olmo3")
        ),
        (
            {"model_type": "ministral", "head_dim": 8, "sliding_window": None},
            "sliding_window: null",
        ),
        ({"model_type": "ministral"}, "head_dim: null, .*; give 128"),
        (
            {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 0]},
            "SmolLM3Config refuses it",
        ),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        *(
            ({"model_type": kind, "output_router_logits": True, name: None}, f"{name}: null")
            for kind in ("granitemoe", "granitemoeshared")
            for name in (*MULTIPLIERS, "num_local_experts", "router_aux_loss_coef")
        ),
    ],
    ids=str,
)
def test_what_the_class_fails_with_is_refused(written: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        config_from_block(written)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "starcoder2"])
def test_a_window_of_0_names_null(model_type: str) -> None:
    with pytest.raises(
        UserError,
        match=r"sliding_window: 0 is not positive; give 1 or more, or null for attention to",
    ):
        config_from_block({"model_type": model_type, "sliding_window": 0})
    assert (
        config_from_block({"model_type": model_type, "sliding_window": None}).sliding_window is None
    )
