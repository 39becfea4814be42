"""Published runs whose memory is printed, and the memory that the planner's formulas give for them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from mgpu_pipe.planning.activation_bytes import Activations
from mgpu_pipe.planning.layout_costs import passes_in_flight
from mgpu_pipe.planning.memory_terms import Overheads, Place, State, memory_terms
from mgpu_pipe.planning.work import Work

FOLDER = Path(__file__).parents[1] / "data_published"
GIB = 1 << 30
MEGATRON_BYTES = 3.5 * GIB
"""Calibrated: what Megatron-DeepSpeed holds on a GPU besides tensors that the formulas know."""
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    """Rows with memory and without a known misprint."""
    with (FOLDER / f"{name}.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["mem_gib"] and "misprint" not in row["note"] + row["flag"]]


def work_of(row: Row) -> Work:
    get = {name: float(value) for name, value in row.items() if value and value.replace(".", "", 1).isdigit()}
    return Work(
        layers=get["layers"],
        width=get["hidden"],
        inner=get["ffn"],
        heads=get["heads"],
        key_value_heads=get["kv"],
        head_dim=get["hidden"] / get["heads"],
        vocabulary=get["vocab"],
        sequence=get["seq"],
        context=get["seq"],
        gated=get["gated"],
        tied=get["tied"],
        tp=get["tp"],
        pp=get["pp"],
        cp=get["cp"],
        dp_shard=get["dp"],
        stages_per_rank=get["vp"],
        rows=get["mbs"],
        # Reserved memory: blocks of gradients, once there, are not given to the next step's logits.
        micro_batches=max(2.0, get["gbs"] / get["dp"] / get["mbs"]),
        zero=get["zero"],
        sequence_parallel=get["sp"],
        flash=float(row["attn"] == "flash"),
        float8=float(row["prec"] == "fp8"),
    )


def predicted(row: Row) -> dict[str, float]:
    """Bytes of the terms of the worst rank, without what the source does not count."""
    work = work_of(row)
    pipeline, megatron = float(row["pp"]) > 1, row["source"] == "bloom-bench"
    block = 4 * work.width**2 if megatron else work.attention_parameters
    block = block + work.expert_parameters + 2 * work.width
    table = work.vocabulary * work.width
    state = State(
        block=block,
        embedding=table + (2048 * work.width if megatron else 0),
        # Megatron's tied tables exist on the first and on the last stage.
        head=table,
        # Megatron's master weights belong to the optimizer, which ZeRO-1 shards.
        weight=2.0 if megatron else 4.0,
        block_weight=2.0 if megatron else 4.0,
        optimizer=12.0 if megatron else 8.0,
        copy=0.0 if megatron else 2.0,
        block_copy=0.0 if megatron else 2.0,
        gathers_units=float(not pipeline),
        sums_whole=float(pipeline),
    )
    half = 0.5 * (row["rc"] == "selective-op")
    keeps = Activations(2.0, float("eager" not in row["row"]), 1.0, half)
    # NCCL's and DeepSpeed's buffers of these runs are one constant of this table.
    overheads = Overheads(context=MEGATRON_BYTES) if megatron else Overheads()
    schedule = "interleaved_1f1b" if float(row["vp"]) > 1 else "1f1b"
    ranks = np.arange(float(row["pp"]))
    layers = np.ceil(float(row["layers"]) / float(row["pp"]))
    place = Place(
        layers,
        passes_in_flight(schedule, ranks, work.pp, work.stages_per_rank, work.micro_batches),
        first=ranks == 0,
        last=ranks == ranks[-1],
    )
    found = memory_terms(work, state, keeps, place, overheads)
    terms = {name: np.broadcast_to(size, ranks.shape) for name, size in found.items()}
    worst = int(np.argmax(sum(terms.values())))
    return {name: float(sizes[worst]) for name, sizes in terms.items()}
