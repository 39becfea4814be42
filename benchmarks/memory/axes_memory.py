"""Live activation bytes of a process on each axis, over the closed form.

Tensor, sequence and context parallelism: what the forward pass of one micro-batch leaves for its backward pass, of one
Llama block (the difference between models of two and four), over the block's bytes in one process and
:func:`activation_share`.

Pipeline: the most that a stage holds after any forward pass of a 1F1B step batch, gradients of weights aside, over
what the first one left times the most passes in flight. What comes on top are messages under way.
``python -m benchmarks.memory.axes_memory``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish
from mgpu_pipe.architectures.formulas.kept_memory import FP32
from mgpu_pipe.parallel.pipeline.work_order import most_in_flight, streams

ROWS, TOKENS, WIDTH, HEADS, VOCABULARY = 2, 256, 128, 8, 512
STAGES, MICRO_BATCHES = 4, 8
CASES = (
    ("tp", 2),
    ("tp", 4),
    ("tp, sequence", 2),
    ("tp, sequence", 4),
    ("cp ring", 2),
    ("cp ring", 4),
    ("cp ulysses", 2),
    ("cp ulysses", 4),
    ("tp2, sequence x cp2 ring", 4),
)
MB = 1e6


def activation_share(total: float, norms: float, tp: int = 1, cp: int = 1, sequence_parallel: bool = False) -> float:
    """This rank's part of ``total`` bytes of activations; without sequence parallelism it has all ``norms`` of them."""
    shared = 0.0 if sequence_parallel or tp == 1 else norms
    return ((total - shared) / tp + shared) / cp


def norm_bytes(tokens: int, width: int) -> int:
    """Bytes of fp32 activations of a layer's two norms: input, normalised and weighted values, root mean square."""
    return 2 * (3 * width + 1) * FP32 * tokens


def built(layers: int) -> Any:
    from mgpu_pipe.config.schema import ModelConfig
    from mgpu_pipe.models.build import build_meta

    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": TOKENS,
    }
    return build_meta(ModelConfig(name="memory", type="llama", config=config))


def fill(model: Any) -> None:
    import torch

    from mgpu_pipe.models.build import materialise_buffers, recipe_of
    from mgpu_pipe.models.local_shards import fill_parameters

    fill_parameters(model, lambda name, part: torch.full(part.shape, 0.01), torch.device("cpu"))
    materialise_buffers(model, recipe_of(model), torch.device("cpu"))


def micro_batch(rows: int = ROWS) -> dict[str, Any]:
    import torch

    ids = torch.arange(rows * TOKENS).view(rows, TOKENS) % VOCABULARY
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(TOKENS).expand(rows, -1)}


def block_bytes(axes: list[str]) -> list[float]:
    """What the forward pass leaves of one block on this process, for each of ``axes``."""
    return [_left(axis, 4) / 2 - _left(axis, 2) / 2 for axis in axes]


def _left(axis: str, layers: int) -> int:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from mgpu_pipe.objectives.causal_lm import CausalLMObjective
    from mgpu_pipe.objectives.packed_text import packed_text
    from mgpu_pipe.parallel.context.attention import apply_context_parallel, context_of
    from mgpu_pipe.parallel.device_memory import ForwardMeter
    from mgpu_pipe.parallel.tensor.apply import apply_tensor_parallel

    world = dist.get_world_size()
    cp = context_size(axis, world)
    mesh = init_device_mesh("cpu", (cp, world // cp), mesh_dim_names=("cp", "tp"))
    model = built(layers)
    objective = CausalLMObjective(model, None, lambda step: 1.0, "auto")
    if world > cp:
        apply_tensor_parallel(model, mesh["tp"].get_group(), sequence_parallel="sequence" in axis)
    if cp > 1:
        apply_context_parallel(model, mesh["cp"].get_group(), "ulysses" if "ulysses" in axis else "ring", packed_text())
    fill(model)
    with context_of(model, micro_batch()) as part, ForwardMeter(torch.device("cpu")) as meter:
        loss = objective.micro_batch_loss(part)
    left = meter.left_bytes()
    del loss
    return left


def context_size(axis: str, world: int) -> int:
    return 1 if "cp" not in axis else 2 if "x" in axis else world


def stage_bytes() -> tuple[int, int]:
    """What this stage holds after its first forward pass of a 1F1B step batch, and the most after any."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.objectives.causal_lm import CausalLMObjective
    from mgpu_pipe.parallel.device_memory import AllocationWatch, storage_bytes
    from mgpu_pipe.parallel.pipeline.run_pipeline import Pipeline, PipelinePlan

    model = built(2 * STAGES)
    objective = CausalLMObjective(model, None, lambda step: 1.0, "auto")
    layers = tuple(range(2 * stage, 2 * stage + 2) for stage in range(STAGES))
    plan = PipelinePlan("1f1b", layers, tuple((stage,) for stage in range(STAGES)))
    views = plan.cut(model, dist.get_rank())
    fill(model)
    watch, held = AllocationWatch(), list[int]()

    def counted(batch: Any, last: bool, scale: float, compute: Callable[[], Any]) -> Any:
        output = compute()
        gradients = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
        held.append(watch.live_bytes() - gradients)
        return output

    group = dist.group.WORLD
    assert group is not None
    pipeline = Pipeline(plan, views, group, torch.device("cpu"), objective, in_stage=counted)
    batches = [micro_batch() for _ in range(MICRO_BATCHES)]
    with watch:
        pipeline.run_step_batch(batches, ROWS * TOKENS * MICRO_BATCHES)
    return held[0], max(held)


def main() -> None:
    ((alone,),) = run_group(1, block_bytes, [""])
    norms = norm_bytes(ROWS * TOKENS, WIDTH)
    in_flight = [most_in_flight(stream) for stream in streams("1f1b", STAGES, MICRO_BATCHES)]
    rows = []
    for world in (2, 4):
        axes = [axis for axis, size in CASES if size == world]
        by_rank = run_group(world, block_bytes, axes)
        for number, axis in enumerate(axes):
            most = max(rank[number] for rank in by_rank)
            cp = context_size(axis, world)
            ideal = activation_share(alone, norms, world // cp, cp, sequence_parallel="sequence" in axis)
            rows.append([axis, world, "a block", most / MB, ideal / MB, most / ideal])
    for stage, (first, most) in enumerate(run_group(STAGES, stage_bytes)):
        count = in_flight[stage]
        rows.append(
            [
                "pp 1f1b",
                STAGES,
                f"stage {stage}: {count} micro-batches",
                most / MB,
                count * first / MB,
                most / (count * first),
            ]
        )
    out = finish(
        "axes_memory",
        "Live activation bytes of a process, over the closed form",
        ["axes", "processes", "of", "MB", "closed form MB", "ratio"],
        rows,
        f"Llama of width {WIDTH}, micro-batches of {ROWS} rows of {TOKENS} tokens, fp32; a block alone has "
        f"{alone / MB:.4g} MB in one process; {MICRO_BATCHES} micro-batches under pp. The worst process.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
