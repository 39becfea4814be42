"""Step time of tensor and pipeline parallelism on two CPU processes, over loops written by hand with torch's means.

``tp`` against ``parallelize_module``: DTensor styles on attention, feed-forward, embeddings and head, one gathering of
inputs a module, and torch's loss over a cut vocabulary. ``pp`` against ``Schedule1F1B`` over two stages cut by hand,
whose loss is plain autograd. The same model, step batches and optimizer, in blocks that alternate within the same
processes; this project's through its own ``train`` with its CSV on. (The ring is in context_time.)
``python -m benchmarks.speed.axes_time [tp] [pp]``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish

BLOCKS, STEPS, WARM_UP = 4, 12, 3
WORLD = 2
MODEL, BATCH, MICRO_BATCHES = "llama_small", 8, {"tp": 1, "pp": 4}
PEERS = {"tp": "parallelize_module", "pp": "Schedule1F1B"}


def configured(axis: str) -> Any:
    from mgpu_pipe.config.hydra.compose import compose

    config, _ = compose(
        [
            f"model={MODEL}",
            f"strategy={axis}",
            f"trainer.devices={WORLD}",
            f"trainer.max_steps={STEPS}",
            f"data.global_batch_size={BATCH}",
            f"data.micro_batch_size={BATCH // MICRO_BATCHES[axis]}",
            "data.validation_fraction=0",
            "checkpoint=none",
            "logger=none",
            "trainer.progress=off",
            "precision=fp32",
            "scheduler=constant",
            *(["strategy.pipeline.schedule=1f1b", "strategy.pipeline.layers=[4,4]"] if axis == "pp" else []),
        ]
    )
    return config


def blocks(axis: str) -> dict[str, list[float]]:
    """Of both loops, seconds of every step after the warm-up of each block, and the last block's losses."""
    import torch.distributed as dist

    from mgpu_pipe.data.text.prepare_text import prepare

    config = configured(axis)
    prepared = prepare(config)
    found: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(BLOCKS):
        for name, block in (("plain", plain_block), ("ours", own_block)):
            dist.barrier()
            seconds, found[f"{name} losses"] = block(config, prepared, axis)
            found[name] += seconds[WARM_UP:]
    return found


def own_block(config: Any, prepared: Any, axis: str) -> tuple[list[float], list[float]]:
    import torch.distributed as dist

    from mgpu_pipe.config.freeze import freeze
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.runs.metrics_file import read_metrics
    from mgpu_pipe.training.train import train

    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        freeze(config, paths.config)
        train(config, paths, prepared)
        metrics = read_metrics(paths.metrics) if dist.get_rank() == 0 else {}
        return metrics.get("throughput/step_s", []), metrics.get("train/loss", [])


def plain_block(config: Any, prepared: Any, axis: str) -> tuple[list[float], list[float]]:
    """The loop by hand; rank 0 and rank 1 see the same samples."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.data.loader import train_step_batches
    from mgpu_pipe.models.build import build_meta, materialise
    from mgpu_pipe.topology import BatchPlan

    model: Any = materialise(build_meta(config.model), config.seed, "cpu")
    forward_backward = tensor_parallel(model) if axis == "tp" else pipeline_parallel(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.optimizer.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    micro_batch_size = BATCH // MICRO_BATCHES[axis]
    plan = BatchPlan(BATCH, 1, micro_batch_size)
    seconds, losses = [], []
    mark = time.perf_counter()
    for step_batch in train_step_batches(config, prepared, plan, 0, start_sample=0, max_steps=STEPS):
        whole = {
            name: torch.cat([batch[name] for batch in step_batch.micro_batches]) for name in step_batch.micro_batches[0]
        }
        loss = forward_backward(whole, step_batch.loss_denominator)
        clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        if axis == "pp":
            dist.broadcast(loss, 1)
        losses.append(float(loss))
        now = time.perf_counter()
        seconds.append(now - mark)
        mark = now
    return seconds, losses


def clip(parameters: list[Any]) -> None:
    """Clip gradients; beside DTensors, which are cut, plain ones are whole on every rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    cut = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
    whole = [p.grad for p in parameters if not isinstance(p.grad, DTensor)]
    of_one = torch.nn.utils.get_total_norm(cut or whole).square()
    dist.all_reduce(of_one)
    total = (of_one + torch.nn.utils.get_total_norm(whole).square() if cut else of_one).sqrt()
    for tensors in (cut, whole):
        if tensors:
            torch._foreach_mul_(tensors, torch.clamp(1.0 / (total + 1e-6), max=1.0))


