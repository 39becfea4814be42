"""``import mgpu_pipe``. Oracle: the command line, given the same words."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import mgpu_pipe
from mgpu_pipe.api import Run
from mgpu_pipe.cli import main as cli
from mgpu_pipe.errors import BadInputError, CheckpointError, ConfigError, ConfigErrors, RunFolderError, WorkerError
from tests.support.command import column, environment, mgpu, run_folder, wait_for_step

TINY = [
    *("model=llama_tiny", "data=text_files", "data.seq_len=32", "data.global_batch_size=8"),
    *("data.validation_max_samples=4", "trainer.accelerator=cpu", "launch.threads_per_worker=1"),
]
LIGHT = """
import sys
import mgpu_pipe
assert not {"torch", "hydra", "numpy", "mgpu_pipe.api"} & set(sys.modules), "import"
assert set(mgpu_pipe.__all__) <= set(dir(mgpu_pipe))
print(mgpu_pipe.check(["model=llama_tiny", "trainer.max_steps=3"]).config.model.type)
assert "torch" not in sys.modules, "check"
"""
UNGUARDED = """
import operator
print("begun")
from mgpu_pipe.data.ordered_work import work_in_order
print(list(work_in_order([[1], [2]], 2, operator.itemgetter, (0,), ahead=1, what="no worker")))
"""


@pytest.fixture
def work(tmp_path: Path, cache: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and the words of a tiny run in ``TINY`` on the session's corpus."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment(cache).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "corpus").symlink_to(corpus)
    return tmp_path


def words(*more: str) -> list[str]:
    return [*TINY, "data.paths=[corpus/*.txt]", *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path, corpus: Path) -> Path:
    """A run of the command line, four steps long, with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus").symlink_to(corpus)
    limits = ["trainer.max_steps=4", "checkpoint.every_n_steps=2", "run.dir=run"]
    return run_folder(mgpu(cache, folder, *words(*limits)))


def test_importing_and_checking_need_no_torch(tmp_path: Path, cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=tmp_path, env=environment(cache), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "llama\n"), done.stderr


@pytest.mark.exhaustive
def test_a_script_under_torchrun_trains_as_one_run_that_is_finished_for_every_rank(work: Path) -> None:
    joined = words("strategy=ddp", "trainer.devices=2", "trainer.max_steps=2")
    Path("script.py").write_text(
        f"import os, pathlib, mgpu_pipe\nrun = mgpu_pipe.train({joined})\n"
        "pathlib.Path('end-' + os.environ['RANK']).write_text(f'{run.status} {run.step} {run.folder}')\n"
    )
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (Path(f"end-{rank}").read_text() for rank in (0, 1))
    assert first == second and first.startswith("finished 2 ")


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = mgpu_pipe.trian


def test_one_error_is_raised_as_itself_with_its_fields() -> None:
    for call in (mgpu_pipe.compose, mgpu_pipe.check, mgpu_pipe.train):
        with pytest.raises(ConfigError) as caught:
            call(["trainer.devcies=8"])
        error = caught.value
        assert (error.key, error.value, error.fix) == ("trainer.devcies", "8", "did you mean trainer.devices?")


def test_several_errors_are_raised_together(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["trainer.devcies=8", "optimizer.lr=fast", "strategy=dpp"]
    with pytest.raises(ConfigErrors) as caught:
        mgpu_pipe.check(wrong)
    assert cli.main(["check", *wrong]) == 2
    assert [f"error: {error}" for error in caught.value.errors] == capsys.readouterr().err.splitlines()


def test_no_message_holds_a_value_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_TOKEN", "hunter2-and-more")
    with pytest.raises(ConfigError) as caught:
        mgpu_pipe.check(["trainer.max_steps=${oc.env:OWN_TOKEN}"])
    assert caught.value.key == "trainer.max_steps" and "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("model=llama_tiny seed=1", "give a list of overrides"),
        (["-m", "seed=1,2"], "call the function once for each"),
        (["--help"], "leave it out"),
        (["--cfg", "job"], "leave it out"),
        (["--config-dir", "nowhere"], "no such folder"),
    ],
)
def test_words_that_are_no_run_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        mgpu_pipe.compose(given)


