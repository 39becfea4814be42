"""Weights of a run that is still saving: every rank takes them from the same step."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.training import initial_weights
from tests.checkpoint.support import save_alone
from tests.support.processes import run_processes


def _step_of(root: Path) -> int:
    """Rank 1 comes later: another step was saved meanwhile."""
    config = RunConfig()
    config.checkpoint.init_from = str(root)
    with patch.object(initial_weights, "resolve_source", return_value=root / f"step-{4 + dist.get_rank():08d}"):
        return initial_weights.weights_reader(config.checkpoint).manifest.step


def test_ranks_that_look_at_different_times_take_the_same_step(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (4, 5):
        save_alone(root, step)
    assert run_processes(2, _step_of, root) == [4, 4]
