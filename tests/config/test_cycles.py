"""Experiments that include themselves, or start from themselves, are one line before anything is composed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.launch.base_run import check_bases

FILES = {
    "alone": "defaults: [alone]",
    "first": "defaults: [second, _self_]",
    "second": "defaults: [/experiment/first]",
    "by_override": "defaults: [by_override, {override /model: llama_tiny}]",
    "base": "run: {starts_from: base}",
    "base_of_other": "run: {starts_from: other}",
    "other": "run: {starts_from: base_of_other}",
    "twice": "defaults: [plain, more]",
    "more": "defaults: [plain]",
    "plain": "seed: 3",
}


@pytest.fixture(autouse=True)
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    monkeypatch.chdir(tmp_path)
    check_bases.cache_clear()


@pytest.mark.parametrize(
    ("words", "cycle"),
    [
        (["check", "experiment=alone"], "experiment/alone.yaml: includes itself; remove experiment/alone from"),
        (["experiment=first"], "(experiment/first -> experiment/second -> experiment/first); remove"),
        (["-m", "experiment=quickstart,second"], "(experiment/second -> experiment/first -> experiment/second)"),
        (["--cfg", "job", "experiment=by_override"], "experiment/by_override.yaml: includes itself; remove"),
        (["check", "experiment=base"], "run.starts_from=base: the run would start from itself (base -> base); remove"),
        (["experiment=other"], "itself (base_of_other -> other -> base_of_other); remove it from other"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_cycle_is_one_line(words: list[str], cycle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and cycle in line


def test_an_experiment_that_is_included_twice_is_no_cycle(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--cfg", "job", "experiment=twice"]) == 0
    assert "seed: 3\n" in capsys.readouterr().out
