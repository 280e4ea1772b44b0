"""Models whose modules or config were changed after they were built: they train the same, or are
refused by name.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, TrainingArguments

from tests.support.compare import check_close, gradient_of, grid, whole_gradients
from tests.support.live_model_changes import ADOPTED, REFUSED
from tests.support.live_models import Inapplicable, LiveModel
from tests.support.native import gradients, native_model, perturbed, to_ours
from tests.support.pools import Pools
from tests.tiers import seeds_in_tiers
from zero_tp.base.errors import UserError
from zero_tp.model.huggingface import ZeroTPForCausalLM, parallel_model
from zero_tp.parallel.layout import audit
from zero_tp.parallel.topology import Topology
from zero_tp.tools.trainer import ZeroTPTrainer

ONE_PROCESS = Topology(world=1)
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {"vocab_size": 31, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0}
TOKENS = torch.arange(32).view(2, 16) % 31


def llama(**fields: Any) -> Any:
    torch.manual_seed(0)
    return perturbed(native_model(AutoConfig.for_model("llama", **SIZES, **fields)))


def check_adopted(live: LiveModel, topology: Topology, batch: dict[str, Tensor]) -> None:
    """The parallel model has the live one's loss and every gradient. Collective over the TP
    group.
    """
    model = parallel_model(live.model, topology)
    live.model.zero_grad(set_to_none=True)
    expected = live.model(**batch).loss
    expected.backward()
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    theirs = {name: weight.grad for name, weight in live.model.named_parameters()}
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert any(weight.requires_grad for weight in trained.values())
    whole = {
        name: torch.zeros_like(weight) if (grad := theirs[name]) is None else grad
        for name, weight in live.model.named_parameters()
    }
    # Routers' biases are named among the weights, and have no gradient.
    whole |= {name: torch.zeros_like(buffer) for name, buffer in live.model.named_buffers()}
    reference = {
        name: tensor for name, tensor in to_ours(model.config, whole).items() if name in trained
    }
    for weight in model.parameters():
        if not weight.requires_grad:
            assert weight.grad is None
            weight.grad = torch.zeros_like(weight)
    found = whole_gradients(model)
    check_close({name: found[name] for name in trained}, reference)


def check_live_model(seed: int) -> str:
    """Change a drawn model; it is adopted on one rank and on 2, or refused by name. Return the
    change's name.
    """
    generator = random.Random(seed)
    adopts = generator.random() < 0.5
    live = LiveModel(seed)
    topologies = Topology(world=1), grid(2, generator.random() < 0.5)
    for change in generator.sample(
        ADOPTED if adopts else REFUSED, len(ADOPTED if adopts else REFUSED)
    ):
        try:
            words = change(live)
        except Inapplicable:
            continue
        batch = live.batch()
        for topology in topologies:
            if words is None:
                check_adopted(live, topology, batch)
                continue
            try:
                parallel_model(live.model, topology)
            except UserError as error:
                assert words in str(error) and "\n" not in str(error) and ";" in str(error), (
                    f"{change.__name__}: {error}"
                )
            else:
                raise AssertionError(
                    f"{change.__name__} of a {live.fields['model_type']} is accepted"
                )
        return change.__name__
    raise AssertionError("no change applies")


@pytest.mark.parametrize("seed", seeds_in_tiers(range(5), 60, 200))
def test_a_changed_model_trains_the_same_or_is_refused_by_name(ranks: Pools, seed: int) -> None:
    assert len(set(ranks(2).run(check_live_model, seed))) == 1


def test_a_head_untied_in_memory_is_exported(tmp_path: Path) -> None:
    native = llama(tie_word_embeddings=True)
    native.lm_head.weight = nn.Parameter(native.lm_head.weight.detach() * 2)
    parallel_model(native, ONE_PROCESS).save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(opened.lm_head.weight, native.lm_head.weight)
    torch.testing.assert_close(opened(TOKENS).logits, native(TOKENS).logits)


def test_a_models_mode_and_hooks_that_move_tensors_are_adopted() -> None:
    native = llama().eval()
    for part in native.modules():
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))
    assert not parallel_model(native, ONE_PROCESS).training
    assert parallel_model(llama(), ONE_PROCESS).training


def gemma_in_bf16(**fields: Any) -> Any:
    """Its class rounds the scale of embeddings, √24, as it opens; frequencies stay in fp32."""
    sizes = SIZES | {"hidden_size": 24, "head_dim": 8, "num_key_value_heads": 2}
    config = AutoConfig.for_model("gemma2", **sizes, pad_token_id=0, **fields)
    native = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.bfloat16
    )
    return native.eval()


def test_a_scale_rounded_by_the_class_rounds_no_frequencies() -> None:
    native = gemma_in_bf16()
    exact = native.model.rotary_emb.inv_freq
    assert exact.dtype == torch.float32 and not torch.equal(exact.bfloat16().float(), exact)
    cast = gemma_in_bf16().bfloat16()
    for live, expected in ((native, exact), (cast, exact.bfloat16().float())):
        rotary = parallel_model(live, ONE_PROCESS).spec.rotaries[0]
        assert rotary is not None
        assert torch.equal(rotary.frequencies(4, torch.device("cpu"))[0], expected)


def test_a_class_whose_forward_was_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels of other libraries are installed: in transformers' class, for all models."""
    native = llama()
    monkeypatch.setattr(type(native.model.norm), "forward", lambda self, rows: rows)
    with pytest.raises(
        UserError,
        match=r"^model: model\.\S*norm: the forward of LlamaRMSNorm is tests\.\S+'s, and wou",
    ):
        parallel_model(native, ONE_PROCESS)


