"""``mgpu-pipe report``: rebuilds a run's report, or compares several runs."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import VerbParser, count, parse
from mgpu_pipe.config.paths import COMPARISON, RunPaths
from mgpu_pipe.config.schema import RunOptions
from mgpu_pipe.errors import EXIT_OK, BadInputError, RunFolderError, print_line
from mgpu_pipe.runs.latest import named_or_newest, split_root

PORT = 8765
"""Default port of ``--watch``."""


def report(argv: list[str]) -> int:
    """Write the report of the runs in ``argv``, by default the newest below ``run.root``; print its path.

    Returns:
        The exit code.

    Raises:
        BadInputError: a folder is not a run's, there is no run, or the file cannot be written.
    """
    words, root = split_root(argv)
    parser = VerbParser(
        prog="mgpu-pipe report",
        description="Write report.html of a run, or a comparison of several, as one file that needs no network.",
    )
    parser.add_argument(
        "run",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="a run's folder; none: the newest below run.root=<folder> (outputs/)",
    )
    parser.add_argument(
        "--watch", action="store_true", help="serve it here, refreshed while the run trains, until Ctrl-C"
    )
    parser.add_argument("--port", type=count, metavar="N", help=f"port of --watch; 0: a free one (default: {PORT})")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write; else in RUN or run.root")
    options = parse(parser, words)
    if options is None:
        return EXIT_OK
    if options.port is not None and not options.watch:
        raise BadInputError(f"--port {options.port}: only works with --watch")
    named = list(dict.fromkeys(options.run))
    if len(named) < 2:
        named = [named_or_newest(named[0] if named else None, root)]
    runs = [RunPaths(folder) for folder in named]
    if options.watch:
        return _watch(runs, PORT if options.port is None else options.port, options.out)
    out = options.out or (runs[0].report if len(runs) == 1 else (root or Path(RunOptions.root)) / COMPARISON)
    if options.out is None and len(runs) > 1:
        _make_folder(out.parent)
    # imported late: rich and jinja2 take 0.1 s
    from mgpu_pipe.report.html import write_report
    from mgpu_pipe.report.run_tables import runs_table

    written = write_report(runs, out)
    if len(runs) > 1:
        runs_table(runs)
    print_line(f"report: {written}")
    return EXIT_OK


def _watch(runs: list[RunPaths], port: int, out: Path | None) -> int:
    if out is not None:
        raise BadInputError(f"--out {out}: --watch writes no file; leave out one of them")
    from mgpu_pipe.report.run_view import load_run
    from mgpu_pipe.report.watch import pages_of, serve

    for run in runs:
        load_run(run)
    serve(pages_of(runs), port)
    return EXIT_OK


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"{folder}: cannot be written ({error.strerror}); choose another place with --out"
        ) from error


VERB = Verb("rebuild a run's report, or compare runs", report)
