"""Oracle: one process over all samples."""

import torch
import torch.distributed as dist

from mgpu_pipe.parallel.ddp import GradientReducer, _cut
from tests.support.processes import run_processes


class Net(torch.nn.Module):
    """Two linear layers, one branch that only some samples take, and one that none takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 3)
        self.sometimes = torch.nn.Linear(8, 3)
        self.never = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.sometimes(hidden) if branch else self.second(hidden)


def samples() -> torch.Tensor:
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float32)


def reference() -> dict[str, torch.Tensor | None]:
    net = Net()
    data = samples()
    loss = net(data[:18], False).square().sum() + net(data[18:], True).square().sum()
    (loss / 24).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def reduced(micro_batches: int, bucket_mib: float, steps: int) -> list[dict[str, torch.Tensor | None]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    net = Net()
    reducer = GradientReducer(net.parameters(), bucket_mib)
    mine = samples()[rank * 24 // world : (rank + 1) * 24 // world]
    found = []
    for _ in range(steps):
        chunks = mine.chunk(micro_batches)
        for index, chunk in enumerate(chunks):
            reducer.start(index == len(chunks) - 1)
            branch = rank == world - 1  # the last quarter of the samples
            loss = net(chunk, branch).square().sum()
            loss.backward(torch.tensor(1 / 24))
        used = torch.tensor(reducer.finish(), dtype=torch.float32)
        dist.all_reduce(used)
        for index in torch.nonzero(used == 0).flatten().tolist():
            reducer.parameters[index].grad = None
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()})
        reducer.zero()
    return found


def check(results: list[list[dict[str, torch.Tensor | None]]]) -> None:
    expected = reference()
    for steps in results:
        for gradients in steps:
            for name, gradient in expected.items():
                if gradient is None:
                    assert gradients[name] is None, name
                else:
                    assert torch.allclose(gradients[name], gradient, rtol=1e-5, atol=1e-7), name
    for other in results[1:]:
        for step, first in zip(other, results[0], strict=True):
            assert all(first[n] is None or torch.equal(step[n], first[n]) for n in first)


def test_four_processes_sum_to_one_with_a_branch_that_one_rank_takes():
    check(run_processes(4, reduced, 1, 25.0, 2))


def test_one_parameter_a_bucket_and_accumulation_change_nothing():
    check(run_processes(4, reduced, 3, 1e-6, 2))


def test_buckets_respect_the_limit_and_the_order():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (10, 10, 30, 5)]
    assert [[p.numel() for p in run] for run in _cut(parameters, 100)] == [[10, 10], [30], [5]]
    mixed = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))]
    assert len(_cut(mixed, 1 << 20)) == 2
