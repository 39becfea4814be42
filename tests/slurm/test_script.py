"""The batch script and what is refused before SLURM sees it; no cluster needed. Oracle: bash and shlex read it."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import mgpu_pipe
from mgpu_pipe.cli.verbs.submit import submit
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, RunFolderError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch import node as node_check
from mgpu_pipe.launch.slurm import slurm_job
from mgpu_pipe.launch.slurm import submit_job as slurm
from mgpu_pipe.launch.slurm.script import batch_script, keep_job
from mgpu_pipe.launch.slurm.slurm_keys import SlurmConfig
from mgpu_pipe.runs.resume_command import CommandLine, hydra_quoted
from tests.support.command import column, environment
from tests.support.program import ForkedProgram
from tests.support.worlds import free_port

HARD = '/shared/it\'s 50% "of" $HOME'


def configured(*words: str) -> RunConfig:
    return compose(["launch=slurm", "trainer.max_steps=1", "trainer.devices=2", "trainer.num_nodes=2", *words])[0]


def script(*words: str, folder: str = HARD) -> str:
    config = configured(*words)
    launch = slurm.slurm_keys(config.launch)
    return batch_script(launch, config.trainer, Path(folder), "name", ["mgpu-pipe", "submit", "a b"])


def options(text: str) -> dict[str, str]:
    """The #SBATCH lines, as a shell would read them."""
    words = [shlex.split(line.removeprefix("#SBATCH ")) for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert all(len(each) == 1 for each in words), words
    return {name: value for name, _, value in (each[0].removeprefix("--").partition("=") for each in words)}


def step(text: str) -> list[str]:
    return shlex.split(next(line for line in text.splitlines() if line.startswith("srun ")))


def test_what_is_asked_for_stands_in_the_script() -> None:
    asked = options(
        script(
            "launch.partition=gpu",
            "launch.account=us",
            "launch.qos=long",
            "launch.time=2-00:00:00",
            "launch.warning_s=300",
            "launch.gpus=2",
            "launch.gpu_type=h100",
            "launch.cpus=8",
            "launch.memory=64G",
            "launch.constraint='a&b'",
            "launch.nodelist='n[1-2]'",
            "launch.exclude=n3",
            "launch.exclusive=true",
            "launch.reservation=tuesday",
            "launch.sbatch=['--mail-type=END']",
        )
    )
    assert asked == {
        "job-name": "name",
        "output": HARD.replace("%", "%%") + "/logs/slurm-%j.log",
        "open-mode": "append",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "16",
        "gpus-per-node": "h100:2",
        "mem": "64G",
        "time": "2-00:00:00",
        "signal": "USR1@300",
        "partition": "gpu",
        "account": "us",
        "qos": "long",
        "constraint": "a&b",
        "nodelist": "n[1-2]",
        "exclude": "n3",
        "reservation": "tuesday",
        "comment": HARD,
        "requeue": "",
        "exclusive": "",
        "mail-type": "END",
    }


def test_slurm_reads_the_time_as_the_key_means_it() -> None:
    """SLURM takes 12:30 for twelve minutes and thirty seconds."""
    times = {"12:30": "0-12:30:00", "1-02:03": "1-02:03:00", "90:00:05": "3-18:00:05"}
    assert {time: options(script(f"launch.time='{time}'"))["time"] for time in times} == times


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for SLURM's commands: sbatch gives the job 12 and keeps its variables, scancel what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f"#!/bin/bash\nenv > {folder}/variables\necho 12\n")
    (folder / "scancel").write_text(f'#!/bin/bash\necho "$*" > {folder}/cancelled\n')
    for tool in folder.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def test_no_variable_says_otherwise_than_the_script(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PARTITION", "TIMELIMIT", "MEM_PER_NODE", "ARRAY_INX", "JOB_NAME", "ACCOUNT"):
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    words = ["launch.partition=low", "launch.time=1:00:00", "launch.memory=1G"]
    slurm.submit(configured(f"run.root={tmp_path}/runs", *words), CommandLine([], []))
    left = [line for line in (tools / "variables").read_text().splitlines() if line.startswith("SBATCH_")]
    assert left == ["SBATCH_ACCOUNT=1"], "which the script does not name"


def test_a_job_whose_number_cannot_be_kept_is_cancelled(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, job: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(slurm, "keep_job", full)
    with pytest.raises(BadInputError, match=r"cannot be written \(No space left on device\), so that job 12 was canc"):
        slurm.submit(configured(f"run.root={tmp_path}/runs"), CommandLine([], []))
    assert (tools / "cancelled").read_text() == "12\n" and not list((tmp_path / "runs").glob("*/*"))


def test_a_member_of_an_array_is_asked_about_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert slurm_job.this_job() == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm_job.this_job() == "12_3"


def test_a_task_is_a_node_or_a_worker() -> None:
    node, worker = (script(f"launch.tasks={tasks}", "launch.cpus=3") for tasks in ("node", "gpu"))
    assert [options(text)["ntasks-per-node"] for text in (node, worker)] == ["1", "2"]
    assert [options(text)["cpus-per-task"] for text in (node, worker)] == ["6", "3"]
    assert "--cpus-per-task=6" in step(node) and "--cpus-per-task=3" in step(worker)


def test_no_gpus_are_asked_for_on_cpu_and_as_many_as_workers_on_cuda() -> None:
    assert "gpus-per-node" not in options(script("trainer.accelerator=cpu"))
    assert options(script("trainer.accelerator=cuda"))["gpus-per-node"] == "2"


def test_who_does_not_say_where_it_computes_is_told_that_no_gpus_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, told in (((), True), (("trainer.accelerator=cpu",), False), (("launch.gpus=2",), False)):
        slurm.hand_over(configured(*words), CommandLine([], []), dry_run=True)
        assert ("the job asks for no GPUs" in capsys.readouterr().err) == told, words


def test_set_up_lines_and_the_folder_reach_the_shell_as_they_are(tmp_path: Path) -> None:
    """Run by bash, with a stand-in for srun that shows its words."""
    folder = tmp_path / HARD.strip("/")
    folder.mkdir(parents=True)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\necho "$WHERE"\nexit 3\n')
    (tools / "srun").chmod(0o755)
    setup = f"export WHERE={shlex.quote(HARD)}"
    config = configured()
    assert isinstance(config.launch, SlurmConfig)
    config.launch.setup = [f"export PATH={shlex.quote(str(tools))}:$PATH", setup]
    slurm.write_script(slurm.slurm_keys(config.launch), config.trainer, folder, "name", ["mgpu-pipe", "submit"])
    done = subprocess.run([folder / slurm.SCRIPT], capture_output=True, text=True)
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    task = [*python_module("mgpu_pipe.launch.slurm.slurm_job"), str(folder)]
    assert lines[-len(task) - 1 :] == [*task, HARD]


def test_a_set_up_line_that_bash_cannot_read_is_refused(tmp_path: Path) -> None:
    config = configured("launch.setup=['source \"/a b']")
    with pytest.raises(ConfigError, match=r'launch.setup=source "/a b: bash cannot read it .*; correct its quotes'):
        slurm.write_script(slurm.slurm_keys(config.launch), config.trainer, tmp_path, "name", [])


def test_containers() -> None:
    apptainer = step(script("launch.container=a.sif", "launch.container_mounts=['/data:/data']"))
    at = apptainer.index("apptainer")
    assert apptainer[at : at + 3] == ["apptainer", "exec", "--nv"] and "--bind=/data:/data" in apptainer
    assert f"--bind={HARD}:{HARD}" in apptainer
    assert apptainer[apptainer.index("a.sif") + 1] == "python3"
    pyxis = step(script("launch.container=nvcr.io/x", "launch.container_by=pyxis"))
    assert "--container-image=nvcr.io/x" in pyxis and "apptainer" not in pyxis


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["launch.partition='a\nb'"], "launch.partition", "one line"),
        (["launch.setup=['a\nb']"], "launch.setup", "one line"),
        (["launch.sbatch=['x']"], "launch.sbatch", "write an option"),
        (["launch.sbatch=['--nodes=2']"], "launch.sbatch", "use trainer.num_nodes"),
        (["launch.sbatch=['-t10']"], "launch.sbatch", "use launch.time"),
        (["launch.sbatch=['--output=log']"], "launch.sbatch", "leave it out"),
        (["launch.time=12h"], "launch.time", "hours:minutes"),
        (["launch.time=0:01:00"], "launch.time", "more than 120 s"),
        (["launch.gpus=-1"], "launch.gpus", "at least 0"),
        (["launch.array_limit=0"], "launch.array_limit", "at least 1"),
    ],
)
def test_bad_values_are_refused_by_their_key(words: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mgpu_pipe.check(["launch=slurm", "model=llama_tiny", "trainer.max_steps=1", *words])
    assert caught.value.key == key and said in str(caught.value) and "\n" not in str(caught.value)


def test_train_does_not_start_a_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch.type=slurm: .*; use mgpu-pipe submit, or launch=local"):
        mgpu_pipe.train(["launch=slurm", "model=llama_tiny", "trainer.max_steps=1", f"run.root={tmp_path}/runs"])
    assert not (tmp_path / "runs").exists()


def test_submit_wants_a_scheduler_and_one_run() -> None:
    words = ["model=llama_tiny", "trainer.max_steps=1"]
    with pytest.raises(ConfigError, match=r"launch.type=local: .*; use launch=slurm or launch=torchrun"):
        submit(words)
    with pytest.raises(BadInputError, match=r"submits one run; for a sweep use mgpu-pipe -m hydra/launcher=slurm"):
        submit([*words, "launch=slurm", "-m", "seed=1,2"])


def test_without_sbatch_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = configured(f"run.root={tmp_path}/runs")
    with pytest.raises(ConfigError, match=r"launch.type=slurm: this machine has no sbatch"):
        slurm.submit(config, CommandLine([], []))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_slurm_answers_cancels_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """With stand-ins: sbatch, to which Ctrl-C comes as well, gives a number; scancel is asked to end that job."""
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\nkill -{number.name[3:]} $PPID\nsleep 0.3\necho 12\n")
    (tmp_path / "scancel").write_text(f'#!/bin/bash\necho "$*" > {tmp_path}/cancelled\n')
    for tool in ("sbatch", "scancel"):
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        slurm.submit(configured(f"run.root={tmp_path}/runs"), CommandLine([], []))
    assert (tmp_path / "cancelled").read_text() == "12\n" and not list((tmp_path / "runs").glob("*/*"))
    assert signal.getsignal(number) is before


def test_workers_must_be_counted_before_the_job_has_nodes() -> None:
    def devices(*words: str) -> object:
        return slurm.fit_to_nodes(compose(["launch=slurm", "trainer.max_steps=1", *words])[0]).trainer.devices

    assert devices("strategy=ddp", "trainer.devices=3") == 3
    assert devices("strategy=ddp", "launch.gpus=4") == 4
    assert devices("strategy=single", "launch.gpus=4") == 1
    assert devices("strategy=ddp", "trainer.accelerator=cpu") == 1
    with pytest.raises(ConfigError, match=r"trainer.devices=auto: this machine does not know"):
        devices("strategy=ddp")


def test_composing_names_an_unknown_key() -> None:
    with pytest.raises(ConfigErrors, match=r"launch.partitoin=x: no such key; did you mean launch.partition\?"):
        compose(["launch=slurm", "launch.partitoin=x"])


@pytest.mark.slow
def test_the_line_for_other_schedulers_trains_by_the_environment_alone(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes that only RANK, WORLD_SIZE, MASTER_ADDR and their like tell of one another."""
    folder = tmp_path / "it's here"
    words = ["model=llama_tiny", "data=synthetic", "data.synthetic.num_documents=50", "data.seq_len=32", "logger=none"]
    words += ["data.global_batch_size=4", "trainer.max_steps=2", "strategy=ddp", "trainer.accelerator=cpu"]
    submit([*words, "launch=torchrun", "trainer.devices=2", f"run.dir={hydra_quoted(str(folder))}"])
    out = capsys.readouterr().out.splitlines()
    torchrun, plain = shlex.split(out[1]), shlex.split(out[-1])
    assert torchrun[1:3] == ["--nnodes=1", "--nproc_per_node=2"] and plain[:3] == ["python", "-m", "mgpu_pipe"]
    assert torchrun[torchrun.index("mgpu_pipe") + 1 :] == plain[3:] and "launch=torchrun" not in plain
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        ForkedProgram(plain[3:], tmp_path, {**environment(cache), **world, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    said = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert column(folder, "train/loss").keys() == {1, 2}


def test_the_line_for_other_schedulers_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"run.dir=null: .*; give a folder that all nodes see"):
        submit(["model=llama_tiny", "trainer.max_steps=1", "launch=torchrun"])


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mgpu_pipe.launch.slurm.slurm_job", str(tmp_path / "not shared")]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "SLURMD_NODENAME": "n7"})
    assert done.returncode == 2
    assert "node n7 does not see the run's folder; set run.root to a folder" in done.stderr


def test_a_node_is_judged_by_its_gpus_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("trainer.accelerator=cuda")
    monkeypatch.setattr(node_check, "usable_gpus", lambda: 2)
    assert node_check.node_faults(config.trainer, config.strategy, tmp_path, "n0") == []
    monkeypatch.setattr(node_check, "usable_gpus", lambda: 1)
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(1 << 30))
    gpus, memory, disk = node_check.node_faults(config.trainer, config.strategy, tmp_path / "gone", "n0")
    monkeypatch.setattr(node_check, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(RunFolderError, match="MiB free; make room, and queue it again"):  # no node's fault
        node_check.node_faults(config.trainer, config.strategy, tmp_path, "n0")
    assert gpus == "1 of 2 GPUs can be used" and "MiB of memory are free" in memory and "gone cannot be written" in disk


@pytest.mark.parametrize(
    ("states", "refused"),
    [("RUNNING", True), ("SIGNALING", True), ("REQUEUE_HOLD", True), ("FAILED\nCANCELLED", False), ("", False)],
)
def test_a_job_that_has_not_ended_keeps_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: str, refused: bool
) -> None:
    """With a stand-in for squeue. In a preemption's grace time a job is SIGNALING."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/bash\necho '{states}'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    keep_job(tmp_path, "12")
    with pytest.raises(BadInputError, match="job 12; cancel it first") if refused else nullcontext():
        slurm.refuse_queued(tmp_path)


@pytest.mark.parametrize("refused", [False, True])
def test_the_script_queues_the_job_again_without_bad_nodes(tmp_path: Path, refused: bool) -> None:
    """Run by bash, with stand-ins for srun and scontrol; a requeue that SLURM refuses is said with what to do."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text("#!/bin/bash\nexit 75\n")
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/asked\nexit {int(refused)}\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tmp_path / "bad_nodes.txt").write_text("n1 no memory\nn2 no disk\n")
    exclude = f"n7,$(touch {tmp_path}/ran)`touch {tmp_path}/ran`\";'x"
    config = configured("launch.exclude=n7")
    config.launch.exclude = exclude  # type: ignore[attr-defined]
    slurm.write_script(slurm.slurm_keys(config.launch), config.trainer, tmp_path, "name", [])
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    done = subprocess.run([tmp_path / slurm.SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 75
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["requeue 12", *([] if refused else [f"update JobId=12 ExcNodeList=n1,n2,{exclude}"])]
    assert not (tmp_path / "ran").exists()
    assert ("error: SLURM does not requeue this job; resume with: sbatch" in done.stderr) == refused
