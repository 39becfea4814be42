"""A model that cannot fit is refused before the start. Oracle: bytes a parameter, by hand."""

from __future__ import annotations

import pytest

from mgpu_pipe.checks import memory
from mgpu_pipe.checks.memory import least_state, memory_errors
from mgpu_pipe.config import hardware, resolve
from mgpu_pipe.config.compose import compose
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.topology import BatchPlan, ParallelDims

PARAMETERS = 8_030_261_248
"""Of Llama 3 8B, by its publisher's files."""
ROOM = 80 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs, the last of them smaller."""
    monkeypatch.setattr(hardware, "_driver_gpus", lambda: 8)
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(resolve, "gpu_capability", lambda: (9, 0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(memory, "used_memory", lambda: {0: (0, 2 * ROOM), 7: (0, ROOM)})


def said(*overrides: str, elsewhere: bool = False) -> list[str]:
    config, _ = compose(["model=llama3_8b", *overrides])
    dims = ParallelDims.resolve(config.strategy, world_size(config))
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    return [str(error) for error in memory_errors(config, dims, plan, elsewhere)]


@pytest.mark.parametrize(
    ("overrides", "a_parameter"),
    [
        (("strategy=single",), 16),
        (("strategy=ddp", "trainer.devices=8"), 16),
        (("strategy=fsdp", "trainer.devices=8"), 2),
        (("strategy=hsdp", "strategy.dp_replicate=2", "trainer.devices=8"), 4),
        (("strategy=tp", "trainer.devices=4"), 4),
        (("strategy=zero1", "trainer.devices=8"), 2 + 12 / 8),
        (("strategy=zero3", "trainer.devices=8"), 14 / 8),
        (("strategy=single", "optimizer=adamw_bf16"), 12),
        (("strategy=single", "precision=bf16_true"), 8),
        (("strategy=single", "optimizer=muon"), 8),
        (("strategy=single", "model.freeze=['model.embed_tokens.*']"), 4),
    ],
)
def test_the_least_that_a_rank_keeps(overrides: tuple[str, ...], a_parameter: float) -> None:
    config, _ = compose(["model=llama3_8b", *overrides])
    kept = least_state(config, ParallelDims.resolve(config.strategy, world_size(config)))
    assert kept is not None and kept.total == pytest.approx(a_parameter * PARAMETERS, rel=1e-6)


def test_a_run_that_cannot_fit_is_refused_with_what_would_help() -> None:
    (error,) = said("strategy=single")
    assert error.startswith(
        "strategy.name=single: a rank keeps at least 119.7 GiB (weights 29.9 GiB, gradients 29.9 GiB, optimizer "
        "59.8 GiB), and its GPU has 80.0 GiB; try strategy=fsdp trainer.devices=2 (saves about 59.8 GiB), "
    )
    assert "optimizer=adamw_bf16 (saves about 29.9 GiB)" in error and "\n" not in error
    (error,) = said("strategy=ddp", "trainer.devices=8")
    assert "try strategy=fsdp (saves about 104.7 GiB)" in error


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy=fsdp", "trainer.devices=8"),
        ("strategy=zero3_cpu",),
        ("trainer.accelerator=cpu",),
        ("launch=slurm",),
        ("peft=lora",),
    ],
)
def test_what_may_fit_or_is_not_known_is_not_refused(overrides: tuple[str, ...]) -> None:
    assert said(*overrides) == []


def test_nothing_is_refused_for_a_machine_elsewhere_or_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("strategy=single", elsewhere=True) == []
    monkeypatch.setattr(memory, "used_memory", dict)
    assert said("strategy=single") == []
