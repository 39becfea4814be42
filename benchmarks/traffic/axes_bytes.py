"""Collectives and bytes of a training step on every axis alone and on two compositions, by name, over the closed form.

``llama_tiny`` trains for two steps through the product's own ``train``, fp32; the second is counted, on every process,
and has to be the closed form's exactly, call by call and byte by byte. (``ep`` is in expert_bytes.)

The closed form is :func:`benchmarks.traffic.closed_forms.axes_traffic`.

``python -m benchmarks.traffic.axes_bytes``.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish
from benchmarks.traffic.closed_forms import Collectives, Step, axes_traffic
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.topology import ParallelDims

ROWS, TOKENS, MICRO_BATCHES = 2, 32, 4
MODEL, LAYERS = "llama_tiny", 4


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp_shard: int = 1
    sequence_parallel: bool = False
    method: str = "ring"
    peft: str = "none"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp_shard

    def overrides(self) -> list[str]:
        return [
            "strategy=megatron",
            f"strategy.tp={self.tp}",
            f"strategy.pp={self.pp}",
            f"strategy.cp={self.cp}",
            f"strategy.sequence_parallel={str(self.sequence_parallel).lower()}",
            f"strategy.context.method={self.method}",
            f"peft={self.peft}",
            *([f"strategy.pipeline.layers={[LAYERS // self.pp] * self.pp}"] if self.pp > 1 else []),
        ]


CASES = {
    "tp2": Case(tp=2),
    "tp2, sequence": Case(tp=2, sequence_parallel=True),
    "pp2 1f1b": Case(pp=2),
    "cp2 ring": Case(cp=2),
    "cp2 ulysses": Case(cp=2, method="ulysses"),
    "pp2 x tp2 x dp_shard2": Case(pp=2, tp=2, dp_shard=2),
    "tp2 x cp2": Case(tp=2, cp=2),
}


def measure(cases: list[Case]) -> list[dict[str, Any]]:
    """For each case, calls and bytes sent by this process, by name, and its pipeline stage."""
    return [_measured(case) for case in cases]


def _measured(case: Case) -> dict[str, Any]:
    import torch.distributed as dist

    from benchmarks.traffic.named_collectives import NamedCounter
    from mgpu_pipe.config.freeze import freeze
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.data.text.prepare_text import prepare
    from mgpu_pipe.training.train import train

    config, _ = compose(
        [
            f"model={MODEL}",
            *case.overrides(),
            f"trainer.devices={case.world}",
            "trainer.max_steps=2",
            "precision=fp32",
            "data=synthetic",
            f"data.seq_len={TOKENS}",
            f"data.micro_batch_size={ROWS}",
            f"data.global_batch_size={ROWS * MICRO_BATCHES * case.dp_shard}",
            "data.validation_fraction=0",
            "checkpoint=none",
            "logger=none",
            "trainer.progress=off",
            "+callbacks.count._target_=benchmarks.traffic.named_collectives.NamedCounter",
        ]
    )
    prepared = prepare(config)
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        freeze(config, paths.config)
        train(config, paths, prepared)
    stage = ParallelDims.resolve(config.strategy, case.world).coordinates(dist.get_rank())["pp"]
    counted = NamedCounter.last
    return {"calls": dict(counted.calls), "sent": dict(counted.sent), "stage": stage}


def closed_form(case: Case, stage: int, fields: Mapping[str, Any]) -> Collectives:
    """Calls of a process of that stage, and the bytes that it sends, by name."""
    dims = ParallelDims(tp=case.tp, pp=case.pp, cp=case.cp, dp_shard=case.dp_shard)
    step = Step(MICRO_BATCHES, ROWS, TOKENS)
    return axes_traffic(fields, dims, step, stage, case.sequence_parallel, case.method)


def main() -> None:
    fields = resolved_fields(compose([f"model={MODEL}"])[0].model)
    rows, faults = [], []
    found: dict[str, tuple[dict[str, Any], ...]] = {}
    for world in sorted({case.world for case in CASES.values()}):
        titles = [title for title, case in CASES.items() if case.world == world]
        by_rank = run_group(world, measure, [CASES[title] for title in titles])
        found |= dict(zip(titles, zip(*by_rank, strict=True), strict=True))
    for title, case in CASES.items():
        calls, sent, ideal_calls, ideal_sent = (Counter[str]() for _ in range(4))
        for rank, counted in enumerate(found[title]):
            expected = closed_form(case, counted["stage"], fields)
            for name in {*expected, *counted["calls"]}:
                ideal = expected.get(name, (0, 0))
                if (counted["calls"].get(name, 0), counted["sent"].get(name, 0)) != ideal:
                    faults.append(f"{title}, process {rank}: {name} differs from the closed form")
            calls.update(counted["calls"])
            sent.update(counted["sent"])
            ideal_calls.update({name: number for name, (number, _) in expected.items()})
            ideal_sent.update({name: size for name, (_, size) in expected.items()})
        for name in sorted({*sent, *ideal_sent}):
            ratio = sent[name] / ideal_sent[name] if ideal_sent[name] else float("inf")
            rows.append([title, name, calls[name], ideal_calls[name], sent[name], ideal_sent[name], f"{ratio:.3f}"])
    out = finish(
        "axes_bytes",
        "Collectives of a step on every axis, over the closed form",
        ["axes", "collective", "calls", "closed form calls", "sent bytes", "closed form bytes", "ratio"],
        rows,
        f"{MODEL}, fp32, {MICRO_BATCHES} micro-batches of {ROWS} rows of {TOKENS} tokens a data-parallel process; "
        f"sums over all processes, each of which is compared by itself: {len(faults)} differences.",
    )
    print("\n".join([*faults, f"written: {out}"]), file=sys.stderr)
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
