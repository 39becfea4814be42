"""The formulas' memory beside that of traced steps, layout by layout, on the CPU.

Of the first rank of each layout a step is traced on fake tensors (:mod:`mgpu_pipe.training.tracing.trace_rank`), whose
live bytes are those of real ones to the byte (``tests/planner/test_trace.py``).

``python -m benchmarks.accuracy.plan_memory`` writes ``results/plan_memory-cpu.json``.
"""

from __future__ import annotations

from multiprocessing import get_context

from benchmarks.support import finish
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.planning.memory import memory_by_rank
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.tracing.trace_rank import trace

MIB = 1 << 20
SHAPE = (
    "model=llama_small",
    "data.seq_len=256",
    "data.micro_batch_size=2",
    "precision=bf16",
    "trainer.accelerator=cpu",
)
ROWS_OF_A_PROCESS = 4
LAYOUTS = {
    "single": (1, ("strategy=single",)),
    "single, bf16_true": (1, ("strategy=single", "precision=bf16_true")),
    "ddp8": (8, ("strategy=ddp",)),
    "fsdp8": (8, ("strategy=fsdp",)),
    "fsdp8, recomputed": (8, ("strategy=fsdp", "strategy.activation_checkpointing=full")),
    "hsdp2x4": (8, ("strategy=hsdp", "strategy.dp_replicate=2")),
    "tp4 x dp2": (8, ("strategy=megatron", "strategy.tp=4")),
    "tp4 x dp2, sequence": (8, ("strategy=megatron", "strategy.tp=4", "strategy.sequence_parallel=true")),
    "cp8, ring": (8, ("strategy=megatron", "strategy.cp=8")),
    "pp2 x dp4": (8, ("strategy=megatron", "strategy.pp=2")),
}
COLUMNS = ("layout", "kept MiB", "formulas' kept MiB", "peak MiB", "formulas' peak MiB", "error of the peak %")


def compared(name: str) -> list[float]:
    """Kept and most bytes of a layout's rank 0, each traced and by the formulas, in a process that had no world before.

    Kept are weights and the optimizer's state.
    """
    ranks, words = LAYOUTS[name]
    whole = [*SHAPE, f"trainer.devices={ranks}", *words]
    dims = ParallelDims.resolve(compose(whole)[0].strategy, ranks)
    config = compose([*whole, f"data.global_batch_size={ROWS_OF_A_PROCESS * dims.data_parallel_size}"])[0]
    found, plan = trace(config, 0, ranks), memory_by_rank(config)
    assert plan is not None and plan.rank == 0
    kept = [sum(parts[part] for part in ("weights", "optimizer")) for parts in (found["parts"], plan.terms)]
    return [size / MIB for size in (*kept, max(found["peaks"].values()), plan.tensor_bytes)]


def main() -> None:
    rows = []
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name in LAYOUTS:
            sizes = pool.apply(compared, (name,))
            rows.append([name, *sizes, 100 * (sizes[3] / sizes[2] - 1)])
    notes = f"{' '.join(SHAPE)}, two micro-batches of each process; rank 0, on fake tensors"
    finish("plan_memory", "The formulas' memory beside traced steps", COLUMNS, rows, notes)


if __name__ == "__main__":
    main()
