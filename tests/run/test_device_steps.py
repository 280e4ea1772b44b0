"""A step on an accelerator asks nothing of the host, and gives its process group what NCCL takes.

On a simulated accelerator (simulated_steps.py) mixing devices fails by itself; what makes the
device and the host wait for each other is looked for in every operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor

from tests.support.decoders import PLAIN_TYPES
from tests.support.simulated_steps import ENCODERS, Does, Watching, watched, watched_step
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.engine.bias_update import BiasUpdate
from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.guards import check_replicas
from zero_tp.model import transformer
from zero_tp.parallel import collectives
from zero_tp.parallel.host_copy import HostCopy
from zero_tp.parallel.safetensors_files import Entry
from zero_tp.run.checkpoint.save import _copy_to_host
from zero_tp.run.process.signals import Requests
from zero_tp.tools.planning import simulated_accelerator
from zero_tp.tools.planning.plan_settings import Workload
from zero_tp.tools.trainer.batches import SampleComparison, count_labels
from zero_tp.tools.trainer.trainer import TensorParallel

WORKLOAD = Workload(length=32, batch=2, tensor=2)
GRIDS: dict[str, dict[str, Any]] = {"TP 1": {"tensor": 1}, "TP 2": {}, "SP": {"sequence": True}}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "selective": {"mode": "selective", "modules": ["attention_core", "mlp_activation", "norm"]},
    "full": {"mode": "full"},
}
CASES = [
    (model_type, grid, recomputed, documents)
    for model_type in (*PLAIN_TYPES, *ENCODERS)
    for grid in GRIDS
    for recomputed in RECOMPUTED
    for documents in ((False,) if model_type in ENCODERS else (False, True))
]
FIRST = [
    ("megatron-bert", "SP", "selective", False),
    ("llama", "SP", "full", True),
    ("qwen3", "TP 1", "none", True),
]


@pytest.mark.parametrize(
    ("model_type", "grid", "recomputed", "documents"), in_tiers(CASES, FIRST, every=10)
)
def test_a_micro_batch_waits_for_nothing(
    model_type: str, grid: str, recomputed: str, documents: bool
) -> None:
    policy = RecomputePolicy(**RECOMPUTED[recomputed])
    seen = watched(model_type, replace(WORKLOAD, **GRIDS[grid], policy=policy, documents=documents))
    assert not seen.found, list(seen.found)
    assert seen.operations > 200 and (seen.collectives > 8) == (grid != "TP 1")


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
# Of 6 heads with 3 KV heads a rank has two of one and one of another.
UNEVEN = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
FULL = RecomputePolicy(mode="full")


OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"length": 80}, {"rope_parameters": DYNAMIC}),
    (GRIDS["SP"], UNEVEN),
    ({"policy": FULL, "checkpointing": ActivationCheckpointing(cpu_checkpointing=True)}, {}),
    ({"policy": FULL, "checkpointing": ActivationCheckpointing(partition_activations=True)}, {}),
    ({"length": 32}, {"rope_parameters": DYNAMIC}),
    (GRIDS["TP 2"], UNEVEN),
]


@pytest.mark.parametrize(("changes", "fields"), in_tiers(OTHERS, OTHERS[1:3]))
def test_dynamic_frequencies_uneven_heads_and_moved_checkpoints_wait_for_nothing(
    changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    seen = watched("llama", replace(WORKLOAD, **changes), **fields)
    assert not seen.found, list(seen.found)


WINDOWED = ("mistral", "phi3", "qwen2", "qwen3", "starcoder2")
PACKED = [(model_type, grid, True) for model_type in PLAIN_TYPES for grid in GRIDS]
PACKED += [(model_type, grid, False) for model_type in WINDOWED for grid in GRIDS]


@THOROUGH
@pytest.mark.parametrize(
    ("model_type", "grid", "documents"), in_tiers(PACKED, [("qwen3", "SP", True)], every=8)
)
def test_documents_and_windows_make_no_mask(model_type: str, grid: str, documents: bool) -> None:
    """Where `varlen_attn` runs; where it does not, the mask is seen."""
    fields: dict[str, Any] = {"attn_pdrop" if model_type == "gpt2" else "attention_dropout": 0.0}
    if model_type in WINDOWED:
        fields["sliding_window"] = 7
    if model_type in ("qwen2", "qwen3"):
        fields |= {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        }
    workload = replace(WORKLOAD, length=40, **GRIDS[grid], policy=FULL, documents=documents)
    seen = watched(model_type, workload, **fields)
    assert not seen.found, list(seen.found)
    # Two layers, once more in backward; of the Qwens without documents one is causal alone.
    assert (seen.squares, seen.packed) == (0, 4 if documents or "qwen" not in model_type else 2)
    masked = watched(model_type, replace(workload, varlen=False), **fields)
    assert masked.squares and not masked.packed and not masked.found


# Parts that no plain type has: caps, output and whole norms, learnt activations, other rotations.
PARTS = ("apertus", "cohere2", "exaone4", "gemma2", "gemma3_text", "nanochat", "olmo2")
STEPS = [(model_type, grid) for model_type in (*PLAIN_TYPES, *ENCODERS, *PARTS) for grid in GRIDS]


@pytest.mark.parametrize(
    ("model_type", "grid"), in_tiers(STEPS, [("llama", "SP"), ("bert", "TP 2")], every=8)
)
def test_our_part_of_a_step_waits_for_nothing(model_type: str, grid: str) -> None:
    """Counting labels, sums over micro-batches, the loss over DP, figures, the norm: none is
    read.
    """
    seen = watched_step(model_type, replace(WORKLOAD, **GRIDS[grid]))
    assert not seen.found, list(seen.found)
    assert seen.collectives >= 3, "labels and loss over DP, signals"


ROTATION, ALL_REDUCE = (transformer, "compute_rotation"), (collectives, "start_all_reduce")
MISTAKES: list[tuple[tuple[Any, str], Callable[..., object], str]] = [
    (ROTATION, lambda _, positions, *__: bool(positions[0, 0] >= 0), "reads a value"),
    (ROTATION, lambda _, positions, *__: positions.cpu(), "between host and device"),
    (
        ROTATION,
        lambda _, positions, *__: positions + torch.ones(positions.shape[1]),
        "between host and device",
    ),
    (
        ROTATION,
        lambda _, positions, *__: positions.float().cumsum(1),
        "cumsum adds in no fixed order",
    ),
    (ROTATION, lambda _, positions, *__: positions[positions >= 0], "waits for a shape"),
    (
        ALL_REDUCE,
        lambda tensor, group: dist.all_reduce(tensor.new_empty(4, 3).t(), group=group),
        "not contiguous",
    ),
    (
        ALL_REDUCE,
        lambda _, group: dist.all_reduce(torch.empty(4), group=group),
        "of a tensor on the host",
    ),
    (
        ALL_REDUCE,
        lambda tensor, group: dist.all_gather_single(
            tensor.new_empty(8).float(), tensor.new_empty(4), group=group
        ),
        "of two dtypes",
    ),
]


@pytest.mark.parametrize(("place", "mistake", "words"), in_tiers(MISTAKES, MISTAKES[::2]))
def test_what_waits_is_seen(
    place: tuple[Any, str], mistake: Callable[..., object], words: str
) -> None:
    """A mistake in the model's code."""
    original = getattr(*place)

    def with_mistake(*arguments: Any, **options: Any) -> Any:
        mistake(*arguments)
        return original(*arguments, **options)

    with mock.patch.object(*place, with_mistake):
        found = found_by(lambda: watched("llama", WORKLOAD))
    assert any(words in one for one in found), found


