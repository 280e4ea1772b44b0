"""This module keeps the libraries' own chatter out of a run's output; errors stay.

Two things print before any rank exists and can only be quietened from outside: DeepSpeed's runner and launch.py take
`-q` (or `--log_level error`) before the script: `deepspeed -q --num_accelerators 4 launch/pretrain.py …`. No
environment variable does it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from zero_tp.errors import UserError

# Read by C++ or at import. A value that the person has set wins.
ENVIRONMENT = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
    "KINETO_LOG_LEVEL": "6",  # torch's profiler
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}

# Loggers that write below ERROR in a plain run: DeepSpeed's scheduler warns before the first step, its optimizers
# report their settings; torch's warn of fallbacks while it builds groups and extensions.
LOGGERS = (
    "DeepSpeed",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn.jit.instantiator",
    "torch.distributed.elastic.multiprocessing.redirects",
    "torch.utils.cpp_extension",
    "accelerate",
    "datasets",
    "filelock",
    "huggingface_hub.utils._http",  # every attempt without a network
)

LIBRARIES = r"(torch|deepspeed|transformers|accelerate|datasets|huggingface_hub)(\.|$)"


def quiet_libraries(verbose: bool) -> None:
    """Silence DeepSpeed, torch and transformers below level ERROR in this process, unless `verbose`.

    Call it before they are imported: some of it is read then. Later calls change nothing more.
    """
    # Not chatter: tokenizers' threads and forked data workers don't mix, and it warns of that once for each worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if verbose:
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in LOGGERS:
        # A filter, because the libraries set their loggers' levels themselves when they are imported.
        logging.getLogger(name).addFilter(_only_errors)
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category, module=LIBRARIES)
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor and says so at every call site, ours or not.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def _only_errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextlib.contextmanager
def hushed(verbose: bool = False, *, stderr: bool = False) -> Iterator[None]:
    """Drop what libraries `print` inside the block, unless `verbose`; if the block fails, it goes to stderr.

    For `deepspeed.init_distributed` and `deepspeed.initialize`, which print (each rank: "… built successfully") where
    they could log. A `UserError` says what a person has to know without it.

    Args:
        stderr: drop what is written to stderr too. A stream that was opened before, a bar of ours, stays.
    """
    if verbose:
        yield
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said) if stderr else contextlib.nullcontext():
            yield
    except UserError:
        raise
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise
