"""What the report says in words and figures, as plain values for the template."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mgpu_pipe.report import numbers
from mgpu_pipe.report.account import from_defaults, times
from mgpu_pipe.report.numbers import TIMES
from mgpu_pipe.report.run_view import RunView, number

LABELS = {
    "num_documents": "documents",
    "num_tokens": "tokens",
    "train_samples": "training samples",
    "train_tokens": "training tokens",
    "held_out_samples": "held-out samples",
    "validation_samples": "of them evaluated",
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
EPOCHS = ("started", "created")
"""Seconds since 1970 in environment.json, which has the date in words besides."""
MODEL_KEYS = ("name", "type", "path", "attn_implementation")
OF_TOKENS = ("tokenizer", "seq_len", "packing", "throughput/tokens_per_s", "throughput/padding")
"""What says nothing of a run on pictures or recordings."""
DATA_KEYS = ("source", "paths", "tokenizer", "seq_len", "packing")


def subtitle(view: RunView) -> list[str]:
    """Folder and model, topology and hardware: what was run, in two lines."""
    parameters = number(view.of_summary("model", "parameters"))
    model = view.of_summary("model", "name") or view.of_config("model", "name") or ""
    if not math.isnan(parameters):
        model = f"{model}, {numbers.count(parameters)} parameters".lstrip(", ")
    trained = number(view.of_summary("model", "trained"))
    if trained < parameters:
        model = f"{model}, {numbers.count(trained)} of them trained"
    world = view.summary.get("world_size")
    processes = f"{world} process{'es' if world != 1 else ''}" if isinstance(world, int) else ""
    strategy = view.of_config("strategy", "name")
    parts = [model, f"strategy {strategy}" if strategy else "", topology_text(view), processes]
    return [view.folder_name, " · ".join(part for part in parts if part)]


def topology_text(view: RunView) -> str:
    """``dp_replicate=2 x tp=4``, from the sizes or the text that the summary holds."""
    topology = view.summary.get("topology")
    if isinstance(topology, Mapping):
        sizes = {axis: size for axis, size in topology.items() if isinstance(size, int) and size > 1}
        return f" {TIMES} ".join(f"{axis}={size}" for axis, size in sizes.items())
    return str(topology or "")


def figures(view: RunView) -> list[dict[str, str]]:
    """The key figures, most telling first; what was not measured is left out."""
    objective, headline = view.objective, view.objective.headline
    cards = [_card(headline.title.capitalize(), numbers.metric(view.headline, headline.percent), baseline_text(view))]
    loss, held_out = view.final("train/loss"), view.final("val/loss")
    cards.append(_card("Held-out loss", numbers.fixed(held_out, 4), objective.metrics[0].unit))
    cards.append(_card("Training loss", numbers.fixed(loss, 4), "last step"))
    cards += [_task_card(view, name, task) for name, task in _mapping(view.of_config("eval", "tasks")).items()]
    rate = view.tokens_per_s
    mfu = view.final("throughput/mfu")
    samples, padding = view.final("throughput/samples_per_s"), view.final("throughput/padding")
    rates = [(rate, "tokens/s"), (samples, "samples/s")]
    rates = [(value, unit) for value, unit in rates if not math.isnan(value)] or [(math.nan, "tokens/s")]
    shown = numbers.MISSING if math.isnan(rates[0][0]) else numbers.count(rates[0][0])
    told = [
        f"{rates[0][1]}, median",
        *(f"{numbers.figure(value, 3)} {unit}" for value, unit in rates[1:]),
        f"{100 * padding:.1f}% padding" if padding >= 0.0005 else "",
        "" if math.isnan(mfu) else f"MFU {100 * mfu:.1f}%",
    ]
    note = "; ".join(part for part in told if part)
    cards.append(_card("Throughput", shown, note))
    total = view.total_steps
    cards.append(_card("Steps", f"{view.steps:,}", f"of {total:,}" if total else "done"))
    cards.append(_card("Wall time", numbers.duration(view.wall_s), _attempts_text(view)))
    cards.append(_card("Peak memory", numbers.gibibytes(view.peak_gib), "of a process"))
    return [card for card in cards if card["value"] != numbers.MISSING]


def _task_card(view: RunView, name: str, task: object) -> dict[str, str]:
    kind = str(_mapping(task).get("kind"))
    shown = numbers.metric(view.final(f"val/{name}"), percent=kind != "perplexity")
    return _card(name.replace("_", " ").capitalize(), shown, kind)


def baseline_text(view: RunView) -> str:
    """The headline beside what the data's token frequencies alone reach."""
    unigram, reached = view.baseline, view.headline
    if math.isnan(unigram):
        return ""
    ratio = unigram / reached if reached and math.isfinite(reached) else math.nan
    better = f", {ratio:.1f}{TIMES} lower" if ratio >= 1.05 else ""
    return f"unigram baseline {numbers.metric(unigram)}{better}"


