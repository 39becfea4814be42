"""Overrides of verbs that compute on several processes, and the arguments and table of ``eval --harness``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mgpu_pipe.config.arguments import count, positive_int
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig, StrategyConfig, TrainerConfig
from mgpu_pipe.errors import EXIT_OK, BadInputError, print_line
from mgpu_pipe.inference.batch.settings import BATCH_SIZE
from mgpu_pipe.inference.find_model import ModelSource, find_model, model_of_folder
from mgpu_pipe.inference.model_arguments import add_device_argument, find_inputs, resolve_device
from mgpu_pipe.system.local_files import expand_home, replace_file
from mgpu_pipe.topology import ParallelDims

PROCESSES = ("trainer.devices=", "trainer.num_nodes=", "trainer.accelerator=", "launch.", "launch=")
STRATEGY = ("strategy=", "strategy.")


def compose_processes(verb: str, overrides: Sequence[str], device: str, *, strategies: bool) -> RunConfig:
    """The configuration of the processes, in fp32; everything else in it is a default.

    Args:
        device: the verb's ``--device``; anything but ``auto`` means a single process.
        strategies: whether a strategy may be given; else each process holds the whole model.

    Raises:
        BadInputError: another override, or one besides ``--device``.
    """
    allowed = (*PROCESSES, *STRATEGY) if strategies else PROCESSES
    strange = [text for text in overrides if not text.lstrip("+").startswith(allowed)]
    if strange:
        keys = "trainer.devices, num_nodes, accelerator and launch.*"
        raise BadInputError(f"{strange[0]}: {verb} takes {'strategy, ' if strategies else ''}{keys} only here")
    if device != "auto" and overrides:
        raise BadInputError(f"--device={device}: goes with one process; use trainer.accelerator instead")
    named = any(text.lstrip("+").startswith("strategy=") for text in overrides)
    config = compose(["precision=fp32", *([] if named else ["strategy=ddp"]), *overrides])[0]
    return config if device == "auto" else replace(config, trainer=replace(config.trainer, devices=1))


def add_job_arguments(parser: argparse.ArgumentParser, purpose: str, batch: str) -> None:
    """Add the arguments of a job (``purpose`` is a verb, ``batch`` the help of ``--batch-size``) on whole models."""
    parser.add_argument("--batch-size", type=positive_int, default=BATCH_SIZE, metavar="N", help=batch)
    parser.add_argument("--processes", type=positive_int, metavar="N", help="another word for trainer.devices=N")
    add_device_argument(parser)
    help_text = f"trainer.devices, trainer.num_nodes, trainer.accelerator or launch.* to {purpose} with"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=help_text)


def job_processes(verb: str, arguments: argparse.Namespace) -> RunConfig:
    """The processes that the arguments of :func:`add_job_arguments` choose; raises as :func:`compose_processes`."""
    processes = [] if arguments.processes is None else [f"trainer.devices={arguments.processes}"]
    return compose_processes(verb, [*arguments.overrides, *processes], arguments.device, strategies=False)


def job_settings(arguments: argparse.Namespace, source: ModelSource, trainer: TrainerConfig) -> dict[str, Any]:
    """Settings that all these jobs have, by the names of :class:`mgpu_pipe.inference.batch.settings.JobSettings`."""
    return {
        "model": source.folder.absolute(),
        "input": expand_home(arguments.input).absolute(),
        "output": expand_home(arguments.output).absolute(),
        "batch_size": arguments.batch_size or BATCH_SIZE,
        "average": arguments.weights == "ema",
        "frozen_weights": arguments.frozen_weights,
        "device": resolve_device(arguments.device) if arguments.device != "auto" else device_type(trainer),
    }


def refuse_whole_weights(
    source: ModelSource, trainer: TrainerConfig, strategy: StrategyConfig, arguments: argparse.Namespace
) -> None:
    """Refuse options of weights, and folders, that only a whole model in each process takes.

    Raises:
        BadInputError: ``strategy`` cuts the model, and the average or another folder's weights are wanted, or the
            folder's model is not of the kind that it cuts.
    """
    if not ParallelDims.from_config(trainer, strategy).cuts_the_model:
        return
    if source.config is None:
        model_of_folder(source.folder, strategy.name)
    weights, frozen = arguments.weights, arguments.frozen_weights
    for option, is_given in ((f"--weights={weights}", weights == "ema"), (f"--frozen-weights={frozen}", frozen)):
        if is_given:
            reason = f"strategy={strategy.name} opens the trained weights alone"
            raise BadInputError(f"{option}: {reason}; use strategy=ddp")


OPTIONS = ("harness_path", "harness_code", "harness_limit", "harness_few_shot", "harness_batch_size", "harness_output")


def add_harness_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of an evaluation by lm-eval."""
    parser.add_argument("--harness", metavar="TASKS", help="tasks of lm-eval to measure instead, separated by commas")
    parser.add_argument(
        "--harness-path", action="append", type=Path, default=[], metavar="FOLDER", help="task files; repeatable"
    )
    parser.add_argument("--harness-code", action="store_true", help="run the Python code that task files name")
    parser.add_argument("--harness-limit", type=positive_int, metavar="N", help="samples of a task; default all")
    parser.add_argument("--harness-few-shot", type=count, metavar="N", help="examples; default the task's")
    parser.add_argument("--harness-batch-size", type=positive_int, metavar="N", help="requests together; default 8")
    parser.add_argument("--harness-output", type=Path, metavar="FILE", help="write all results and samples as JSON")


