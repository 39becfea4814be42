"""The page of a plan is one file, which loads nothing and escapes every name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_pipe.checks.plan_layouts import plan_layouts
from mgpu_pipe.cli.main import main
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import EXIT_BAD_INPUT, EXIT_OK
from mgpu_pipe.report.plan_page import plan_page

WORDS = ["model=llama3_8b", "data.global_batch_size=64", "trainer.devices=8"]


def test_the_page_is_written_and_loads_nothing(tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    assert main(["plan", *WORDS, "plan.hardware=h100", "plan.rows=3", "--html", str(out)]) == EXIT_OK
    text = out.read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|url\(|@import""", text)
    assert "default-src 'none'" in text
    for heading in ("Speed against memory", "A step of layout 1", "Memory of layout 1", "With more GPUs"):
        assert heading in text
    for gpus in ('<td class="n">8</td>', '<td class="n">16</td>', '<td class="n">32</td>'):
        assert gpus in text
    parts = [
        float(width)
        for width in re.findall(r"width: ([0-9.e-]+)%", text.split('class="bar tall"')[1].split("</div>")[0])
    ]
    assert sum(parts) == pytest.approx(100)


def test_names_are_escaped() -> None:
    plans, _ = plan_layouts(compose([*WORDS, "plan.hardware=[h100]", "plan.rows=2"])[0])
    named = [replace(plan, profile=replace(plan.profile, name="<script>alert(1)</script>")) for plan in plans]
    text = plan_page(named, [], [], "mgpu-pipe plan '</script><b>'")
    assert "<script>alert" not in text and "</script><b>" not in text
    assert "&lt;script&gt;alert" in text


@pytest.mark.parametrize("words", [["--html"], ["--html", "--json"], ["--html="]])
def test_a_page_without_a_file_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, *words]) == EXIT_BAD_INPUT
    assert capsys.readouterr().err == "error: --html: no file; write --html plan.html\n"


def test_an_override_in_place_of_the_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--html", "plan.gpus=8"]) == EXIT_BAD_INPUT
    fix = "is an override, no file; write --html plan.html plan.gpus=8"
    assert capsys.readouterr().err == f"error: --html plan.gpus=8: {fix}\n"


def test_a_page_that_cannot_be_written_names_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "no" / "plan=1.html"
    assert main(["plan", *WORDS, "plan.hardware=h100", "plan.rows=1", "--html", str(out)]) == EXIT_BAD_INPUT
    line = f"error: --html {out}: cannot be written (No such file or directory); choose another file\n"
    assert capsys.readouterr().err == line
