"""Limits of time: a run leaves before its job ends, and every group has ``launch.collective_timeout``."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mgpu_pipe.training.run_clock import JOB_ENDS, _announce_job_end, _job_end, too_late
from tests.support.command import column, environment, mgpu, run_folder
from tests.support.program import run_program

TINY = ("model=llama_tiny", "data=synthetic", "data.synthetic.num_documents=50", "data.seq_len=32", "logger=none")
RUN = (*TINY, "data.global_batch_size=4", "trainer.max_steps=12", "trainer.accelerator=cpu", "run.dir=run")


@pytest.fixture(autouse=True)
def _anew() -> None:
    _job_end.cache_clear()
    _announce_job_end.cache_clear()


@pytest.mark.parametrize(("save_s", "left", "late"), [(0, 0, False), (10, 25, True), (10, 35, False), (10, -5, True)])
def test_two_saves_have_to_fit(monkeypatch: pytest.MonkeyPatch, save_s: float, left: float, late: bool) -> None:
    monkeypatch.setenv(JOB_ENDS, str(time.time() + left))
    assert too_late(save_s) is late


def test_without_a_limit_it_is_never_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_ENDS, raising=False)
    assert not too_late(1e9)


@pytest.mark.slow
def test_a_run_saves_before_it_is_too_late(tmp_path: Path, cache: Path) -> None:
    """The job's end has passed already: the run stops at a step that follows a save."""
    words = [*RUN, "strategy=ddp", "trainer.devices=2", "checkpoint.every_n_steps=2"]
    ends = {**environment(cache), JOB_ENDS: str(time.time())}
    done = run_program(words, tmp_path, ends, 300)
    assert done.returncode == 75, done.stderr[-2000:]
    folder = tmp_path / "run"
    stopped = max(column(folder, "train/loss"))
    assert any("a save takes long" in log.read_text() for log in (folder / "logs").glob("rank-*.log"))
    assert stopped < 12 and (folder / "checkpoints" / f"step-{stopped:08d}").is_dir()
    mgpu(cache, tmp_path, *words, "checkpoint.resume=auto")
    whole = run_folder(mgpu(cache, tmp_path, *words, "run.dir=whole"))
    assert column(folder, "train/loss") == column(whole, "train/loss")


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
