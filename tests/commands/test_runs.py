"""``mgpu-pipe runs``. Oracle: the files that each run's folder was made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.runs.lock import RunLock
from tests.report.fake_runs import make_run
from tests.support.command import column, environment, mgpu, run_folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs below ``outputs``: finished, failed, running of another name, and one of an earlier version."""
    monkeypatch.chdir(tmp_path)
    outputs = Path("outputs")
    now = time.time()
    tell(make_run(outputs, "alpha", "a1", steps=12, lr=1e-3).root, now - 3600, "fsdp", ["best", "paper"])
    tell(make_run(outputs, "alpha", "a2", steps=12, summary={"status": "failed"}).root, now - 9 * 86400, "ddp", ["bad"])
    going = make_run(outputs, "beta", "b1", steps=6)
    tell(going.root, now - 60, "ddp", ["paper"])
    going.summary.unlink()
    make_run(outputs, "beta", "old", steps=18, config={"run": {"name": "beta", "tags": ["of-its-config"]}})
    return outputs


def tell(folder: Path, created: float, strategy: str, tags: list[str]) -> None:
    file = folder / "environment.json"
    own = {"name": folder.parent.name, "strategy": strategy, "tags": tags}
    file.write_text(json.dumps({**json.loads(file.read_text()), "created": created, "run": own}))


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert cli.main(["runs", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def names(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    return [Path(row["folder"]).name for row in rows(capsys, *words)]


def test_every_run_is_listed_with_what_it_reached(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_name = {Path(row["folder"]).name: row for row in rows(capsys)}
    assert list(by_name) == ["b1", "a1", "a2", "old"]
    first = by_name["a1"]
    folder = root / "alpha" / "a1"
    assert (first["state"], first["step"], first["strategy"]) == ("finished", 12, "fsdp")
    assert (first["tags"], first["name"]) == (["best", "paper"], "alpha")
    assert first["loss"] == column(folder, "train/loss")[12]
    assert first["tokens_per_s"] == column(folder, "throughput/tokens_per_s")[12]
    assert first["nbytes"] == sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert by_name["a2"]["state"] == "failed" and by_name["old"]["tags"] == ["of-its-config"]
    going = by_name["b1"]
    assert (going["state"], going["step"]) == ("unfinished", 6)
    assert going["loss"] == column(root / "beta" / "b1", "train/loss")[6]
    with RunLock(root / "beta" / "b1" / ".lock"):
        assert rows(capsys)[0]["state"] == "running"


def test_a_torn_row_and_broken_files_are_survived(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (root / "beta" / "b1" / "metrics.csv").open("a") as file:
        file.write("7,2.5")
    (root / "alpha" / "a1" / "summary.json").write_text("{")
    (root / "alpha" / "a2" / "environment.json").unlink()
    os.mkfifo(root / "alpha" / "a2" / "pipe")
    (root / "beta" / "old" / "metrics.csv").unlink()
    by_name = {Path(row["folder"]).name: row for row in rows(capsys)}
    assert by_name["b1"]["step"] == 6 and by_name["a1"]["step"] == 12
    assert by_name["a2"]["begun"] == 0 and by_name["old"]["tokens_per_s"] is None
    assert cli.main(["runs"]) == 0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--name", "al*"], ["a1", "a2"]),
        (["--state", "finished"], ["a1", "old"]),
        (["--strategy", "ddp"], ["b1", "a2", "old"]),
        (["--tag", "paper"], ["b1", "a1"]),
        (["--tag", "paper", "--tag", "best"], ["a1"]),
        (["--older", "7d"], ["a2", "old"]),
        (["--newer", "30m"], ["b1"]),
        (["--limit", "2"], ["b1", "a1"]),
        (["--sort", "step"], ["old", "a1", "a2", "b1"]),
        (["--sort", "age", "--reverse"], ["old", "a2", "a1", "b1"]),
        (["--sort", "name"], ["a1", "a2", "b1", "old"]),
        (["--sort", "optimizer.lr"], ["a1", "b1", "a2", "old"]),
        (["--sort", "lr", "--reverse", "--limit", "1"], ["old"]),
        (["--where", "lr=1e-3"], ["a1"]),
        (["--where", "trainer.max_steps=12", "--where", "data.source=stdlib_text"], ["a1", "a2"]),
        (["--where", "dp_replicate=2"], []),
        (["--sort", "val/loss", "--name", "al*"], ["a2", "a1"]),
        (["outputs/beta/old"], ["old"]),
        (["run.root=outputs/beta"], ["b1", "old"]),
    ],
)
def test_runs_are_filtered_and_sorted(
    words: list[str], found: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(capsys, *words) == found


def test_the_table_shows_the_folders_whole(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["runs", "--name", "alpha"]) == 0
    head, first, second, count = capsys.readouterr().out.splitlines()
    assert head.split() == ["state", "step", "loss", "tok/s", "strategy", "age", "size", "tags", "run"]
    assert first.endswith("best,paper  outputs/alpha/a1") and " 1 h " in first
    assert second.startswith("failed ") and " 9 d " in second
    assert count.startswith("2 of 4 runs, ")


def test_a_key_that_is_asked_for_is_a_column(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["runs", "--sort", "lr", "--where", "max_steps=12"]) == 0
    head, first, second, _ = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["optimizer.lr", "trainer.max_steps", "run"]
    assert first.split()[-3:] == ["0.001", "12", "outputs/alpha/a1"] and second.split()[-3:-1] == ["0.003", "12"]
    by_name = {Path(row["folder"]).name: row for row in rows(capsys, "--sort", "lr")}
    assert by_name["a1"]["optimizer.lr"] == 1e-3 and by_name["b1"]["optimizer.lr"] == 3e-3


def test_deleting_is_shown_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "--delete", "--state", "failed"]) == 0
    assert "nothing was deleted yet; add --yes" in capsys.readouterr().out
    assert names(capsys) == ["b1", "a1", "a2", "old"]
    assert cli.main(["runs", "--delete", "--state", "failed", "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "deleted: 1 run"
    assert names(capsys) == ["b1", "a1", "old"]
    assert sorted(path.name for path in (root / "alpha").iterdir()) == ["a1"]


def test_a_living_run_and_a_link_are_not_deleted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "linked").symlink_to((root / "alpha" / "a1").absolute())
    with RunLock(root / "beta" / "b1" / ".lock"):
        assert cli.main(["runs", "--delete", "--yes", "outputs/beta/b1", "outputs/linked", "outputs/alpha/a2"]) == 1
    shown = capsys.readouterr()
    assert "another launch is preparing in this folder" in shown.err and "is a symbolic link" in shown.err
    assert shown.out.splitlines()[-1] == "deleted: 1 run"
    assert (root / "beta" / "b1" / "config.yaml").is_file() and (root / "alpha" / "a1" / "config.yaml").is_file()
    assert not (root / "alpha" / "a2").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--delete"], "--delete: name the runs"),
        (["--yes"], "--yes: only works with --delete"),
        (["outputs"], "outputs: not a run's folder; mgpu-pipe runs run.root=outputs lists those below it"),
        (["--older", "7"], "7: use an age such as 30m"),
        (["--state", "finishd"], "invalid choice: 'finishd'"),
        (["--sort", "speeed"], "speeed: no column, and no key of these runs; did you mean speed?"),
        (
            ["--where", "optimizer.lrr=1"],
            "optimizer.lrr: no column, and no key of these runs; did you mean optimizer.lr?",
        ),
        (["--where", "lr"], "--where lr: give a key and its value"),
        (["--where", "name=x"], "name: several keys end so; give one of model.name, run.name, strategy.name"),
        (["outputs/alpha/a1", "run.root=outputs"], "leave it out, or the folders"),
        (["--delete", "--json", "--name", "x"], "leave out one of them"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", *words]) == 2
    assert said in capsys.readouterr().err
    assert len(list(root.glob("*/*/config.yaml"))) == 4


def test_where_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", f"run.root={tmp_path}"]) == 0
    assert capsys.readouterr().out.startswith("0 runs, ")


def test_tags_are_short_words(capsys: pytest.CaptureFixture[str]) -> None:
    import mgpu_pipe

    for wrong in ("two words", "", "a" * 33, "x,y"):
        with pytest.raises(ConfigError) as caught:
            mgpu_pipe.check([f"run.tags=['{wrong}']"])
        assert caught.value.key == "run.tags"
    assert mgpu_pipe.check(["run.tags=[best,v1.2]"]).config.run.tags == ["best", "v1.2"]


def test_it_needs_no_torch(root: Path) -> None:
    program = "import sys; from mgpu_pipe.cli.main import main; main(['runs']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.slow
def test_a_real_run_says_what_it_is(tmp_path: Path, cache: Path) -> None:
    words = ["model=llama_tiny", "data=synthetic", "data.seq_len=32", "data.global_batch_size=8", "trainer.max_steps=3"]
    folder = run_folder(mgpu(cache, tmp_path, *words, "run.tags=[mine]", "run.name=real", "trainer.accelerator=cpu"))
    (folder / "config.yaml").write_text("x")  # it is not asked
    out = subprocess.run(
        [sys.executable, "-m", "mgpu_pipe", "runs", "--json"],
        cwd=tmp_path,
        env=environment(cache),
        capture_output=True,
        text=True,
        check=True,
    )
    (row,) = json.loads(out.stdout)
    assert (row["name"], row["state"], row["step"], row["strategy"]) == ("real", "finished", 3, "single")
    assert row["tags"] == ["mine"] and row["loss"] == column(folder, "train/loss")[3]
    assert 0 < time.time() - row["begun"] < 600
