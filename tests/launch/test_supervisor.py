"""The supervisor with real launcher and worker processes; the workers are stand-ins that train nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from mgpu_pipe.launch.signals import SAME_SIGNAL_S
from mgpu_pipe.launch.workers import is_stopped
from tests.launch.launching import alive, run_launcher, start_launcher, until
from tests.support.sampling import one_in


def worker_pids(run: Path, world_size: int) -> list[int]:
    files = [run / f"pid-{rank}" for rank in range(world_size)]
    until(lambda: all(file.exists() and file.read_text() for file in files), "all workers' pids")
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize("world_size", one_in(3, [2, 4, 1]))
def test_workers_meet(run: Path, world_size: int) -> None:
    code, _, outcome = run_launcher(run, "all_reduce", world_size)
    assert (code, outcome[0]) == (0, "finished")
    for rank in range(world_size):
        assert f"sum {3 * world_size}" in (run / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGABRT])
def test_nothing_survives_a_launcher_that_dies(run: Path, stop: signal.Signals) -> None:
    launcher = start_launcher(run, "fork", 2)
    pids = worker_pids(run, 2)
    children = [run / "child-0", run / "child-1"]
    until(lambda: all(file.exists() and file.read_text() for file in children), "the workers' own children")
    pids += [int(pid) for file in children for pid in file.read_text().split()]
    assert all(map(alive, pids))
    assert len(pids) == 6
    launcher.send_signal(stop)
    launcher.communicate(timeout=30)
    until(lambda: not any(map(alive, pids)), "the end of every worker and loader")


def test_a_worker_dies_also_while_the_interpreter_is_stuck(run: Path) -> None:
    launcher = start_launcher(run, "sleep", 1)
    (pid,) = worker_pids(run, 1)
    os.kill(pid, signal.SIGSTOP)  # no thread of it runs: only the kernel can end it
    launcher.kill()
    launcher.communicate(timeout=30)
    until(lambda: not alive(pid), "the end of the stopped worker")


def test_the_first_failing_ranks_own_error_is_shown(run: Path) -> None:
    code, shown, outcome = run_launcher(run, "peers_follow", 2)
    assert (code, outcome[0]) == (1, "failed")
    assert "rank 1 failed first: rank 1 ran out of memory" in shown
    assert "rank-1.log" in shown
    assert "Connection closed" not in shown


@pytest.mark.slow
def test_a_crash_ends_the_others_and_names_the_killed_rank(run: Path) -> None:
    code, shown, _ = run_launcher(run, "rank1_killed", 2)
    assert code == 1
    assert "rank 1 failed first: killed by SIGKILL" in shown
    assert not any(alive(int(file.read_text())) for file in run.glob("pid-*"))


def test_a_bad_input_is_one_line_and_exit_2_and_never_restarted(run: Path) -> None:
    code, shown, outcome = run_launcher(run, "config_error", 2, max_restarts=3)
    assert code == 2
    assert outcome == ["failed", 1, ""]
    assert shown.strip() == "error: optimizer.lr=-1: use a positive number"


def test_a_nan_is_never_restarted(run: Path) -> None:
    code, shown, outcome = run_launcher(run, "nan", 2, max_restarts=3)
    assert code == 1
    assert outcome == ["failed", 1, ""]
    assert "Traceback" not in shown


def test_a_crash_is_restarted_with_a_log_an_attempt(run: Path) -> None:
    code, shown, outcome = run_launcher(run, "first_attempt_crashes", 2, max_restarts=1)
    assert code == 0
    assert outcome == ["finished", 2, ""]
    assert "bad luck" in shown
    assert "0 restart(s) left" not in shown
    assert "1 restart(s) left" in shown
    log = (run / "logs" / "rank-1.log").read_text()
    assert log.index("--- attempt 1: rank 1 of 2") < log.index("--- attempt 2: rank 1 of 2")


@pytest.mark.slow
def test_restarts_end(run: Path) -> None:
    code, _, outcome = run_launcher(run, "rank1_killed", 2, max_restarts=1)
    assert code == 1
    assert outcome == ["failed", 2, ""]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_signal_lets_the_workers_save_and_gives_75(run: Path, number: signal.Signals) -> None:
    launcher = start_launcher(run, "stop", 2)
    worker_pids(run, 2)
    launcher.send_signal(number)
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 75
    assert '["stopped", 1, ""]' in out


def test_a_second_interrupt_leaves_at_once(run: Path) -> None:
    launcher = start_launcher(run, "stop_slowly", 2, stop_timeout=500)
    pids = worker_pids(run, 2)
    launcher.send_signal(signal.SIGINT)
    time.sleep(2 * SAME_SIGNAL_S)  # sooner it counts as the first one, delivered twice
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "second signal; no checkpoint was saved yet" in out
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_not_the_one_that_waited_for_it(run: Path) -> None:
    launcher = start_launcher(run, "wait_for_rank_1", 2)
    pids = worker_pids(run, 2)
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: is_stopped(pids[1]), "rank 1 stops when it is next given a processor")
    (run / "stopped").touch()
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "rank 1 failed first: the process was stopped (SIGSTOP, or a debugger)" in out
    assert "rank 0 reports: [gloo] Timed out waiting" in out
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_where_it_does(run: Path) -> None:
    code, shown, _ = run_launcher(run, "hang_in_rank_1", 3)
    line = shown.splitlines()[-1]
    assert code == 1
    assert line.startswith("error: rank 1 failed first: the others waited in vain for rank 1 (at ")
    assert "stand_in.py:" in line and ", main) to join a collective; rank " in line
    assert "reports: [gloo] Timed out waiting 4000ms" in line and "rank-1.log)" in line


def test_a_rank_that_is_stopped_and_cannot_save_is_named(run: Path) -> None:
    launcher = start_launcher(run, "stop", 2, stop_timeout=1.0)
    pids = worker_pids(run, 2)
    os.kill(pids[1], signal.SIGSTOP)
    launcher.send_signal(signal.SIGTERM)
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "rank 1 was stopped (SIGSTOP, or a debugger) and could not save" in out


def test_a_hang_up_is_no_second_request(run: Path) -> None:
    launcher = start_launcher(run, "stop_in_a_second", 2)
    worker_pids(run, 2)
    launcher.send_signal(signal.SIGHUP)
    time.sleep(2 * SAME_SIGNAL_S)
    launcher.send_signal(signal.SIGHUP)  # a closed terminal's kernel and shell both send it
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 75, out


def test_what_nohup_ignores_stays_ignored(run: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by the launcher, as from nohup(1)
    try:
        launcher = start_launcher(run, "stop", 2)
    finally:
        signal.signal(signal.SIGHUP, before)
    pids = worker_pids(run, 2)
    for pid in (launcher.pid, *pids):
        os.kill(pid, signal.SIGHUP)
    time.sleep(2 * SAME_SIGNAL_S)
    assert launcher.poll() is None and all(map(alive, pids))
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 75


def test_a_stop_before_a_worker_listens_is_a_stop(run: Path) -> None:
    launcher = start_launcher(run, "stop", 2)
    until(lambda: (run / "logs" / "rank-1.log").exists(), "the workers' start")
    launcher.send_signal(signal.SIGTERM)
    _out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 75, err


def test_one_request_delivered_twice_is_one(run: Path) -> None:
    launcher = start_launcher(run, "stop", 2)
    worker_pids(run, 2)
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGTERM)  # as timeout(1) does, to the process and to its group
    launcher.communicate(timeout=30)
    assert launcher.returncode == 75


def test_workers_that_do_not_leave_in_time_are_killed(run: Path) -> None:
    launcher = start_launcher(run, "stop_slowly", 1, stop_timeout=0.5)
    pids = worker_pids(run, 1)
    launcher.send_signal(signal.SIGTERM)
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "launch.stop_timeout=0.5" in out
    assert not any(map(alive, pids))
