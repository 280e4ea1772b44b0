"""Steps with z-losses against autograd on transformers' own classes in one process, and their keys
in a run's file: `zero_tp.training.z_loss` and `zero_tp.training.router_z_loss`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.compare import check_close, grid
from tests.support.corrected_routers import corrected_fields
from tests.support.decoders import decoder
from tests.support.encoders import encoder, fields_of, rows_for
from tests.support.experts import fields
from tests.support.mistakes import changed, written
from tests.support.native import Native, gradients
from tests.support.parallel_run import record_gradients
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings, fp16_supported
from tests.support.tiny_configs import general_fields
from tests.support.z_losses import recorded_router_logits, router_z_loss, sum_of_token_z_losses
from tests.tiers import in_tiers
from zero_tp.base.errors import ConfigError, UserError
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.data.batch import MaskedBatch
from zero_tp.engine.engine import TrainingEngine
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig
from zero_tp.run.start import _build_engine
from zero_tp.run.step_logger import RunProgress, format_step

TOKEN, ROUTER = 0.03, 0.05
"""Weights so large that a wrong z-loss is far from the tolerances."""
ROWS, LENGTH, ACCUMULATION = 8, 12, 2

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": general_fields("gpt2"),
    "capped": general_fields("gemma2") | {"final_logit_softcapping": 3.0},
    "mixtral": fields("mixtral", num_local_experts=8, output_router_logits=False),
    "sigmoid": corrected_fields("glm4_moe"),
}
WITH_EXPERTS = ("mixtral", "sigmoid")


def rows_of_the_step() -> tuple[Tensor, Tensor]:
    """Tokens and the labels of their positions; ranks and micro-batches have other numbers of
    labels.
    """
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(61, (ROWS, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 2:] = labels[1, 1:] = labels[5, 7:] = labels[6] = -100
    return tokens[:, :-1], labels


def engine_of(reference: Any, topology: Topology, stage: int, dtype: str, **options: Any) -> Any:
    settings = deepspeed_settings(
        stage,
        micro_batch=ROWS // topology.data // ACCUMULATION,
        accumulation=ACCUMULATION,
        dtype=dtype,
    )
    return TrainingEngine.from_dict(
        reference.config, topology, settings, seed=0, source=Native(reference), **options
    )


def own_parts(topology: Topology, *wholes: Tensor) -> list[tuple[Tensor, ...]]:
    """This rank's micro-batches."""
    own = (whole.chunk(topology.data)[topology.data_rank].chunk(ACCUMULATION) for whole in wholes)
    return list(zip(*own, strict=True))


def check_step(
    engine: Any, batches: list[Any], reference: Any, expected: dict[str, Tensor], relative: float
) -> dict[str, float]:
    """Compare the loss, the figures and every gradient of a step, and the validation before it;
    return the figures.
    """
    validation = engine.evaluate(batches)
    assert "z_loss" not in validation and "router_z_loss" not in validation
    assert validation["loss"] == pytest.approx(expected["loss"].item(), rel=relative)
    found: dict[str, Tensor] = {}
    record_gradients(engine, found)
    scale = engine.loss_scale or 1.0
    loss = engine.train_step(batches, guarded=1)
    assert loss == pytest.approx(expected["loss"].item(), rel=relative)
    figures = engine.figures
    weights = {"z_loss": TOKEN, "router_z_loss": ROUTER}
    total = expected["loss"]
    for name in expected.keys() - {"loss"}:
        assert figures[name] == pytest.approx(expected[name].item(), rel=relative), name
        total = total + weights[name] * expected[name]
    total.backward()
    unscaled = {name: gradient / scale for name, gradient in found.items()}
    check_close(unscaled, gradients(reference), relative=relative)
    return {"loss": loss, **figures}


def trained(
    name: str, tensor: int, sequence: bool, expert: int, stage: int, dtype: str, recompute: str
) -> dict[str, float]:
    topology = grid(tensor, sequence, expert)
    reference = decoder(MODELS[name], 1)
    tokens, labels = rows_of_the_step()
    with recorded_router_logits(reference) as routers:
        logits = reference(tokens).logits
    entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    z_loss = sum_of_token_z_losses(logits, labels) / (labels != -100).sum()
    expected = {"loss": entropy, "z_loss": z_loss}
    options: dict[str, Any] = {"recompute": RecomputePolicy(mode=recompute), "z_loss": TOKEN}
    if name in WITH_EXPERTS:
        expected["router_z_loss"] = router_z_loss(routers)
        options["router_z_loss"] = ROUTER
    with fp16_supported():
        engine = engine_of(reference, topology, stage, dtype, **options)
        relative = 1e-5 if dtype == "fp32" else 3e-2
        return check_step(
            engine, own_parts(topology, tokens, labels), reference, expected, relative
        )


CASES = [
    # model, TP, SP, E, stage, dtype, recomputation
    ("gpt2", 2, True, 1, 2, "fp32", "none"),
    ("mixtral", 1, False, 2, 1, "fp32", "full"),
    ("mixtral", 2, True, 2, 2, "fp32", "none"),
    ("mixtral", 2, False, 1, 3, "fp32", "selective"),
    ("sigmoid", 2, True, 1, 0, "fp32", "full"),
    ("sigmoid", 1, False, 2, 2, "fp32", "none"),
    ("capped", 4, True, 1, 1, "fp32", "full"),
    ("capped", 2, False, 1, 3, "fp32", "none"),
    ("gpt2", 1, False, 1, 1, "bf16", "none"),
    ("gpt2", 2, True, 1, 2, "fp16", "none"),
]


@pytest.mark.parametrize("case", in_tiers([(case,) for case in CASES], [(CASES[0],), (CASES[1],)]))
def test_a_step_has_the_gradients_of_the_plain_model(
    ranks: Pools, case: tuple[str, int, bool, int, int, str, str]
) -> None:
    """On four ranks. In 16 bit every gradient is within 3 % of its norm."""
    found = ranks(4).run(trained, *case)
    assert found == found[:1] * 4


def trained_on_masked_tokens(stage: int) -> dict[str, float]:
    topology = grid(2, True)
    fields = fields_of("bert")
    reference = encoder(fields, 1)
    rows = rows_for(fields, 2, ROWS, 16)
    output = reference(**rows)
    z_loss = sum_of_token_z_losses(output.prediction_logits, rows["labels"])
    expected = {"loss": output.loss, "z_loss": z_loss / (rows["labels"] != -100).sum()}
    engine = engine_of(reference, topology, stage, "fp32", z_loss=TOKEN)
    batches = [
        MaskedBatch(dict(zip(rows, part, strict=True))).to(engine.device)
        for part in own_parts(topology, *rows.values())
    ]
    return check_step(engine, batches, reference, expected, 1e-5)


@pytest.mark.parametrize("stage", in_tiers([1, 3], [1]))
def test_a_step_of_masked_tokens(ranks: Pools, stage: int) -> None:
    for found in ranks(4).run(trained_on_masked_tokens, stage):
        assert found["masked_loss"] + found["sentence_loss"] == pytest.approx(found["loss"])


def first_losses(weight: float) -> tuple[float, dict[str, float], float]:
    reference = decoder(MODELS["gpt2"], 1)
    topology = grid(2, True)
    engine = engine_of(reference, topology, 1, "fp32", z_loss=weight)
    loss = engine.train_step(own_parts(topology, *rows_of_the_step()))
    return loss, engine.figures, engine.gradient_norm


def test_the_loss_that_is_logged_has_no_z_loss(ranks: Pools) -> None:
    """The first step's is that of a run without one, bit for bit."""
    without, with_z_loss = (ranks(2).run(first_losses, weight)[0] for weight in (0.0, TOKEN))
    assert without[0] == with_z_loss[0] and without[2] != with_z_loss[2]
    assert without[1] == {} and with_z_loss[1].keys() == {"z_loss"}


def test_a_run_passes_its_keys_to_the_engine(tmp_path: Path) -> None:
    keys = {"zero_tp.training.z_loss": 1e-5, "zero_tp.training.router_z_loss": 1e-3}
    changes = {**keys, "zero_tp.model": {"model_type": "mixtral"}}
    config = RunConfig.load(written(tmp_path, changed(changes)), world_size=4)
    inputs: Any = SimpleNamespace(config=config, model_config=None)
    with patch("zero_tp.run.start.TrainingEngine") as engine:
        _build_engine(inputs, Topology(world=1), torch.device("cpu"), None, None)
    options = engine.call_args.kwargs
    assert (options["z_loss"], options["router_z_loss"]) == (1e-5, 1e-3)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "z_loss",
            -1e-5,
            "must be greater than or equal to 0; docs/config.md lists what is accepted",
        ),
        ("z_loss", float("inf"), "run.json: Infinity is not a finite number; correct the file"),
        ("router_z_loss", "NaN", "must be a finite number; docs/config.md lists what is accepted"),
        (
            "router_z_loss",
            1e-3,
            "zero_tp.training.router_z_loss: a gpt2 has no experts; leave it out",
        ),
    ],
)
def test_wrong_weights_are_one_line(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.load(written(tmp_path, changed({f"zero_tp.training.{key}": value})), world_size=4)
    assert str(error.value).endswith(message) and "\n" not in str(error.value)


def test_the_engine_refuses_the_weight_of_routers_that_a_model_lacks() -> None:
    settings = deepspeed_settings(1)
    config = decoder(MODELS["gpt2"], 1).config
    with pytest.raises(UserError, match=r"router_z_loss: 0\.1, but a gpt2 has no experts"):
        TrainingEngine.from_dict(config, Topology(world=1), settings, seed=1, router_z_loss=0.1)


def test_each_z_loss_has_a_column() -> None:
    values = {
        **dict.fromkeys(("learning_rate", "grad_norm", "tokens_per_second"), 1.0),
        **{"step": 1, "loss": 2.5, "model_tflops": 1.0, "mfu": None, "hfu": None},
        **{"memory_gib": 1.0, "aux_loss": 2.0, "z_loss": 16.5, "router_z_loss": 4.25},
    }
    header, line = format_step(values, RunProgress(1, 1, 1.0, 1.0), 9)
    assert "  z loss" in header and "router z loss" in header
    assert "16.5000" in line and "4.2500" in line
