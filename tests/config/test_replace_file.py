"""Files are replaced whole, and what a killed write left is taken away by the next."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.system.local_files import replace_file


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for content in ("first", b"second"):
        replace_file(tmp_path / "file", content, flush=content == b"second")
    assert (tmp_path / "file").read_bytes() == b"second" and os.listdir(tmp_path) == ["file"]


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    (tmp_path / "file").symlink_to(elsewhere)
    replace_file(tmp_path / "file", "new")
    assert elsewhere.read_text() == "kept" and not (tmp_path / "file").is_symlink()


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file(tmp_path / "file", "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "file", "new", flush=True)
    assert (tmp_path / "file").read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        names = [f".file.{socket.gethostname()}-{process}.partial" for process in (killed.pid, os.getpid(), living.pid)]
        for name in [*names, ".other.partial", f".file.elsewhere-{killed.pid}.partial"]:
            (tmp_path / name).touch()
        replace_file(tmp_path / "file", "new")
        assert set(os.listdir(tmp_path)) == {
            "file",
            names[2],
            ".other.partial",
            f".file.elsewhere-{killed.pid}.partial",
        }
    finally:
        living.communicate(b"\n")
