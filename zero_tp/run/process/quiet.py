"""Hide libraries' messages below level ERROR.

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

from zero_tp.base.errors import UserError

# C++ code, or Python at import, reads these. A value that the person has set wins.
ENVIRONMENT = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
    "KINETO_LOG_LEVEL": "6",  # torch's profiler
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}

# Loggers that write below ERROR in a plain run: DeepSpeed's scheduler warns before the first step,
# its optimizers report their settings; torch's warn of fallbacks while it builds groups and
# extensions.
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

# Warnings of these modules are hidden; those of a user's own callbacks and of Python are shown.
LIBRARIES = r"(torch|deepspeed|transformers|accelerate|datasets|huggingface_hub)(\.|$)"


def quiet_libraries(verbose: bool) -> None:
    """Silence DeepSpeed, torch and transformers below level ERROR, unless `verbose`.

    Call it before they are imported, because they read some settings at import.
    """
    # tokenizers disables its threads in forked data workers and would print a warning in each.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if verbose:
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in LOGGERS:
        # A filter, because the libraries set their loggers' levels themselves when they are
        # imported.
        logging.getLogger(name).addFilter(_is_error)
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category, module=LIBRARIES)
    ignore_deprecated_collectives()


def ignore_deprecated_collectives() -> None:
    """Silence torch 2.13's warning at each of DeepSpeed's collectives.

    They are all_gather_into_tensor and reduce_scatter_tensor.
    """
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextlib.contextmanager
def suppress_output(verbose: bool = False, *, stderr: bool = False) -> Iterator[None]:
    """Hide what libraries `print` inside the block, unless `verbose`.

    If the block fails, write it to stderr.

    `deepspeed.init_distributed` and `deepspeed.initialize` print instead of logging. After a
    `UserError`, whose message is complete, the output stays hidden.

    Args:
        stderr: hide stderr too. Objects that already hold the stream, such as our progress bar,
            still write to it.
    """
    if verbose:
        yield
        return
    text = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(text),
            contextlib.redirect_stderr(text if stderr else sys.stderr),
        ):
            yield
    # A UserError says all that a user needs. Any other error may be explained by what was printed
    # before it.
    except UserError:
        raise
    except BaseException:
        sys.stderr.write(text.getvalue())
        raise
