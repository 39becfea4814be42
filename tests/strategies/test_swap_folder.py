"""Oracle: what lies under the folder, while real processes hold, leave and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.training.deepspeed.swap_folder import GUARD, claim

HOLD = """
import os, sys
from pathlib import Path
from mgpu_pipe.training.deepspeed.swap_folder import claim
if sys.argv[3]:
    os.setuid(int(sys.argv[3]))
folder = claim(Path(sys.argv[1]), sys.argv[2])
(folder / "state").write_text("x")
print("held", flush=True)
sys.stdin.readline()
"""


def hold(root: Path, token: str, user: int | str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root), token, str(user)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
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


def test_another_users_folder_on_the_same_disk_is_left_alone(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can be several users")
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    mine = hold(tmp_path, "mine")
    (tmp_path / "mgpu-zero-mine").chmod(0o700)
    other = hold(tmp_path, "other", user=65534)
    leave(other)
    leave(mine)
    assert folders(tmp_path) == []


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_guard_that_another_user_made_is_refused(kind: str, tmp_path: Path) -> None:
    root, file = tmp_path / "disk", tmp_path / "thesis"
    root.mkdir()
    file.write_text("years of work")
    guard = root / GUARD.format(user=os.getuid())
    {
        "link": lambda: guard.symlink_to(file),
        "hard link": lambda: guard.hardlink_to(file),
        "pipe": lambda: os.mkfifo(guard),
    }[kind]()
    with pytest.raises(BadInputError, match=r"\.lock: .*; remove it, or use another disk"):
        claim(root, "a")
    assert file.read_text() == "years of work"


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mgpu-zero-a").symlink_to(tmp_path.parent)
    with pytest.raises(BadInputError, match=r"mgpu-zero-a: is not a folder of this user"):
        claim(tmp_path, "a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", ["mgpu-zero-a", GUARD.format(user=os.getuid())])
def test_what_another_user_made_first_is_refused(name: str, tmp_path: Path) -> None:
    made = tmp_path / name
    made.mkdir() if name == "mgpu-zero-a" else made.touch()
    os.chown(made, 65534, 65534)
    with pytest.raises(BadInputError, match=r"is not a (folder|file) of this user; remove it"):
        claim(tmp_path, "a")
