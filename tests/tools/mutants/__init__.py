"""Silent faults of the kind that this field makes: the code still runs and trains (tests/tools/mutations.py)."""

from __future__ import annotations

from tests.tools.mutants import activations, checkpoint, models, parallel, zero
from tests.tools.mutants.mutant import Mutant, Unfit

MUTANTS: dict[str, Mutant] = {
    **parallel.MUTANTS,
    **models.MUTANTS,
    **activations.MUTANTS,
    **zero.MUTANTS,
    **checkpoint.MUTANTS,
}

__all__ = ["MUTANTS", "Mutant", "Unfit"]
