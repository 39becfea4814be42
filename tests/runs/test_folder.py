"""Which folder a run gets, and what is left there; real folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import CheckpointConfig, RunConfig, RunOptions, TrainerConfig
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.errors import ConfigError, RunFolderError
from mgpu_pipe.runs.environment import write_environment
from mgpu_pipe.runs.history import write_summary
from mgpu_pipe.runs.latest import newest_run
from mgpu_pipe.runs.record import begin, keep_attempt_config, next_attempt, record_launch
from mgpu_pipe.runs.run_folder import RunFolder, choose_folder, decide_resume, is_completed, writing_to
from tests.support.needs import nobodys_folder


def config_in(root: Path, resume: str = "none", folder: Path | None = None, **trainer: int) -> RunConfig:
    return RunConfig(
        run=RunOptions(name="study", root=str(root), dir=None if folder is None else str(folder)),
        checkpoint=CheckpointConfig(resume=resume),
        trainer=TrainerConfig(**trainer),  # type: ignore[arg-type]
    )


def synthetic_run(tmp_path: Path, num_documents: int) -> RunConfig:
    run = RunConfig()
    run.model.config = {"vocab_size": 300}
    run.data.source, run.data.seq_len, run.data.cache_dir = "synthetic", 32, str(tmp_path / "cache")
    run.data.synthetic.num_documents = num_documents
    return run


def chosen(config: RunConfig) -> RunFolder:
    """As a launch does it, which holds the lock in between."""
    folder = choose_folder(config)
    folder.paths.lock.touch()
    return decide_resume(folder, config.checkpoint)


def leave_run(folder: Path, created: float, config: RunConfig | None = None, **entries: object) -> RunPaths:
    paths = RunPaths(folder)
    folder.mkdir(parents=True)
    freeze(config or RunConfig(), paths.config)
    paths.environment.write_text(json.dumps({"created": created, **entries}))
    return paths


def test_two_runs_of_the_same_second_have_two_folders(tmp_path: Path) -> None:
    folders = [choose_folder(config_in(tmp_path)).paths.root for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.parent == tmp_path / "study" and folder.is_dir() for folder in folders)


def test_many_processes_at_once_never_share_a_folder(tmp_path: Path) -> None:
    program = (
        "import sys; from mgpu_pipe.config.schema import *; from mgpu_pipe.runs.run_folder import choose_folder\n"
        "print(choose_folder(RunConfig(run=RunOptions(root=sys.argv[1]))).paths.root)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    folders = [process.communicate(timeout=60)[0] for process in started]
    assert len(set(folders)) == 4


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path, resume: str) -> None:
    (tmp_path / "precious.txt").write_text("results")
    with pytest.raises(RunFolderError, match=r"not empty and holds no run \(precious.txt\)"):
        choose_folder(config_in(tmp_path, resume, folder=tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious.txt"]


def test_a_folder_in_which_another_launch_trained_after_it_was_chosen_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path, folder=tmp_path / "run")
    folder = choose_folder(config)
    decide_resume(folder, config.checkpoint)
    freeze(config, folder.paths.config)
    decide_resume(folder, config.checkpoint)  # not a step was trained: nothing is lost
    folder.paths.metrics.write_text("step\n1\n")
    with pytest.raises(RunFolderError, match=r"a run has trained in this folder; .* mgpu-pipe seed=2 run.dir=/"):
        decide_resume(folder, config.checkpoint, ["seed=2"])


def test_a_refused_launch_takes_back_what_it_wrote(tmp_path: Path) -> None:
    config = config_in(tmp_path, folder=tmp_path / "made")
    made = begin(chosen(config), config, [], [])
    made.paths.logs.mkdir()
    made.discard()
    assert not made.paths.root.exists()
    (tmp_path / "given").mkdir()
    config = config_in(tmp_path, folder=tmp_path / "given")
    begin(chosen(config), config, [], []).discard()
    assert list((tmp_path / "given").iterdir()) == []
    old = leave_run(tmp_path / "old", 1.0)
    for resume in ("auto", "none"):
        config = config_in(tmp_path, resume, tmp_path / "old")
        begin(chosen(config), config, [], []).discard()
        assert old.config.exists()


@pytest.mark.parametrize("trained", ["checkpoints/step-00000004/manifest.json", "metrics.csv"])
def test_a_launch_that_trained_before_it_was_refused_keeps_everything(trained: str, tmp_path: Path) -> None:
    """A restart finds its newest checkpoint damaged, under ``on_corruption=stop``: the others must survive that."""
    config = config_in(tmp_path, folder=tmp_path / "run")
    folder = begin(chosen(config), config, [], [])
    for name in ("config.yaml", trained):
        (folder.paths.root / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.paths.root / name).write_text("")
    folder.discard()
    assert (folder.paths.root / trained).exists() and folder.paths.config.exists()


def test_a_disk_that_fills_up_while_the_launch_is_recorded_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(synthetic_run(tmp_path, num_documents=20))
    paths = choose_folder(config_in(tmp_path, folder=tmp_path / "full")).paths

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(RunFolderError, match="No space left on device"), writing_to(paths.root):
        record_launch(paths, RunConfig(), [], {"started": 0.0}, prepared)


def test_auto_goes_on_in_the_run_begun_last(tmp_path: Path) -> None:
    leave_run(tmp_path / "study" / "z-older", 100.0)
    newest = leave_run(tmp_path / "study" / "a-newer", 200.0)
    (tmp_path / "study" / "no-run").mkdir()
    folder = choose_folder(config_in(tmp_path, "auto"))
    assert folder.is_resumed
    assert folder.paths.root == newest.root


def test_the_run_begun_last_is_so_also_where_the_clock_was_set_back_since(tmp_path: Path) -> None:
    now = time.time()
    leave_run(tmp_path / "study" / "first", now + 1e6)
    config = config_in(tmp_path)
    second = choose_folder(config).paths
    record_launch(second, config, [], {"started": now}, prepare(synthetic_run(tmp_path, num_documents=20)))
    assert newest_run(tmp_path) == second.root
    recorded = json.loads(second.environment.read_text())
    assert recorded["started"] == now


def test_a_launch_that_is_killed_while_it_is_recorded_keeps_when_the_run_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ``checkpoint.resume=auto`` would take an older run of this name for the newest."""
    paths = leave_run(tmp_path / "study" / "run", 100.0)
    leave_run(tmp_path / "study" / "older", 50.0)

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_environment(paths.environment, {"created": 100.0, "more": "x" * 10_000})
    assert newest_run(tmp_path) == paths.root


