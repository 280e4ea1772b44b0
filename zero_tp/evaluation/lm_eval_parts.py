"""What zero_tp takes of lm-eval, which is an extra."""

from __future__ import annotations

from zero_tp.errors import UserError

try:
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import Collator, normalize_gen_kwargs
    from lm_eval.models.utils_hf import stop_sequences_criteria
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    raise UserError(
        "tasks of lm-eval need the package lm-eval, which is not installed: pip install -c constraints.txt -e .[eval]"
    ) from error

__all__ = [
    "HFLM",
    "Collator",
    "TaskManager",
    "evaluator",
    "get_rolling_token_windows",
    "make_disjoint_window",
    "normalize_gen_kwargs",
    "stop_sequences_criteria",
]

# Its own defaults.
SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
