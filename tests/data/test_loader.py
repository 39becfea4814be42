"""Batches and step batches against slow implementations; the same samples whatever the number of processes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.speed import image_audio_loading
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.loader import evaluation_step_batches, train_step_batches
from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch
from mgpu_pipe.data.text.document_encoder import EncodedBatch
from mgpu_pipe.data.text.packed_dataset import PackedDataset
from mgpu_pipe.data.text.packing import pack, valid_tokens
from mgpu_pipe.data.text.prepare_text import PreparedData, prepare
from mgpu_pipe.data.text.token_store import TokenStore, write_tokens
from mgpu_pipe.topology import BatchPlan
from tests.data.support import config
from tests.support.needs import need_speech

PADDING = 60_000


def _dataset(tmp_path: Path, seed: int, method: str, masked: bool) -> tuple[PackedDataset, list[list[int]], np.ndarray]:
    """A data set in which every token is another number, so that a batch tells where its tokens come from."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, 40)
    total = int(lengths.sum())
    tokens = rng.permutation(50_000)[:total]
    mask = rng.integers(0, 2, total).astype(np.uint8)
    folder = tmp_path / f"{seed}-{method}-{masked}"
    folder.mkdir()
    batch = EncodedBatch(tokens.astype(np.uint16), lengths, np.arange(40, dtype=np.uint64), mask if masked else None, 1)
    write_tokens(folder, [batch], {"name": "test"}, 1, lambda *_: None)
    store = TokenStore.open(folder)
    seq_len = int(rng.integers(2, 25))
    packs = pack(store.offsets[:-1], np.diff(store.offsets), seq_len, method)
    dataset = PackedDataset(store, packs, valid_tokens(packs, store.loss_mask), seq_len, PADDING)
    documents = [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    learned = tokens[mask == 1] if masked else tokens
    return dataset, documents, learned


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("method", ["best_fit", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_labels_and_positions_are_those_of_the_documents(tmp_path: Path, seed: int, method: str, masked: bool) -> None:
    dataset, documents, learned_tokens = _dataset(tmp_path, seed, method, masked)
    following = {t: n for document in documents for t, n in pairwise(document)}
    place = {t: at for document in documents for at, t in enumerate(document)}
    learned = set(learned_tokens.tolist())
    samples = np.random.default_rng(seed).permutation(len(dataset))
    batch = dataset.batch(samples)
    labels_seen = []
    for row, sample in enumerate(samples):
        ids, labels, positions = (batch[name][row].tolist() for name in ("input_ids", "labels", "position_ids"))
        assert positions[0] == 0
        for at, token in enumerate(ids):
            new = positions[at] == 0
            assert new or positions[at] == positions[at - 1] + 1
            if token == PADDING:
                assert new == (at == 0 or ids[at - 1] != PADDING)
                assert labels[at] == IGNORE_INDEX
                continue
            assert new or following[ids[at - 1]] == token
            # A piece begins at a multiple of the sample's length in its document.
            assert place[token] % dataset.seq_len == positions[at]
            expected = following.get(token, IGNORE_INDEX)
            assert labels[at] == (expected if expected in learned else IGNORE_INDEX)
        valid = [label for label in labels if label != IGNORE_INDEX]
        assert dataset.valid_tokens[sample] == len(valid)
        labels_seen += valid
    # Every token that follows another one in its document is learned once an epoch, also across cuts.
    assert sorted(labels_seen) == sorted(t for t in following.values() if t in learned)


def test_batches_are_int64_of_one_shape(tmp_path: Path) -> None:
    dataset, _, _ = _dataset(tmp_path, 0, "best_fit", False)
    for tensor in dataset.batch(np.array([2, 0, 2])).values():
        assert tensor.dtype == torch.int64
        assert tensor.shape == (3, dataset.seq_len)
    assert torch.equal(dataset.batch(np.array([2, 0, 2]))["input_ids"][0], dataset.batch(np.array([2]))["input_ids"][0])


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, PreparedData]:
    run = config(tmp_path_factory.mktemp("data"), source="synthetic", validation_max_samples=13, global_batch_size=8)
    run.data.synthetic = replace(run.data.synthetic, num_documents=300, mean_length=20)
    run.data.validation_fraction = 0.2
    return run, prepare(run)


def _together(step_batches: list[StepBatch], name: str = "input_ids") -> torch.Tensor:
    return torch.cat([batch[name] for step_batch in step_batches for batch in step_batch.micro_batches])


def _padding(dataset: PackedDataset, batch: dict[str, torch.Tensor]) -> int:
    """Positions behind the last document, which ends in its end-of-sequence token; padding is that token too."""
    padding = 0
    for labels, ids in zip(batch["labels"], batch["input_ids"], strict=True):
        held = torch.nonzero(labels != IGNORE_INDEX)[-1, 0] + 1  # the last position with a label, and the one after it
        full = bool(labels[-1] != IGNORE_INDEX)
        assert full or bool((ids[held:] == dataset.padding_token_id).all())
        padding += 0 if full else len(labels) - int(held) - 1
    return padding


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (2, 1), (4, 2), (8, 1)])
def test_a_step_is_the_same_samples_for_any_number_of_processes(
    synthetic: tuple[RunConfig, PreparedData], ranks: int, micro: int
) -> None:
    run, prepared = synthetic
    dataset = PackedDataset.open(prepared, "train")
    order = GlobalOrder(run.seed, len(dataset))
    # More steps than an epoch has, so that a step crosses its border.
    steps = 2 * len(dataset) // 8 + 2
    plan = BatchPlan(8, ranks, micro)
    shares = [list(train_step_batches(run, prepared, plan, rank, 0, steps)) for rank in range(ranks)]
    assert [len(share) for share in shares] == [steps] * ranks
    for step in range(steps):
        step_batches = [share[step] for share in shares]
        expected = dataset.batch(order.indices(8 * step, 8))
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(_together(step_batches, name), expected[name])
        loss_denominator = int((expected["labels"] != IGNORE_INDEX).sum())
        for step_batch in step_batches:
            assert (step_batch.step, step_batch.first_sample, step_batch.num_samples) == (step, 8 * step, 8)
            assert step_batch.loss_denominator == loss_denominator
            # Padding is the run behind the last document: it alone has no label from its second position on.
            assert (step_batch.num_tokens, step_batch.padding) == (8 * dataset.seq_len, _padding(dataset, expected))
            assert [len(batch["labels"]) for batch in step_batch.micro_batches] == [micro] * (8 // ranks // micro)


def test_a_cursor_goes_on_with_exactly_the_next_sample(synthetic: tuple[RunConfig, PreparedData]) -> None:
    run, prepared = synthetic
    plan = BatchPlan(8, 1, 4)
    whole = list(train_step_batches(run, prepared, plan, 0, 0, 30))
    rest = train_step_batches(run, prepared, plan, 0, 8 * 11, 30)
    assert len(rest) == 19
    for expected, step_batch in zip(whole[11:], rest, strict=True):
        assert (step_batch.step, step_batch.first_sample) == (expected.step, expected.first_sample)
        assert torch.equal(_together([step_batch]), _together([expected]))
    assert len(train_step_batches(run, prepared, plan, 0, 8 * 30, 30)) == 0
    shifted = list(train_step_batches(run, prepared, plan, 0, 8 * 11 + 3, 13))
    assert torch.equal(_together(shifted), _together(whole)[8 * 11 + 3 :][:16])


def test_a_step_larger_than_the_data_goes_round(synthetic: tuple[RunConfig, PreparedData]) -> None:
    run, prepared = synthetic
    size = prepared.train_samples
    dataset = PackedDataset.open(prepared, "train")
    step_batch = next(iter(train_step_batches(run, prepared, BatchPlan(2 * size, 1, 1), 0, 0, 1)))
    both = _together([step_batch])
    every = dataset.batch(np.arange(size))["input_ids"]
    for epoch in (both[:size], both[size:]):
        assert sorted(epoch.tolist()) == sorted(every.tolist())
    assert not torch.equal(both[:size], both[size:])
    assert step_batch.loss_denominator == 2 * prepared.train_tokens


def test_another_seed_is_another_order_of_the_same_data(synthetic: tuple[RunConfig, PreparedData]) -> None:
    run, prepared = synthetic
    other = replace(run, seed=run.seed + 1)
    plan = BatchPlan(prepared.train_samples, 1, 1)
    one, two = (_together(list(train_step_batches(c, prepared, plan, 0, 0, 1))) for c in (run, other))
    assert not torch.equal(one, two)
    assert sorted(one.tolist()) == sorted(two.tolist())


@pytest.mark.slow
def test_loader_processes_give_the_same_windows(synthetic: tuple[RunConfig, PreparedData]) -> None:
    run, prepared = synthetic
    plan = BatchPlan(8, 2, 2)
    ahead = replace(run, data=replace(run.data, num_workers=2))
    here, there = (train_step_batches(c, prepared, plan, 1, 16, 12) for c in (run, ahead))
    assert len(here) == len(there) == 10
    for expected, step_batch in zip(here, there, strict=True):
        assert (step_batch.step, step_batch.loss_denominator) == (expected.step, expected.loss_denominator)
        assert len(step_batch.micro_batches) == len(expected.micro_batches)
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(_together([step_batch], name), _together([expected], name))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_evaluation_takes_the_same_samples_and_deals_out_a_short_last_window(
    synthetic: tuple[RunConfig, PreparedData], ranks: int
) -> None:
    _, prepared = synthetic
    plan = BatchPlan(8, ranks, 1)
    assert prepared.validation is not None
    assert prepared.validation.samples > 13
    shares = [evaluation_step_batches(config, prepared, plan, rank) for rank in range(ranks)]
    assert [len(share) for share in shares] == [2] * ranks
    step_batches = [[share[number] for share in shares] for number in range(2)]
    assert [[w.num_samples for w in step_batch] for step_batch in step_batches] == [[8] * ranks, [5] * ranks]
    chosen = PackedDataset.open(prepared, "validation").batch(prepared.evaluated_samples())
    assert torch.equal(
        torch.cat([_together(step_batch) for step_batch in step_batches if step_batch]), chosen["input_ids"]
    )
    normalizers = [int((labels != IGNORE_INDEX).sum()) for labels in (chosen["labels"][:8], chosen["labels"][8:])]
    assert [step_batch[0].loss_denominator for step_batch in step_batches] == normalizers
    assert sum(normalizers) == prepared.validation_tokens
    counts = [len(step_batch.micro_batches) for step_batch in step_batches[1]]
    assert max(counts) - min(counts) <= 1


def test_no_held_out_data_is_no_evaluation(synthetic: tuple[RunConfig, PreparedData]) -> None:
    run, _ = synthetic
    without = replace(run, data=replace(run.data, validation_fraction=0.0))
    prepared = prepare(without)
    assert (prepared.validation, prepared.validation_samples, prepared.unigram_perplexity) == (None, 0, None)
    assert len(evaluation_step_batches(config, prepared, BatchPlan(8, 1, 1), 0)) == 0


@pytest.mark.slow
def test_pictures_and_recordings_are_what_torchs_loader_gives(tmp_path: Path) -> None:
    """By the benchmark, in which both are timed."""
    need_speech()
    for work in image_audio_loading.works(tmp_path, image_audio_loading.BATCH):
        ours, theirs = (list(loader()) for loader in work.loaders())
        (mine,) = (
            value for name, value in ours[0].items() if name in ("pixel_values", "input_values", "input_features")
        )
        assert len(ours) == len(theirs) == 1 and mine.shape == theirs[0].shape
        found, expected = (rows[rows.flatten(1).double().abs().sum(1).argsort()] for rows in (mine, theirs[0]))
        assert torch.equal(found, expected), work.name