def test_auto_starts_afresh_where_there_is_no_run(tmp_path: Path) -> None:
    assert not chosen(config_in(tmp_path, "auto")).is_resumed
    assert not chosen(config_in(tmp_path, "auto", tmp_path / "run")).is_resumed


def test_a_restart_by_another_launcher_goes_on_in_that_launchs_folder(tmp_path: Path) -> None:
    mine = leave_run(tmp_path / "study" / "mine", 100.0, launch="agent-1")
    leave_run(tmp_path / "study" / "other", 200.0, launch="agent-2")
    assert choose_folder(config_in(tmp_path), restart_of="agent-1").paths.root == mine.root
    assert choose_folder(config_in(tmp_path), restart_of="agent-3").created


@pytest.mark.parametrize(
    ("status", "reached", "asked", "complete"),
    [("finished", 10, 10, True), ("finished", 10, 5, True), ("finished", 10, 20, False), ("stopped", 10, 10, False)],
)
def test_a_run_is_complete_until_more_steps_are_asked_for(
    tmp_path: Path, status: str, reached: int, asked: int, complete: bool
) -> None:
    paths = leave_run(tmp_path / "run", 1.0)
    write_summary(paths, {"status": status, "step": reached})
    config = config_in(tmp_path, "auto", tmp_path / "run", max_steps=asked)
    assert is_completed(chosen(config), config.trainer) is complete


def test_a_run_of_epochs_is_complete_until_more_epochs_are_asked_for(tmp_path: Path) -> None:
    paths = leave_run(tmp_path / "run", 1.0)
    freeze(RunConfig(trainer=TrainerConfig(max_epochs=2)), paths.config)
    write_summary(paths, {"status": "finished", "step": 10})
    for epochs, complete in ((1, True), (2, True), (3, False)):
        config = config_in(tmp_path, "auto", tmp_path / "run", max_epochs=epochs)
        assert is_completed(chosen(config), config.trainer) is complete


def test_attempts_are_counted_over_launches_and_their_configurations_kept(tmp_path: Path) -> None:
    paths = leave_run(tmp_path / "run", 1.0)
    for attempt in (1, 2, 3):
        assert next_attempt(paths) == attempt
        freeze(replace(RunConfig(), seed=attempt), paths.config)
        keep_attempt_config(paths, attempt)
    kept = [(paths.root / f"config-attempt-{attempt}.yaml").read_text() for attempt in (1, 2, 3)]
    assert len(set(kept)) == 3


def test_what_a_kill_left_unfinished_goes_when_the_run_is_gone_on_in(tmp_path: Path) -> None:
    config = config_in(tmp_path, "auto", tmp_path / "run")
    paths = chosen(config).paths
    freeze(config, paths.config)
    left = [
        paths.root / ".metrics.csv.19150.partial",
        paths.root / "summary.json.partial",
        paths.logs / "rank-0.error.partial",
        paths.checkpoints / "ruined.json.partial",
    ]
    step = paths.checkpoints / "step-00000002.partial"
    for folder in (paths.logs, step):
        folder.mkdir(parents=True)
    for file in left:
        file.touch()
    assert chosen(config).is_resumed
    assert not any(file.exists() for file in left) and step.exists()


