"""What NVMe offload needs of a machine is named before launch, with the package that brings it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.config.compose import compose
from mgpu_pipe.launch import offload


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("_has_libaio", "install libaio (Debian and Ubuntu: apt-get install libaio-dev"),
        ("_has_cuda_headers", "install the CUDA toolkit, or set CUDA_HOME"),
        ("compiler", "install one (Debian and Ubuntu: apt-get install g++), or set CXX"),
    ],
)
def test_what_is_missing_is_named(missing: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = compose(["strategy=zero3_nvme", f"strategy.offload_path={tmp_path}", "model=llama_tiny"])
    for name, there in (("_has_libaio", True), ("_has_cuda_headers", True), ("compiler", "c++")):
        found = there if name != missing else None
        monkeypatch.setattr(offload, name, lambda *_, found=found: found)
    monkeypatch.setattr(offload, "device_type", lambda _: "cuda")
    (error,) = offload.offload_errors(config)
    assert str(error).startswith("strategy.offload=nvme: ") and said in str(error)
