"""What every benchmark shares: the machine's description, the printed table, the JSON beside it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
"""Keeps glibc from giving freed memory back, which a virtual machine makes slow; read when a program starts."""
PACKAGES = ("torch", "pytorch-lightning", "transformers", "hydra-core", "numpy")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, accelerator and versions, as they stand in every result."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "accelerator": accelerator(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
    }


def accelerator() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


def finish(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: str) -> Path:
    """Print the table and write ``results/<name>-<cpu|gpu>.json``."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=140).print(table)
    print(notes)
    kind = "cpu" if accelerator() == "none" else "gpu"
    RESULTS.mkdir(exist_ok=True)
    out = RESULTS / f"{name}-{kind}.json"
    result = {
        "title": title,
        "notes": notes,
        "machine": machine(),
        "rows": [dict(zip(columns, row, strict=True)) for row in rows],
    }
    out.write_text(json.dumps(result, indent=2) + "\n")
    return out
