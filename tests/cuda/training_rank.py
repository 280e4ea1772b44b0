"""The process of test_training.py: trains the run of each config in turn, on DeepSpeed's
accelerator.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.contenders import connected
from tests.support.parallel_run import train
from zero_tp.run.config import RunConfig
from zero_tp.run.process.environment import RankEnvironment


def main(folder: Path) -> None:
    """Write the trace of FOLDER/NAME/run.json to FOLDER/NAME/trace.pt, or the traceback to
    FOLDER/NAME/error.
    """
    config = None
    for path in sorted(folder.glob("*/run.json")):
        if config is None:
            config = RunConfig.load(path, world_size=RankEnvironment.of_this_process().world)
            _, device = connected(config)
        try:
            compiled = json.loads(path.read_text())["zero_tp"]["compile"]
            trace = train(path, device=device, compiled=compiled)
            torch.save(vars(trace), path.parent / "trace.pt")
        except Exception:  # fails the test of this run; the other runs go on
            (path.parent / "error").write_text(traceback.format_exc())
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
