"""The contrastive loss over the global batch: memory, time and bytes sent, over two other ways to compute it.

- naive: every process gathers all features, with their gradients, and computes all of the loss;
- open_clip: its ``ClipLoss(local_loss=True, gather_with_grad=True)``, taken from ``loss.py`` of its package, which is
  downloaded without what it depends on.

SigLIP's loss, whose captions go round the processes, is measured over its naive form alike.

Each process holds the features of its samples, and gets their gradients; the towers are left out. Gradients are
compared with the naive ones. Peak bytes are of all tensors allocated beside the features; seconds are the fastest of a
few passes, all in turn. Bytes sent are those of ring algorithms; the closed form gathers two features of each
sample, reduce-scatters their gradients, and tells how many samples each process has. Both others gather by
``torch.distributed.nn``, whose gradients go back here as they do under NCCL.

``python -m benchmarks.memory.contrastive_loss [samples] [width]``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn import functional as collectives

from benchmarks.open_clip import OPEN_CLIP, download_open_clip, load_file
from benchmarks.processes import run_group
from benchmarks.support import KEEPING, finish
from benchmarks.traffic.collectives import Counted, _Mode
from mgpu_pipe.architectures.formulas.kept_memory import all_reduced, exchanged_bytes
from mgpu_pipe.objectives.contrastive import ContrastiveObjective
from mgpu_pipe.objectives.sample_group import ProcessSamples
from mgpu_pipe.parallel.device_memory import AllocationWatch
from mgpu_pipe.topology import ParallelDims

SAMPLES, WIDTH, WORLDS, REPEATS = 2048, 512, (2, 4, 8), 9
SCALE, BIAS = 1 / 0.07, -1.0
COLUMNS = (
    *("processes", "over", "peak MB", "its peak MB", "memory", "ms", "its ms", "time"),
    *("MB sent", "its MB sent", "closed form MB", "gradients apart"),
)
Gradients = tuple[torch.Tensor, torch.Tensor]
Way = Callable[[torch.Tensor, torch.Tensor], Gradients]


class Towers(torch.nn.Module):
    """Hands on the features that it is given; of SigLIP with its bias."""

    def __init__(self, siglip: bool = False) -> None:
        super().__init__()
        self.logit_scale = torch.nn.Parameter(torch.tensor(log(SCALE)), requires_grad=False)
        if siglip:
            self.logit_bias = torch.nn.Parameter(torch.tensor(BIAS), requires_grad=False)
        self.config = SimpleNamespace(model_type="clip", text_config=SimpleNamespace(eos_token_id=0))

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(image_embeds=pixel_values, text_embeds=input_ids)


class World(ProcessSamples):
    """All processes, each with samples that no other has."""

    def __init__(self) -> None:
        self.dims = ParallelDims(dp_replicate=dist.get_world_size())


class _GatherGradients(collectives._AllGather):
    """As under NCCL; under gloo torch lets every process scatter, and sums up copies."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        own = torch.empty_like(gradients[0])
        return None, collectives._Reduce_Scatter.apply(dist.ReduceOp.SUM, ctx.group, own, *gradients)


def ours(samples: int, siglip: bool = False) -> Way:
    objective, world = ContrastiveObjective(Towers(siglip), None, lambda step: 1.0), World()

    def gradients(images: torch.Tensor, texts: torch.Tensor) -> Gradients:
        batch = {"pixel_values": images, "input_ids": texts}
        objective.gather_features([batch], 1, world)
        (objective.micro_batch_loss(batch) / samples).backward()
        return taken(images, texts, 1)

    return gradients


def naive(samples: int) -> Way:
    def gradients(images: torch.Tensor, texts: torch.Tensor) -> Gradients:
        whole = [torch.cat(collectives.all_gather(one)) for one in (images, texts)]
        logits, right = SCALE * whole[0] @ whole[1].T, torch.arange(samples)
        loss = (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2
        loss.backward()
        return taken(images, texts, dist.get_world_size())  # every process computed the same loss

    return gradients


def naive_siglip(samples: int) -> Way:
    def gradients(images: torch.Tensor, texts: torch.Tensor) -> Gradients:
        whole = [torch.cat(collectives.all_gather(one)) for one in (images, texts)]
        signs = 2 * torch.eye(samples) - 1
        loss = F.softplus(-signs * (SCALE * whole[0] @ whole[1].T + BIAS)).sum() / samples
        loss.backward()
        return taken(images, texts, dist.get_world_size())  # every process computed the same loss

    return gradients


def open_clip(file: str) -> Way:
    rank, size = dist.get_rank(), dist.get_world_size()
    loss = load_file(Path(file)).ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=size)

    def gradients(images: torch.Tensor, texts: torch.Tensor) -> Gradients:
        loss(images, texts, SCALE).backward()
        return taken(images, texts, size)  # a mean over the process's samples

    return gradients


