"""Memory of one long sequence on four CPU processes with context parallelism, over one process.

A forward and a backward pass over one row of 32,768 tokens, a single document, through a Llama of two layers of width
64 with the head's loss in chunks. The closed form of what the forward pass keeps for the backward pass is the plain
model's in one process over the number of processes. Peak bytes are of all tensors that the two passes allocate; the
resident set's growth holds what torch's libraries allocate beside them.
``python -m benchmarks.memory.context_memory [tokens] [processes]``.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

from benchmarks.memory.axes_memory import activation_share
from benchmarks.processes import run_group
from benchmarks.support import finish

TOKENS, PROCESSES = 32768, 4
WARM_UP = 64
WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 2, 1024
KIB, MB = 1 << 10, 1e6


def measure(method: str, tokens: int) -> dict[str, float]:
    """Bytes of this process, and its part of the loss; ``method`` is ``ring``, ``ulysses`` or ``none``."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.config.schema import ModelConfig
    from mgpu_pipe.models.build import build_meta, materialise
    from mgpu_pipe.objectives.causal_lm import CausalLMObjective
    from mgpu_pipe.objectives.packed_text import packed_text
    from mgpu_pipe.parallel.context.attention import apply_context_parallel, context_of
    from mgpu_pipe.parallel.device_memory import AllocationWatch

    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": tokens,
    }
    model: Any = materialise(build_meta(ModelConfig(name="long", type="llama", config=config)), 1, "cpu")
    if method != "none":
        apply_context_parallel(model, dist.group.WORLD, method, packed_text())  # type: ignore[arg-type]
    objective = CausalLMObjective(model, None, lambda step: 1.0, "auto")
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens)[None]}
    with context_of(model, {name: value[:, :WARM_UP] for name, value in batch.items()}) as part:
        objective.micro_batch_loss(part).backward()  # what is made once: libraries' buffers, gradients
    before = resident_bytes()
    dist.barrier()
    with AllocationWatch() as watch:
        with context_of(model, batch) as part:
            loss = objective.micro_batch_loss(part)
        kept = watch.live_bytes()
        loss.backward(torch.full_like(loss, 1 / tokens))
    grown = highest_resident_bytes() - before
    return {"kept": kept, "peak": watch.peak, "resident": grown, "loss": float(loss.detach())}


def resident_bytes() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def highest_resident_bytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def main() -> None:
    given = [int(text) for text in sys.argv[1:]]
    tokens, processes = [*given, *(TOKENS, PROCESSES)[len(given) :]]
    (alone,) = run_group(1, measure, "none", tokens)
    rows = [["one process", 1, alone["kept"] / MB, 1.0, alone["peak"] / MB, 1.0, alone["resident"] / MB, 1.0]]
    for method in ("ring", "ulysses"):
        ranks = run_group(processes, measure, method, tokens)
        shared = sum(rank["loss"] for rank in ranks)
        if abs(shared / alone["loss"] - 1) > 1e-5:
            raise SystemExit(f"{method}: a loss of {shared}, where one process has {alone['loss']}")
        worst = {name: max(rank[name] for rank in ranks) for name in ("kept", "peak", "resident")}
        rows.append(
            [
                method,
                processes,
                worst["kept"] / MB,
                worst["kept"] / activation_share(alone["kept"], 0, cp=processes),
                worst["peak"] / MB,
                worst["peak"] / alone["peak"],
                worst["resident"] / MB,
                worst["resident"] / alone["resident"],
            ]
        )
    out = finish(
        "context_memory",
        f"Memory of one sequence of {tokens:,} tokens",
        [
            "method",
            "processes",
            "kept MB",
            "kept / closed form",
            "peak MB",
            "peak / one process",
            "resident MB",
            "resident / one process",
        ],
        rows,
        "Kept: tensors that the forward pass leaves for the backward pass, over the plain model's in one process "
        "divided by the processes. Peak: all tensors of both passes. Resident: growth of the resident set. "
        "The worst process of each group.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
