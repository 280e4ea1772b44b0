#!/usr/bin/env python3
"""Training throughput and memory beside what people would use instead, on the same weights, tokens, dtype and cores.

Each contender is a launch of its own, in turns, several rounds: one process with two threads, or two ranks with one.
All of them start from the same Hugging Face directory, see the same random tokens, keep freed memory and update fp32
values with torch's fused AdamW; their losses are compared, so that it is the same work. Prints a table and the ratios;
--output writes a dated result and draws it.

    python benchmarks/train.py --shape wide --dtype bf16 --rounds 3 --output benchmarks/results/

`ztp-…` is this project by the path of launch/pretrain.py: a checked config, `connect_deepspeed`, `TrainingEngine`.
`hf-1p` is Hugging Face's model in one process, `ds-z2` that model in DeepSpeed's ZeRO-2, `autotp` in its AutoTP.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dated import ROOT, write_result  # type: ignore[import-not-found]  # beside this script

BATCH, WARM_UP, STEPS = 4, 2, 6
RATE, CLIP = 1e-3, 1.0
OPTIMIZER = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0, "torch_adam": True, "fused": True}}


class Shape(NamedTuple):
    """The sizes of a Llama, and the length of its rows."""

    hidden: int
    layers: int
    heads: int
    mlp: int
    vocabulary: int
    length: int = 512


SHAPES = {
    "tiny": Shape(64, 2, 4, 128, 512, 64),
    "small": Shape(512, 6, 8, 1408, 16_384),
    "wide": Shape(768, 4, 12, 2048, 50_304),
}
CONTENDERS: dict[str, tuple[int, dict[str, Any]]] = {
    "hf-1p": (1, {}),
    "ztp-1p": (1, {"stage": 0}),
    "ztp-z1-1p": (1, {"stage": 1}),
    "ds-z2": (2, {"stage": 2}),
    "ztp-z2": (2, {"stage": 2}),
    "ztp-z1": (2, {"stage": 1}),
    "ztp-z3": (2, {"stage": 3}),
    "autotp": (2, {"stage": 1, "tensor": 2}),
    "ztp-tp": (2, {"stage": 1, "tensor": 2}),
    "ztp-sp": (2, {"stage": 1, "tensor": 2, "sequence": True}),
    "ztp-1p-compiled": (1, {"stage": 1, "compile": True}),
    "ztp-z2-compiled": (2, {"stage": 2, "compile": True}),
    "ztp-sp-compiled": (2, {"stage": 1, "tensor": 2, "sequence": True, "compile": True}),
}
"""Name → (ranks, what is asked of DeepSpeed and of TP)."""
RATIOS = (
    *(("ztp-1p", "hf-1p"), ("ztp-z2", "ds-z2"), ("ztp-sp", "autotp"), ("ztp-sp", "ztp-tp"), ("ztp-z3", "ztp-z1")),
    *(("ztp-1p-compiled", "hf-1p"), ("ztp-z2-compiled", "ds-z2"), ("ztp-sp-compiled", "autotp")),
)

Step = Callable[[Any], float]
"""Trains on one batch [BATCH, length] → its mean loss."""


# --- one rank of a contender ------------------------------------------------------------------------------------------


def settings_of(options: dict[str, Any], bf16: bool, data: int) -> dict[str, Any]:
    """DeepSpeed's config, the same for all of its contenders."""
    return {
        "train_micro_batch_size_per_gpu": BATCH // data,
        "gradient_clipping": CLIP,
        "optimizer": OPTIMIZER,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": options["stage"]},
    }


def zero_tp(weights: Path, options: dict[str, Any], bf16: bool) -> Step:
    from zero_tp.config import RunConfig
    from zero_tp.process.connect import connect_deepspeed
    from zero_tp.process.environment import RankEnvironment
    from zero_tp.training.engine import TrainingEngine
    from zero_tp.weights.load import PretrainedSource

    environment = RankEnvironment.of_this_process()
    data = environment.world // options.get("tensor", 1)
    block = {
        "model": {"from_pretrained": str(weights)},
        "parallel": {"tensor": options.get("tensor", 1), "sequence": options.get("sequence", False)},
        "data": {"train": "none", "sequence_length": 8},
        "training": {"steps": 1, "seed": 1},
        "compile": options.get("compile", False),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**settings_of(options, bf16, data), "zero_tp": block}, file)
        file.flush()
        config = RunConfig.load(file.name, world_size=environment.world)
    environment.export()
    topology, device = connect_deepspeed(config, environment, False)
    model = config.hf_config()
    source = PretrainedSource(weights, model)
    engine = TrainingEngine(
        model,
        topology,
        config.deepspeed_config(),
        seed=1,
        device=device,
        source=source,
        compiled=config.zero_tp.compile,
    )
    rows = slice(topology.data_rank * config.micro_batch, (topology.data_rank + 1) * config.micro_batch)
    return lambda tokens: engine.train_step([(tokens[rows, :-1], tokens[rows, 1:])])


