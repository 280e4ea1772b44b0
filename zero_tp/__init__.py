"""Tensor and sequence parallel pretraining on DeepSpeed ZeRO, behind a Hugging Face compatible
model.

The names below are imported on first use, because torch and transformers take seconds to import.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any
from warnings import warn

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
    from zero_tp.run.process.connect import connect
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
    "connect",
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
    "RunConfig": "zero_tp.run.config",
    "Topology": "zero_tp.parallel.topology",
    "TrainState": "zero_tp.run.callback",
    "TrainingEngine": "zero_tp.engine.engine",
    "UserError": "zero_tp.base.errors",
    "ZeroTPForCausalLM": "zero_tp.model.huggingface",
    "ZeroTPForPreTraining": "zero_tp.model.huggingface",
    "ZeroTPTrainer": "zero_tp.tools.trainer",
    "connect": "zero_tp.run.process.connect",
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


_OLD_MODULES = {
    "zero_tp.config": "zero_tp.run.config",
    "zero_tp.data.corpus": "zero_tp.tools.corpus.corpus",
    "zero_tp.data.datatrove": "zero_tp.tools.corpus.datatrove",
    "zero_tp.data.settings": "zero_tp.tools.corpus.settings",
    "zero_tp.errors": "zero_tp.base.errors",
    "zero_tp.huggingface": "zero_tp.model.huggingface",
    "zero_tp.models": "zero_tp.model",
    "zero_tp.process.heap": "zero_tp.parallel.cpu.heap",
    "zero_tp.process": "zero_tp.run.process",
    "zero_tp.run.process.heap": "zero_tp.parallel.cpu.heap",
    "zero_tp.topology": "zero_tp.parallel.topology",
    "zero_tp.trainer": "zero_tp.tools.trainer",
    "zero_tp.training.engine": "zero_tp.engine.engine",
    "zero_tp.training": "zero_tp.run",
}
"""Former names of modules and packages, which scripts may import until version 0.2, and their
new names.
"""


class _OldModules:
    """Import a module of `_OLD_MODULES`, or one inside it, by its old name: the same module
    object.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        old = next((old for old in _OLD_MODULES if f"{name}.".startswith(f"{old}.")), None)
        if old is None:
            return None
        return ModuleSpec(name, _Alias(_OLD_MODULES[old] + name.removeprefix(old)))  # type: ignore[arg-type]


class _Alias:
    def __init__(self, name: str):
        self.name = name

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        warn(
            f"{module.__name__} is {self.name} now; the old name goes in version 0.2",
            DeprecationWarning,
            stacklevel=2,
        )
        sys.modules[module.__name__] = import_module(self.name)


# Before the finder of files, which would load a second copy of a module inside an old package.
sys.meta_path.insert(0, _OldModules())
