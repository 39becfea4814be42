"""Oracle: float64 norms of the whole, unsharded gradients; torch.amp.GradScaler's documented rule."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mgpu_pipe.optim.gradients import SMALLEST, LossScale, clip_gradients, gradient_norm
from tests.support.processes import run_processes

CPU = torch.device("cpu")


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1000, 37, generator=generator), torch.randn(7, generator=generator)]


def norm_of(values: list[torch.Tensor]) -> float:
    return float(torch.cat([v.double().flatten() for v in values]).norm())


def parameters_with(gradients: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    found = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        found.append(parameter)
    return found


def test_one_process_is_exact_where_float32_is_not():
    # The row-sparse gradient of an embedding is where float32 vector_norm is off by up to 2e-4.
    gradient = torch.zeros(4096, 256)
    gradient[:37] = torch.randn(37, 256, generator=torch.Generator().manual_seed(3))
    norm = gradient_norm(parameters_with([gradient]), CPU)
    assert norm.dtype == torch.float64
    assert abs(float(norm) / norm_of([gradient]) - 1) < 1e-12


def test_clipping_gives_the_largest_norm_and_leaves_small_ones_alone():
    parameters = parameters_with([t.clone() for t in tensors()])
    norm = float(gradient_norm(parameters, CPU))
    clip_gradients(parameters, norm, norm * 2)
    assert torch.equal(parameters[0].grad, tensors()[0])
    clip_gradients(parameters, norm, 0.5)
    assert abs(float(gradient_norm(parameters, CPU)) - 0.5) < 1e-6


def sharded_norm() -> tuple[float, float]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    whole = tensors()
    values = [
        distribute_tensor(whole[0], mesh, [Replicate(), Shard(0)]),
        distribute_tensor(whole[1], mesh, [Replicate(), Shard(0)]),
    ]
    extra = torch.full((5,), 2.0)
    parameters = parameters_with([*values, extra])
    norm = float(gradient_norm(parameters, CPU))
    clip_gradients(parameters, norm, 1.0)
    return norm, float(gradient_norm(parameters, CPU))


def test_shards_count_once_and_replicas_not_twice():
    expected = norm_of([*tensors(), torch.full((5,), 2.0)])
    for norm, clipped in run_processes(4, sharded_norm):
        assert abs(norm / expected - 1) < 1e-12
        assert abs(clipped - 1.0) < 1e-6


def test_the_rule_is_gradscalers() -> None:
    mine = LossScale(interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for finite in (True, False, True, True, True, True, False, False, True, True, True):
        theirs.scale(torch.zeros(1))
        parameter.grad = torch.tensor([1.0 if finite else float("inf")])
        theirs.step(optimizer)
        theirs.update()
        mine.update(finite)
        assert mine.value == theirs.get_scale()


def test_a_state_goes_on() -> None:
    scale = LossScale(interval=3)
    scale.update(True)
    scale.update(True)
    other = LossScale(interval=3)
    other.restore(scale.state())
    other.update(True)
    assert (other.value, other.updates) == (2.0**17, 0)


def test_it_ends_where_no_scale_helps() -> None:
    scale = LossScale(value=SMALLEST)
    with pytest.raises(OverflowError):
        scale.update(False)
