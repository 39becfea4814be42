"""What NVMe offload needs of the machine, for the tests of it."""

from __future__ import annotations

import os

import pytest

from mgpu_pipe.config.compose import compose
from mgpu_pipe.launch.extensions import extension_folder, prepare_extensions
from mgpu_pipe.launch.offload import compiler_errors


@pytest.fixture(scope="session")
def nvme_extension() -> str:
    """Where DeepSpeed's NVMe access is compiled; it stays in the user's cache, since compiling takes minutes."""
    missing = compiler_errors()
    if missing:
        pytest.skip("; ".join(str(error) for error in missing))
    config, _ = compose(["strategy=zero3_nvme"])
    held = os.environ.get("TORCH_EXTENSIONS_DIR")
    prepare_extensions(config)
    if held is None:
        del os.environ["TORCH_EXTENSIONS_DIR"]
    else:
        os.environ["TORCH_EXTENSIONS_DIR"] = held
    return str(extension_folder(config))
