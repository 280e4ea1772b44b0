"""Advice: settings that are free to change, at the run's global batch and world size, the fastest that fit first."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_tp.config import RunConfig
from zero_tp.constants import GIB
from zero_tp.devices import Device
from zero_tp.errors import ConfigError, UserError
from zero_tp.planning.memory import Point, TrueView, of_each_layer
from zero_tp.planning.plan import Model, check_device, host_needed, needed
from zero_tp.planning.timing import StepTime, Timing
from zero_tp.planning.views import base_setting, model_of
from zero_tp.planning.walk import Setting
from zero_tp.planning.zero import ZeroMemory, ZeroSettings

MODULES: dict[str, tuple[str, ...]] = {"none": (), "selective": ("attention_core",), "full": ("layer",)}


@dataclass(frozen=True)
class Choice:
    """The settings of one candidate."""

    tensor: int
    sequence: bool
    stage: int
    recompute: str
    micro: int
    accumulation: int
    offload_optimizer: bool
    offload_param: bool

    def describe(self) -> str:
        """`TP 2, SP, ZeRO-1, recompute none, micro 4 × 16`."""
        parts = [f"TP {self.tensor}"]
        parts += ["SP"] if self.sequence else []
        parts += [f"ZeRO-{self.stage}", f"recompute {self.recompute}", f"micro {self.micro} × {self.accumulation}"]
        away = ["optimizer"] * self.offload_optimizer + ["parameters"] * self.offload_param
        parts += [f"offload {' and '.join(away)}"] if away else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Candidate:
    """A choice with what it needs.

    Attributes:
        peak: the moment at which the device holds the most.
        needed: bytes of the device's memory, margins included. host: of a node's host memory.
        short: bytes that the device or a device's share of the host lacks, the greater; 0 or less where all fits.
        time: of a step.
    """

    choice: Choice
    peak: Point
    needed: float
    host: float
    short: float
    time: StepTime


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        tried: how many candidates there were.
        fitting: those that fit, the fastest first.
        smallest: the one that is short of the least memory.
    """

    tried: int
    fitting: tuple[Candidate, ...]
    smallest: Candidate


def search(config: RunConfig, device: Device) -> Found:
    """
    Raises:
        UserError: the device can't compute in the run's dtype; no setting splits this world size.
    """
    check_device(device, config)
    zero = config.deepspeed_config()
    fitting: list[Candidate] = []
    smallest: Candidate | None = None
    tried = 0
    for choice, model in _choices(config, cpu=device.is_cpu):
        candidate = _evaluate(config, device, zero, choice, model)
        tried += 1
        if candidate.short <= 0:
            fitting.append(candidate)
        if smallest is None or candidate.short < smallest.short:
            smallest = candidate
    if smallest is None:
        raise UserError(
            f"--search: no tensor size splits {config.world_size} ranks, the model and a global batch of "
            f"{config.global_batch}; change one of them"
        )
    fitting.sort(key=lambda one: (one.time.total, one.needed))
    return Found(tried, tuple(fitting), smallest)


