"""Packing against slow implementations that place one piece at a time and one token at a time."""

from __future__ import annotations

import numpy as np
import pytest

from mgpu_pipe.data.text.heldout_split import document_hash, held_out
from mgpu_pipe.data.text.packing import best_fit, cut_documents, pack, valid_tokens


def _plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing, one piece after another over all bins: the contents of each bin."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [b for b in bins if sum(b) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            bins.append([length])
    return bins


@pytest.mark.parametrize("seed", range(12))
def test_grouped_best_fit_fills_bins_as_piece_by_piece_best_fit_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 40))
    lengths = rng.integers(1, capacity + 1, int(rng.integers(0, 200)))
    bins = best_fit(lengths, capacity)
    # Equally full bins are interchangeable, so the bins' contents may differ but not how full they are.
    filled = np.bincount(bins, weights=lengths).astype(int).tolist() if len(bins) else []
    assert sorted(filled) == sorted(sum(content) for content in _plain_best_fit(lengths.tolist(), capacity))


def _documents(seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(seed)
    seq_len = int(rng.integers(2, 30))
    lengths = rng.integers(1, 100, 60)
    gaps = rng.integers(0, 3, 60) * rng.integers(1, 50, 60)
    starts = np.cumsum(lengths + gaps) - lengths
    return starts, lengths, seq_len


@pytest.mark.parametrize("method", ["best_fit", "none"])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_but_a_lone_last_one_is_in_exactly_one_sample(seed: int, method: str) -> None:
    starts, lengths, seq_len = _documents(seed)
    packs = pack(starts, lengths, seq_len, method)
    found = sorted(
        position
        for start, length in zip(packs.pieces.start, packs.pieces.length, strict=True)
        for position in range(start, start + length)
    )
    expected = sorted(
        position
        for start, length in zip(starts, lengths, strict=True)
        for position in range(start, start + length - (length % seq_len == 1))
    )
    assert found == expected
    for sample in range(packs.num_samples):
        row = slice(packs.offsets[sample], packs.offsets[sample + 1])
        assert 0 < packs.pieces.length[row].sum() <= seq_len
        assert method == "best_fit" or row.stop - row.start == 1


def test_a_document_is_cut_only_where_it_is_longer_than_a_sample() -> None:
    pieces = cut_documents(np.array([0, 100, 110]), np.array([10, 4, 23]), 10)
    assert pieces.start.tolist() == [0, 100, 110, 120, 130]
    assert pieces.length.tolist() == [10, 4, 10, 10, 3]
    assert pieces.continues.tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("seed", range(4))
def test_valid_tokens_are_counted_as_a_loop_over_tokens_counts_them(seed: int) -> None:
    starts, lengths, seq_len = _documents(seed)
    mask = np.random.default_rng(seed).integers(0, 2, int(starts[-1] + lengths[-1])).astype(np.uint8)
    packs = pack(starts, lengths, seq_len, "best_fit")
    ends = {int(end) for end in starts + lengths}
    for loss_mask in (None, mask):
        expected = []
        for sample in range(packs.num_samples):
            count = 0
            for piece in range(packs.offsets[sample], packs.offsets[sample + 1]):
                start = packs.pieces.start[piece]
                for position in range(start, start + packs.pieces.length[piece]):
                    has_label = position + 1 not in ends
                    count += has_label and (loss_mask is None or bool(loss_mask[position + 1]))
            expected.append(count)
        assert valid_tokens(packs, loss_mask).tolist() == expected


def test_nothing_packs_into_nothing() -> None:
    none = np.zeros(0, np.int64)
    for method in ("best_fit", "none"):
        packs = pack(none, none, 8, method)
        assert packs.num_samples == 0
        assert valid_tokens(packs, None).tolist() == []


def test_log_normal_documents_fill_more_than_99_5_percent() -> None:
    rng = np.random.default_rng(0)
    lengths = np.maximum(np.exp(rng.normal(5.5, 1.0, 100_000)).astype(np.int64), 1)
    packs = pack(np.cumsum(lengths) - lengths, lengths, 1024, "best_fit")
    assert packs.pieces.length.sum() / (packs.num_samples * 1024) > 0.995


def test_the_held_out_share_is_exact_and_leaves_both_sides_a_document() -> None:
    hashes = np.array([document_hash(f"document {n}") for n in range(1000)], dtype=np.uint64)
    assert held_out(hashes, 0.05).sum() == 50
    assert held_out(hashes, 0.0).sum() == 0
    assert held_out(hashes[:2], 0.001).sum() == 1
    assert held_out(hashes[:2], 0.999).sum() == 1
    assert held_out(hashes[:1], 0.5).sum() == 0


def test_the_split_goes_by_content_not_by_place() -> None:
    hashes = np.array([document_hash(f"document {n}") for n in range(100)], dtype=np.uint64)
    mixed = np.random.default_rng(0).permutation(100)
    assert held_out(hashes, 0.1)[mixed].tolist() == held_out(hashes[mixed], 0.1).tolist()


def test_copies_of_a_document_stay_on_one_side() -> None:
    hashes = np.array([document_hash(f"document {n // 3}") for n in range(300)], dtype=np.uint64)
    for fraction in (0.05, 0.1, 0.31):
        chosen = held_out(hashes, fraction).reshape(100, 3)
        assert (chosen.all(axis=1) | ~chosen.any(axis=1)).all()
        assert 0 < chosen.sum() <= fraction * 300
    assert held_out(np.zeros(10, np.uint64), 0.2).sum() == 2
