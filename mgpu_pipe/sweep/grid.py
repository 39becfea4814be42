"""The points of a grid: every combination of the values in the command line and in a file."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

from mgpu_pipe.config.hydra_cli import SweepWords
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.sweep.space import as_override
from mgpu_pipe.sweep.work import with_seeds


def grid(asked: SweepWords) -> list[list[list[str]]]:
    """Every combination of the values in the command line and the rows of ``sweep.points``, each for every seed.

    Raises:
        ConfigError: a key has a range of values, which cannot be enumerated.
    """
    listed: list[list[list[str]]] = []
    for key, values in asked.values.items():
        if not isinstance(values, list):
            text = str(values.input_line).partition("=")[2]
            raise ConfigError(key, text, "list its values, a,b,c or range(1,9,2)", "a range has no end of values")
        listed.append([[value] for value in values])
    if asked.config.sweep.points is not None:
        path = asked.config.sweep.points
        listed.insert(0, read_points(Path(path).expanduser()))
        if both := [word for word in listed[0][0] if word.partition("=")[0] in asked.values]:
            key = both[0].partition("=")[0]
            raise ConfigError(key, "...", f"sweep it here or in {path}", "the points have values of it already")
    settings = ([word for part in point for word in part] for point in itertools.product(*listed))
    return [with_seeds(point, asked.config.seed, asked.config.sweep.seeds) for point in settings]


def read_points(path: Path) -> list[list[str]]:
    """The overrides of every row of a csv file of points.

    Raises:
        ConfigError: the file cannot be read, has no row, a key twice, or a row of another length.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write the mark
            lines = csv.reader(file)
            (_, header), *rows = [(lines.line_num, row) for row in lines if row]
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise ConfigError("sweep.points", path, "give a csv file whose first row names keys", str(error)) from error
    header = [key.strip() for key in header]
    if twice := [key for at, key in enumerate(header) if key in header[:at]]:
        raise ConfigError("sweep.points", path, "give it one column", f"{twice[0]} heads two")
    if not rows:
        raise ConfigError("sweep.points", path, "add a row for each point", "it has no point")
    for number, row in rows:
        if len(row) != len(header):
            reason = f"line {number} has {len(row)} values for {len(header)} keys"
            raise ConfigError("sweep.points", path, "quote a value that has commas", reason)
    pairs = (zip(header, row, strict=True) for _, row in rows)
    return [[f"{key}={as_override(key, cell.strip())}" for key, cell in point] for point in pairs]
