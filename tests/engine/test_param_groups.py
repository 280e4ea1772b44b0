"""`zero_tp.param_groups` against torch's AdamW with the same groups, around transformers' class in
one process.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime import lr_schedules as deepspeed_schedules
from torch import Tensor
from transformers import AutoConfig

from tests.support.checkpoint_runs import build
from tests.support.compare import check_close
from tests.support.native import native_model
from tests.support.parallel_run import optimizer_tensors
from tests.support.plain_run import draw_weights
from tests.support.pools import Pools
from tests.tiers import in_tiers
from zero_tp.base.errors import ConfigError, UserError
from zero_tp.base.settings.param_groups import parse_param_groups
from zero_tp.base.settings.schedule import check_scheduler
from zero_tp.engine.zero.lr_schedules import scale_rates, set_schedule, transformers_schedule
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.checkpoint.same_run import check_same_run, fixed_settings
from zero_tp.run.checkpoint.save import run_saver
from zero_tp.run.checkpoint.start_point import Resume
from zero_tp.run.config import RunConfig

RATE, DECAY, EPS, SEED, STEPS, BATCH, LENGTH = 1e-2, 0.1, 1e-3, 7, 4, 4, 16
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 24,
    "n_head": 4,
    "n_positions": LENGTH,
    "vocab_size": 61,
    "bos_token_id": 0,
    "eos_token_id": 0,
    **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
}
QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "max_position_embeddings": LENGTH,
    "vocab_size": 61,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
ENTRIES: dict[str, list[dict[str, Any]]] = {
    "gpt2": [
        {"pattern": "attn.c_attn", "lr_scale": 0.5, "weight_decay": 0.3},
        {"kind": "embedding", "weight_decay": 0.0, "lr_scale": 2.0},
        {"kind": "matrix", "lr_scale": 0.25},
        {"kind": "norm", "weight_decay": 0.2},
    ],
    "qwen2_moe": [
        {"pattern": r"\.experts\..*down_proj", "lr_scale": 0.5},
        {"kind": "router", "weight_decay": 0.0, "lr_scale": 2.0},
        {"kind": "output", "weight_decay": 0.3},
        {"kind": "bias", "weight_decay": 0.2, "lr_scale": 0.25},
        {"pattern": "layers"},
    ],
}
MODELS = {"gpt2": GPT2, "qwen2_moe": QWEN2_MOE}


def settings_of(model_type: str, name: str, size: int) -> tuple[float, float]:
    """(factor of the rate, decay) of a tensor of transformers' class, written out by hand."""
    if model_type == "gpt2":
        cases = [
            ("c_attn", 0.5, 0.3),
            ("wte|wpe", 2.0, 0.0),
            ("ln_", 1.0, 0.2),
            (r"c_(fc|proj)\.weight", 0.25, DECAY),
        ]
    else:
        cases = [
            ("experts.down_proj", 0.5, DECAY),
            (r"mlp\.gate\.weight|shared_expert_gate", 2.0, 0.0),
            ("lm_head", 1.0, 0.3),
            ("bias", 0.25, 0.2),
        ]
    usual = (1.0, DECAY if size > 1 else 0.0)
    return next((pair for part, *pair in cases if re.search(part, name)), usual)  # type: ignore[return-value]


def cosine(part: float) -> float:
    return (1 + math.cos(math.pi * part)) / 2


LINEAR = {"warmup_num_steps": 3, "warmup_type": "linear"}
CYCLE: dict[str, Any] = {
    "cycle_min_lr": RATE / 10,
    "cycle_max_lr": RATE,
    "cycle_first_step_size": 2,
    "decay_lr_rate": 0.5,
    "decay_step_size": 1,
    "cycle_momentum": False,
}
RANGE = {"lr_range_test_min_lr": RATE / 4, "lr_range_test_step_size": 2}
SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "none": ({}, lambda k: RATE),
    "WarmupLR": ({**LINEAR, "warmup_max_lr": RATE}, lambda k: RATE * min(1, k / 3)),
    "WarmupDecayLR": (
        {**LINEAR, "warmup_max_lr": RATE, "total_num_steps": 7},
        lambda k: RATE * min(k / 3, (7 - k) / 4),
    ),
    "WarmupCosineLR": (
        {**LINEAR, "total_num_steps": 7, "cos_min_ratio": 0.1},
        lambda k: RATE * (k / 3 if k < 3 else 0.1 + 0.9 * cosine((k - 2) / 4)),
    ),
    "OneCycle": (
        CYCLE,
        lambda k: (
            RATE * (0.1 + 0.9 * min(k / 2, (4 - k) / 2))
            if k <= 4
            else RATE / 10 / (1 + 0.5 * (k - 4))
        ),
    ),
    "LRRangeTest": (RANGE, lambda k: RATE / 4 * (1 + k / 2)),
    "cosine": (
        {"num_warmup_steps": 2, "num_training_steps": 6},
        lambda k: RATE * (k / 2 if k < 2 else cosine((k - 2) / 4)),
    ),
}
"""Type → params, and the rate of step k by its documentation."""


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 61, (BATCH, LENGTH + 1), generator=generator)


