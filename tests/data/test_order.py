"""The global order, and the balance of a step. Oracle: the same run in its order; the best of all ways to balance."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.cli.main import main
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.loader import train_step_batches
from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.prepare_data import prepare as prepare_any
from mgpu_pipe.data.samples import SampleSet, deal, imbalance
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.data.text.packed_dataset import PackedDataset
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.topology import BatchPlan
from tests.data.support import config
from tests.support.needs import need_digits
from tests.support.sampling import one_in


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 64, 65, 1000, 4097])
def test_each_epoch_is_a_permutation(size: int) -> None:
    order = GlobalOrder(3, size)
    for epoch in range(4):
        assert np.sort(order.indices(epoch * size, size)).tolist() == list(range(size))


def test_any_cut_of_the_run_gives_the_same_samples() -> None:
    whole = GlobalOrder(7, 101).indices(0, 1000)
    for cut in (1, 3, 32, 101, 333):
        pieces = [GlobalOrder(7, 101).indices(first, min(cut, 1000 - first)) for first in range(0, 1000, cut)]
        assert np.concatenate(pieces).tolist() == whole.tolist()


def test_epochs_and_seeds_differ_and_neighbours_are_scattered() -> None:
    first = GlobalOrder(0, 1000).indices(0, 1000)
    second = GlobalOrder(0, 1000).indices(1000, 1000)
    other = GlobalOrder(1, 1000).indices(0, 1000)
    # Two random permutations of n agree in one place on average; ten is beyond chance.
    assert (first == second).sum() < 10
    assert (first == other).sum() < 10
    assert (first == np.arange(1000)).sum() < 10
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.15


def test_every_place_is_about_equally_likely() -> None:
    # 40 samples, 2000 epochs: the first sample of an epoch is uniform (chi-squared, 39 degrees, p = 1e-4 at 79).
    drawn = [int(GlobalOrder(5, 40).indices(40 * epoch, 1)[0]) for epoch in range(2000)]
    counts = np.bincount(drawn, minlength=40)
    assert ((counts - 50) ** 2 / 50).sum() < 79


def test_large_cursors_and_seeds_work() -> None:
    order = GlobalOrder(2**63 - 1, 10**9)
    assert order.indices(10**15, 4).tolist() == order.indices(10**15 - 1, 5)[1:].tolist()
    assert ((order.indices(0, 1000) >= 0) & (order.indices(0, 1000) < 10**9)).all()


STEPS, SIZE = 12, 16
NUMBER = "number"


class Numbered:
    """Packed text, with what each sample counts as."""

    def __init__(self, text: SampleSet) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    def __getattr__(self, name: str) -> object:
        return getattr(self.text, name)

    def batch(self, indices: np.ndarray, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        return {**self.text.batch(indices, numbers), NUMBER: torch.from_numpy(numbers)}


class Unweighed:
    """Samples of which nobody knows what they cost."""

    def __len__(self) -> int:
        return 40


def run_of(folder: Path, **data: object) -> RunConfig:
    run = config(folder, source="synthetic", global_batch_size=SIZE, validation_max_samples=5, **data)
    run.data.synthetic = replace(run.data.synthetic, num_documents=400, mean_length=20)
    return run


def costs_of(batch: dict[str, torch.Tensor]) -> list[int]:
    """Pairs of tokens of one document, padding one too, of each row."""
    documents = (batch["position_ids"] == 0).cumsum(1)
    return [int((row[:, None] == row[None, :]).sum()) for row in documents]


def test_each_process_has_as_much_and_the_step_is_the_same(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    prepared, plan, totals = prepare(run), BatchPlan(SIZE, 4, 2), {}
    for balance in ("none", "cost"):
        run.data.balance = balance  # type: ignore[assignment]
        shares = [
            list(train_step_batches(run, prepared, plan, rank, 0, STEPS, lambda _, text: Numbered(text)))  # type: ignore[arg-type, return-value]
            for rank in range(4)
        ]
        totals[balance] = steps = []
        for step in range(STEPS):
            step_batches: list[StepBatch] = [share[step] for share in shares]
            assert {len(batch.micro_batches) for batch in step_batches} == {2}
            rows = [
                (row, number)
                for one in step_batches
                for batch in one.micro_batches
                for row, number in zip(batch["input_ids"].tolist(), batch[NUMBER].tolist(), strict=True)
            ]
            facts = {
                (one.step, one.first_sample, one.loss_denominator, one.num_tokens, one.padding) for one in step_batches
            }
            costs = [[costs_of(batch) for batch in one.micro_batches] for one in step_batches]
            steps.append((sorted(rows), facts, np.array(costs)))
    for (rows, facts, costs), (dealt_rows, dealt_facts, dealt_costs) in zip(
        totals["none"], totals["cost"], strict=True
    ):
        assert (rows, facts) == (dealt_rows, dealt_facts)
        assert len(facts) == 1
        assert sorted(costs.ravel()) == sorted(dealt_costs.ravel())
        assert imbalance(dealt_costs.ravel(), plan) <= imbalance(costs.ravel(), plan)
        by_micro_batch = dealt_costs.sum(2)
        assert (by_micro_batch[:, 0] >= by_micro_batch[:, 1]).all(), "the costliest first"
    means = {name: np.mean([imbalance(costs.ravel(), plan) for *_, costs in steps]) for name, steps in totals.items()}
    assert means["cost"] - 1 < 0.2 * (means["none"] - 1)


def test_costs_are_pairs_of_tokens_of_a_document(tmp_path: Path) -> None:
    for packing in ("best_fit", "none"):
        dataset = PackedDataset.open(prepare(run_of(tmp_path, packing=packing)), "train")
        chosen = np.random.default_rng(0).permutation(len(dataset))[:50]
        assert dataset.costs(chosen).tolist() == costs_of(dataset.batch(chosen))


def test_it_is_near_the_best_way_to_deal() -> None:
    plan, random = BatchPlan(6, 3, 1), np.random.default_rng(0)
    for _ in range(20):
        costs = random.integers(1, 100, 6)
        order = deal(costs, plan)
        assert sorted(order.tolist()) == list(range(6))
        best = min(imbalance(costs[list(way)], plan) for way in permutations(range(6)))
        assert imbalance(costs[order], plan) <= 4 / 3 * best  # Graham's bound
    assert deal(np.full(6, 7), plan).tolist() == [0, 3, 1, 4, 2, 5]


def test_what_is_not_weighed_is_refused(tmp_path: Path) -> None:
    plain, _ = compose(["objective=image_classification", "model=vit_tiny", "data=digits", "data.balance=cost"])
    with pytest.raises(ConfigErrors, match=r"data\.balance=cost: .*data\.source=digits .*; use none"):
        preflight(plain)
    run = run_of(tmp_path, balance="cost")
    prepared = prepare(run)
    with pytest.raises(ConfigError, match=r"^data\.balance=cost: the cost of a sample of Unweighed is unknown"):
        train_step_batches(run, prepared, BatchPlan(SIZE, 1, 1), 0, 0, 1, lambda *_: Unweighed())  # type: ignore[arg-type, return-value]


def test_the_preview_shows_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    words = ["data", "model=llama_tiny", "data=synthetic", "data.seq_len=64", "trainer.accelerator=cpu"]
    shown = []
    for devices in (1, 4):
        assert main([*words, "strategy=ddp", f"trainer.devices={devices}", "--samples", "1"]) == 0
        shown.append(" ".join(capsys.readouterr().out.split()))
    said = r" balance attention of the busiest of 4 processes over .*: (\S+); with data.balance=cost (\S+) "
    assert " balance " not in shown[0]
    told = re.search(said, shown[1])
    assert told is not None, shown[1]
    assert 1 <= float(told[2]) < float(told[1])


@pytest.mark.slow
@pytest.mark.parametrize("packing", one_in(2, ["best_fit", "none"]))
def test_pictures_are_dealt_too_and_the_step_is_the_same(tmp_path: Path, packing: str) -> None:
    need_digits()
    words = ["objective=vision_language", "model=llava_tiny", "data=digit_questions", f"data.cache_dir={tmp_path}"]
    sizes = ["data.global_batch_size=16", f"data.packing={packing}", "data.shift=0"]
    plan, found = BatchPlan(16, 4, 2), []
    for balance in ("none", "cost"):
        run = compose([*words, *sizes, f"data.balance={balance}"])[0]
        preflight(run)
        prepared = prepare_any(run)
        steps = [next(iter(train_step_batches(run, prepared, plan, rank, 0, 1))) for rank in range(4)]
        shares = [[int(one["pictures"].sum()) for one in step.micro_batches] for step in steps]
        rows = [row for step in steps for one in step.micro_batches for row in one["input_ids"].tolist()]
        found.append((sorted(rows), max(map(sum, shares)) - min(map(sum, shares))))
    assert found[0][0] == found[1][0] and found[1][1] < found[0][1]
