"""What is not read from other trainers is refused by name, before any weight is read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as distributed
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.support import checkpoint_layouts
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.tools.checkpoint_import.formats import open_checkpoint
from zero_tp.tools.checkpoint_import.source import ParameterReader

pytestmark = [THOROUGH, pytest.mark.filterwarnings("ignore:torch.distributed is")]
Change = Callable[[Path], None]


def llama(**changes: Any) -> PretrainedConfig:
    fields = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
    }
    return AutoConfig.for_model("llama", **fields | changes)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    built: PreTrainedModel = AutoModelForCausalLM.from_config(llama())
    return built


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def rename_all(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        for path in list(folder.iterdir()):
            path.rename(folder / path.name.replace(old, new))

    return change


def truncate(name: str) -> Change:
    def change(folder: Path) -> None:
        (path,) = folder.glob(name)
        path.write_bytes(path.read_bytes()[:40])

    return change


def check_refused(
    root: Path, step: str, change: Change | None, problem: str, config: PretrainedConfig | None
) -> None:
    if change is not None:
        change(root / step)
    with pytest.raises(UserError, match=problem) as refusal:
        ParameterReader(open_checkpoint(root, config=config, vocabulary=40))
    assert "\n" not in str(refusal.value)


FPDT: dict[str, Any] = {"ds_sequence_parallel_fpdt": False}
MEGATRON_DEEPSPEED = [
    ({"num_experts": [1, 4]}, None, "num_experts 4: experts are not read"),
    ({**FPDT, "force_ds_sequence_parallel": True}, None, "grouped keys with releases since"),
    (FPDT, None, "use_rotary_position_embeddings: without Ulysses"),
    ({"apply_layernorm_1p": True}, None, "apply_layernorm_1p"),
    ({"num_layers": None}, None, r"has no args\.num_layers; give a config.json"),
    ({"tensor_model_parallel_size": 4}, None, "has files of 2 TP ranks, and its args say 4"),
    (
        {"use_rotary_position_embeddings": False, "add_position_embedding": False},
        None,
        "no_position_embedding",
    ),
    ({"num_layers": 4}, None, "no tensor decoder.layers.3.* of this config has"),
    ({"num_layers": 2}, None, "tensors are unknown, such as decoder.layers.2"),
    ({}, remove("layer_03-model_01-model_states.pt"), "layer_03-model_01-model.* is missing"),
    ({}, rename_all("layer_03", "unknown_03"), "layer_03-model_00-model_states.pt has no"),
    ({}, lambda folder: (folder / "zero").mkdir(), "universal checkpoints of this trainer are not"),
    ({}, truncate("layer_03-model_01*"), "layer_03-model_01-model_states.pt: cannot be read"),
]


@pytest.mark.parametrize(("args", "change", "problem"), MEGATRON_DEEPSPEED)
def test_megatron_deepspeed(
    tmp_path: Path,
    model: PreTrainedModel,
    args: dict[str, Any],
    change: Change | None,
    problem: str,
) -> None:
    root = checkpoint_layouts.megatron_deepspeed(
        model, tmp_path, degree=2, padded=48, pipelines=True, args=args
    )
    check_refused(root, "global_step7", change, problem, None)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("mp_rank", "zero_pp_rank_0_mp_rank", "its weights are sharded by ZeRO-3"),
        ("zero_pp_rank_0_mp", "expert_0_mp", "global_step7: has files of 1 TP ranks"),
    ],
)
def test_other_files(
    tmp_path: Path, model: PreTrainedModel, old: str, new: str, problem: str
) -> None:
    root = checkpoint_layouts.megatron_deepspeed(
        model, tmp_path, degree=1, padded=48, pipelines=False
    )
    step = root / "global_step7"
    (step / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    if "expert" in new:
        torch.save({}, step / "expert_0_mp_rank_00_model_states.pt")
        problem = "experts of DeepSpeed are not read"
    else:
        rename_all(old, new)(step)
    with pytest.raises(UserError, match=problem):
        open_checkpoint(root)


NEOX: list[Any] = [
    ({"pos_emb": "alibi"}, None, "pos_emb alibi|pos_emb .alibi.: no family is derived"),
    ({"sliding_window_width": 128}, None, "sliding_window_width 128"),
    ({"use_qk_layernorm": True}, None, "use_qk_layernorm"),
    ({"moe_num_experts": 8}, None, "moe_num_experts 8"),
    ({"activation": "geglu"}, None, "activation"),
    ({"rotary_pct": 0.5}, None, "rotary_pct 0.5"),
    ({"gpt_j_residual": True}, None, "gpt_j_residual"),
    ({"norm": "scalenorm"}, None, "norm"),
    ({"attention_config": [[["sparse_fixed"], 3]]}, None, "attention_config"),
    ({"train_impl": "rm"}, None, "train_impl"),
    ({"intermediate_size": "wide"}, None, "intermediate_size .*wide.* is no size"),
    ({"rms-norm-epsilon": "small"}, None, "rms_norm_epsilon .*small.* is no number"),
    ({"mlp_multiple_of": 64}, None, "linear1.weight: expected shape"),
    ({}, lambda folder: (folder / "configs/model.yml").write_text("a: [1"), "model.yml: cannot"),
    ({}, remove("layer_04-model_00-model_states.pt"), "layer_04-model_00-model.* is missing"),
]


@pytest.mark.parametrize(("settings", "change", "problem"), NEOX)
def test_gpt_neox(
    tmp_path: Path,
    model: PreTrainedModel,
    settings: dict[str, Any],
    change: Change | None,
    problem: str,
) -> None:
    root = checkpoint_layouts.gpt_neox(
        model, tmp_path, degree=2, padded=48, pipelines=True, settings=settings
    )
    check_refused(root, "global_step7", change, problem, None)


def test_gpt_neox_without_settings(tmp_path: Path, model: PreTrainedModel) -> None:
    root = checkpoint_layouts.gpt_neox(model, tmp_path, degree=1, padded=48, pipelines=True)
    for path in (root / "global_step7/configs").iterdir():
        path.unlink()
    check_refused(root, "global_step7", None, "has no configs/ with pos_emb; give a config", None)
    qwen = AutoConfig.for_model("qwen3", vocab_size=40)
    check_refused(root, "global_step7", None, "--config: qwen3 is not read from GPT-NeoX", qwen)
    ParameterReader(open_checkpoint(root, config=llama()))


def change_config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model_config.json"
        content = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({key: v for key, v in content.items() if v != "absent"}))

    return change


QKV = "model/model/decoder/1/pp_block/attn/qkv_proj/"
NANOTRON: list[Any] = [
    (change_config(rope_interleaved="absent"), "has no rope_interleaved; add it"),
    (change_config(moe_config={"num_experts": 8}), "moe_config .*: no family is derived"),
    (change_config(sliding_window_size=64), "sliding_window_size 64"),
    (change_config(rope_scaling={"factor": 2}), "rope_scaling"),
    (change_config(is_llama_config="absent"), "is neither is_llama_config nor"),
    (change_config(hidden_size="absent"), "has no hidden_size; give a config.json"),
    (change_config(num_hidden_layers=4), "no tensor model.decoder.3"),
    (change_config(num_attention_heads="4"), "num_attention_heads .*4.* is no size"),
    (change_config(hidden_size=33), "json: hidden_size: LlamaConfig refuses it .*33"),
    (change_config(num_key_value_heads=4), "qkv_proj.weight: expected shape"),
    (
        lambda folder: (folder / "config.yaml").write_text("model: {init_method: {use_mup: true}}"),
        "use_mup scales attention scores",
    ),
    (
        remove(f"{QKV}model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"),
        "no file of TP rank 1",
    ),
    (truncate(f"{QKV}*tp-rank-1*"), "is no safetensors file"),
]


@pytest.mark.parametrize(("change", "problem"), NANOTRON)
def test_nanotron(tmp_path: Path, model: PreTrainedModel, change: Change, problem: str) -> None:
    root = checkpoint_layouts.nanotron(
        model, tmp_path, degree=2, stages=1, interleaved=False, padded=48
    )
    check_refused(root, "9", change, problem, None)


OLMO: dict[str, Any] = {
    "model": {
        "name": "default",
        "d_model": 8,
        "n_layers": 2,
        "vocab_size": 40,
        "block": {
            "name": "reordered_norm",
            "sequence_mixer": {
                "name": "default",
                "n_heads": 2,
                "bias": False,
                "rope": {"theta": 500},
                "qk_norm": {"name": "rms", "eps": 1e-6},
            },
            "feed_forward": {"hidden_size": 16, "name": "default", "bias": False},
            "layer_norm": {"name": "rms", "eps": 1e-6, "bias": False},
        },
        "lm_head": {"bias": False, "layer_norm": {"name": "rms", "eps": 1e-6}},
    },
    "train_module": {"max_sequence_length": 16},
}
OLMO_CASES: list[Any] = [
    ("model.block.name", "peri_norm", "model.block.name .*peri_norm.*: no family is derived"),
    ("model.block.name", "default", "model.block.attention.use_head_qk_norm"),
    ("model.block.sequence_mixer.qk_norm", None, "model.block.attention.qk_norm"),
    ("model.block.sequence_mixer.use_head_qk_norm", True, "use_head_qk_norm"),
    ("model.block.sequence_mixer.name", "fused", "model.block.attention.name"),
    ("model.block.sequence_mixer.clip_qkv", 8.0, "model.block.attention.clip_qkv 8.0"),
    ("model.block.sequence_mixer.rope.scaling", {"factor": 2}, "attention.rope.scaling"),
    ("model.block.sequence_mixer.sliding_window", {"pattern": [4, 8]}, "sliding_window.pattern"),
    ("model.block.feed_forward_moe", {"num_experts": 4}, "model.block.feed_forward_moe"),
    ("model.block.layer_norm.name", "l2_norm", "model.block.layer_norm.name"),
    ("model.lm_head.layer_norm.eps", 1e-5, "model.lm_head.layer_norm.eps 1e-05"),
    ("model.block_overrides", {"0": {}}, "model.block_overrides"),
    ("model.block.feed_forward.hidden_size", None, "has no model.block.feed_forward.hidden_size"),
    ("train_module", None, "has no train_module.max_sequence_length"),
    ("model", None, "config.json: has no model; give a config.json"),
]


def write_olmo(folder: Path, recorded: dict[str, Any]) -> Path:
    step = folder / "step3"
    state = {"model": {"embeddings.weight": torch.zeros(40, 8)}}
    distributed.save(state, checkpoint_id=step / "model_and_optim", no_dist=True)
    (step / "config.json").write_text(json.dumps(recorded))
    return folder


@pytest.mark.parametrize(("key", "value", "problem"), OLMO_CASES)
def test_olmo_core(tmp_path: Path, key: str, value: Any, problem: str) -> None:
    recorded = copy.deepcopy(OLMO)
    *path, last = key.split(".")
    inner = recorded
    for part in path:
        inner = inner[part]
    inner[last] = value
    check_refused(write_olmo(tmp_path, recorded), "step3", None, problem, None)


def test_olmo_core_with_norms_elsewhere(tmp_path: Path) -> None:
    root = write_olmo(tmp_path, OLMO)
    problem = "block.name .*reordered_norm.* has its norms at other places than llama"
    check_refused(root, "step3", None, problem, llama())


def write_titan(folder: Path, **tensors: torch.Tensor) -> Path:
    distributed.save(tensors, checkpoint_id=folder / "step-5", no_dist=True)
    return folder


def test_torchtitan(tmp_path: Path) -> None:
    names = ("tok_embeddings.weight", "output.weight")
    rows = {name: torch.full((40, 32), float(number)) for number, name in enumerate(names)}
    root = write_titan(tmp_path / "run", **rows)
    check_refused(root, "step-5", None, "torchtitan stores no config of its model; give", None)
    other = AutoConfig.for_model("gpt2")
    check_refused(root, "step-5", None, "--config: gpt2 is not read from torchtitan", other)
    tied = llama(tie_word_embeddings=True)
    check_refused(root, "step-5", None, "lm_head.weight is not tok_embeddings.weight", tied)
    check_refused(root, "step-5", None, "no tensor layers.0.", llama())
    foreign = write_titan(tmp_path / "other", weight=torch.zeros(2))
    check_refused(foreign, "step-5", None, "has no tok_embeddings.weight", llama())


def test_a_format_of_another_trainer(tmp_path: Path, model: PreTrainedModel) -> None:
    neox = checkpoint_layouts.gpt_neox(model, tmp_path / "a", degree=1, padded=48, pipelines=True)
    with pytest.raises(UserError, match="has no args of its training, which tell the order"):
        open_checkpoint(neox, name="megatron-deepspeed", config=llama())
    megatron = checkpoint_layouts.megatron_deepspeed(
        model, tmp_path / "b", degree=1, padded=48, pipelines=True
    )
    with pytest.raises(UserError, match=r"no tensor layers\.0\.attention.*of this config has"):
        ParameterReader(open_checkpoint(megatron, name="gpt-neox", config=llama()))
