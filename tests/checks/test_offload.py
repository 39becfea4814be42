"""What NVMe offload needs of a machine is named before launch, with the package that brings it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from mgpu_pipe.checks import devices as numerics
from mgpu_pipe.checks import devices as toolchain
from mgpu_pipe.checks import offload
from mgpu_pipe.config.hydra.compose import compose


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
        (offload, "_has_libaio"),
        (offload, "_has_cuda_headers"),
        (offload, "compiler"),
        (toolchain, "has_python_headers"),
    )
    for place, name in places:
        found = "there" if name != missing else None
        monkeypatch.setattr(place, name, lambda *_, found=found: found)
    monkeypatch.setattr(offload, "device_type", lambda _: "cuda")
    (error,) = offload.offload_errors(config)
    assert str(error).startswith("strategy.offload=nvme: ") and said in str(error)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("compiler", "Python's headers (Python.h) are not here; install them (Debian and Ubuntu: apt-get install"),
        ("headers", "this machine has no C++ compiler; install one (Debian and Ubuntu: apt-get install g++)"),
    ],
)
def test_what_torch_compile_lacks_is_named(there: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "compiler", lambda _: "c++" if there == "compiler" else None)
    monkeypatch.setattr(toolchain, "has_python_headers", lambda: there == "headers")
    config, _ = compose(["model.compile=true", "trainer.accelerator=cpu"])
    (error,) = numerics.numerics_errors(config)
    assert str(error).startswith("model.compile=true: ") and said in str(error)


def test_headers_are_looked_for_where_builds_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path), "platinclude": str(tmp_path)})
    assert not toolchain.has_python_headers()
    (tmp_path / "Python.h").touch()
    assert toolchain.has_python_headers()
