"""Errors of the planner's step time on published runs, and the constants of its hardware profiles.

Constants are fitted in logarithms around their priors on other folds than the row that is predicted (folds by the hash
of the row's name) or on other models than its own. The chosen plan's regret is the time of the layout that the
prediction prefers over the fastest measured one of the same model and number of GPUs.

``python -m benchmarks.accuracy.plan_accuracy`` prints the table and writes the result; ``--constants`` also writes the
constants that are fitted to all rows of a GPU into the profiles.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.accuracy.published_runs import Array, Runs, fit, fold_of, join, read_runs, rows_of_this_project
from benchmarks.support import RESULTS, finish
from mgpu_pipe.planning.hardware_profile import FOLDER as PROFILES
from mgpu_pipe.planning.work import Constants, constant_names

KORTHIKANTI = ("gemm", "attention", "memory", "link")
STACK = (
    *("gemm", "attention", "short_attention", "split_bytes", "shared_bytes", "logit_bytes", "optimizer_bytes"),
    "float8",
)
"""Constants that this project's runs decide, after others' runs on the same GPU."""
STACK_WIDTH = 0.25


@dataclass(frozen=True)
class Case:
    """A table and how it is split; ``demand`` is the mean error in percent that is asked of it, ``regret`` likewise."""

    runs: Runs
    parts: Sequence[Hashable]
    demand: float
    regret: float | None = None
    constants: Sequence[str] = tuple(constant_names())
    before: Runs | None = None
    """Rows of others, whose constants are where the fit starts."""


def folds(runs: Runs) -> list[int]:
    return [fold_of(name) for name in runs.names]


def cases() -> dict[str, Case]:
    vtrain, bloom, table = read_runs("vtrain_multi"), read_runs("bloom_bench"), read_runs("papers", "Korthikanti-T5")
    mine, titan, fms = rows_of_this_project(), read_runs("torchtitan"), read_runs("fms_fsdp")
    nemo = read_runs("nemo")
    foundry = {gpu: read_runs("llm_foundry", gpu=gpu) for gpu in ("A100-40", "A100-80", "H100")}
    return {
        "vTrain, several nodes": Case(vtrain, folds(vtrain), 6.5, 3.0),
        "vTrain, a model held out": Case(vtrain, vtrain.models, 10.0),
        "Korthikanti, table 5, a model held out": Case(table, table.models, 2.5, constants=KORTHIKANTI),
        **{f"llm-foundry, {gpu}": Case(runs, folds(runs), 5.0) for gpu, runs in foundry.items()},
        "BLOOM": Case(bloom, folds(bloom), 4.0, 1.0),
        "this project, one H100, a row held out": Case(mine, mine.names, 8.0, constants=STACK, before=foundry["H100"]),
        "torchtitan, 5 folds": Case(titan, folds(titan), float("nan")),
        "fms-fsdp, a model held out": Case(fms, fms.models, float("nan")),
        "NeMo and Megatron-Bridge in fp8, 5 folds": Case(nemo, folds(nemo), 10.0),
    }


def predict_held_out(case: Case, parts: Sequence[Hashable] | None = None) -> Array:
    """Seconds of every row of ``parts`` (all), by constants fitted on the other parts; nan for other rows."""
    start = None if case.before is None else fit(case.before, constant_names())
    width = None if case.before is None else STACK_WIDTH
    predicted = np.full(len(case.runs.names), np.nan)
    for part in sorted(set(case.parts) if parts is None else set(parts), key=str):
        held_out = np.array([each == part for each in case.parts])
        constants = fit(case.runs.select(~held_out), case.constants, start, width)
        predicted[held_out] = case.runs.select(held_out).predict(constants)
    return predicted


def regret(runs: Runs, predicted: Array) -> float:
    """Mean over groups of rows that differ in the layout: seconds of the preferred one over the fastest, in percent."""
    found = []
    for world in sorted(set(runs.worlds)):
        at = [index for index, name in enumerate(runs.worlds) if name == world]
        if len(at) > 1:
            chosen = min(at, key=lambda index: predicted[index])
            found.append(100 * (runs.seconds[chosen] / min(runs.seconds[index] for index in at) - 1))
    return float(np.mean(found))


def profile_constants() -> dict[str, Constants]:
    """Constants of the profiles, fitted to all rows of a GPU; this project's rows come last."""
    published = {
        "h100": join(read_runs("llm_foundry", gpu="H100"), read_runs("fms_fsdp", gpu="H100")),
        "a100_80": join(read_runs("llm_foundry", gpu="A100-80"), read_runs("fms_fsdp", gpu="A100-80")),
        "a100_40": read_runs("llm_foundry", gpu="A100-40"),
    }
    constants = {name: fit(runs, constant_names()) for name, runs in published.items()}
    return {**constants, "h100": fit(rows_of_this_project(), STACK, constants["h100"], STACK_WIDTH)}


def rounded(constants: Constants) -> dict[str, float]:
    """Constants that a fit moved, to three digits."""
    priors = Constants()
    values = {name: float(f"{getattr(constants, name):.3g}") for name in constant_names()}
    return {name: value for name, value in values.items() if abs(value / getattr(priors, name) - 1) > 0.02}


def write_constants() -> None:
    """Replace the constants of the profiles."""
    for name, fitted in profile_constants().items():
        constants = rounded(fitted)
        file = PROFILES / f"{name}.yaml"
        text = re.sub(r"\nconstants:.*", "\n", file.read_text(), flags=re.DOTALL).rstrip("\n")
        lines = [f"  {word}: {value:g}" for word, value in constants.items()]
        header = "constants:  # fitted by python -m benchmarks.accuracy.plan_accuracy --constants"
        file.write_text("\n".join([text, header, *lines]) + "\n")


def main() -> None:
    rows: list[list[Any]] = []
    for name, case in cases().items():
        predicted = predict_held_out(case)
        errors = 100 * np.abs(predicted / case.runs.seconds - 1)
        found = None if case.regret is None else regret(case.runs, predicted)
        rows.append([name, len(errors), *map(float, (errors.mean(), np.median(errors), errors.max())), case.demand])
        rows[-1] = [None if isinstance(cell, float) and np.isnan(cell) else cell for cell in rows[-1]]
        rows[-1] += [found, case.regret]
    columns = [
        "runs",
        "rows",
        "mean error, %",
        "median, %",
        "worst, %",
        "demand, %",
        "regret, %",
        "demand of regret, %",
    ]
    notes = "Constants fitted on other folds or models. Sources and licences: tests/data_published/README.md."
    if "--constants" in sys.argv:
        write_constants()
    finish("plan_accuracy", "Predicted seconds a step beside published runs", columns, rows, notes)


def committed() -> list[dict[str, Any]]:
    """Rows of the committed result."""
    content: list[dict[str, Any]] = json.loads((RESULTS / "plan_accuracy-cpu.json").read_text())["rows"]
    return content


if __name__ == "__main__":
    main()
