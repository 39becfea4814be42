"""Compares several runs: final metrics, differences of configuration, and generated samples."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mgpu_pipe.config.convert import leaves, setting
from mgpu_pipe.report import numbers
from mgpu_pipe.report.account import strategies_text
from mgpu_pipe.report.charts import identical, run_labels, run_names
from mgpu_pipe.report.run_view import RunView, differing, names_the_run

PNG = re.compile("iVBORw0KGgo[A-Za-z0-9+/]{0,100000}={0,2}")
"""The base64 of a small PNG file."""
WIDE = 2.5
"""Ratio of width to height from which a picture gets the page's width."""
OGG = re.compile("T2dnU[A-Za-z0-9+/]{0,400000}={0,2}")
"""The base64 of a short Ogg file."""


def comparison(views: list[RunView], links: Sequence[str]) -> dict[str, Any]:
    """Comparison table with sort keys and best values; ``links`` are addresses of the runs' reports, or empty."""
    measures = [
        ("loss", [view.final("train/loss") for view in views], partial(numbers.fix_decimals, decimals=4), min),
        ("held-out loss", [view.final("val/loss") for view in views], partial(numbers.fix_decimals, decimals=4), min),
        *_headlines(views),
        ("tokens/s", [view.tokens_per_s for view in views], partial(numbers.fix_decimals, decimals=0), max),
        ("peak memory", [view.peak_gib for view in views], numbers.gibibytes, min),
        ("wall time", [view.wall_s for view in views], numbers.duration, min),
    ]
    differences = [" ".join(items) for items in differing(views)]
    if any(len(view.strategies) > 1 for view in views):
        strategies = [f"strategy: {strategies_text(view)}" for view in views]
        differences = ["; ".join(filter(None, pair)) for pair in zip(differences, strategies, strict=True)]
    columns = ["run", "what differs", "status", "steps", *(title for title, *_ in measures)]
    rows = []
    for index, (view, name) in enumerate(zip(views, run_names(views), strict=True)):
        row: list[dict[str, Any]] = [
            {"text": f"{index + 1} · {name}", "sort": index, "style": "long", "number": index, "link": links[index]},
            _cell(differences[index] or numbers.MISSING, differences[index], "long"),
            _cell(view.status, view.status),
            _cell(f"{view.steps:,}", view.steps, "n"),
        ]
        for _, values, format_value, choose in measures:
            known = [value for value in values if math.isfinite(value)]
            equal_cells = [format_value(value) for value in values].count(format_value(values[index]))
            best = len(known) > 1 and values[index] == choose(known) and equal_cells == 1
            sort = values[index] if math.isfinite(values[index]) else ""
            row.append(_cell(format_value(values[index]), sort, "n best" if best else "n"))
        rows.append(row)
    return {"columns": columns, "rows": rows, "identical": identical(views), "settings": _settings(views)}


def samples(views: list[RunView]) -> list[dict[str, Any]]:
    """Generated texts by prompt, without the prompt: each run's last ones, and a single run's earlier ones too."""
    by_prompt: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = {}
    pictures: list[dict[str, Any]] = []
    for view, label in zip(views, run_labels(views), strict=True):
        for age, (step, step_samples) in enumerate(reversed(view.samples)):
            if age and len(views) > 1:
                break
            for sample in step_samples:
                prompt, text = str(sample.get("prompt") or ""), str(sample.get("text") or "")
                title = label if len(views) > 1 else f"step {step:,}" if len(view.samples) > 1 else ""
                entry = {"title": title, "text": text.removeprefix(prompt) if prompt else text}
                if picture := encoded_of(sample, "image", PNG):
                    pictures.append({"picture": picture, "wide": _is_wide(picture), "prompt": prompt, **entry})
                    continue
                sound = encoded_of(sample, "audio", OGG)
                group = by_prompt.setdefault((prompt, sound), {"texts": [], "earlier": []})
                group["earlier" if age else "texts"].append(entry)
    others = (
        {"picture": "", "prompt": prompt, "sound": sound, **group} for (prompt, sound), group in by_prompt.items()
    )
    return [*pictures, *others]


def encoded_of(sample: Mapping[str, Any], name: str, kind: re.Pattern[str]) -> str:
    """The base64 of a sample's picture or sound; empty if it is missing or of another kind."""
    encoded = sample.get(name)
    return encoded if isinstance(encoded, str) and kind.fullmatch(encoded) else ""


def _is_wide(picture: str) -> bool:
    """Whether a PNG is a strip, such as the frames of a video next to each other."""
    size = (
        base64.b64decode(picture[:32])[16:24] if len(picture) >= 32 else b""
    )  # width and height in the first chunk, IHDR
    return len(size) == 8 and int.from_bytes(size[:4], "big") > WIDE * int.from_bytes(size[4:], "big")


def _headlines(views: list[RunView]) -> list[Any]:
    """A column for each headline metric of the runs."""
    return [
        (
            metric.name.replace("_", " "),
            [view.headline if view.objective.headline == metric else math.nan for view in views],
            partial(numbers.metric, percent=metric.percent),
            max if metric.higher_is_better else min,
        )
        for metric in dict.fromkeys(view.objective.headline for view in views)
    ]


def _settings(views: list[RunView]) -> dict[str, Any] | None:
    """Table of all configuration keys whose values differ between runs, with a column per run."""
    flat = [leaves(view.config) for view in views]
    rows = [
        [key, *values]
        for key in dict.fromkeys(key for values_by_key in flat for key in values_by_key)
        if not names_the_run(key)
        and len(
            set(
                values := [
                    setting(values_by_key[key]) if key in values_by_key else numbers.MISSING for values_by_key in flat
                ]
            )
        )
        > 1
    ]
    return {"names": ["key", *map(str, range(1, len(views) + 1))], "rows": rows} if rows else None


def _cell(text: str, sort: str | float, style: str = "") -> dict[str, Any]:
    return {"text": text, "sort": sort, "style": style, "number": None, "link": ""}