def uses_harness(arguments: argparse.Namespace) -> bool:
    """Whether to measure lm-eval's tasks; BadInputError for an option of the harness without ``--harness``."""
    extra = [name for name in OPTIONS if getattr(arguments, name)]
    if arguments.harness is None and extra:
        raise BadInputError(f"--{extra[0].replace('_', '-')}: only works with --harness TASKS; add it, or leave it out")
    return arguments.harness is not None


def evaluate_by_harness(arguments: argparse.Namespace) -> int:
    """Measure the tasks and print a line for each metric; returns the exit code."""
    from mgpu_pipe.inference.harness.harness_settings import (
        HarnessSettings,
        check_task_files,
        require_harness,
        stay_offline,
    )
    from mgpu_pipe.launch.harness_job import measure

    require_harness()
    source = find_model(find_inputs(arguments))
    paths = [expand_home(path).absolute() for path in arguments.harness_path]
    if not arguments.harness_code:
        check_task_files(paths)
    config = compose_processes("eval --harness", arguments.overrides, arguments.device, strategies=True)
    refuse_whole_weights(source, config.trainer, config.strategy, arguments)
    stay_offline()
    settings = HarnessSettings(
        model=source.folder.absolute(),
        tasks=[name.strip() for name in arguments.harness.split(",") if name.strip()],
        paths=[str(path) for path in paths],
        runs_code=arguments.harness_code,
        batch_size=arguments.harness_batch_size or 8,
        limit=arguments.harness_limit,
        few_shot=arguments.harness_few_shot,
        average=arguments.weights == "ema",
        frozen_weights=None if arguments.frozen_weights is None else arguments.frozen_weights.absolute(),
    )
    device = resolve_device(arguments.device) if arguments.device != "auto" else device_type(config.trainer)
    code, results = measure(settings, config, device)
    if results is None:
        return code
    _print_figures(results)
    if arguments.harness_output is not None:
        replace_file(expand_home(arguments.harness_output), json.dumps(results, default=str, indent=1) + "\n")
    print_line(f"{'weights':<{WIDTH}}{source.folder}")
    return EXIT_OK


WIDTH = 24


def _print_figures(results: dict[str, Any]) -> None:
    for task, figures in results["results"].items():
        samples = results.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in figures.items():
            metric, _, chosen = key.partition(",")
            if isinstance(value, float | int) and not metric.endswith("_stderr") and "," in key:
                label = metric if chosen in ("", "none") else f"{metric} ({chosen})"
                print_line(f"{task:<{WIDTH}}{label:<{WIDTH}}{value:.4f}" + (f" of {samples}" if samples else ""))
