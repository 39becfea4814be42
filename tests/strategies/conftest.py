"""What NVMe offload needs of the machine."""

from __future__ import annotations

import os

import pytest

from mgpu_pipe.config.compose import compose
from mgpu_pipe.launch.extensions import prepare_extensions
from mgpu_pipe.launch.offload import compiler_errors
from mgpu_pipe.strategies.build_extension import FOLDER


@pytest.fixture(scope="session")
def nvme_extension() -> str:
    """Where DeepSpeed's NVMe access is compiled; it stays in the user's cache, since compiling takes minutes."""
    missing = compiler_errors()
    if missing:
        pytest.skip("; ".join(str(error) for error in missing))
    config, _ = compose(["strategy=zero3_nvme"])
    prepare_extensions(config)
    return os.environ.pop(FOLDER)
