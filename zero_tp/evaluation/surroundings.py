"""What lm-eval runs in: its seeds, no output of its own, no processes of its own."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import sys
from collections.abc import Iterator

import numpy as np
import torch

from zero_tp.errors import UserError
from zero_tp.evaluation.lm_eval_parts import SEEDS


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """lm-eval's seeds inside, and the random states as they were after: training goes on with its own."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        random.seed(SEEDS["random"])
        np.random.seed(SEEDS["numpy"])
        torch.manual_seed(SEEDS["torch"])
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Drop what lm-eval and datasets print, their bars and warnings; when the block fails, it goes to stderr.

    Not what is written to streams that were opened before: our own bars stay.
    """
    said = io.StringIO()
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except UserError:
        raise
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def in_one_process() -> Iterator[None]:
    """lm-eval's bootstrap would fork this process, connections to other ranks and all."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
