"""A model that cannot fit is refused before the start. Oracle: bytes a parameter, by hand."""

from __future__ import annotations

import re

import pytest

from mgpu_pipe.checks import memory
from mgpu_pipe.checks.memory import memory_errors, min_state_bytes
from mgpu_pipe.config import resolve
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.system import hardware
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
    kept = min_state_bytes(config, ParallelDims.resolve(config.strategy, world_size(config)))
    assert kept is not None and kept.total == pytest.approx(a_parameter * PARAMETERS, rel=1e-6)


def test_a_run_that_cannot_fit_is_refused_with_what_would_help() -> None:
    (error,) = said("strategy=single")
    assert error.startswith(
        "strategy.name=single: a rank keeps at least 119.7 GiB (weights 29.9 GiB, gradients 29.9 GiB, optimizer "
        "59.8 GiB), and its GPU has 80.0 GiB; try strategy=fsdp trainer.devices=2 (saves about 59.8 GiB)"
    )
    assert "adamw_bf16" not in error and "\n" not in error  # 89.7 GiB are left with it
    (error,) = said("strategy=ddp", "trainer.devices=8")
    assert "try strategy=fsdp (saves about 104.7 GiB)" in error


@pytest.mark.parametrize("model", ["llama32_1b", "llama3_8b", "llama3_70b", "mixtral_8x7b"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_advised_fits_by_the_same_formula(monkeypatch: pytest.MonkeyPatch, model: str, device: str) -> None:
    monkeypatch.setattr(memory, "used_memory", lambda: dict.fromkeys(range(8), (0, ROOM)))
    monkeypatch.setattr(memory, "host_memory", lambda: 24 << 30)
    strategies = ("single", "ddp trainer.devices=8", "fsdp trainer.devices=8", "zero1 trainer.devices=8")
    strategies += ("hsdp strategy.dp_replicate=4 trainer.devices=8", "megatron strategy.tp=2 trainer.devices=4")
    for strategy in strategies:
        words = [f"model={model}", f"trainer.accelerator={device}", *f"strategy={strategy}".split()]
        for error in said(*words):
            advice = error.rpartition("; ")[2]
            settings = re.findall(r"(?:try |, )([a-z][^(]*) \(saves", advice)
            assert bool(settings) != advice.startswith("use a smaller model, or "), error
            for setting in settings:
                assert said(*words, *setting.split()) == [], (error, setting)


def test_what_fits_nowhere_here_says_how_much_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    (error,) = said("model=llama3_70b", "strategy=ddp", "trainer.devices=8")
    assert error.endswith("or at least 14 such GPUs with strategy=fsdp, which keep 1051.3 GiB together")
    monkeypatch.setattr(memory, "host_memory", lambda: 24 << 30)
    (error,) = said("model=llama3_70b", "strategy=ddp", "trainer.devices=8", "trainer.accelerator=cpu")
    assert error.endswith("use a smaller model, or a machine with more than 1051.3 GiB and strategy=fsdp")


@pytest.mark.parametrize(
    "overrides", [("strategy=fsdp", "trainer.devices=8"), ("strategy=zero3_cpu",), ("launch=slurm",), ("peft=lora",)]
)
def test_what_may_fit_or_is_not_known_is_not_refused(overrides: tuple[str, ...]) -> None:
    assert said(*overrides) == []


def test_nothing_is_refused_for_a_machine_elsewhere_or_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("strategy=single", elsewhere=True) == []
    monkeypatch.setattr(memory, "used_memory", dict)
    assert said("strategy=single") == []


def test_processes_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch):
    cpu = ("trainer.accelerator=cpu", "precision=fp32", "trainer.devices=8")
    monkeypatch.setattr(memory, "host_memory", lambda: 8 * 16 * PARAMETERS)
    assert said("strategy=ddp", *cpu) == []
    monkeypatch.setattr(memory, "host_memory", lambda: 8 * 16 * PARAMETERS - 1)
    (error,) = said("strategy=ddp", *cpu)
    assert "for 8 processes; try strategy=fsdp" in error and "trainer.devices=" not in error
    assert said("strategy=fsdp", *cpu) == []
