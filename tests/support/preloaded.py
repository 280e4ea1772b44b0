"""What the fork server of the pools imports once; its ranks share those pages."""

import gc

import deepspeed  # noqa: F401
import pydantic  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401
import transformers.generation
import transformers.modeling_utils
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import zero_tp.checkpoint.convert
import zero_tp.checkpoint.resume
import zero_tp.checkpoint.save
import zero_tp.training.engine  # noqa: F401

# A collection in a rank would write to every object, and so copy those pages: 0.45 s of processor time a rank.
gc.collect()
gc.freeze()
