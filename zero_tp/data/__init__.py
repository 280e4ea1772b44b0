"""Store and sample corpora of token ids.

The public names below are `zero_tp`'s own. They resolve here too, on first use, because torch takes
a second to import.
"""

from typing import TYPE_CHECKING, Any

import zero_tp

if TYPE_CHECKING:
    from zero_tp import CorpusDataset, CorpusStream, Prepared, PrepareSettings, prepare, stream

__all__ = ["CorpusDataset", "CorpusStream", "PrepareSettings", "Prepared", "prepare", "stream"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(zero_tp, name)
