"""The run's order of samples: a pure function of (seed, index), with one permutation an epoch.

A permutation of ``n`` samples is a keyed Feistel network over the smallest even power of two that holds ``n``.
It runs again until the result is below ``n`` (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). So every process computes any index alone, in constant memory, with the same result.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_FEISTEL_ROUNDS = 8
# More bits than tiny sets need: a Feistel network on two or four values reaches few of their permutations.
_MIN_HALF_BITS = 3
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), element by element, modulo 2**64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Order(Protocol):
    """Maps the run's sample ``i`` to a sample of the data set."""

    def indices(self, first: int, count: int) -> NDArray[np.int64]:
        """Data set indices, shape ``(count,)``, of the run's samples ``first .. first + count - 1``."""


class GlobalOrder:
    """Maps the run's sample ``i``, counted across epochs, to a sample of the data set.

    Args:
        seed: the run's seed; another seed gives another order.
        num_samples: size of the data set, at least 1.
    """

    def __init__(self, seed: int, num_samples: int) -> None:
        if num_samples < 1:
            raise ValueError("an order needs at least one sample")
        self.seed, self.num_samples = seed, num_samples
        bits = max((num_samples - 1).bit_length(), 1)
        self._half = max((bits + 1) // 2, _MIN_HALF_BITS)

    def indices(self, first: int, count: int) -> NDArray[np.int64]:
        return self.indices_of(np.arange(first, first + count))

    def indices_of(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Data set indices of the run's samples ``position``."""
        number = position.astype(np.uint64)
        size = np.uint64(self.num_samples)
        epoch = number // size
        value = number % size
        with np.errstate(over="ignore"):
            seed = _mix(np.array([self.seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN_RATIO)
            key = _mix(seed + (epoch + np.uint64(1)) * _GOLDEN_RATIO)
            value = self._permute(value, key)
            outside = np.flatnonzero(value >= size)
            while outside.size:
                value[outside] = self._permute(value[outside], key[outside])
                outside = outside[value[outside] >= size]
        return value.astype(np.int64)

    def _permute(self, value: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass of the network: a bijection of ``[0, 2**(2 * half))`` for each key."""
        half = np.uint64(self._half)
        mask = np.uint64((1 << self._half) - 1)
        left, right = value >> half, value & mask
        for number in range(_FEISTEL_ROUNDS):
            salt = key + np.uint64(number + 1) * _GOLDEN_RATIO
            left, right = right, left ^ (_mix(right ^ salt) & mask)
        return (left << half) | right


class SortedSteps:
    """Samples of ``order``, sorted by length within blocks of steps; a block's steps come in random order.

    Like ``order`` it is a pure function of the seed and the index; each epoch of ``order`` still has every sample.

    Args:
        lengths: of the data set's samples.
        step_samples: samples of an optimizer step.
        steps: steps that are sorted together.
    """

    def __init__(self, order: GlobalOrder, lengths: NDArray[np.int64], step_samples: int, steps: int) -> None:
        self._order, self._lengths, self._step_samples, self._steps = order, lengths, step_samples, steps
        self._places = GlobalOrder(order.seed, steps)

    def indices(self, first: int, count: int) -> NDArray[np.int64]:
        size = self._step_samples * self._steps
        begin, end = first // size, -(-(first + count) // size)
        ordered = np.concatenate([self._sort(block, size) for block in range(begin, end)])
        return ordered[first - begin * size :][:count]

    def _sort(self, block: int, size: int) -> NDArray[np.int64]:
        shuffled = self._order.indices(block * size, size)
        ranked = shuffled[np.argsort(self._lengths[shuffled], kind="stable")].reshape(self._steps, self._step_samples)
        return ranked[self._places.indices(block * self._steps, self._steps)].reshape(-1)
