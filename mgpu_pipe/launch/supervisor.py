"""Watches the workers of a run: restarts, stops, the first failing rank's error.

torch's elastic agent is not used: it needs torch in the launcher (1.3 s), counts exit code 75 as a crash, and kills
30 s after SIGTERM whatever the run still has to save.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mgpu_pipe.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED
from mgpu_pipe.launch.failure import Failure, first_failure
from mgpu_pipe.launch.signals import SignalInbox
from mgpu_pipe.launch.workers import WorkerGroup, WorkerPlan

CRASH_GRACE_S = 3.0
"""The other ranks of a failed one hang in a collective; they get this long to leave by themselves."""
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
) -> Outcome:
    """Run the workers to their end, again after a crash, at most ``max_restarts`` times.

    Args:
        stop_timeout: seconds the workers get to save and leave once a stop signal is in the inbox.
        started: the first attempt's group, if it was started ahead.
        attempt_environment: variables of one attempt, e.g. where it resumes.
        lost: why the run must end at once (its folder was taken over by another host); empty while all is well.
    """
    inbox.collect()
    attempt = first_attempt
    while True:
        group = started or WorkerGroup(
            replace(plan, environment={**plan.environment, **attempt_environment(attempt)}), attempt
        )
        started = None
        try:
            group.release()
            outcome = _watch(group, plan, inbox, stop_timeout, lost)
        finally:
            group.kill()
        failure = outcome.failure
        restarts_left = max_restarts - (attempt - first_attempt)
        if failure is None or restarts_left <= 0 or not failure.can_be_retried or inbox.stop_requested:
            return outcome
        print(f"{failure.show()}\nattempt {attempt} failed; {restarts_left} restart(s) left", file=sys.stderr)
        attempt += 1


def _watch(
    group: WorkerGroup, plan: WorkerPlan, inbox: SignalInbox, stop_timeout: float, lost: Callable[[], str]
) -> Outcome:
    """Until no worker of ``group`` is left."""
    stop_by = crash_by = float("inf")
    message = ""
    killed: frozenset[int] = frozenset()
    while True:
        failed = any(end.code not in (EXIT_OK, EXIT_STOPPED) for end in group.reap())
        if not group.running:
            break
        now = time.monotonic()
        if failed and crash_by == float("inf"):
            group.terminate()
            crash_by = now + CRASH_GRACE_S
        if inbox.stop_requested and stop_by == float("inf"):
            group.terminate()
            stop_by = now + stop_timeout
        reason = _reason_to_kill(inbox, now >= stop_by, stop_timeout, lost())
        if reason or now >= crash_by:
            message = message or reason
            killed = frozenset(group.running)
            group.kill()
            break
        inbox.wait(min(POLL_S, stop_by - now, crash_by - now))
    return _judge(group, plan, message, killed)


def _reason_to_kill(inbox: SignalInbox, too_late: bool, stop_timeout: float, lost: str) -> str:
    if lost:
        return lost
    if inbox.kill_requested:
        return "stopped at once by a second signal; the newest saved checkpoint is intact"
    if too_late:
        return (
            f"launch.stop_timeout={stop_timeout:g}: the workers had not saved and left after that many seconds and "
            "were killed; raise it"
        )
    return ""


def _judge(group: WorkerGroup, plan: WorkerPlan, message: str, killed: frozenset[int]) -> Outcome:
    codes = {end.code for end in group.exits if end.rank not in killed}
    if message:
        return Outcome("failed", EXIT_FAILURE, group.attempt, message=message)
    if codes == {EXIT_OK}:
        return Outcome("finished", EXIT_OK, group.attempt)
    if codes <= {EXIT_OK, EXIT_STOPPED}:
        return Outcome("stopped", EXIT_STOPPED, group.attempt)
    failure = first_failure(plan.paths, group.exits, group.attempt, killed)
    return Outcome("failed", failure.exit_code, group.attempt, failure)
