"""Ways to break the library that no exception, and often no loss curve, tells of; tests/mutations.py tries them.

Each is a mistake of the kind that this field makes: the code still runs and trains.
"""

from __future__ import annotations

from tests.mutants import decoders, encoders, evaluation, inputs, layers, runs, trust
from tests.mutants.mutant import Mutant

MUTANTS: dict[str, Mutant] = {
    **layers.MUTANTS,
    **decoders.MUTANTS,
    **encoders.MUTANTS,
    **runs.MUTANTS,
    **evaluation.MUTANTS,
    **trust.MUTANTS,
    **inputs.MUTANTS,
}

__all__ = ["MUTANTS", "Mutant"]
