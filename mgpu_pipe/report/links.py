"""The links between ranks, and which of them are slow, on standard output."""

from __future__ import annotations

import sys

from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.profiling.link_table import Link, table, verdict
from mgpu_pipe.report.rows import print_columns


def show(links: list[Link], config: RunConfig) -> None:
    """Print the links and which of them are slow."""
    ranks = 1 + max(link.second for link in links)
    kind = "gloo" if device_type(config) == "cpu" else "NCCL"
    names, rows = table(links)
    listed = f"{len(links)}" if len(rows) == len(links) else f"the slowest {len(rows)} of {len(links)}"
    print(f"{listed} link{'s' if len(links) > 1 else ''} of {ranks} ranks, by {kind}; the slower direction\n")
    print_columns(names, rows, names[2:4])
    print()
    for line in verdict(links):
        print(line)
    sys.stdout.flush()
