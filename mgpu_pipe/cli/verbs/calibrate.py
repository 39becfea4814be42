"""``mgpu-pipe calibrate``: measures this machine and writes a hardware profile for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.errors import EXIT_OK, ConfigError, ConfigErrors, print_line
from mgpu_pipe.system.local_files import creation_problem, expand_home, replace_file

if TYPE_CHECKING:
    from mgpu_pipe.config.hydra.compose import Composition
    from mgpu_pipe.planning.calibration import Measurements

DESCRIPTION = """\
Measure matrix products, memory, collectives and small training steps on
trainer.devices processes or GPUs of this machine, all at once, in about a
minute, and write a hardware profile for plan.hardware=<file>:
--out <file>.yaml, calibrated.yaml if left out."""
OUT = "--out"
USUAL = "calibrated.yaml"


def calibrate(words: list[str]) -> int:
    """``mgpu-pipe calibrate [OVERRIDES] [--out FILE.yaml]``."""
    from mgpu_pipe.launch.compositions import compose_and_run

    file, rest = _split_file(words)

    def job(composition: Composition) -> int:
        from mgpu_pipe.checks.check_sizes import range_errors
        from mgpu_pipe.launch.measurement import measure_hardware
        from mgpu_pipe.planning.calibration import profile_text
        from mgpu_pipe.planning.hardware_profile import read_profile

        errors = composition.errors or range_errors(composition.config)
        if errors:
            raise ConfigErrors(errors)
        _refuse_other_file(file)
        measured = measure_hardware(composition.config)
        _print(measured)
        text = profile_text(measured)
        read_profile(text, str(file), OUT)
        replace_file(file, text)
        print_line(f"profile: {file}; use it: mgpu-pipe plan plan.hardware={file}")
        return EXIT_OK

    return compose_and_run("calibrate", DESCRIPTION, rest, job)


def _split_file(words: list[str]) -> tuple[Path, list[str]]:
    """The profile's file, which can be written, and the other words; or ConfigError."""
    rest, name = list(words), USUAL
    for index, word in enumerate(words):
        if word == OUT or word.startswith(f"{OUT}="):
            name = word.partition("=")[2] if "=" in word else next(iter(words[index + 1 :]), "")
            rest = [*words[:index], *words[index + (1 if "=" in word else 2) :]]
    file = expand_home(name)
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(OUT, name, f"name it like {USUAL}", "a profile is a YAML file")
    if not file.parent.is_dir():
        raise ConfigError(OUT, name, "make the folder, or name another", f"there is no folder {file.parent}")
    if problem := creation_problem(file.parent):
        raise ConfigError(OUT, name, "name a file in another folder", problem)
    return file, rest


def _refuse_other_file(file: Path) -> None:
    """Raise ConfigError for a file that no earlier ``calibrate`` wrote."""
    from mgpu_pipe.planning.calibration import SOURCE
    from mgpu_pipe.planning.hardware_profile import yaml_of

    if not file.exists():
        return
    try:
        content = yaml_of(file, str(file), OUT)
    except ConfigError:
        content = None
    if not isinstance(content, dict) or content.get("source") != SOURCE:
        raise ConfigError(OUT, file, "name another", "this file exists, and calibrate did not write it")


def _print(measured: Measurements) -> None:
    from mgpu_pipe.report.columns import print_columns
    from mgpu_pipe.report.numbers import seconds

    rows = [
        [
            "matrix product",
            f"{rows} x {columns}, inner {inner}",
            seconds(took),
            f"{_giga(2 * rows * columns * inner / took)} GFLOP/s",
        ]
        for rows, columns, inner, took in measured.products
    ]
    rows.append(["copy in memory", "", "", f"{_giga(measured.bandwidth)} GB/s"])
    for size, ranks, took in measured.reductions:
        sent = 2 * size * (ranks - 1) / ranks / took
        rows.append(["all-reduce", f"{size:,} bytes, {ranks} processes", seconds(took), f"{_giga(sent)} GB/s"])
    names = {"forward": "", "backward": "", "launch": "forward, one token"}
    rows += [["block", text or name, seconds(measured.block[name]), ""] for name, text in names.items()]
    for work, took in measured.steps:
        shape = f"{work['layers']:g} layers of {work['width']:g}, {work['rows']:g} x {work['sequence']:g} tokens"
        rows.append(["step", shape, seconds(took), ""])
    print_columns(("measured", "of", "seconds", "rate"), rows, ("seconds", "rate"), below=(), spare=())


def _giga(rate: float) -> str:
    return f"{rate / 1e9:,.3g}"


VERB = Verb("measure this machine, and write a hardware profile for plan", calibrate, composes=True)
