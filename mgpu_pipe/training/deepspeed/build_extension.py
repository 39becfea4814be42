"""``python -m mgpu_pipe.training.deepspeed.build_extension``: compiles DeepSpeed's file access.

The launcher runs it in its own process before workers start (:mod:`mgpu_pipe.launch.deepspeed_build`), and workers
load the result. DeepSpeed alone would let each worker ask the build tool. That compiles again in another virtual
environment, and waits without end for a worker that was killed meanwhile.
"""

from __future__ import annotations

import ctypes
import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from mgpu_pipe.system.compat.deepspeed_private import provide_extension

FOLDER = "MGPU_PIPE_EXTENSIONS"
"""The environment variable that tells workers where the compiled extensions are."""
NAMES = ("pin_memory", "async_io")
"""The extensions, in the order in which they are loaded: the second needs symbols of the first."""


def main() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load(verbose=False)  # compiles both


def load_extensions() -> None:
    """Register the extensions that the launcher compiled in DeepSpeed's table of loaded ones.

    Without a launcher there are none, and DeepSpeed compiles its own.

    Raises:
        ImportError: an extension is not there or does not fit this Python or torch.
    """
    if FOLDER not in os.environ:
        return
    for name in NAMES:
        path = Path(os.environ[FOLDER]) / name / f"{name}.so"
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # its symbols, for the next
        provide_extension(name, module)


if __name__ == "__main__":
    main()
