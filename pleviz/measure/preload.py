"""Imported once by the server that row processes are forked from, so that each starts at once.

The server must never touch CUDA: a forked child could then not use it. torch is therefore told to
look for GPUs through NVML, and whatever creates a context is imported in the children only.
"""

from __future__ import annotations

import gc
import os

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # before anything asks torch.cuda.is_available()

import torch
import transformers.models.gemma3n.modeling_gemma3n
import transformers.models.gemma4.modeling_gemma4  # noqa: F401

import pleviz.building
import pleviz.homes.loading
import pleviz.measure.jobs
import pleviz.parity.bits  # noqa: F401

assert not torch.cuda.is_initialized()
gc.collect()
gc.freeze()  # children need not look through a million of our objects each time they collect
