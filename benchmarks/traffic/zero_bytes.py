"""Bytes that each process keeps, and sends in a step, over the closed forms of ZeRO.

``llama_small`` trains for two steps of two micro-batches on groups of 2, 4 and 8 CPU processes through the product's
own ``train``. The closed forms are :func:`mgpu_pipe.architectures.formulas.kept_memory.state_bytes`, with masters in
fp32 where weights are
bf16, and :func:`benchmarks.traffic.closed_forms.state_traffic`. Kept is the most between passes; ``in
update`` is while the optimizer runs, when of the gradients only this process's part is left.

``python -m benchmarks.traffic.zero_bytes [sizes]``.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish
from benchmarks.traffic.closed_forms import state_traffic
from benchmarks.traffic.data_parallel_bytes import MICRO_BATCHES, measure
from mgpu_pipe.architectures.formulas.kept_memory import ADAM_STATE, state_bytes

CASES = [(f"zero{stage}", precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")]


def measure_zero(cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    from benchmarks.traffic.update_watch import UpdateWatch  # the module that the callback's name leads to

    warnings.simplefilter("ignore", FutureWarning)  # torch renames the collectives that DeepSpeed calls
    found = []
    for case in cases:
        found += measure([case], "+callbacks.update._target_=benchmarks.traffic.update_watch.UpdateWatch")
        found[-1]["in update"] = UpdateWatch.most
    return found


def closed_forms(stage: int, precision: str, world: int, parameters: int) -> tuple[float, float, float]:
    """Bytes kept by a process between passes, and while the optimizer runs; and sent by it in a step."""
    weight, masters = (4, 0) if precision == "fp32" else (2, 4)
    # While the optimizer runs, ZeRO-1 too has only its part of the gradients left.
    kept, updating = (
        state_bytes(weight * parameters, parameters, world, sharded, optimizer=masters + ADAM_STATE).total
        for sharded in (stage, max(stage, 2))
    )
    return kept, updating, state_traffic(parameters, weight, world, stage=stage, micro_batches=MICRO_BATCHES)


def main() -> None:
    sizes = [int(text) for text in sys.argv[1:]] or [2, 4, 8]
    rows = []
    for world in sizes:
        by_rank = run_group(world, measure_zero, CASES)
        for number, (strategy, precision) in enumerate(CASES):
            ranks = [found[number] for found in by_rank]
            kept, updating = (max(rank[name] for rank in ranks) for name in ("kept", "in update"))
            sent = max(sum(rank["sent"].values()) for rank in ranks)
            ideal = closed_forms(int(strategy[-1]), precision, world, ranks[0]["parameters"])
            worst = max(ranks, key=lambda rank: sum(rank["sent"].values()))
            calls = ", ".join(
                f"{count} x {name} ({worst['sent'][name] / 1e6:.3g} MB)" for name, count in worst["calls"].items()
            )
            rows.append(
                [
                    world,
                    strategy,
                    precision,
                    kept / 1e6,
                    kept / ideal[0],
                    updating / ideal[1],
                    sent / 1e6,
                    sent / ideal[2],
                    calls,
                ]
            )
    out = finish(
        "zero_bytes",
        "ZeRO: bytes a process keeps and sends in a step, over the closed form",
        [
            "processes",
            "strategy",
            "precision",
            "kept MB",
            "kept ratio",
            "in update ratio",
            "sent MB",
            "sent ratio",
            "collectives",
        ],
        rows,
        f"llama_small, {MICRO_BATCHES} micro-batches a step; kept: weights, gradients, AdamW state; the worst process.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
