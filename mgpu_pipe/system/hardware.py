"""Hardware of this machine, found without torch: GPUs, bf16 units, cores and memory; threads of a worker."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

BF16_CPU_FLAGS = {"amx_bf16", "avx512_bf16"}
FP16_CPU_FLAGS = {"amx_fp16", "avx512_fp16"}


class _Memory(ctypes.Structure):
    """NVML's nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@functools.lru_cache(maxsize=None)
def _nvml() -> tuple[Any, str]:
    """NVIDIA's management library, initialised; or None and the reason."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, "this machine has no NVIDIA driver"
    error = nvml.nvmlInit_v2()
    return (None, f"the NVIDIA driver does not answer (NVML error {error})") if error else (nvml, "")


@functools.lru_cache(maxsize=None)
def _driver_gpus() -> int:
    """Number of GPUs of the NVIDIA driver (NVML's nvmlDeviceGetCount_v2); 0 without a driver."""
    nvml, count = _nvml()[0], ctypes.c_uint(0)
    return int(count.value) if nvml is not None and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0


def gpu_count() -> int:
    """Number of GPUs usable by a process started here; reads ``CUDA_VISIBLE_DEVICES`` like CUDA."""
    return len(_visible_gpus())


def _visible_gpus() -> list[str]:
    """Names of the GPUs usable by a process started here, first to last: a number of the driver, or a UUID."""
    driver = _driver_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or driver == 0:
        return [str(number) for number in range(driver)]
    usable: list[str] = []
    for entry in visible.split(","):
        name = entry.strip()
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < driver):
            break  # CUDA ignores everything from the first invalid entry on
        if name in usable:
            return []  # CUDA shows no device when one is listed twice
        usable.append(name)
    return usable


def _gpu_number(nvml: Any, name: str) -> int | None:
    """The driver's number of a visible GPU, of an instance the number of its GPU; None if NVML does not know it."""
    if name.isdigit():
        return int(name)
    device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    if name.startswith("MIG-"):
        instance, number = ctypes.c_void_p(), ctypes.c_uint(0)
        failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(instance)) != 0
        failed = failed or nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance, ctypes.byref(device)) != 0
        failed = failed or nvml.nvmlDeviceGetIndex(device, ctypes.byref(number)) != 0
        return None if failed else int(number.value)
    for index in range(_driver_gpus()):  # CUDA takes the first characters of a UUID for it
        known = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
        if known and nvml.nvmlDeviceGetUUID(device, uuid, len(uuid)) == 0 and uuid.value.decode().startswith(name):
            return index
    return None


def _first_gpu() -> tuple[Any, ctypes.c_void_p] | None:
    """NVML and its handle of the first visible GPU; None without one."""
    nvml, device = _nvml()[0], ctypes.c_void_p()
    number = None if nvml is None else next((_gpu_number(nvml, name) for name in _visible_gpus()), None)
    if number is None or nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) != 0:
        return None
    return nvml, device


def why_no_gpu() -> str:
    """Reason why :func:`usable_gpus` is 0, in words."""
    if not torch_has_cuda():
        return "the installed torch is built without CUDA"
    if not _driver_gpus():
        return _nvml()[1] or "the NVIDIA driver sees no device"
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')} shows none of the driver's {_driver_gpus()}"


def used_memory() -> dict[int, tuple[int, int]]:
    """Used bytes (by all users) and total bytes of each visible GPU, by the driver's number; without MIG instances."""
    nvml, bytes_by_gpu = _nvml()[0], dict[int, tuple[int, int]]()
    names = [] if nvml is None else [name for name in _visible_gpus() if not name.startswith("MIG-")]
    numbers = [_gpu_number(nvml, name) for name in names]
    for number in sorted(number for number in numbers if number is not None):
        device, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) != 0:
            continue
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
            bytes_by_gpu[number] = (int(memory.used), int(memory.total))
    return bytes_by_gpu


@functools.lru_cache(maxsize=None)
def _torch_version_file() -> str:
    """Text of the installed torch's version file, read without importing torch; empty without torch."""
    spec = PathFinder.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    try:
        return (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA or ROCm."""
    return bool(re.search(r"^(cuda|hip)\b[^=\n]*=\s*['\"]", _torch_version_file(), flags=re.MULTILINE))


def torch_version() -> tuple[int, ...]:
    """Major and minor version of the installed torch; empty where it is not known."""
    match = re.search(r"^__version__\b[^=\n]*=\s*['\"](\d+)\.(\d+)", _torch_version_file(), flags=re.MULTILINE)
    return tuple(map(int, match.groups())) if match else ()


def usable_gpus() -> int:
    """Number of GPUs that the installed torch can use."""
    return gpu_count() if torch_has_cuda() else 0


def why_no_flash_attention_3() -> str:
    """Reason why torch cannot use FlashAttention 3, in words; empty if it can."""
    torch = PathFinder.find_spec("torch")
    folders = [] if torch is None else torch.submodule_search_locations or []
    if not any((Path(folder) / "nn" / "attention" / "_fa3.py").exists() for folder in folders):
        return "the installed torch has no setting for it; it needs a newer torch"
    if PathFinder.find_spec("flash_attn_interface") is None:
        return "the package flash-attn-3 is not installed"
    capability = gpu_capability()
    if capability is None or capability[0] != 9:
        has = "this machine has no GPU" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        return f"it needs a GPU of compute capability 9.0, and {has}"
    return ""


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the first visible GPU (NVML's nvmlDeviceGetCudaComputeCapability); None without one."""
    first, major, minor = _first_gpu(), ctypes.c_int(0), ctypes.c_int(0)
    if first is None:
        return None
    nvml, device = first
    failed = nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) != 0
    return None if failed else (major.value, minor.value)


