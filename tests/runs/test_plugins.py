"""A package that adds a data source, an objective, a strategy and a configuration, installed and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import column, environment, run_folder
from tests.support.program import run_program

pytestmark = pytest.mark.slow

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "acme_training"
version = "1.0"
[project.entry-points."mgpu_pipe.data"]
acme_numbers = "acme_training:numbers"
[project.entry-points."mgpu_pipe.objectives"]
acme_halved = "acme_training:HalvedLoss"
acme_wrong = "acme_training:numbers"
acme_unfinished = "acme_training:NoLoss"
[project.entry-points."mgpu_pipe.strategies"]
acme_mesh = "acme_training:CountingMesh"
[tool.setuptools]
packages = ["acme_training", "acme_training.conf"]
[tool.setuptools.package-data]
"acme_training.conf" = ["**/*.yaml"]
"""

CODE = """
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.training.mesh import MeshStrategy


def numbers(config):
    for n in range(400):
        yield " ".join(str(n * k) for k in range(1, 40))


class HalvedLoss(CausalLMObjective):
    def micro_batch_loss(self, batch):
        return 0.5 * super().micro_batch_loss(batch)


class NoLoss(Objective):
    pass


class CountingMesh(MeshStrategy):
    steps = 0

    def run_step(self, window):
        CountingMesh.steps += 1
        print(f"acme step {CountingMesh.steps}")
        return super().run_step(window)
"""

EXPERIMENT = """# @package _global_
data: {source: acme_numbers, seq_len: 32, global_batch_size: 8, validation_max_samples: 8}
trainer: {max_steps: 3}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package was installed."""
    source, site = tmp_path_factory.mktemp("acme"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "acme_training" / "conf" / "experiment").mkdir(parents=True)
    (source / "acme_training" / "__init__.py").write_text(CODE)
    (source / "acme_training" / "conf" / "__init__.py").touch()
    (source / "acme_training" / "conf" / "experiment" / "acme.yaml").write_text(EXPERIMENT)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(site),
            str(source),
        ],
        check=True,
        capture_output=True,
    )
    return site


def run(site: Path, cache: Path, cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    known = environment(cache)
    return run_program(
        [
            "hydra.searchpath=[pkg://acme_training.conf]",
            "experiment=acme",
            "model=llama_tiny",
            "logger=none",
            *overrides,
        ],
        cwd,
        {**known, "PYTHONPATH": os.pathsep.join([str(site), known["PYTHONPATH"]])},
        200,
    )


def test_its_data_objective_strategy_and_configuration_train(site: Path, cache: Path, tmp_path: Path) -> None:
    plain = run(site, cache, tmp_path)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    extended = run(site, cache, tmp_path, "objective.name=acme_halved", "strategy.engine=acme_mesh")
    assert extended.returncode == 0, extended.stdout + extended.stderr
    folder = run_folder(extended.stdout)
    assert column(folder, "train/loss")[1] == pytest.approx(column(run_folder(plain.stdout), "train/loss")[1] / 2)
    assert "acme step 3" in (folder / "logs" / "rank-0.log").read_text()
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("name", "fix"), [("acme_wrong", "register a subclass of"), ("acme_unfinished", "define micro_batch_loss")]
)
def test_what_is_no_objective_is_refused(name: str, fix: str, site: Path, cache: Path, tmp_path: Path) -> None:
    refused = run(site, cache, tmp_path, f"objective.name={name}")
    assert refused.returncode == 2
    assert f"objective.name={name}" in refused.stderr and fix in refused.stderr
    assert "Traceback" not in refused.stderr