def tensor_parallel(model: Any) -> Callable[[dict[str, Any], int], Any]:
    """Cut ``model`` by torch's styles; forward and backward of a step batch, which give its loss."""
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh, whole = init_device_mesh("cpu", (WORLD,)), (Replicate(),)
    # One gathering for all layers of a module; its inputs' gradients are then summed once, not once a layer.
    attention = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": whole[0]}, desired_input_kwarg_layouts={"hidden_states": whole[0]}
    )
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole[0]),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            "model.layers.*.self_attn": attention,
            "model.layers.*.mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
            **{f"model.layers.*.self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
            **{f"model.layers.*.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
            "model.layers.*.self_attn.o_proj": RowwiseParallel(),
            "model.layers.*.mlp.down_proj": RowwiseParallel(),
        },
    )

    def forward_backward(batch: dict[str, Any], loss_denominator: int) -> Any:
        with loss_parallel():
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / loss_denominator
            loss.backward()
        return loss.detach().full_tensor()  # type: ignore[attr-defined]

    return forward_backward


def pipeline_parallel(model: Any) -> Callable[[dict[str, Any], int], Any]:
    """Cut ``model`` in two; forward and backward of a step batch, which give its loss on rank 1."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from transformers.masking_utils import create_causal_mask

    rank, layers = dist.get_rank(), len(model.model.layers)
    base, head = model.model, model.lm_head
    half = layers // WORLD

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(base.layers[rank * half : (rank + 1) * half])
            self.rotary = base.rotary_emb
            self.embedding = base.embed_tokens if rank == 0 else None
            last = rank == WORLD - 1
            self.norm: Any = base.norm if last else None
            self.head: Any = head if last else None

        def forward(self, hidden: Any, position_ids: Any) -> Any:
            hidden = hidden if self.embedding is None else self.embedding(hidden)
            mask = create_causal_mask(base.config, hidden, None, None, position_ids=position_ids)
            rotary = self.rotary(hidden, position_ids)
            for layer in self.layers:
                hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=position_ids)
            return hidden if self.head is None else self.head(self.norm(hidden))

    module = Stage()
    kept = {id(p) for p in module.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in kept)
    count = [1]

    def loss_of(logits: Any, labels: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count[0]

    stage = PipelineStage(module, rank, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES["pp"], loss_fn=loss_of, scale_grads=False)

    def forward_backward(batch: dict[str, Any], loss_denominator: int) -> Any:
        count[0], losses = loss_denominator, list[Any]()
        if rank == 0:
            schedule.step(batch["input_ids"], position_ids=batch["position_ids"])
            return torch.zeros(())
        schedule.step(position_ids=batch["position_ids"], target=batch["labels"], losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum()

    return forward_backward


def main() -> None:
    from mgpu_pipe.data.text.prepare_text import prepare

    rows = []
    for axis in sys.argv[1:] or list(PEERS):
        prepare(configured(axis))  # by a worker pool, which the processes of a group cannot start
        found = run_group(WORLD, blocks, axis)[0]
        ours, plain = statistics.median(found["ours"]), statistics.median(found["plain"])
        pairs = zip(found["ours losses"], found["plain losses"], strict=True)
        apart = max(abs(a / b - 1) for a, b in pairs)
        rows.append([f"{axis}2", PEERS[axis], ours * 1e3, plain * 1e3, ours / plain, apart])
    out = finish(
        "axes_time",
        "Step time of model axes on two CPU processes, over a hand-written loop",
        ["axis", "peer", "mgpu_pipe ms", "peer ms", "ratio", "losses apart"],
        rows,
        f"{MODEL}, {BATCH} samples of 256 tokens a step, {MICRO_BATCHES['pp']} micro-batches under pp, fp32, one "
        f"thread a process; medians of {BLOCKS * (STEPS - WARM_UP)} steps each, blocks alternating.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
