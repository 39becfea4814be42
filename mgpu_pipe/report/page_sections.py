"""Builds the report's cards, tables and texts as plain values for the template."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mgpu_pipe.report import numbers
from mgpu_pipe.report.account import attempts_table, attempts_text, changed_defaults, strategies_text, times
from mgpu_pipe.report.held_out_figures import class_figures, shown_figures
from mgpu_pipe.report.numbers import TIMES
from mgpu_pipe.report.run_view import RunView, finite, number
from mgpu_pipe.runs.latest import RUN

SHADES = 5
"""Shades of a cell, by its share of the row's class."""
LONGEST_NAME = 24
"""Longest class name, in characters, of a matrix without class numbers."""


def confusion(view: RunView) -> dict[str, Any] | None:
    """The confusion matrix of the last evaluation: a row per class and a column per predicted class; None for none."""
    counts, names = view.summary_value("found", "confusion"), view.summary_value("data", "classes")
    if not isinstance(counts, list) or not isinstance(names, list) or len(names) != len(counts) or not names:
        return None
    if not all(isinstance(row, list) and len(row) == len(names) for row in counts):
        return None
    labels = [str(name) for name in names]
    numbered = len({*labels}) < len(labels) or max(map(len, labels)) > LONGEST_NAME
    titles = [f"{index} {name}" for index, name in enumerate(labels)] if numbered else labels
    rows = []
    for index, row in enumerate(counts):
        known = [value if (value := number(count)) >= 0 else 0.0 for count in row]
        whole = sum(known) or 1.0
        cells = [
            {
                "text": numbers.plain(count),
                "shade": round(SHADES * min(1.0, value / whole)) if 0 < value < float("inf") else 0,
                "right": column == index,
                "title": f"{titles[index]}, taken for {titles[column]}: {numbers.plain(count)}",
            }
            for column, (count, value) in enumerate(zip(row, known, strict=True))
        ]
        rows.append({"title": titles[index], "cells": cells})
    return {"titles": titles, "rows": rows}


LABELS = {
    "num_documents": "documents",
    "num_tokens": "tokens",
    "train_samples": "training samples",
    "train_tokens": "training tokens",
    "held_out_samples": "held-out samples",
    "validation_samples": "of them evaluated",
    "too_long_samples": "samples that do not fit",
    "on_too_long": "what becomes of them",
    "bad_samples": "samples that cannot be used",
    "num_micro_batches": "micro-batches a process",
    "micro_batch_size": "micro-batch size",
    "global_batch_size": "samples a step",
    "data_parallel_size": "data-parallel processes",
    "samples_per_process": "samples a process",
    "seq_len": "tokens a sample",
    "eos_token_id": "end-of-text token",
    "vocab_size": "vocabulary",
    "peak_gib": "peak",
    "memory_gib": "memory",
    "mgpu_pipe": "mgpu_pipe",
    "gpus": "GPUs",
    "cpu": "CPU",
    "step_s": "a step, median",
    "slowest_s": "slowest",
    "data_s": "waits for data, mean",
    "cpu_s": "CPU time, mean",
}
LEFT_OUT = ("started", "created", RUN)
"""Fields of environment.json that repeat others: seconds since 1970, and parts of the configuration."""
MODEL_KEYS = ("name", "type", "path", "attn_implementation")
OF_TOKENS = ("tokenizer", "seq_len", "packing", "throughput/tokens_per_s", "throughput/padding")
"""Fields without meaning for runs on pictures or recordings."""
DATA_KEYS = ("source", "paths", "tokenizer", "seq_len", "packing")


