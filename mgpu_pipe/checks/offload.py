"""Checks of this machine for DeepSpeed and NVMe offload, without importing torch or DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mgpu_pipe.architectures.formulas.kept_memory import FP32, optimizer_bytes, state_bytes
from mgpu_pipe.architectures.formulas.parameters import count_parameters
from mgpu_pipe.checks.devices import compiler, missing_compiler, missing_headers
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.resolve import device_type, devices_per_node
from mgpu_pipe.config.schema import (
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    StrategyConfig,
    TrainerConfig,
)
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.system.child_process import bound
from mgpu_pipe.system.local_files import exists, expand_home, is_folder

COMPILE_TIMEOUT_S = 60
COMPILES = "DeepSpeed compiles an extension"
AIO_PROGRAM = "#include <libaio.h>\nint main() { return io_destroy(0) == 1; }\n"


def offload_errors(config: RunConfig) -> list[BadInputError]:
    """Errors of everything that the deepspeed engine and this configuration's offload lack."""
    errors: list[BadInputError] = []
    if importlib.util.find_spec("deepspeed") is None:
        reason = "DeepSpeed is not installed"
        errors.append(ConfigError("strategy.engine", "deepspeed", "install it: pip install deepspeed", reason))
    if config.strategy.offload == "nvme":
        nodes = max(1, config.trainer.num_nodes)
        needed = offloaded_bytes(config.model, config.objective, config.optimizer, nodes)
        errors += [*_path_errors(config.strategy, config.trainer, needed), *compiler_errors()]
        if device_type(config.trainer) == "cuda" and not _has_cuda_headers():
            reason = "DeepSpeed compiles its file access against CUDA's headers"
            errors.append(ConfigError("strategy.offload", "nvme", "install the CUDA toolkit, or set CUDA_HOME", reason))
    return errors


def _has_cuda_headers() -> bool:
    """Whether the CUDA toolkit is where torch's extension builder looks for it."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return bool(named or shutil.which("nvcc") or is_folder(Path("/usr/local/cuda")))


def offloaded_bytes(
    model: ModelConfig, objective: ObjectiveConfig, optimizer: OptimizerConfig, nodes: int
) -> int | None:
    """Bytes on disk of all ranks of one node; None if the model's size is unknown without torch.

    Each parameter has an fp32 master weight, an fp32 gradient and the optimizer's state.
    """
    fields = {**resolved_fields(model), **objective.model_fields()}
    count = count_parameters(fields, description(objective.name).model_class)
    if count is None:
        return None
    return state_bytes(FP32 * count.total, count.total, nodes, optimizer=optimizer_bytes(optimizer)).total


def _path_errors(strategy: StrategyConfig, trainer: TrainerConfig, needed: int | None) -> Iterator[BadInputError]:
    """Errors of the folder for offloaded state, of ``needed`` bytes a node; None where they are not known."""
    key, folder = "strategy.offload_path", strategy.offload_path
    if folder is None:
        yield ConfigError(key, None, "give a folder on the NVMe disk", "strategy.offload=nvme writes to one")
        return
    path = expand_home(folder)
    if not is_folder(path):
        reason = "it is not a folder" if exists(path) else "no such folder"
        yield ConfigError(key, folder, "make the folder, or give another", reason)
        return
    if not _writable(path):
        yield ConfigError(key, folder, "give a folder that can be written", "it cannot be written")
        return
    free = shutil.disk_usage(path).free
    if needed is not None and needed > free:
        reason = (
            f"the optimizer state of {devices_per_node(trainer, strategy)} processes takes "
            f"{needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        )
        yield ConfigError(key, folder, "give a larger disk, or use strategy.offload=cpu", reason)


def _writable(folder: Path) -> bool:
    """Whether a file can be written there, by writing one: permissions do not show a read-only mount, nor bind root."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError:
        return False
    return True


def compiler_errors() -> Iterator[BadInputError]:
    """Errors of missing tools for DeepSpeed's compiled file access: a compiler, Python's headers, ninja, libaio."""
    key, value = "strategy.offload", "nvme"
    cxx = compiler()
    if cxx is None:
        yield from missing_compiler(key, value, COMPILES)
    yield from missing_headers(key, value, COMPILES)
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        yield ConfigError(key, value, "install it: pip install ninja", f"{COMPILES}, and ninja is not installed")
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
