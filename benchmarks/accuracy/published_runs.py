"""Tables of published training runs as :class:`mgpu_pipe.planning.work.Work`, and the fit of constants to them."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support import RESULTS
from mgpu_pipe.planning import calibration
from mgpu_pipe.planning.hardware_profile import load_profile
from mgpu_pipe.planning.model_work import ADAPTERS, CAST_BYTES
from mgpu_pipe.planning.step_time import step_time
from mgpu_pipe.planning.work import Constants, Hardware, Work

FOLDER = Path(__file__).parents[2] / "tests" / "data_published"
FOLDS = 5
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Runs:
    """Rows of a table whose seconds are known."""

    names: list[str]
    models: list[str]
    """Which rows have the same model."""
    worlds: list[str]
    """Which rows differ in the layout alone."""
    work: Work
    hardware: Hardware
    seconds: Array

    def select(self, chosen: Array) -> Runs:
        """The rows where ``chosen`` is true."""
        at = np.flatnonzero(chosen)
        return Runs(
            [self.names[i] for i in at],
            [self.models[i] for i in at],
            [self.worlds[i] for i in at],
            Work(**{field.name: getattr(self.work, field.name)[at] for field in fields(Work)}),
            Hardware(**{field.name: getattr(self.hardware, field.name)[at] for field in fields(Hardware)}),
            self.seconds[at],
        )

    def predict(self, constants: Constants) -> Array:
        return np.asarray(step_time(self.work, self.hardware, constants).total)

    def errors(self, constants: Constants) -> Array:
        """Absolute errors in percent."""
        return 100 * np.abs(self.predict(constants) / self.seconds - 1)


MEAN_CONTEXT = 1200 * math.exp(0.6**2)
"""Mean length of the document of a token, for log-normal lengths of mean 1,200 and sigma 0.6."""
PROFILES = {"A100-40": "a100_40", "A100-80": "a100_80", "H100": "h100"}
NETWORKS = {"bloom-bench": 50e9}
"""Bytes a second that a node sends where the source has another network than the profile: Jean Zay has four Omni-Path
ports of 100 Gb/s a node."""


def read_runs(file: str, source: str | None = None, gpu: str | None = None) -> Runs:
    """Rows of a table with seconds and a micro-batch, of one source and GPU."""
    with open(FOLDER / f"{file}.csv", encoding="utf-8") as text:
        rows = [row for row in csv.DictReader(text) if row["sec"] and row["mbs"] and row["status"] == "ok"]
    rows = [row for row in rows if source in (None, row["source"]) and gpu in (None, row["gpu"])]
    return to_runs(
        [f"{row['source']} {row['row']}" for row in rows],
        [f"{row['layers']}x{row['hidden']}" for row in rows],
        [f"{row['layers']}x{row['hidden']}x{row['heads']}, {row['gpus']} GPUs" for row in rows],
        [_work(row) for row in rows],
        [_hardware(row) for row in rows],
        [float(row["sec"]) for row in rows],
    )


def to_runs(
    names: list[str],
    models: list[str],
    worlds: list[str],
    works: Sequence[Work],
    hardware: Sequence[Hardware],
    seconds: Sequence[float],
) -> Runs:
    """Runs of rows with a work and a hardware each."""

    def column(entries: Sequence[Any], name: str) -> Array:
        return np.array([float(getattr(entry, name)) for entry in entries])

    return Runs(
        names,
        models,
        worlds,
        Work(**{field.name: column(works, field.name) for field in fields(Work)}),
        Hardware(**{field.name: column(hardware, field.name) for field in fields(Hardware)}),
        np.array(seconds),
    )


def join(*tables: Runs) -> Runs:
    """The rows of all tables."""

    def column(part: str, name: str) -> Array:
        return np.concatenate([getattr(getattr(table, part), name) for table in tables])

    return Runs(
        [name for table in tables for name in table.names],
        [name for table in tables for name in table.models],
        [name for table in tables for name in table.worlds],
        Work(**{field.name: column("work", field.name) for field in fields(Work)}),
        Hardware(**{field.name: column("hardware", field.name) for field in fields(Hardware)}),
        np.concatenate([table.seconds for table in tables]),
    )


def rows_of_this_project() -> Runs:
    """This project's rows of ``results/gpu_step-gpu.json``, of one H100."""
    result = json.loads((RESULTS / "gpu_step-gpu.json").read_text())
    seconds = {row["case"]: row["seconds a step"] for row in result["rows"]}
    whole = Work(
        layers=16, width=2048, inner=8192, heads=32, key_value_heads=8, head_dim=64, vocabulary=128256, sequence=4096,
        context=4096, gated=1, tied=1, rows=2, micro_batches=4, zero=0, cast_bytes=CAST_BYTES,
    )  # fmt: skip
    packed = replace(whole, context=MEAN_CONTEXT)
    three = replace(
        packed, layers=28, width=3072, heads=24, head_dim=128, rows=1, micro_batches=8,
        recompute_products=1, recompute_attention=1, recompute_elementwise=1,
    )  # fmt: skip
    cases = {
        "mgpu_pipe": whole,
        "mgpu_pipe, packed documents": packed,
        "mgpu_pipe, packed, fsdp of one": packed,
        "mgpu_pipe, packed, micro-batches of 4": replace(packed, rows=4, micro_batches=2),
        "mgpu_pipe, packed, fp8, micro-batches of 4": replace(packed, rows=4, micro_batches=2, float8=1),
        "mgpu_pipe, packed, 3B": three,
    }
    names = list(cases)
    hardware = [load_profile("h100").hardware] * len(names)
    return to_runs(names, names, names, list(cases.values()), hardware, [seconds[name] for name in names])