def test_a_trainer_refuses_a_changed_model(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", save_strategy="no"
    )
    native = llama()
    native.model.norm.variance_epsilon = 0.1
    with pytest.raises(
        UserError,
        match=r"model: model\.norm: variance_epsilon is 0\.1; its config gives 1e-06; give a",
    ):
        ZeroTPTrainer(native, args)
    ours = parallel_model(llama(), ONE_PROCESS)
    ours.config.rms_norm_eps = 0.1
    with pytest.raises(
        UserError,
        match=r"config: rms_norm_eps changed from 1e-06 to 0\.1 after the model was built",
    ):
        ZeroTPTrainer(ours, args)


# ---- our own model -------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], object]] = {
    "pad_token_id": lambda config: setattr(config, "pad_token_id", 5),
    "tie_word_embeddings": lambda config: setattr(
        config, "tie_word_embeddings", not config.tie_word_embeddings
    ),
    "attention_dropout": lambda config: setattr(config, "attention_dropout", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_config_that_changes_later_has_the_effect_that_it_has_in_transformers(
    tmp_path: Path, change: str, tied: bool
) -> None:
    native = llama(tie_word_embeddings=tied)
    ours = parallel_model(native, ONE_PROCESS)
    for model in (native, ours):
        CHANGES[change](model.config)
        if change != "tie_word_embeddings":
            model.resize_token_embeddings(31 + 4, mean_resizing=False)
    native.load_state_dict(_exported(ours, tmp_path))  # new rows are drawn
    for model in (native, ours):
        model(TOKENS, labels=TOKENS).loss.backward()
    described = copy.deepcopy(ours.config)
    described.tie_word_embeddings = tied
    check_close(whole_gradients(ours), to_ours(described, gradients(native)))
    opened = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(
        opened(TOKENS).logits, ours.eval()(TOKENS, return_logits=True).logits
    )
    ours.save_pretrained(tmp_path / "weights", state_dict=ours.state_dict(), is_main_process=True)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "weights")
    torch.testing.assert_close(again(TOKENS).logits, opened(TOKENS).logits)
    if change == "tie_word_embeddings":
        with pytest.raises(
            UserError,
            match=r"^resize_token_embeddings: the embeddings are (not )?tied, and the config's",
        ):
            ours.resize_token_embeddings(40)


