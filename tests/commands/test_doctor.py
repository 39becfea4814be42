"""``doctor`` as a user runs it. Oracle: a rank and a link that were made slow, and the words that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import mgpu

SMALL = ["model=llama_tiny", "data.seq_len=32", "data.global_batch_size=8"]
SLOW = ["+callbacks.slow._target_=tests.support.slow.Slow", "+callbacks.slow.seconds=0.3", "+callbacks.slow.rank=1"]


SLOW_LINK = ["+callbacks.link._target_=tests.support.slow.SlowLink", "+callbacks.link.ranks=[0,2]"]


@pytest.mark.slow
def test_a_rank_and_a_link_slowed_on_purpose_are_named(cache: Path, tmp_path: Path) -> None:
    said = mgpu(
        cache,
        tmp_path,
        "doctor",
        "strategy=fsdp",
        "trainer.devices=3",
        "data.global_batch_size=6",
        *SMALL[:2],
        *SLOW,
        *SLOW_LINK,
        "+callbacks.link.rate=5e7",
    )
    lines = said.splitlines()
    assert lines[0] == "where the time of a step goes, in ms: llama_tiny, fsdp, mean of steps 3 to 6"
    columns = "rank  step ms  compute  optimizer  data  host  dp_shard: waits  dp_shard: transfer  waits most for"
    assert lines[2].split() == columns.split()
    table = [line.split() for line in lines[3:7]]
    assert [row[0] for row in table] == ["0", "1", "2", "all"]
    assert [row[-1] for row in (table[0], table[2])] == ["1", "1"], "the others wait for rank 1"
    for row in table[:3]:
        step, *spent = map(float, row[1:8])
        assert sum(spent) == pytest.approx(step, abs=4), "the parts are the whole, but for rounding"
    assert max(table[:3], key=lambda row: float(row[5]))[0] == "1", "it sleeps on the host"
    (slowest,) = [line for line in lines if "is the slowest" in line]
    assert slowest.startswith("rank 1 on node ") and "most of that in callback Slow.on_train_batch_end (3" in slowest
    assert any(line.startswith("warning: more than 20%") and line.endswith("help rank 1 first") for line in lines)
    (link,) = [line for line in lines if line.startswith("the link of ranks ")] or [said]
    assert link.startswith("the link of ranks 0 and 2 (node ") and " is slow: " in link
    assert any(line.startswith("attention of the busiest of 3 processes over their mean: 1.") for line in lines)
    at = lines.index("most memory in each phase of a step, in GiB, resident, of the process")
    memory = [line.split() for line in lines[at + 2 : at + 6]]
    assert memory[0] == ["rank", "forward", "backward", "optimizer", "rest"]
    assert [row[0] for row in memory[1:]] == list("012")
    assert all(0.1 < float(value) < 4 for row in memory[1:] for value in row[1:])
    report = Path(lines[-1].removeprefix("picture: "))
    assert report.parents[2] == tmp_path / "outputs" and report.parents[1].name == "doctor"
    page = report.read_text()
    assert page.count("<rect ") == 3 * 6 and "rank 1: host 3" in page and slowest.split(";")[0] in page
    assert page.count("<polyline ") == 1 and "<title>backward</title>" in page
    assert not list(report.parent.glob("checkpoints/*")), "nothing is saved"
    summary = json.loads((report.parent / "summary.json").read_text())
    assert json.loads((report.parent / "doctor.json").read_text()) == summary["step_times"]
    assert "holds no run" in mgpu(cache, tmp_path, "report", code=2), "what was measured is no run to go on with"
    assert summary["checkpoint"] is None and len(summary["step_times"]["ranks"]) == 3


@pytest.mark.slow
def test_a_run_that_is_wrong_is_refused_in_one_line(cache: Path, tmp_path: Path) -> None:
    for words, line in (
        (("strategy=tp", "trainer.devices=3"), "error: strategy.tp=3: it does not divide the 8 attention heads"),
        (
            ("trainer.profile=steps", "trainer.profile_steps=[5,3]"),
            "error: trainer.profile_steps=[5, 3]: give the first",
        ),
    ):
        said = mgpu(cache, tmp_path, "doctor", *SMALL, *words, code=2)
        assert said.startswith(line) and len(said.splitlines()) == 1, said
    said = mgpu(cache, tmp_path, "check", *SMALL, "trainer.max_steps=4", "trainer.profile=steps", code=2)
    assert said == "error: trainer.profile_steps=[3, 5]: trainer.max_steps=4; use steps up to 4\n"
    assert not (tmp_path / "outputs").exists()