@functools.cache
def plain(model_type: str, schedule: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the weights after the last step."""
    fields = dict(MODELS[model_type])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = native_model(config)
    draw_weights(model, AutoConfig.for_model(model_type, **fields), SEED)
    groups = []
    for name, weight in model.named_parameters():
        scale, decay = settings_of(model_type, name, weight.ndim)
        groups.append({"params": [weight], "weight_decay": decay, "lr_scale": scale})
    optimizer = torch.optim.AdamW(groups, lr=RATE, eps=EPS)
    losses = []
    for step in range(1, STEPS + 1):
        tokens = tokens_of(step)
        loss = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULES[schedule][1](step) * group["lr_scale"]
        optimizer.step()
        losses.append(loss.item())
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return losses, weights


def write(
    path: Path, model_type: str, tensor: int, stage: int, schedule: str, **changes: Any
) -> Path:
    """A run's file; `changes` are whole blocks, `zero_optimization` beside the stage."""
    scheduler = {"type": schedule, "params": SCHEDULES[schedule][0]}
    params = {"lr": RATE, "weight_decay": DECAY, "eps": EPS, **changes.pop("params", {})}
    zero = {"stage": stage, **changes.pop("zero_optimization", {})}
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": scheduler,
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero}
        if stage == 3
        else zero,
        "zero_tp": {
            "model": MODELS[model_type],
            "parallel": {"tensor": tensor},
            "data": {"train": "nowhere/train", "sequence_length": LENGTH},
            "training": {"steps": STEPS, "seed": SEED},
            "param_groups": ENTRIES[model_type],
        },
        **changes,
    }
    if schedule == "none":
        del config["scheduler"]
    path.write_text(json.dumps(config))
    return path


def rates_of(engine: Any) -> list[float]:
    return [group["lr"] for group in engine.zero.optimizer.param_groups]


def train(path: str, run: str, resumes: bool, last: int) -> tuple[list[float], Any, list[Any]]:
    """Train to a step, from the checkpoint or the start, and save: the losses, the whole fp32
    weights, and the groups' rates.
    """
    engine, config = build(path)
    step = 0
    if resumes:
        start = Resume(find_checkpoint(Path(run)))
        check_same_run(start.checkpoint.path, start.checkpoint.manifest, config)
        start.restore(engine.zero, SEED)
        step = start.step
    losses, rates = [], []
    topology = engine.topology
    for number in range(step + 1, last + 1):
        own = tokens_of(number).chunk(topology.data)[topology.data_rank]
        rates.append(rates_of(engine))
        assert engine.learning_rate == pytest.approx(rates[-1][0], rel=1e-12)
        rows = own.chunk(2)
        losses.append(engine.train_step([(part[:, :-1], part[:, 1:]) for part in rows]))
    saver = run_saver(engine.zero, config, Path(run))
    saver.save(last)
    assert saver.outcome() == (last, "")
    weights = optimizer_tensors(engine)
    return losses, weights if topology.rank == 0 else None, rates


def check(result: tuple[list[float], Any, Any], model_type: str, schedule: str) -> None:
    losses, weights = plain(model_type, schedule)
    assert result[0] == pytest.approx(losses[-len(result[0]) :], rel=1e-5)
    check_close(result[1], weights)


CASES: list[tuple[str, int, int, str]] = [
    ("gpt2", 2, 1, "WarmupDecayLR"),
    ("gpt2", 1, 3, "OneCycle"),
    *(("gpt2", tensor, stage, "none") for tensor in (1, 2) for stage in range(4)),
    *(("gpt2", 2, 2, schedule) for schedule in SCHEDULES if schedule != "none"),
    *(("gpt2", 1, 0, schedule) for schedule in SCHEDULES if schedule != "none"),
    *(("qwen2_moe", tensor, stage, "WarmupLR") for tensor in (1, 2) for stage in range(4)),
]