def _hardware(row: dict[str, str]) -> Hardware:
    hardware = load_profile(PROFILES[row["gpu"]]).hardware
    return replace(hardware, network=NETWORKS.get(row["source"], hardware.network))


def _work(row: dict[str, str]) -> Work:
    def number(name: str) -> float:
        return float(row[name])

    mode, zero = row["rc"], number("zero")
    return Work(
        layers=number("layers"),
        width=number("hidden"),
        inner=number("ffn"),
        heads=number("heads"),
        key_value_heads=number("kv"),
        head_dim=number("hidden") // number("heads"),
        vocabulary=number("vocab"),
        sequence=number("seq"),
        context=float(row.get("context") or row["seq"]),
        gated=number("gated"),
        tied=number("tied"),
        tp=number("tp"),
        pp=number("pp"),
        cp=number("cp"),
        ep=number("ep"),
        dp_shard=number("dp"),
        stages_per_rank=number("vp"),
        rows=number("mbs"),
        micro_batches=number("gbs") / number("mbs") / number("dp"),
        zero=zero,
        sequence_parallel=number("sp"),
        recompute_products=float(mode == "full"),
        recompute_attention=float(mode in ("full", "selective")),
        recompute_elementwise=float(mode in ("full",)),
        flash=float(row["attn"] == "flash"),
        is_balanced=0.0,
        float8=float("fp8" in (row["prec"] + row["note"])),
        gradient_bytes=2.0 if "PURE" in row["note"] else 4.0,
        trained=ADAPTERS if float(row.get("rank") or 0) else 1.0,
        adapter_rank=float(row.get("rank") or 0),
        adapted=float(row.get("adapted") or 1),
    )


def fold_of(name: str) -> int:
    """Fold of a row, by its name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % FOLDS


def fit(runs: Runs, free: Sequence[str], start: Constants | None = None, width: float | None = None) -> Constants:
    """Constants that predict ``runs``; see :func:`mgpu_pipe.planning.calibration.fit`."""
    return calibration.fit(runs.predict, runs.seconds, free, start, width)
