"""The moving average of the weights under every strategy, from any to any. Oracle: torch's own AveragedModel beside the
plain loop, whose copy is made before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.optim.moving_average import EMA, WeightAverage
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.save_and_resume import restore_optimizer, restore_weights
from tests.support.plain_training import assembled, norm_of, plain, worst_error
from tests.support.processes import run_processes
from tests.support.training import Case, Outcome, batch_of, step_batch_of, trained
from tests.support.ways import WAYS

DECAY, HALF = 0.8, 3
BOUND = 1e-5
PAIRS = [("zero3 2", "tp 2"), ("fsdp 2", "pp 2")]
MORE = [
    ("ddp 2", "zero3 2"),
    ("single", "ddp 2"),
    ("tp 2", "zero1 2"),
    ("zero1 2", "cp 2"),
    ("pp 2", "zero3_cpu 2"),
    ("zero3_cpu 2", "fsdp 2"),
]


class Averaged(torch.optim.AdamW):
    """The plain loop's optimizer, with torch's average beside it."""

    made: Averaged

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], lr=3e-4, weight_decay=0.1, fused=True)
        self.model = model
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self.average.update_parameters(model)  # the first call copies
        Averaged.made = self

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.average.update_parameters(self.model)


def keeps(strategy: Any) -> None:
    strategy.average.decay, strategy.average.evaluated = DECAY, True


def first_half(case: Case, dims: ParallelDims, folder: str) -> None:
    def write(strategy: Any) -> None:
        config = Path(folder) / f"config-{dist.get_rank()}.yaml"
        config.write_text("seed: 5\n")
        shards = strategy.model_shards(), strategy.optimizer_shards()
        save(Path(folder), HALF, *shards, {"step": HALF}, config)

    trained(case, dims, on_start=keeps, on_end=write)


def second_half(case: Case, dims: ParallelDims, folder: str) -> tuple[Outcome, float]:
    """What a rank found, and the loss of the average that evaluation is of."""
    losses: list[float] = []

    def evaluate(strategy: Any) -> None:
        rank, size = dims.data_parallel_rank(dist.get_rank()), dims.data_parallel_size
        batch = step_batch_of(case, HALF, rank, size)
        with strategy.evaluated_weights():
            total = strategy.sum_over_data(strategy.run_evaluation(batch))
        losses.append(float(total.sum()) / batch.loss_denominator)

    def restore(strategy: Any) -> None:
        keeps(strategy)
        reader = CheckpointReader(Path(folder) / f"step-{HALF:08d}")
        restore_weights(reader, strategy)
        restore_optimizer(reader, strategy)

    outcome = trained(case, dims, first_step=HALF, on_start=restore, on_end=evaluate)
    return outcome, losses[0]


@torch.no_grad()
def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> float:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return float(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX))


def averages(results: list[Outcome]) -> dict[str, torch.Tensor]:
    found = assembled([[s for s in r.optimizer if s.tensor_slice.name.endswith(f"/{EMA}")] for r in results])
    return {name.removesuffix(f"/{EMA}"): value for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in MORE)]
)
def test_the_average_goes_from_any_strategy_to_any_as_one_process_has_it(one: str, other: str, tmp_path: Path) -> None:
    layers = 4
    (dims, more), (next_dims, next_more) = WAYS[one], WAYS[other]
    run_processes(dims.world_size, first_half, Case(steps=HALF, layers=layers, **more), dims, str(tmp_path))
    case = Case(steps=HALF, layers=layers, **next_more)
    by_rank = run_processes(next_dims.world_size, second_half, case, next_dims, str(tmp_path))
    results = [outcome for outcome, _ in by_rank]
    expected = plain(Case(steps=2 * HALF, layers=layers, by_hand=Averaged))
    expected["losses"], expected["norms"] = expected["losses"][HALF:], expected["norms"][HALF:]
    worst, where = worst_error(results, expected)
    assert worst <= 1, where
    wanted, found = dict(Averaged.made.average.module.named_parameters()), averages(results)
    assert found.keys() == wanted.keys()
    difference = norm_of([found[name] - value.detach() for name, value in wanted.items()])
    assert difference <= BOUND * norm_of(wanted.values())
    batch = batch_of(case, HALF)
    of_average, of_weights = (loss_of(model, batch) for model in (Averaged.made.average.module, Averaged.made.model))
    assert all(abs(loss / of_average - 1) < BOUND for _, loss in by_rank)
    assert abs(of_weights / of_average - 1) > 3 * BOUND, "evaluating the weights themselves would do"
    apart = norm_of([expected["weights"][name] - value.detach() for name, value in wanted.items()])
    assert apart > 10 * BOUND * norm_of(wanted.values()), "the weights themselves would not do"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp 2", pytest.param("zero3 2", marks=pytest.mark.exhaustive)])
def test_weights_that_few_steps_use_are_averaged_alike(way: str) -> None:
    dims, more = WAYS[way]
    case = Case(model="llama", branches=True, micro_batches=4, steps=HALF, **more)
    results = run_processes(dims.world_size, with_average, case, dims)
    plain(Case(model="llama", branches=True, steps=HALF, by_hand=Averaged))
    found, weights = averages(results), assembled([r.weights for r in results])
    wanted = dict(Averaged.made.average.module.named_parameters())
    both = {**weights, **found}  # what was never updated is its own average
    assert both.keys() == wanted.keys() and any("never" in name for name in both)
    assert norm_of([both[name] - value.detach() for name, value in wanted.items()]) <= BOUND * norm_of(wanted.values())


def with_average(case: Case, dims: ParallelDims) -> Outcome:
    return trained(case, dims, on_start=keeps)


def test_a_weight_of_few_digits_has_an_average_of_many() -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer, average = torch.optim.SGD([weight], lr=1.0), WeightAverage(0.999)
    for step in range(3):
        weight.grad = None if step == 1 else torch.full_like(weight, 0.5)
        with average.follow(optimizer):
            optimizer.step()
    kept = optimizer.state[weight][EMA]
    values, exact = [0.5, 0.5, 0.0], 1.0
    for value in values:
        exact = 0.999 * exact + 0.001 * value
    assert kept.dtype == torch.float32 and torch.allclose(kept, torch.full((3,), exact), rtol=1e-6)