def test_check_says_what_the_command_line_does(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["strategy=fsdp", "trainer.devices=4", "model=llama_tiny", "trainer.max_steps=3"]
    plan = mgpu_pipe.check(given)
    assert cli.main(["check", *given]) == 0
    shown = capsys.readouterr()
    assert " ".join(str(plan).split()) == " ".join(f"{shown.err}{shown.out}".split())
    assert plan.config.strategy.name == "fsdp" and dict(plan.rows)["batch"].startswith("32 samples = 4 x")


def test_the_callers_own_hydra_goes_on(tmp_path: Path) -> None:
    import hydra

    (tmp_path / "mine.yaml").write_text("a: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert mgpu_pipe.compose(["seed=5"]).seed == 5
        assert hydra.compose("mine").a == 1


@pytest.mark.slow
def test_train_is_the_command_lines_run(
    work: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where standard error is no file, as in a notebook: progress is shown there. The environment is as it was."""
    shown, before = io.StringIO(), dict(os.environ)
    monkeypatch.setattr(sys, "stderr", shown)
    run = mgpu_pipe.train(words("trainer.max_steps=4", "checkpoint.every_n_steps=2"))
    assert dict(os.environ) == before
    assert "step 4/4 (100%)" in shown.getvalue()
    assert f"run: {run.folder}" in capsys.readouterr().out
    assert run.status == "finished" and run.folder.is_relative_to(work / "outputs")
    assert dict(zip(run.metrics["step"].tolist(), run.metrics["train/loss"].tolist(), strict=True)) == column(
        trained, "train/loss"
    )
    differences = mgpu_pipe.compare(run, trained)
    assert differences.apart == [[], []] and [row["steps"] for row in differences.table] == [4, 4]


@pytest.mark.slow
def test_a_failed_run_raises_what_its_worker_said_and_is_compared(
    work: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["optimizer=sgd", "optimizer.lr=1e30", "trainer.gradient_clip_val=null", "trainer.max_steps=3"]
    with pytest.raises(WorkerError, match=r"is not finite .* \(logs: .*logs\)"):
        mgpu_pipe.train(words(*wrong))
    failed = mgpu_pipe.open_run()
    comparison = mgpu_pipe.compare(str(trained), failed)
    assert [row["status"] for row in comparison.table] == ["finished", "failed"]
    assert comparison.table[0]["train/loss"] == column(trained, "train/loss")[4]
    assert "optimizer.lr=1e30" in comparison.apart[1]
    capsys.readouterr()
    comparison.show()
    shown = capsys.readouterr().out
    assert comparison.report("own.html").is_file()
    assert cli.main(["report", str(trained), str(failed.folder), "--out", "verb.html"]) == 0
    assert capsys.readouterr().out == f"{shown}report: verb.html\n"


def test_train_wants_the_main_thread() -> None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            mgpu_pipe.train(["model=llama_tiny"])
        except BadInputError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_a_script_is_not_run_again_by_its_helpers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "begun\n[1, 2]\n"), done.stderr


def test_a_run_is_opened(trained: Path, cache: Path) -> None:
    run = mgpu_pipe.open_run(trained)
    assert (run.status, run.step, run.error) == ("finished", 4, "") and "finished at step 4" in repr(run)
    assert run.config.model.type == "llama" and run.summary["step"] == 4
    assert [step.step for step in run.checkpoints] == [2, 4] and all(step.whole for step in run.checkpoints)
    assert run.metrics["step"].dtype == np.int64
    losses = column(trained, "val/loss")
    assert run.metrics["val/loss"][-1] == losses[4] and np.isnan(run.metrics["val/loss"][0])
    model = run.model(device="cpu")
    assert model is run.model(device="cpu") and model is not run.model(2, device="cpu")
    text = run.generate("def ", max_new_tokens=5, temperature=0, device="cpu")
    verb = ["generate", str(trained), "--prompt", "def ", "--max-new-tokens", "5", "--temperature", "0"]
    assert mgpu(cache, trained.parent, *verb).rstrip("\n") == f"def {text[0]}"
    assert run.generate("def ", max_new_tokens=5, temperature=0, stop=text[0][1:3]) == [text[0][:1]]
    assert run.generate("def ", max_new_tokens=5, temperature=1.0, min_p=1.0) == text
    with pytest.raises(BadInputError, match="every text holds an empty one"):
        run.generate("def ", stop="")
    assert run.tokenizer().vocab_size == model.config.vocab_size
    assert run.report(trained / "own.html").read_text().startswith("<!DOCTYPE html>")


def test_what_is_no_run_is_refused(trained: Path, work: Path) -> None:
    for wrong in (work, work / "nothing", trained / "checkpoints" / "step-00000004"):
        with pytest.raises(RunFolderError):
            mgpu_pipe.open_run(wrong)
    with pytest.raises(RunFolderError, match="holds no run"):
        mgpu_pipe.open_run()
    with pytest.raises((CheckpointError, BadInputError), match="step-00000003"):
        Run(trained).model(3)
    with pytest.raises(RunFolderError):
        mgpu_pipe.compare(trained, work)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_interrupt_saves_and_the_same_call_goes_on(work: Path) -> None:
    given = words("run.dir=run", "checkpoint.resume=auto", "trainer.max_steps=100000", "logger=none")
    program = (
        f"import mgpu_pipe; run = mgpu_pipe.train({given!r}); print(run.status, run.step, run.checkpoints[-1].step)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    wait_for_step(work / "run", 3, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    status, step, saved = out.splitlines()[-1].split()
    assert process.returncode == 0 and status == "stopped" and step == saved
    further = int(step) + 2
    run = mgpu_pipe.train([*given[:-2], f"trainer.max_steps={further}", "logger=none"])
    assert (run.status, run.step) == ("finished", further)
    assert run.metrics["step"].tolist() == list(range(1, further + 1))
