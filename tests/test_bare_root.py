"""The script that makes a bare root, as far as it can be tried without making one."""

from __future__ import annotations

import os
import subprocess

from tests.support.command import REPOSITORY
from tests.support.needs import NOBODY

SCRIPT = REPOSITORY / "scripts" / "bare_root"


def test_it_is_a_script_that_tells_how_to_use_it() -> None:
    assert os.access(SCRIPT, os.X_OK)
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert "python3, python3-venv, make" in done.stdout and "--with" in done.stdout


def test_only_root_may() -> None:
    user = NOBODY if os.geteuid() == 0 else None
    with SCRIPT.open() as script:  # nobody may not read the folder
        done = subprocess.run(["bash", "-s"], stdin=script, cwd="/", user=user, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "use sudo" in done.stderr
