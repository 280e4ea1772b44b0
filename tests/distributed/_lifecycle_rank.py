"""One rank of the runs in test_lifecycle.py: sums a tensor with its peers for ever, until something ends it."""

from __future__ import annotations

import os
import sys

from zero_tp.errors import UserError
from zero_tp.process.lifecycle import run_rank


def main() -> int:
    case = sys.argv[sys.argv.index("--case") + 1]
    rank = int(os.environ["RANK"])
    if case == "user-error":
        raise UserError("zero_tp.training.steps is -1: it must be at least 1")
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = dist.new_group(list(range(dist.get_world_size())))
    step = 0
    while True:
        value = torch.ones(1000)
        dist.all_reduce(value, group=group)
        step += 1
        if step == 5 and rank == 0:
            print("looping", flush=True)
        if case == "success" and step == 10:
            return 0
        if case == "exception" and step == 10 and rank == 1:
            raise ArithmeticError("the loss is not finite\nat step 10")
        if case == "stuck" and step == 10 and rank == 1:  # its peers now wait inside the collective, this one in Python
            import threading

            threading.Event().wait()


run_rank(main, verbose=False)
