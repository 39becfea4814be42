"""Groups of gloo processes for the benchmarks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _entry(
    rank: int, world_size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...], out: Any
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(world_size), GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    result = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    out.send(result)


def run_group(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of ``function(*args)`` by rank, from fresh processes with one thread each.

    Raises:
        RuntimeError: a process died; its own traceback is on stderr.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_entry, args=(rank, world_size, str(Path(folder) / "store"), function, args, sender), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return [pipe.recv() for pipe in pipes]
        except EOFError:
            raise RuntimeError(f"a process of the group of {world_size} died") from None
        finally:
            for process in processes:
                process.kill()
                process.join()
