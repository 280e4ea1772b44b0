"""Arguments, configs and checkpoints of ZeroTPTrainer without ranks, and a script on one rank."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from transformers import GPT2LMHeadModel, TrainingArguments
from transformers.trainer_utils import SchedulerType

from tests.support.encoders import encoder
from tests.support.launched import free_port, run
from tests.support.native import parallel_model
from tests.support.plain_trainer import BATCH, PlainTrainer, plugin_of
from tests.support.settings import gpt2_config
from tests.support.tiny_models import bert_fields, speeches, tiny_gpt2
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint.find import RunCheckpoint
from zero_tp.tools.trainer import TensorParallel, ZeroTPTrainer, checkpoints
from zero_tp.tools.trainer.arguments import REFUSED, check_arguments, check_batch
from zero_tp.tools.trainer.tensor_parallel_accelerator import (
    SteppedEngine,
    TensorParallelAccelerator,
    _sharded_optimizer,
    finalized_settings,
)

SCRIPT = """
import sys

import deepspeed
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from transformers import AutoModelForCausalLM, TrainingArguments

from zero_tp import ZeroTPTrainer

ShareMemCommBuilder.load = lambda self, **options: sys.exit("DeepSpeed's shared-memory collectives are built")
deepspeed.ops._probe_compatible_ops = lambda: sys.exit("every op is looked at")
config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
config |= {"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}
args = TrainingArguments("out", deepspeed=config, use_cpu=True, max_steps=1, report_to=[], save_strategy="no")
row = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}
trainer = ZeroTPTrainer(AutoModelForCausalLM.from_pretrained("model"), args, train_dataset=[row] * 8)
trainer.train()
print("trained", trainer.state.global_step)
"""  # noqa: E501


def test_a_script_without_a_launcher_is_one_line() -> None:
    with pytest.raises(
        UserError,
        match=r"^ZeroTPTrainer: no ranks are connected; start the script with deepspeed or",
    ):
        TensorParallelAccelerator(Topology(world=1), 1.0, lambda engine: None)


def test_a_models_own_topology_stays_and_frozen_parameters_are_refused() -> None:
    """Splitting a model would train them."""
    config, args = gpt2_config(n_layer=1), cast(Any, SimpleNamespace())
    with pytest.raises(UserError, match="tensor_parallel is 2, but the model has TP 1"):
        ZeroTPTrainer(ZeroTPForCausalLM(config, Topology(world=1), seed=0), args, tensor_parallel=2)
    model = GPT2LMHeadModel(config)
    model.transformer.wpe.requires_grad_(False)
    with pytest.raises(UserError, match=r"^ZeroTPTrainer: transformer\.wpe\.weight is frozen"):
        ZeroTPTrainer(model, args)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("compute_loss_func", "^compute_loss_func: it needs whole logits"),
        ("optimizer", "^optimizers: Trainer replaces them under DeepSpeed"),
        ("lr_scheduler", "^optimizers: Trainer replaces them under DeepSpeed"),
    ],
)
def test_arguments_that_trainer_would_replace_are_refused(name: str, message: str) -> None:
    trainer: Any = type("Mine", (TensorParallel, PlainTrainer), {})
    model = ZeroTPForCausalLM(gpt2_config(n_layer=1), Topology(world=1), seed=0)
    with pytest.raises(UserError, match=message):
        args = SimpleNamespace(device="cpu", world_size=1, label_names=None, deepspeed=None)
        trainer(model, args, **{name: object()})


def test_training_arguments_that_are_not_exact_are_refused() -> None:
    for name in REFUSED:
        assert name in TrainingArguments.__dataclass_fields__, name
        with pytest.raises(UserError, match=rf"^TrainingArguments\.{name}: .*; leave it out$"):
            check_arguments(cast(Any, SimpleNamespace(**{name: True})))


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_a_checkpoint_cannot_hold_is_refused(schedule: str) -> None:
    args: Any = SimpleNamespace(
        lr_scheduler_type=SchedulerType(schedule), save_strategy="no", device=0, world_size=1
    )
    check_arguments(args)
    args.save_strategy = "steps"
    with pytest.raises(
        UserError, match=r"^TrainingArguments\.lr_scheduler_type: .*; use another, or save_strategy"
    ):
        check_arguments(args)


def test_a_schedule_of_torch_is_restored_and_one_of_deepspeed_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "Resume", mock.Mock())
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    zero: Any = SimpleNamespace(
        states=lambda: SimpleNamespace(optimizer=optimizer),
        scheduler=None,
        optimizer=optimizer,
        average=None,
    )
    saved, after = (torch.optim.lr_scheduler.StepLR(optimizer, 3) for _ in range(2))
    saved.last_epoch = 7
    for schedule in (saved.state_dict(), {"last_batch_iteration": 7}):
        progress = SimpleNamespace(schedule=schedule, learning_rates=[0.5])
        manifest: Any = SimpleNamespace(kinds=["master"], progress=progress, ema=None, step=2)
        checkpoint = RunCheckpoint(Path("checkpoint-2"), manifest)
        monkeypatch.setattr(checkpoints, "find_on_all_ranks", lambda _, found=checkpoint: found)
        refused = pytest.raises(
            UserError, match="its learning rate came from a scheduler of DeepSpeed's config"
        )
        with refused if schedule.keys() == {"last_batch_iteration"} else contextlib.nullcontext():
            checkpoints.resume_states(zero, after, Path("checkpoint-2"), 1)
        assert after.last_epoch == 7 and optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("degree", [0, 2])
def test_a_degree_that_does_not_divide_the_ranks_is_refused(degree: int) -> None:
    """As when a script is started by python, or by accelerate on a CPU, which starts one rank
    whatever it is given.
    """
    args: Any = SimpleNamespace(device="cpu", world_size=1)
    with pytest.raises(
        UserError,
        match=rf"^ZeroTPTrainer: tensor_parallel is {degree}, but the number of ranks, 1, is no",
    ):
        ZeroTPTrainer(GPT2LMHeadModel(gpt2_config(n_layer=1)), args, tensor_parallel=degree)


@pytest.mark.parametrize("total", [None, "auto", 16])
def test_a_global_batch_that_counts_tensor_parallel_ranks_is_refused(
    total: int | str | None,
) -> None:
    """transformers would accept 16, and each step would train on 8 rows."""
    args: Any = SimpleNamespace(deepspeed={"train_batch_size": total})
    check_batch(args, Topology(1, world=4))
    refused = pytest.raises(
        UserError, match=r"^train_batch_size: 16 in DeepSpeed's config: .*; use \"auto\"$"
    )
    with refused if total == 16 else contextlib.nullcontext():
        check_batch(args, Topology(2, world=4))


# One of each kind; tests/run/config/test_config_refusals.py has all refusals of a Trainer's config.
REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
        r"optimizer\.type: refused as \"Muon\" in ZeroTPTrainer",
    ),
    ({"tensor_parallel": {"autotp_size": 2}}, r"tensor_parallel: refused: DeepSpeed's AutoTP"),
    ({"gradient_allreduce_op": "sum"}, r"gradient_allreduce_op: refused unless it is \"mean\""),
    ({"prescale_gradients": True}, r"prescale_gradients: refused with ZeRO"),
    (
        {"zero_optimization": {"stage": 2, "zenflow": {}}},
        r"zero_optimization\.zenflow: refused: it steps on",
    ),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/no/directory"},
            }
        },
        r"zero_optimization\.offload_param\.nvme_path: /no/directory is not a directory on this "
        "machine",
    ),
    (
        {"gradient_acumulation_steps": 2},
        r"gradient_acumulation_steps: unknown key; did you mean .gradient_acc",
    ),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED_CONFIGS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_trainers_deepspeed_config_is_refused_as_a_runs_is(
    keys: dict[str, Any], message: str, tensor: int
) -> None:
    topology = Topology(tensor, world=tensor)
    with pytest.raises(UserError, match=message):
        finalized_settings(plugin_of(BATCH | keys), topology, 1.0)
    assert finalized_settings(plugin_of(BATCH), topology, 1.0).train_batch_size == 1


def test_a_trainer_may_clip_nothing() -> None:
    # "auto", with TrainingArguments(max_grad_norm=None).
    filled = plugin_of(BATCH | {"gradient_clipping": None})
    assert finalized_settings(filled, Topology(world=1), None).gradient_clipping == 0


def test_a_second_training_is_refused() -> None:
    """accelerate destroys the engine of the first, and prepares no other."""
    trainer = object.__new__(TensorParallel)
    trainer.zero = cast(Any, "an engine")
    with pytest.raises(UserError, match=r"^ZeroTPTrainer\.train: it has trained already"):
        trainer._prepare_for_training(4, None, None)


def test_accelerate_destroys_the_engine_before_a_second_training() -> None:
    """Trainer's loop begins with `free_memory`, and a search of hyperparameters ends with it."""
    accelerator = object.__new__(TensorParallelAccelerator)
    engine = mock.Mock()
    zero = cast(Any, SimpleNamespace(deepspeed_engine=engine))
    accelerator.deepspeed_engine_wrapped = SteppedEngine(zero)
    assert accelerator.free_memory() == []
    engine.destroy.assert_called_once_with()


