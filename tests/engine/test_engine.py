"""One step of the engine against GPT2LMHeadModel: the first minute of what test_parity.py proves
at length.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, LlamaConfig

from tests.support.compare import grid
from tests.support.gpt2_reference import SIZES, reference_model
from tests.support.native import native_tensors
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings, gpt2_config
from tests.support.small_engine import ACCUMULATION, BATCH, LENGTH, build
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.zero.states import MASTER
from zero_tp.model.architectures import architecture_of
from zero_tp.model.causal_lm import next_tokens
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.topology import Topology

SHARED = gpt2_config(
    0.1, n_head=24, n_embd=72, n_positions=80, vocab_size=301, tie_word_embeddings=False
)
"""Its larger matrices have 2 to 5 blocks, some of which end inside one, on each of 1 and 2 TP
ranks.
"""


@contextmanager
def recorded_draws() -> Iterator[list[int]]:
    """The seed of each tensor that is drawn inside: another one for each block of a parameter."""
    seeds: list[int] = []
    normal = torch.normal

    def recorded(*arguments: Any, generator: torch.Generator, **options: Any) -> Tensor:
        seeds.append(generator.initial_seed())
        return normal(*arguments, generator=generator, **options)

    with patch.object(torch, "normal", recorded):
        yield seeds


def initial(tensor: int, stage: int, dtype: str) -> tuple[int, list[int], dict[str, Tensor]]:
    """The TP rank, what this rank has drawn, and the weights that its engine starts with."""
    topology = grid(tensor, True)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    settings = deepspeed_settings(stage, dtype=dtype, zero_optimization=zero)
    with recorded_draws() as seeds:
        engine = TrainingEngine.from_dict(copy.deepcopy(SHARED), topology, settings, seed=5)
    return (
        topology.tensor_rank,
        seeds,
        {name: weight.clone() for name, weight in native_tensors(engine.model)},
    )


@THOROUGH
@pytest.mark.parametrize(
    ("tensor", "stage", "dtype"),
    in_tiers(
        [(t, stage, dtype) for t in (1, 2, 4) for stage in range(4) for dtype in ("fp32", "bf16")],
        [(2, 3, "bf16")],
    ),
)
def test_data_parallel_ranks_draw_each_weight_once_among_them(
    ranks: Pools, tensor: int, stage: int, dtype: str
) -> None:
    config = copy.deepcopy(SHARED)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    expected = dict(
        native_tensors(ZeroTPForCausalLM(config, Topology(world=1), seed=5, dtype=kind))
    )
    drawn: list[list[int]] = [[] for _ in range(tensor)]
    for tensor_rank, seeds, weights in ranks(4).run(initial, tensor, stage, dtype):
        assert seeds and weights.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), name
        drawn[tensor_rank] += seeds
    for rank, seeds in enumerate(drawn):
        with recorded_draws() as alone:
            ZeroTPForCausalLM(config, Topology(tensor, True, world=tensor, rank=rank), seed=5)
        assert sorted(seeds) == sorted(alone)


def tokens_of_the_step() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(SIZES["vocab_size"], (BATCH, LENGTH), generator=generator)


def one_step(tensor: int, sequence: bool, stage: int) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm, and the weights that the engine started with."""
    topology = grid(tensor, sequence)
    engine = build(topology, stage)
    weights = {name: tensor.clone() for name, tensor in native_tensors(engine.model)}
    own = tokens_of_the_step().chunk(topology.data)[topology.data_rank]
    loss = engine.train_step([(tokens, next_tokens(tokens)) for tokens in own.chunk(ACCUMULATION)])
    return loss, engine.gradient_norm, weights


@pytest.mark.parametrize(
    ("sequence", "stage"),
    in_tiers(
        [(sequence, stage) for sequence in (False, True) for stage in (0, 1, 2, 3)],
        [(False, 0), (True, 1), (False, 2), (True, 3)],
    ),
)
def test_loss_and_gradient_norm_of_a_step(ranks: Pools, sequence: bool, stage: int) -> None:
    model = reference_model()
    tokens = tokens_of_the_step()
    expected_loss = model(tokens, labels=tokens).loss
    expected_loss.backward()
    expected_norm = (
        sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters())
        ** 0.5
    )
    losses, norms, starts = zip(*ranks(4).run(one_step, 2, sequence, stage), strict=True)
    assert losses == pytest.approx([expected_loss.item()] * 4, rel=1e-5)
    assert norms == pytest.approx([expected_norm] * 4, rel=1e-5)
    for weights in starts:
        assert all(
            torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights.items()
        )