def taken(images: torch.Tensor, texts: torch.Tensor, by: int) -> Gradients:
    found = images.grad, texts.grad
    images.grad = texts.grad = None
    assert found[0] is not None and found[1] is not None
    return found[0] / by, found[1] / by


def measure(file: str | None, samples: int, width: int) -> dict[str, list[float]]:
    """Of each way peak bytes, seconds, bytes sent, and how far its gradients are from the naive ones.

    Args:
        file: open_clip's ``loss.py``; it is left out without one.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # open_clip's way to gather, by torch
    collectives._AllGather = _GatherGradients  # type: ignore[misc]
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    rows = slice(rank * samples // size, (rank + 1) * samples // size)
    images, texts = (
        F.normalize(torch.randn(samples, width, generator=generator), dim=1)[rows].clone().requires_grad_()
        for _ in range(2)
    )
    ways = {"naive": naive(samples), **({"open_clip": open_clip(file)} if file else {}), "ours": ours(samples)}
    ways |= {"naive SigLIP": naive_siglip(samples), "ours, SigLIP": ours(samples, siglip=True)}
    results, found = {}, dict[str, list[float]]()
    for name, way in ways.items():
        way(images, texts)
        with AllocationWatch() as watch:
            results[name] = way(images, texts)
        counted = Counted()
        with _Mode(counted):
            way(images, texts)
        apart = max(
            float((one - other).norm() / other.norm())
            for one, other in zip(results[name], results[_oracle(name)], strict=True)
        )
        found[name] = [watch.peak, float("inf"), sum(counted.sent.values()), apart]
    for _ in range(REPEATS):
        for name, way in ways.items():
            dist.barrier()
            mark = time.perf_counter()
            way(images, texts)
            dist.barrier()
            found[name][1] = min(found[name][1], time.perf_counter() - mark)
    return found


def _oracle(name: str) -> str:
    return "naive SigLIP" if "SigLIP" in name else "naive"


def closed_form(processes: int, samples: int, width: int, siglip: bool = False) -> float:
    """Bytes that a process sends. SigLIP's captions, and its bias beside them, go round but for the last turn, their
    gradients the whole way."""
    if siglip:
        return (2 * processes - 1) * 4 * samples * (width + 1) / processes
    return 4 * exchanged_bytes(4 * samples * width, processes) + all_reduced(8 * processes, processes)


def main(samples: int, width: int) -> None:
    rows: list[list[Any]] = []
    os.environ.update(KEEPING)  # for the processes that are started
    with tempfile.TemporaryDirectory() as folder:
        file = str(download_open_clip(folder) / "open_clip" / "loss.py")
        for size in WORLDS:
            by_rank = run_group(size, measure, file, samples, width)
            worst = {name: [max(one[name][at] for one in by_rank) for at in range(4)] for name in by_rank[0]}
            own = {"naive": worst.pop("ours"), "naive SigLIP": worst.pop("ours, SigLIP")}
            for name, its in worst.items():
                peak, seconds, sent, apart = own[_oracle(name)]
                form = closed_form(size, samples, width, "SigLIP" in name)
                rows.append(
                    [
                        *(size, name, peak / 1e6, its[0] / 1e6, peak / its[0], 1e3 * seconds, 1e3 * its[1]),
                        *(seconds / its[1], sent / 1e6, its[2] / 1e6, form / 1e6, max(apart, its[3])),
                    ]
                )
    notes = (
        f"{samples} samples in all, features of {width} numbers, fp32, gloo, one thread a process; {OPEN_CLIP}. "
        "Ratios are ours over the other's; at most 1 is wanted."
    )
    finish("contrastive_loss", "The contrastive loss over the naive one and open_clip's", COLUMNS, rows, notes)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]) if len(sys.argv) > 2 else (SAMPLES, WIDTH))
