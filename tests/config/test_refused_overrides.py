"""Overrides that are refused with what to write: Hydra's own keys, deletions of keys with a default, slips of editors.

Oracle of the advice for slips: Hydra reads it by compose.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.hydra.typing_slips import typing_slip
from mgpu_pipe.errors import ConfigErrors
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
            ("model@teacher=gpt2_tiny", "a group has one place here, without @; write model=gpt2_tiny"),
            ("+model@model.teacher=gpt2_tiny", "without @; write model=gpt2_tiny"),
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


@pytest.mark.parametrize(
    ("word", "letter", "paths"),
    [
        ("data.paths=[/data/my dir/it\u2019s.txt]", "U+2019", ["/data/my dir/it\u2019s.txt"]),
        ("data.paths=[/a.txt,/data/it\u2019s.txt]", "U+2019", ["/a.txt", "/data/it\u2019s.txt"]),
        ("data.paths=[/data/my dir/a\u2013b.txt]", "U+2013", ["/data/my dir/a\u2013b.txt"]),
    ],
)
def test_marks_in_a_value_are_quoted(word: str, letter: str, paths: list[str]) -> None:
    with pytest.raises(ConfigErrors) as caught:
        compose(["model=llama_tiny", "data=jsonl", word])
    assert f": has {letter} " in str(caught.value)
    advice = str(caught.value).rpartition("quote the value, ")[2].partition(", or type ")[0]
    config, _ = compose(["model=llama_tiny", "data=jsonl", *shlex.split(advice)])
    assert config.data.paths == paths


@pytest.mark.parametrize(
    ("word", "letter", "typed"),
    [
        ("optimizer.lr=1e\u20133", "U+2013", "optimizer.lr=1e-3"),
        ("model=\u201cllama_tiny\u201d", "U+201C", 'model="llama_tiny"'),
        ("model=llama\u200b_tiny", "U+200B", "model=llama_tiny"),
        ("\u201cmodel=llama_tiny\u201d", "U+201C", '"model=llama_tiny"'),
        (" model=llama_tiny", "U+0020", "model=llama_tiny"),
    ],
)
def test_other_slips_are_typed_again(word: str, letter: str, typed: str) -> None:
    error = str(typing_slip(word))
    assert f": has {letter} " in error and error.endswith(f"; type {typed}")
