"""An export that is killed: its child dies with it, and the next export finds its way free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.export_folder import _undo_half_a_replacement, working_folder
from mgpu_pipe.system.child_process import bound
from tests.launch.launching import ROOT, alive, until

PARENT = """
import subprocess, sys
from mgpu_pipe.system.child_process import bound
child = subprocess.Popen(bound([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]),
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_bound_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not alive(child), "the child's end")


def test_a_child_whose_parent_is_gone_already_does_not_begin(tmp_path: Path) -> None:
    other = [*bound(["touch", str(tmp_path / "begun")])]
    other[other.index(str(os.getpid()))] = "1"  # not its parent
    assert subprocess.run(other).returncode == 1
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_cleaned_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "half.safetensors").touch()
    with working_folder(out) as folder:
        assert folder == left and not list(folder.iterdir())
        with pytest.raises(BadInputError, match="another process is writing it"), working_folder(out):
            pass
        (folder / "file").touch()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_in_the_middle_of_a_replacement_loses_no_folder(renames: int, tmp_path: Path) -> None:
    out, waiting = tmp_path / "out", tmp_path / "out.replaced.partial"
    waiting.mkdir()
    (waiting / "config.json").write_text("old")
    if renames == 2:
        out.mkdir()
        (out / "config.json").write_text("new")
    _undo_half_a_replacement(out)
    assert (out / "config.json").read_text() == ("old" if renames == 1 else "new")
    assert not waiting.exists()
