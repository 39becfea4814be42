"""The committed table of waits, communicators, operators and collectives of a step on a GPU, counted again.

A change that moves a number explains itself: ``python -m benchmarks.gpu.cuda_audit`` writes the table anew.
"""

from __future__ import annotations

import json
import subprocess
import sys
from shutil import which
from typing import Any

import pytest
import torch

from benchmarks.gpu.cuda_audit import TABLE, versions
from tests.support.command import REPOSITORY

RECORDED = json.loads(TABLE.read_text())
SAMPLED = ("pp2 x tp2 x cp2, last",)
WATCHED = """
import json
from mgpu_pipe.training.tracing.trace_rank import load_fake_cuda

load_fake_cuda()
import torch
from benchmarks.gpu.device_watch import Events, watching

events = Events()
with watching(events, {}):
    device = torch.device("cuda", 0)
    there = torch.ones(3, device=device)
    events.counts = True
    there * torch.tensor(2.0)
    there.copy_(torch.ones(3).pin_memory(), non_blocking=True)
    quiet = sum(events.waits.values())
    there.sum().item(), bool(there.any()), there.cpu(), there.tolist()
    torch.tensor([1.0], device=device), there[[0, 1]], there[torch.tensor([0, 1])], there[there > 0]
    torch.cuda.synchronize()
    there.copy_(torch.ones(3), non_blocking=True)
    try:
        there + torch.ones(3)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
print(json.dumps([quiet, sorted(key.split(",")[0] for key in events.waits.elements()), refused]))
"""


needs_fake_gpu = pytest.mark.skipif(
    which("g++") is None or torch.version.cuda is not None,
    reason="a fake GPU is compiled by g++ (apt-get install g++), for a torch without CUDA of its own",
)


def python(*arguments: str) -> list[Any]:
    done = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(names: list[str]) -> None:
    if versions() != RECORDED["versions"]:
        pytest.skip(f"the table was counted with {RECORDED['versions']}")
    recorded = {row["case"]: row for row in RECORDED["rows"]}
    for row in python("-m", "benchmarks.gpu.cuda_audit", *names):
        assert row == recorded[row["case"]], f"{row['case']} differs from {TABLE.name}: write it anew and say why"


@pytest.mark.slow
@needs_fake_gpu
def test_the_watch_sees_waits_and_tensors_of_two_devices() -> None:
    ((quiet, waits, refused),) = python("-c", WATCHED)
    assert quiet == 0
    assert waits == [
        "a copy of pageable memory",
        *["a copy to the device"] * 2,
        *["a copy to the host"] * 2,
        *["a number read"] * 2,
        "an index of the host",
        "index",
        "synchronize",
    ]
    assert "cuda:0 and cpu" in refused


@pytest.mark.slow
@needs_fake_gpu
def test_steps_are_as_the_table_says() -> None:
    compare(list(SAMPLED))


@pytest.mark.exhaustive
@needs_fake_gpu
def test_every_row_is_as_the_table_says() -> None:
    compare([row["case"] for row in RECORDED["rows"] if row["case"] not in SAMPLED])


def test_no_row_mixes_devices() -> None:
    assert [row["case"] for row in RECORDED["rows"] if "mismatch" in row] == []
