"""Measures what a machine's processes compute and send, all of them at once, for a hardware profile.

Each time is the median of several windows, then the mean over processes. A window is long enough for processes that
share a core to take turns. Matrix products, copies and training steps of small decoders
are in fp32 on the CPU and in bf16 on GPUs, where blocks are not compiled.

The link of each pair of ranks is measured in the rounds of a tournament, so that no rank is in two pairs at once; slow
pairs are measured once more, alone."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.parallel.rank_exchange import exchange_json
from mgpu_pipe.planning.calibration import Measurements
from mgpu_pipe.planning.work import Work
from mgpu_pipe.runs.lock import boot_id
from mgpu_pipe.system.hardware import cpu_name, host_memory
from mgpu_pipe.training.profiling.link_table import Link, suspects

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIB = 1 << 20
TRIPS = 10
"""All-reduces of a window, and short messages between two large ones."""
WINDOW_S, WINDOWS, LONGEST_S = 0.05, 8, 0.7
"""Seconds of a window, the most windows of a measurement, and seconds after which it ends."""
TRIP_WINDOWS = 4
"""Windows of an all-reduce: every rank needs the same number."""
PRODUCTS = {
    "cpu": (
        *((512, 512, 64), (512, 64, 192), (512, 1024, 64), (512, 256, 256), (256, 768, 256), (64, 64, 512)),
        *((512, 512, 512), (1024, 1024, 1024)),
    ),
    "cuda": (
        *((2048, 2048, 256), (4096, 1024, 1024), (2048, 8192, 2048), (4096, 4096, 4096), (16384, 2048, 2048)),
        (8192, 8192, 8192),
    ),
}
"""Rows, columns and inner dimension."""
MESSAGES = {"cpu": (1 << 16, MIB // 4, MIB, 8 * MIB), "cuda": (4, 1 << 16, MIB, 16 * MIB, 64 * MIB)}
BETWEEN = (512, 512, 512)
"""Rows, columns and inner dimension of the product between two collectives on CPU."""
COPIED = {"cpu": 64 * MIB, "cuda": 1024 * MIB}
SHAPES = ("layers", "width", "inner", "heads", "vocabulary", "sequence", "rows", "micro_batches")
DECODERS = {
    "cpu": (
        (2, 64, 192, 8, 1024, 128, 4, 1),
        (6, 64, 192, 8, 1024, 128, 4, 1),
        (4, 64, 192, 8, 1024, 256, 1, 4),
        (2, 64, 192, 8, 8192, 128, 4, 1),
        (2, 256, 768, 8, 1024, 128, 4, 1),
        (2, 256, 768, 8, 1024, 512, 1, 1),
    ),
    "cuda": (
        (2, 1024, 2816, 16, 32000, 2048, 1, 1),
        (6, 1024, 2816, 16, 32000, 2048, 1, 1),
        (2, 1024, 2816, 16, 8192, 512, 1, 4),
        (2, 2048, 5632, 16, 32000, 2048, 2, 1),
        (2, 2048, 5632, 16, 8192, 4096, 1, 2),
    ),
}
"""Small decoders, by :data:`SHAPES`."""


def measure_hardware(device: torch.device) -> Measurements:
    """Measure this machine's processes, on every rank of the world. Collective."""
    kind = device.type
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    products = [(*sizes, _everywhere(_product(*sizes, dtype, device), device)) for sizes in PRODUCTS[kind]]
    copy = _everywhere(_copy(COPIED[kind], device), device)
    steps = [_step(dict(zip(SHAPES, sizes, strict=True)), device) for sizes in DECODERS[kind]]
    return Measurements(
        processes=dist.get_world_size(),
        products=products,
        bandwidth=2 * COPIED[kind] / copy,
        reductions=list(_reductions(device)),
        steps=steps,
        block=_block(dict(zip(SHAPES, DECODERS[kind][-1], strict=True)), device),
        device=_describe(device),
    )


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        share = host_memory() // dist.get_world_size()
        return {"type": "cpu", "name": cpu_name(), "memory": share, "multiprocessors": 1, "host_memory": host_memory()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "host_memory": host_memory(),
    }


def _everywhere(action: Callable[[], object], device: torch.device) -> float:
    """Median seconds of ``action``, the mean over ranks, which begin together. Collective."""
    action()
    _wait(device)
    dist.barrier()
    began, once = time.perf_counter(), _seconds(action, 1, device)
    calls = max(1, math.ceil(WINDOW_S / once))
    times = [once] if calls == 1 else []
    while not times or (len(times) < WINDOWS and time.perf_counter() - began < LONGEST_S):
        times.append(_seconds(action, calls, device))
    return statistics.fmean(exchange_json(statistics.median(times), None))


