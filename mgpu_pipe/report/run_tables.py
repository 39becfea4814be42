"""Tables on standard output: the result of a run, and a comparison of several runs.

They stay readable at 80 columns and without a terminal. Names and model text are never parsed as rich's markup. Only
printing a table imports rich."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.objective import Metric, description
from mgpu_pipe.errors import print_line, printable
from mgpu_pipe.report import numbers
from mgpu_pipe.report.account import strategies_text
from mgpu_pipe.report.columns import GAP, LEAST_WIDTH, print_columns, print_rows, print_words
from mgpu_pipe.report.run_view import RunView, differing, load_run, number

if TYPE_CHECKING:
    from rich.console import Console

    from mgpu_pipe.checkpoint.compare import Comparison
    from mgpu_pipe.checkpoint.layout import Step
    from mgpu_pipe.config.paths import RunPaths

LONGEST_SAMPLE = 600
"""Most characters of a generated text."""


def after_table(summary: Mapping[str, Any], more: Mapping[str, str] | None = None) -> None:
    """Print a run's result from its ``summary.json``: figures, the objective's headline metric, samples.

    Args:
        more: further lines at the end, such as the report's path and the command to resume.
    """
    metrics = _mapping(summary.get("metrics"))
    peak = _peak(_mapping(summary.get("memory")).get("peak_gib"))
    limit = f", by trainer.max_time={summary['max_time']}" if "max_time" in summary else ""
    attempts = summary.get("attempts")
    count = len(attempts) if isinstance(attempts, list) else attempts if isinstance(attempts, int) else 1
    together = f", {count} attempts together" if count > 1 else ""
    rows = [
        ("status", f"{summary.get('status', 'unfinished')} at step {numbers.plain(summary.get('step'))}{limit}"),
        ("training loss", numbers.fix_decimals(number(metrics.get("train/loss")), 4)),
        ("held-out loss", numbers.fix_decimals(number(metrics.get("val/loss")), 4)),
        ("throughput", _throughput(metrics)),
        ("peak memory", numbers.MISSING if math.isnan(peak) else f"{numbers.gibibytes(peak)} a process"),
        ("wall time", numbers.duration(number(summary.get("wall_s"))) + together),
    ]
    paths = {"checkpoint": str(summary.get("checkpoint") or ""), **(more or {})}
    print_rows([row for row in rows if row[1] != numbers.MISSING], "result")
    _print_headline(summary)
    _print_samples(summary)
    for name, value in paths.items():
        if value:
            print_whole(make_console(), f"{name:<15}{value}")


def _throughput(metrics: Mapping[str, Any]) -> str:
    """Tokens and samples per second, and the share of padding tokens."""
    tokens, samples, padding = (
        number(metrics.get(f"throughput/{name}")) for name in ("tokens_per_s", "samples_per_s", "padding")
    )
    if math.isnan(tokens):
        return numbers.MISSING
    samples_text = "" if math.isnan(samples) else f", {numbers.figure(samples, 3)} samples/s"
    if not tokens:  # the run counts no tokens
        return samples_text.removeprefix(", ")
    return f"{tokens:,.0f} tokens/s{samples_text}" + (f" ({100 * padding:.1f}% padding)" if padding >= 0.0005 else "")


def _peak(value: object) -> float:
    """The largest peak of all ranks."""
    return max(map(number, value), default=math.nan) if isinstance(value, list) else number(value)


LONGEST_CELL = 32
"""Most characters of a run's difference in the table; longer ones move below it."""


def runs_table(runs: Sequence[RunPaths]) -> None:
    """Print a table of several runs: differences, metrics and the best run; their folders below."""
    views = [load_run(run) for run in runs]
    width = shutil.get_terminal_size().columns
    headline_metrics = [view.objective.headline for view in views]
    headlines = {metric.short or metric.name.replace("_", " "): metric for metric in headline_metrics}
    figures = ("steps", "loss", "val loss", *headlines, "tok/s", "time")
    same_name = len({view.name for view in views}) == 1
    differences = differing(views)
    figure_cells = [
        (
            printable(view.status, keep=""),
            f"{view.steps:,}",
            numbers.fix_decimals(view.final("train/loss"), 4),
            numbers.fix_decimals(view.final("val/loss"), 4),
            *(_headline(view, metric) for metric in headlines.values()),
            numbers.MISSING if math.isnan(view.tokens_per_s) else numbers.count(view.tokens_per_s),
            _clock(view.wall_s),
        )
        for view in views
    ]
    other_columns = zip(("status", *figures), *figure_cells, strict=True)
    room = width - sum(GAP + max(map(len, column)) for column in other_columns) - len(f"*{len(views)}") - GAP
    longest = min(LONGEST_CELL, max(room, LEAST_WIDTH))
    changes = [[f"then {name}" if index else name for index, name in enumerate(view.strategies)] for view in views]
    cell_lines = [
        [*apart, *(lines if len(lines) > 1 else [])] for apart, lines in zip(differences, changes, strict=True)
    ]
    details_below = any(len(items) > 3 or len(item) > longest for items in cell_lines for item in items)
    best, by = _best(views)
    rows = []
    for position, (view, apart) in enumerate(zip(views, differences, strict=True), 1):
        named = [] if same_name and apart and not details_below else [view.name]
        cell = "\n".join(
            printable(part, keep="") for part in (named if details_below else [*named, *cell_lines[position - 1]])
        )
        rows.append((f"{'*' if view is best else ''}{position}", cell, *figure_cells[position - 1]))
    names = ("#", "run", "status", *figures)
    print_columns(
        names, rows, ("#", *figures), below=(), spare=("tok/s", "time", "status"), width=width, several_lines=True
    )
    if best is not None:
        print_line(f"* lowest {by}")
    print_line()
    for position, (view, apart) in enumerate(zip(views, differences, strict=True), 1):
        print_line(f"{position:>{len(str(len(views)))}}  {relative_to_cwd(view.paths.root)}")
        if details_below:
            changed = [f"strategies: {strategies_text(view)}"] if len(view.strategies) > 1 else []
            print_words(printable(" ".join([*apart, *changed])), width, indent=3)


