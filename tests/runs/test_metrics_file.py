"""metrics.csv holds every row that was appended, whole, whatever ended the process. Oracle: the csv module."""

from __future__ import annotations

import csv
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.runs.metrics_file import METRIC_COLUMNS, MetricsWriter, read_metrics, truncate_after


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_steps(path: Path, first: int, last: int, extra: tuple[str, ...] = ()) -> None:
    writer = MetricsWriter(path, extra)
    for step in range(first, last + 1):
        writer.append({"step": step, "train/loss": 1 / step, "lr": 1e-4 * step})
    writer.close()


def test_the_header_is_there_from_the_start_and_is_the_contracts(tmp_path: Path) -> None:
    MetricsWriter(tmp_path / "metrics.csv").close()
    assert (tmp_path / "metrics.csv").read_text() == (
        "step,train/loss,train/grad_norm,lr,throughput/tokens_per_s,throughput/samples_per_s,throughput/padding,"
        "throughput/step_s,throughput/mfu,memory/peak_gib,val/loss,val/perplexity\n"
    )


def test_numbers_come_back_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    draw = random.Random(0)
    losses = [draw.uniform(-1, 1) * 10 ** draw.randint(-30, 30) for _ in range(200)]
    writer = MetricsWriter(path)
    for step, loss in enumerate(losses, 1):
        writer.append({"step": step, "train/loss": loss})
    writer.close()
    assert [float(row["train/loss"]) for row in rows_of(path)] == losses
    assert read_metrics(path)["train/loss"] == losses
    assert read_metrics(path)["step"] == list(range(1, 201))


def test_missing_values_are_empty_cells_and_read_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    writer = MetricsWriter(path)
    writer.append({"step": 1, "train/loss": 2.5, "val/loss": None})
    writer.append({"step": 2, "train/loss": float("inf"), "val/loss": 3})
    writer.close()
    assert [row["val/loss"] for row in rows_of(path)] == ["", "3"]
    table = read_metrics(path)
    assert math.isnan(table["val/loss"][0])
    assert table["val/loss"][1] == 3.0
    assert table["train/loss"] == [2.5, math.inf]


def test_numpy_scalars_are_written_as_plain_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    writer = MetricsWriter(path)
    writer.append({"step": 1, "train/loss": numpy.float64(0.1), "lr": numpy.float32(0.5)})
    writer.close()
    assert rows_of(path)[0]["train/loss"] == "0.1"
    assert rows_of(path)[0]["lr"] == "0.5"


def test_an_unknown_column_and_a_row_without_step_are_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.csv")
    with pytest.raises(ValueError, match="train/los"):
        writer.append({"step": 1, "train/los": 2.0})
    with pytest.raises(ValueError, match="step"):
        writer.append({"train/loss": 2.0})
    with pytest.raises(ValueError, match="name"):
        MetricsWriter(tmp_path / "other.csv", ["a\nb"])
    writer.close()
    assert rows_of(tmp_path / "metrics.csv") == []


def test_a_process_killed_while_it_writes_leaves_whole_rows_and_loses_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    program = (
        "import sys; from pathlib import Path; from mgpu_pipe.runs.metrics_file import MetricsWriter\n"
        "writer = MetricsWriter(Path(sys.argv[1]))\n"
        "for step in range(1, 10**9):\n"
        "    writer.append({'step': step, 'train/loss': 1 / step, 'val/loss': step / 3})\n"
        "    if step % 100 == 0: print(step, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(20):
        told = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    told = max([told, *map(int, child.stdout.read().split())])
    child.wait()
    assert path.read_bytes().endswith(b"\n")
    rows = rows_of(path)
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= told
    assert all(float(row["train/loss"]) == 1 / int(row["step"]) for row in rows)


def test_a_torn_end_is_skipped_by_readers_and_cut_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_steps(path, 1, 3)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in range(1, len(last)):
        path.write_bytes(whole[:-cut])
        assert read_metrics(path)["step"] == [1, 2]
        write_steps(path, 3, 3)
        assert path.read_bytes() == whole
    # a power loss can also leave zeros, or a line that lacks cells
    for damage in (b"\0" * 40, b"4,1.0\n", b"4,x,,,,,,,,\n"):
        path.write_bytes(whole + damage)
        assert read_metrics(path)["step"] == [1, 2, 3]
        assert truncate_after(path, 10) == 3
        assert path.read_bytes() == whole


@pytest.mark.parametrize("torn_header", [b"", b"step,train/lo", b"\0\0\0"])
def test_a_file_without_a_whole_header_is_begun_again(tmp_path: Path, torn_header: bytes) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(torn_header)
    assert read_metrics(path) == {}
    assert truncate_after(path, 5) == 0
    write_steps(path, 1, 2)
    assert list(rows_of(path)[0]) == list(METRIC_COLUMNS)
    assert len(rows_of(path)) == 2


def test_a_resume_leaves_no_step_double_and_none_missing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_steps(path, 1, 10)
    uninterrupted = path.read_bytes()
    path.write_bytes(uninterrupted + b"11,0.09")
    assert truncate_after(path, 6) == 6
    assert [int(row["step"]) for row in rows_of(path)] == [1, 2, 3, 4, 5, 6]
    write_steps(path, 7, 10)
    assert path.read_bytes() == uninterrupted
    assert truncate_after(path, 0) == 0
    assert rows_of(path) == []


def test_truncating_what_needs_no_cut_leaves_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    assert truncate_after(path, 3) == 0
    assert not path.exists()
    write_steps(path, 1, 3)
    before = path.stat().st_ino
    assert truncate_after(path, 3) == 3
    assert path.stat().st_ino == before
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_columns_that_change_between_attempts_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write_steps(path, 1, 2, ("old, quoted",))
    writer = MetricsWriter(path, ("new",))
    writer.append({"step": 3, "new": 7.0, "old, quoted": 1.5})
    writer.widen(["late", "new"])
    writer.append({"step": 4, "late": 9.0})
    writer.sync()
    writer.close()
    rows = rows_of(path)
    assert list(rows[0]) == [*METRIC_COLUMNS, "old, quoted", "new", "late"]
    assert [row["new"] for row in rows] == ["", "", "7.0", ""]
    assert [row["late"] for row in rows] == ["", "", "", "9.0"]
    assert [row["train/loss"] for row in rows] == ["1.0", "0.5", "", ""]
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_a_disk_that_takes_no_more_is_one_line_and_leaves_whole_rows(tmp_path: Path) -> None:
    # a file size limit stops a write in the middle of a row, as a full disk does
    path = tmp_path / "metrics.csv"
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from mgpu_pipe.errors import RunFolderError\n"
        "from mgpu_pipe.runs.metrics_file import MetricsWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "writer = MetricsWriter(Path(sys.argv[1]))\n"
        "try:\n"
        "    for step in range(1, 1000): writer.append({'step': step, 'train/loss': 1 / 3})\n"
        "except RunFolderError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert str(path) in done.stdout
    assert done.stdout.count("\n") == 1
    assert "ulimit -f" in done.stdout
    assert path.read_bytes().endswith(b"\n")
    assert len(rows_of(path)) > 10
    assert all(row["train/loss"] == repr(1 / 3) for row in rows_of(path))


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot write metrics"):
        MetricsWriter(tmp_path / "nowhere" / "metrics.csv")