@pytest.mark.parametrize(
    ("optimizer", "foreign"), [(torch.optim.AdamW, "momentum_buffer"), (torch.optim.SGD, "exp_avg")]
)
def test_a_checkpoint_of_another_optimizer_is_refused(
    optimizer: Any, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero: Any = SimpleNamespace(
        states=lambda: SimpleNamespace(optimizer=optimizer([torch.zeros(1)], lr=1.0)), average=None
    )
    monkeypatch.setattr(checkpoints, "Resume", mock.Mock(side_effect=UserError("passed")))
    for kind, message in (
        (foreign, f"has {foreign} of each parameter, which {optimizer.__name__}"),
        ("", "passed"),
    ):
        manifest: Any = SimpleNamespace(kinds=["master", kind], ema=None, step=2)
        checkpoint = RunCheckpoint(Path("checkpoint-2"), manifest)
        monkeypatch.setattr(checkpoints, "find_on_all_ranks", lambda _, found=checkpoint: found)
        with pytest.raises(UserError, match=message):
            checkpoints.resume_states(zero, None, Path("checkpoint-2"), 1)


def test_an_optimizer_of_the_same_name_in_another_library_is_refused() -> None:
    """bitsandbytes has an AdamW too, whose states are in blocks of a whole tensor."""
    weight = torch.nn.Parameter(torch.zeros(2))
    other = type("AdamW", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adamw"})(
        [weight], lr=0.1
    )
    with pytest.raises(
        UserError, match=r"^optimizer AdamW of bitsandbytes is refused: its update of a tensor may"
    ):
        _sharded_optimizer(other, DeepSpeedSettings())
    optimizer = torch.optim.AdamW([weight])
    assert _sharded_optimizer(optimizer, DeepSpeedSettings()) is optimizer


def test_a_trainer_warns_of_keys_without_effect() -> None:
    plugin = plugin_of(BATCH | {"fp16": {"enabled": False, "loss_scale": 8.0}})
    with pytest.warns(
        UserWarning, match=r"^DeepSpeed's config: fp16\.loss_scale: fp16\.enabled is not true"
    ):
        finalized_settings(plugin, Topology(world=1), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Trainer's own SGD needs it
        finalized_settings(
            plugin_of(BATCH | {"zero_allow_untested_optimizer": True}), Topology(world=1), 1.0
        )


def test_a_trainer_reports_locks_of_builds() -> None:
    from torch.utils.file_baton import FileBaton

    assert FileBaton.wait.__module__ == "zero_tp.engine.zero.build_lock"


@THOROUGH
def test_a_trainer_that_counts_other_ranks_is_one_line(tmp_path: Path) -> None:
    """accelerate does on a CPU without `use_cpu`."""
    tiny_gpt2(tmp_path / "model", speeches(2, 2000))
    script = SCRIPT.replace("use_cpu=True, ", "").replace('"stage": 3', '"stage": 1')
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--standalone",
    ]
    (tmp_path / "script.py").write_text(script)
    done = run([*command, "script.py"], tmp_path, limit=300)
    assert done.returncode and "trained" not in done.stdout
    assert "UserError: TrainingArguments: accelerate counts 1 of 2 ranks" in done.stderr, (
        done.stderr
    )


@THOROUGH
def test_a_script_compiles_no_collectives(tmp_path: Path) -> None:
    """DeepSpeed would, wherever it first connects: for a model that transformers opens under
    ZeRO-3, or an engine.
    """
    tiny_gpt2(tmp_path / "model", speeches(2, 2000))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables = rank | {"MASTER_PORT": str(free_port())}
    done = run([sys.executable, "-c", SCRIPT], tmp_path, limit=300, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "trained 1"


def test_rows_without_the_label_of_a_sentence_head_are_refused() -> None:
    """transformers' class returns no loss, and plain Trainer ends with a traceback."""
    trainer = object.__new__(TensorParallel)
    fields = bert_fields(model_type="bert", num_hidden_layers=1, vocab_size=40)
    trainer.model = parallel_model(encoder(fields, 0), Topology(world=1)).train()
    trainer.topology, trainer.args = (
        Topology(world=1),
        cast(Any, SimpleNamespace(device=torch.device("cpu"))),
    )
    tokens = torch.arange(8).view(2, 4)
    with pytest.raises(
        UserError, match=r"^next_sentence_label: the rows have none, .*BertForMaskedLM$"
    ):
        trainer.compute_loss(trainer.model, {"input_ids": tokens, "labels": tokens})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors", "trainer_state.json"], True),
        (["model-00001-of-00002.safetensors", "rng_state_0.pth"], True),
        (["model.safetensors", "optimizer.pt", "scheduler.pt"], False),
        (["model.safetensors", "global_step4"], False),
        (["model.safetensors", "checkpoints"], False),
        (["trainer_state.json"], False),
    ],
)
def test_a_checkpoint_with_weights_alone_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], expected: bool
) -> None:
    """Optimizer states of plain Trainer or DeepSpeed would be lost without a word."""
    monkeypatch.setattr(checkpoints, "on_rank_zero", lambda find: find())
    for name in names:
        (tmp_path / name).touch()
    assert checkpoints.has_only_weights(tmp_path) is expected
