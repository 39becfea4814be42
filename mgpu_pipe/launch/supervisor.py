"""Watches the workers of a run: restarts, stops, the first failing rank's error.

torch's elastic agent is not used: it needs torch in the launcher (1.3 s), counts exit code 75 as a crash, and kills
30 s after SIGTERM whatever the run still has to save.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mgpu_pipe.checkpoint.select import newest_valid
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED
from mgpu_pipe.launch.failure import Failure, first_failure
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.workers import WorkerGroup, WorkerPlan

CRASH_TERMINATE_S = 1.0
"""The end that is seen first may follow from another rank's, which gets this long to be reported."""
CRASH_KILL_S = 3.0
"""When a rank has failed, the others hang in a collective; they get this long to exit."""
POLL_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a run's workers ended.

    Attributes:
        status: ``finished``, ``stopped`` (saved, can be resumed) or ``failed``.
        attempt: the last attempt's number.
        failure: of the first failing rank; None where workers did not fail.
        message: what the launcher has to say, e.g. that it had to kill; empty otherwise.
    """

    status: str
    exit_code: int
    attempt: int
    failure: Failure | None = None
    message: str = ""


def supervise(
    plan: WorkerPlan,
    inbox: SignalInbox,
    *,
    stop_timeout: float,
    max_restarts: int = 0,
    first_attempt: int = 1,
    started: WorkerGroup | None = None,
    attempt_environment: Callable[[int], Mapping[str, str]] = lambda attempt: {},
    lost: Callable[[], str] = lambda: "",
    on_stop: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run the workers to their end, again after a crash, at most ``max_restarts`` times.

    Args:
        stop_timeout: seconds the workers get to save and leave once a stop signal is in the inbox.
        started: the first attempt's group, if it was started ahead.
        attempt_environment: variables of one attempt, e.g. where it resumes.
        lost: why the run must end at once (its folder was taken over by another host); empty while all is well.
        on_stop: called once the workers were asked to save and leave.
    """
    inbox.collect()
    attempt = first_attempt
    while True:
        group = started or WorkerGroup(plan.with_environment(attempt_environment(attempt)), attempt)
        started = None
        try:
            group.release()
            outcome = _watch(group, plan, inbox, stop_timeout, lost, on_stop)
        finally:
            group.kill()
        failure = outcome.failure
        restarts_left = max_restarts - (attempt - first_attempt)
        if failure is None or restarts_left <= 0 or not failure.can_be_retried or inbox.stop_requested:
            return outcome
        print(f"{failure.show()}\nattempt {attempt} failed; {restarts_left} restart(s) left", file=sys.stderr)
        attempt += 1


def _watch(
    group: WorkerGroup,
    plan: WorkerPlan,
    inbox: SignalInbox,
    stop_timeout: float,
    lost: Callable[[], str],
    on_stop: Callable[[], None],
) -> Outcome:
    """Wait until no worker of ``group`` is left."""
    stop_by = terminate_at = crash_by = float("inf")
    message = ""
    killed: frozenset[int] = frozenset()
    stood_still: frozenset[int] = frozenset()
    while True:
        failed = any(end.code not in (EXIT_OK, EXIT_STOPPED) for end in group.reap())
        if not group.running:
            break
        now = time.monotonic()
        if failed and crash_by == float("inf"):
            terminate_at, crash_by = now + CRASH_TERMINATE_S, now + CRASH_KILL_S
            stood_still = group.standing_still
        if now >= terminate_at:
            group.terminate()
            terminate_at = float("inf")
        if inbox.stop_requested and stop_by == float("inf"):
            group.terminate()
            on_stop()
            stop_by = now + stop_timeout
        reason = _reason_to_kill(inbox, now >= stop_by, stop_timeout, lost(), plan.paths, group)
        if reason or now >= crash_by:
            message = message or reason
            killed = frozenset(group.running)
            if now >= crash_by:
                group.tell_where()
            group.kill()
            break
        inbox.wait(min(POLL_S, stop_by - now, terminate_at - now, crash_by - now))
    if crash_by < float("inf") or stop_by < float("inf"):
        # SIGTERM came before these had installed their handler, so there was nothing to save
        killed |= {end.rank for end in group.exits if end.code == -signal.SIGTERM}
    return _judge(group, plan, message, killed, stood_still, stopped=stop_by < float("inf"))


def _reason_to_kill(
    inbox: SignalInbox, too_late: bool, stop_timeout: float, lost: str, paths: RunPaths, group: WorkerGroup
) -> str:
    if lost:
        return lost
    if inbox.kill_requested:
        saved = newest_valid(paths.checkpoints, "fallback", "size")
        kept = f"the newest saved checkpoint, {saved.path.name}, is intact" if saved else "no checkpoint was saved yet"
        return f"stopped at once by a second signal; {kept}"
    if too_late:
        stopped = sorted(group.standing_still)
        if stopped:
            return f"rank {stopped[0]} was stopped (SIGSTOP, or a debugger) and could not save; all were killed"
        return (
            f"launch.stop_timeout={stop_timeout:g}: the workers had not saved and exited after that many seconds and "
            "were killed; raise it"
        )
    return ""


def _judge(
    group: WorkerGroup,
    plan: WorkerPlan,
    message: str,
    killed: frozenset[int],
    stood_still: frozenset[int],
    stopped: bool,
) -> Outcome:
    codes = {end.code for end in group.exits if end.rank not in killed}
    if message:
        return Outcome("failed", EXIT_FAILURE, group.attempt, message=message)
    if not codes <= {EXIT_OK, EXIT_STOPPED}:
        failure = first_failure(plan.paths, group.exits, group.attempt, killed, stood_still)
        return Outcome("failed", failure.exit_code, group.attempt, failure)
    if EXIT_STOPPED in codes or (stopped and killed):
        return Outcome("stopped", EXIT_STOPPED, group.attempt)
    return Outcome("finished", EXIT_OK, group.attempt)
