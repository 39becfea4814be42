"""What a training step does to a CUDA device and its communicators, by strategy, without a GPU.

``llama_tiny`` and ``mixtral_tiny`` in bf16, two micro-batches of packed rows, one of 1, 8 or 64 processes whose
collectives are counted and not sent; :mod:`benchmarks.gpu.device_watch` is the device. The second step is counted, from
the end of the first to its own, with what Lightning does and the copies of the batch:

- *waits* of the host for the device, and where;
- *communicators* beyond the world's, each of which NCCL makes at the start;
- *operators* without views, *collectives*, and the bytes that this process *sent*.

ZeRO's communicator is DeepSpeed's own, beside the world's; ZeRO-3 waits for its reductions in each micro-batch.

The step of a row that takes tensors of two devices fails, and the row holds the message. Values are not computed, so
that what depends on them is not seen: which experts are chosen, say.

``python -m benchmarks.gpu.cuda_audit`` writes ``results/cuda_audit.json``, which holds the rows of before it was first
acted upon too; with names of rows it prints those as JSON and writes nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.new_process import call_in_new_process
from benchmarks.support import RESULTS
from mgpu_pipe.training.tracing.trace_rank import load_fake_cuda

TABLE = RESULTS / "cuda_audit.json"
PACKAGES = ("torch", "pytorch-lightning", "transformers", "deepspeed")
COLUMNS = ("case", "ranks", "waits", "communicators", "operators", "collectives", "sent")


def versions() -> dict[str, str]:
    """Of the packages whose operators are counted."""
    return {name: version(name) for name in PACKAGES}


def rows_of(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows, each of a process of its own; none or all of the names."""
    load_fake_cuda()
    from benchmarks.gpu.cuda_step import CASES, audit

    for name in names or CASES:
        yield call_in_new_process(audit, name)


def main() -> None:
    names = sys.argv[1:]
    rows = []
    for row in rows_of(names):
        rows.append(row)
        if names:
            print(json.dumps(row), flush=True)
    if names:
        return
    write(rows)
    show(rows)


def write(rows: Sequence[dict[str, Any]]) -> None:
    """The table, a line a row."""
    before = (
        json.loads(TABLE.read_text())["before"] if TABLE.exists() else [{k: row[k] for k in COLUMNS} for row in rows]
    )
    parts = {"title": "A training step on a fake GPU", "versions": versions()}
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in parts.items())
    tables = (
        f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(row) for row in table) + "\n]"
        for key, table in (("rows", rows), ("before", before))
    )
    TABLE.write_text("{\n" + head + ",\n".join(tables) + "\n}\n")


def show(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*(str(row.get(column, row.get("mismatch", ""))) for column in COLUMNS))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
