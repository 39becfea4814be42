"""Oracle: what lies under the folder, while real processes hold, leave and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HOLD = """
import sys
from pathlib import Path
from mgpu_pipe.strategies.swap_folder import claim
folder = claim(Path(sys.argv[1]), sys.argv[2])
(folder / "state").write_text("x")
print("held", flush=True)
sys.stdin.readline()
"""


def hold(root: Path, token: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(root), token], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def leave(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=30)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("mgpu-zero-*"))


def test_a_folder_goes_with_the_last_process_that_holds_it(tmp_path: Path) -> None:
    first, second = hold(tmp_path, "a"), hold(tmp_path, "a")
    leave(first)
    assert (tmp_path / "mgpu-zero-a" / "state").exists()
    leave(second)
    assert folders(tmp_path) == []


def test_a_killed_runs_folder_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    killed, living = hold(tmp_path, "killed"), hold(tmp_path, "living")
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert folders(tmp_path) == ["mgpu-zero-killed", "mgpu-zero-living"]
    third = hold(tmp_path, "third")
    assert folders(tmp_path) == ["mgpu-zero-living", "mgpu-zero-third"]
    leave(living)
    leave(third)
    assert folders(tmp_path) == []
