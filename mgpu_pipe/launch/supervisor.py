"""Supervises the workers of a run: restarts, stops and the first failing rank's error.

It replaces torch's elastic agent, which needs torch in the launcher (1.3 s), counts exit code 75 as a crash, and kills
workers 30 s after SIGTERM even while they save.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mgpu_pipe.checkpoint.selection import newest_valid
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, print_line, print_text
from mgpu_pipe.launch.failure import Failure, first_failure
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.workers import WorkerGroup, WorkerPlan

CRASH_TERMINATE_S = 1.0
"""Seconds to report the rank that caused the first end."""
CRASH_KILL_S = 3.0
"""Seconds for the other ranks to exit after a failure; they usually hang in a collective."""
POLL_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run's workers.

    Attributes:
        status: ``finished``, ``stopped`` (saved, can be resumed) or ``failed``.
        attempt: the last attempt's number.
        failure: failure of the first failing rank; None if no worker failed.
        message: message of the launcher, e.g. that it killed workers; usually empty.
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
    """Run the workers to their end, with at most ``max_restarts`` restarts after crashes.

    Args:
        stop_timeout: seconds that workers have to save and exit after a stop signal.
        started: group of the first attempt, if already started.
        attempt_environment: variables of an attempt, e.g. its step to resume from.
        lost: reason to end at once, such as a folder taken over by another host; empty otherwise.
        on_stop: called after the workers got the stop signal.
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
        print_text(failure.show(), file=sys.stderr)
        print_line(f"attempt {attempt} failed; {restarts_left} restart(s) left", file=sys.stderr)
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
                group.dump_stacks()
            group.kill()
            break
        inbox.wait(min(POLL_S, stop_by - now, terminate_at - now, crash_by - now))
    if crash_by < float("inf") or stop_by < float("inf"):
        # SIGTERM preceded their handler, so they had nothing to save
        killed |= {end.rank for end in group.exits if end.code == -signal.SIGTERM}
    return _judge(group, plan, message, killed, stood_still, stopped=stop_by < float("inf"))


def _reason_to_kill(
    inbox: SignalInbox, too_late: bool, stop_timeout: float, lost: str, paths: RunPaths, group: WorkerGroup
) -> str:
    if lost:
        return lost
    if inbox.kill_requested:
        saved = newest_valid(paths.checkpoints, "fallback", "size")
        saved_text = (
            f"the newest saved checkpoint, {saved.path.name}, is intact" if saved else "no checkpoint was saved yet"
        )
        return f"stopped at once by a second signal; {saved_text}"
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
