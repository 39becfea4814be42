"""The data pipeline: loading, packing and tokenising, each over a named peer. ``python -m
benchmarks.speed.data_pipeline``.

- Loading: step batches of the training loader on one core, from a warm file, over numpy's copy of the same bytes (three
  int64 arrays of the batch's shape) into fresh memory.
- Packing: best fit over a million log-normal documents; the peer is the ideal, samples without a gap.
- Tokenising: two processes over one, on the text of Python's library; the ideal is 2. And how many processes the one
  that reads and writes could feed: the processor time of the others over its own.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support import finish
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.data_source import open_source
from mgpu_pipe.data.text.encode_source import encode_all
from mgpu_pipe.data.text.packing import pack
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.data.text.tokenizer import encoder_spec, resolve_tokenizer
from mgpu_pipe.topology import BatchPlan

COLUMNS = ("what", "amount", "seconds", "rate", "peer", "peer rate", "ratio")
VOCAB_SIZE, REPEATS = 8192, 7
TARGET_TOKENS = 4_000_000


def seconds_of(work: Callable[[], object]) -> float:
    """Processor seconds of the fastest of a few calls: single-threaded work, so a busy machine disturbs it less."""
    taken = []
    for _ in range(REPEATS):
        mark = time.process_time()
        work()
        taken.append(time.process_time() - mark)
    return min(taken)


def loader_row(config: RunConfig, global_batch_size: int, seq_len: int) -> list[Any]:
    config.data.seq_len = seq_len
    prepared = prepare(config)
    steps = max(1, TARGET_TOKENS // (global_batch_size * seq_len))
    plan = BatchPlan(global_batch_size, 1, 8)
    tokens = steps * global_batch_size * seq_len
    from mgpu_pipe.data.loader import train_step_batches

    template = np.zeros((3, global_batch_size, seq_len), np.int64)

    def load() -> None:
        for _ in train_step_batches(config, prepared, plan, 0, 0, steps):
            pass

    def copy() -> None:
        for _ in range(steps):
            template.copy()

    ours, peer = seconds_of(load), seconds_of(copy)
    return [
        f"load {global_batch_size} x {seq_len}",
        f"{tokens} tokens",
        ours,
        f"{tokens / ours / 1e6:.0f} M tokens/s",
        "numpy copy of the batches",
        f"{tokens / peer / 1e6:.0f} M tokens/s",
        peer / ours,
    ]


def packing_row(mean: float, sigma: float, seq_len: int, documents: int = 1_000_000) -> list[Any]:
    random = np.random.default_rng(0)
    lengths = np.maximum(np.exp(random.normal(np.log(mean) - sigma**2 / 2, sigma, documents)).astype(np.int64), 2)
    starts = np.cumsum(lengths) - lengths
    mark = time.process_time()
    packs = pack(starts, lengths, seq_len, "best_fit")
    taken = time.process_time() - mark
    filled = packs.pieces.length.sum() / (packs.num_samples * seq_len)
    return [
        f"pack mean {mean:g} sigma {sigma:g} into {seq_len}",
        f"{documents} documents",
        taken,
        f"{documents / taken / 1e6:.1f} M documents/s",
        "samples without a gap",
        "100 %",
        float(filled),
    ]


def tokenising_rows(config: RunConfig, cache: Path) -> list[list[Any]]:
    source = open_source(config, cache)
    spec = encoder_spec(
        config.data,
        resolve_tokenizer(config.model, config.data, config.objective, [(config.data, source)], cache),
        source,
    )
    rates = []
    for workers in (1, 2):
        own, others = time.process_time(), children_seconds()
        mark = time.perf_counter()
        count = sum(len(batch.tokens) for batch in encode_all(spec, source.documents(), workers))
        taken = time.perf_counter() - mark
        rates.append(count / taken)
    own, others = time.process_time() - own, children_seconds() - others
    return [
        [
            "tokenise, 2 processes",
            f"{count} tokens",
            taken,
            f"{rates[1] / 1e6:.2f} M tokens/s",
            "1 process",
            f"{rates[0] / 1e6:.2f} M tokens/s",
            rates[1] / rates[0],
        ],
        [
            "processes that one feeds",
            f"{count} tokens",
            own,
            f"{count / own / 1e6:.2f} M tokens/s",
            "a process's own work",
            f"{count / others / 1e6:.2f} M tokens/s",
            others / own,
        ],
    ]


def children_seconds() -> float:
    """Processor seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    everywhere = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig()
        config.model.config = {"vocab_size": VOCAB_SIZE}
        config.data.cache_dir = folder
        rows = tokenising_rows(config, Path(folder))
        prepare(config)
        os.sched_setaffinity(0, set(islice(everywhere, 1)))
        import torch  # not before: the tokenising processes import this module

        torch.set_num_threads(1)
        rows += [loader_row(config, *shape) for shape in ((32, 256), (256, 256), (256, 2048), (32, 8192))]
        rows += [packing_row(*shape) for shape in ((200, 0.6, 256), (400, 1.0, 2048), (800, 1.2, 8192))]
        os.sched_setaffinity(0, everywhere)
    notes = (
        "ratio: this project's rate over the peer's; of packing, the share of the samples' places that hold a "
        f"token. Loading, packing: processor seconds, one core. Load average: {os.getloadavg()[0]:.1f}."
    )
    print(finish("data_pipeline", "data pipeline", COLUMNS, rows, notes))


if __name__ == "__main__":
    main()
