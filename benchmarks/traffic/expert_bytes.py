"""Collectives of a training step under expert parallelism, by name, over the closed form.

A tiny Mixtral trains one step of two micro-batches on 2 and 4 CPU processes, its experts over all of them; everything
else is replicated (reducing its gradients is data parallelism's, see data_parallel_bytes). Bytes are those that all
processes together send to others. In a layer and micro-batch: counts, 8 bytes for each expert on another process from
each process; then four times (tokens and outputs, and their gradients) 4 bytes times the width for each slot whose
expert is on another process. How many those are is decided by the routers: the closed form takes their decisions from
one process that computes the same step. No other collective may appear.
``python -m benchmarks.traffic.expert_bytes [sizes]``.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish
from benchmarks.traffic.closed_forms import expert_traffic

MICRO_BATCHES, ROWS, LENGTH = 2, 4, 64
CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": LENGTH,
}
SEED = 3


def measure() -> dict[str, dict[str, int]]:
    """Calls and bytes sent by this process, by the function that sends; and what one process would have to send."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.models.build import build_meta, materialise, materialise_buffers, recipe_of
    from mgpu_pipe.models.local_shards import fill_parameters, layouts_of
    from mgpu_pipe.parallel.expert.experts import apply_expert_parallel

    world, rank = dist.get_world_size(), dist.get_rank()
    whole = materialise(build_meta(_model()), SEED, "cpu")
    expected = _slots_elsewhere(whole, world)[rank]
    model = build_meta(_model())
    apply_expert_parallel(model, dist.group.WORLD)  # type: ignore[arg-type]
    layouts, values = layouts_of(model), dict(whole.named_parameters())

    def own(name: str, _: object) -> torch.Tensor:
        layout = layouts.get(name)
        return values[name] if layout is None else values[name][slice(*layout.ranges[0])]

    fill_parameters(model, own, "cpu")
    materialise_buffers(model, recipe_of(model), "cpu")
    counter = _counting_mode()
    with counter:
        for number in range(MICRO_BATCHES):
            ids = _tokens(rank, number)
            model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    return {"calls": dict(counter.calls), "sent": dict(counter.sent), "elsewhere": {"slots": expected}}


def _model() -> Any:
    from mgpu_pipe.config.schema import ModelConfig

    return ModelConfig(name="mixtral", type="mixtral", config=CONFIG)


def _tokens(rank: int, number: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(0, CONFIG["vocab_size"], (ROWS, LENGTH), generator=generator)


def _slots_elsewhere(model: Any, world: int) -> list[int]:
    """For each process, the slots of its tokens, over layers and micro-batches, whose experts another one holds."""
    import torch

    each, found = CONFIG["num_local_experts"] // world, []
    chosen: list[torch.Tensor] = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        for rank in range(world):
            chosen.clear()
            for number in range(MICRO_BATCHES):
                model(input_ids=_tokens(rank, number), use_cache=False)
            found.append(sum(int((one // each != rank).sum()) for one in chosen))
    for handle in handles:
        handle.remove()
    return found


def _counting_mode() -> Any:
    """Counts every collective under the name of the function of ``mgpu_pipe`` that calls it."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Counter[str] = Counter()
            self.sent: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                name, rank = _caller(), dist.get_rank()
                self.calls[name] += 1
                assert func._schema.name == "c10d::alltoall_base_", func
                _, source, _, _, splits = args[:5]
                rows = source.shape[0]
                splits = splits or [rows // dist.get_world_size()] * dist.get_world_size()
                self.sent[name] += source.nbytes * (rows - splits[rank]) // rows if rows else 0
            return func(*args, **(kwargs or {}))

    return Mode()


def _caller() -> str:
    """The innermost public function of ``mgpu_pipe`` on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        here = "mgpu_pipe" in Path(frame.f_code.co_filename).parts
        if here and not frame.f_code.co_name.startswith("_"):
            return frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return "no name"


def main() -> None:
    sizes = [int(text) for text in sys.argv[1:]] or [2, 4]
    rows = []
    for world in sizes:
        ranks = run_group(world, measure)
        sent: Counter[str] = Counter()
        for rank in ranks:
            sent.update(rank["sent"])
        elsewhere = sum(rank["elsewhere"]["slots"] for rank in ranks)
        passes = CONFIG["num_hidden_layers"] * MICRO_BATCHES
        expected = expert_traffic(passes, CONFIG["num_local_experts"], CONFIG["hidden_size"], world, elsewhere)
        for name in sorted({*expected, *sent}):
            calls, ideal = expected.get(name, (0, 0))
            counted = {rank["calls"].get(name, 0) for rank in ranks}
            if counted != {calls} or sent[name] != ideal:
                print(f"{world} processes: {name} differs from the closed form", file=sys.stderr)
            ratio = sent[name] / ideal if ideal else float("inf")
            rows.append([world, name, max(counted), calls, sent[name], ideal, ratio])
    out = finish(
        "expert_bytes",
        "Collectives of a step under expert parallelism, over the closed form",
        ["processes", "collective", "calls", "closed form calls", "sent bytes", "closed form bytes", "ratio"],
        rows,
        f"Mixtral, {CONFIG['num_hidden_layers']} layers, {MICRO_BATCHES} micro-batches; calls of one process.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