def subtitle(view: RunView) -> list[str]:
    """Two lines: the folder; model, strategy, topology and processes."""
    parameters = number(view.summary_value("model", "parameters"))
    model = view.summary_value("model", "name") or view.config_value("model", "name") or ""
    if not math.isnan(parameters):
        model = f"{model}, {numbers.count(parameters)} parameters".lstrip(", ")
    trained = number(view.summary_value("model", "trained"))
    if trained < parameters:
        model = f"{model}, {numbers.count(trained)} of them trained"
    world = view.summary.get("world_size")
    processes = f"{world} process{'es' if world != 1 else ''}" if isinstance(world, int) else ""
    strategy = strategies_text(view)
    parts = [model, f"strategy {strategy}" if strategy else "", topology_text(view), processes]
    return [view.folder_name, " · ".join(part for part in parts if part)]


def topology_text(view: RunView) -> str:
    """Topology of the summary as ``dp_replicate=2 x tp=4``."""
    topology = view.summary.get("topology")
    if isinstance(topology, Mapping):
        sizes = {axis: size for axis, size in topology.items() if isinstance(size, int) and size > 1}
        return f" {TIMES} ".join(f"{axis}={size}" for axis, size in sizes.items())
    return str(topology or "")


def figures(view: RunView) -> list[dict[str, str]]:
    """Cards of the key figures, the most important first, without unmeasured ones."""
    objective, headline = view.objective, view.objective.headline
    figure = numbers.metric(view.headline, headline.percent)
    cards = [_card(numbers.capitalize(headline.title), figure, baseline_text(view))]
    loss, held_out = view.final("train/loss"), view.final("val/loss")
    size = view.final("val/bits_per_byte")
    in_bits = "" if math.isnan(size) else f"; {numbers.figure(size, 4)} bits a byte"
    cards.append(_card("Held-out loss", numbers.fix_decimals(held_out, 4), objective.metrics[0].unit + in_bits))
    cards.append(_card("Training loss", numbers.fix_decimals(loss, 4), "last step"))
    cards += [_task_card(view, name, task) for name, task in _mapping(view.config_value("eval", "tasks")).items()]
    rate = view.tokens_per_s
    mfu = view.final("throughput/mfu")
    samples, padding = view.final("throughput/samples_per_s"), view.final("throughput/padding")
    rates = [(rate, "tokens/s"), (samples, "samples/s")]
    rates = [(value, unit) for value, unit in rates if not math.isnan(value)] or [(math.nan, "tokens/s")]
    throughput = numbers.MISSING if math.isnan(rates[0][0]) else numbers.count(rates[0][0])
    details = [
        f"{rates[0][1]}, median",
        *(f"{numbers.figure(value, 3)} {unit}" for value, unit in rates[1:]),
        f"{100 * padding:.1f}% padding" if padding >= 0.0005 else "",
        "" if math.isnan(mfu) else f"MFU {100 * mfu:.1f}%",
    ]
    note = "; ".join(part for part in details if part)
    cards.append(_card("Throughput", throughput, note))
    total = view.total_steps
    cards.append(_card("Steps", f"{view.steps:,}", f"of {total:,}" if total else "done"))
    cards.append(_card("Wall time", numbers.duration(view.wall_s), attempts_text(view) or "in all"))
    memory = numbers.gibibytes(number(view.config_value("plan", "predicted_gib")))
    note = "of a process" + ("" if memory == numbers.MISSING else f"; {memory} predicted by strategy=auto")
    cards.append(_card("Peak memory", numbers.gibibytes(view.peak_gib), note))
    predicted = number(view.config_value("plan", "predicted_seconds"))
    steps = finite(view.metrics.get("throughput/step_s", []))
    if steps and not math.isnan(predicted):
        note = f"median; {numbers.seconds(predicted)} predicted by strategy=auto"
        cards.append(_card("Step time", numbers.seconds(statistics.median(steps)), note))
    return [card for card in cards if card["value"] != numbers.MISSING]


def _task_card(view: RunView, name: str, task: object) -> dict[str, str]:
    kind = str(_mapping(task).get("kind"))
    value = numbers.metric(view.final(f"val/{name}"), percent=kind != "perplexity")
    return _card(name.replace("_", " ").capitalize(), value, kind)


