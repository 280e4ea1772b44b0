"""Tensor and sequence parallel pretraining on DeepSpeed ZeRO, behind a Hugging Face compatible model.

The names below are imported on first use, because torch and transformers take seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_tp.base.errors import UserError
    from zero_tp.data.datasets import CorpusDataset, CorpusStream
    from zero_tp.data.documents import stream
    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.model.huggingface import ZeroTPForCausalLM, ZeroTPForPreTraining
    from zero_tp.model.huggingface.parallelize import parallel_model
    from zero_tp.parallel.topology import Topology
    from zero_tp.run.callback import Callback, TrainState
    from zero_tp.run.config import RunConfig
    from zero_tp.tools.corpus.corpus import prepare
    from zero_tp.tools.corpus.settings import Prepared, PrepareSettings
    from zero_tp.tools.planning.plan import plan
    from zero_tp.tools.trainer import ZeroTPTrainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "CorpusDataset",
    "CorpusStream",
    "PrepareSettings",
    "Prepared",
    "RunConfig",
    "Topology",
    "TrainState",
    "TrainingEngine",
    "UserError",
    "ZeroTPForCausalLM",
    "ZeroTPForPreTraining",
    "ZeroTPTrainer",
    "parallel_model",
    "plan",
    "prepare",
    "stream",
]

_MODULES = {
    "Callback": "zero_tp.run.callback",
    "CorpusDataset": "zero_tp.data.datasets",
    "CorpusStream": "zero_tp.data.datasets",
    "PrepareSettings": "zero_tp.tools.corpus.settings",
    "Prepared": "zero_tp.tools.corpus.settings",
    "RunConfig": "zero_tp.config",
    "Topology": "zero_tp.parallel.topology",
    "TrainState": "zero_tp.run.callback",
    "TrainingEngine": "zero_tp.engine.engine",
    "UserError": "zero_tp.base.errors",
    "ZeroTPForCausalLM": "zero_tp.model.huggingface",
    "ZeroTPForPreTraining": "zero_tp.model.huggingface",
    "ZeroTPTrainer": "zero_tp.tools.trainer",
    "parallel_model": "zero_tp.model.huggingface.parallelize",
    "plan": "zero_tp.tools.planning.plan",
    "prepare": "zero_tp.tools.corpus.corpus",
    "stream": "zero_tp.data.documents",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