def found_by(watch: Callable[[], Watching]) -> list[str]:
    """What was found, also where fake tensors don't go on from there."""
    try:
        return list(watch().found)
    except fake_tensor.DataDependentOutputException as error:
        return [f"{error}: reads a value"]
    except fake_tensor.DynamicOutputShapeException as error:
        return [f"{error}: waits for a shape"]
    except fake_tensor.FakeTensorDeviceMismatchError as error:
        return [f"{error}: between host and device"]


class ForwardOnly:
    """This has the place of transformers' Trainer: its loss is the model's, and the calls of it
    are noted.
    """

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def compute_loss(self, model: Any, inputs: dict[str, Any], **_: Any) -> Tensor:
        self.events.append("forward")
        loss: Tensor = model(**inputs).loss
        return loss


class StubTrainer(TensorParallel, ForwardOnly):  # type: ignore[misc]
    """A Trainer on TP ranks that has a model and a topology, and notes when the host waits for a
    comparison.
    """

    def __init__(self, engine: TrainingEngine, events: list[str]) -> None:
        ForwardOnly.__init__(self, events)
        self.model, self.topology, self._labelled_rows = engine.model, engine.topology, None
        self.args = SimpleNamespace(device=engine.device)
        self._bias_update = BiasUpdate(engine.model, engine.topology, 0.0)
        self._z_losses = engine.model.z_losses

    def run_micro_batches(self, count: int) -> None:
        """Compute losses. The comparison's result has no value on fake tensors: the ranks have
        the same samples.
        """
        tokens = torch.zeros(2, 8, dtype=torch.long, device=self.args.device)

        def read(result: HostCopy) -> bool:
            result.wait()
            return False

        with mock.patch.object(HostCopy, "read", read):
            for _ in range(count):
                self.compute_loss(self.model, {"input_ids": tokens, "labels": tokens})