def _headline(view: RunView, metric: Metric) -> str:
    return numbers.metric(view.headline, metric.percent) if view.objective.headline == metric else numbers.MISSING


def _best(views: Sequence[RunView]) -> tuple[RunView | None, str]:
    """The finished run (or any, if none) with the lowest loss, and the loss's name; None for a single run."""
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
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(metric.title)
    table.add_column("model", justify="right", style="bold green" if reached < unigram else "bold")
    columns = [numbers.metric(reached, metric.percent)]
    if not math.isnan(unigram):
        table.add_column("unigram baseline", justify="right")
        table.add_column("ratio", justify="right")
        columns += [numbers.metric(unigram), f"{numbers.figure(unigram / reached, 3)} x lower"]
        if reached >= unigram:
            columns[-1] = f"{numbers.figure(reached / unigram, 3)} x higher"
    size = number(metrics.get("val/bits_per_byte"))
    if not math.isnan(size):
        table.add_column("bits a byte", justify="right")
        columns.append(numbers.figure(size, 4))
    table.add_row(f"({'higher' if metric.higher_is_better else 'lower'} is better)", *columns)
    make_console().print(table)


def _print_samples(summary: Mapping[str, Any]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = make_console()
    listed = summary.get("samples")
    for sample in listed if isinstance(listed, list) else []:
        if _mapping(sample).get("image"):  # only the report shows pictures
            continue
        prompt, text = str(_mapping(sample).get("prompt") or ""), str(_mapping(sample).get("text") or "")
        continuation = printable(text.removeprefix(prompt))
        shortened = continuation if len(continuation) <= LONGEST_SAMPLE else continuation[:LONGEST_SAMPLE] + " ..."
        console.print(Text("sample", style="bold"))
        console.print(Padding(Text.assemble((printable(prompt), "bold cyan"), shortened), (0, 0, 1, 2)))


def print_whole(console: Console, line: str) -> None:
    """Print a line without wrapping, so that its path can be copied."""
    from rich.text import Text

    console.print(Text(printable(line, keep="")), soft_wrap=True)


def relative_to_cwd(folder: Path) -> Path:
    try:
        here = Path.cwd()
    except OSError:  # the working folder was deleted
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


LONGEST_TABLE = 30
"""Most differing tensors in the table."""
LONGEST_VALUE = 60
"""Most characters of a configuration's value."""


def checkpoints_table(steps: Sequence[Step], latest: int | None, reasons: Mapping[int, str]) -> None:
    """Print one row per step.

    Args:
        latest: the step that ``checkpoint.resume=auto`` resumes; marked with a star.
        reasons: why retention keeps a step.
    """
    names = ("", "step", "saved", "size", "strategy", "precision", "state", "kept")
    rows = [
        (
            "*" if step.step == latest else "",
            f"{step.step:,}",
            _date(step.saved),
            _size(step.nbytes),
            _strategy(step),
            str(step.state.get("precision", numbers.MISSING)),
            _state_of(step),
            reasons.get(step.step, numbers.MISSING),
        )
        for step in steps
    ]
    fixed = ("", "step", "saved", "size", "state")
    print_columns(names, rows, fixed, below=(), spare=("precision", "saved", "strategy"), width=_width())


def print_lines(*texts: str) -> None:
    """Print lines without wrapping."""
    for text in texts:
        print_whole(make_console(), text)


def comparison_table(comparison: Comparison) -> None:
    """Print how the tensors of two checkpoints differ."""
    if comparison.differing:
        names = ("tensor", "kind", "relative", "largest |a-b|")
        listed = comparison.differing[:LONGEST_TABLE]
        rows = [(tensor.name, tensor.kind, f"{tensor.relative:.1e}", f"{tensor.largest:.1e}") for tensor in listed]
        print_columns(names, rows, names[2:], below=(), spare=("kind",), width=_width())
    more = len(comparison.differing) - LONGEST_TABLE
    print_lines(*([f"and {more} more that differ less"] if more > 0 else []), *comparison.unlike)


def differences_table(differences: Sequence[tuple[str, str, str]]) -> None:
    """Print how two configurations differ."""
    names = ("key", "first", "second")
    rows = [(key, _short(first), _short(second)) for key, first, second in differences]
    print_columns(names, rows, below=names[1:], width=_width())


def _width() -> int:
    return shutil.get_terminal_size().columns


def _state_of(step: Step) -> str:
    if not step.whole:
        return "damaged"
    return "whole, not finite after it" if step.ruined else "whole"


def _strategy(step: Step) -> str:
    strategy = step.config.get("strategy")
    name = str(strategy.get("name", "")) if isinstance(strategy, Mapping) else ""
    topology: Any = step.state.get("topology")
    sizes = topology if isinstance(topology, Mapping) else {}
    cuts = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
    return f"{name} {cuts}".strip() or numbers.MISSING


def _date(seconds: float | None) -> str:
    return numbers.MISSING if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _size(nbytes: int) -> str:
    return numbers.gibibytes(nbytes / 2**30 if nbytes else math.nan)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
