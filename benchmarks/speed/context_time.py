"""Step time of ring attention on two CPU processes, over a ring written by hand for just this case.

The peer is an attention function of its own under the same model, loop and zigzag split: causal rows of one document,
as many key-value heads as heads, two ranks, nothing else. Blocks of steps alternate within the same processes.
``python -m benchmarks.speed.context_time``.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish

BLOCKS, STEPS, WARM_UP = 4, 6, 1
WORLD, TOKENS = 2, 2048
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": TOKENS,
}


def register_by_hand() -> None:
    """The peer's attention function, ``ring_by_hand``."""
    import torch
    import torch.distributed as dist
    from transformers import AttentionInterface

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def swap(tensor: Any) -> tuple[Any, list[Any]]:
        """The other rank's ``tensor``, on its way."""
        other, arriving = 1 - dist.get_rank(), torch.empty_like(tensor)
        return arriving, [dist.isend(tensor, other), dist.irecv(arriving, other)]

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, scale: float) -> Any:
            half = query.shape[2] // 2
            theirs, works = swap(torch.stack([key, value]))
            out, lse = forward(query, key, value, 0.0, True, scale=scale)
            for work in works:
                work.wait()
            if dist.get_rank() == 0:  # chunks 0 and 3: the late one sees both of the others
                rows, seen = slice(half, None), theirs
            else:  # chunks 1 and 2: both see the early one of the others
                rows, seen = slice(None), theirs[..., :half, :]
            part, part_lse = forward(query[:, :, rows], seen[0], seen[1], 0.0, False, scale=scale)
            both = torch.logaddexp(lse[:, :, rows], part_lse)
            out, lse = out.clone(), lse.clone()
            out[:, :, rows] = out[:, :, rows] * (lse[:, :, rows] - both).exp().unsqueeze(-1) + part * (
                part_lse - both
            ).exp().unsqueeze(-1)
            lse[:, :, rows] = both
            ctx.save_for_backward(query, key, value, out, lse)
            ctx.scale = scale
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            query, key, value, out, lse = ctx.saved_tensors
            half = query.shape[2] // 2
            theirs, works = swap(torch.stack([key, value]))
            grad_query, *own = backward(grad, query, key, value, out, lse, 0.0, True, scale=ctx.scale)
            for work in works:
                work.wait()
            rows, seen = (slice(half, None), slice(None)) if dist.get_rank() == 0 else (slice(None), slice(half))
            keys = theirs[..., seen, :]
            part_query, *part = backward(
                grad[:, :, rows],
                query[:, :, rows],
                keys[0],
                keys[1],
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                False,
                scale=ctx.scale,
            )
            grad_query[:, :, rows] += part_query
            sent = torch.zeros_like(theirs)
            sent[0][:, :, seen], sent[1][:, :, seen] = part
            arriving, works = swap(sent)
            for work in works:
                work.wait()
            return grad_query, own[0] + arriving[0], own[1] + arriving[1], None

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        return Ring.apply(query, key, value, scaling).transpose(1, 2).contiguous(), None

    AttentionInterface.register("ring_by_hand", attention)


def blocks(tokens: int) -> dict[str, list[float]]:
    """Seconds of every step after the warm-up of each block, by who did it; how far the first losses are apart."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.config.schema import ModelConfig
    from mgpu_pipe.models.build import build_meta, materialise
    from mgpu_pipe.objectives.packed_text import packed_text
    from mgpu_pipe.parallel.context.attention import apply_context_parallel, context_of

    register_by_hand()
    ids = torch.randint(0, MODEL["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens)[None]}
    models: dict[str, Any] = {}
    for name in ("ours", "by hand"):
        models[name] = materialise(build_meta(ModelConfig(name="m", type="llama", config=dict(MODEL))), 1, "cpu")
    apply_context_parallel(models["ours"], dist.group.WORLD, "ring", packed_text())  # type: ignore[arg-type]
    models["by hand"].config._attn_implementation = "ring_by_hand"
    optimizers = {name: torch.optim.AdamW(model.parameters(), fused=True) for name, model in models.items()}
    chunk, rank = tokens // (2 * WORLD), dist.get_rank()
    order = torch.cat([torch.arange(at * chunk, (at + 1) * chunk) for at in (rank, 2 * WORLD - 1 - rank)])

    def part_by_hand() -> dict[str, Any]:
        return {name: value[:, order] for name, value in batch.items()}

    def step(name: str) -> float:
        if name == "ours":
            with context_of(models[name], batch) as part:
                loss = loss_of(models[name], part)
        else:
            loss = loss_of(models[name], part_by_hand())
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in models[name].parameters()])
        dist.all_reduce(flat)
        at = 0
        for parameter in models[name].parameters():
            parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        optimizers[name].step()
        optimizers[name].zero_grad()
        return float(loss.detach())

    def loss_of(model: Any, part: dict[str, Any]) -> Any:
        logits = model(input_ids=part["input_ids"], position_ids=part["position_ids"], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[0], part["labels"][0], reduction="sum") / tokens

    found: dict[str, list[float]] = {"ours": [], "by hand": []}
    losses: dict[str, list[float]] = {"ours": [], "by hand": []}
    for _ in range(BLOCKS):
        for name in found:
            for number in range(STEPS):
                dist.barrier()
                mark = time.perf_counter()
                losses[name].append(step(name))
                if number >= WARM_UP:
                    found[name].append(time.perf_counter() - mark)
    # The first two: later ones drift apart with what AdamW makes of rounding.
    apart = max(abs(a / b - 1) for a, b in zip(losses["ours"][:2], losses["by hand"][:2], strict=True))
    return {**found, "apart": [apart]}


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else TOKENS
    by_rank = run_group(WORLD, blocks, tokens)
    found = by_rank[0]
    ours, by_hand = statistics.median(found["ours"]), statistics.median(found["by hand"])
    apart = max(rank["apart"][0] for rank in by_rank)
    out = finish(
        "context_time",
        "Step time of ring attention on two CPU processes, over a ring by hand",
        ["tokens", "mgpu_pipe ms", "by hand ms", "ratio", "losses apart"],
        [[tokens, ours * 1e3, by_hand * 1e3, ours / by_hand, apart]],
        f"Llama of {MODEL['num_hidden_layers']} layers of width {MODEL['hidden_size']}, one row, fp32, one thread a "
        f"process, gradients summed in one all-reduce, AdamW; medians of {BLOCKS * (STEPS - WARM_UP)} steps each, "
        f"blocks alternating.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
