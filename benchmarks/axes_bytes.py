"""Collectives and bytes of a training step on every axis alone and on two compositions, by name, over the closed form.

``llama_tiny`` trains for two steps through the product's own ``train``, fp32; the second is counted, on every process,
and has to be the closed form's exactly, call by call and byte by byte. (``ep`` is in expert_bytes.)

Of one process, with sizes ``tp cp pp`` and shards ``f = dp_shard * cp``; a step of M micro-batches of B rows of S
tokens, T = S / cp of them on a process; width W, head size d, H heads and K key-value heads, vocabulary V, L layers on
the process. Hidden states are X = 4BTW bytes. A ring all-reduce of Y bytes over n sends 2Y(n-1)/n, an all-gather,
a reduce-scatter or an all-to-all Y(n-1)/n. "First" and "last" are the pipeline's stages, one process being both.

* ``tp``, a micro-batch: all-reduces of X, one for the embeddings (first), four a layer (attention and feed-forward,
  forward and backward), one for the gradient of what enters the head (last); one all-gather a chunk of logits of two
  floats for each of its rows from every process, 8 BT tp bytes (last; one chunk here).
* with sequence parallelism, of X: all-gathers, six a layer (what enters attention and feed-forward, again for their
  weights' gradients, and the gradients of what they give), one before the head (last), one for the gradient of the
  embeddings (first); reduce-scatters, four a layer, one for the embeddings (first), one for the gradient of what
  enters the head (last). Once a step an all-reduce of the gradients of all 2L norms of W, and of the last one.
* ``pp``: M messages of X forward, but from the last stage, and M backward, but from the first.
* ``cp`` by the ring, with Z = 8BTdK/tp bytes of keys and values: a layer and micro-batch, (cp-1) messages of Z
  forward, and backward as many of keys and values and as many of their gradients.
* ``cp`` by Ulysses: a layer and micro-batch, an all-to-all of 4BTd(H+2K)/tp before attention and one of 4BTdH/tp after
  it, and the same backward.
* FSDP2 over f > 1 processes, with units that are the embeddings (first), each layer, norm and head together (last):
  without a pipeline every unit is gathered forward, and layers again backward, a micro-batch, and every unit's
  gradients are reduce-scattered a micro-batch. With a pipeline, which keeps weights and gradients whole for the length
  of a step batch, each once a step. Once a step an all-reduce of a float64 a parameter, whether it has a gradient.
* Once a step, over all processes: an all-reduce of the sum of losses and the stop flag, and one of the gradient's sum
  of squares, in float64.

``python -m benchmarks.axes_bytes``.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish

ROWS, TOKENS, MICRO_BATCHES = 2, 32, 4
WIDTH, HEADS, KEY_VALUE_HEADS, HEAD, INNER, VOCABULARY, LAYERS = 64, 8, 4, 8, 192, 1024, 4
"""Of ``llama_tiny``."""


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp_shard: int = 1
    sequence_parallel: bool = False
    method: str = "ring"

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

    from benchmarks.named_collectives import NamedCounter
    from mgpu_pipe.config.compose import compose
    from mgpu_pipe.config.freeze import freeze
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.data.text.prepare import prepare
    from mgpu_pipe.topology import ParallelDims
    from mgpu_pipe.training.run import train

    config, _ = compose(
        [
            "model=llama_tiny",
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
            "+callbacks.count._target_=benchmarks.named_collectives.NamedCounter",
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


def closed_form(case: Case, stage: int) -> dict[str, tuple[int, float]]:
    """Calls of a process of that stage, and the bytes that it sends, by name."""
    from benchmarks.named_collectives import BACKWARD, FORWARD

    first, last = stage == 0, stage == case.pp - 1
    layers, tokens = LAYERS // case.pp, TOKENS // case.cp
    hidden = 4 * ROWS * tokens * WIDTH
    found: dict[str, tuple[int, float]] = {}

    def add(name: str, calls: int, whole: float, size: int, factor: int = 1) -> None:
        """``calls`` collectives of ``whole`` bytes in all over ``size`` processes; an all-reduce's factor is 2."""
        if calls:
            found[name] = calls, factor * whole * (size - 1) / size

    if case.tp > 1 and case.sequence_parallel:
        gathers = MICRO_BATCHES * (6 * layers + first + last)
        scatters = MICRO_BATCHES * (4 * layers + first + last)
        add("sequence gathered", gathers, gathers * hidden, case.tp)
        add("sequence reduce-scattered", scatters, scatters * hidden, case.tp)
        add("replicated gradients summed", 1, 4 * WIDTH * (2 * layers + last), case.tp, 2)
    elif case.tp > 1:
        sums = MICRO_BATCHES * (4 * layers + first + last)
        add("activations summed", sums, sums * hidden, case.tp, 2)
    if case.tp > 1 and last:
        add("softmax of the vocabulary gathered", MICRO_BATCHES, MICRO_BATCHES * 8 * ROWS * tokens * case.tp, case.tp)
    if case.pp > 1:
        found |= {} if last else {FORWARD: (MICRO_BATCHES, MICRO_BATCHES * hidden)}
        found |= {} if first else {BACKWARD: (MICRO_BATCHES, MICRO_BATCHES * hidden)}
    passes, of_a_head = MICRO_BATCHES * layers, 4 * ROWS * tokens * HEAD // case.tp
    if case.cp > 1 and case.method == "ring":
        hops, sent = passes * (case.cp - 1), 2 * KEY_VALUE_HEADS * of_a_head
        found["keys and values passed"] = 2 * hops, 2 * hops * sent
        found["their gradients passed"] = hops, hops * sent
    elif case.cp > 1:
        both = passes * of_a_head * (2 * HEADS + 2 * KEY_VALUE_HEADS)
        add("sequence to heads", 2 * passes, both, case.cp)
        add("heads to sequence", 2 * passes, both, case.cp)
    shards = case.dp_shard * case.cp
    if shards > 1:
        layer = (2 * (HEADS + KEY_VALUE_HEADS) * HEAD * WIDTH + 3 * WIDTH * INNER) // case.tp + 2 * WIDTH
        ends = (first + last) * VOCABULARY * WIDTH // case.tp + last * WIDTH
        times, again = (1, 0) if case.pp > 1 else (MICRO_BATCHES, layers)
        units = layers + first + last
        add("weights gathered", times * (units + again), times * 4 * ((layers + again) * layer + ends), shards)
        add("gradients reduce-scattered", times * units, times * 4 * (layers * layer + ends), shards)
        add("used gradients", 1, 8 * (9 * layers + first + 2 * last), shards, 2)
    add("loss and stop flag", 1, 16, case.world, 2)
    add("gradient norm", 1, 8, case.world, 2)
    return found


def main() -> None:
    rows, faults = [], []
    found: dict[str, tuple[dict[str, Any], ...]] = {}
    for world in sorted({case.world for case in CASES.values()}):
        titles = [title for title, case in CASES.items() if case.world == world]
        by_rank = run_group(world, measure, [CASES[title] for title in titles])
        found |= dict(zip(titles, zip(*by_rank, strict=True), strict=True))
    for title, case in CASES.items():
        calls, sent, ideal_calls, ideal_sent = (Counter[str]() for _ in range(4))
        for rank, counted in enumerate(found[title]):
            expected = closed_form(case, counted["stage"])
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
        f"llama_tiny, fp32, {MICRO_BATCHES} micro-batches of {ROWS} rows of {TOKENS} tokens a data-parallel process; "
        f"sums over all processes, each of which is compared by itself: {len(faults)} differences.",
    )
    print("\n".join([*faults, f"written: {out}"]), file=sys.stderr)
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
