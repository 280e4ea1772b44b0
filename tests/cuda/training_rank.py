"""A process of tests/support/device_runs.py: trains each config of its part in turn, on DeepSpeed's
accelerator.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.contenders import connected
from benchmarks.device_torch import add_new_names
from tests.support.parallel_run import train
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig
from zero_tp.run.process.environment import RankEnvironment

LIMIT = timedelta(seconds=120)


def connect_on_one_device() -> torch.device:
    """Join ranks that share device 0, over gloo: NCCL takes one rank a device."""
    from deepspeed.accelerator import get_accelerator

    RankEnvironment.of_this_process().export()
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed takes it for the device's index
    name = get_accelerator().device_name()
    dist.init_process_group("gloo", timeout=LIMIT)
    if name == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device(name, 0)


def main(folder: Path, part: int, parts: int) -> None:
    """Write the trace of FOLDER/NAME/run.json to FOLDER/NAME/traceRANK.pt, or the traceback to
    FOLDER/NAME/error. On several ranks all must succeed.
    """
    add_new_names()
    environment = RankEnvironment.of_this_process()
    device = connect_on_one_device() if environment.world > 1 else None
    for path in sorted(folder.glob("*/run.json"))[part::parts]:
        if device is None:
            _, device = connected(RunConfig.load(path, world_size=1))
        try:
            compiled = json.loads(path.read_text())["zero_tp"]["compile"]
            trace = train(path, device=device, compiled=compiled)
            torch.save(vars(trace), path.parent / f"trace{environment.rank}.pt")
        except Exception:  # fails the test of this run; the other runs go on
            (path.parent / "error").write_text(traceback.format_exc())
            if environment.world > 1:
                raise  # the other ranks would wait
        gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    # Whether gloo trains the same model there is what these tests ask.
    with mock.patch.object(Topology, "check_backend"):
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
