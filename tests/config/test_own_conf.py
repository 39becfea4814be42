"""``./conf`` of the working folder, and experiments of it that include or start from themselves.

Oracle: the files that are written here, and the shipped tree.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from mgpu_pipe.cli import main as cli
from mgpu_pipe.config.hydra.compose import compose_checked
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.launch.base_run import check_bases
from mgpu_pipe.system.conf_folders import conf_dir
from tests.support.command import column, mgpu, run_folder

MINE = """\
# @package _global_
# mgpu-pipe experiment=mine
#
# Eight steps of my own.
defaults:
  - override /model: llama_tiny
  - override /data: short
trainer: {max_steps: 8}
"""
SHORT = "# Short samples of random documents.\ndefaults: [synthetic]\nseq_len: 16\nglobal_batch_size: 4\n"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an experiment and a data option of its own."""
    for name, text in (("experiment/mine", MINE), ("data/short", SHORT)):
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_own_options_compose_after_the_shipped_ones_and_are_told(work: Path) -> None:
    made = compose_checked(["experiment=mine"])
    assert made.errors == [] and made.local_options == ["data=short", "experiment=mine"]
    data = made.config.data
    assert (data.source, data.seq_len, made.config.trainer.max_steps) == ("synthetic", 16, 8)
    assert compose_checked(["model=llama_tiny"]).local_options == []


@pytest.mark.parametrize("name", ["config", "model/llama_tiny"])
def test_a_shipped_name_is_refused_with_both_files(name: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = work / "conf" / f"{name}.yaml"
    own.parent.mkdir(exist_ok=True)
    own.write_text("{}\n")
    for words in (["check", "experiment=mine"], ["ls"], ["--cfg", "job"], ["--info", "searchpath"], ["-m", "seed=1"]):
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert str(own) in said and str(conf_dir() / f"{name}.yaml") in said and said.count("\n") == 1


def test_another_tree_is_not_followed_by_it(work: Path) -> None:
    (work / "conf" / "config.yaml").write_text("defaults: [mgpu_schema, _self_]\nseed: 7\n")
    for folder in ("conf", "other"):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "config.yaml").write_text("defaults: [mgpu_schema, _self_]\nseed: 7\n")
        made = compose_checked([], conf=Path(folder).absolute())
        assert made.config.seed == 7 and made.local_options == []


def test_in_the_shipped_trees_own_folder_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(conf_dir().parent)
    assert compose_checked(["experiment=quickstart"]).local_options == []


def test_ls_check_and_completion_show_them(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "conf" / "experiment" / "plain.yaml").write_text("# @package _global_\nseed: 3\n")
    assert cli.main(["ls", "experiment"]) == 0
    listed = re.sub(" +", " ", capsys.readouterr().out)
    assert " mine Eight steps of my own. (./conf)" in listed and " plain (./conf)" in listed
    assert " quickstart The main job: a small Llama" in listed
    assert cli.main(["check", "experiment=mine"]) == 0
    assert "own conf    data=short experiment=mine (./conf)" in capsys.readouterr().out
    assert cli.main(["check"]) == 0
    assert "own conf" not in capsys.readouterr().out
    assert cli.main(["check", "experiment=mina"]) == 2
    assert "did you mean mine?" in capsys.readouterr().err


def test_a_pipe_among_them_is_not_waited_for(work: Path) -> None:
    os.mkfifo(work / "conf" / "data" / "pipe.yaml")
    assert cli.main(["ls", "data"]) == 2


@pytest.mark.slow
def test_a_sweep_knows_its_points_options(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "-m", "experiment=mine,quickstart"]) == 0
    assert capsys.readouterr().out.count("own conf ") == 1


@pytest.mark.slow
def test_a_run_outlives_the_folder(work: Path, cache: Path) -> None:
    """The folder is gone, and the run can be evaluated and continued from what was frozen."""
    out = mgpu(cache, work, "experiment=mine", "run.dir=run", "checkpoint.every_n_steps=4", "trainer.max_steps=4")
    assert "own conf" in out and "data=short experiment=mine (./conf)" in out
    whole = run_folder(mgpu(cache, work, "experiment=mine", "run.dir=whole", "scheduler.total_steps=4"))
    for file in sorted((work / "conf").rglob("*.yaml")):
        file.unlink()
    mgpu(cache, work, "eval", "run")
    mgpu(cache, work, "--config-path", "run", "run.dir=run", "checkpoint.resume=auto", "trainer.max_steps=8")
    assert column(work / "run", "train/loss") == column(whole, "train/loss")
    frozen = yaml.safe_load((work / "run" / "config.yaml").read_text())
    assert frozen["data"]["seq_len"] == 16 and frozen["trainer"]["max_steps"] == 8


def test_an_own_file_cannot_bring_code(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = "from hydra.experimental.callback import Callback\n\n\nclass Mine(Callback):\n    pass\n"
    (work / "own_code.py").write_text(f"open('EXECUTED', 'w')\n{callback}")
    file = work / "conf" / "hydra" / "callbacks" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("x: {_target_: own_code.Mine}\n")
    assert cli.main(["check", "-m", "hydra/callbacks=mine", "seed=1"]) == 2
    assert "type hydra.callbacks.x._target_=own_code.Mine on the command line" in capsys.readouterr().err
    assert not (work / "EXECUTED").exists()


def test_every_taken_name_is_told_at_once(work: Path) -> None:
    for name in ("config", "data/jsonl"):
        (work / "conf" / f"{name}.yaml").write_text("{}\n")
    with pytest.raises(ConfigErrors) as caught:
        compose_checked([])
    assert len(caught.value.errors) == 2


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


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    monkeypatch.chdir(tmp_path)
    check_bases.cache_clear()


@pytest.mark.usefixtures("experiments")
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


@pytest.mark.usefixtures("experiments")
def test_an_experiment_that_is_included_twice_is_no_cycle(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--cfg", "job", "experiment=twice"]) == 0
    assert "seed: 3\n" in capsys.readouterr().out
