"""Evaluation, sampling, memory, sharding and death of a pipeline, on real processes. Oracle: one process."""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES, layer_costs
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.build import build_meta, materialise_buffers, recipe_of
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.local_shards import fill_parameters
from mgpu_pipe.parallel.fsdp import ShardingOptions, apply_fully_shard
from mgpu_pipe.parallel.pipeline.run_pipeline import Pipeline, PipelinePlan
from tests.parallel.pipeline_support import (
    CPU,
    build,
    expected,
    gradients_of,
    model_of,
    objective_of,
    whole_model,
    worst_error,
)
from tests.support.processes import _entry, preloaded, run_processes
from tests.support.sampling import one_in
from tests.support.tiny import SEQ_LEN, VOCABULARY, global_batch, step_batch

pytestmark = pytest.mark.slow

COUNTS = (0, 1, 5)


def micro_batches_of(count: int) -> list[dict[str, torch.Tensor]]:
    """Ragged: two rows each, the last of one row."""
    batch = global_batch(3, 2 * count) if count else {}
    found = [{name: value[2 * at : 2 * at + 2] for name, value in batch.items()} for at in range(count)]
    return [*found[:-1], {name: value[:1] for name, value in found[-1].items()}] if found else []


def evaluated(model_name: str, layers: int) -> dict[str, Any]:
    """Losses of evaluation step batches, and logits, by schedule; a training step batch between them."""
    result: dict[str, Any] = {}
    for schedule in SCHEDULES:
        model, pipeline = build(model_of(model_name, layers), schedule)
        losses = [float(pipeline.run_evaluation(micro_batches_of(count))) for count in COUNTS]
        one = step_batch(0, 0, 1, 1)
        trained = float(pipeline.run_step_batch(one.micro_batches, one.loss_denominator))
        after = [float(pipeline.run_evaluation(micro_batches_of(count))) for count in COUNTS]
        logits = torch.cat([pipeline.logits(micro_batches_of(1)[0], VOCABULARY, keep) for keep in (0, 1)], 1)
        graphs = [p.grad is not None for p in model.parameters()]
        result[schedule] = (pipeline.rank == pipeline.plan.last_rank, losses, after, trained, logits, all(graphs))
    return result


@pytest.mark.parametrize(("model_name", "layers", "ranks"), one_in(2, [("llama", 4, 2), ("gpt2", 8, 4)]))
def test_evaluation_and_logits_are_those_of_one_process(model_name: str, layers: int, ranks: int) -> None:
    whole = whole_model(model_of(model_name, layers))
    objective = objective_of(whole, 0)
    with torch.no_grad():
        losses0 = [sum(float(objective.micro_batch_loss(b)) for b in micro_batches_of(count)) for count in COUNTS]
        one = micro_batches_of(1)[0]
        inputs = {name: one[name] for name in ("input_ids", "position_ids")}
        logits0 = whole(**inputs, use_cache=False).logits
    logits0 = torch.cat([logits0, logits0[:, -1:]], 1)
    for result in run_processes(ranks, evaluated, model_name, layers):
        for is_last, losses, after, trained, logits, has_gradients in result.values():
            assert losses == after == pytest.approx(losses0 if is_last else [0.0] * 3, rel=1e-6)
            assert (trained > 0.0) == is_last and has_gradients
            assert torch.allclose(logits, logits0, rtol=1e-5, atol=1e-6)


class _Hold(torch.autograd.Function):
    """Keeps a token for as long as the micro-batch's graph is there."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, token: Any) -> torch.Tensor:
        ctx.token = token
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Token:
    pass


def most_alive(schedules: list[str]) -> dict[str, tuple[int, list[int]]]:
    """The most micro-batches whose graph was alive at once on this rank, and what the stages say of it."""
    result = {}
    for schedule in schedules:
        _, pipeline = build(model_of("llama", 8), schedule)
        alive: weakref.WeakSet[_Token] = weakref.WeakSet()
        most = 0

        def hold(_: Any, __: Any, output: torch.Tensor, alive: Any = alive) -> torch.Tensor:
            nonlocal most
            token = _Token()
            alive.add(token)
            held = _Hold.apply(output, token)
            del token
            most = max(most, len(alive))
            return held

        for view in pipeline.views.values():
            name = f"model.layers.{view.layers[0]}"
            view.model.get_submodule(name).register_forward_hook(hold)
        one = step_batch(0, 0, 1, 1)
        pipeline.run_step_batch(one.micro_batches, one.loss_denominator)
        buffers = [
            info.buffer
            for stage in pipeline.stages
            for by_chunk in (stage.args_recv_info, stage.grad_recv_info)
            for infos in by_chunk.values()
            for info in infos
        ]
        assert not any(buffer is not None and buffer.numel() for buffer in buffers)
        result[schedule] = (most, [stage.most_in_flight for stage in pipeline.stages])
    return result


def test_1f1b_holds_at_most_as_many_micro_batches_as_stages() -> None:
    found = run_processes(4, most_alive, ["1f1b", "gpipe"])
    assert [rank["1f1b"] for rank in found] == [(4, [4]), (3, [3]), (2, [2]), (1, [1])]
    assert [rank["gpipe"] for rank in found] == [(8, [8])] * 4


def sharded(model_name: str, layers: int, schedules: list[str]) -> dict[str, Any]:
    """pp2 x dp_shard2: this rank's loss and whole gradients."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    group, shard = mesh["pp"].get_group(), mesh["dp_shard"].get_local_rank()
    result = {}
    for schedule in schedules:
        model = model_of(model_name, layers)
        plan = PipelinePlan.make(schedule, 2, layer_costs(resolved_fields(model), SEQ_LEN))
        built = build_meta(model)
        objective = objective_of(built)
        views = plan.cut(built, dist.get_rank(group))
        apply_fully_shard(built, mesh["dp_shard"], "fp32", ShardingOptions(reshard_after_forward=False))
        values = dict(whole_model(model).named_parameters())

        def part(name: str, held: Any, values: Any = values) -> torch.Tensor:
            whole = values[name].detach()
            for dim, (start, length) in enumerate(zip(held.offsets, held.shape, strict=True)):
                whole = whole.narrow(dim, start, length)
            return whole.clone()

        fill_parameters(built, part, CPU)
        materialise_buffers(built, recipe_of(built), CPU)
        pipeline = Pipeline(plan, views, group, CPU, objective)
        one = step_batch(0, shard, 2, 1)
        losses = []
        for _ in range(2):  # gradients of two step batches are no sum: they are cleared in between
            for parameter in built.parameters():
                parameter.grad = None
            loss = pipeline.run_step_batch(one.micro_batches, one.loss_denominator)
            dist.all_reduce(loss)
            losses.append(float(loss) / one.loss_denominator)
            pipeline.reduce_tied_gradients()
        gradients = {
            name: (whole, owned, gradient.full_tensor())  # type: ignore[attr-defined]
            for name, (whole, owned, gradient) in gradients_of(built).items()
        }
        result[schedule] = {"losses": losses, "gradients": gradients, "shard": shard}
    return result


