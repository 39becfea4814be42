"""Runs that end, and save, by the clock. Nothing is measured: limits are so short, or so long, that they decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import seconds_of
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.topology import ParallelDims
from tests.support.command import column, environment, mgpu
from tests.support.processes import run_processes
from tests.support.program import run_program
from tests.support.training import Case, trained

WORDS = (
    *("model=llama_tiny", "data=synthetic", "data.synthetic.num_documents=50", "data.seq_len=32"),
    *("data.global_batch_size=4", "data.validation_fraction=0", "logger=none", "run.dir=run"),
)
STEPS = 100_000


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_a_run_whose_time_is_up_has_finished_and_goes_on_with_more(cache: Path, tmp_path: Path) -> None:
    words = (*WORDS, "scheduler=constant", f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1")
    two = ("strategy=ddp", "trainer.devices=2")
    limit = "trainer.max_time=00:00:00:01"
    out = mgpu(cache, tmp_path, *words, *two, limit)
    folder = tmp_path / "run"
    ended = summary(folder)
    assert (ended["status"], ended["max_time"]) == ("finished", "00:00:00:01")
    assert f"finished at step {ended['step']}, by trainer.max_time=00:00:00:01" in " ".join(out.split())
    assert 0 < ended["step"] < STEPS and ended["checkpoint"] == f"checkpoints/step-{ended['step']:08d}"
    state = json.loads((folder / ended["checkpoint"] / "state.json").read_text(encoding="utf-8"))
    assert state["trained_s"] > 0.5, "each process has its clock, and the first whose time is up ends the run"
    again = ("checkpoint.resume=auto",)
    done = run_program([*words, *two, limit, *again], tmp_path, environment(cache), 300)
    assert done.returncode == 0 and "this run is complete; raise trainer.max_time to continue" in done.stderr
    last = ended["step"] + 2
    mgpu(cache, tmp_path, *WORDS, "scheduler=constant", f"trainer.max_steps={last}", "trainer.max_time=null", *again)
    assert (summary(folder)["status"], summary(folder)["step"]) == ("finished", last)
    assert "max_time" not in summary(folder)
    assert list(column(folder, "train/loss")) == list(range(1, last + 1))


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "saved"), [("1e-6", [1, 2, 3]), ("1e6", [3])])
def test_saves_come_by_the_clock(minutes: str, saved: list[int], cache: Path, tmp_path: Path) -> None:
    every = (f"checkpoint.every_n_minutes={minutes}", "checkpoint.keep_last=0")
    mgpu(cache, tmp_path, *WORDS, *every, "trainer.max_steps=3", "strategy=fsdp", "trainer.devices=2")
    steps = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [int(step.name.removeprefix("step-")) for step in steps] == saved


def due_on_one_rank(case: Case, dims: ParallelDims) -> list[bool]:
    import torch.distributed as dist

    found: list[bool] = []

    def watch(strategy: Any) -> None:
        strategy.save_due = lambda: dist.get_rank() == 1 and len(found) == 1
        run_step = strategy.run_step

        def watched(step_batch: Any) -> Any:
            result = run_step(step_batch)
            found.append(result.save)
            return result

        strategy.run_step = watched

    trained(case, dims, on_start=watch)
    return found


@pytest.mark.parametrize(
    ("sizes", "options"),
    [({"dp_replicate": 2}, {}), ({"pp": 2}, {"micro_batches": 2}), ({"dp_shard": 2}, {"zero_stage": 2})],
    ids=["ddp", "pp", "zero2"],
)
def test_what_one_rank_finds_due_all_do(sizes: dict[str, int], options: dict[str, Any]) -> None:
    case, dims = Case(steps=3, layers=2, **options), ParallelDims(**sizes)
    assert run_processes(2, due_on_one_rank, case, dims) == [[False, True, False]] * 2


@pytest.mark.parametrize("text", ["12:00:00", "1h", "00:00:00:00", "-1:00:00:00", "00:00:1.5:00"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInputError) as refused:
        preflight(compose([f"trainer.max_time='{text}'"])[0])
    assert f"trainer.max_time={text}: write it as DD:HH:MM:SS" in str(refused.value)
    with pytest.raises(BadInputError, match=r"checkpoint\.every_n_minutes=0.0: use a number above 0"):
        preflight(compose(["checkpoint.every_n_minutes=0"])[0])


def test_a_time_is_days_hours_minutes_and_seconds() -> None:
    assert seconds_of("01:02:03:04") == 86400 + 7200 + 180 + 4
    assert seconds_of("00:90:00:00") == 90 * 3600
