"""A strategy: the mesh engine, which writes each step's gradient norm to its rank's log.

mgpu-pipe strategy=ddp strategy.engine=logged_mesh strategy.log_digits=3 trainer.devices=2 trainer.max_steps=5
"""

from __future__ import annotations

from typing import Any, cast

from logged_mesh_keys import LoggedMeshConfig
from mgpu_pipe.strategies.mesh import MeshStrategy
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.base import StepResult


class LoggedMesh(MeshStrategy):
    log_digits: int

    @classmethod
    def from_config(cls, config: RunConfig, *built: Any, **options: Any) -> Self:
        strategy = super().from_config(config, *built, **options)
        strategy.log_digits = cast(LoggedMeshConfig, config.strategy).log_digits
        return strategy

    def run_step(self, step_batch: StepBatch) -> StepResult:
        result = super().run_step(step_batch)
        print(f"step {step_batch.step + 1}: gradient norm {result.gradient_norm:.{self.log_digits}f}")
        return result
