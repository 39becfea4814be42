"""Workers of one machine meet where no other user can, and another user at gloo's ports changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import ROOT, start_launcher, until

NOBODY = 65534


def test_workers_of_one_machine_meet_at_no_port_and_in_no_file_of_others(run: Path) -> None:
    launcher = start_launcher(run, "sleep", 2)
    files = [run / f"pid-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files), "all workers' pids")
    for file in files:
        pid = int(file.read_text())
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        assert "MASTER_PORT=0" in variables
        store = next(word.partition("=")[2] for word in variables if word.startswith("MGPU_STORE_FD="))
        assert os.readlink(f"/proc/{pid}/fd/{store}").startswith("/memfd:")
        if os.geteuid() == 0:
            opened = [sys.executable, "-c", f"open('/proc/{pid}/fd/{store}', 'rb')"]
            refused = subprocess.run(["setpriv", f"--reuid={NOBODY}", "--clear-groups", *opened], capture_output=True)
            assert b"PermissionError" in refused.stderr
    assert not listening(launcher.pid) and not any(listening(int(file.read_text())) for file in files)
    launcher.kill()
    launcher.communicate(timeout=30)


def listening(pid: int) -> set[str]:
    """The sockets on which a process waits for connections."""
    waiting = {
        line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    }
    links = (os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return {link for link in links if link.removeprefix("socket:[").removesuffix("]") in waiting}


@pytest.mark.slow
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
