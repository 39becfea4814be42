"""The loss head of a large vocabulary: its buffers over naive logits, its time over torch's own in chunks.

Three heads of the same hidden states, weight and labels, forward and backward: ours, in chunks; torch's
``linear_cross_entropy`` in chunks; and whole logits. On the CPU in fp32, on a GPU in bf16 with 16,384 tokens
and a width of 2,048. ``python -m benchmarks.speed.loss_head``.

- *buffers*: the most that tensors took at once, without the gradients of the weight and of the hidden states (not of
  whole logits on the CPU, whose 16,384 rows take 25 GB);
- *over naive logits*: that over the bytes of ``(tokens, vocabulary)`` in fp32;
- *time*: median of rounds that alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.support import finish
from mgpu_pipe.objectives.losses.chunked_head import ChunkedHead
from mgpu_pipe.objectives.losses.cross_entropy import linear_cross_entropy
from mgpu_pipe.parallel.device_memory import AllocationWatch

VOCABULARY, TOKENS = 128_256, 16_384
ROUNDS = 3
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden states, weight and labels to the sum of the losses."""


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(ChunkedHead(hidden, weight, None, labels))


def torchs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def naive(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


HEADS: dict[str, Head] = {"mgpu_pipe": ours, "torch, in chunks": torchs, "whole logits": naive}


def drawn(tokens: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, width, device=device, dtype=dtype) * 0.02).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (tokens,), device=device)


def run(head: Head, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
    """Seconds of a forward and a backward pass."""
    hidden, weight, _ = given
    hidden.grad = weight.grad = None
    if hidden.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    (head(*given) / len(hidden)).backward()
    if hidden.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def buffers(head: Head, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> int:
    """Bytes."""
    hidden, weight, _ = given
    hidden.grad = weight.grad = None
    if hidden.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(head, given)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with AllocationWatch() as watch:
            run(head, given)
        peak = watch.peak
    return peak - weight.nbytes - hidden.nbytes


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    width, few = (2048, TOKENS) if on_gpu else (256, 2048)
    narrow = drawn(TOKENS, width if on_gpu else 16, device)
    taken = {name: buffers(head, narrow) for name, head in HEADS.items() if on_gpu or head is not naive}
    del narrow
    given = drawn(few, width, device)
    seconds: dict[str, list[float]] = {name: [] for name in HEADS}
    for _ in range(ROUNDS + 1):
        for name, head in HEADS.items():
            seconds[name].append(run(head, given))
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    logits = TOKENS * VOCABULARY * 4
    rows = []
    for name in HEADS:
        memory = [taken[name] / 2**20, 100 * taken[name] / logits] if name in taken else ["", ""]
        rows.append([name, *memory, medians[name], medians[name] / medians["torch, in chunks"]])
    columns = ("head", "buffers, MiB", "over naive logits, %", "seconds", "time over torch's")
    notes = (
        f"vocabulary {VOCABULARY}; buffers of {TOKENS} tokens, width {width if on_gpu else 16}; "
        f"time of {few} tokens, width {width}; {'bf16' if on_gpu else 'fp32'}"
    )
    finish("loss_head", "A loss head in chunks", columns, rows, notes)


if __name__ == "__main__":
    main()
