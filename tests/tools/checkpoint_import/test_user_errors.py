"""What a user gives wrongly is refused in one line: options, folders of steps, damaged files."""

from __future__ import annotations

import argparse
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as distributed
from transformers import AutoConfig, PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.commands import convert
from zero_tp.tools.checkpoint_import.distributed_checkpoint import open_distributed
from zero_tp.tools.checkpoint_import.formats import open_checkpoint
from zero_tp.tools.checkpoint_import.importing import import_checkpoint
from zero_tp.tools.checkpoint_import.megatron_config import config_of
from zero_tp.tools.checkpoint_import.page import read_ids
from zero_tp.tools.checkpoint_import.source import ParameterReader
from zero_tp.tools.checkpoint_import.steps import find_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

ARGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 6,
    "ffn_hidden_size": 10,
    "swiglu": True,
    "add_bias_linear": False,
    "norm_epsilon": 1e-5,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "max_position_embeddings": 16,
    "padded_vocab_size": 12,
    "vocab_size": 11,
    "pipeline_model_parallel_size": 2,
}


def write_ranks(root: Path, args: dict[str, Any], head: torch.Tensor | None = None) -> Path:
    """Write the files of two pipeline stages of Megatron-LM, of a layer each; return the step."""
    word = torch.randn(12, 8)
    layer = {
        "input_layernorm.weight": torch.ones(8),
        "self_attention.linear_qkv.weight": torch.randn(48, 8),
        "self_attention.linear_proj.weight": torch.randn(8, 24),
        "pre_mlp_layernorm.weight": torch.ones(8),
        "mlp.linear_fc1.weight": torch.randn(20, 8),
        "mlp.linear_fc2.weight": torch.randn(8, 10),
    }
    step = root / "iter_0000003"
    ends = (
        {"embedding.word_embeddings.weight": word},
        {
            "decoder.final_layernorm.weight": torch.ones(8),
            "output_layer.weight": word if head is None else head,
        },
    )
    for stage, end in enumerate(ends):
        model = {f"decoder.layers.0.{name}": tensor for name, tensor in layer.items()} | end
        folder = step / f"mp_rank_00_{stage:03d}"
        folder.mkdir(parents=True)
        torch.save({"model": model, "args": args}, folder / "model_optim_rng.pt")
    return step


def test_the_last_stages_copy_of_a_tied_embedding_is_no_head(tmp_path: Path) -> None:
    write_ranks(tmp_path / "tied", ARGS)
    reader = ParameterReader(open_checkpoint(tmp_path / "tied"))
    assert "head.weight" not in reader.shapes
    assert reader.shapes["transformer.embedding.word.weight"] == (11, 8)
    write_ranks(tmp_path / "apart", ARGS, head=torch.zeros(12, 8))
    with pytest.raises(UserError, match=r"output_layer\.weight is not embedding"):
        open_checkpoint(tmp_path / "apart")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metadata.json", "{", "metadata.json"),
        ("metadata.json", "[]", "metadata.json"),
        ("metadata.json", json.dumps({"sharded_backend": "zarr"}), "only torch_dist is read"),
    ],
)
def test_damaged_files_of_megatron(file: str, content: str, message: str, tmp_path: Path) -> None:
    torch.save({"args": ARGS}, tmp_path / "common.pt")
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path)


def test_two_folders_of_one_step_are_not_chosen_between(tmp_path: Path) -> None:
    for name in ("step-10", "global_step10", "iter_0000004"):
        (tmp_path / name).mkdir()
    for step in (None, 10):
        with pytest.raises(UserError, match="global_step10 and step-10 are of one step"):
            find_step(tmp_path, step)
    (tmp_path / "latest").write_text("iter_0000004\n")
    assert find_step(tmp_path, None).name == "iter_0000004"
    (tmp_path / "latest").unlink()
    (tmp_path / "step-10").rmdir()
    (tmp_path / "global_step10_universal").mkdir()
    assert find_step(tmp_path, None).name == "global_step10_universal"


