"""``mgpu-pipe report``: which runs, which file. Oracle: the files that are there afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from mgpu_pipe.cli.verbs.report import report
from mgpu_pipe.errors import EXIT_BAD_INPUT, BadInputError
from tests.report.fake_runs import MakeRun


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_arguments_the_run_begun_last_is_reported(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    newer, older = make_run(steps=60, name="a", created=5), make_run(steps=60, name="b")
    os.utime(older.metrics)  # it was gone on in since
    assert report([]) == 0
    assert newer.report.exists()
    assert not older.report.exists()
    captured = capsys.readouterr()
    assert captured.out == f"report: {newer.report.relative_to(Path.cwd())}\n"
    assert captured.err == f"newest run: {newer.root.relative_to(Path.cwd())}\n"


def test_the_place_of_all_runs_is_said_as_for_training(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(steps=60)
    Path("outputs").rename("else where")
    moved = Path("else where") / run.root.relative_to(tmp_path / "outputs")
    for word in ("run.root=else where", "run.root='else where'"):
        (moved / "report.html").unlink(missing_ok=True)
        assert report([word]) == 0
        assert (moved / "report.html").exists()
    for words, told in (
        (["run.root="], r"run.root=: give a folder"),
        ([str(moved), "run.root=x"], "leave out one of them"),
        (["run.root=nowhere"], "nowhere: holds no run; .* run.root=<folder>"),
    ):
        with pytest.raises(BadInputError, match=told):
            report(words)


def test_several_runs_give_a_comparison_and_a_table(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(steps=60, name=name, lr=lr) for name, lr in (("a", 1e-3), ("b", 2e-3))]
    assert report([str(run.root) for run in runs]) == 0
    assert "Comparison of 2 runs" in Path("outputs/comparison.html").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == "report: outputs/comparison.html"
    assert report([*(str(run.root) for run in runs), "--out", "here.html"]) == 0
    assert Path("here.html").read_text().startswith("<!DOCTYPE html>")


def test_the_same_run_given_twice_is_one_run(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    assert report([str(run.root), str(run.root)]) == 0
    assert run.report.exists()
    assert not Path("outputs/comparison.html").exists()


def test_what_is_no_run_is_refused_with_what_to_give_instead(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    step = run.checkpoints / "step-00000060"
    (step / "config.yaml").write_text("")
    Path("empty").mkdir()
    for argument, told in (
        ("nowhere", "no such folder"),
        ("empty", "has no config.yaml"),
        (str(step), f"give its run's folder, {run.root}"),
        ("outputs", "it holds 1; give one of them, such as outputs/quickstart/"),
        (str(run.config), "no such folder"),
    ):
        with pytest.raises(BadInputError) as caught:
            report([argument])
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == EXIT_BAD_INPUT
    assert not run.report.exists()


def test_a_verification_is_not_the_newest_run(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    verification = Path("outputs/verify/later")
    verification.mkdir(parents=True)
    for name in ("config.yaml", "configured.yaml"):
        (verification / name).write_text("")
    assert report([]) == 0
    assert run.report.exists()


def test_no_run_yet_and_a_wrong_flag_are_one_line() -> None:
    for arguments, told in (([], "holds no run;"), (["--ot", "x"], "--ot"), (["--out"], "expected one argument")):
        with pytest.raises(BadInputError, match=told):
            report(arguments)


def test_a_report_needs_no_torch(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    program = (
        "import sys; from mgpu_pipe.cli.verbs.report import report\n"
        "assert not {'rich', 'jinja2'} & set(sys.modules)\n"
        "report([sys.argv[1]])\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'transformers'} & set(sys.modules)\n"
    )
    import mgpu_pipe

    environment = {**os.environ, "PYTHONPATH": str(Path(mgpu_pipe.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program, str(run.root)], check=True, env=environment)
    assert run.report.exists()


def test_watching_serves_the_report_until_it_is_interrupted(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    words = [sys.executable, "-m", "mgpu_pipe", "report", str(run.root), "--watch", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        address = line.split()[1]
        assert line == f"report: {address} (Ctrl-C ends it)\n"
        with urllib.request.urlopen(address) as answer:
            assert b"quickstart" in answer.read()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    assert not run.report.exists()


def test_what_watching_cannot_do_is_one_line(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, told in (
            (["--watch", "--port", port], f"--port {port}: cannot serve there .Address already in use.; give another"),
            (["--watch", "--port", "70000"], "--port 70000: cannot serve there"),
            (["--watch", "--out", "x.html"], "--out x.html: --watch writes no file"),
            (["--port", "0"], "--port 0: only works with --watch"),
        ):
            with pytest.raises(BadInputError, match=told) as caught:
                report([str(run.root), *words])
            assert "\n" not in str(caught.value)
    with pytest.raises(BadInputError, match="no such folder"):
        report(["nowhere", "--watch"])
