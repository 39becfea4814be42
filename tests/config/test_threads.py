"""Threads of a worker: as many as the usable cores allow, and none that waits by spinning.

Oracle of the waits: what torch's OpenMP itself says it took.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.runs.environment import describe_environment
from mgpu_pipe.system import threads
from mgpu_pipe.system.threads import Threads, choose_threads, limit_threads
from tests.support.command import REPOSITORY


@pytest.mark.parametrize(
    ("cores", "workers", "expected"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 2, 1), (2, 16, 1), (1, 1, 1)]
)
def test_usable_cores_are_shared_out(cores: int, workers: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cpu_cores", lambda: cores)
    config, _ = compose([])
    found = choose_threads(config.launch.threads_per_worker, workers)
    assert found.per_worker == expected
    assert f"{cores} / {workers}" in found.rule


def test_a_given_number_stands_and_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = compose(["launch.threads_per_worker=3"])
    found = choose_threads(config.launch.threads_per_worker, 4)
    assert found == Threads(3, "launch.threads_per_worker")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    recorded = json.loads(json.dumps(describe_environment(["mgpu-pipe"], found, 4)))
    assert recorded["threads_per_worker"] == 3
    assert recorded["threads_rule"] == "launch.threads_per_worker"
    assert recorded["threads_wait"] == {"GOMP_SPINCOUNT": "7"}


def test_what_the_user_set_stands() -> None:
    for own in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}):
        environment = {**own, "OMP_NUM_THREADS": "3"}
        limit_threads(environment)
        assert environment == {**own, "OMP_NUM_THREADS": "3"}


SHOW = """
from mgpu_pipe.cli import main as cli
cli.main = lambda: 0
try:
    cli.program()
except SystemExit:
    import torch
"""


@pytest.mark.parametrize("own", [{}, {"GOMP_SPINCOUNT": "300000"}])
def test_the_library_takes_it(own: dict[str, str]) -> None:
    """In the program's process, where torch is imported later than its first line."""
    kept = {name: value for name, value in os.environ.items() if name not in threads.WAITING_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**kept, **own, "OMP_DISPLAY_ENV": "verbose"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    shown = dict(re.findall(r"(?:\[host\] )?(\w+) ?= ?'(.*)'", done.stderr))
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("torch was built with another OpenMP than libgomp")
    assert shown["GOMP_SPINCOUNT"] == own.get("GOMP_SPINCOUNT", str(threads.SPIN_COUNT))
