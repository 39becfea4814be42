"""The last of what the fork server imports: DeepSpeed for the CPU, and what the libraries import at first use.

It changes nothing for tests that use none of it. What is there now is never collected: a collection would visit, and
so copy, all of it in every forked process.
"""

from __future__ import annotations

import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.engine
import deepspeed.runtime.zero.muon  # noqa: F401
import functorch.compile  # noqa: F401
import torch._inductor.compile_fx
import torch._inductor.compiler_bisector  # noqa: F401

gc.collect()
gc.freeze()
