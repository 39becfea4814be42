"""Real gloo processes for tests: forked from a server that imported everything once.

``run_processes(world_size, function, *args)`` calls ``function(*args)`` in every process of a fresh process group and
returns the ranks' results in order. The functions live in test modules (they travel by name).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

PRELOAD = [
    *("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "pytorch_lightning", "transformers"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    *("transformers.models.qwen3.modeling_qwen3", "transformers.models.mixtral.modeling_mixtral"),
    *("mgpu_pipe.training.train", "mgpu_pipe.cli.main", "mgpu_pipe.config.hydra.command_line"),
    *("mgpu_pipe.inference.check_export", "mgpu_pipe.inference.export_folder", "mgpu_pipe.launch.join"),
    *("mgpu_pipe.launch.local", "mgpu_pipe.launch.worker", "tests.support.preload_rest"),
]
TIMEOUT_S = 240.0
STACKS_AT = 0.95
"""Share of its time after which a process that has not finished writes the stacks of its threads."""
SERVER: Any = forkserver._forkserver


def preloaded() -> Any:
    """The multiprocessing context whose processes are forked from the server."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def start_server() -> str:
    """Start the server, whose imports go on by themselves; returns its address."""
    preloaded()
    SERVER.ensure_running()
    return str(SERVER._forkserver_address)


def share_server(address: str) -> None:
    """Let this process fork from the server of another one, which outlives it."""
    SERVER._forkserver_address = address
    SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    SERVER.ensure_running = lambda: None


def _entry(
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    out: Any,
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    torch.set_num_threads(1)
    stacks = _stacks_file(store, rank).open("w")
    faulthandler.dump_traceback_later(STACKS_AT * timeout_s, file=stacks)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        # Plain pickling: multiprocessing's own would share memory that dies with this process.
        out.send_bytes(pickle.dumps(("ok", result)))
    except BaseException as error:
        out.send_bytes(pickle.dumps(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")))
    faulthandler.cancel_dump_traceback_later()
    out.close()


def _stacks_file(store: str, rank: int) -> Path:
    return Path(f"{store}.stacks-{rank}")


def _stacks(store: str, rank: int) -> str:
    file = _stacks_file(store, rank)
    return f"rank {rank}: {file.read_text() if file.exists() else 'has not started'}"


def run_processes(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S, context: Any = None
) -> list[Any]:
    """Results of ``function(*args)`` by rank; raises AssertionError with the first failing rank's traceback.

    Args:
        timeout_s: of all together, and of each of their collectives.
        context: of :mod:`multiprocessing`, which starts them; the server's that imported everything if not given.
    """
    context = context or preloaded()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes, store = [], [], str(Path(folder) / "store")
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_entry, daemon=True, args=(rank, world_size, store, timeout_s, function, args, sender)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout_s, store)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Any], processes: list[Any], deadline: float, store: str) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for rank, pipe in enumerate(pipes):
            if rank in results or not pipe.poll(0.01):
                continue
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died, exit code {processes[rank].exitcode}") from None
            assert kind == "ok", f"rank {rank}: {value}"
            results[rank] = value
        if time.monotonic() >= deadline:
            missing = sorted(set(range(len(pipes))) - set(results))
            raise AssertionError("\n".join([f"ranks {missing} did not finish", *(_stacks(store, r) for r in missing)]))
    return [results[rank] for rank in range(len(pipes))]
