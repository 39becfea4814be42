"""What DeepSpeed and NVMe offload need of this machine, looked for before a worker starts. No torch, no DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mgpu_pipe.checks.toolchain import compiler, missing_compiler, missing_headers
from mgpu_pipe.child import bound
from mgpu_pipe.config.resolve import device_type, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.planner.memory import FP32, optimizer_bytes, state_bytes
from mgpu_pipe.planner.parameters import count_parameters

COMPILE_TIMEOUT_S = 60
COMPILES = "DeepSpeed compiles an extension"
AIO_PROGRAM = "#include <libaio.h>\nint main() { return io_destroy(0) == 1; }\n"


def offload_errors(config: RunConfig) -> list[BadInputError]:
    """Everything missing for the deepspeed engine with this configuration's offload."""
    errors: list[BadInputError] = []
    if importlib.util.find_spec("deepspeed") is None:
        reason = "DeepSpeed is not installed"
        errors.append(ConfigError("strategy.engine", "deepspeed", "install it: pip install deepspeed", reason))
    if config.strategy.offload == "nvme":
        errors += [*_path_errors(config), *compiler_errors()]
        if device_type(config) == "cuda" and not _has_cuda_headers():
            reason = "DeepSpeed compiles its file access against CUDA's headers"
            errors.append(ConfigError("strategy.offload", "nvme", "install the CUDA toolkit, or set CUDA_HOME", reason))
    return errors


def _has_cuda_headers() -> bool:
    """Where torch's extension builder looks for the toolkit."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return bool(named or shutil.which("nvcc") or Path("/usr/local/cuda").is_dir())


def offloaded_bytes(config: RunConfig) -> int | None:
    """Bytes that all ranks of one node keep on the disk; None where the model's size is not known without torch.

    For every parameter an fp32 master weight, an fp32 gradient, and the optimizer's state.
    """
    count = count_parameters(resolved_fields(config.model))
    if count is None:
        return None
    nodes = max(1, config.trainer.num_nodes)
    return state_bytes(FP32 * count.total, count.total, nodes, optimizer=optimizer_bytes(config.optimizer)).total


def _path_errors(config: RunConfig) -> Iterator[BadInputError]:
    key, given = "strategy.offload_path", config.strategy.offload_path
    if given is None:
        yield ConfigError(key, None, "give a folder on the NVMe disk", "strategy.offload=nvme writes to one")
        return
    path = Path(given).expanduser()
    if not path.is_dir():
        reason = "this is no folder" if path.exists() else "nothing is there"
        yield ConfigError(key, given, "make the folder, or give another", reason)
        return
    if not _writable(path):
        yield ConfigError(key, given, "give a folder that can be written", "it cannot be written")
        return
    needed, free = offloaded_bytes(config), shutil.disk_usage(path).free
    if needed is not None and needed > free:
        reason = (
            f"the optimizer state of {world_size(config) // config.trainer.num_nodes} processes takes "
            f"{needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        )
        yield ConfigError(key, given, "give a larger disk, or use strategy.offload=cpu", reason)


def _writable(folder: Path) -> bool:
    """Tried, not asked: permissions say nothing of a read-only mount, nor to root."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError:
        return False
    return True


def compiler_errors() -> list[BadInputError]:
    """What is missing for the file access that DeepSpeed compiles: a compiler, Python's headers, ninja, libaio."""
    return list(_compiler_errors())


def _compiler_errors() -> Iterator[BadInputError]:
    key, value = "strategy.offload", "nvme"
    cxx = compiler()
    if cxx is None:
        yield from missing_compiler(key, value, COMPILES)
    yield from missing_headers(key, value, COMPILES)
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        yield ConfigError(key, value, "install it: pip install ninja", f"{COMPILES}, and there is no ninja")
    if cxx is not None and not _has_libaio(cxx):
        fix = "install libaio (Debian and Ubuntu: apt-get install libaio-dev; Fedora: libaio-devel)"
        yield ConfigError(key, value, fix, "DeepSpeed reads and writes through libaio, which is not here")


def _has_libaio(cxx: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        program = [cxx, "-x", "c++", "-", "-laio", "-o", str(Path(folder) / "program")]
        done = subprocess.run(
            bound(program), input=AIO_PROGRAM, text=True, capture_output=True, timeout=COMPILE_TIMEOUT_S
        )
    return done.returncode == 0
