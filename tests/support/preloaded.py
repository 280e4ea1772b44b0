"""What the fork server of the pools imports once; its ranks share those pages."""

# ruff: noqa: F401

import gc
import os

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")

import cpuinfo
import deepspeed
import pydantic
import pytest
import torch
import transformers.generation
import transformers.modeling_utils
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.trainer_utils

import zero_tp.engine.engine
import zero_tp.run.checkpoint.convert
import zero_tp.run.checkpoint.save
import zero_tp.run.checkpoint.start_point

# DeepSpeed's CPU Adam asks in each process, and each answer takes another process two seconds.
cpu_info = cpuinfo.get_cpu_info()
cpuinfo.get_cpu_info = lambda: dict(cpu_info)

# A collection in a rank would write to every object, and so copy those pages: 0.45 s of processor
# time a rank.
gc.collect()
gc.freeze()
