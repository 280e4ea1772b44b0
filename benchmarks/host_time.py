"""Measure the host's time of a training step, on tensors so small that nothing else takes time.

    DS_ACCELERATOR=cpu python -m benchmarks.host_time              # beside transformers' class
    DS_ACCELERATOR=cpu python -m benchmarks.host_time --tree DIR   # beside another checkout

CPU milliseconds of Python, dispatch and wrappers: 24 layers of 64, 32 tokens, one process and
thread, ZeRO-1 in bf16, compiled. Contenders run in turns, each in its own process. On a GPU the
host must launch faster than the device computes: this bounds small models and fast cards.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LENGTH = 32
WARM_UP = 5
STEPS = 30
RESULT = "milliseconds:"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, help="another checkout, instead of transformers")
    parser.add_argument("--rounds", type=int, default=3, help="turns (default: 3)")
    parser.add_argument("--one", choices=("zero_tp", "transformers"), help=argparse.SUPPRESS)
    return parser.parse_args()


def make_step(contender: str) -> Callable[[], object]:
    """Return a function that trains one step."""
    import torch

    from benchmarks.contenders import connected, engine_of
    from benchmarks.device_rank import transformers_step
    from benchmarks.step_launches import VOCABULARY, load, small_llama

    torch.set_num_threads(1)
    run = load(small_llama(LENGTH, compile=True))
    topology, device = connected(run)
    tokens = torch.randint(VOCABULARY, (1, LENGTH + 1))
    if contender == "transformers":
        plain_step = transformers_step(run, device)
        return lambda: plain_step(tokens)
    engine = engine_of(run, topology, device)
    return lambda: engine.train_step([(tokens[:, :-1], tokens[:, 1:])])


def measure(step: Callable[[], object]) -> list[float]:
    """Return the CPU milliseconds of each step after the warm-up."""
    for _ in range(WARM_UP):
        step()
    milliseconds = []
    for _ in range(STEPS):
        begin = time.process_time()
        step()
        milliseconds.append((time.process_time() - begin) * 1e3)
    return milliseconds


def measure_in_process(tree: Path, contender: str) -> float:
    """Return the least CPU milliseconds of a step, measured in a process by that tree's own
    copy.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.host_time", "--one", contender],
        cwd=tree,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    return float(lines[0].split()[1])


def main() -> None:
    options = arguments()
    if options.one:
        milliseconds = measure(make_step(options.one))
        print(RESULT, min(milliseconds), statistics.median(milliseconds))
        return
    here = Path(__file__).resolve().parent.parent
    contenders = {"zero_tp": (here, "zero_tp")}
    if options.tree:
        contenders["the other tree"] = (options.tree.resolve(), "zero_tp")
    else:
        contenders["transformers"] = (here, "transformers")
    least: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, (tree, contender) in contenders.items():
            least[name].append(measure_in_process(tree, contender))
    for name, values in least.items():
        rounds = ", ".join(f"{value:.1f}" for value in values)
        print(f"{name:16s} {min(values):7.1f} ms of CPU a step ({rounds})")
    first, second = (min(values) for values in least.values())
    print(f"ratio {first / second:.2f}")


if __name__ == "__main__":
    main()