def _seconds(action: Callable[[], object], calls: int, device: torch.device) -> float:
    """Mean seconds of ``calls`` calls in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        action()
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(
    rows: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(columns, inner, dtype=dtype, device=device)
    return lambda: torch.nn.functional.linear(left, right)


def _reductions(device: torch.device) -> Iterator[tuple[int, int, float]]:
    """Bytes, ranks and seconds of all-reduces of the first ranks of the world. Collective."""
    world = dist.get_world_size()
    for ranks in sorted({size for size in (2, 4, 8, world) if 2 <= size <= world}):
        group = dist.new_group(list(range(ranks)))
        for size in MESSAGES[device.type]:
            seconds = 0.0
            if dist.get_rank() < ranks:
                message = torch.zeros(size // 4, device=device)
                send = partial(dist.all_reduce, message, group=group)
                send()
                seconds = statistics.median(_trip(send, device) for _ in range(TRIP_WINDOWS))
            yield size, ranks, statistics.fmean(exchange_json(seconds, None)[:ranks])
        dist.barrier()


def _trip(send: Callable[[], object], device: torch.device) -> float:
    """Mean seconds of a collective. On CPU ranks compute in between, as in a step: sleeping threads take longer."""
    if device.type == "cuda":
        return _seconds(send, TRIPS, device)
    multiply = _product(*BETWEEN, torch.float32, device)

    def multiply_and_send() -> None:
        multiply()
        send()

    alone = _seconds(multiply, TRIPS, device)
    return max(_seconds(multiply_and_send, TRIPS, device) - alone, alone * 1e-3)


def _decoder(shape: Mapping[str, int], device: torch.device) -> PreTrainedModel:
    fields = {
        "vocab_size": shape["vocabulary"],
        "hidden_size": shape["width"],
        "intermediate_size": shape["inner"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["heads"],
        "head_dim": shape["width"] // shape["heads"],
        "max_position_embeddings": shape["sequence"],
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return materialise(build_meta(ModelConfig(type="llama", config=fields)), 0, device)


def _step(shape: Mapping[str, int], device: torch.device) -> tuple[dict[str, float], float]:
    """Fields of the work of a decoder's step, and its seconds. Collective."""
    model = _decoder(shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.zeros(shape["rows"], shape["sequence"], dtype=torch.int64, device=device)

    def step() -> None:
        for _ in range(shape["micro_batches"]):
            with _precision(device):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = _everywhere(step, device)
    work = {name: float(size) for name, size in shape.items()}
    work |= {"key_value_heads": work["heads"], "head_dim": work["width"] / work["heads"], "gated": 1.0}
    work |= {"context": work["sequence"], "activation_bytes": 4.0 if device.type == "cpu" else 2.0}
    assert set(work) <= set(Work.__dataclass_fields__)
    return work, seconds


def _block(shape: Mapping[str, int], device: torch.device) -> dict[str, float]:
    """Seconds of one block's passes. Collective."""
    block: torch.nn.Module = _decoder({**shape, "layers": 1}, device).get_submodule("model.layers.0")
    rotary = torch.zeros(1, shape["sequence"], shape["width"] // shape["heads"], device=device)

    def forward(tokens: int, rows: int) -> torch.Tensor:
        hidden = torch.ones(rows, tokens, shape["width"], device=device, requires_grad=True)
        with _precision(device):
            output = block(hidden, position_embeddings=(rotary[:, :tokens], rotary[:, :tokens]))
        hidden_out: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden_out

    long = _everywhere(lambda: forward(shape["sequence"], shape["rows"]), device)
    both = _everywhere(lambda: forward(shape["sequence"], shape["rows"]).sum().backward(), device)
    return {"forward": long, "backward": both - long, "launch": _everywhere(lambda: forward(1, 1), device)}


def _precision(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


TRANSFERS = 3
"""Large messages between two ranks; the best time counts, because a busy machine pauses."""
MESSAGE = {"cpu": 8 * MIB, "cuda": 64 * MIB}
"""Bytes of a large message."""


def measure_links(device: torch.device) -> list[Link]:
    """The links of all pairs, on every rank. Collective."""
    nodes = exchange_json([socket.gethostname(), boot_id()], None)

    def measure_rounds(rounds: Iterator[Sequence[tuple[int, int]]]) -> list[Link]:
        links_here = []
        for pairs in rounds:
            _barrier(device)
            for pair in pairs:
                if dist.get_rank() in pair:
                    trip, rate = _measure(*pair, device)
                    (node, boot), (other, other_boot) = (nodes[rank] for rank in pair)
                    links_here.append(Link(*pair, node, other, boot == other_boot, trip / 2, rate))
        by_rank = exchange_json([asdict(link) for link in links_here if link.first == dist.get_rank()], None)
        return [Link(**link) for links in by_rank for link in links]

    links = {(link.first, link.second): link for link in measure_rounds(tournament(dist.get_world_size()))}
    for again in measure_rounds(iter([[(link.first, link.second)] for link in suspects([*links.values()])])):
        links[again.first, again.second] = links[again.first, again.second].best(again)
    return [links[pair] for pair in sorted(links)]


def tournament(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which every rank is in one pair at most; each pair comes once."""
    players = list(range(ranks + ranks % 2))  # an odd number gets a dummy player; its partner pauses
    for _ in players[1:]:
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < ranks]
        players[1:] = [players[-1], *players[1:-1]]


def _measure(first: int, second: int, device: torch.device) -> tuple[float, float]:
    """A round trip's seconds, and bytes per second in the slower direction. Both ranks of the pair call this."""
    small = torch.zeros(1, device=device)
    large = torch.zeros(MESSAGE[device.type] // 4, device=device)
    leads = dist.get_rank() == first
    other = second if leads else first

    def exchange(there: torch.Tensor, back: torch.Tensor) -> None:
        if leads:
            dist.send(there, other)
            dist.recv(back, other)
        else:
            dist.recv(there, other)
            dist.send(back, other)

    _seconds(lambda: exchange(large, large), 1, device)  # connects
    trips, there, back = [], [], []
    for _ in range(TRANSFERS):  # short messages between long ones: a pause of the machine outlasts a row of short ones
        trips += [_seconds(lambda: exchange(small, small), 1, device) for _ in range(TRIPS)]
        there.append(_seconds(lambda: exchange(large, small), 1, device))
        back.append(_seconds(lambda: exchange(small, large), 1, device))
    return min(trips), large.nbytes / max(min(there), min(back))


def _barrier(device: torch.device) -> None:
    dist.all_reduce(zero := torch.zeros((), device=device))
    zero.item()
