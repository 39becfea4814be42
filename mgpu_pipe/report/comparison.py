"""Several runs side by side: what each reached, what differs in their configurations, what each wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mgpu_pipe.config.dotted import leaves, setting
from mgpu_pipe.report import numbers
from mgpu_pipe.report.charts import identical, run_labels, run_names
from mgpu_pipe.report.run_view import RunView, differing, names_the_run

PNG = re.compile("iVBORw0KGgo[A-Za-z0-9+/]{0,100000}={0,2}")
"""The base64 of a small PNG file."""
OGG = re.compile("T2dnU[A-Za-z0-9+/]{0,400000}={0,2}")
"""The base64 of a short Ogg file."""


def comparison(views: list[RunView], links: Sequence[str]) -> dict[str, Any]:
    """The table that compares runs, its cells with what they are sorted by; the best of a column is marked.

    Args:
        links: where each run's own report lies; an empty string where it has none.
    """
    measures = [
        ("loss", [view.final("train/loss") for view in views], partial(numbers.fixed, decimals=4), min),
        ("held-out loss", [view.final("val/loss") for view in views], partial(numbers.fixed, decimals=4), min),
        *_headlines(views),
        ("tokens/s", [view.tokens_per_s for view in views], partial(numbers.fixed, decimals=0), max),
        ("peak memory", [view.peak_gib for view in views], numbers.gibibytes, min),
        ("wall time", [view.wall_s for view in views], numbers.duration, min),
    ]
    apart = differing(views)
    columns = ["run", "what differs", "status", "steps", *(title for title, *_ in measures)]
    rows = []
    for at, (view, name) in enumerate(zip(views, run_names(views), strict=True)):
        row: list[dict[str, Any]] = [
            {"text": f"{at + 1} · {name}", "sort": at, "style": "long", "number": at, "link": links[at]},
            _cell(" ".join(apart[at]) or numbers.MISSING, " ".join(apart[at]), "long"),
            _cell(view.status, view.status),
            _cell(f"{view.steps:,}", view.steps, "n"),
        ]
        for _, values, shown, choose in measures:
            known = [value for value in values if math.isfinite(value)]
            alike = [shown(value) for value in values].count(shown(values[at]))
            best = len(known) > 1 and values[at] == choose(known) and alike == 1
            sort = values[at] if math.isfinite(values[at]) else ""
            row.append(_cell(shown(values[at]), sort, "n best" if best else "n"))
        rows.append(row)
    return {"columns": columns, "rows": rows, "identical": identical(views), "settings": _settings(views)}


def samples(views: list[RunView]) -> list[dict[str, Any]]:
    """Generated texts by prompt, apart from the prompt itself: each run's last, and of a run alone its earlier ones."""
    by_prompt: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = {}
    pictures: list[dict[str, Any]] = []
    for view, label in zip(views, run_labels(views), strict=True):
        for age, (step, made) in enumerate(reversed(view.samples)):
            if age and len(views) > 1:
                break
            for sample in made:
                prompt, text = str(sample.get("prompt") or ""), str(sample.get("text") or "")
                title = label if len(views) > 1 else f"step {step:,}" if len(view.samples) > 1 else ""
                told = {"title": title, "text": text.removeprefix(prompt) if prompt else text}
                if picture := encoded_of(sample, "image", PNG):
                    pictures.append({"picture": picture, "prompt": prompt, **told})
                    continue
                sound = encoded_of(sample, "audio", OGG)
                shown = by_prompt.setdefault((prompt, sound), {"texts": [], "earlier": []})
                shown["earlier" if age else "texts"].append(told)
    others = (
        {"picture": "", "prompt": prompt, "sound": sound, **shown} for (prompt, sound), shown in by_prompt.items()
    )
    return [*pictures, *others]


def encoded_of(sample: Mapping[str, Any], name: str, kind: re.Pattern[str]) -> str:
    """The base64 of a sample's picture or sound; empty where it has none, or something else there."""
    found = sample.get(name)
    return found if isinstance(found, str) and kind.fullmatch(found) else ""


def _headlines(views: list[RunView]) -> list[Any]:
    """A column for each headline that there is."""
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
    """Every key of the configurations whose value is not the same in all of them, a column for each run."""
    flat = [leaves(view.config) for view in views]
    rows = [
        [key, *values]
        for key in dict.fromkeys(key for one in flat for key in one)
        if not names_the_run(key)
        and len(set(values := [setting(one[key]) if key in one else numbers.MISSING for one in flat])) > 1
    ]
    return {"names": ["key", *map(str, range(1, len(views) + 1))], "rows": rows} if rows else None


def _cell(text: str, sort: str | float, style: str = "") -> dict[str, Any]:
    return {"text": text, "sort": sort, "style": style, "number": None, "link": ""}