@pytest.mark.parametrize(("model_type", "tensor", "stage", "schedule"), in_tiers(CASES, CASES[:2]))
def test_losses_and_weights_are_those_of_torchs_groups(
    ranks: Pools, tmp_path: Path, model_type: str, tensor: int, stage: int, schedule: str
) -> None:
    path = write(tmp_path / "run.json", model_type, tensor, stage, schedule)
    result = ranks(2).run(train, str(path), str(tmp_path / "run"), False, STEPS)[0]
    check(result, model_type, schedule)


VARIANTS: dict[str, dict[str, Any]] = {
    "torch's loop": {"params": {"torch_adam": True, "foreach": False}},
    "DeepSpeed's step": {"params": {"torch_adam": True, "fused": False}},
    "torch offloaded": {
        "params": {"torch_adam": True},
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
    },
    "CPUAdam": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_implementation_of_adam_has_the_groups(
    ranks: Pools, tmp_path: Path, variant: str, stage: int
) -> None:
    path = write(
        tmp_path / "run.json", "gpt2", 2, stage, "WarmupCosineLR", **dict(VARIANTS[variant])
    )
    result = ranks(2).run(train, str(path), str(tmp_path / "run"), False, STEPS)[0]
    check(result, "gpt2", "WarmupCosineLR")


PRECISIONS: list[tuple[int, dict[str, Any]]] = [
    (0, {"bf16": {"enabled": True}}),
    (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    (2, {"bf16": {"enabled": True}}),
    (3, {"bf16": {"enabled": True}}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("stage", "precision"), PRECISIONS)
def test_sixteen_bit_optimizers_have_the_groups_rates(
    ranks: Pools, tmp_path: Path, stage: int, precision: dict[str, Any]
) -> None:
    """The rest twice (matrices there are none), then each entry; its biases are another group."""
    path = write(tmp_path / "run.json", "gpt2", 2, stage, "LRRangeTest", **precision)
    _, _, rates = ranks(2).run(train, str(path), str(tmp_path / "run"), False, STEPS)[0]
    scales = [1.0, 0.5, 2.0, 0.25, 1.0]
    for step, groups in enumerate(rates, 1):
        rate = SCHEDULES["LRRangeTest"][1](step)
        assert groups == pytest.approx([rate * scale for scale in scales], rel=1e-9)


PLACES = [((2, 1), (1, 3)), ((1, 3), (2, 0)), ((2, 0), (2, 2)), ((1, 2), (2, 1))]
"""(TP, stage) of the save and of the resumed run."""


@pytest.mark.parametrize(("before", "after"), in_tiers(PLACES, PLACES[:1]))
def test_a_resumed_run_keeps_rates_and_decay_on_another_topology(
    ranks: Pools, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    schedule = "WarmupCosineLR"
    run = str(tmp_path / "run")
    path = write(tmp_path / "before.json", "gpt2", *before, schedule)
    ranks(2).run(train, str(path), run, False, 2)
    path = write(tmp_path / "after.json", "gpt2", *after, schedule)
    check(ranks(2).run(train, str(path), run, True, STEPS)[0], "gpt2", schedule)
    # Like every setting of the optimizer, the groups stay for the whole run.
    changed = json.loads(path.read_text())
    changed["zero_tp"]["param_groups"][0]["lr_scale"] = 0.75
    path.write_text(json.dumps(changed))
    checkpoint = find_checkpoint(Path(run))
    refused = (
        r"zero_tp\.param_groups\.0\.lr_scale: 0\.75, but .* was started with 0\.5; set it back"
    )
    with pytest.raises(UserError, match=f"^{refused}"):
        check_same_run(checkpoint.path, checkpoint.manifest, RunConfig.load(path, world_size=2))


def test_a_checkpoint_without_the_key_had_no_groups(tmp_path: Path) -> None:
    """Those of versions before the key resume in a run without groups, and in no other."""
    path = write(tmp_path / "run.json", "gpt2", 1, 1, "none")
    without = RunConfig.load(path, ["zero_tp.param_groups=[]"], world_size=1)
    fixed = fixed_settings(without)
    del fixed["zero_tp.param_groups"]
    manifest: Any = SimpleNamespace(
        step=0, imported=None, fixed=fixed, kinds=["master", "exp_avg"], corpora=["nowhere/train"]
    )
    check_same_run(tmp_path, manifest, without)
    with pytest.raises(UserError, match=r"^zero_tp\.param_groups\.0: .* was started with not set"):
        check_same_run(tmp_path, manifest, RunConfig.load(path, world_size=1))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "none"])
def test_a_group_has_its_factor_at_each_step_of_a_schedule(name: str) -> None:
    """As the engine drives them: set to a step at the start and on resuming, then stepped."""
    params, formula = SCHEDULES[name]
    scales = (1.0, 0.5, 3.0)
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr_scale": scale} for scale in scales
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    written = {"optimizer": {"type": "AdamW", "params": {"lr": RATE}}}
    block = check_scheduler({**written, "scheduler": {"type": name, "params": params}})
    make = transformers_schedule(block)
    schedule: Any = (
        getattr(deepspeed_schedules, name)(optimizer, **params) if make is None else make(optimizer)
    )
    scale_rates(schedule, optimizer.param_groups)
    for start in (0, 3):
        set_schedule(schedule, start)
        for step in range(start + 1, 7):
            rates = [group["lr"] for group in optimizer.param_groups]
            assert rates == pytest.approx([formula(step) * scale for scale in scales], rel=1e-9)
            optimizer.step()
            schedule.step()
    json.dumps(schedule.state_dict())  # a checkpoint's manifest has it


REFUSED: list[tuple[str, list[Any], str]] = [
    ("gpt2", [{"pattern": "q_proj"}], r"0\.pattern: \"q_proj\" matches no parameter of the model"),
    ("gpt2", [{"pattern": "lm_head"}], r"0\.pattern: .* a tied output layer is the embedding"),
    ("gpt2", [{"kind": "output"}], r"0\.kind: \"output\" matches no parameter"),
    (
        "gpt2",
        [{"kind": "norm"}, {"pattern": r"\.ln_1\."}],
        r"1\.pattern: .* matches only parameters that an entry before it has; move it up",
    ),
    (
        "qwen2_moe",
        [{"kind": "norm"}, {"pattern": r"experts\.0\."}],
        r"1\.pattern: .* matches model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight but not "
        r"model\.layers\.0\.mlp\.experts\.1\.gate_proj\.weight, and both are parts of one",
    ),
    (
        "qwen2_moe",
        [{"pattern": "gate_proj"}],
        r"0\.pattern: .* but not .*up_proj\.weight, and both are parts of one parameter; write",
    ),
    ("gpt2", [{"pattern": "("}], r"0\.pattern: .*is no regular expression of Python: missing \)"),
    ("gpt2", [{"kind": "norms"}], r"0\.kind: \"norms\" is not one of .*did you mean \"norm\""),
    ("gpt2", [{"kind": "norm", "decay": 0}], r"0\.decay: unknown key"),
    ("gpt2", [{"weight_decay": 0}], r"0: .*by \"kind\" or by \"pattern\": give one of them"),
    ("gpt2", [{"kind": "norm", "pattern": "ln"}], r"0: .*: give one of them"),
    ("gpt2", [{"kind": "norm", "lr_scale": 0}], r"0\.lr_scale: 0: must be greater than 0"),
    ("gpt2", [{"kind": "norm", "weight_decay": -1}], r"0\.weight_decay: -1: must be"),
    ("gpt2", ["norm"], r"0: expected an object, got \"norm\""),
]


@pytest.mark.parametrize(("model_type", "entries", "message"), REFUSED)
def test_what_is_wrong_with_a_group_is_refused_by_name(
    tmp_path: Path, model_type: str, entries: list[Any], message: str
) -> None:
    path = write(tmp_path / "run.json", model_type, 1, 1, "none")
    with pytest.raises(ConfigError, match=rf"^zero_tp\.param_groups\.{message}"):
        RunConfig.load(path, [f"zero_tp.param_groups={json.dumps(entries)}"])


def test_a_script_s_entries_are_checked_as_a_file_s() -> None:
    with pytest.raises(ConfigError, match=r"^zero_tp\.param_groups\.1\.kind: \"norms\" is not"):
        parse_param_groups([{"kind": "norm"}, {"kind": "norms"}])
    entries = parse_param_groups([{"kind": "norm", "lr_scale": 2}])
    assert parse_param_groups(entries) == entries
