"""Another user of the machine, who connects to gloo's ports, changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launch.launching import ROOT


def test_a_stranger_at_gloos_ports_changes_no_loss() -> None:
    if os.geteuid() != 0:
        pytest.skip("another user's process needs root")
    alone = ["unshare", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("a network of its own (unshare --net) is not allowed here")
    program = [sys.executable, "-m", "tests.launch.attacked_groups"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*alone, *program], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = {tuple(line.split()[:2]): line.split()[2:] for line in done.stdout.splitlines()}
    assert len(losses) == 6 and all(losses["alone", rank] == losses["attacked", rank] for rank in "012"), done.stdout