def _exported(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(directory)
    state: dict[str, torch.Tensor] = LlamaForCausalLM.from_pretrained(directory).state_dict()
    return state


@pytest.mark.parametrize(
    ("model_type", "name", "value"),
    [
        ("llama", "rms_norm_eps", 0.1),
        ("llama", "num_hidden_layers", 1),
        ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
        ("llama", "is_causal", False),
        ("mistral", "sliding_window", 3),
        ("mixtral", "output_router_logits", True),
    ],
)
def test_a_config_that_describes_another_model_is_refused(
    tmp_path: Path, model_type: str, name: str, value: object
) -> None:
    fields = SIZES if model_type == "llama" else {**SIZES, "num_key_value_heads": 2}
    model = ZeroTPForCausalLM(AutoConfig.for_model(model_type, **fields), ONE_PROCESS)
    before = getattr(model.config, name, None)
    setattr(model.config, name, value)
    message = (
        rf"^config: {name} changed from .* after the model was built, "
        "and its layers keep the old value; change it"
    )
    for use in (
        lambda: model(TOKENS),
        lambda: model.base_model(TOKENS),
        lambda: model.save_pretrained(tmp_path / "model"),
        lambda: model.resize_token_embeddings(40),
    ):
        with pytest.raises(UserError, match=message):
            use()
    assert not (tmp_path / "model").exists()
    setattr(model.config, name, before)
    model(TOKENS)


def test_another_attention_needs_another_model() -> None:
    model = parallel_model(llama(), ONE_PROCESS)
    model.set_attn_implementation("eager")
    with pytest.raises(
        UserError,
        match=r"^config: eager attention changed from false to true after the model was built",
    ):
        model(TOKENS)


def test_a_resize_keeps_the_padding_row() -> None:
    """-1 is the last token of the vocabulary with which the model was built, in transformers
    too.
    """
    native = llama(pad_token_id=-1)
    ours: Any = parallel_model(native, ONE_PROCESS)
    tokens = TOKENS.clone()
    tokens[0, :2] = torch.tensor([30, 39])
    for model in (native, ours):
        model.resize_token_embeddings(40, mean_resizing=False)
        model(tokens, labels=tokens).loss.backward()
        rows = gradient_of(model.get_input_embeddings().weight)
        assert rows[39].any() and not rows[30].any()
        model.resize_token_embeddings(20, mean_resizing=False)
        model.zero_grad()
        model(tokens % 20, labels=tokens % 20).loss.backward()
        assert gradient_of(model.get_input_embeddings().weight)[10].any()


# ---- copies and assigned weights -----------------------------------------------------------------


def copied_and_trained(recompute: str) -> int:
    """A copy, also of a copy, has the gradients of transformers' model, and shares nothing with
    the first. Return the number of gradients compared.
    """
    native = llama(tie_word_embeddings=True, num_key_value_heads=1)
    native(TOKENS, labels=TOKENS).loss.backward()
    first: Any = parallel_model(native, grid(2, True))
    if recompute:
        first.activation_checkpointing_enable({"mode": recompute})
    second = copy.deepcopy(copy.deepcopy(first))
    with torch.no_grad():
        for weight in first.parameters():
            weight.zero_()
    second(TOKENS, labels=TOKENS).loss.backward()
    assert all(weight.grad is None for weight in first.parameters())
    compared = to_ours(second.config, gradients(native))
    check_close(whole_gradients(second), compared)
    assert second.head.weight is second.get_input_embeddings().weight
    assert all(each.fired > 0 for each in second.gradient_hooks.sums.values())
    assert second.gradient_hooks.sums.keys() == first.gradient_hooks.sums.keys()
    audit(second, second.topology)
    return len(compared)


@pytest.mark.parametrize("recompute", ["", "full", "selective"])
def test_a_split_model_is_copied(ranks: Pools, recompute: str) -> None:
    native = llama(tie_word_embeddings=True, num_key_value_heads=1)
    parameters = len(list(parallel_model(native, ONE_PROCESS).parameters()))
    assert ranks(2).run(copied_and_trained, recompute) == [parameters] * 2


def test_parameters_are_not_replaced() -> None:
    """Tensors that take a parameter's place would have no layout and no gradient hook."""
    model: Any = parallel_model(llama(), ONE_PROCESS)
    for names in (model.state_dict(), llama().state_dict()):
        with pytest.raises(
            UserError,
            match=r"^load_state_dict: assign=True would replace parameters .*; leave it out",
        ):
            model.load_state_dict(names, assign=True)
    with pytest.raises(
        UserError, match=r'^to_empty: it would replace .*; build the model with device="cpu"'
    ):
        ZeroTPForCausalLM(model.config, ONE_PROCESS, device="meta").to_empty(device="cpu")
    model.head.weight = nn.Parameter(model.head.weight.detach())
    for use in (
        lambda: model.save_pretrained("nowhere"),
        lambda: model.resize_token_embeddings(40),
    ):
        with pytest.raises(
            UserError,
            match=r"head\.weight has no layout, .*; change values of a parameter in place, or",
        ):
            use()
