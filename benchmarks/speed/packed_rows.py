"""Packed rows over rows of one document each: the same model, rows, and tokens, none of them padding.

A packed row holds eight documents, between which attention does not look; its peer is one document as long as the row.
Both are trained by this project in one process, in blocks that alternate. ``python -m benchmarks.speed.packed_rows``.
"""

from __future__ import annotations

import os
import statistics

import torch
import torch.distributed as dist

from benchmarks.speed.step_time import framework_block
from benchmarks.support import finish
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.text.prepare_text import prepare

BLOCKS, STEPS, TOKENS, DOCUMENTS = 3, 9, 2048, 8
LENGTHS = (256, 1024, 2048)
"""Tokens of a row."""


def of(seq_len: int, document: int) -> RunConfig:
    config, _ = compose(
        [
            "model=llama_small",
            "data=synthetic",
            f"data.seq_len={seq_len}",
            f"data.synthetic.mean_length={document}",
            "data.synthetic.sigma=0",
            f"data.synthetic.num_documents={64 * seq_len // document}",
            f"data.global_batch_size={TOKENS // seq_len}",
            f"trainer.max_steps={STEPS}",
            "data.validation_fraction=0",
            "precision=fp32",
            "checkpoint=none",
            "logger=none",
        ]
    )
    return config


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for seq_len in LENGTHS:
        ways = [of(seq_len, document) for document in (seq_len // DOCUMENTS, seq_len)]
        prepared = [prepare(way) for way in ways]
        times: list[list[float]] = [[], []]
        for _ in range(BLOCKS):
            for config, data, seconds in zip(ways, prepared, times, strict=True):
                seconds += framework_block(config, data)
        packed, alone = (statistics.median(seconds) for seconds in times)
        shape = f"{TOKENS // seq_len} x {seq_len}"
        rows.append([shape, TOKENS / packed, TOKENS / alone, alone / packed])
    finish(
        "packed_rows",
        f"Packed rows of {DOCUMENTS} documents over rows of one document, llama_small, fp32",
        ["rows", "packed tokens/s", "one document tokens/s", "ratio"],
        rows,
        f"Medians of {BLOCKS} blocks of steps, alternating; one process; {TOKENS} tokens a step, no padding.",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
