"""Arguments of transformers' methods: what they mean to our models, and what is refused in one
line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.support.encoders import encoder
from tests.support.native import parallel_model
from tests.support.tiny_models import speeches, tiny_gpt2
from zero_tp.base.errors import UserError
from zero_tp.model.architectures import weights_of
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.huggingface import parallel_model as live_model
from zero_tp.parallel.topology import Topology

COMMITS = {"main": "0" * 40, "v2": "2" * 40}
TOKENS = torch.arange(8).view(2, 4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gpt2(tmp_path_factory.mktemp("arguments"), speeches(1, 2000))


@pytest.fixture
def cache(directory: Path, tmp_path: Path) -> Path:
    """A cache of huggingface_hub with two revisions of a model, whose weights differ."""
    repository = tmp_path / "models--somebody--tiny"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in COMMITS.items():
        (repository / "refs" / revision).write_text(commit)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_bytes((directory / "config.json").read_bytes())
        weights = load_file(directory / "model.safetensors")
        weights["transformer.wte.weight"] += int(commit[0])
        save_file(weights, snapshot / "model.safetensors", {"format": "pt"})
    return tmp_path


def opened(source: Any, **options: Any) -> Any:
    return ZeroTPForCausalLM.from_pretrained(source, Topology(world=1), **options)


@pytest.mark.parametrize("written", ["float32", None])
def test_dtypes_have_names(directory: Path, tmp_path: Path, written: str | None) -> None:
    config = json.loads((directory / "config.json").read_text())
    config.pop("torch_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": written}))
    halves = {
        name: each.bfloat16() for name, each in load_file(directory / "model.safetensors").items()
    }
    save_file(halves, tmp_path / "model.safetensors", {"format": "pt"})
    auto = torch.float32 if written else torch.bfloat16
    for name in ("dtype", "torch_dtype"):
        for given, expected in (
            ("bfloat16", torch.bfloat16),
            ("torch.float16", torch.float16),
            ("auto", auto),
        ):
            assert opened(tmp_path, **{name: given}).dtype == expected, (name, given)
    # As in transformers.
    assert opened(tmp_path, dtype="float16", torch_dtype="bfloat16").dtype == torch.float16
    assert opened(tmp_path).dtype == opened(tmp_path, dtype=None).dtype == torch.float32
    assert ZeroTPForCausalLM(opened(tmp_path).config, dtype="bfloat16").dtype == torch.bfloat16
    assert ZeroTPForCausalLM(opened(tmp_path).config, dtype="auto").dtype == torch.float32


def test_a_name_on_the_hub_has_a_revision_and_a_cache(cache: Path) -> None:
    options: dict[str, Any] = {"cache_dir": cache, "local_files_only": True, "token": None}
    found = {
        revision: opened("somebody/tiny", revision=revision, **options)
        .get_input_embeddings()
        .weight
        for revision in (None, "main", "v2")
    }
    assert torch.equal(found[None], found["main"]) and torch.equal(found["v2"], found["main"] + 2)
    assert torch.equal(
        opened("somebody/tiny@v2", revision="v2", **options).get_input_embeddings().weight,
        found["v2"],
    )
    with pytest.raises(
        UserError, match=r'revision: "main", but somebody/tiny@v2 names its own; leave revision out'
    ):
        opened("somebody/tiny@v2", revision="main", **options)
    with pytest.raises(
        UserError, match=r"no directory somebody/tiny@v3, and it could not be fetched"
    ):
        opened("somebody/tiny", revision="v3", **options)


def test_attention_is_chosen(directory: Path) -> None:
    for given, expected in (("eager", "eager"), ("sdpa", "sdpa"), (None, "sdpa")):
        assert opened(directory, attn_implementation=given).spec.attention == expected


FROM_PRETRAINED: list[tuple[dict[str, Any], str]] = [
    (
        {"dtype": "int8"},
        r'dtype: "int8" is no floating dtype of torch; give one, such as "bfloat16", or "auto"',
    ),
    ({"torch_dtype": "half_precision"}, r'dtype: "half_precision" is no floating dtype'),
    ({"dtype": 16}, r"dtype: 16 is no floating dtype"),
    (
        {"attn_implementation": "flash_attention_2"},
        r'attn_implementation: "flash_attention_2" is not built; give',
    ),
    (
        {"revision": "v2"},
        r'revision: "v2", but .* is a directory, which has none; leave revision out',
    ),
    (
        {"device_map": "auto"},
        r"from_pretrained: device_map is not supported: .* give topology and device",
    ),
    (
        {"trust_remote_code": True},
        r"trust_remote_code is not supported: code that comes with a model is never run",
    ),
    ({"subfolder": "half"}, r"subfolder is not supported: "),
    (
        {"attn_pdrop": 0.5},
        "attn_pdrop is not supported: its arguments are directory, topology, allow_pickle, dtype, ",
    ),
]
GENERATE: list[tuple[dict[str, Any], str]] = [
    (
        {"cache_implementation": "paged"},
        'generate: a paged cache .* is not built; leave it out, or use "static"',
    ),
    (
        {"cache_implementation": "offloaded"},
        "offloaded.* needs an accelerator; leave it out on a CPU",
    ),
    (
        {"generation_config": GenerationConfig(cache_implementation="offloaded_static")},
        "offloaded_static.* needs an accelerator",
    ),
    (
        {"assistant_early_exit": 1},
        "generate: assistant_early_exit is not built: a forward runs all layers; give an",
    ),
    (
        {"generation_config": GenerationConfig(assistant_early_exit=1)},
        "generate: assistant_early_exit is not built",
    ),
    (
        {"output_attentions": True, "return_dict_in_generate": True},
        "forward: output_attentions is not supported",
    ),
]
TIMES: list[dict[str, Any]] = [
    {"max_time": 9.0},
    {"generation_config": GenerationConfig(max_time=9.0)},
]


@pytest.mark.parametrize(
    ("options", "message", "generates"),
    [*((*case, False) for case in FROM_PRETRAINED), *((*case, True) for case in GENERATE)],
)
def test_unsupported_arguments_are_refused(
    directory: Path, options: Any, message: str, generates: bool
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        opened(directory).generate(TOKENS, max_new_tokens=2, **options) if generates else opened(
            directory, **options
        )
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("options", TIMES)
def test_a_time_limit_needs_a_whole_model(directory: Path, options: Any) -> None:
    """Each rank would stop by its own clock, and the others would wait for it."""
    assert opened(directory).generate(TOKENS, max_length=5, **options).shape == (2, 5)
    split = ZeroTPForCausalLM.from_pretrained(directory, Topology(2, True, world=2, rank=0))
    with pytest.raises(
        UserError, match=r"^generate: max_time would end each rank at another token; use max_new"
    ):
        split.generate(TOKENS, **options)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_cache_has_both_of_its_names(directory: Path) -> None:
    """transformers 5.24 calls it `cache` and accepts `past_key_values`."""
    logits = []
    for model in (
        transformers.AutoModelForCausalLM.from_pretrained(directory).eval(),
        opened(directory).eval(),
    ):
        for name in ("cache", "past_key_values"):
            with torch.no_grad():
                first = model(TOKENS[:, :2], use_cache=True)
                output = model(TOKENS[:, 2:], **{name: first[name]})
            assert output.cache is first.cache and output.past_key_values.get_seq_length() == 4
            logits.append(output.logits)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0])


def test_arguments_that_change_nothing_are_accepted(directory: Path) -> None:
    off = dict.fromkeys(("device_map", "trust_remote_code", "config", "quantization_config"))
    model = opened(directory, **off, low_cpu_mem_usage=False, local_files_only=True).eval()
    output = model(TOKENS, output_hidden_states=False, inputs_embeds=None, return_dict=True)
    assert torch.equal(output.logits, model(TOKENS).logits)


ON = {
    "inputs_embeds": torch.ones(1),
    "output_hidden_states": True,
    "output_attentions": True,
    "seq_idx": TOKENS,
}


@pytest.mark.parametrize("name", [*ON, "head_mask"])
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_unsupported_arguments_of_a_forward_are_refused(
    directory: Path, kind: str, name: str
) -> None:
    fields = {
        "model_type": "bert",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
    }
    model = (
        opened(directory)
        if kind == "causal"
        else parallel_model(encoder(fields, 0), Topology(world=1))
    )
    with pytest.raises(UserError, match=rf"^\w+\.forward: {name} is not supported: ") as caught:
        model(TOKENS, **{name: ON.get(name, TOKENS)})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    with pytest.raises(ValueError, match="return_dict=False: outputs are"):
        model(TOKENS, return_dict=False)


def test_adapters_of_peft_need_a_whole_model(directory: Path) -> None:
    """PEFT sets `peft_config` on the model that it has changed, and takes it away when it has
    unloaded.
    """
    whole = opened(directory)
    assert not hasattr(whole, "peft_config")
    whole.peft_config = {"default": "lora"}
    assert whole.peft_config == {"default": "lora"}
    del whole.peft_config
    assert not hasattr(whole, "peft_config")
    split = ZeroTPForCausalLM.from_pretrained(directory, Topology(2, True, world=2, rank=0))
    with pytest.raises(
        UserError, match="PEFT on a model of tensor parallel size 2: an adapter would take a rank's"
    ):
        split.peft_config = {"default": "lora"}
    native = encoder(
        {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2},
        0,
    )
    native.peft_config = {"default": "lora"}
    with pytest.raises(UserError, match="PEFT: the model has adapters"):
        live_model(native, Topology(world=1))


SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
}
SIZES |= {"vocab_size": 10, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification", "BertModel"])
def test_live_models_with_other_heads_are_refused(name: str) -> None:
    native_class = getattr(transformers, name)
    native = native_class(native_class.config_class(**SIZES))
    with pytest.raises(UserError, match=f"^model: {name} is not supported; give a "):
        live_model(native, Topology(world=1))
    with pytest.raises(UserError, match=r"^model: Linear is no model of transformers; give one"):
        live_model(torch.nn.Linear(1, 1), Topology(world=1))


@pytest.mark.parametrize(
    ("name", "tied"),
    [("LlamaForCausalLM", False), ("LlamaForCausalLM", True), ("BertForPreTraining", True)],
)
def test_weights_added_to_a_live_model_are_refused(name: str, tied: bool) -> None:
    native_class = getattr(transformers, name)
    native = native_class(native_class.config_class(**SIZES, tie_word_embeddings=tied))
    live_model(native, Topology(world=1))
    native.base_model.adapter = torch.nn.Linear(8, 8, bias=False)
    with pytest.raises(
        UserError,
        match=rf"^model: \w+\.adapter: a Linear that a {name} of its config lacks, and would",
    ):
        live_model(native, Topology(world=1))


def test_the_class_of_a_live_encoder_decides_about_its_sentence_head() -> None:
    for name, other in (
        ("BertForPreTraining", "BertForMaskedLM"),
        ("BertForMaskedLM", "BertForPreTraining"),
    ):
        for architectures in (None, [other]):
            native = getattr(transformers, name)(BertConfig(**SIZES))
            native.config.architectures = architectures
            model = live_model(native, Topology(world=1))
            assert model.spec.sentence_head == (name == "BertForPreTraining")


def test_a_negative_padding_id_counts_from_the_end_of_the_vocabulary() -> None:
    native = LlamaForCausalLM(LlamaConfig(**SIZES | {"pad_token_id": -1}))
    model = live_model(native, Topology(world=1)).train()
    tokens = torch.tensor([[9, 1, 9, 2]])
    for each in (native, model):
        each(tokens, labels=tokens).loss.backward()
    expected = native.get_input_embeddings().weight.grad
    torch.testing.assert_close(model.get_input_embeddings().weight.grad, expected)
    assert isinstance(expected, torch.Tensor) and not expected[9].any() and expected[1].any()


def test_frozen_weights_stay_frozen() -> None:
    native = LlamaForCausalLM(LlamaConfig(**SIZES))
    attention = native.model.layers[0].self_attn
    for module in (
        native.model.embed_tokens,
        native.model.norm,
        attention.q_proj,
        attention.k_proj,
    ):
        module.requires_grad_(False)
    with pytest.raises(
        UserError,
        match=r"q_proj.weight, .*v_proj.weight are one weight here, of which a part is froz",
    ):
        live_model(native, Topology(world=1))
    attention.v_proj.requires_grad_(False)
    model, tokens = live_model(native, Topology(world=1)), torch.tensor([[9, 1, 9, 2]])
    for each in (native, model):
        each(tokens, labels=tokens).loss.backward()
    frozen = {name for name, each in model.named_parameters() if each.grad is None}
    assert frozen == {
        "transformer.embedding.word.weight",
        "transformer.final_norm.weight",
        "transformer.layers.0.attention.qkv.weight",
    }
    expected = {
        name: each.grad for name, each in native.named_parameters() if each.grad is not None
    }
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    for weight in weights_of(native.config):
        if weight.our_name in found:
            torch.testing.assert_close(found[weight.our_name], weight.from_hf(expected))


def test_a_model_is_saved_in_a_dtype_by_name(directory: Path, tmp_path: Path) -> None:
    opened(directory).save_pretrained(tmp_path, dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {
        torch.bfloat16
    }