def labels_of_the_step() -> Tensor:
    """Ignored in part, and more on one DP rank than on the other: a mean of means would be
    another number.
    """
    labels = next_tokens(tokens_of_the_step())
    labels[: BATCH // 2, 3:] = -100
    return labels


def validated(stage: int) -> tuple[float, float, bool]:
    """Validation losses before and after a step with a learning rate of zero, and whether that
    step had dropout.
    """
    topology = grid(2, True)
    still = {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}
    engine = build(topology, stage, dropout=0.5, optimizer=still)
    modes: list[bool] = []
    engine.model.transformer.register_forward_pre_hook(
        lambda module, _: modes.append(module.training)
    )
    own = [
        whole.chunk(topology.data)[topology.data_rank]
        for whole in (tokens_of_the_step(), labels_of_the_step())
    ]
    batches = list(zip(*(part.chunk(ACCUMULATION) for part in own), strict=True))
    before = engine.evaluate(batches)["loss"]
    modes.clear()
    engine.train_step(batches)
    dropped = all(modes)
    return before, engine.evaluate(batches)["loss"], dropped


@pytest.mark.parametrize("stage", [1, 3])
def test_validation_is_the_mean_over_all_labels(ranks: Pools, stage: int) -> None:
    logits = reference_model()(tokens_of_the_step()).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels_of_the_step().flatten()
    ).item()
    for before, after, dropped in ranks(4).run(validated, stage):
        assert before == after == pytest.approx(expected, rel=1e-5)
        assert dropped, "a step after a validation has no dropout"


def masters_at_the_start() -> tuple[list[Tensor], list[Tensor], list[Any]]:
    engine = build(grid(2, True), 0, bf16={"enabled": True})
    states = engine.zero.states()
    steps = [state["step"] for state in states.optimizer.state.values() if "step" in state]
    weights = [
        engine.model.get_parameter(each.name).detach().flatten().clone()
        for each in states.fragments
    ]
    return [states.get(each, MASTER).clone() for each in states.fragments], weights, steps


def test_no_step_is_taken_before_the_first(ranks: Pools) -> None:
    """DeepSpeed's 16-bit optimizers without ZeRO take one to allocate their states."""
    for masters, weights, steps in ranks(2).run(masters_at_the_start):
        assert not steps
        for master, weight in zip(masters, weights, strict=True):
            assert master.dtype == torch.float32 and torch.equal(master, weight.float())


def frequencies_of_an_engine() -> list[Tensor]:
    """Of a bf16 ZeRO-3 engine's model, and of its config alone: `zero.Init` rounds the tensors
    that are made in it.
    """
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=48,
    )
    engine = TrainingEngine.from_dict(
        config, Topology(), deepspeed_settings(3, dtype="bf16"), seed=0
    )
    engine.train_step([(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))])
    specs: tuple[Any, ...] = (engine.model.spec, architecture_of(config).spec(config))
    return [spec.rotaries[0].frequencies(4, torch.device("cpu"))[0] for spec in specs]


def test_rotary_frequencies_are_not_rounded_to_the_models_dtype(ranks: Pools) -> None:
    for ours, expected in ranks(1).run(frequencies_of_an_engine):
        assert ours.dtype == torch.float32 and torch.equal(ours, expected)


def engine_of_a_script() -> tuple[str, bool]:
    """An engine whose config has a schedule without params, given too few micro-batches.

    Returns:
        The error, and whether the right number trains.
    """
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 1,
        "scheduler": {"type": "WarmupLR"},
    }
    engine = build(grid(1, False), 1, **settings)
    row = torch.zeros(1, 4, dtype=torch.long)
    try:
        engine.train_step([(row, row)])
    except UserError as error:
        return str(error), math.isfinite(engine.train_step([(row, row)] * 2))
    return "", False


def test_the_nvme_directory_of_a_script_is_checked() -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/no/directory"}}
    with pytest.raises(
        UserError, match=r"offload_param\.nvme_path: /no/directory is not a directory"
    ):
        TrainingEngine.from_dict(
            SHARED, Topology(world=1), deepspeed_settings(3, zero_optimization=zero), seed=0
        )


def test_a_step_has_as_many_micro_batches_as_the_config_says(ranks: Pools) -> None:
    """With fewer DeepSpeed would update in the middle of a later step."""
    for error, trained in ranks(1).run(engine_of_a_script):
        assert error.startswith(
            "a step was given 1 micro-batches, and gradient_accumulation_steps is 2: "
        )
        assert trained


def batches_of_the_other_objective() -> list[str]:
    """Errors of a decoder that is given a mapping, and of an encoder that is given a pair, in
    steps and evaluations.
    """
    row = torch.ones(1, 4, dtype=torch.long)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 16,
    }
    given: list[tuple[Any, Any]] = [
        (LlamaConfig(**sizes, num_attention_heads=1), {"input_ids": row, "labels": row}),
        (BertConfig(**sizes, num_attention_heads=1), (row, row)),
    ]
    errors = []
    for config, batch in given:
        engine = TrainingEngine.from_dict(config, grid(1, False), deepspeed_settings(0), seed=0)
        for use in (engine.train_step, engine.evaluate):
            with pytest.raises(UserError) as caught:
                use([batch])
            errors.append(str(caught.value))
    return errors


def test_a_batch_of_the_other_objective_is_refused(ranks: Pools) -> None:
    """transformers shifts a causal model's labels, and an engine's labels are shifted already."""
    ((mapping, evaluated, pair, evaluated_pair),) = ranks(1).run(batches_of_the_other_objective)
    assert mapping == evaluated and mapping.startswith(
        "a causal model was given a mapping, of whose labels the first"
    )
    assert pair == evaluated_pair and pair.startswith(
        "an encoder was given a pair, whose labels are the next tokens"
    )
