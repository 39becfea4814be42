"""The script that makes a bare root, as far as it can be tried without making one."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.command import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "bare_root"


def test_it_is_a_script_that_tells_how_to_use_it() -> None:
    assert os.access(SCRIPT, os.X_OK)
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert "python3, python3-venv, make" in done.stdout and "--with" in done.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may make a root")
def test_only_root_may() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and "use sudo" in done.stderr