def test_a_name_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    for name in ("../elsewhere", "a/b", "", ".."):
        config = config_in(tmp_path)
        config.run.name = name
        with pytest.raises(ConfigError, match=r"run\.name"):
            choose_folder(config)


def test_a_place_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError):
        choose_folder(config_in(tmp_path / "file"))
    with pytest.raises(RunFolderError, match="this is a file"):
        choose_folder(config_in(tmp_path, folder=tmp_path / "file"))
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match="link is a link to nothing"):
        choose_folder(config_in(tmp_path, folder=tmp_path / "link" / "run"))
    with pytest.raises(RunFolderError, match=r"/proc/.* cannot be written"):  # not even by root
        choose_folder(config_in(Path("/proc/no_such_folder")))


def test_a_read_only_folder_is_an_input_error() -> None:
    with nobodys_folder() as folder:
        folder.chmod(0o500)
        with pytest.raises(RunFolderError, match="cannot be written"):
            choose_folder(config_in(folder))


@pytest.mark.parametrize(
    "left",
    [
        (),
        (".lock",),
        (".lock", "environment.json.7.partial"),
        (".lock", "environment.json"),
        (".lock", "environment.json", "overrides.txt", "config.yaml.7.partial"),
        (".lock", "environment.json", "overrides.txt", "config.yaml"),
        (".lock", "environment.json", "overrides.txt", "config.yaml", "logs", "checkpoints", "metrics.csv"),
    ],
)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("resume", ["auto", "none"])
def test_whatever_a_kill_leaves_before_the_first_step_the_same_line_takes(
    left: tuple[str, ...], given: bool, resume: str, tmp_path: Path
) -> None:
    config = config_in(tmp_path, resume, tmp_path / "run" if given else None)
    killed = choose_folder(config).paths
    for name in left:
        (killed.root / name).mkdir() if "." not in name else (killed.root / name).write_text("")
    if "config.yaml" in left:
        freeze(config, killed.config)
        killed.environment.write_text('{"created": 5.0}')
    again = chosen(config)
    assert (again.paths.root == killed.root) is (given or resume == "auto")
    begun_now = begin(again, config, ["seed=1"], ["mgpu-pipe"])
    assert begun_now.paths.config.is_file() and not list(begun_now.paths.root.glob("*.partial"))
    assert newest_run(tmp_path) == begun_now.paths.root


def test_a_folder_of_the_same_mathematics_that_holds_something_else_is_not_taken_for_an_unborn_run(
    tmp_path: Path,
) -> None:
    config = config_in(tmp_path, "auto")
    other = choose_folder(config).paths.root
    (other / "precious.txt").write_text("results")
    assert choose_folder(config).paths.root != other


def test_auto_takes_the_newest_run_of_the_same_mathematics_and_names_what_differs(tmp_path: Path) -> None:
    config = config_in(tmp_path, "auto")
    own = leave_run(tmp_path / "study" / "own", 100.0, config)
    other = config_in(tmp_path)
    other.optimizer.lr = 0.5
    newer = leave_run(tmp_path / "study" / "newer", 200.0, other)
    assert choose_folder(config).paths.root == own.root
    config.seed = 8
    fresh = choose_folder(config)
    assert fresh.created and f"{newer.root}, is another (seed=1234 there, 8 here; optimizer.lr=0.5 there" in fresh.note
    assert "goes on in it" not in fresh.note
    other.optimizer.lr, other.checkpoint.resume = 0.25, "auto"
    assert f"run.dir={newer.root} continues it anyway" in choose_folder(other).note


def test_a_run_that_was_gone_on_in_with_other_settings_is_nobodys_own(tmp_path: Path) -> None:
    config = config_in(tmp_path, "auto")
    spliced = leave_run(tmp_path / "study" / "spliced", 100.0, config)
    keep_attempt_config(spliced, 1)
    assert choose_folder(config).paths.root == spliced.root
    config.optimizer.lr = 0.5
    freeze(config, spliced.config)
    keep_attempt_config(spliced, 2)
    fresh = choose_folder(config)
    assert fresh.created and "is another (optimizer.lr=0.0003 there, 0.5 here)" in fresh.note


def test_a_folder_that_another_process_makes_after_the_look_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes the folder between the question whether it is there and its making."""
    from mgpu_pipe.checkpoint import file_operations as files

    make, names = files.make_folders, list[Path]()

    def made_meanwhile(path: Path) -> None:
        if path.parent.name == "study" and not names:
            names.append(path)
            path.mkdir()
        make(path)

    monkeypatch.setattr(files, "make_folders", made_meanwhile)
    assert choose_folder(config_in(tmp_path)).paths.root not in names and names
