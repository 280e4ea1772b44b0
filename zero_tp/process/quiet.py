"""Keep libraries' messages below level ERROR out of a run's output.

DeepSpeed's runner and launch.py print before any rank exists; only `deepspeed -q` silences them.
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
    # tokenizers' threads and forked data workers don't mix; it would warn of that once for each worker.
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
def suppress_output(verbose: bool = False, *, stderr: bool = False) -> Iterator[None]:
    """Drop what libraries `print` inside the block, unless `verbose`; if the block fails, it goes to stderr.

    `deepspeed.init_distributed` and `deepspeed.initialize` print where they could log. After a `UserError`, which is
    complete without it, it is dropped too.

    Args:
        stderr: drop what is written to stderr too. A stream that was opened before, such as our progress bar, stays.
    """
    if verbose:
        yield
        return
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text if stderr else sys.stderr):
            yield
    except UserError:
        raise
    except BaseException:
        sys.stderr.write(text.getvalue())
        raise
