"""What Trainer, accelerate and people call on a model does to ours what it does to theirs, on
any TP size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.utils.generic import find_labels

from tests.support.compare import check_close, grid, whole_gradients
from tests.support.decoders import decoder
from tests.support.encoders import encoder
from tests.support.native import gradients, native_tensors, parallel_model, to_theirs
from tests.support.pools import Pools
from tests.tiers import in_tiers
from zero_tp.base.errors import ConfigError, UserError
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.model.huggingface import ZeroTPForCausalLM, ZeroTPForPreTraining
from zero_tp.model.huggingface import model as huggingface_model
from zero_tp.parallel.topology import Topology
from zero_tp.tools.planning.simulated_accelerator import simulated_accelerator

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
DECODER: dict[str, Any] = {**SIZES, "model_type": "llama", "vocab_size": 31, "pad_token_id": None}
ENCODER: dict[str, Any] = {
    **SIZES,
    "model_type": "bert",
    "vocab_size": 31,
    "hidden_dropout_prob": 0.0,
}
ENCODER |= {"attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
ONE_PROCESS = Topology(world=1)
LOGGED = ("loss", "grad_norm", "mean_token_accuracy", "num_tokens")  # of trl
MODELS = {
    "tied": lambda: decoder({**DECODER, "tie_word_embeddings": True}, 1),
    "untied": lambda: decoder({**DECODER, "tie_word_embeddings": False}, 2),
    "encoder": lambda: encoder(ENCODER, 3),
}


def resized_vocabulary(kind: str, tensor: int, tokens: int) -> list[Any]:
    """Resize ours and theirs: old rows stay, new ones are the mean, both then train alike.
    Return stores' settings.
    """
    reference = MODELS[kind]()
    before = {name: each.clone() for name, each in reference.state_dict().items()}
    model = parallel_model(reference, grid(tensor, False)).eval()
    with mock.patch.object(
        huggingface_model, "ActivationMemory", wraps=huggingface_model.ActivationMemory
    ) as memory:
        model.activation_checkpointing_enable(offload=True)
        assert model.resize_token_embeddings() is model.get_input_embeddings()
        resized = model.resize_token_embeddings(tokens)
    assert resized is model.get_input_embeddings() and model.config.vocab_size == tokens
    reference.resize_token_embeddings(tokens, mean_resizing=False)
    found = dict(native_tensors(model))
    kept = min(tokens, 31)
    for name, each in found.items():
        assert each.shape == reference.state_dict()[name].shape, name
        if each.shape == before[name].shape:
            assert torch.equal(each, before[name]), name
        else:
            assert torch.equal(each[:kept], before[name][:kept]), name
            assert torch.allclose(
                each[kept:], before[name].mean(0).expand_as(each[kept:]), atol=1e-7
            ), name
    reference.load_state_dict(found, strict=False)
    assert model.num_parameters(exclude_embeddings=True) == reference.num_parameters(
        exclude_embeddings=True
    )
    batch = {"input_ids": torch.randint(tokens, (2, 8)), "labels": torch.randint(tokens, (2, 8))}
    if kind == "encoder":
        batch["next_sentence_label"] = torch.tensor([0, 1])
    expected = reference(**batch)
    expected.loss.backward()
    output = model(**batch)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    check_close(
        to_theirs(model.config, whole_gradients(model)),
        {name: each for name, each in gradients(reference).items() if name in found},
    )
    with torch.no_grad():
        logits = [name for name in expected if name.endswith("logits")]
        scored = model(**batch)
        assert [name for name in scored if name != "loss"] == logits
        for name in logits:
            torch.testing.assert_close(scored[name], expected[name], rtol=1e-4, atol=1e-5)
    return [call.args[2] for call in memory.call_args_list]


CASES = [
    ("tied", 2, 40),
    ("untied", 2, 20),
    ("encoder", 2, 36),
    ("untied", 1, 40),
    ("encoder", 1, 20),
]


@pytest.mark.parametrize(("kind", "tensor", "tokens"), in_tiers(CASES, [("encoder", 2, 36)]))
def test_a_vocabulary_is_resized(ranks: Pools, kind: str, tensor: int, tokens: int) -> None:
    assert (
        ranks(2).run(resized_vocabulary, kind, tensor, tokens)
        == [[ActivationCheckpointing(cpu_checkpointing=True)] * 2] * 2
    )


def test_labels_are_those_of_transformers() -> None:
    """Trainer asks the class."""
    assert find_labels(ZeroTPForCausalLM) == ["labels"]
    assert find_labels(ZeroTPForPreTraining) == ["labels", "next_sentence_label"]


def test_native_weights_are_loaded_by_their_names(tmp_path: Path) -> None:
    reference, other = MODELS["tied"](), decoder({**DECODER, "tie_word_embeddings": True}, 9)
    model = parallel_model(other, ONE_PROCESS)
    names = list(reference.state_dict())
    halves = [{name: reference.state_dict()[name] for name in names[start::2]} for start in (0, 1)]
    for half in halves:  # the files of a model in shards
        assert model.load_state_dict(half, strict=False).unexpected_keys == []
    with pytest.raises(RuntimeError, match="missing"):
        model.load_state_dict(halves[0])
    contradicting = {
        **reference.state_dict(),
        "lm_head.weight": torch.zeros_like(reference.lm_head.weight),
    }
    with pytest.raises(RuntimeError, match=r"and lm_head\.weight differ, but the config ties them"):
        model.load_state_dict(contradicting)
    check_close(
        dict(native_tensors(model)),
        {name: reference.state_dict()[name] for name, _ in native_tensors(model)},
    )


@pytest.mark.parametrize("model_type", ["gpt_neox", "llama", "olmoe"])
def test_saved_weights_are_loaded_by_the_names_of_files(tmp_path: Path, model_type: str) -> None:
    """As a Trainer resumes: a head under its published name, and no tensor of another shape."""
    config = AutoConfig.for_model(model_type, **SIZES, vocab_size=32, max_position_embeddings=16)
    saved, loaded = (ZeroTPForCausalLM(config, ONE_PROCESS, seed=seed) for seed in (1, 2))
    saved.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert loaded.load_state_dict(tensors).unexpected_keys == []
    for name, parameter in saved.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], parameter), name
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if tensor.ndim == 2)
    with pytest.raises(RuntimeError, match=r"shape .*, the model has"):
        loaded.load_state_dict({**tensors, name: torch.cat([tensor, tensor])}, strict=False)


def test_options_that_are_not_built_are_refused_by_name(tmp_path: Path) -> None:
    model = parallel_model(MODELS["tied"](), ONE_PROCESS)
    for name, value in (
        ("variant", "fp16"),
        ("safe_serialization", False),
        ("distributed_checkpoint", True),
    ):
        with pytest.raises(UserError, match=name):
            model.save_pretrained(tmp_path / "model", **{name: value})
    assert not (tmp_path / "model").exists()
    with pytest.raises(ConfigError, match=r"gradient_checkpointing_kwargs\.mode"):
        model.activation_checkpointing_enable({"mode": "everything"})
    for fields, name in (
        ({"layers": 9}, "layers"),
        ({"every": 2}, "every"),
        ({"keep_micro_batches": 1}, "keep_micro"),
    ):
        with pytest.raises(UserError, match=rf"gradient_checkpointing_kwargs: {name}\w*: .*; use "):
            model.activation_checkpointing_enable(fields)
    with pytest.raises(UserError, match="every_n_layers: 2, but every is 1; give one of them"):
        model.activation_checkpointing_enable({"every": 1}, every_n_layers=2)
    with pytest.raises(UserError, match='offload: "selective" keeps no inputs of layers'):
        model.activation_checkpointing_enable({"mode": "selective"}, offload=True)
    with pytest.raises(UserError, match="0 tokens"):
        model.resize_token_embeddings(0)
    with pytest.raises(UserError, match="pad_to_multiple_of: 0; give 1 or more"):
        model.resize_token_embeddings(40, pad_to_multiple_of=0)


def test_trainers_with_a_loss_of_their_own_are_refused() -> None:
    from transformers import Trainer

    from zero_tp.tools.trainer import TensorParallel

    theirs = type("SFTTrainer", (Trainer,), {"__module__": "trl.trainer.sft_trainer"})
    with pytest.raises(UserError, match="trl's trainers"):
        type("Mine", (TensorParallel, theirs), {})(MODELS["tied"](), None)


def split_hidden_states() -> str:
    model = parallel_model(MODELS["tied"](), grid(2, True))
    with pytest.raises(
        UserError, match="give ZeroTPTrainer rows that a chat template has made"
    ) as caught:
        model.base_model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    return str(caught.value)


def test_hidden_states_are_those_of_a_whole_model(ranks: Pools) -> None:
    """trl's trainers multiply them by the output layer's weight."""
    reference = MODELS["tied"]()
    model = parallel_model(reference, ONE_PROCESS)
    batch = {
        "input_ids": torch.randint(31, (2, 8)),
        "attention_mask": torch.tensor([[1] * 8, [0] * 3 + [1] * 5]),
    }
    expected = reference.base_model(**batch, use_cache=False).last_hidden_state
    seen = batch["attention_mask"] == 1
    torch.testing.assert_close(
        model.base_model(**batch, use_cache=False).last_hidden_state[seen], expected[seen]
    )
    with pytest.raises(
        UserError, match=r"^base_model: output_hidden_states is not supported: no layer"
    ):
        model.base_model(**batch, output_hidden_states=True)
    for told in ranks(2).run(split_hidden_states):
        assert "needs the whole layer, but this model is split over 2 ranks; give" in told


@pytest.mark.thorough
def test_trl_trains_a_whole_model(tmp_path: Path) -> None:
    """SFTTrainer with the loss on a chat's answers, after a plan: the losses and norms of
    transformers' own model.
    """
    with simulated_accelerator():
        pass  # torch knows its device from here on
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = ["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrst"]
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {{ "
        "eos_token }}"
        "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    answers = [(" ".join(words[3 + i : 6 + i]), " ".join(words[4 + i : 8 + i])) for i in range(12)]
    rows = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in answers
    ]
    found = []
    for model in (MODELS["tied"](), parallel_model(MODELS["tied"](), ONE_PROCESS)):
        options: dict[str, Any] = {
            "max_steps": 3,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
        }
        options |= {
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 4,
            "assistant_only_loss": True,
        }
        args = SFTConfig(output_dir=str(tmp_path), disable_tqdm=True, save_strategy="no", **options)
        data = Dataset.from_list([{"messages": row} for row in rows])
        trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        found.append(
            [each[name] for each in trainer.state.log_history if "loss" in each for name in LOGGED]
        )
    theirs, ours = found
    assert len(ours) == 3 * len(LOGGED)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_directory_that_is_others_too_keeps_their_files(tmp_path: Path) -> None:
    """As Trainer's, in which it has checkpoints and its own state."""
    model = parallel_model(MODELS["tied"](), ONE_PROCESS)
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "training_args.bin").write_text("theirs")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("an older model's")
    model.save_pretrained(tmp_path, is_main_process=True)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {
        "checkpoint-5",
        "training_args.bin",
        "model.safetensors",
        "config.json",
        "generation_config.json",
    }
    model.save_pretrained(tmp_path / "nothing", is_main_process=False)
    assert not (tmp_path / "nothing").exists()
