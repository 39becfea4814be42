"""Table, summary and report after a run. Their errors never change the run's exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.checkpoint.selection import newest_valid
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import DataConfig, ObjectiveConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import EXIT_STOPPED, MgpuError, RunFolderError, print_line, print_text, print_traceback
from mgpu_pipe.launch import signals as stop
from mgpu_pipe.report.run_tables import after_table, relative_to_cwd, runs_table
from mgpu_pipe.runs import history
from mgpu_pipe.runs.history import amend_summary, read_summary, write_summary
from mgpu_pipe.runs.metrics_file import read_metrics
from mgpu_pipe.runs.resume_command import this_program
from mgpu_pipe.runs.run_folder import limit_reached
from mgpu_pipe.topology import ParallelDims

if TYPE_CHECKING:
    from mgpu_pipe.launch.supervisor import Outcome
    from mgpu_pipe.runs.lock import RunLock
    from mgpu_pipe.runs.resume_command import CommandLine


def show_sweep(runs: Sequence[RunPaths], write: Callable[[], Path], again: str = "") -> None:
    """Print the table of runs, ``write`` the page, and name the command that resumes (``again``) after a signal."""
    runs_table(list(dict.fromkeys(runs)))
    try:
        print_line(f"report: {relative_to_cwd(write())}")
    except (RunFolderError, OSError) as error:
        print_line(f"error: the sweep's report could not be written: {error}", file=sys.stderr)
    if again:
        print_line(f"resume: {again}")
    sys.stdout.flush()


@dataclass(frozen=True)
class LaunchResult:
    """Result of a launch: ``finished``, ``stopped`` or ``failed``, the exit code and the run's folder.

    Attributes:
        asked_to_stop: whether the launcher got a stop signal, perhaps too late to stop the run.
    """

    status: str
    exit_code: int
    folder: Path
    asked_to_stop: bool = False


def print_complete(paths: RunPaths) -> None:
    print_line(f"this run is complete; raise trainer.{limit_reached(paths)} to continue", file=sys.stderr)
    print_line(f"run: {paths.root}", flush=True)


def print_note(text: str) -> None:
    """Print a note unless it is empty."""
    if text:
        print_line(f"note: {text}", file=sys.stderr, flush=True)


def announce_stop(lock: RunLock | None) -> None:
    """Print that the run stops, and write it into its lock; None on a node that does not have the lock."""
    if lock is not None:
        print_line(stop.STOPPING, file=sys.stderr, flush=True)
        lock.stopping()


def print_failure(outcome: Outcome) -> None:
    """Print the first failing rank's error, or the launcher's; nothing without one."""
    if outcome.failure is not None:
        print_text(outcome.failure.show(), file=sys.stderr, flush=True)
    if outcome.message:
        print_line(f"error: {outcome.message}", file=sys.stderr, flush=True)


def conclude(config: RunConfig, paths: RunPaths, outcome: Outcome, wall_s: float, again: str) -> None:
    """Complete the summary, write the report, print the table and finally the run's folder.

    An error here is printed and changes neither the run's result nor its exit code.

    Args:
        wall_s: seconds of this command; the summary gets the sum over all attempts.
        again: the command that resumes this run.
    """
    if not paths.config.is_file():  # moved or deleted, as the outcome says: write nothing at the old path
        return
    try:
        if outcome.status == "failed":
            _record_failure(paths, outcome, config.trainer, config.strategy)
        entries = _end_attempt(paths, outcome, wall_s)
        by_a_job = bool(entries and entries[-1].get("job"))
        amend_summary(paths, wall_s=history.wall_s(entries), attempts=entries if by_a_job else outcome.attempt)
        _show_end(config.data, config.objective, paths, again, outcome)
    except (MgpuError, OSError) as error:
        print_line(f"error: the run's summary or report could not be written: {error}", file=sys.stderr)
    except Exception:  # a bug in the report must not lose the run's result
        print_line("error: the run's report could not be made, by a defect of this program:", file=sys.stderr)
        print_traceback()
    print_line(f"run: {paths.root}", flush=True)


def _end_attempt(paths: RunPaths, outcome: Outcome, wall_s: float) -> list[history.Entry]:
    """Complete this attempt's entry in the run's history; returns all entries."""
    failed = outcome.status == "failed"
    cause = stop.asked_by() if outcome.status == "stopped" else ""
    if failed:
        cause = outcome.message if outcome.failure is None else outcome.failure.message
    step = read_summary(paths).get("step")
    taken = step if isinstance(step, int) else 0
    retry = failed and _retry(outcome)
    return history.end(paths, outcome.status, taken, cause, retry=retry, wall_s=wall_s)


def _retry(outcome: Outcome) -> bool:
    return outcome.failure is None or outcome.failure.can_be_retried


def exit_code(outcome: Outcome, command_line: CommandLine) -> int:
    """Exit code of the command. In a job that its script requeues, a crash asks for a requeue like a stop."""
    return EXIT_STOPPED if command_line.again and outcome.status == "failed" and _retry(outcome) else outcome.exit_code


def _record_failure(paths: RunPaths, outcome: Outcome, trainer: TrainerConfig, strategy: StrategyConfig) -> None:
    """Write the summary of a run whose workers could not."""
    dims = ParallelDims.from_config(trainer, strategy)
    steps = read_metrics(paths.metrics).get("step", [])
    saved = newest_valid(paths.checkpoints, "fallback", "size")
    failure = outcome.failure
    write_summary(
        paths,
        {
            "status": "failed",
            "step": int(max(steps, default=0)),
            "max_steps": trainer.max_steps,
            "world_size": dims.world_size,
            "topology": dims.as_dict(),
            "metrics": {},
            "checkpoint": str(saved.path.relative_to(paths.root)) if saved is not None else None,
            "error": {"rank": failure.rank, "type": failure.type, "message": failure.message}
            if failure is not None
            else {"message": outcome.message},
        },
    )


def _show_end(data: DataConfig, objective: ObjectiveConfig, paths: RunPaths, again: str, outcome: Outcome) -> None:
    from mgpu_pipe.report.html import write_report

    report = write_report([paths], paths.report)
    summary = read_summary(paths)
    if summary.get("status") == "failed":
        if summary.get("checkpoint") and outcome.failure is not None and outcome.failure.can_be_retried:
            print_line(f"resume: {again}")
        return
    after_table(summary, {"report": str(report), **_next_commands(data, objective, paths, summary, again)})
    sys.stdout.flush()


def _next_commands(
    data: DataConfig, objective: ObjectiveConfig, paths: RunPaths, summary: Mapping[str, object], again: str
) -> dict[str, str]:
    """Commands to copy, by what they do."""
    if summary.get("status") == "stopped":
        return {"resume": again}
    if summary.get("checkpoint") is None:
        return {"resume": "no checkpoint was saved; set checkpoint.save_last=true"}
    program, root = this_program(), str(paths.root)
    known = description(str(summary.get("objective")))
    generates, classifies = known.attention == "causal", known.model_class.endswith("ForSequenceClassification")
    prompt = next(iter(getattr(objective, "sample_prompts", ())), "The ")
    if data.holds_conversations() and not classifies:
        tries = {"chat": shlex.join([*program, "chat", root])}
    else:
        tries = {"generate": shlex.join([*program, "generate", root, "--prompt", prompt])} if generates else {}
    return {**tries, "export": shlex.join([*program, "export", root, "--out", str(paths.root / "exported")])}
