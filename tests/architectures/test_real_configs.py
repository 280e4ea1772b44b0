"""The config.json of models that people have: accepted as they were published, with the published number of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.native import our_class
from zero_tp.architectures.configs import config_from_directory
from zero_tp.errors import UserError

PUBLISHED: dict[str, dict[str, Any]] = {
    model["name"]: model
    for model in map(json.loads, Path(__file__).with_name("published_configs.jsonl").read_text().splitlines())
}
"""Name → its published config.json and number of parameters."""


def write_config(directory: Path, name: str, **changes: Any) -> None:
    (directory / "config.json").write_text(json.dumps({**PUBLISHED[name]["config"], **changes}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str, tmp_path: Path) -> None:
    write_config(tmp_path, name)
    config = config_from_directory(tmp_path)
    model = our_class(config)(config, device="meta", dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]["parameters"]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("smollm2-135m-instruct", {"rope_interleaved": True}, "rope_interleaved: true is .*; only false is supported$"),
        ("smollm2-135m-instruct", {"num_experts": 8}, "num_experts: 8 is no field of LlamaConfig"),
        (
            "llama-3.2-1b",
            {"rope_scaling": {"type": "su", "factor": 2.0}},
            "one of default, linear, dynamic, yarn, llama3",
        ),
        ("llama-3.2-1b", {"quantization_config": {"bits": 4}}, "quantization_config: quantized weights"),
        (
            "llama-3.2-1b",
            {"auto_map": {"AutoModel": "own.Own"}},
            "auto_map: .* is refused: code that comes with a model.*; only null is supported$",
        ),
        ("qwen2.5-0.5b", {"use_mrope": True}, "use_mrope: true is refused: .*; only false is supported$"),
        (
            "qwen3-0.6b",
            {"layer_types": ["chunked_attention"] * 28},
            'layer_types: "chunked_attention" is not one of full_attention, sliding_attention',
        ),
        (
            "mixtral-8x7b",
            {"router_jitter_noise": 0.1},
            "router_jitter_noise: 0.1 is refused: .*; only 0.0 is",
        ),
        ("starcoder2-3b", {"mlp_type": "gated"}, 'mlp_type: "gated" is refused: '),
        ("phi-4", {"attention_bias": True}, "attention_bias: true is refused: "),
        ("pythia-70m", {"num_attention_heads": 7}, "hidden_size: GPTNeoXConfig refuses it .*not divisible"),
    ],
)
def test_what_changes_the_model_is_refused(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_config(tmp_path, name, **changes)
    with pytest.raises(UserError, match=rf"config\.json: .*{words}") as caught:
        config_from_directory(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_padding_id_below_0_counts_from_the_end_as_in_torch(tmp_path: Path) -> None:
    """As early Llama files have it; transformers hands it to torch's Embedding."""
    write_config(tmp_path, "llama-3.2-1b", pad_token_id=-1)
    assert config_from_directory(tmp_path).pad_token_id == torch.nn.Embedding(128256, 1, -1).padding_idx
