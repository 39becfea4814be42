"""Saving and loading: each figure over the plainest way to do the same, in the same processes.

- Stall: what the caller of an asynchronous save waits, over copying as many bytes from memory to memory.
- Write: a save, hashing included, over writing and flushing the same bytes of memory, with as many processes, one file
  each; the two take turns.
- Load: bytes read over bytes needed, where every process reads its slice of what two others wrote (rows, and columns);
  and the process's peak memory over its own state.
- Growth: a save of eight times the bytes over eight times the time; memory that a save takes besides.

State is that of AdamW on a Llama's shapes: whole layers of Llama 3.2 1B where a rank's slices matter, which is how many
bytes a tensor has and how wide its rows are; narrower ones where only the bytes do.
``python -m benchmarks.speed.checkpoint_save [MiB]``.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish

REPEATS = 5
DEFAULT_MIB = 384
MIB = 1 << 20
NARROW, LLAMA_1B = 512, 2048
"""Hidden sizes."""
PART_BYTES = 4 * MIB
"""Of the plain write; larger ones are not faster."""


def state_of(nbytes: int, hidden: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and AdamW's moments of at least ``nbytes`` together, in layers of a Llama's shapes."""
    import torch

    weights: dict[str, Any] = {}
    shapes = {
        "q_proj": (hidden, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (4 * hidden, hidden),
        "down_proj": (hidden, 4 * hidden),
        "norm": (hidden,),
    }
    generator = torch.Generator().manual_seed(0)
    while 12 * sum(weight.numel() for weight in weights.values()) < nbytes:
        layer = len(weights) // len(shapes)
        for name, shape in shapes.items():
            weights[f"layers.{layer}.{name}"] = torch.randn(shape, generator=generator)
    moments = {f"{name}/{key}": w * 0.5 for name, w in weights.items() for key in ("exp_avg", "exp_avg_sq")}
    return weights, moments


def shards_of(tensors: dict[str, Any], dim: int, rank: int, world: int) -> list[Any]:
    """This rank's slices along a dim, contiguous as a shard is."""
    from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice

    found = []
    for name, tensor in tensors.items():
        at = min(dim, tensor.ndim - 1)
        size = tensor.shape[at] // world
        offsets = tuple(rank * size if d == at else 0 for d in range(tensor.ndim))
        part = tensor.narrow(at, rank * size, size).contiguous()
        found.append(LocalShard(TensorSlice(name, offsets, tuple(part.shape)), tuple(tensor.shape), part))
    return found


def own_shards(nbytes: int, hidden: int, dim: int = 0) -> tuple[list[Any], list[Any]]:
    import torch.distributed as dist

    weights, moments = state_of(nbytes, hidden)
    place = dist.get_rank(), dist.get_world_size()
    return shards_of(weights, dim, *place), shards_of(moments, dim, *place)


def seconds(action: Callable[[], object]) -> float:
    """Of an action that all processes begin together and that ends with the last of them."""
    import torch.distributed as dist

    dist.barrier()
    mark = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - mark


class Held:
    """Stands for a strategy: what the saver asks of one."""

    def __init__(self, model: list[Any], optimizer: list[Any]) -> None:
        self.model, self.optimizer = model, optimizer

    def model_shards(self) -> list[Any]:
        return self.model

    def optimizer_shards(self) -> list[Any]:
        return self.optimizer

    def state_entries(self) -> dict[str, Any]:
        return {}

    def shards_written(self) -> None:
        pass


def stall(folder: str, nbytes: int) -> dict[str, float]:
    """Seconds: the first save's stall, the median of later ones', a copy of the same bytes."""
    import torch

    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.config.schema import CheckpointConfig
    from mgpu_pipe.training.save_and_resume import Checkpointer

    held = Held(*own_shards(nbytes, LLAMA_1B))
    total = sum(shard.tensor.nbytes for shard in (*held.model, *held.optimizer))
    source, target = torch.ones(total // 4), torch.zeros(total // 4)
    saver = Checkpointer(
        CheckpointConfig(every_n_steps=1, keep_last=1), RunPaths(Path(folder)), {"global_batch_size": 1}
    )
    stalls, copies = [], []
    for step in range(1, REPEATS + 2):
        copies.append(seconds(lambda: target.copy_(source)))
        stalls.append(seconds(partial(saver.save, held, step, {})))
        saver.let_finish()
    saver.finish(0)
    return {"first": stalls[0], "later": statistics.median(stalls[1:]), "copy": statistics.median(copies[1:])}


def write_plainly(path: Path, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for start in range(0, len(data), PART_BYTES):
        os.write(descriptor, data[start : start + PART_BYTES])
    os.fsync(descriptor)
    os.close(descriptor)


def write(folder: str, nbytes: int) -> dict[str, float]:
    """Seconds of a save and of the plain write, and the save's extra memory in bytes; medians."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.checkpoint import file_operations as files
    from mgpu_pipe.checkpoint.live_tensors import byte_view
    from mgpu_pipe.checkpoint.save import save

    root, rank = Path(folder), dist.get_rank()
    model, optimizer = own_shards(nbytes, NARROW)
    total = sum(shard.tensor.nbytes for shard in (*model, *optimizer))
    plain = byte_view(torch.randn(total // 4))
    ours, theirs, extra = [], [], []
    for step in range(1, REPEATS + 2):
        theirs.append(seconds(lambda: write_plainly(root / f"plain-{rank}", plain)))
        os.unlink(root / f"plain-{rank}")
        before = reset_peak()
        ours.append(seconds(partial(save, root / "checkpoints", step, model, optimizer, {}, root / "config.yaml")))
        extra.append(peak() - before)
        if rank == 0:
            files.remove_folder(root / "checkpoints" / f"step-{step:08d}")
    return {
        "ours": statistics.median(ours[1:]),
        "plain": statistics.median(theirs[1:]),
        "extra": max(extra[1:]),
        "bytes": total * dist.get_world_size(),
    }


def hashing(nbytes: int) -> float:
    """Seconds that one core takes for the SHA-256 of as many bytes."""
    data = bytes(nbytes)
    mark = time.perf_counter()
    hashlib.sha256(data).digest()
    return time.perf_counter() - mark


def load(folder: str, nbytes: int) -> list[dict[str, Any]]:
    """Bytes read over needed, and peak memory over the process's own state, for slices by rows and by columns."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.checkpoint.load import CheckpointReader
    from mgpu_pipe.checkpoint.save import save

    root = Path(folder)
    step = save(root / "checkpoints", 1, *own_shards(nbytes, LLAMA_1B), {}, root / "config.yaml")
    found = []
    for verify in ("full", "size"):
        for dim, name in ((0, "rows"), (1, "columns")):
            targets = own_shards(nbytes, LLAMA_1B, dim)
            expected = [shard.tensor.clone() for part in targets for shard in part]
            for shard in (*targets[0], *targets[1]):
                shard.tensor.zero_()
            needed = sum(tensor.nbytes for tensor in expected)
            before = reset_peak()
            reader = CheckpointReader(step, verify)
            reader.read(targets[0], "model")
            reader.read(targets[1], "optimizer")
            taken = peak() - before
            got = [shard.tensor for part in targets for shard in part]
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            found.append(
                {
                    "slices": f"{name}, verify={verify}",
                    "read": reader.bytes_read / needed,
                    "memory": (needed + taken) / needed,
                }
            )
            dist.barrier()
    return found


def reset_peak() -> int:
    """Begin a new peak of this process's resident memory; the memory as it is now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def in_folder(world: int, measure: Callable[..., Any], nbytes: int) -> list[Any]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIR")) as folder:
        (Path(folder) / "config.yaml").write_text("seed: 1\n")
        return run_group(world, measure, folder, nbytes)


def main() -> None:
    nbytes = int(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MIB) * MIB
    rows: list[list[Any]] = []
    for world in (1, 2):
        found = in_folder(world, stall, nbytes)
        later, first, copy = (max(rank[name] for rank in found) for name in ("later", "first", "copy"))
        rows.append([f"stall of an asynchronous save, {world} process(es)", later * 1e3, copy * 1e3, later / copy, 1.2])
        rows.append(["  the first, which takes the memory", first * 1e3, copy * 1e3, first / copy, "-"])
    for world in (1, 2):
        found = in_folder(world, write, nbytes)
        ours, plain = max(rank["ours"] for rank in found), max(rank["plain"] for rank in found)
        rows.append([f"write, {world} process(es)", ours * 1e3, plain * 1e3, ours / plain, 1.15])
    rows.append(["  SHA-256 of the same bytes on one core, nothing written", hashing(nbytes) * 1e3, "", "", "-"])
    by_rank = in_folder(2, load, nbytes)
    for case in zip(*by_rank, strict=True):
        read, memory = max(c["read"] for c in case), max(c["memory"] for c in case)
        rows.append([f"load {case[0]['slices']}: bytes read", "", "", read, 1.05])
        rows.append([f"load {case[0]['slices']}: peak memory over own state", "", "", memory, 1.1])
    small, large = (in_folder(1, write, size)[0] for size in (nbytes // 4, 2 * nbytes))
    grown = large["bytes"] / small["bytes"]
    rows.append(
        [
            f"{grown:.1f} times the bytes: time over as many times",
            large["ours"] * 1e3,
            small["ours"] * 1e3,
            large["ours"] / small["ours"] / grown,
            "1",
        ]
    )
    for name, one in (("small", small), ("large", large)):
        rows.append([f"  memory a save takes besides, {name}: MiB", one["extra"] / MIB, one["bytes"] / MIB, "", "-"])
    out = finish(
        "checkpoint_save",
        "Saving and loading checkpoints",
        ["what", "ours (ms)", "peer (ms)", "ratio", "wanted at most"],
        rows,
        f"{nbytes / MIB:.0f} MiB (stall and load: one layer of Llama 3.2 1B, 480 MiB) of weights and AdamW state over "
        "all processes, fp32, one thread a process; medians of "
        f"{REPEATS} after one that is left out, the slowest process counts. Peers: torch's copy of one tensor of the "
        "same bytes; write() of parts of 4 MiB and fsync, one file a process. Of the last two rows: MiB, and the "
        f"model's MiB. Load average: {os.getloadavg()[0]:.1f}.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
