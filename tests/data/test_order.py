"""The global order: permutations, purity, dependence on the seed and the epoch."""

from __future__ import annotations

import numpy as np
import pytest

from mgpu_pipe.data.order import GlobalOrder


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
