"""The contender of quickstart.py: Hugging Face's model in DeepSpeed ZeRO, data parallel only.

A rank of the deepspeed launcher. It trains on the same samples of the same run config, with the
same global batch, optimizer and clipping, and writes the seconds of each step as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from zero_tp.data.samples import PackedSamples
from zero_tp.run.config import RunConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    deepspeed.init_distributed("gloo", verbose=False)
    world = dist.get_world_size()
    rank = dist.get_rank()
    run = RunConfig.load(options.config, world_size=world)
    settings = run.engine_settings.written()
    micro = run.global_batch // world // run.accumulation
    settings["train_micro_batch_size_per_gpu"] = micro
    assert settings["train_batch_size"] == micro * run.accumulation * world
    torch.manual_seed(run.zero_tp.training.seed)
    model_config: Any = run.hf_config()
    model = AutoModelForCausalLM.from_config(model_config)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings
    )
    samples = PackedSamples(
        run.zero_tp.data.train, run.zero_tp.data.sequence_length, run.zero_tp.training.seed
    )
    seconds = []
    for step in range(options.steps):
        started = time.perf_counter()
        total = torch.zeros(())
        for batch in samples.batches_from(
            step * run.global_batch, micro, run.accumulation, rank, world
        ):
            tokens = batch.input_ids
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)  # the loss that the run logs
        total.item()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        options.output.write_text(
            json.dumps({"seconds": seconds, "loss": total.item() / world / run.accumulation})
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
