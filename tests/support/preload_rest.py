"""The last of what the fork server imports: DeepSpeed for the CPU, and what a run and libraries import at first use.

It changes nothing for tests that use none of it. What is there now is never collected: a collection would visit, and
so copy, all of it in every forked process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.engine
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import functorch.compile  # noqa: F401
import pytest  # noqa: F401  test modules, in which the functions of processes are, import it
import torch._inductor.compile_fx
import torch._inductor.compiler_bisector
import torch.utils.tensorboard  # noqa: F401
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

import mgpu_pipe
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.report.html import templates

for room in pkgutil.walk_packages(mgpu_pipe.__path__, "mgpu_pipe."):
    if not room.name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(room.name)

compose(["model=llama_tiny"])  # Hydra's grammar fills its tables at the first word
# What was found out here holds for this process's environment and folder alone.
Singleton._instances.pop(Plugins, None)
for module in [module for name, module in sys.modules.items() if name.startswith("mgpu_pipe.")]:
    for value in vars(module).values():
        if callable(getattr(value, "cache_clear", None)):
            value.cache_clear()
for page in templates().list_templates(["html"]):  # every run writes a report; compiling its template takes a tenth
    templates().get_template(page)

gc.collect()
gc.freeze()
