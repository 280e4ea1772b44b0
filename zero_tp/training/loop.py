"""A run from its config to its last checkpoint."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.checkpoint.directory import checkpoints_of
from zero_tp.checkpoint.state import check_resumable, resume, save
from zero_tp.config import RunConfig
from zero_tp.data.samples import PackedSamples, ValidationSamples
from zero_tp.data.tokenizer import special_tokens, tokenizer_beside
from zero_tp.errors import UserError
from zero_tp.planning.hardware import peak_flops
from zero_tp.topology import Topology
from zero_tp.training.engine import NonFiniteGradients, TrainingEngine, check_replicas
from zero_tp.training.metrics import StepMeter, model_flops
from zero_tp.training.quiet import hushed
from zero_tp.training.report import Reporter

SKIPS_IN_A_ROW = 10
CONFIG_FILE = "config.json"


def frozen_config(run: Path) -> dict[str, Any] | None:
    """The resolved config that the run in this directory was first started with; None for a new run.

    Raises:
        UserError: the file is not JSON.
    """
    path = run / CONFIG_FILE
    if not path.exists():
        return None
    try:
        resolved: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error}); give another --output-dir") from error
    return resolved


class Run:
    """What a run needs before any rank is connected; every mistake that can be found early is found here.

    Raises:
        UserError: data, tokenizer and model do not fit, or the directory holds another run.
    """

    def __init__(self, config: RunConfig, directory: Path):
        block = config.zero_tp
        self.config, self.directory = config, directory
        self.samples = PackedSamples(block.data.train, block.data.sequence_length, block.training.seed)
        self.validation = (
            ValidationSamples(block.data.validation, block.data.sequence_length) if block.data.validation else None
        )
        self.tokenizer = tokenizer_beside(block.tokenizer, next(iter(block.data.train)))
        self.model_config = self._model_config()

    def _model_config(self) -> PretrainedConfig:
        """The Hugging Face config, its special tokens those of the tokenizer unless the file gives them."""
        hf_config: PretrainedConfig = self.config.hf_config()
        if self.tokenizer is None:
            return hf_config
        size, tokens = special_tokens(self.tokenizer)
        if size > hf_config.vocab_size:
            raise UserError(
                f"zero_tp.model.vocab_size: {hf_config.vocab_size}, but the tokenizer {self.tokenizer} has {size} tokens; "
                f"set it to {size} or more"
            )
        for name, token in tokens.items():
            if name not in self.config.zero_tp.model:
                setattr(hf_config, name, token)
        return hf_config


def connect(config: RunConfig, local_rank: int, verbose: bool) -> tuple[Topology, torch.device]:
    """Join the process group and make the topology's. Collective."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if config.dtype == "fp16" and not accelerator.is_fp16_supported():
        raise UserError(f"fp16.enabled: this {accelerator.device_name()} cannot compute in fp16; use bf16 or fp32")
    device = torch.device(accelerator.device_name(local_rank if accelerator.device_name() != "cpu" else None))
    if device.type != "cpu":
        accelerator.set_device(local_rank)
    timeout = timedelta(minutes=config.zero_tp.training.timeout_minutes)
    with hushed(verbose):
        deepspeed.init_distributed(accelerator.communication_backend_name(), timeout=timeout, verbose=verbose)
    parallel = config.zero_tp.parallel
    return Topology(parallel.tensor, parallel.sequence, timeout=timeout), device


def train(run: Run, *, local_rank: int, verbose: bool) -> None:
    """Train, validate and save until the run's steps are done, from where the run directory left off. Collective.

    Raises:
        UserError: a setting does not work here, or a checkpoint cannot be resumed.
        NonFiniteGradients: `on_nonfinite` says stop, or 10 steps in a row were skipped.
    """
    config, directory = run.config, run.directory
    step = check_resumable(directory, config, Topology(config.zero_tp.parallel.tensor, config.zero_tp.parallel.sequence, world=config.world_size))
    topology, device = connect(config, local_rank, verbose)
    first = topology.rank == 0
    settings = config.zero_tp
    if first:
        checkpoints_of(directory).mkdir(parents=True, exist_ok=True)
        _write_config(directory, config)
    with hushed(verbose):
        engine = TrainingEngine(
            run.model_config, topology, config.deepspeed_config(), seed=settings.training.seed, device=device
        )
        if step is not None:
            resume(engine, directory, step)
    reporter = Reporter(directory, first, settings.training.steps, settings.logging.interval)
    loop = _Loop(run, engine, reporter, device)
    loop.announce(step)
    loop.train(step or 0)


def _write_config(directory: Path, config: RunConfig) -> None:
    path = directory / CONFIG_FILE
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(config.resolved(), indent=2) + "\n")
    os.replace(temporary, path)


class _Loop:
    def __init__(self, run: Run, engine: TrainingEngine, reporter: Reporter, device: torch.device):
        self.run, self.engine, self.reporter, self.device = run, engine, reporter, device
        self.config, self.settings = run.config, run.config.zero_tp
        self.topology = engine.topology
        spec = engine.model.spec
        self.flops = model_flops(
            self.config.global_batch, self.settings.data.sequence_length, spec.layers, spec.hidden, spec.vocabulary
        )
        self.peak = peak_flops(self.config.dtype, device)
        self.skipped = 0

    def announce(self, resumed: int | None) -> None:
        parameters = sum(torch.Size(p.whole_shape).numel() for p in self.engine.model.parameters())  # type: ignore[attr-defined]
        say = self.reporter.say
        say(
            f"{self.run.model_config.model_type}, {parameters:,} parameters, {self.config.dtype}, "
            f"{self.topology.describe()}, ZeRO-{self.config.zero_stage}; global batch {self.config.global_batch} × "
            f"{self.settings.data.sequence_length} tokens"
        )
        if resumed is not None:
            say(f"resuming {self.run.directory} after step {resumed}")

    def _pair(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        windows = windows.to(self.device, non_blocking=True)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def train(self, done: int) -> None:
        steps, every = self.settings.training.steps, self.settings.checkpoint.interval
        if done >= steps:
            self.reporter.say(f"all {steps} steps are done; raise zero_tp.training.steps to train on")
            self.reporter.close()
            return
        self.reporter.start(done)
        meter = StepMeter(self.topology.world)
        for step in range(done + 1, steps + 1):
            self._step(step, meter)
            last = step == steps
            if step % self.settings.training.guard_interval == 0:
                check_replicas(self.engine.model, self.topology)
            if self.run.validation and (last or self._due(step, self.settings.evaluation.interval)):
                self._validate(step)
            if last or self._due(step, every):
                self._save(step)
        self.reporter.close()

    @staticmethod
    def _due(step: int, interval: int | None) -> bool:
        return interval is not None and step % interval == 0

    def _step(self, step: int, meter: StepMeter) -> None:
        started = time.perf_counter()
        windows = self.run.samples.rank_batches(
            step - 1,
            self.config.global_batch,
            self.config.micro_batch,
            self.config.accumulation,
            self.topology.data_rank,
            self.topology.data,
        )
        rate = self.engine.learning_rate
        loss = self.engine.train_step([self._pair(window) for window in windows])
        raise NotImplementedError
