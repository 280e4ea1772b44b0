"""Imports of the fork server of `on_ranks`, made once for all ranks."""

import gc

from zero_tp.run.process.quiet import quiet_libraries

quiet_libraries(verbose=False)

import deepspeed  # noqa: E402, F401
import transformers.models.gpt2.modeling_gpt2  # noqa: E402, F401

import zero_tp.engine.engine  # noqa: E402, F401

# A garbage collection in a rank would write to every object, and so copy its pages.
gc.collect()
gc.freeze()
