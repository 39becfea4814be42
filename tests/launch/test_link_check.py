"""The links of a job's nodes: planted bad ones, by a relay between a task and the first one, are named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mgpu_pipe.launch import link_check
from mgpu_pipe.launch.node import BAD_NODES
from tests.support.sampling import one_in
from tests.support.worlds import free_port

TASK = """
import os
import sys
from pathlib import Path
from mgpu_pipe.launch import link_check
if "A_SITES_OWN" in os.environ:
    os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_STEP_NUM_TASKS"])
link_check.TRANSFER, link_check.ANSWER_S = 1 << 20, 3.0
sys.exit(not link_check.links_are_good(Path(sys.argv[1]), sys.argv[2], "cpu", float(sys.argv[3])))
"""


class Relay:
    """Hands on what two ends say: short words late, all of it slowly, or no more than some bytes."""

    def __init__(self, to: int, late_s: float = 0, rate: float = 0, most: int = 1 << 40) -> None:
        self.to, self.late_s, self.rate, self.most = to, late_s, rate, most
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.met = self.listener.getsockname()[1], threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near = self.listener.accept()[0]
                far = self._connected()
                self.met.set()
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._hand_on, args=ends, daemon=True).start()

    def _connected(self) -> socket.socket:
        while True:
            with suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self.to))
            time.sleep(0.05)

    def _hand_on(self, source: socket.socket, to: socket.socket) -> None:
        passed = 0
        with suppress(OSError):
            while part := source.recv(1 << 16):
                passed += len(part)
                if passed > self.most:  # dropped
                    continue
                time.sleep(self.late_s * (len(part) < 1000) + (len(part) / self.rate if self.rate else 0))
                to.sendall(part)
            to.shutdown(socket.SHUT_WR)


def step(folder: Path, nodes: int, each: int, ports: dict[int, int], **variables: str) -> tuple[list[int], str]:
    """Exit codes of :func:`started` tasks, and what they say."""
    tasks = started(folder, nodes, each, ports, **variables)
    said = [task.communicate(timeout=60)[1] for task in tasks]
    return [task.returncode for task in tasks], "".join(said)


def started(
    folder: Path, nodes: int, each: int, ports: dict[int, int], **variables: str
) -> list[subprocess.Popen[str]]:
    """A step of ``nodes`` with ``each`` tasks, whose nodes are told these ports."""
    told = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": f"n[0-{nodes - 1}]",
        "SLURM_STEP_NUM_TASKS": str(nodes * each),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
        "MASTER_ADDR": "127.0.0.1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", TASK, str(folder), f"n{rank // each}", "3"],
            env={
                **os.environ, **told, **variables, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // each),
                "SLURM_LOCALID": str(rank % each), "MASTER_PORT": str(ports[rank // each]),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(nodes * each)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "variables",
    one_in(2, [{}, {"GLOO_SOCKET_IFNAME": "lo"}, {"A_SITES_OWN": "1"}]),
    ids=["the rendezvous'", "an interface's own", "torch's variables"],
)
def test_good_links_let_the_ranks_meet(tmp_path: Path, variables: dict[str, str]) -> None:
    port = free_port()
    codes, said = step(tmp_path, 3, 2, dict.fromkeys(range(3), port), **variables)
    assert codes == [0] * 6, said
    assert "links of 3 nodes to n0: a round trip takes at most " in said
    assert not (tmp_path / BAD_NODES).exists()
    socket.create_server(("", port)).close()  # it is free for the ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        pytest.param({"late_s": 0.06}, "a round trip to n0 takes 1", marks=pytest.mark.exhaustive),
        ({"rate": 2 << 20}, "its link to n0 carries "),
        pytest.param({"most": 200_000}, "its link to n0 fails: ", marks=pytest.mark.exhaustive),
        (None, "it did not reach n0 (127.0.0.1, port "),
    ],
    ids=["late", "slow", "drops", "closed"],
)
def test_a_bad_link_is_named(tmp_path: Path, kind: dict[str, float] | None, reason: str) -> None:
    port = free_port()
    bad = free_port() if kind is None else Relay(port, **kind).port  # type: ignore[arg-type]
    codes, said = step(tmp_path, 3, 1, {0: port, 1: port, 2: bad})
    assert all(codes), said
    (line,) = (tmp_path / BAD_NODES).read_text().splitlines()
    assert line.startswith(f"n2 {reason}"), line
    assert f"error: node {line.replace(' ', ': ', 1)}; the job is queued again without it" in said


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "named"), one_in(2, [(2, ["n0", "n1"]), (3, ["n0"])]))
def test_a_first_node_that_none_reaches_well_is_named(tmp_path: Path, nodes: int, named: list[str]) -> None:
    """Of two nodes nobody can tell whose link it is."""
    port = free_port()
    relay = Relay(port, late_s=0.06).port
    codes, said = step(tmp_path, nodes, 1, {0: port, 1: relay, 2: relay})
    assert all(codes), said
    assert [line.split()[0] for line in (tmp_path / BAD_NODES).read_text().splitlines()] == named


def test_a_task_that_leaves_since_the_step_is_stopped_is_no_bad_link(tmp_path: Path) -> None:
    port = free_port()
    slow = Relay(port, rate=1 << 20)
    tasks = started(tmp_path, 2, 1, {0: port, 1: slow.port})
    slow.met.wait(60)
    for task in reversed(tasks):  # the first one hears of it late
        time.sleep(0.5)
        task.send_signal(signal.SIGUSR1)
    said = "".join(task.communicate(timeout=60)[1] for task in tasks)
    assert [task.returncode for task in tasks] == [-signal.SIGUSR1] * 2, said
    assert "error" not in said and not (tmp_path / BAD_NODES).exists()


def test_one_node_has_no_links(tmp_path: Path) -> None:
    assert step(tmp_path, 1, 2, {0: 1}) == ([0, 0], "")


@pytest.mark.parametrize(
    ("device", "asked", "address"),
    [("cpu", "lo", "127.0.0.1"), ("cpu", "l", ""), ("cuda", "x,l", "127.0.0.1"), ("cuda", "=lo", "127.0.0.1"),
     ("cuda", "=l", ""), ("cuda", "^eth", ""), ("cpu", "", "")],
)  # fmt: skip
def test_the_interface_is_the_one_that_the_ranks_are_told(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: str, address: str
) -> None:
    monkeypatch.setenv(link_check.INTERFACES[device], asked)
    assert link_check.interface_address(device) == address
