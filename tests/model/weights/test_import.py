"""Hugging Face directories in: what is read, what is refused, and how little of it a rank reads."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor
from transformers import AutoConfig, GPT2LMHeadModel

from tests.support.native import native_model, our_class, perturbed, to_theirs
from tests.support.settings import gpt2_config
from tests.tiers import in_tiers
from zero_tp.base.errors import UserError
from zero_tp.model.architectures.configs import config_from_directory
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.weights.load import PretrainedSource
from zero_tp.parallel.layout import Sharded, layout_of
from zero_tp.parallel.topology import Topology
from zero_tp.tools.corpus.tokenizer_training import train_bpe
from zero_tp.tools.evaluation.model_directory import open_directory

ROOT = Path(__file__).parents[3]


def native(**changes: Any) -> Any:
    torch.manual_seed(3)
    return perturbed(GPT2LMHeadModel(gpt2_config(n_head=8, n_embd=32, n_positions=16, **changes)))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    native().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(directory: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )


def pickled(directory: Path, tensors: Any) -> None:
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")


def load(directory: Path, **options: Any) -> Any:
    return ZeroTPForCausalLM.from_pretrained(directory, Topology(world=1), **options)


def is_native(model: Any, reference: Any) -> int:
    """Every weight equals the reference's, bit for bit; how many there are."""
    state = reference.state_dict()
    parameters = dict(model.named_parameters())
    for name, tensor in to_theirs(model.config, parameters).items():
        assert torch.equal(tensor, state[name]), name
    return len(parameters)


OPEN = """
import sys
from pathlib import Path
from zero_tp.model.architectures.configs import config_from_directory
from zero_tp.model.weights.load import PretrainedSource

directory = Path(sys.argv[1])
PretrainedSource(directory, config_from_directory(directory))
print(*sorted({"scipy", "transformers.generation.utils", "torch._dynamo"} & sys.modules.keys()))
"""


