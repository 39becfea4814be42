"""What a run says before and after: tables, summary, report. None of it may cost the run its exit code."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.checkpoint.select import newest_valid
from mgpu_pipe.config.hardware import cpu_cores
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_STOPPED, MgpuError
from mgpu_pipe.launch import stop
from mgpu_pipe.runs import history
from mgpu_pipe.runs.continue_line import this_program
from mgpu_pipe.runs.folder import limit_reached
from mgpu_pipe.runs.summary import amend_summary, read_summary, write_summary
from mgpu_pipe.topology import ParallelDims

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared
    from mgpu_pipe.launch.supervisor import Outcome
    from mgpu_pipe.runs.continue_line import Asked


@dataclass(frozen=True)
class LaunchResult:
    """How a run ended: ``finished``, ``stopped`` or ``failed``, the command's exit code, the run's folder.

    Attributes:
        asked_to_stop: the launcher got a stop signal, perhaps too late to stop the run.
    """

    status: str
    exit_code: int
    folder: Path
    asked_to_stop: bool = False


def print_before(
    config: RunConfig, prepared: Prepared, environment: Mapping[str, object], world: int | None = None
) -> None:
    """What the run will be, of ``world`` processes; None takes the configured number."""
    from mgpu_pipe.report.overview import summary
    from mgpu_pipe.report.rows import print_rows

    own: Any = environment["own_conf"]
    print_rows(summary(config, world, prepared, _device(config, environment), own), config.run.name)
    sys.stdout.flush()


def say_complete(paths: RunPaths) -> None:
    print(f"this run is complete; raise trainer.{limit_reached(paths)} to go on", file=sys.stderr)
    print(f"run: {paths.root}", flush=True)


def say_note(text: str) -> None:
    """Print a note, unless it is empty."""
    if text:
        print(f"note: {text}", file=sys.stderr, flush=True)


def conclude(config: RunConfig, paths: RunPaths, outcome: Outcome, wall_s: float, again: str) -> None:
    """Complete the summary, write the report, print the table after training and, last, the run's folder.

    A fault here is reported, and changes neither the run's result nor its exit code.

    Args:
        wall_s: seconds the command took.
        again: the command that continues this run.
    """
    try:
        if outcome.status == "failed":
            _record_failure(config, paths, outcome)
        amend_summary(paths, wall_s=wall_s, attempts=_attempts(paths, outcome))
        _show_end(config, paths, again, outcome)
    except (MgpuError, OSError) as error:
        print(f"error: the run's summary or report could not be written: {error}", file=sys.stderr)
    except Exception:  # a defect of the report; told whole, and the run's result is not lost over it
        print("error: the run's report could not be made, by a defect of this program:", file=sys.stderr)
        traceback.print_exc()
    print(f"run: {paths.root}", flush=True)


def _attempts(paths: RunPaths, outcome: Outcome) -> object:
    """How many there were; in a job, their history, which this one's end completes."""
    failed = outcome.status == "failed"
    cause = stop.asked_by() if outcome.status == "stopped" else ""
    if failed:
        cause = outcome.message if outcome.failure is None else outcome.failure.message
    step = read_summary(paths).get("step")
    taken = step if isinstance(step, int) else 0
    return history.end(paths, outcome.status, taken, cause, retry=failed and _retry(outcome)) or outcome.attempt


def _retry(outcome: Outcome) -> bool:
    return outcome.failure is None or outcome.failure.can_be_retried


def exit_code(outcome: Outcome, asked: Asked) -> int:
    """The command's: in a job, which its script queues again, a crash asks for that as a stop does."""
    return EXIT_STOPPED if asked.again and outcome.status == "failed" and _retry(outcome) else outcome.exit_code


def _record_failure(config: RunConfig, paths: RunPaths, outcome: Outcome) -> None:
    """The summary of a run whose workers could not write one."""
    from mgpu_pipe.runs.metrics_file import read_metrics

    world = world_size(config)
    steps = read_metrics(paths.metrics).get("step", [])
    saved = newest_valid(paths.checkpoints, "fallback", "size")
    failure = outcome.failure
    write_summary(
        paths,
        {
            "status": "failed",
            "step": int(max(steps, default=0)),
            "max_steps": config.trainer.max_steps,
            "world_size": world,
            "topology": ParallelDims.resolve(config.strategy, world).as_dict(),
            "metrics": {},
            "checkpoint": str(saved.path.relative_to(paths.root)) if saved is not None else None,
            "error": {"rank": failure.rank, "type": failure.type, "message": failure.message}
            if failure is not None
            else {"message": outcome.message},
        },
    )


def _show_end(config: RunConfig, paths: RunPaths, again: str, outcome: Outcome) -> None:
    from mgpu_pipe.report.html import write_report
    from mgpu_pipe.report.tables import after_table

    report = write_report([paths], paths.report)
    summary = read_summary(paths)
    if summary.get("status") == "failed":
        if summary.get("checkpoint") and outcome.failure is not None and outcome.failure.can_be_retried:
            print(f"go on: {again}")
        return
    after_table(summary, {"report": str(report), **_how_to_go_on(config, paths, summary, again)})
    sys.stdout.flush()


def _how_to_go_on(config: RunConfig, paths: RunPaths, summary: Mapping[str, object], again: str) -> dict[str, str]:
    """Commands that can be copied, by what they do."""
    if summary.get("status") == "stopped":
        return {"go on": again}
    if summary.get("checkpoint") is None:
        return {"go on": "no checkpoint was saved; set checkpoint.save_last=true"}
    program, root = this_program(), str(paths.root)
    generates = description(str(summary.get("objective"))).attention == "causal"
    prompt = next(iter(getattr(config.objective, "sample_prompts", ())), "The ")
    if config.data.holds_conversations():
        tries = {"chat": shlex.join([*program, "chat", root])}
    else:
        tries = {"generate": shlex.join([*program, "generate", root, "--prompt", prompt])} if generates else {}
    return {**tries, "export": shlex.join([*program, "export", root, "--out", str(paths.root / "exported")])}


def _device(config: RunConfig, environment: Mapping[str, object]) -> str:
    """The hardware in words."""
    gpus = environment.get("gpus")
    if device_type(config) == "cuda" and isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {str(gpus[0]).partition(',')[0]}"
    threads = environment["threads_per_worker"]
    return f"{cpu_cores()} CPU cores, {threads} thread{'' if threads == 1 else 's'} each"