OPTIONS = {
    "--format": "megatron",
    "--step": "0",
    "--config": "c",
    "--ignore": "x*",
    "--verify-text": "t",
    "--verify-ids": "i",
    "--no-verify": None,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_other_trainers_are_refused_with_a_run(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would not change the result."""
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr("zero_tp.run.checkpoint.find.find_checkpoint", lambda source: None)
    value = OPTIONS[option]
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    words = ["to-hf", str(tmp_path), "--output", str(tmp_path / "out"), option]
    options = parser.parse_args([*words, *([value] if value is not None else [])])
    with pytest.raises(UserError, match=f"^{option}: .* is of zero_tp"):
        convert.main(options)


def config_like_args(**changes: Any) -> PretrainedConfig:
    """The config of ARGS with changes that no shape tells."""
    fields = {
        "vocab_size": 11,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 10,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return AutoConfig.for_model(changes.pop("model_type", "llama"), **fields | changes)


def theta(base: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **more}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}, "attention heads 4"),
        ({"rms_norm_eps": 1e-6}, "epsilon of norms 1e-05.* has 1e-06"),
        (theta(5e5), "rotary frequencies of layer 0"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"model_type": "mistral", "sliding_window": 4}, "windows of attention"),
    ],
)
def test_a_config_that_computes_something_else_than_was_recorded(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """All of these have the shapes of the checkpoint."""
    write_ranks(tmp_path, ARGS)
    with pytest.raises(UserError, match=f"recorded {message}"):
        open_checkpoint(tmp_path, config=config_like_args(**changes))


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "mistral", "sliding_window": 16}, theta(1e4)]
)
def test_a_config_of_another_name_that_agrees(changes: dict[str, Any], tmp_path: Path) -> None:
    write_ranks(tmp_path, ARGS)
    opened = open_checkpoint(tmp_path, config=config_like_args(**changes))
    assert ParameterReader(opened).checkpoint.notes == ()


def test_a_config_that_cannot_be_compared_is_said(tmp_path: Path) -> None:
    write_ranks(tmp_path, {**ARGS, "window_size": [4, 0]})
    with pytest.raises(UserError, match=r"args\.window_size .*: no family is derived from it"):
        open_checkpoint(tmp_path)
    opened = open_checkpoint(
        tmp_path, config=config_like_args(model_type="mistral", sliding_window=5)
    )
    assert len(opened.notes) == 1 and "window_size" in opened.notes[0]


@pytest.mark.parametrize("text", ["", "..", "/tmp", "x" * 5000, "absent", "a/../iter_0000003"])
def test_a_newest_step_that_is_no_folder_here(text: str, tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "latest").write_text(f"{text}\n")
    with pytest.raises(UserError, match=r"latest: names .* not beside it"):
        find_step(tmp_path, None)
    assert find_step(tmp_path / "iter_0000003", 3) == tmp_path / "iter_0000003"
    with pytest.raises(UserError, match="has no step 4"):
        find_step(tmp_path / "iter_0000003", 4)


def test_files_of_a_distributed_checkpoint_are_whole_before_reading(tmp_path: Path) -> None:
    distributed.save({"a": torch.ones(1000)}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"has {len(content) - 1:,} of {len(content):,} bytes"):
        open_distributed(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match="missing; copy"):
        open_distributed(tmp_path)


@pytest.mark.parametrize("name", ["gpt-neox", "megatron-deepspeed"])
def test_a_format_that_the_folder_has_no_files_of(name: str, tmp_path: Path) -> None:
    step = write_ranks(tmp_path, ARGS)
    with pytest.raises(UserError, match=r"give a step of|has no layer_NN-model_NN"):
        open_checkpoint(step, name=name)


def test_what_is_missing_of_torch_dist_is_named(tmp_path: Path) -> None:
    distributed.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    with pytest.raises(UserError, match="has no args of its training"):
        open_checkpoint(tmp_path)


def rewrite(step: Path, change: Callable[[dict[str, Any]], None], stages: tuple[int, ...]) -> None:
    """Change what the files of some stages hold."""
    for stage in stages:
        file = step / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt"
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)


def cast(dtype: torch.dtype, pattern: str = "") -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        model = content["model"]
        model |= {name: model[name].to(dtype) for name in model if pattern in name}

    return change


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Without their scale they are other numbers."""
    step = write_ranks(tmp_path, ARGS)
    rewrite(step, cast(dtype), (0, 1))
    with pytest.raises(UserError, match=f"is of {dtype}, and its scale is not read"):
        ParameterReader(open_checkpoint(tmp_path))


def test_what_is_rounded_is_said(tmp_path: Path) -> None:
    """Norms in fp32 of a model in bf16."""
    step = write_ranks(tmp_path / "source", ARGS)
    rewrite(step, cast(torch.bfloat16), (0, 1))
    opened = open_checkpoint(tmp_path / "source")
    assert not any("rounded" in note for note in import_checkpoint(opened, tmp_path / "a").notes)
    rewrite(step, cast(torch.float32, "layernorm"), (0,))
    opened = open_checkpoint(tmp_path / "source")
    result = import_checkpoint(opened, tmp_path / "b")
    assert result.dtype == torch.bfloat16
    assert any(note.startswith("2 tensors are rounded, such as") for note in result.notes)
    exact = import_checkpoint(opened, tmp_path / "c", dtype=torch.float32)
    assert not any("rounded" in note for note in exact.notes)


def test_a_model_that_is_no_dict(tmp_path: Path) -> None:
    rewrite(write_ranks(tmp_path, ARGS), lambda content: content.update(model=[1]), (0,))
    with pytest.raises(UserError, match="holds no tensors by name"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["1 -2", "1 x", "1 99999999999999999999", ""])
def test_ids_that_are_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    with pytest.raises(UserError, match="is not a token's id"):
        read_ids(file)


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left"), UserError, r"can't be written \(No space left\)"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_what_ends_in_the_middle_leaves_nothing(
    error: BaseException,
    raised: type[BaseException],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_ranks(tmp_path / "source", ARGS)
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    output = tmp_path / "model"
    options = parser.parse_args(
        ["to-hf", str(tmp_path / "source"), "--no-verify", "--output", str(output)]
    )
    read = ParameterReader.read

    def fail(reader: ParameterReader, name: str) -> torch.Tensor:
        if "layers.1" in name:
            raise error
        return read(reader, name)

    monkeypatch.setattr(ParameterReader, "read", fail)
    with pytest.raises(raised, match=message):
        convert.main(options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window_size", [4, 0]),
        ("no_rope_freq", 2),
        ("softmax_type", "off-by-one"),
        ("qk_l2_norm", True),
        ("apply_residual_connection_post_layernorm", True),
        ("activation_func_clamp_value", 7.0),
        ("glu_linear_offset", 1.0),
        ("moe_router_topk_scaling_factor", 2.5),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_apply_probs_on_input", True),
    ],
)
def test_settings_of_megatron_that_no_shape_tells(field: str, value: Any, tmp_path: Path) -> None:
    """The tensors are those of a llama or mixtral, which computes something else."""
    experts = {"num_experts": 2, "moe_router_topk": 1} if field.startswith("moe") else {}
    assert config_of({**ARGS, **experts}, None, tmp_path).model_type in ("llama", "mixtral")
    with pytest.raises(UserError, match=rf"args\.{field} .*: no family is derived from it"):
        config_of({**ARGS, **experts, field: value}, None, tmp_path)
