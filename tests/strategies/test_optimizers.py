"""Every optimizer under every strategy that takes it: from one process's checkpoint on, it is one process.

Oracle: the optimizer's own class in the plain loop. Each strategy reads the checkpoint of one process, writes it again
bit for bit, and goes on; so any strategy goes on from any other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.save_and_resume import restore_optimizer, restore_weights
from tests.strategies.test_any_to_any import contents, write
from tests.support.plain_training import plain, worst_error
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.training import LR, MUON, Case, Outcome, trained

BEFORE, AFTER = 2, 3
OWN = "tests.support.own_optimizers."
DECAYED: dict[str, Any] = {"weight_decay": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "mgpu_pipe.optim.adamw_bf16.AdamWBf16": DECAYED,
    "torch.optim.SGD": {**DECAYED, "momentum": 0.9, "nesterov": True},
    "torch.optim.Adagrad": DECAYED,
    OWN + "Counting": {},
    "torch.optim.ASGD": DECAYED,
    "torch.optim.Adadelta": DECAYED,
    "torch.optim.Adam": DECAYED,
    "torch.optim.AdamW": {**DECAYED, "amsgrad": True},
    "torch.optim.Adamax": DECAYED,
    "torch.optim.NAdam": DECAYED,
    "torch.optim.RAdam": DECAYED,
    "torch.optim.RMSprop": {"eps": 1e-4, "centered": True},
    "torch.optim.Rprop": {},
    OWN + "Lion": DECAYED,
}
QUICK = 4
OF_TENSORS: dict[str, dict[str, Any]] = {"torch.optim.Adafactor": {"weight_decay": 0.0}, OWN + "ByNorm": {}}
"""Those that need whole tensors."""
NOT_IN_ZERO = {OWN + "Counting"}


@dataclass(frozen=True)
class Way:
    """A topology, and how its cases differ."""

    dims: ParallelDims
    case: dict[str, Any] = field(default_factory=dict)

    @property
    def optimizers(self) -> dict[str, dict[str, Any]]:
        if "zero_stage" in self.case:
            return {name: options for name, options in OPTIMIZERS.items() if name not in NOT_IN_ZERO}
        cuts = self.dims.dp_shard * self.dims.tp * self.dims.cp > 1
        return OPTIMIZERS if cuts else {**OPTIMIZERS, **OF_TENSORS}


WAYS = {
    "single": Way(ParallelDims()),
    "ddp 2": Way(ParallelDims(dp_replicate=2)),
    "fsdp 3": Way(ParallelDims(dp_shard=3), {"samples": 12}),
    "hsdp 2x2": Way(ParallelDims(dp_replicate=2, dp_shard=2)),
    "tp 2": Way(ParallelDims(tp=2)),
    "pp 2": Way(ParallelDims(pp=2), {"micro_batches": 2}),
    "cp 2": Way(ParallelDims(cp=2)),
    "ep 2": Way(ParallelDims(dp_shard=2, ep=2), {"model": "mixtral"}),
    **{f"zero{stage} 2": Way(ParallelDims(dp_shard=2), {"zero_stage": stage}) for stage in (1, 2, 3)},
    "zero3_cpu 2": Way(ParallelDims(dp_shard=2), {"zero_stage": 3, "offload": "cpu"}),
}


def case_of(way: Way, optimizer: str, steps: int) -> Case:
    options = {**OPTIMIZERS, **OF_TENSORS, MUON: {**DECAYED, "adamw_lr": LR}}[optimizer]
    return Case(optimizer=optimizer, optimizer_options=options, steps=steps, layers=2, **way.case)


def alone(case: Case) -> Case:
    """The same in one process."""
    return replace(case, micro_batches=1, zero_stage=None, offload="none")


def first(way: Way, names: list[str], folder: str) -> None:
    """The checkpoint that a way starts from, of each optimizer, written by one process."""
    for name in names:
        case = alone(case_of(way, name, BEFORE))
        trained(case, ParallelDims(), on_end=lambda s: write(s, f"{folder}/{name}"))  # noqa: B023


def goes_on(way: Way, names: list[str], source: str, target: str) -> list[Outcome | str]:
    found: list[Outcome | str] = []
    for name in names:

        def restore(strategy: Any, name: str = name) -> None:
            reader = CheckpointReader(Path(source) / name / f"step-{BEFORE:08d}")
            restore_weights(reader, strategy)
            restore_optimizer(reader, strategy)
            write(strategy, f"{target}/{name}")

        try:
            found.append(trained(case_of(way, name, AFTER), way.dims, first_step=BEFORE, on_start=restore))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@functools.lru_cache(maxsize=None)
def expected(model: str, samples: int, name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    way = Way(ParallelDims(), {"model": model, "samples": samples})
    found = plain(case_of(way, name, BEFORE + AFTER))
    return {**found, "losses": found["losses"][BEFORE:], "norms": found["norms"][BEFORE:]}


def hold(way: Way, names: list[str], folder: Path) -> None:
    source, target = str(folder / "source"), str(folder / "target")
    run_processes(1, first, way, names, source)
    by_rank = run_processes(way.dims.world_size, goes_on, way, names, source, target, timeout_s=600.0)
    for index, name in enumerate(names):
        results = [rank[index] for rank in by_rank]
        assert not any(isinstance(result, str) for result in results), (name, results)
        before, after = contents(Path(source) / name), contents(Path(target) / name)
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[key]) for key, value in before.items()), name
        case = case_of(way, name, AFTER)
        worst, where = worst_error(results, expected(case.model, case.samples, name))
        assert worst <= 1, (name, where)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, ["fsdp 3", "tp 2", "zero2 2"]))
def test_an_optimizer_is_one_process_and_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    way = WAYS[name]
    hold(way, list(way.optimizers)[:QUICK], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WAYS)
def test_every_optimizer_is_one_process_and_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    hold(WAYS[name], list(WAYS[name].optimizers), tmp_path)
