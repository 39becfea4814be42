"""Every objective under every strategy. Oracle: its plain ``reference_loss`` of transformers' own model in one process.

The samples differ in length; in every third step one of them counts nothing. Of rows with pictures, half have none in
the first step, all have none in the second, some have several in the third.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_pipe.config import plugins
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.training.strategy import EngineStrategy
from mgpu_pipe.verify.certificate import Worst, worst_of
from mgpu_pipe.verify.comparison import compare
from tests.objectives.contracts import CONTRACTS
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.verify.support import composed, small_run, verified

GIVEN = ("logger=none", "trainer.progress=off")
QUANTITIES = ["initial weights", "loss", "gradient norm", "gradient", "weights"]
CELLS = [cell for name, contract in CONTRACTS.items() for cell in contract.parameters(name)]


def test_no_objective_is_left_out() -> None:
    words = {word for contract in CONTRACTS.values() for word in contract.words.split()}
    tried = {composed(word).objective.name for word in words if word.startswith("objective=")}
    assert tried == set(plugins.OBJECTIVES) - {"causal_lm"}, "tests/strategies tries that of all families"


@pytest.mark.parametrize(("name", "processes", "words"), CELLS)
def test_every_strategy_is_one_process(name: str, processes: int, words: list[str]) -> None:
    contract = CONTRACTS[name]
    steps = contract.bf16_steps if "precision=bf16" in words else 3
    config = small_run(*GIVEN, *contract.words.split(), *words, f"trainer.devices={processes}", steps=steps)
    packing = [word for word in contract.words.split() if word.startswith("data.packing=")]
    assert packing in ([], [f"data.packing={config.data.packing}"])
    worst = run_processes(processes, verified, config)[0]
    assert [measured.quantity for measured in worst] == QUANTITIES
    assert [measured for measured in worst if not measured.passed] == []


def spoiled(config: RunConfig, target: str) -> list[Worst]:
    """Measured errors where each process multiplies the gradient of a module's weight by 1.001."""

    def spoil(strategy: EngineStrategy) -> None:
        module: Any = strategy.objective.model.get_submodule(target)

        def on_first_forward(_: torch.nn.Module, __: Any) -> None:
            handle.remove()
            module.weight.register_hook(lambda gradient: gradient * 1.001)

        handle = module.register_forward_pre_hook(on_first_forward)

    return worst_of(compare(config, on_start=spoil))


@pytest.mark.parametrize("name", one_in(5, [name for name, contract in CONTRACTS.items() if contract.target]))
def test_a_planted_error_is_found(name: str) -> None:
    contract = CONTRACTS[name]
    config = small_run(*GIVEN, *contract.words.split(), "trainer.devices=2", "strategy=fsdp")
    worst = run_processes(2, spoiled, config, contract.target)[0]
    found = {measured.quantity: measured for measured in worst if not measured.passed}
    assert found["gradient"].where == f"{contract.target}.weight"
