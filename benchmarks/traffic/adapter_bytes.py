"""Collectives and bytes of a training step with adapters, by name, over the same step that trains all weights.

An adapter adds no collective to a layer on any axis: under tensor parallelism the low-rank product joins the partial
sum that is reduced anyway. What is sent of activations is at most the same, gradients shrink to those of the adapters,
and where weights are sharded the adapters are gathered beside them, in the same calls. Once a step, tensor-parallel
ranks sum the gradients of the matrices that each holds whole (A of a layer cut by its outputs, B of one cut by its
inputs), as they do for norms: :func:`whole_bytes`. DoRA also sums the squared lengths of rows that are cut. Counted as
in :mod:`benchmarks.traffic.axes_bytes`.

``python -m benchmarks.traffic.adapter_bytes``.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish
from benchmarks.traffic.axes_bytes import CASES, LAYERS, MODEL, Case, measure
from mgpu_pipe.architectures.formulas.kept_memory import all_reduced
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.models.fields import resolved_fields

KINDS = ("none", "lora", "dora")
RANK, WHOLE = 16, "replicated gradients summed"


def whole_bytes(case: Case) -> int:
    """What all processes send of the gradients of LoRA's matrices that tensor-parallel ranks hold whole."""
    if case.tp == 1:
        return 0
    fields = resolved_fields(compose([f"model={MODEL}"])[0].model)
    matrices = 7 * RANK * fields["hidden_size"] * LAYERS // case.pp  # q k v o gate up down
    return round(case.world * all_reduced(4 * matrices // (case.cp * case.dp_shard), case.tp))


def summed(by_rank: tuple[dict[str, Any], ...]) -> tuple[Counter[str], Counter[str]]:
    calls, sent = Counter[str](), Counter[str]()
    for counted in by_rank:
        calls.update(counted["calls"])
        sent.update(counted["sent"])
    return calls, sent


def main() -> None:
    rows, faults = [], []
    for world in sorted({case.world for case in CASES.values()}):
        cases = {
            (title, kind): replace(case, peft=kind)
            for title, case in CASES.items()
            if case.world == world
            for kind in KINDS
        }
        by_rank = run_group(world, measure, list(cases.values()))
        found = dict(zip(cases, zip(*by_rank, strict=True), strict=True))
        for title in dict.fromkeys(title for title, _ in cases):
            (calls, sent), *adapted = (summed(found[title, kind]) for kind in KINDS)
            for name in sorted({*calls, *adapted[0][0], *adapted[1][0]}):
                row: list[Any] = [title, name, calls[name], sent[name]]
                for other_calls, other_sent in adapted:
                    row += [other_calls[name], other_sent[name]]
                rows.append(row)
                added, size = adapted[0][0][name] - calls[name], adapted[0][1][name]
                if name == WHOLE:
                    if size != whole_bytes(CASES[title]):
                        faults.append(f"{title}: LoRA sends {size} bytes of {name}, not {whole_bytes(CASES[title])}")
                elif added > 0:
                    faults.append(f"{title}: LoRA adds {added} of {name}")
    out = finish(
        "adapter_bytes",
        "Collectives of a step with adapters",
        ["axes", "collective", "calls", "bytes", "LoRA calls", "LoRA bytes", "DoRA calls", "DoRA bytes"],
        rows,
        f"{MODEL}, fp32, rank 16 on all linear layers of the blocks; sums over all processes.",
    )
    print("\n".join([*faults, f"written: {out}"]), file=sys.stderr)
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
