"""Variables, a home and caches of the tests' own: no test reads what a person has set, made or
downloaded.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PREFIXES = (
    *(
        "ACCELERATE_",
        "COMET_",
        "HF_",
        "HUGGINGFACE_",
        "MALLOC_",
        "MLFLOW_",
        "OMPI_",
        "PYTORCH_",
        "SLURM_",
    ),
    *("TORCHDYNAMO_", "TORCHELASTIC_", "TORCHINDUCTOR_", "TRANSFORMERS_", "WANDB_", "XDG_"),
)
NAMES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CROSS_RANK", "DS_ENV_FILE", "GLIBC_TUNABLES", "MPLBACKEND", "MPLCONFIGDIR", "TORCH_HOME"),
}
"""Variables that launchers, libraries or the C library read, and that change what a test
computes.
"""

OWN = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # launch/setup_env.sh compiles DeepSpeed's ops there, once for each environment.
    "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions")),
}
DEFAULTS = {
    "OMP_NUM_THREADS": "1",  # several processes at a time; threads of torch's would wait for cores
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def isolated_variables(environment: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return the environment of the tests and of all that they start.

    Args:
        root: of the repository, which a child imports from any directory.
    """
    if "PYTEST_XDIST_WORKER" in environment:  # has the variables of the process that started it
        return dict(environment)
    inherited = {
        name: value
        for name, value in environment.items()
        if not name.startswith(PREFIXES) and name not in NAMES
    }
    home = tempfile.mkdtemp(prefix="zero_tp_home_")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    path = ":".join(filter(None, (str(root), environment.get("PYTHONPATH"))))
    return {**DEFAULTS, **inherited, **OWN, "HOME": home, "PYTHONPATH": path}
