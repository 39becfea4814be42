"""The command as a user runs it. Oracle: what the README promises of its output and exit code."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from mgpu_pipe.config.freeze import config_hash
from tests.support.program import run_program
from tests.verify.support import composed

REPOSITORY = Path(__file__).parents[2]
OPTIMIZERS = '''
import os
import torch

class Skewed(torch.optim.AdamW):
    """Updates a little differently on rank 1."""
    def step(self, closure=None):
        loss = super().step(closure)
        if os.environ.get("RANK") == "1":
            self.param_groups[0]["params"][0].data.mul_(1.001)
        return loss

class Crashing(torch.optim.AdamW):
    """Passes the trial before the start, where there is no rank."""
    def step(self, closure=None):
        if "RANK" in os.environ:
            raise ArithmeticError("the optimizer lost count")
        return super().step(closure)
'''


def run(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    return run_program(["verify", "model=llama_tiny", *overrides], tmp_path, environment, 300)


def test_a_certificate(tmp_path: Path) -> None:
    overrides = ["strategy=ddp", "trainer.devices=2", "optimizer.lr=1e-3"]
    done = run(tmp_path, *overrides)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("certificate: ")
    path = Path(last.removeprefix("certificate: "))
    assert path.parent.parent == tmp_path / "outputs" / "verify"
    values = json.loads(path.read_text())
    assert values["passed"] is True
    assert values["config_hash"] == config_hash(composed("model=llama_tiny", *overrides))
    assert (values["world_size"], values["steps"], values["topology"]["dp_replicate"]) == (2, 10, 2)
    assert values["bounds"]["loss"] == 1e-5
    assert values["versions"]["torch"]
    assert set(values["worst"]) == {"initial_weights", "loss", "gradient_norm", "gradient", "weights"}
    assert values["worst"]["gradient"]["where"].endswith((".weight", ".bias"))
    assert 0 < values["worst"]["gradient"]["error"] <= values["worst"]["gradient"]["bound"]
    assert values["shrunk"]["optimizer.lr"] == {"from": 1e-3, "to": 3e-4, "why": "the bounds hold for rates up to 3e-4"}
    assert "note: optimizer.lr=0.0003 here instead of 0.001" in done.stderr
    for quantity in ("loss", "gradient norm", "gradient", "weights"):
        assert quantity in done.stdout
    assert done.stdout.count("pass") == 5
    assert "FAIL" not in done.stdout


@pytest.mark.exhaustive
def test_a_broken_bound_names_parameter_and_step(tmp_path: Path) -> None:
    (tmp_path / "my_optimizers.py").write_text(OPTIMIZERS)
    done = run(tmp_path, "strategy=ddp", "trainer.devices=2", "optimizer._target_=my_optimizers.Skewed")
    assert done.returncode == 1, done.stderr
    assert "error: weights, model.embed_tokens.weight, step " in done.stderr
    values = json.loads(Path(done.stdout.splitlines()[-1].removeprefix("certificate: ")).read_text())
    assert values["passed"] is False
    assert values["worst"]["weights"]["passed"] is False
    assert values["worst"]["gradient"]["passed"] is True


@pytest.mark.slow
def test_a_crash_shows_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "my_optimizers.py").write_text(OPTIMIZERS)
    done = run(tmp_path, "strategy=single", "optimizer._target_=my_optimizers.Crashing")
    assert done.returncode == 1
    assert "the optimizer lost count" in done.stderr
    assert "certificate:" not in done.stdout


def test_a_bad_configuration_is_refused_before_any_process(tmp_path: Path) -> None:
    done = run(tmp_path, "strategy=ddp", "trainer.devices=3", "data.global_batch_size=8")
    assert done.returncode == 2
    assert "data.global_batch_size=8" in done.stderr
    assert not (tmp_path / "outputs").exists()
