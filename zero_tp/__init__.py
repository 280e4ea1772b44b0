"""Tensor and sequence parallel pretraining on DeepSpeed ZeRO, behind a Hugging Face compatible model.

The names below are imported on first use, because torch and transformers take seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_tp.config import RunConfig
    from zero_tp.data.corpus import prepare
    from zero_tp.huggingface import ZeroTPForCausalLM, ZeroTPForPreTraining
    from zero_tp.planning.plan import plan
    from zero_tp.topology import Topology
    from zero_tp.trainer import ZeroTPTrainer
    from zero_tp.training.callback import Callback, TrainState
    from zero_tp.training.engine import TrainingEngine

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "RunConfig",
    "Topology",
    "TrainState",
    "TrainingEngine",
    "ZeroTPForCausalLM",
    "ZeroTPForPreTraining",
    "ZeroTPTrainer",
    "plan",
    "prepare",
]

_MODULES = {
    "Callback": "training.callback",
    "RunConfig": "config",
    "Topology": "topology",
    "TrainState": "training.callback",
    "TrainingEngine": "training.engine",
    "ZeroTPForCausalLM": "huggingface",
    "ZeroTPForPreTraining": "huggingface",
    "ZeroTPTrainer": "trainer",
    "plan": "planning.plan",
    "prepare": "data.corpus",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