def loss_of(model: Any, tokens: Any) -> Any:
    labels = tokens[:, 1:].contiguous()
    return model(input_ids=tokens[:, :-1], shift_labels=labels, labels=labels).loss


def hugging_face(weights: Path, options: dict[str, Any], bf16: bool) -> Step:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16 if bf16 else torch.float32).train()
    parameters = list(model.parameters())
    masters = [each.detach().float().requires_grad_() for each in parameters] if bf16 else parameters
    optimizer = torch.optim.AdamW(masters, lr=RATE, weight_decay=0.0, fused=True)

    def step(tokens: Any) -> float:
        loss = loss_of(model, tokens)
        loss.backward()
        if bf16:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if bf16:
            with torch.no_grad():
                for master, parameter in zip(masters, parameters, strict=True):
                    parameter.copy_(master)
        return float(loss)

    return step


def with_deepspeed(weights: Path, options: dict[str, Any], bf16: bool) -> Step:
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from zero_tp.process.connect import without_shared_memory_collectives

    without_shared_memory_collectives()  # which its inference alone uses
    deepspeed.init_distributed("gloo", verbose=False)
    tensor = options.get("tensor", 1)
    data = dist.get_world_size() // tensor
    settings = settings_of(options, bf16, data)
    if tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": tensor}
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16 if bf16 else torch.float32).train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    rank, micro = dist.get_rank() // tensor, BATCH // data
    rows = slice(rank * micro, (rank + 1) * micro)

    def step(tokens: Any) -> float:
        loss = loss_of(engine, tokens[rows])
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step


