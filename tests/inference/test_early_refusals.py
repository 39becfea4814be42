"""What the verbs refuse they refuse before they import anything slow. Oracle: the modules of a new interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "run", "--out", "there"], "--out=there: exists already; choose another folder, or replace it with"),
        (["export", "run", "--out", "run"], "--out=run: exists and is not a model folder; choose another folder"),
        (["export", "nothing", "--out", "new"], "nothing: no such folder"),
        (["export", "run", "--out", "new", "--device", "cpu"], "unrecognized arguments: --device cpu"),
        (
            ["import", "--from", "nothing.ckpt", "--out", "new", "model=llama_tiny"],
            "--from=nothing.ckpt: no such file or folder",
        ),
        (["import", "--from", "file.ckpt", "--out", "there", "model=llama_tiny"], "--out=there: exists already"),
        (["generate", "run", "--prompt", "x", "--device", "cuda"], "--device=cuda: torch can use no GPU here"),
        (["generate", "run", "--prompt", "x", "--device", "tpu"], "--device=tpu: no such device; use auto, cpu, cuda"),
        (["generate", "nothing", "--prompt", "x"], "nothing: no such folder"),
        (["eval", "run", "--device", "cuda:3"], "--device=cuda:3: torch can use no GPU here; use auto or cpu"),
    ],
)
def test_it_is_one_line_and_nothing_slow_was_imported(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    (tmp_path / "file.ckpt").write_text("x")
    program = textwrap.dedent(f"""
        import sys
        from mgpu_pipe.cli.main import main
        code = main({words!r})
        print(code, sorted({{"torch", "transformers", "pytorch_lightning"}} & set(sys.modules)))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout == "2 []\n", done.stderr
    assert said in done.stderr and done.stderr.count("\n") == 1
