"""Tables on standard output: what a run reached, and several runs side by side.

They stay readable at 80 columns and without a terminal. Names and model text are shown as they are: nothing of
them is taken for rich's markup. rich is imported when a table is printed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.objective import Metric, description
from mgpu_pipe.report import numbers
from mgpu_pipe.report.rows import print_rows, printable
from mgpu_pipe.report.run_view import RunView, differing, load_run, number

if TYPE_CHECKING:
    from rich.console import Console

    from mgpu_pipe.config.paths import RunPaths

LONGEST_SAMPLE = 600
"""Characters of a generated text that are shown."""


def after_table(summary: Mapping[str, Any], more: Mapping[str, str] | None = None) -> None:
    """Print what a run reached, from its ``summary.json``: figures, the objective's headline, samples.

    Args:
        more: further lines at the end, such as the report's path and how to go on.
    """
    metrics = _mapping(summary.get("metrics"))
    peak = _peak(_mapping(summary.get("memory")).get("peak_gib"))
    limit = f", by trainer.max_time={summary['max_time']}" if "max_time" in summary else ""
    rows = [
        ("status", f"{summary.get('status', 'unfinished')} at step {numbers.plain(summary.get('step'))}{limit}"),
        ("training loss", numbers.fixed(number(metrics.get("train/loss")), 4)),
        ("held-out loss", numbers.fixed(number(metrics.get("val/loss")), 4)),
        ("throughput", _throughput(metrics)),
        ("peak memory", numbers.MISSING if math.isnan(peak) else f"{numbers.gibibytes(peak)} a process"),
        ("wall time", numbers.duration(number(summary.get("wall_s")))),
    ]
    paths = {"checkpoint": str(summary.get("checkpoint") or ""), **(more or {})}
    print_rows([row for row in rows if row[1] != numbers.MISSING], "result")
    _print_headline(summary)
    _print_samples(summary)
    for name, value in paths.items():
        if value:
            print_whole(make_console(), f"{name:<15}{value}")


def _throughput(metrics: Mapping[str, Any]) -> str:
    """Tokens that the model computes and samples a second, and how many of the tokens are padding."""
    tokens, samples, padding = (
        number(metrics.get(f"throughput/{name}")) for name in ("tokens_per_s", "samples_per_s", "padding")
    )
    if math.isnan(tokens):
        return numbers.MISSING
    told = "" if math.isnan(samples) else f", {numbers.figure(samples, 3)} samples/s"
    if not tokens:  # nobody counts them
        return told.removeprefix(", ")
    return f"{tokens:,.0f} tokens/s{told}" + (f" ({100 * padding:.1f}% padding)" if padding >= 0.0005 else "")


def _peak(value: object) -> float:
    """The largest of the ranks' peaks."""
    return max(map(number, value), default=math.nan) if isinstance(value, list) else number(value)


LONGEST_CELL = 32
"""Characters of a word that says what sets a run apart; longer ones stand below the table."""


