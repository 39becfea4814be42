"""When blocks are compiled without being asked for it."""

from __future__ import annotations

import pytest
import torch

from mgpu_pipe.config.compose import compose
from mgpu_pipe.parallel import compile as compilation

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("overrides", "device", "parameters", "expected"),
    [
        ((), GPU, 200_000_000, True),
        ((), GPU, 99_000_000, False),
        ((), CPU, 200_000_000, False),
        (("model.compile=false",), GPU, 200_000_000, False),
        (("model.compile=true",), CPU, 1000, True),
        (("precision=fp8",), GPU, 1000, True),
        (("strategy=zero3",), GPU, 200_000_000, False),
        (("strategy=zero2",), GPU, 200_000_000, True),
        (("strategy=pp", "strategy.pipeline.schedule=zbv"), GPU, 200_000_000, False),
        (("strategy=pp",), GPU, 200_000_000, True),
    ],
)
def test_auto_compiles_large_models_on_gpus(
    overrides: tuple[str, ...], device: torch.device, parameters: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "gpu_kernels_compile", lambda: True)
    config, _ = compose(list(overrides))
    assert compilation.compiles(config, device, parameters) is expected


def test_without_a_compiler_auto_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "gpu_kernels_compile", lambda: False)
    config, _ = compose([])
    assert compilation.compiles(config, GPU, 200_000_000) is False