def blocks(view: RunView) -> list[dict[str, Any]]:
    """The tables of one run, each a card; empty ones are left out."""
    batch = view.summary.get("batch") or {"global_batch_size": view.of_config("data", "global_batch_size")}
    data = {key: value for key in DATA_KEYS if (value := view.of_config("data", key)) not in (None, [], "")}
    metrics = view.summary.get("metrics")
    if not view.counts_tokens:
        batch, data, metrics = (
            {key: value for key, value in _mapping(one).items() if key not in OF_TOKENS}
            for one in (batch, data, metrics)
        )
    model = {key: value for key in MODEL_KEYS if (value := view.of_config("model", key)) not in (None, "")}
    made = [
        _block("Overrides", code=view.overrides),
        _block("What differs from the defaults", table=from_defaults(view)),
        _block("Where the time went", _parts(times(view))),
        _block("Topology", _parts(_topology(view))),
        _block("Batch", _parts(batch), text=batch_text(view)),
        _block("Model", _parts({**model, **_mapping(view.summary.get("model"))})),
        _block("Data", _parts({**data, **_mapping(view.summary.get("data"))})),
        _by_rank("Time of each rank's step", view.summary.get("times")),
        _by_rank("Memory", view.summary.get("memory")),
        _block("Final metrics", _parts(metrics)),
        *_task_blocks(view),
        _block("Confusion", table=_confusion(view), text="rows: the class; columns: what it was taken for"),
        _block("Checkpoints", table=_checkpoint_table(view)),
        _block("Attempts", *_attempts(view)),
        _block("Environment", _parts({key: view.environment[key] for key in view.environment if key not in EPOCHS})),
    ]
    return [block for block in made if block["code"] or block["parts"] or block["table"]]


