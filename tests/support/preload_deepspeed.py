"""Imports DeepSpeed for the CPU in the fork server, where it changes nothing for tests that do not use it."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed.runtime.engine  # noqa: F401
