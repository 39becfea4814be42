"""A run's folder that an earlier version made (0.1.0, before the frame of issue 11): it goes on, is evaluated,
exported.

``earlier/run`` holds six steps of a two-rank DDP run on synthetic data, saved at step 6. What that version itself got
when it went on to step 9, and from ``eval``, stands below.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mgpu_pipe.cli.main import main
from tests.support.command import column, environment
from tests.support.program import run_program

EARLIER = Path(__file__).parent / "earlier" / "run"
LOSSES = {7: 4.165806390345097, 8: 4.155609337110368, 9: 4.168273452669382}
NORMS = {7: 0.6533013912298203, 8: 0.564572337015994, 9: 0.7745756571396628}
HELD_OUT = {6: 4.157582286843456, 9: 4.157221713016942}


def overrides(*more: str) -> list[str]:
    words = (EARLIER / "overrides.txt").read_text(encoding="utf-8").split()
    kept = [word for word in words if not word.startswith(("run.dir=", "trainer.max_steps=", "strategy="))]
    return [*kept, "trainer.max_steps=9", *more]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_goes_on_as_it_would_have(strategy: str, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(EARLIER, tmp_path / "run")
    resume = ["run.dir=run", "checkpoint.resume=auto"] if strategy == "ddp" else ["checkpoint.resume=run"]
    done = run_program(overrides(f"strategy={strategy}", *resume), tmp_path, environment(cache), 200)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / done.stdout.strip().splitlines()[-1].removeprefix("run: ")
    for name, truth in (("train/loss", LOSSES), ("train/grad_norm", NORMS), ("val/loss", HELD_OUT)):
        reached = column(folder, name)
        for step in truth.keys() & range(7, 10):
            assert reached[step] == pytest.approx(truth[step], rel=1e-5)


@pytest.mark.slow
def test_it_is_evaluated_exported_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(EARLIER, tmp_path / "run"))
    assert main(["eval", str(run)]) == 0
    assert float(capsys.readouterr().out.split()[1]) == pytest.approx(HELD_OUT[6], rel=1e-5)
    assert main(["export", str(run), "--out", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "config.json").exists()
    assert main(["report", str(run)]) == 0
    assert main(["checkpoints", "check", str(run), "--full"]) == 0