def runs_table(runs: Sequence[RunPaths]) -> None:
    """Print several runs side by side: what sets each apart, what it reached, which is best; their folders below."""
    from rich.table import Table
    from rich.text import Text

    views = [load_run(run) for run in runs]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("run", overflow="fold", min_width=16)
    table.add_column("status", no_wrap=True)
    headlines = {one.short or one.name.replace("_", " "): one for one in (view.objective.headline for view in views)}
    for title in ("steps", "loss", "val loss", *headlines, "tok/s", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    alike = len({view.name for view in views}) == 1
    differences = differing(views)
    below = any(len(items) > 3 or len(item) > LONGEST_CELL for items in differences for item in items)
    best, by = _best(views)
    for position, (view, apart) in enumerate(zip(views, differences, strict=True), 1):
        named = [] if alike and apart and not below else [view.name]
        figures = (
            f"{view.steps:,}",
            numbers.fixed(view.final("train/loss"), 4),
            numbers.fixed(view.final("val/loss"), 4),
            *(_headline(view, metric) for metric in headlines.values()),
            numbers.MISSING if math.isnan(view.tokens_per_s) else numbers.count(view.tokens_per_s),
            _clock(view.wall_s),
        )
        shown = (Text(printable(text)) for text in ("\n".join(named if below else [*named, *apart]), view.status))
        mark = "*" if view is best else ""
        table.add_row(f"{mark}{position}", *shown, *figures)
    console = make_console()
    console.print(table)
    if best is not None:
        console.print(f"* lowest {by}")
    console.print()
    for position, (view, apart) in enumerate(zip(views, differences, strict=True), 1):
        print_whole(console, f"{position:>{len(str(len(views)))}}  {relative_to_cwd(view.paths.root)}")
        if below:
            print_whole(console, f"   {printable(' '.join(apart))}")


def _headline(view: RunView, metric: Metric) -> str:
    return numbers.metric(view.headline, metric.percent) if view.objective.headline == metric else numbers.MISSING


def _best(views: Sequence[RunView]) -> tuple[RunView | None, str]:
    """The run with the lowest held-out loss, or training loss where nothing is held out, and which of them it is.

    Finished runs are compared, or all where no run finished. None where there is one run, or no run has a loss.
    """
    finished = [view for view in views if view.status == "finished"] or list(views)
    for column, name in (("val/loss", "held-out loss"), ("train/loss", "training loss")):
        losses = [(view.final(column), view) for view in finished if math.isfinite(view.final(column))]
        if losses and len(views) > 1:
            return min(losses, key=lambda pair: pair[0])[1], name
    return None, ""


def _print_headline(summary: Mapping[str, Any]) -> None:
    metrics, data = _mapping(summary.get("metrics")), _mapping(summary.get("data"))
    metric = description(str(summary.get("objective"))).headline
    reached, unigram = number(metrics.get(metric.key)), number(data.get(metric.baseline or ""))
    if math.isnan(reached) and metric.of_loss is not None:
        reached = metric.of_loss(number(metrics.get("val/loss")))
    if math.isnan(reached):
        return
    from rich.table import Table

    table = Table(box=_box(), pad_edge=False, header_style="bold")
    table.add_column(metric.title)
    table.add_column("model", justify="right", style="bold green" if reached < unigram else "bold")
    columns = [numbers.metric(reached, metric.percent)]
    if not math.isnan(unigram):
        table.add_column("unigram baseline", justify="right")
        table.add_column("ratio", justify="right")
        columns += [numbers.metric(unigram), f"{numbers.figure(unigram / reached, 3)} x lower"]
        if reached >= unigram:
            columns[-1] = f"{numbers.figure(reached / unigram, 3)} x higher"
    table.add_row(f"({'higher' if metric.higher_is_better else 'lower'} is better)", *columns)
    make_console().print(table)


def _print_samples(summary: Mapping[str, Any]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = make_console()
    listed = summary.get("samples")
    for sample in listed if isinstance(listed, list) else []:
        if _mapping(sample).get("image"):  # the report shows it
            continue
        prompt, text = str(_mapping(sample).get("prompt") or ""), str(_mapping(sample).get("text") or "")
        written = printable(text.removeprefix(prompt))
        shown = written if len(written) <= LONGEST_SAMPLE else written[:LONGEST_SAMPLE] + " ..."
        console.print(Text("sample", style="bold"))
        console.print(Padding(Text.assemble((printable(prompt), "bold cyan"), shown), (0, 0, 1, 2)))


def print_whole(console: Console, line: str) -> None:
    """Print a line that is longer than the terminal is wide unbroken, so that its path can be copied."""
    from rich.text import Text

    console.print(Text(printable(line)), soft_wrap=True)


def relative_to_cwd(folder: Path) -> Path:
    try:
        here = Path.cwd()
    except OSError:  # it was deleted meanwhile
        return folder
    return folder.relative_to(here) if folder.is_absolute() and folder.is_relative_to(here) else folder


def _clock(seconds: float) -> str:
    if math.isnan(seconds):
        return numbers.MISSING
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def make_console() -> Console:
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, emoji=False)


def _box() -> Any:
    from rich import box

    return box.SIMPLE_HEAD