def work(name: str, weights: Path, shape: Shape, bf16: bool, output: Path) -> None:
    """Be one rank of a contender; the first one writes what was measured."""
    import torch
    import torch.distributed as dist

    from zero_tp.process.connect import keep_freed_memory

    keep_freed_memory()
    ranks, options = CONTENDERS[name]
    torch.set_num_threads(2 // ranks)
    make = zero_tp if name.startswith("ztp") else hugging_face if name == "hf-1p" else with_deepspeed
    step = make(weights, options, bf16)
    torch.set_num_threads(2 // ranks)
    generator = torch.Generator().manual_seed(2)
    seconds, losses = [], []
    for number in range(WARM_UP + STEPS):
        tokens = torch.randint(shape.vocabulary, (BATCH, shape.length + 1), generator=generator)
        if number == WARM_UP:
            Path("/proc/self/clear_refs").write_text("5")  # the peak of what is resident counts from here
        if ranks > 1:
            dist.barrier()
        begun = time.perf_counter()
        losses.append(step(tokens))
        if ranks > 1:
            dist.barrier()
        seconds.append(time.perf_counter() - begun)
    status = Path("/proc/self/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
    if int(os.environ.get("RANK", 0)) == 0:
        output.write_text(json.dumps({"seconds": seconds[WARM_UP:], "losses": losses, "peak_mib": peak}))
    if dist.is_initialized():
        dist.destroy_process_group()


def products(shape: Shape, bf16: bool) -> float:
    """FLOP/s of two threads on products of the model's shapes, the best of several."""
    import torch

    torch.set_num_threads(2)
    dtype = torch.bfloat16 if bf16 else torch.float32
    tokens = torch.randn(BATCH * shape.length, shape.hidden).to(dtype)
    best = 0.0
    for size in (shape.mlp, shape.vocabulary // 4):
        weight = torch.randn(size, shape.hidden).to(dtype)
        for _ in range(6):
            begun = time.perf_counter()
            tokens @ weight.t()
            best = max(best, 2.0 * len(tokens) * weight.numel() / (time.perf_counter() - begun))
    return best


# --- the comparison ---------------------------------------------------------------------------------------------------


def write_model(directory: Path, shape: Shape) -> float:
    """Write a Llama with random weights → the FLOPs of one of its steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from zero_tp.models.architectures import architecture_of
    from zero_tp.models.flops import model_flops

    torch.manual_seed(1)
    logging.disable_progress_bar()
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.length,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return model_flops(architecture_of(config).spec(config), BATCH, shape.length)


def launch(name: str, weights: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a contender → seconds of its steps, losses, and the peak of rank 0 in MiB."""
    ranks = CONTENDERS[name][0]
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        words = [str(ROOT / "benchmarks" / "train.py"), "--worker", name, "--weights", str(weights)]
        words += ["--shape", options.shape, "--dtype", options.dtype, "--output", output.name]
        if ranks > 1:
            words = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", *words]
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(2 // ranks),
        }
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=900)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")
        result: dict[str, Any] = json.loads(Path(output.name).read_text())
        return result


def draw(path: Path, rates: dict[str, list[float]], title: str) -> None:
    """Draw each contender's tokens a second: the median, and the range of its rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 0.5 + 0.42 * len(rates)), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, each) in enumerate(reversed(rates.items())):
        middle = statistics.median(each)
        spread = [[middle - min(each)], [max(each) - middle]]
        axes.barh(place, middle, xerr=spread, capsize=3, color="#4477AA" if name.startswith("ztp") else "#BBBBBB")
        axes.text(max(each) * 1.01, place, f"{middle:,.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rates)), [*reversed(rates)])
    axes.set_xlabel("tokens/s")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=3, help="times that each contender runs (default: 3)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="by default all: %(default)s")
    parser.add_argument("--output", type=Path, help="directory for the dated result and its picture")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape, bf16 = SHAPES[options.shape], options.dtype == "bf16"
    if options.worker:
        work(options.worker, options.weights, shape, bf16, options.output)
        return
    names = options.contenders.split(",")
    if unknown := sorted(set(names) - CONTENDERS.keys()):
        parser.error(f"no contender {unknown[0]}")
    compare(names, shape, bf16, options)


def compare(names: list[str], shape: Shape, bf16: bool, options: argparse.Namespace) -> None:
    """Run all rounds; exit with 1 where a contender's losses are not those of the others."""
    tokens = BATCH * shape.length
    rates: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {}
    gemm: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        flops = write_model(Path(directory), shape)
        for turn in range(options.rounds):
            gemm.append(products(shape, bf16))
            for name in names:
                found = launch(name, Path(directory), options)
                rates[name].append(tokens / statistics.median(found["seconds"]))
                peaks[name].append(found["peak_mib"])
                losses[name] = found["losses"]
            print(f"round {turn + 1}: " + ", ".join(f"{name} {rates[name][-1]:.0f}" for name in names), flush=True)
    print(f"\n{'contender':<16}{'tokens/s':>10}{'from':>8}{'to':>8}{'of GEMM':>9}{'peak MiB':>10}{'last loss':>11}")
    for name in names:
        middle = statistics.median(rates[name])
        share = flops * middle / tokens / statistics.median(gemm)
        print(
            f"{name:<16}{middle:>10.0f}{min(rates[name]):>8.0f}{max(rates[name]):>8.0f}{share:>9.0%}"
            f"{statistics.median(peaks[name]):>10.0f}{losses[name][-1]:>11.4f}"
        )
    ratios = {f"{one} / {other}": ratio(rates[one], rates[other]) for one, other in RATIOS if {one, other} <= {*names}}
    for pair, (middle, least, most) in ratios.items():
        print(f"{pair}: {middle:.2f} (from {least:.2f} to {most:.2f})")
    if options.output:
        result = {
            "model": {"model_type": "llama", **shape._asdict()},
            "batch": f"{BATCH} × {shape.length} tokens, {options.dtype}, {STEPS} timed steps",
            "contenders": {name: {"ranks": CONTENDERS[name][0], **CONTENDERS[name][1]} for name in names},
            "tokens_per_second": rates,
            "peak_mib": peaks,
            "losses": losses,
            "gemm_flops_per_second": gemm,
            "flops_per_step": flops,
            "ratios": ratios,
        }
        path = write_result(options.output, f"train-{options.shape}-{options.dtype}", result)
        draw(path.with_suffix(".png"), rates, f"{options.shape} {options.dtype}, two cores, {options.rounds} rounds")
    first = losses[names[0]]
    for name in names[1:]:
        apart = max(abs(a - b) for a, b in zip(first, losses[name], strict=True))
        if not apart < (0.05 if bf16 else 1e-3):
            sys.exit(
                f"{name}'s losses are not those of {names[0]}: they differ by {apart:.4f}, so that it does other work"
            )


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """The median, least and greatest ratio of the rounds."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(each), min(each), max(each)


if __name__ == "__main__":
    main()
