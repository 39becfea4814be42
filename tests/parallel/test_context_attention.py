"""Oracle: attention with a whole block-diagonal causal mask in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import BatchSpec, Field
from mgpu_pipe.objectives.packed_text import block_diagonal_mask, packed_text
from mgpu_pipe.parallel.context.attention import attend
from mgpu_pipe.parallel.context.sequences import (
    ContextAxis,
    Method,
    SequenceContext,
    chunk_ranges,
    padded_length,
    split_micro_batch,
)
from tests.support.processes import run_processes

ROWS, HEAD_SIZE, SCALE = 3, 8, 0.3
GROUP = "world"


def positions(length: int, seed: int) -> torch.Tensor:
    """A row of one document, a row of two, and a row of many, some of one token."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.arange(length)]
    for cuts in (1, length // 3):
        edges = torch.randperm(length - 1, generator=generator)[:cuts].add(1).sort().values.tolist()
        spans = zip([0, *edges], [*edges, length], strict=True)
        rows.append(torch.cat([torch.arange(stop - start) for start, stop in spans]))
    return torch.stack(rows)


def tensors(length: int, heads: int, key_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(length)
    shapes = [heads, key_heads, key_heads, heads]
    return [torch.randn(ROWS, number, length, HEAD_SIZE, generator=generator).to(dtype) for number in shapes]


def one_process(length: int, heads: int, key_heads: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """The output, and the gradients of queries, keys and values, of an unpadded sequence."""
    *inputs, grad_out = tensors(length, heads, key_heads, dtype)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    mask = block_diagonal_mask(positions(length, seed), as_bool=True)
    groups = heads // key_heads
    repeated = [leaves[0], *(tensor.repeat_interleave(groups, dim=1) for tensor in leaves[1:])]
    out = F.scaled_dot_product_attention(*repeated, attn_mask=mask, scale=SCALE)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def shared(
    method: Method, length: int, heads: int, key_heads: int, dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """This rank's part of the same, with its ranges of the padded sequence in front."""
    group = dist.group.WORLD
    assert group is not None
    axis = ContextAxis(group, method, packed_text())
    batch = {"input_ids": torch.zeros(ROWS, length, dtype=torch.int64), "position_ids": positions(length, seed)}
    context = SequenceContext.from_micro_batch(batch, axis)
    whole = padded_length(length, axis.size, method)
    parts = []
    for tensor in tensors(length, heads, key_heads, dtype):
        padded = F.pad(tensor, (0, 0, 0, whole - length))
        ranges = chunk_ranges(whole, axis.size, axis.rank, method)
        parts.append(torch.cat([padded[:, :, a:b] for a, b in ranges], dim=2))
    *inputs, grad_out = parts
    # As projections give them: tokens before heads in memory.
    leaves = [tensor.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in inputs]
    out = attend(context, leaves[0], leaves[1], leaves[2], SCALE)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def put_together(results: list[list[torch.Tensor]], method: Method, length: int) -> list[torch.Tensor]:
    size = len(results)
    whole = padded_length(length, size, method)
    joined = []
    for parts in zip(*results, strict=True):
        full = torch.full((*parts[0].shape[:2], whole, HEAD_SIZE), float("nan"), dtype=parts[0].dtype)
        for rank, part in enumerate(parts):
            ranges = chunk_ranges(whole, size, rank, method)
            for (start, stop), piece in zip(ranges, part.chunk(len(ranges), dim=2), strict=True):
                full[:, :, start:stop] = piece
        joined.append(full[:, :, :length])
    return joined


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("method", "size", "length", "heads", "key_heads"),
    [
        ("ring", 2, 24, 4, 4),
        ("ring", 2, 23, 4, 1),
        ("ring", 3, 36, 4, 2),
        ("ring", 4, 61, 6, 2),
        ("ulysses", 2, 24, 4, 4),
        ("ulysses", 2, 23, 4, 1),
        ("ulysses", 3, 36, 6, 2),
        ("ulysses", 4, 61, 8, 2),
    ],
)
def test_output_and_gradients_are_those_of_whole_attention(
    method: Method, size: int, length: int, heads: int, key_heads: int
) -> None:
    arguments = (length, heads, key_heads, torch.float32, 7)
    expected = one_process(*arguments)
    found = put_together(run_processes(size, shared, method, *arguments), method, length)
    assert worst(found, expected) < 1e-6


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_bf16_is_as_close_to_fp32_as_one_bf16_process(method: Method) -> None:
    exact = one_process(48, 4, 2, torch.float32, 3)
    alone = one_process(48, 4, 2, torch.bfloat16, 3)
    found = put_together(run_processes(4, shared, method, 48, 4, 2, torch.bfloat16, 3), method, 48)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found)
    for mine, its, true in zip(found, alone, exact, strict=True):
        assert 1e-4 < worst([its], [true]) < 2e-2
        assert worst([mine], [true]) <= 1.5 * worst([its], [true])


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("length", [16, 13])
def test_every_token_is_on_one_rank_and_padding_counts_nothing(method: Method, length: int) -> None:
    batch: dict[str, Any] = {
        "input_ids": torch.arange(2 * length).reshape(2, length),
        "labels": torch.ones(2, length, dtype=torch.int64),
        "position_ids": torch.arange(length).expand(2, -1),
        "weight": torch.rand(2, length, 3),
        "scale": torch.rand(5),
    }
    size = 4
    own = {"weight": Field(shape=(3,), dtype="float32"), "scale": Field(sequence_dim=None, dtype="float32")}
    spec = BatchSpec({**packed_text().fields, **own}, documents="position_ids")
    parts = [split_micro_batch(batch, spec, size, rank, method) for rank in range(size)]
    whole = padded_length(length, size, method)
    padded = spec.pad(batch, whole)
    for name in ("input_ids", "labels", "position_ids", "weight"):
        each = [part[name] for part in parts]
        assert {tuple(tensor.shape[:2]) for tensor in each} == {(2, whole // size)}
        order = [(a, b) for rank in range(size) for a, b in chunk_ranges(whole, size, rank, method)]
        assert torch.equal(torch.cat(each, 1), torch.cat([padded[name][:, a:b] for a, b in order], 1))
    assert sum(int((part["labels"] != -100).sum()) for part in parts) == 2 * length
    assert all(torch.equal(part["scale"], batch["scale"]) for part in parts)
    assert torch.equal(padded["position_ids"][0, length:], torch.arange(whole - length))


def test_the_ring_is_balanced() -> None:
    from mgpu_pipe.parallel.context.sequences import ring_blocks

    size, length = 4, 64
    work = []
    for rank in range(size):
        total = 0.0
        for blocks in ring_blocks(torch.zeros(1, length, dtype=torch.int64), size, rank):
            for _, (a, b), (c, d) in blocks.blocks:
                total += (b - a) * (b - a + 1) / 2 if blocks.causal else (b - a) * (d - c)
        work.append(total)
    assert work == [length * (length + 1) / 2 / size] * size


def test_what_nobody_sees_is_not_computed() -> None:
    from mgpu_pipe.parallel.context.sequences import ring_blocks

    # A document to a chunk: nothing of another rank's keys is seen.
    documents = torch.arange(4).repeat_interleave(5)[None]
    for rank in range(2):
        own, other = ring_blocks(documents, 2, rank)
        assert [block.queries for block in own.blocks] == [(0, 5), (5, 10)]
        assert other.blocks == ()
