"""``trainer.profile=steps`` of a whole run. Oracle: the steps that were asked for, and what a step does."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from mgpu_pipe.training.profiling.rank_times import StepTimes
from tests.support.command import mgpu, run_folder

SMALL = ["model=llama_tiny", "data.seq_len=32", "data.global_batch_size=4", "checkpoint.save_last=false"]


def test_a_trace_of_each_rank_names_what_it_does(cache: Path, tmp_path: Path) -> None:
    words = [*SMALL, "strategy=fsdp", "trainer.devices=2", "trainer.max_steps=3"]
    folder = run_folder(mgpu(cache, tmp_path, *words, "trainer.profile=steps", "trainer.profile_steps=[2,3]"))
    for rank in range(2):
        with gzip.open(folder / "profile" / f"rank-{rank}.json.gz", "rt") as file:
            names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
        looked_for = ("step 1", "step 2", "step 3", "forward and backward", "optimizer")
        counts = {name: names.count(name) for name in looked_for}
        assert counts == {"step 1": 0, "step 2": 1, "step 3": 1, "forward and backward": 2, "optimizer": 2}
        assert {"data", "all-gather dp_shard", "wait for reduce-scatter dp_shard"} <= set(names)
        assert "callback StepRecorder.on_train_batch_end" in names
    times = StepTimes.read(json.loads((folder / "summary.json").read_text())["step_times"])
    assert times is not None and (times.first, times.last, len(times.ranks)) == (2, 3, 2)
    page = (folder / "report.html").read_text()
    assert "Where the time of a step goes" in page and page.count("<rect ") == 2 * 6