@pytest.mark.parametrize(
    ("model_name", "schedules"), one_in(2, [("gpt2", ["1f1b", "zbv"]), ("llama", ["1f1b", "dualpipev"])])
)
def test_stages_are_sharded_by_fsdp(model_name: str, schedules: list[str]) -> None:
    one = expected(model_of(model_name, 4))
    found = run_processes(4, sharded, model_name, 4, schedules)
    for schedule in schedules:
        for rank in found:
            assert rank[schedule]["losses"] == pytest.approx(one["losses"] * 2, rel=1e-5)
        for shard in (0, 1):
            parts = [rank[schedule]["gradients"] for rank in found if rank[schedule]["shard"] == shard]
            assert worst_error(parts, one["first"]) <= 1.0, schedule


TIMEOUT_S = 15


def dies_or_waits(schedule: str, folder: str) -> None:
    """Rank 1 is gone in its second step batch; the others note how long they took to notice, and how they did."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    _, pipeline = build(model_of("llama", 8), schedule)
    one = step_batch(0, 0, 1, 1)
    pipeline.run_step_batch(one.micro_batches, one.loss_denominator)
    if dist.get_rank() == 1:
        Path(folder, "died").touch()
        os._exit(9)
    try:
        pipeline.run_step_batch(one.micro_batches, one.loss_denominator)
    except RuntimeError as error:
        took = time.time() - Path(folder, "died").stat().st_mtime
        Path(folder, f"rank-{dist.get_rank()}").write_text(f"{took} {error}")
    os._exit(0)  # what torch's teardown waits for is gone


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_stage_that_dies_leaves_no_rank_waiting_for_longer_than_the_timeout(schedule: str) -> None:
    context = preloaded()
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=_entry,
                daemon=True,
                args=(rank, 4, str(Path(folder) / "store"), 240.0, dies_or_waits, (schedule, folder), sender),
            )
            for rank in range(4)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(240)
            assert [process.exitcode for process in processes] == [0, 9, 0, 0]
            for rank in (0, 2, 3):
                took, _, said = Path(folder, f"rank-{rank}").read_text().partition(" ")
                # The slack is for noticing, on a machine that does other things.
                assert float(took) < TIMEOUT_S + 30 and said
        finally:
            for process in processes:
                process.kill()
                process.join()
            receiver.close()
            sender.close()


def what_a_stage_raises(schedule: str) -> str:
    _, pipeline = build(model_of("llama", 4), schedule)

    def fail(*_: Any) -> torch.Tensor:
        raise MemoryError("the stage's own")

    pipeline._in_stage = fail
    one = step_batch(0, 0, 1, 1)
    try:
        pipeline.run_step_batch(one.micro_batches, one.loss_denominator)
    except MemoryError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_what_a_stage_raises_comes_as_it_is(schedule: str) -> None:
    assert run_processes(1, what_a_stage_raises, schedule, timeout_s=60.0) == ["the stage's own"]


def cut_by_hand() -> tuple[int, float]:
    model, pipeline = build(model_of("llama", 4), "1f1b", [3, 1])
    one = step_batch(0, 0, 1, 1)
    loss = float(pipeline.run_step_batch(one.micro_batches, one.loss_denominator))
    return len({name.split(".")[2] for name, _ in model.named_parameters() if ".layers." in name}), loss


def test_stages_by_hand_hold_what_was_said() -> None:
    one = step_batch(0, 0, 1, 1)
    objective = objective_of(whole_model(model_of("llama", 4)), 0)
    with torch.no_grad():
        expected = sum(float(objective.micro_batch_loss(batch)) for batch in one.micro_batches)
    assert run_processes(2, cut_by_hand) == [(3, 0.0), (1, pytest.approx(expected, rel=1e-6))]


def test_labels_that_count_nothing_give_a_loss_of_zero_and_no_gradient() -> None:
    for result in run_processes(2, unlabelled):
        assert result == (0.0, 0.0)


def unlabelled() -> tuple[float, float]:
    model, pipeline = build(model_of("gpt2", 4), "1f1b")
    one = step_batch(0, 0, 1, 2)
    batches = [{**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)} for batch in one.micro_batches]
    loss = float(pipeline.run_step_batch(batches, 1))
    pipeline.reduce_tied_gradients()
    return loss, max(float(gradient.abs().max()) for _, _, gradient in gradients_of(model).values())
