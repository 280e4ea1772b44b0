"""A contender of benchmarks/device_full.py: an engine that stays alive and trains on request.

    PYTHONPATH=TREE python -P benchmarks/device_contender.py CONFIG [--set KEY=VALUE]

It is run as a file, so that each tree trains with its own code. It reads requests from stdin and
answers each with a line of JSON: `time N` times N steps, `profile` sums up the profile of one. What
libraries print goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIRST_WARM_UP = 3
GIB = 2**30


def neighbour(name: str) -> dict[str, Any]:
    """Return the names of a file beside this one, which an older tree lacks."""
    return runpy.run_path(str(Path(__file__).with_name(name)))


class Contender:
    """An engine that the first request builds.

    Args:
        transformers: train transformers' own class instead of the tree's.
    """

    def __init__(self, path: Path, overrides: list[str], *, transformers: bool):
        # Names that an older tree's module has, too.
        from benchmarks.device_rank import RankEnvironment, RunConfig

        world = RankEnvironment.of_this_process().world
        self._config = RunConfig.load(path, overrides, world)
        self._transformers = transformers
        self._train: Callable[[Any], float] | None = None
        self._draws = 0

    def _build(self) -> Callable[[Any], float]:
        """Return a function that trains on tokens [batch, length + 1] and returns their loss."""
        from benchmarks.device_rank import connected, engine_of, transformers_step

        topology, self._device = connected(self._config)
        if self._transformers:
            return transformers_step(self._config, self._device)
        engine = engine_of(self._config, topology, self._device)
        return lambda tokens: float(engine.train_step([(tokens[:, :-1], tokens[:, 1:])]))

    def _tokens(self) -> Any:
        """Return the next random tokens, the same for every contender."""
        import torch

        self._draws += 1
        config = self._config
        size = (config.micro_batch, config.zero_tp.data.sequence_length + 1)
        generator = torch.Generator().manual_seed(self._draws)
        vocabulary = config.hf_config().vocab_size
        return torch.randint(vocabulary, size, generator=generator).to(self._device)

    def _warm_up(self) -> Callable[[Any], float]:
        """Return the step, after one that fills the allocator's cache, or some that compile."""
        steps = 1
        if self._train is None:
            self._train = self._build()
            steps = FIRST_WARM_UP
        for _ in range(steps):
            self._train(self._tokens())
        return self._train

    def time(self, steps: str) -> dict[str, Any]:
        """Time some steps, then give unused memory back: another contender's turn is next."""
        import torch
        from deepspeed.accelerator import get_accelerator

        train = self._warm_up()
        on_cuda = self._device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds, losses = [], []
        for _ in range(int(steps)):
            tokens = self._tokens()
            get_accelerator().synchronize()
            begin = time.perf_counter()
            losses.append(train(tokens))
            get_accelerator().synchronize()
            seconds.append(time.perf_counter() - begin)
        batch = self._config.micro_batch * self._config.zero_tp.data.sequence_length
        record: dict[str, Any] = {
            "milliseconds": [1e3 * each for each in seconds],
            "tokens_per_second": [batch / each for each in seconds],
            "losses": losses,
        }
        if on_cuda:
            record["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            record["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
            torch.cuda.empty_cache()
            record["free_gib"] = torch.cuda.mem_get_info()[0] / GIB
        return record

    def profile(self) -> dict[str, Any]:
        """Sum up the profile of one step."""
        train = self._warm_up()
        tokens = self._tokens()
        profile_step = neighbour("device_profile.py")["profile_step"]
        summary: dict[str, Any] = profile_step(lambda: train(tokens), self._device)
        return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    neighbour("device_torch.py")["add_new_names"]()
    contender = Contender(options.config, options.set, transformers=options.transformers)
    for request in sys.stdin:
        name, *words = request.split()
        # An error ends the process: its last line says why, and the next turn starts another.
        answer = contender.time(*words) if name == "time" else contender.profile()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