def refuse_if_nothing_fits(found: Found, config: RunConfig, device: Device) -> None:
    """
    Raises:
        UserError: no candidate fits; says what is short and by how much.
    """
    if found.fitting:
        return
    least = found.smallest
    parts = sorted(least.peak.bytes.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    raise UserError(
        f"{config.path}: does not fit {config.world_size} × {device.name} in any of {found.tried} ways: "
        f"{least.choice.describe()} comes nearest with {least.needed / GIB:.1f} of {device.memory_gib:.4g} GiB a "
        f"device ({listed}) and {least.host / GIB:.0f} of {device.host_memory_gib:.4g} GiB of a node's host memory, "
        f"short by {least.short / GIB:.1f} GiB a device; use more or larger devices"
    )


def _choices(config: RunConfig, *, cpu: bool) -> Iterator[tuple[Choice, Model]]:
    world, total = config.world_size, config.global_batch
    assert world is not None
    length, hf_config = config.zero_tp.data.sequence_length, config.hf_config()
    for tensor in _divisors(world):
        data = world // tensor
        if total % data:
            continue
        for sequence in (False, True):
            if sequence and (tensor == 1 or length % tensor):
                continue
            try:
                model = model_of(hf_config, tensor, sequence)
            except UserError:  # heads or MLP do not divide
                break
            # A fused attention keeps nothing that selective recomputation would save.
            fused = not (model[0].eager or (cpu and model[0].attention_dropout))
            modes = [mode for mode in MODULES if not (fused and mode == "selective")]
            for micro in _divisors(total // data):
                for stage in range(4):
                    for recompute in modes:
                        offloads = [(False, False)] + [(True, False)] * (stage > 0) + [(True, True)] * (stage == 3)
                        for optimizer, parameters in offloads:
                            accumulation = total // data // micro
                            yield (
                                Choice(tensor, sequence, stage, recompute, micro, accumulation, optimizer, parameters),
                                model,
                            )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _evaluate(
    config: RunConfig, device: Device, deepspeed: Mapping[str, Any], choice: Choice, model: Model
) -> Candidate:
    shape, parameters, _ = model
    base: Setting = base_setting(config, cpu=device.is_cpu)
    setting = replace(
        base, b=choice.micro, t=choice.tensor, sequence=choice.sequence, modules=MODULES[choice.recompute]
    )
    assert config.world_size is not None
    given = ZeroSettings.of(deepspeed, config.world_size // choice.tensor, cpu=device.is_cpu)
    zero = replace(
        given,
        stage=choice.stage,
        accumulation=choice.accumulation,
        offload_optimizer=choice.offload_optimizer,
        offload_param=choice.offload_param,
        overlap=choice.stage == 3 if given.stage == 3 or choice.stage == 3 else given.overlap,
    )
    settings = of_each_layer(shape.windows, setting)
    view = TrueView(shape, settings, ZeroMemory(parameters, zero))
    peak = view.peak
    own, host = needed(view, device), host_needed(view, device, config.world_size)
    lacking = (host - device.host_memory_gib * GIB) / device.per_node
    short = max(own - device.memory_gib * GIB, lacking)
    time = Timing(shape, settings, zero, parameters.total, device, config.dtype).estimate()
    return Candidate(choice, peak, own, host, short, time)


# ---- back to a config ------------------------------------------------------------------------------------------------


def changed(raw: Mapping[str, Any], choice: Choice, global_batch: int) -> dict[str, Any]:
    """The run's file with a choice's settings.

    Args:
        raw: the object of the file, overrides applied.
    """
    config = copy.deepcopy(dict(raw))
    config["train_batch_size"] = global_batch
    config["train_micro_batch_size_per_gpu"] = choice.micro
    config["gradient_accumulation_steps"] = choice.accumulation
    zero = dict(config.get("zero_optimization", {}))
    if choice.stage != 3:
        zero = {key: value for key, value in zero.items() if not key.startswith("stage3_")}
    if int(zero.get("stage", 0)) != choice.stage:
        zero.pop("overlap_comm", None)
    for key, wanted in (("offload_optimizer", choice.offload_optimizer), ("offload_param", choice.offload_param)):
        if not wanted:
            zero.pop(key, None)
        elif (zero.get(key) or {}).get("device", "none") == "none":
            zero[key] = {"device": "cpu", "pin_memory": True}
    config["zero_optimization"] = {**zero, "stage": choice.stage}
    if choice.recompute != "full":
        config.pop("activation_checkpointing", None)
    block = dict(config["zero_tp"])
    block["parallel"] = {"tensor": choice.tensor, "sequence": choice.sequence}
    block["recompute"] = choice.recompute
    config["zero_tp"] = block
    return config


def accepted(config: Mapping[str, Any], world: int) -> ConfigError | None:
    """What a run of this config would be refused for, or None."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "candidate.json")
        path.write_text(json.dumps(config))
        try:
            RunConfig.load(path, (), world)
        except ConfigError as error:
            return error
    return None


def write(config: Mapping[str, Any], path: Path) -> None:
    """
    Raises:
        UserError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--write {path}: can't be written ({error.strerror}); give another path") from None
