"""Writes ``report.html``: one run or a comparison of several, in one self-contained file.

Model text, configuration and file names are untrusted. The template escapes every value, and the page's content
security policy blocks other scripts even if escaping fails.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mgpu_pipe import __version__
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.report.account import explain_end
from mgpu_pipe.report.charts import charts, x_axes
from mgpu_pipe.report.compare_runs import comparison, samples
from mgpu_pipe.report.logs import read_logs
from mgpu_pipe.report.measurements import bars, memory_bands, memory_of
from mgpu_pipe.report.page_sections import blocks, confusion, figures, subtitle
from mgpu_pipe.report.run_view import RunView, load_run
from mgpu_pipe.system.local_files import is_file, replace_file

MANY = 12
"""Most runs of a comparison that shows long parts unfolded and without scrolling."""
STATIC = files("mgpu_pipe.report").joinpath("static")
"""Folder of the page's template, style and script, which a report includes."""


def write_report(runs: list[RunPaths], out: Path) -> Path:
    """Replace ``out`` by the report of runs, atomically; RunFolderError if one is none, or ``out`` cannot be
    written."""
    return write_page(render([load_run(run) for run in runs], [link(run.report, out) for run in runs]), out)


def write_page(text: str, out: Path) -> Path:
    """Replace ``out`` by a page, atomically; RunFolderError if it cannot be written."""
    try:
        replace_file(out, text)
    except OSError as error:
        raise RunFolderError(f"{out}: cannot write the report ({error.strerror}); choose another --out") from error
    return out


def render(views: list[RunView], links: Sequence[str] = (), watched: str = "") -> str:
    """The page of these runs.

    Args:
        links: address of each run's report, for a comparison; an empty string for none.
        watched: tag that a served page compares with its server's, to reload after a change; empty for a file.
    """
    single = views[0] if len(views) == 1 else None
    heading = single.name if single else f"Comparison of {len(views)} runs"
    built = charts(views)
    logs = read_logs(single.paths, single.failed_rank, single.problems) if single else None
    return document(
        "page.html",
        ["charts.js"],
        title=f"{heading} · {single.folder_name}" if single else heading,
        heading=heading,
        status=single.status if single else "",
        subtitle=subtitle(single) if single else [],
        error=single.error if single else "",
        why=explain_end(single) if single else None,
        logs=logs,
        problems=[
            problem if single else f"{view.folder_name}: {problem}" for view in views for problem in view.problems
        ],
        figures=figures(single) if single else [],
        comparison=None if single else comparison(views, links or [""] * len(views)),
        charts=built,
        data={**x_axes(views), "charts": [chart["drawn"] for chart in built]},
        step_times=bars(single.summary.get("step_times")) if single else None,
        memory=memory_bands(memory_of(single.summary.get("step_times"))) if single else None,
        samples=samples(views),
        many=len(views) > MANY,
        confusion=confusion(single) if single else None,
        blocks=blocks(single) if single else [],
        configs=[
            {"title": f"Configuration of {view.folder_name}", "text": view.config_text}
            for view in views
            if view.config_text
        ],
        watched=watched,
        footer=f"Written by mgpu_pipe {__version__} from {', '.join(str(view.paths.root) for view in views)}",
    )


def document(template: str, scripts: Sequence[str], **values: object) -> str:
    """A page from one of this package's templates that includes the package's style and these scripts."""
    style, script = _read("uPlot.min.css", "style.css"), _read("uPlot.iife.min.js", *scripts)
    # the library's licence must be part of every copy
    script = f"/*! uPlot\n{_read('uPlot-LICENSE.txt')}*/\n{script}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # only this package's style and script are marked as safe, never a run's text
    trusted = {"style": Markup(style), "script": Markup(script), "script_hash": Markup(f"sha256-{digest}")}
    return templates().get_template(template).render(**trusted, **values)


@functools.lru_cache(maxsize=1)
def templates() -> Environment:
    """This package's templates, each compiled when it is first used."""
    loader = PackageLoader("mgpu_pipe.report", "static")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def link(report: Path, out: Path) -> str:
    """The relative address of a run's report from the page ``out``, or an empty string; ``./`` rules out a scheme."""
    return "./" + quote(os.path.relpath(report.absolute(), out.absolute().parent)) if is_file(report) else ""


def _read(*names: str) -> str:
    return "".join(STATIC.joinpath(name).read_text(encoding="utf-8").rstrip("\n") + "\n" for name in names)
