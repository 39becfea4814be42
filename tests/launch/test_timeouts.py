"""``launch.collective_timeout`` holds for every group of processes, whoever makes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import mgpu

TIMEOUT = 77


@pytest.mark.slow
def test_every_group_has_the_timeout(cache: Path, tmp_path: Path) -> None:
    watch = ("callbacks.watch._target_=tests.support.timeouts.GroupTimeouts", f"callbacks.watch.folder={tmp_path}")
    axes = ("strategy=megatron", "strategy.tp=2", "strategy.cp=2", "trainer.devices=4")
    short = ("model=llama_tiny", "data.synthetic.num_documents=64", "trainer.max_steps=2", "checkpoint.every_n_steps=1")
    mgpu(cache, tmp_path, *watch, *axes, *short, "data=synthetic", f"launch.collective_timeout={TIMEOUT}")
    for rank in range(4):
        groups = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert {tuple(ranks) for ranks, _ in groups} >= {(0, 1, 2, 3), (rank // 2 * 2, rank // 2 * 2 + 1)}
        assert {seconds for _, seconds in groups} == {TIMEOUT}
