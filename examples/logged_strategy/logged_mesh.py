"""A strategy: the mesh engine, which writes each step's gradient norm to its rank's log.

mgpu-pipe strategy=ddp strategy.engine=logged_mesh trainer.devices=2 trainer.max_steps=5
"""

from __future__ import annotations

from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.base import StepResult
from mgpu_pipe.strategies.mesh import MeshStrategy


class LoggedMesh(MeshStrategy):
    def run_step(self, step_batch: StepBatch) -> StepResult:
        result = super().run_step(step_batch)
        print(f"step {step_batch.step + 1}: gradient norm {result.gradient_norm:.6f}")
        return result
