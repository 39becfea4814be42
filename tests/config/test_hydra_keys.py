"""Overrides that would be taken without an effect: Hydra's own keys, and deletions of keys that have a default."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from tests.support.sampling import one_in


@pytest.mark.parametrize(
    ("override", "fix"),
    one_in(
        2,
        [
            ("hydra.run.dir=/tmp/x", "use run.dir=<folder> for this run's folder"),
            ("hydra.output_subdir=.hydra", "a run's folder holds its config.yaml"),
            ("hydra.job.name=x", "use run.name=<name>"),
            ("hydra.job.chdir=true", "paths are relative to the folder"),
            ("+hydra.job.env_set.NAME=1", "set the variables before the command"),
            ("hydra.verbose=true", "each rank's log is logs/rank-*.log"),
            ("hydra/job_logging=default", "logs/rank-*.log"),
            ("hydra.help.app_name=x", "see mgpu-pipe --help"),
            ("hydra.runtime.cwd=/", "leave it out"),
            ("~hydra.run", "use run.dir=<folder>"),
            ("hydra.sweep.dir=/tmp/x", "only a sweep reads it; add -m"),
            ("hydra/sweeper=basic", "only a sweep reads it; add -m"),
            ("hydra.launcher.x=1", "only a sweep reads it; add -m"),
            (
                "~optimizer.lr",
                "a key cannot be deleted; its default is 0.0003; leave it out, or set optimizer.lr=<value>",
            ),
            ("~seed", "its default is 1234; leave it out, or set seed=<value>"),
            ("~trainer.max_epochs", "its default is null"),
            ("~strategy.pipeline", "a section cannot be deleted; set its keys, strategy.pipeline.schedule=..."),
            ("~optimizer", "a run has one of these; choose another, optimizer=adamw|"),
            ("~precision=auto", "a run has one of these; choose another, precision="),
        ],
    ),
)
def test_what_would_have_no_effect_is_refused_with_what_to_write(
    capsys: pytest.CaptureFixture[str], override: str, fix: str
) -> None:
    assert cli.main(["check", override]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {override.lstrip('+').partition('=')[0]}=") and fix in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["hydra.mode=RUN"],
        ["hydra.searchpath=[]"],
        ["~logger"],
        ["~model.config.max_position_embeddings"],
        ["~optimizer.options.eps"],
        ["-m", "seed=1", "hydra.sweep.subdir=x", "hydra/sweeper=basic"],
    ],
)
def test_what_has_an_effect_is_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", *words]) == 0, capsys.readouterr().err
