"""Prepare, store and sample corpora. `__all__` lists the public API."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_tp.data.corpus import prepare
    from zero_tp.data.datasets import CorpusDataset, CorpusStream
    from zero_tp.data.documents import stream
    from zero_tp.data.settings import Prepared, PrepareSettings

__all__ = ["CorpusDataset", "CorpusStream", "PrepareSettings", "Prepared", "prepare", "stream"]

_MODULES = {
    **{"prepare": "corpus", "PrepareSettings": "settings", "Prepared": "settings", "stream": "documents"},
    **{"CorpusDataset": "datasets", "CorpusStream": "datasets"},
}


def __getattr__(name: str) -> Any:  # lazy, because importing torch takes a second
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
