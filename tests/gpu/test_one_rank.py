"""One rank of 8 and of 64 on one device, its collectives counted and not sent; dry, on the CPU.

Oracles: the collectives of the audit (``benchmarks/results/cuda_audit.json``), which sees shapes and no values; and the
bytes of the parts, by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu.cuda_audit import TABLE
from benchmarks.gpu.one_rank import NAMES
from tests.gpu.conftest import sampled
from tests.support.command import REPOSITORY
from tests.support.tables import TOLD

CHOSEN = ("single", "fsdp8", "fsdp64", "experts1", "ep8 x dp64")
OTHERS = [name for name in NAMES if name not in CHOSEN]


@pytest.mark.slow
@pytest.mark.parametrize("names", sampled([CHOSEN, OTHERS]), ids=["chosen", "others"])
def test_one_rank_of_many(names: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.one_rank", *names]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, text=True)
    audited = {row["case"]: row for row in json.loads(TABLE.read_text())["rows"]}
    rows = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == list(names)
    for name, row in rows.items():
        figures = f"{row['memory'] / 2**20:.1f} MiB, {1000 * row['compute_s']:.0f} ms, {row['collectives']} collectives"
        TOLD.append(f"one rank: {name}: {figures}, {row['sent'] / 2**20:.2f} MiB sent")
        assert row["memory"] > row["weights"] + row["optimizer"]
        if name in audited:
            assert row["collectives"] == audited[name]["collectives"], name
            assert row["sent"] == audited[name]["sent"], name
    if names == CHOSEN:
        whole, of_8, of_64 = (rows[name] for name in CHOSEN[:3])
        assert whole["memory"] > of_8["memory"] > of_64["memory"]
        for part in ("weights", "optimizer"):
            assert whole[part] == pytest.approx(8 * of_8[part], rel=0.02) == pytest.approx(64 * of_64[part], rel=0.1)
            # Each rank's expert is cut once more over the eight ranks that hold it.
            assert rows["experts1"][part] == pytest.approx(64 * rows["ep8 x dp64"][part], rel=0.1)
