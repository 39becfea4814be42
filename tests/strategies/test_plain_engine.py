"""An engine of the six abstract methods alone. Oracle: the plain one-process loop of tests/support/tiny.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.models.build import materialise
from mgpu_pipe.objectives.base import Batch
from mgpu_pipe.optim.gradients import clip_gradients, gradient_norm
from mgpu_pipe.training.step_gradients import StepVotes
from mgpu_pipe.training.strategy import EngineStrategy
from tests.strategies import test_mesh
from tests.support.processes import run_processes


class PlainEngine(EngineStrategy):
    """One process, whole weights."""

    strategy_name = "plain"

    def parallelise(self, model: torch.nn.Module) -> None:
        materialise(cast(Any, model), 5, "cpu")

    def begin_step(self, step_batch: StepBatch) -> list[Batch]:
        self.zero_gradients()
        return step_batch.micro_batches

    def forward_backward(self, parts: Sequence[Batch], step_batch: StepBatch) -> torch.Tensor:
        losses = [self.objective.micro_batch_loss(part) for part in parts]
        for loss in losses:
            loss.backward(torch.full_like(loss, 1 / step_batch.loss_divisor))
        return torch.stack(losses).sum(dtype=torch.float64).detach()

    def reduce_gradients(
        self, loss_sum: torch.Tensor, votes: StepVotes, step_batch: StepBatch
    ) -> tuple[float, float, StepVotes]:
        norm = gradient_norm(self._parameters(), self.root_device)
        return float(loss_sum) / step_batch.loss_divisor, float(norm), votes

    def clip(self, gradient_norm: float) -> None:
        if self._max_norm is not None:
            clip_gradients(self._parameters(), gradient_norm, self._max_norm)

    def run_evaluation(self, step_batch: StepBatch) -> torch.Tensor:
        return torch.stack([self.objective.evaluation_sums(part) for part in step_batch.micro_batches]).sum(0)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(self.objective.model.parameters())


def trained(max_norm: float | None) -> dict[str, Any]:
    def make(dims: Any, device: torch.device, options: object, *, materialise: object, **engine_options: Any) -> Any:
        return PlainEngine(dims, device, **engine_options)

    test_mesh.MeshStrategy = make  # type: ignore[assignment, misc]  # in a process of its own
    return test_mesh.trained("llama", 4, max_norm=max_norm)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_six_methods_are_an_engine(max_norm: float | None) -> None:
    (found,) = run_processes(1, trained, max_norm)
    expected = test_mesh.oracle("llama", max_norm)
    losses, norms = zip(*found["rows"], strict=True)
    assert losses == pytest.approx(expected["losses"], rel=1e-5) and norms == pytest.approx(expected["norms"], rel=1e-4)
    assert test_mesh.relative(test_mesh.whole(found["weights"]), test_mesh.whole(expected["weights"])) < 1e-5
    assert found["global_step"] == test_mesh.STEPS