def test_weights_are_opened_without_transformers_classes(directory: Path) -> None:
    """They would take 76 MiB and a second of each rank."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, directory], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_reads_its_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: int, tied: bool
) -> None:
    reference = native(tie_word_embeddings=tied)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    config = config_from_directory(tmp_path)
    whole = {name: parameter.detach() for name, parameter in load(tmp_path).named_parameters()}
    is_native(load(tmp_path), reference)
    source = PretrainedSource(tmp_path, config)
    read: list[int] = []

    class Counted:
        def __init__(self, stored: Any):
            self.stored = stored

        @property
        def mT(self) -> Counted:
            return Counted(self.stored.mT)

        def __getitem__(self, index: Any) -> Tensor:
            piece: Tensor = self.stored[index]
            read.append(piece.numel())
            return piece

    monkeypatch.setattr(
        source, "tensors", {name: Counted(tensor) for name, tensor in source.tensors.items()}
    )
    for rank in range(tensor):
        read.clear()
        model = ZeroTPForCausalLM(config, Topology(tensor, world=tensor, rank=rank), source=source)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, layout_of(parameter).shard(whole[name], rank, tensor)), (
                name
            )
        replicated = sum(
            p.numel() for p in model.parameters() if not isinstance(layout_of(p), Sharded)
        )
        everything = sum(one.numel() for one in whole.values())
        share = (everything - replicated) / tensor
        assert sum(read) <= replicated + share + 32 * 8, (
            "its part of what is split, and what every rank has"
        )


def with_buffers(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8)
    tensors["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()


def without_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8)


@pytest.mark.parametrize("edit", [with_buffers, without_prefix])
def test_obsolete_buffers_and_bare_decoders_are_read(
    directory: Path, edit: Callable[[dict[str, Tensor]], Any]
) -> None:
    change(directory, edit)
    assert is_native(load(directory), native()) == len(list(native().parameters()))


NORM = "transformer.h.1.ln_2.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(NORM), rf"no tensor {NORM}; expected shape \(32,\)"),
        (
            lambda t: t.update(score=torch.ones(2, 3)),
            r"unexpected tensor score of shape \(2, 3\); GPT2LMHeadModel",
        ),
        (
            lambda t: t.update({"h.9.attn.c_attn.bias": torch.ones(96)}),
            r"unexpected tensor h\.9\.attn\.c_attn\.bias",
        ),
        (
            lambda t: t.update({NORM: torch.ones(33)}),
            rf"{NORM}: expected shape \(32,\), found \(33,\)",
        ),
        (
            lambda t: t.update({NORM: torch.ones(32, dtype=torch.int64)}),
            rf"{NORM}: expected one of F64.*found I64",
        ),
        (
            lambda t: t.update({NORM: torch.ones(32, dtype=torch.int16)}),
            rf"{NORM}: expected one of F64.*found I16$",
        ),
        (
            lambda t: t.update({NORM.removeprefix("transformer."): torch.ones(32)}),
            rf"are both {NORM}",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(61, 32)}),
            r"lm_head\.weight differ, but its config ties",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(directory: Path, edit: Any, words: str) -> None:
    change(directory, edit)
    with pytest.raises(UserError, match=words) as caught:
        load(directory)
    assert len(str(caught.value).splitlines()) == 1


def test_pickled_weights_are_read_where_that_is_allowed(directory: Path) -> None:
    reference = native()
    pickled(directory, reference.state_dict())
    with pytest.raises(UserError, match=r"pickled \(pytorch_model\.bin\).*--allow-pickle"):
        load(directory)
    is_native(load(directory, allow_pickle=True), reference)
    parts = [dict(list(reference.state_dict().items())[start::2]) for start in (0, 1)]
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, directory / name)
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (directory / "pytorch_model.bin").unlink()
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"pickled \(pytorch_model\.bin\.index\.json\)"):
        load(directory)
    is_native(load(directory, allow_pickle=True), reference)


def test_evaluation_reads_pickled_weights_where_that_is_allowed(tmp_path: Path) -> None:
    reference = native(vocab_size=300)
    reference.save_pretrained(tmp_path)
    train_bpe(iter(["some text"]), 257).save_pretrained(tmp_path)
    open_directory(tmp_path).load("float32", "cpu")
    pickled(tmp_path, reference.state_dict())
    with pytest.raises(UserError, match=r"pickled \(pytorch_model\.bin\).*--allow-pickle"):
        open_directory(tmp_path)
    opened = open_directory(tmp_path, allow_pickle=True).load("float32", "cpu")
    for name, tensor in reference.state_dict().items():
        assert torch.equal(opened.module.state_dict()[name], tensor), name


class Harmful:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harmed"),))


def test_a_pickle_runs_no_code(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    for content in ({"transformer.wte.weight": Harmful()}, [1]):
        (directory / "model.safetensors").touch()
        pickled(directory, content)
        with pytest.raises(
            UserError, match=r"pytorch_model\.bin: (torch's restricted|not a dict of tensors)"
        ):
            load(directory, allow_pickle=True)
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(UserError, match=r"pytorch_model\.bin: torch's restricted"):
        load(directory, allow_pickle=True)
    assert not (directory / "harmed").exists()


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ('{"weight_map": {"a": "../model.safetensors"}}', "is not the name of a file beside it"),
        ('{"weight_map": {"a": "model-1.safetensors"}}', r"model-1\.safetensors: missing, but"),
        ('{"weight_map": 1}', "not an index with a weight_map"),
        ("", "not an index with a weight_map"),
    ],
)
def test_a_wrong_index_is_one_line(directory: Path, index: str, words: str) -> None:
    (
        directory / "model.safetensors"
    ).unlink()  # beside an index of other files it would be a second model
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=words):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_head": 5}, r"config\.json: n_embd: hidden size 32 ≠ heads 5"),
        ({"n_head": "four"}, r"config\.json: n_head: expected an integer"),
        ({"zero_tp": {}}, r"is a training run; export it with zero-tp convert to-hf"),
    ],
)
def test_configs_are_held_to_the_rules(
    directory: Path, changes: dict[str, Any], words: str
) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=words):
        load(directory)


def test_what_other_versions_and_heads_wrote_is_no_matter(directory: Path) -> None:
    path = directory / "config.json"
    others = {
        "n_ctx": 16,
        "summary_type": "mean",
        "task_specific_params": {"a": 1},
        "eos_token_id": 50256,
    }
    written = json.loads(path.read_text()) | others | {"torch_dtype": "bfloat16"}
    del written["dtype"]
    path.write_text(json.dumps(written))
    model = load(directory)
    assert model.config.eos_token_id is None and model.config.bos_token_id == 0
    assert next(model.parameters()).dtype == torch.bfloat16


def test_nothing_runs_code_of_a_directory() -> None:
    for folder in ("zero_tp", "launch", "eval", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            # A setting of tokenizer_config.json that `_FORMS` has. It allows no code: the argument
            # of this name does.
            text = text.replace('{"tokenizer_class": GENERIC_CLASS, "trust_remote_code": True}', "")
            assert not re.search(r'trust_remote_code(?!=False\b|": "code that comes)', text), path
            assert not re.search(r"weights_only\s*=\s*False|pickle\.load", text), path


MOE_FIELDS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}


def drawn(model_type: str, **fields: Any) -> Any:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    common = {
        **sizes,
        "vocab_size": 31,
        "max_position_embeddings": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = AutoConfig.for_model(model_type, **common, **fields)
    torch.manual_seed(0)
    return perturbed(native_model(config))


def is_read_by_both(model: Any, directory: Path) -> None:
    """transformers and zero_tp open the directory as the model."""
    model.config.save_pretrained(directory)
    tokens = torch.arange(8)[None]
    expected = model.eval()(tokens)[0]
    torch.testing.assert_close(type(model).from_pretrained(directory)(tokens)[0], expected)
    ours = our_class(model.config).from_pretrained(directory, Topology(world=1)).eval()
    logits = "logits" if ours.causal else "prediction_logits"
    torch.testing.assert_close(
        ours(tokens, return_logits=True)[logits], expected, rtol=1e-4, atol=1e-6
    )
    for rank in range(2):  # a rank's slices of it
        part = our_class(model.config).from_pretrained(directory, Topology(2, world=2, rank=rank))
        for name, parameter in part.named_parameters():
            whole = ours.get_parameter(name)
            assert torch.equal(parameter, layout_of(parameter).shard(whole, rank, 2)), name


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_a_tied_model_with_one_of_its_names_is_read(tmp_path: Path, model_type: str) -> None:
    """As `safetensors.torch.save_model` writes it."""
    model = drawn(model_type, tie_word_embeddings=True)
    save_model(model, str(tmp_path / "model.safetensors"), {"format": "pt"})
    assert len(load_file(tmp_path / "model.safetensors")) < len(model.state_dict())
    is_read_by_both(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    other = our_class(model.config)(model.config, Topology(world=1))
    assert not any(other.load_state_dict(state))


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("model_type", in_tiers([*MOE_FIELDS], ["mixtral"]))
def test_stacked_experts_are_read(tmp_path: Path, model_type: str, bare: bool) -> None:
    """As a `state_dict` has them; transformers' `save_pretrained` writes one tensor for each
    expert.
    """
    sizes = {"num_key_value_heads": 2, "tie_word_embeddings": bare}
    model = drawn(model_type, **sizes, **MOE_FIELDS[model_type])
    state = {
        name: each.clone()
        for name, each in (model.base_model if bare else model).state_dict().items()
    }
    state.pop("lm_head.weight" if bare else "", None)
    file = tmp_path / "model.safetensors"
    save_file(state, file, {"format": "pt"})
    is_read_by_both(model, tmp_path)
    name = next(name for name in state if name.endswith("experts.down_proj"))
    save_file({**state, name: state[name][:-1].clone()}, file)
    with pytest.raises(UserError, match=rf"tensor {name}: expected shape \(\d+, 16, \d+\), found"):
        our_class(model.config).from_pretrained(tmp_path, Topology(world=1))
    expert = (
        "block_sparse_moe.experts.0.w2" if model_type == "mixtral" else "mlp.experts.0.down_proj"
    )
    single = f"model.{name.removeprefix('model.')}".replace(
        "mlp.experts.down_proj", f"{expert}.weight"
    )
    save_file({**state, single: state[name][0].clone()}, file)
    with pytest.raises(UserError, match=rf"tensors {name} and {single} are both"):
        our_class(model.config).from_pretrained(tmp_path, Topology(world=1))