def gpu_name() -> str | None:
    """Name of the first visible GPU, e.g. ``NVIDIA H100 80GB HBM3``, ``... MIG`` if cut, or None."""
    first, name = _first_gpu(), ctypes.create_string_buffer(96)
    if first is None:
        return None
    nvml, device = first
    if nvml.nvmlDeviceGetName(device, name, len(name)) != 0:
        return None
    current, pending = ctypes.c_uint(0), ctypes.c_uint(0)
    knows = nvml.nvmlDeviceGetMigMode(device, ctypes.byref(current), ctypes.byref(pending)) == 0
    return f"{name.value.decode(errors='replace')}{' MIG' if knows and current.value else ''}"


def cpu_name() -> str:
    """Model of the processor, from ``/proc/cpuinfo``, else its architecture."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return models[0] if models else platform.machine()


@functools.lru_cache(maxsize=None)
def _cpu_flags() -> frozenset[str]:
    """Features of the processor, from ``/proc/cpuinfo``."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(flags.split())


@functools.lru_cache(maxsize=None)
def cpu_is_fast_at_bf16() -> bool:
    """Whether the processor has bf16 matrix or vector units."""
    return not BF16_CPU_FLAGS.isdisjoint(_cpu_flags())


def cpu_is_fast_at_fp16() -> bool:
    """Whether the processor has fp16 matrix or vector units."""
    return not FP16_CPU_FLAGS.isdisjoint(_cpu_flags())


def cpu_cores() -> int:
    """Cores that this process may use: those of its affinity mask, limited by the quota of its control groups."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


GROUPS, MEMBERSHIPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Mount point of the control groups, and the kernel's list of this process's groups."""


def _control_groups(controller: str, groups: Path, own_groups: Path) -> list[Path]:
    """Folders of this process's control groups and ancestors; version 1 has a hierarchy for each ``controller``."""
    try:
        memberships = [line.split(":", 2) for line in own_groups.read_text().splitlines()]
    except OSError:
        return []
    folders = []
    for _, controllers, path in memberships:
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [groups / controllers, groups / controller] if controllers else [groups]
        for mount in mounts:
            folder = mount / path.lstrip("/")  # missing inside a container, whose mount starts at its group
            for group in (folder, *folder.parents):
                if group != mount and mount not in group.parents:
                    break
                folders.append(group)
    return folders


@functools.lru_cache(maxsize=None)
def _cpu_quota(groups: Path = GROUPS, own_groups: Path = MEMBERSHIPS) -> float | None:
    """CPU limit of the control groups in cores (containers, batch systems), which affinity does not show; or None."""
    quotas = [_quota_of(group) for group in _control_groups("cpu", groups, own_groups)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    """CPU time limit of a control group in cores: quota over period; None without a limit."""
    try:
        words = (group / "cpu.max").read_text().split()  # version 2
    except OSError:
        try:
            words = [(group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        except OSError:
            return None
    try:
        quota, period = int(words[0]), int(words[1])
    except (IndexError, ValueError):  # "max": no limit
        return None
    return quota / period if quota > 0 and period > 0 else None


def host_memory(groups: Path = GROUPS, own_groups: Path = MEMBERSHIPS) -> int:
    """Bytes of main memory that this process may use: the machine's, or the lowest limit of its control groups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _control_groups("memory", groups, own_groups):
        for file in (group / "memory.max", group / "memory.limit_in_bytes"):
            with suppress(OSError):
                text = file.read_text().strip()
                total = min(total, int(text)) if text.isdigit() else total
    return total


def available_memory() -> int:
    """Free bytes of the machine's main memory, with what the kernel can take back from its caches."""
    with open("/proc/meminfo", encoding="ascii") as file:
        values = {name: value for name, _, value in (line.partition(":") for line in file)}
    return int(values["MemAvailable"].split()[0]) << 10


SPIN_COUNT = 1000
"""Spins of a waiting libgomp thread before it sleeps: libgomp's value if its threads outnumber the cores. Its default
of 300,000 ignores other processes; sleeping at once costs time on free cores."""
SPIN_VARIABLE = "GOMP_SPINCOUNT"
WAITING_VARIABLES = (SPIN_VARIABLE, "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class Threads:
    """Compute threads of a worker, and the rule that gave their number.

    The number depends on the cores that this process may use, never on the load: the same command computes the same
    bits on a busy and an idle machine.
    """

    per_worker: int
    rule: str


def choose_threads(configured: int | Literal["auto"], workers: int) -> Threads:
    """The configured number of threads, or this machine's usable cores divided by its workers, at least 1."""
    if configured != "auto":
        return Threads(configured, "launch.threads_per_worker")
    cores = cpu_cores()
    return Threads(max(1, cores // workers), f"usable cores / workers on this machine: {cores} / {workers}, at least 1")


def limit_threads(environment: MutableMapping[str, str]) -> None:
    """Limit threads of this process and its children to usable cores, and let waiting threads sleep soon.

    Must run before torch's import, which loads OpenMP and reads these variables. The user's settings stay. A spinning
    thread occupies the core that its siblings need on a busy machine (``benchmarks/speed/thread_waits.py``).
    """
    environment.setdefault("OMP_NUM_THREADS", str(cpu_cores()))
    if not any(name in environment for name in WAITING_VARIABLES):
        environment[SPIN_VARIABLE] = str(SPIN_COUNT)
