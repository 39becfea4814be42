"""Who knows a micro-batch's fields by name, and what a :class:`BatchSpec` does with them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import mgpu_pipe
from mgpu_pipe.data.step_batch import BatchSpec, Field
from mgpu_pipe.models.kernels.packed_attention import document_starts
from mgpu_pipe.objectives.packed_text import packed_text

NAMES = re.compile(r"\b(input_ids|labels|position_ids)\b")
KNOWING = (
    *("data/audio", "data/images", "data/text", "objectives", "inference"),
    *("models/weights/pretrained.py", "report/", "data/sources", "data/data_source.py"),
    *("data/classes.py", "data/files.py", "data/prepared_splits.py"),
    "training/profiling/measure_hardware.py",
)
"""The others have a tensor of old folders, the labels of charts, the classes of a source and
a column of foreign rows by the same names."""
SPEC = BatchSpec(
    {
        "frames": Field(sequence_dim=2, dtype="float32", shape=(3,)),
        "at": Field(counting=True),
        "kind": Field(sequence_dim=None, padding=-1, target=True, stages="last"),
        "words": Field(padding=-7, target=True, stages="first"),
    },
    documents="at",
)
BATCH = {
    "frames": torch.ones(2, 3, 4),
    "at": torch.arange(4).expand(2, -1),
    "kind": torch.tensor([5, -1]),
    "words": torch.tensor([[1, 2, -7, 3], [4, -7, -7, -7]]),
}


def test_only_those_whose_business_it_is_know_fields_by_name() -> None:
    package = Path(mgpu_pipe.__file__).parent
    told = [
        f"{file.relative_to(package)}:{number}"
        for file in sorted(package.rglob("*.py"))
        if not str(file.relative_to(package)).startswith(KNOWING)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if NAMES.search(line) and not line.startswith("from ")
    ]
    assert told == []


def test_padding_follows_the_spec() -> None:
    padded = SPEC.pad(BATCH, 6)
    assert padded["frames"].shape == (2, 3, 6) and float(padded["frames"].sum()) == 24
    assert padded["at"].tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert padded["kind"] is BATCH["kind"]
    assert padded["words"][:, 4:].tolist() == [[-7, -7]] * 2
    assert SPEC.pad(padded, 5)["at"] is padded["at"]


def test_targets_are_counted_and_taken_out() -> None:
    assert (SPEC.rows(BATCH), SPEC.length(BATCH), SPEC.valid_targets(BATCH)) == (2, 4, 5)
    without = SPEC.without_targets(BATCH)
    assert SPEC.valid_targets(without) == 0 and without["frames"] is BATCH["frames"]
    assert without["words"].shape == (2, 4)


def test_an_empty_micro_batch_has_every_field_and_counts_nothing() -> None:
    empty = SPEC.empty(5, torch.device("cpu"))
    assert {name: tuple(value.shape) for name, value in empty.items()} == {
        "frames": (1, 3, 5),
        "at": (1, 5),
        "kind": (1,),
        "words": (1, 5),
    }
    assert SPEC.valid_targets(empty) == 0 and empty["frames"].dtype == torch.float32


def test_a_pipeline_stage_needs_its_fields_alone() -> None:
    assert SPEC.needed_fields(True, False) == ("frames", "at", "words")
    assert SPEC.needed_fields(False, False) == ("frames", "at")
    assert SPEC.needed_fields(False, True) == ("frames", "at", "kind")


def test_starts_of_unlike_documents_are_joined() -> None:
    unlike = ([*range(600)], [position % 20 for position in range(600)])
    starts = [document_starts(torch.tensor([positions])) for positions in unlike]
    assert [tuple(each.shape) for each in starts] == [(1, 1, 3, 17), (1, 1, 2, 33)]
    joined = packed_text().join([{"document_starts": each} for each in starts])["document_starts"]
    assert tuple(joined.shape) == (2, 1, 3, 33)
    for each, whole in zip(starts, joined, strict=True):
        assert torch.equal(whole[0, 0, : each.shape[-1]], each[0, 0, 0])
        assert (whole[..., each.shape[-1] :] == 600).all()