def baseline_text(view: RunView) -> str:
    """The baseline of token frequencies, with its ratio to the headline metric."""
    unigram, reached = view.baseline, view.headline
    if math.isnan(unigram):
        return ""
    ratio = unigram / reached if reached and math.isfinite(reached) else math.nan
    better = f", {ratio:.1f}{TIMES} lower" if ratio >= 1.05 else ""
    return f"unigram baseline {numbers.metric(unigram)}{better}"


def blocks(view: RunView) -> list[dict[str, Any]]:
    """The nonempty tables of one run, each a card."""
    batch = view.summary.get("batch") or {"global_batch_size": view.config_value("data", "global_batch_size")}
    data = {key: value for key in DATA_KEYS if (value := view.config_value("data", key)) not in (None, [], "")}
    metrics = view.summary.get("metrics")
    if not view.counts_tokens:
        batch, data, metrics = (
            {key: value for key, value in _mapping(section).items() if key not in OF_TOKENS}
            for section in (batch, data, metrics)
        )
    model = {key: value for key in MODEL_KEYS if (value := view.config_value("model", key)) not in (None, "")}
    all_blocks = [
        _block("Overrides", code=view.overrides),
        _block("What differs from the defaults", table=changed_defaults(view)),
        _block("Where the time went", _parts(times(view))),
        _block("Topology", _parts(_topology(view))),
        _block("Batch", _parts(batch), text=batch_text(view)),
        _block("Model", _parts({**model, **_mapping(view.summary.get("model"))})),
        _block("Data", _parts({**data, **_mapping(view.summary.get("data"))})),
        _by_rank("Time of each rank's step", view.summary.get("times")),
        _by_rank("Memory", view.summary.get("memory")),
        _block("Final metrics", _parts(metrics)),
        *_class_blocks(view),
        *_task_blocks(view),
        _block("Checkpoints", table=_checkpoint_table(view)),
        _block("Attempts", table=attempts_table(view), wide=True),
        _block("Environment", _parts({key: value for key, value in view.environment.items() if key not in LEFT_OUT})),
    ]
    return [block for block in all_blocks if block["code"] or block["parts"] or block["table"]]


def batch_text(view: RunView) -> str:
    """The split of a step's samples as one equation; empty if the summary has no sizes."""
    sizes = [
        view.summary_value("batch", key) for key in ("global_batch_size", "data_parallel_size", "micro_batch_size")
    ]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return ""
    total, processes, micro = sizes
    tokens = view.config_value("data", "seq_len")
    step = f"; {total * tokens:,} tokens a step" if isinstance(tokens, int) and view.counts_tokens else ""
    count = total // processes // micro
    ranks = f"{processes} process{'' if processes == 1 else 'es'}"
    return f"{total} samples = {ranks} {TIMES} {count} micro-batch{'' if count == 1 else 'es'} {TIMES} {micro}{step}"


def _topology(view: RunView) -> dict[str, Any]:
    topology = view.summary.get("topology")
    sizes = {"axes": topology_text(view) or "one process"} if topology else {}
    strategy = {f"strategy {key}": view.config_value("strategy", key) for key in ("name", "engine")}
    return {**strategy, "processes": view.summary.get("world_size"), **sizes}


def _by_rank(title: str, section: object) -> dict[str, Any]:
    """A table with a row per rank; a list of rows if the summary has no lists by rank."""
    values = _mapping(section)
    by_rank = {key: value for key, value in values.items() if isinstance(value, list)}
    if not by_rank:
        return _block(title, _parts(values))
    rows = [
        [str(rank), *(_value_text(key, value[rank] if rank < len(value) else None) for key, value in by_rank.items())]
        for rank in range(max(map(len, by_rank.values())))
    ]
    names = ["rank", *(_label(key).removesuffix(" gib") for key in by_rank)]
    rest = {key: value for key, value in values.items() if key not in by_rank}
    return _block(title, _parts(rest), table={"names": names, "rows": rows, "numeric": True})


