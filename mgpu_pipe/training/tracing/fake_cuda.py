"""Gives torch a CUDA device that does nothing, for :mod:`.fake_device`; no GPU is needed, g++ is.

:func:`load` comes before torch is imported: torch asks once which devices there are. It compiles a device guard of
forty lines (fake_cuda.cpp); on the device are fake tensors, which have shapes and no values.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mgpu_pipe.errors import BadInputError

SOURCE = Path(__file__).with_suffix(".cpp")


def load() -> None:
    """Give this process's torch, not imported yet, the device.

    Raises:
        BadInputError: no compiler, or a torch with its own CUDA.
    """
    assert "torch" not in sys.modules, "torch has asked for its devices"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    if (torch / "lib/libtorch_cuda.so").exists():
        raise BadInputError("this torch has its own CUDA; trace on a machine with a GPU, or install torch for CPUs")
    if shutil.which("g++") is None:
        raise BadInputError("g++ is missing, which compiles the fake GPU; install it: apt-get install g++")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fake_cuda.so"
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}", str(SOURCE)]
        subprocess.run([*command, f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(library)], check=True)
        for name in (torch / "lib/libc10.so", torch / "lib/libtorch_cpu.so", library):
            ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)
    from mgpu_pipe.training.tracing.fake_device import stand_in

    stand_in()