def samples_compared(engine: TrainingEngine) -> object:
    """Start to compare two micro-batches, and count the labels of a Trainer's step."""
    tokens = torch.zeros(2, 8, dtype=torch.long, device=engine.device)
    for _ in range(2):
        SampleComparison({"input_ids": tokens}, engine.topology)
    return count_labels(
        [{"labels": tokens}] * 2,
        engine.topology,
        engine.device,
        shifted=True,
        over_data_parallel=True,
    )


@THOROUGH
def test_comparing_and_counting_samples_starts_without_a_wait() -> None:
    seen, alone = watched_step("llama", WORKLOAD, samples_compared), watched_step("llama", WORKLOAD)
    assert not seen.found, list(seen.found)
    assert seen.collectives == alone.collectives + 3


@THOROUGH
@pytest.mark.parametrize("tensor", in_tiers([1, 2], [2]))
def test_a_trainer_waits_once_a_micro_batch_after_its_forward(tensor: int) -> None:
    """On one TP rank it compares nothing."""
    events: list[str] = []

    def losses(engine: TrainingEngine) -> object:
        trainer = StubTrainer(engine, events)
        with mock.patch.object(
            simulated_accelerator._Stream, "synchronize", lambda _: events.append("wait")
        ):
            trainer.run_micro_batches(2)
        return None

    seen = watched_step("llama", replace(WORKLOAD, tensor=tensor), losses)
    assert events == (["forward", "wait"] if tensor == 2 else ["forward"]) * 2
    assert not seen.found, list(seen.found)


def copied_for_a_save(engine: TrainingEngine) -> object:
    weight = next(engine.model.parameters())
    copied = _copy_to_host(Entry("weight", tuple(weight.shape), weight.dtype, lambda: weight))
    # The writing thread's.
    with mock.patch.object(simulated_accelerator._Stream, "synchronize", lambda _: None):
        assert copied.read().device.type == "cpu"
    return None


def replicas_compared(engine: TrainingEngine) -> object:
    """Compare replicas whose ZeRO-3 partitions are in host memory, as under `offload_param`."""
    for one in engine.model.parameters():
        parameter: Any = one
        parameter.ds_tensor = torch.zeros(parameter.shape)
        parameter.ds_numel = parameter.ds_tensor.ds_numel = parameter.numel()
    return check_replicas(engine.model, engine.topology)


@pytest.mark.parametrize(
    ("does", "found"),
    [
        (copied_for_a_save, []),
        (replicas_compared, ["_to_copy between host and device, for which both wait"]),
    ],
)
def test_a_background_save_copies_and_replicas_are_compared_on_the_device(
    does: Does, found: list[str]
) -> None:
    assert list(watched_step("llama", WORKLOAD, does).found) == found


def asked_at_once(engine: TrainingEngine) -> object:
    return Requests(late=False).all_reduce(engine.device)


def blocking_sum(engine: TrainingEngine) -> object:
    return torch.zeros(()).to(engine.device)


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (lambda engine: engine.loss, "reads a value"),
        pytest.param(lambda engine: engine.gradient_norm, "reads a value", marks=THOROUGH),
        pytest.param(asked_at_once, "reads a value", marks=THOROUGH),
        (blocking_sum, "between host and device"),
    ],
)
def test_what_waits_after_a_step_is_seen(does: Does, words: str) -> None:
    found = found_by(lambda: watched_step("llama", WORKLOAD, does))
    assert any(words in one for one in found), found