def _checkpoint_table(view: RunView) -> dict[str, Any] | None:
    state = {True: "complete", False: "incomplete, never used"}
    rows = [[f"{step.step:,}", numbers.gibibytes(step.nbytes / 2**30), state[step.whole]] for step in view.checkpoints]
    return {"names": ["step", "size", "state"], "rows": rows} if rows else None


def _task_blocks(view: RunView) -> list[dict[str, Any]]:
    """A card per task with some answers next to the truth."""
    cards = []
    for name, task in _mapping(view.summary.get("tasks")).items():
        samples = _mapping(task).get("shown")
        rows = [_mapping(sample) for sample in samples] if isinstance(samples, list) else []
        lines = [
            [*(str(row.get(key, "")) for key in ("question", "answer", "truth")), "yes" if row.get("right") else "no"]
            for row in rows
        ]
        value, denominator = view.final(f"val/{name}"), _mapping(task).get("counted")
        text = f"val/{name}: {numbers.metric(value, percent=True)} of {denominator}; some of them"
        table = {"names": ["question", "answer", "truth", "right"], "rows": lines} if lines else None
        cards.append(_block(f"Task {name}", table=table, text=text))
    return cards


def _class_blocks(view: RunView) -> list[dict[str, Any]]:
    """A card of the last evaluation's figures of each class, and one for zero-shot classes."""
    shot = _mapping(view.summary_value("found", "zero_shot"))
    every = [
        ("Classes", _mapping(view.summary.get("found")), view.summary_value("data", "classes")),
        ("Zero-shot classes", shot, shot.get("names")),
    ]
    cards = []
    for title, findings, names in every:
        try:
            rows, left_out = shown_figures(class_figures(findings, [str(name) for name in names or ()]))
            error = number(_mapping(findings.get("calibration")).get("expected_error"))
        except (KeyError, TypeError, ValueError, IndexError):
            continue  # a summary of another version, or a changed one
        cells = [[row.name, str(row.samples), *row.shares(), row.taken_for] for row in rows]
        texts = [] if math.isnan(error) else [f"expected calibration error {100 * error:.2f}%"]
        texts += [f"the {len(rows)} least accurate of {left_out + len(rows)} classes"] if left_out else []
        table = {"names": ["class", "samples", "accuracy", "precision", "most often taken for"], "rows": cells}
        cards.append(_block(title, table=table, text="; ".join(texts)))
    return cards


def _parts(values: object) -> list[dict[str, Any]]:
    """One list of rows for the scalars, then one for each nested mapping."""
    tree = _mapping(values)
    rows = [
        (_label(key), _value_text(key, value))
        for key, value in tree.items()
        if value not in (None, "", [], {}) and not isinstance(value, Mapping)
    ]
    parts = [{"title": "", "rows": rows}] if rows else []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            inner = [(str(name), _value_text(str(name), item)) for name, item in value.items()]
            parts.append({"title": _label(key), "rows": inner})
    return parts


def _mapping(values: object) -> dict[str, Any]:
    return {str(key): value for key, value in values.items()} if isinstance(values, Mapping) else {}


def _label(key: str) -> str:
    return LABELS.get(key, key.replace("_", " ") if "/" not in key else key)


def _value_text(key: str, value: object) -> str:
    if key.endswith("_gib"):
        return numbers.gibibytes(number(value))
    if key.endswith("_s") and isinstance(value, (int, float)) and not key.endswith("per_s"):
        return numbers.seconds(float(value)) if abs(value) < 10 else numbers.duration(float(value))
    if key == "command" and isinstance(value, list):
        return " ".join(map(str, value))
    return numbers.plain(value)


def _block(
    title: str,
    parts: Sequence[dict[str, Any]] = (),
    table: dict[str, Any] | None = None,
    code: Sequence[str] = (),
    text: str = "",
    wide: bool = False,
) -> dict[str, Any]:
    return {"title": title, "parts": list(parts), "table": table, "code": list(code), "text": text, "wide": wide}


def _card(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}
