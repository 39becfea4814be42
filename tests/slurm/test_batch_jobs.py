"""``generate --input`` as a job of a real cluster. Oracle: the answers of one process of this machine."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.batch.settings import JobSettings, ScoreSettings
from mgpu_pipe.launch.batch_job import _check_progress
from tests.inference.support import write_run, write_texts
from tests.support.command import launched, mgpu
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slow
WORDS = ("--max-new-tokens", "12", "--batch-size", "2", "--seed", "5")
SLURM = ("launch=slurm", "trainer.devices=1", "trainer.accelerator=cpu", "launch.threads_per_worker=1")


def submit(cache: Path, place: Path, output: str, *words: str, prompts: str = "prompts.jsonl") -> str:
    """Submit the job that writes ``output``; returns its ID."""
    given = ["generate", "run", "--input", prompts, "--output", output, *WORDS, *SLURM, *words]
    match = re.search(r"^job: (\d+)$", mgpu(cache, place, *given), re.MULTILINE)
    assert match
    return match[1]


@pytest.fixture(scope="module")
def place(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, prompts, and the answers to them."""
    folder = tmp_path_factory.mktemp("jobs")
    write_run(folder / "run", "llama", write_texts(folder / "texts", 12), folder / "cache")
    rows = [{"prompt": f"the quick {at} dog"} for at in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mgpu(cache, folder, "generate", "run", "--input", "prompts.jsonl", "--output", "whole.jsonl", *WORDS)
    return folder


def test_two_nodes_answer_what_a_process_answers_or_end_with_a_line(cluster: Cluster, cache: Path, place: Path) -> None:
    """One job answers; another cannot, and others are refused before they are submitted."""
    (place / "texts.jsonl").write_text('{"text": "the"}\n')
    good = submit(cache, place, "nodes.jsonl", "trainer.num_nodes=2")
    bad = submit(cache, place, "bad.jsonl", "trainer.num_nodes=2", prompts="texts.jsonl")
    words = ["generate", "run", "--input", "prompts.jsonl", *WORDS, *SLURM]
    refused = mgpu(cache, place, *words, "--output", "whole.jsonl", code=2)
    assert "whole.jsonl: exists already" in refused
    refused = mgpu(cache, place, *words, "--output", "no.jsonl", "launch.partition=nowhere", code=2)
    assert "launch.partition=nowhere: SLURM answers: " in refused
    assert not list(place.glob("no.jsonl*"))

    assert cluster.ended(bad, place / "bad.jsonl.slurm") == "FAILED"
    assert "Restarts=0" in cluster.ask("scontrol", "show", "job", bad)
    log = cluster.log(place / "bad.jsonl.slurm")
    assert "texts.jsonl:1: has neither prompt nor messages" in log
    assert cluster.ended(good, place / "nodes.jsonl.slurm") == "COMPLETED"
    assert (place / "nodes.jsonl").read_bytes() == (place / "whole.jsonl").read_bytes()
    assert "24 answers in " in cluster.log(place / "nodes.jsonl.slurm")


def test_a_job_is_followed_queued_again_and_cancelled_by_its_folder(cluster: Cluster, cache: Path, place: Path) -> None:
    """Its folder has a space; afterwards the same command may submit again. Queued again in the middle, that job
    resumes; finished, it stays finished."""
    (place / "my answers").mkdir()
    output = "my answers/some.jsonl"
    folder = f"{output}.slurm"
    job = submit(cache, place, output, "launch.setup=[echo begun,sleep 600]")
    follower = launched(cache, place, "jobs", "follow", folder)
    assert follower.first_lines(1) == ["begun\n"]
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=60)
    assert f"queued again: {job}" in mgpu(cache, place, "jobs", "requeue", folder)
    cluster.until(lambda: "Restarts=1" in cluster.ask("scontrol", "show", "job", job), "the second start", job)
    refused = mgpu(cache, place, "generate", "run", "--input", "prompts.jsonl", "--output", output, *SLURM, code=2)
    assert f"running as job {job}; cancel it first" in refused
    assert f"cancelled: {job}" in mgpu(cache, place, "jobs", "cancel", folder)
    assert cluster.ended(job, place / folder) == "CANCELLED"
    job = submit(cache, place, output)
    parts = place / f"{output}.unfinished"
    cluster.until(lambda: any(part.stat().st_size for part in parts.glob("rank-*")), "an answer", job)
    cluster.ask("scontrol", "requeue", job)
    assert cluster.ended(job, place / folder) == "COMPLETED"
    assert (place / output).read_bytes() == (place / "whole.jsonl").read_bytes() and not parts.exists()
    assert "answers are there already" in cluster.log(place / folder)
    cluster.ask("scontrol", "requeue", job)  # as SLURM does where a node is lost just then
    cluster.until(lambda: "Restarts=2" in cluster.ask("scontrol", "show", "job", job), "a third start", job)
    assert cluster.ended(job, place / folder) == "COMPLETED"


def test_a_job_may_be_submitted_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"model": tmp_path / "run", "input": tmp_path / "pairs.jsonl", "output": tmp_path / "scores.jsonl"}
    more = {"batch_size": 1, "average": False, "frozen_weights": Path("base"), "device": "cpu", "rows": 1}
    settings = ScoreSettings(**keys, **more)  # type: ignore[arg-type]
    assert JobSettings.from_json(settings.to_json()) == replace(settings, frozen_weights=tmp_path / "base")


def test_a_job_that_computes_no_further_row_is_not_queued_for_ever(tmp_path: Path) -> None:
    for rows in (0, 0, 3, 3, 3):
        _check_progress(tmp_path, rows, 2)
    with pytest.raises(BadInputError, match="max_restarts_without_progress=2: the job ended 3 times"):
        _check_progress(tmp_path, 3, 2)
    _check_progress(tmp_path, 3, 2)  # the user has submitted it again