def batch_text(view: RunView) -> str:
    """How a step's samples are cut, as one equation; empty where the summary does not say."""
    sizes = [view.of_summary("batch", key) for key in ("global_batch_size", "data_parallel_size", "micro_batch_size")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return ""
    total, processes, micro = sizes
    tokens = view.of_config("data", "seq_len")
    step = f"; {total * tokens:,} tokens a step" if isinstance(tokens, int) and view.counts_tokens else ""
    count = total // processes // micro
    ranks = f"{processes} process{'' if processes == 1 else 'es'}"
    return f"{total} samples = {ranks} {TIMES} {count} micro-batches {TIMES} {micro}{step}"


def _topology(view: RunView) -> dict[str, Any]:
    topology = view.summary.get("topology")
    sizes = {"axes": topology_text(view) or "one process"} if topology else {}
    strategy = {f"strategy {key}": view.of_config("strategy", key) for key in ("name", "engine")}
    return {**strategy, "processes": view.summary.get("world_size"), **sizes}


def _by_rank(title: str, found: object) -> dict[str, Any]:
    """Each rank's figures as a table, or what the summary has instead."""
    values = _mapping(found)
    by_rank = {key: value for key, value in values.items() if isinstance(value, list)}
    if not by_rank:
        return _block(title, _parts(values))
    rows = [
        [str(rank), *(_shown(key, value[rank] if rank < len(value) else None) for key, value in by_rank.items())]
        for rank in range(max(map(len, by_rank.values())))
    ]
    names = ["rank", *(_label(key).removesuffix(" gib") for key in by_rank)]
    rest = {key: value for key, value in values.items() if key not in by_rank}
    return _block(title, _parts(rest), table={"names": names, "rows": rows})


def _checkpoint_table(view: RunView) -> dict[str, Any] | None:
    state = {True: "complete", False: "incomplete, never used"}
    rows = [[f"{one.step:,}", numbers.gibibytes(one.nbytes / 2**30), state[one.whole]] for one in view.checkpoints]
    return {"names": ["step", "size", "state"], "rows": rows} if rows else None


def _confusion(view: RunView) -> dict[str, Any] | None:
    """Of a classifier's last evaluation."""
    counts, names = _mapping(view.summary.get("found")).get("confusion"), view.of_summary("data", "classes")
    if not isinstance(counts, list) or not isinstance(names, list) or len(names) != len(counts):
        return None
    whole = [row for row in counts if isinstance(row, list) and len(row) == len(names)]
    rows = [[str(name), *(_shown("", count) for count in row)] for name, row in zip(names, whole, strict=False)]
    return {"names": ["", *map(str, names)], "rows": rows} if len(whole) == len(counts) else None


def _task_blocks(view: RunView) -> list[dict[str, Any]]:
    """Of each task some answers beside the truth."""
    found = []
    for name, told in _mapping(view.summary.get("tasks")).items():
        shown = _mapping(told).get("shown")
        rows = [_mapping(one) for one in shown] if isinstance(shown, list) else []
        lines = [
            [*(str(row.get(key, "")) for key in ("question", "answer", "truth")), "yes" if row.get("right") else "no"]
            for row in rows
        ]
        value, counted = view.final(f"val/{name}"), _mapping(told).get("counted")
        text = f"val/{name}: {numbers.metric(value, percent=True)} of {counted}; some of them"
        table = {"names": ["question", "answer", "truth", "right"], "rows": lines} if lines else None
        found.append(_block(f"Task {name}", table=table, text=text))
    return found


def _attempts(view: RunView) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    attempts = view.summary.get("attempts")
    listed = [item for item in attempts if isinstance(item, Mapping)] if isinstance(attempts, list) else []
    if not listed:
        return _parts({"attempts": attempts} if isinstance(attempts, int) and attempts > 1 else None), None
    names = list(dict.fromkeys(str(key) for item in listed for key in item))
    rows = [[_shown(name, item.get(name)) for name in names] for item in listed]
    return [], {"names": [_label(name) for name in names], "rows": rows}


def _attempts_text(view: RunView) -> str:
    attempts = view.summary.get("attempts")
    count = len(attempts) if isinstance(attempts, list) else attempts if isinstance(attempts, int) else 1
    listed = [item for item in attempts if isinstance(item, Mapping)] if isinstance(attempts, list) else []
    lost = sum(value for item in listed if isinstance(value := item.get("lost_s"), int | float))
    return f"{count} attempts{f', {numbers.duration(lost)} of work lost' if lost else ''}" if count > 1 else "in all"


def _parts(values: object) -> list[dict[str, Any]]:
    """Scalars as one list of rows, then one list for each mapping inside."""
    tree = _mapping(values)
    rows = [
        (_label(key), _shown(key, value))
        for key, value in tree.items()
        if value not in (None, "", [], {}) and not isinstance(value, Mapping)
    ]
    parts = [{"title": "", "rows": rows}] if rows else []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            inner = [(str(name), _shown(str(name), item)) for name, item in value.items()]
            parts.append({"title": _label(key), "rows": inner})
    return parts


def _mapping(values: object) -> dict[str, Any]:
    return {str(key): value for key, value in values.items()} if isinstance(values, Mapping) else {}


def _label(key: str) -> str:
    return LABELS.get(key, key.replace("_", " ") if "/" not in key else key)


def _shown(key: str, value: object) -> str:
    if key.endswith("_gib"):
        return numbers.gibibytes(number(value))
    if key.endswith("_s") and isinstance(value, (int, float)) and not key.endswith("per_s"):
        return f"{numbers.figure(float(value), 3)} s" if abs(value) < 10 else numbers.duration(float(value))
    if key == "command" and isinstance(value, list):
        return " ".join(map(str, value))
    return numbers.plain(value)


def _block(
    title: str,
    parts: Sequence[dict[str, Any]] = (),
    table: dict[str, Any] | None = None,
    code: Sequence[str] = (),
    text: str = "",
) -> dict[str, Any]:
    return {"title": title, "parts": list(parts), "table": table, "code": list(code), "text": text}


def _card(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}
