"""What is said of GPUs, network interfaces and missing packages before a run starts; a driver is played by an object in
its library's place."""

from __future__ import annotations

import functools
import socket
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu_pipe.checks import check_sizes, devices
from mgpu_pipe.checks.devices import age_errors, device_errors, device_notices, numerics_errors
from mgpu_pipe.checks.notices import OLDEST_TORCH
from mgpu_pipe.checks.preflight import preflight, preflight_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.models import fields
from mgpu_pipe.system import hardware
from tests.support.command import REPOSITORY

GIB = 1 << 30
CACHED = (hardware._nvml, hardware._driver_gpus, hardware._torch_version_file)


class Driver:
    """NVML of a machine with ``used`` bytes taken of the 80 GiB of each GPU; ``MIG-a`` is cut from the last GPU."""

    def __init__(self, used: tuple[int, ...], *capabilities: tuple[int, int], error: int = 0) -> None:
        self.used, self.error, self.is_cut = used, error, False
        self.capabilities = capabilities or ((9, 0),) * len(used)

    def nvmlInit_v2(self) -> int:
        return self.error

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.used)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, device: Any) -> int:
        device._obj.value = number + 1
        return 0

    def nvmlDeviceGetUUID(self, device: Any, uuid: Any, length: int) -> int:
        uuid.value = f"GPU-{device.value - 1}a2b".encode()
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, device: Any) -> int:
        device._obj.value = 99
        return 0 if name == b"MIG-a" else 6

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, instance: Any, device: Any) -> int:
        device._obj.value = len(self.used)
        return 0

    def nvmlDeviceGetIndex(self, device: Any, number: Any) -> int:
        number._obj.value = device.value - 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.used, memory._obj.total = self.used[device.value - 1], 80 * GIB
        return 0

    def nvmlDeviceGetName(self, device: Any, name: Any, length: int) -> int:
        name.value = b"NVIDIA H100 80GB HBM3" if self.capabilities[device.value - 1] == (9, 0) else b"Tesla T4"
        return 0

    def nvmlDeviceGetMigMode(self, device: Any, current: Any, pending: Any) -> int:
        current._obj.value = int(self.is_cut)
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.capabilities[device.value - 1]
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives this machine a driver, or none."""

    def no_library(name: str) -> None:
        raise OSError(name)

    def have(driver: Driver | None, torch_built_for_cuda: bool = True) -> None:
        for cached in CACHED:
            cached.cache_clear()
        monkeypatch.setattr(hardware.ctypes, "CDLL", no_library if driver is None else lambda name: driver)
        monkeypatch.setattr(hardware, "torch_has_cuda", lambda: torch_built_for_cuda)

    for variable in ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    yield have
    monkeypatch.undo()
    for cached in CACHED:
        cached.cache_clear()


@functools.cache
def composed(*words: str) -> RunConfig:
    return compose([*words])[0]


def errors(*words: str) -> list[str]:
    config = composed(*words)
    devices = device_errors(config.strategy, config.trainer, joined=False, elsewhere=False)
    return [str(error) for error in [*devices, *age_errors(config.model, config.precision, config.trainer)]]


def notices(*words: str) -> list[str]:
    return [text for _, text in device_notices(composed(*words).trainer)]


def test_why_no_gpu_can_be_used_is_said(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unseen, broken = "the NVIDIA driver sees no device", "the NVIDIA driver does not answer (NVML error 18)"
    for driver, built, visible, why in (
        (None, True, None, "this machine has no NVIDIA driver"),
        (None, False, None, "the installed torch is built without CUDA"),
        (Driver(()), True, None, unseen),
        (Driver((0,), error=18), True, None, broken),
        (Driver((0, 0)), True, "7", "CUDA_VISIBLE_DEVICES=7 shows none of the driver's 2"),
    ):
        machine(driver, built)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        (error,) = errors("trainer.accelerator=cuda")
        fix = "use trainer.accelerator=cpu, or install torch for CUDA and give the process a GPU"
        assert error == f"trainer.accelerator=cuda: torch can use no GPU here: {why}; {fix}"
        told = [f"runs on CPU: {why}"] if built and why != "this machine has no NVIDIA driver" else []
        assert notices() == told, "auto does not fall back to the CPU in silence"
        assert notices("trainer.accelerator=cpu") == []


def test_a_gpu_that_others_use_is_named(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(Driver((GIB, 30 * GIB, 60 * GIB)))
    told = notices("strategy=ddp")
    assert [text.partition(" (")[0] for text in told] == [
        "GPU 1 is in use: other processes hold 30.0 of its 80.0 GiB",
        "GPU 2 is in use: other processes hold 60.0 of its 80.0 GiB",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert notices("strategy=ddp") == told[1:]
    assert errors("strategy=ddp") == []


def test_types_and_kernels_that_a_gpu_is_too_old_for_are_refused(machine: Any) -> None:
    bf16, flash = ("precision=bf16",), ("model.attn_implementation=flash_attention_2",)
    machine(Driver((0,), (7, 5)))
    has = "needs a GPU of compute capability 8.0 or higher, and this one has 7.5"
    assert errors(*bf16) == [f"precision.name=bf16: bf16 {has}; use fp16 or fp32"]
    assert errors(*flash) == [f"model.attn_implementation=flash_attention_2: flash-attn {has}; use auto"]
    assert errors() == errors("precision=fp16") == []
    machine(Driver((0,), (8, 0)))
    assert errors(*bf16, *flash) == []


def test_flash_attention_3_is_used_where_all_it_needs_is_there(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        return "".join(map(str, numerics_errors(composed("model.flash_attention=fa3"))))

    machine(Driver((0,), (9, 0)))
    asked = "model.flash_attention=fa3: "
    assert refused() == f"{asked}the package flash-attn-3 is not installed; use fa2"
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert refused() == ""
    machine(Driver((0,), (10, 0)))
    assert refused() == f"{asked}it needs a GPU of compute capability 9.0, and this one has 10.0; use fa2"
    machine(None)
    assert refused() == f"{asked}it needs a GPU of compute capability 9.0, and this machine has no GPU; use fa2"


def test_interfaces_that_do_not_exist_are_refused(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(Driver((0, 0)))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])
    on_cpu, on_gpus = ("trainer.accelerator=cpu", "strategy=ddp", "trainer.devices=2"), ("strategy=ddp",)
    fix = "it means none of this machine's network interfaces; use one of lo, eth0, eth1, or unset it"
    for variable, told, words, right in (
        ("GLOO_SOCKET_IFNAME", "eth", on_cpu, False),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", on_cpu, True),
        ("NCCL_SOCKET_IFNAME", "ib", on_gpus, False),
        ("NCCL_SOCKET_IFNAME", "eth", on_gpus, True),
        ("NCCL_SOCKET_IFNAME", "=eth", on_gpus, False),
        ("NCCL_SOCKET_IFNAME", "=eth1", on_gpus, True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", on_gpus, False),
        ("NCCL_SOCKET_IFNAME", "^lo", on_gpus, True),
        ("NCCL_SOCKET_IFNAME", "ib", on_cpu, True),
        ("NCCL_SOCKET_IFNAME", "ib", ("strategy=single",), True),
    ):
        with monkeypatch.context() as only:
            only.setenv(variable, told)
            assert errors(*words) == ([] if right else [f"{variable}={told}: {fix}"]), told


def test_an_interpreter_without_docstrings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("trainer.accelerator=cpu")
    for level in (0, 1):
        monkeypatch.setattr(fields, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=level)))
        assert preflight_errors(config) == []
    monkeypatch.setattr(fields, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    (error,) = preflight_errors(config)
    assert str(error).startswith("PYTHONOPTIMIZE=2: transformers reads docstrings, which it removes; unset it")


@pytest.mark.parametrize(
    ("visible", "gpu", "numbers"),
    [
        (None, "Tesla T4", [0, 1]),
        ("1", "NVIDIA H100 80GB HBM3", [1]),
        (" 1, 0", "NVIDIA H100 80GB HBM3", [0, 1]),
        ("GPU-1a2b", "NVIDIA H100 80GB HBM3", [1]),
        ("GPU-1", "NVIDIA H100 80GB HBM3", [1]),
        ("GPU-0a2b,GPU-1a2b", "Tesla T4", [0, 1]),
        ("MIG-a", "NVIDIA H100 80GB HBM3", []),
        ("GPU-7", None, []),
        ("MIG-b", None, []),
        ("", None, []),
        ("1,1", None, []),
    ],
)
def test_the_gpus_that_are_asked_are_the_visible_gpus(
    machine: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: str | None, numbers: list[int]
) -> None:
    machine(Driver((0, 0), (7, 5), (9, 0)))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    capabilities = {"Tesla T4": (7, 5), "NVIDIA H100 80GB HBM3": (9, 0), None: None}
    assert (hardware.gpu_name(), hardware.gpu_capability()) == (gpu, capabilities[gpu])
    assert list(hardware.used_memory()) == numbers


def test_a_gpu_that_is_cut_into_instances_has_another_name(machine: Any) -> None:
    driver = Driver((0,))
    machine(driver)
    assert hardware.gpu_name() == "NVIDIA H100 80GB HBM3"
    driver.is_cut = True
    assert hardware.gpu_name() == "NVIDIA H100 80GB HBM3 MIG"


def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("trainer.accelerator=cpu")
    assert "torch" not in [notice.key for notice in preflight(config)]
    assert f'"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]},' in (REPOSITORY / "pyproject.toml").read_text(
        encoding="utf-8"
    )
    monkeypatch.setattr(
        hardware, "_torch_version_file", lambda: "__version__ = '2.9.1+cpu'\ncuda: Optional[str] = None\n"
    )
    (notice,) = (notice for notice in preflight(config) if notice.key == "torch")
    assert notice.text.startswith("2.9 is older than 2.13: ") and notice.text.endswith("install torch>=2.13")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("_has_libaio", "install libaio (Debian and Ubuntu: apt-get install libaio-dev"),
        ("_has_cuda_headers", "install the CUDA toolkit, or set CUDA_HOME"),
        ("has_python_headers", "install them (Debian and Ubuntu: apt-get install python3-dev"),
        ("compiler", "install one (Debian and Ubuntu: apt-get install g++), or set CXX"),
    ],
)
def test_what_is_missing_is_named(missing: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = compose(["strategy=zero3_nvme", f"strategy.offload_path={tmp_path}", "model=llama_tiny"])
    places = (
        (check_sizes, "_has_libaio"),
        (check_sizes, "_has_cuda_headers"),
        (check_sizes, "compiler"),
        (devices, "has_python_headers"),
    )
    for place, name in places:
        found = "there" if name != missing else None
        monkeypatch.setattr(place, name, lambda *_, found=found: found)
    monkeypatch.setattr(check_sizes, "device_type", lambda _: "cuda")
    (error,) = check_sizes.offload_errors(config)
    assert str(error).startswith("strategy.offload=nvme: ") and said in str(error)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("compiler", "Python's headers (Python.h) are not here; install them (Debian and Ubuntu: apt-get install"),
        ("headers", "this machine has no C++ compiler; install one (Debian and Ubuntu: apt-get install g++)"),
    ],
)
def test_what_torch_compile_lacks_is_named(there: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "compiler", lambda _: "c++" if there == "compiler" else None)
    monkeypatch.setattr(devices, "has_python_headers", lambda: there == "headers")
    config, _ = compose(["model.compile=true", "trainer.accelerator=cpu"])
    (error,) = numerics_errors(config)
    assert str(error).startswith("model.compile=true: ") and said in str(error)


def test_headers_are_looked_for_where_builds_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path), "platinclude": str(tmp_path)})
    assert not devices.has_python_headers()
    (tmp_path / "Python.h").touch()
    assert devices.has_python_headers()
