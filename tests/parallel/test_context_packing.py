"""What CUDA's flash operator of varying lengths is handed, and what is made of its results.

The operator cannot run here. In its place stands plain arithmetic over the same packed tensors, which also holds the
calls to the operator's rules; the oracle is attention with a whole mask.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mgpu_pipe.parallel.context import kernels as context_kernels
from mgpu_pipe.parallel.context.kernels import Gradients, Partial
from mgpu_pipe.parallel.context.sequences import Blocks, chunk_ranges, document_numbers, ring_blocks, whole_blocks
from tests.parallel.test_context_attention import SCALE, one_process, positions, tensors, worst

HEADS, KEY_HEADS = 4, 2


def spans(
    query_starts: torch.Tensor, key_starts: torch.Tensor, longest_query: int, longest_key: int, causal: bool
) -> Any:
    assert query_starts.dtype == key_starts.dtype == torch.int32
    lengths = query_starts.diff().tolist(), key_starts.diff().tolist()
    assert max(lengths[0]) == longest_query and max(lengths[1]) == longest_key
    assert min(lengths[0] + lengths[1]) > 0
    assert not causal or lengths[0] == lengths[1]
    edges = query_starts.tolist(), key_starts.tolist()
    return zip(edges[0], edges[0][1:], edges[1], edges[1][1:], strict=False)


def scores(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    found = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(query.shape[1] // key.shape[1], 1)) * scale
    seen = torch.ones(found.shape[1:], dtype=torch.bool).tril()
    return found.masked_fill(~seen, float("-inf")) if causal else found


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
) -> Any:
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous() and not dropout and not debug
    out, lse = torch.full_like(query, float("nan")), torch.full((query.shape[1], len(query)), float("nan"))
    for a, b, c, d in spans(query_starts, key_starts, longest_query, longest_key, causal):
        found = scores(query[a:b], key[c:d], causal, scale)
        lse[:, a:b] = found.logsumexp(-1)
        repeated = value[c:d].repeat_interleave(query.shape[1] // key.shape[1], 1)
        out[a:b] = torch.einsum("hqk,khd->qhd", found.softmax(-1), repeated)
    return out, lse, None, None, None


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float,
) -> Any:
    assert grad.is_contiguous() and out.is_contiguous() and lse.shape == (query.shape[1], len(query))
    groups = query.shape[1] // key.shape[1]
    grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for a, b, c, d in spans(query_starts, key_starts, longest_query, longest_key, causal):
        weights = (scores(query[a:b], key[c:d], causal, scale) - lse[:, a:b, None]).exp()
        of_weights = torch.einsum("qhd,khd->hqk", grad[a:b], value[c:d].repeat_interleave(groups, 1))
        inner = (grad[a:b] * out[a:b]).sum(-1).t()[..., None]
        of_scores = weights * (of_weights - inner) * scale
        grads[0][a:b] += torch.einsum("hqk,khd->qhd", of_scores, key[c:d].repeat_interleave(groups, 1))
        for at, whole in (
            (1, torch.einsum("hqk,qhd->khd", of_scores, query[a:b])),
            (2, torch.einsum("hqk,qhd->khd", weights, grad[a:b])),
        ):
            grads[at][c:d] += whole.unflatten(1, (-1, groups)).sum(2)
    return tuple(grads)


@pytest.fixture(autouse=True)
def _flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_kernels, "_by_flash", lambda query: True)
    operators = SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
    monkeypatch.setattr(context_kernels, "operator", lambda name: getattr(operators, name))


def ranks_in_turn(length: int, size: int, seed: int) -> list[torch.Tensor]:
    """The ring's arithmetic, one rank after another in this process; ``size`` 0: whole sequences, as under Ulysses."""
    query, key, value, grad_out = tensors(length, HEADS, KEY_HEADS, torch.float32)
    documents = document_numbers(positions(length, seed), length)
    held = [
        torch.cat([torch.arange(*span) for span in chunk_ranges(length, size, rank, "ring")]) for rank in range(size)
    ] or [torch.arange(length)]
    plans: list[tuple[Blocks, ...]] = [ring_blocks(documents, size, rank) for rank in range(size)]
    plans = plans or [(whole_blocks(documents),)]
    found = [torch.zeros_like(tensor) for tensor in (grad_out, query, key, value)]
    for rank, (mine, plan) in enumerate(zip(held, plans, strict=True)):
        part, part_grad = query[:, :, mine], grad_out[:, :, mine]
        partial = Partial(part)
        sources = [held[(rank - hop) % len(held)] for hop in range(len(plan))]
        for theirs, blocks in zip(sources, plan, strict=True):
            partial.take(part, key[:, :, theirs], value[:, :, theirs], blocks, SCALE)
        found[0][:, :, mine] = partial.out
        gradients = Gradients(part, key[:, :, mine], value[:, :, mine])
        for theirs, blocks in zip(sources, plan, strict=True):
            keys, values = key[:, :, theirs], value[:, :, theirs]
            gradients.start(keys, values)
            gradients.take(part_grad, part, keys, values, partial.out, partial.lse, blocks, SCALE)
            found[2][:, :, theirs] += gradients.key_value[0]
            found[3][:, :, theirs] += gradients.key_value[1]
        found[1][:, :, mine] = gradients.query
    return found


@pytest.mark.parametrize(("length", "size"), [(24, 0), (24, 1), (24, 2), (36, 3), (64, 4)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_packed_calls_are_whole_attention(length: int, size: int, seed: int) -> None:
    expected = one_process(length, HEADS, KEY_HEADS, torch.float32, seed)
    assert worst(ranks_in_turn(length, size, seed), expected) < 1e-6


def test_a_whole_row_is_not_gathered_and_an_index_is_made_once() -> None:
    blocks = whole_blocks(torch.zeros(2, 8, dtype=torch.int64))
    pack = blocks.packing(2, 8, 8, torch.device("cpu"))
    assert pack.queries is None and pack.keys is None and pack.query_starts.tolist() == [0, 8, 16]
    assert blocks.packing(2, 8, 8, torch.device("cpu")) is pack
