"""Kernels against plain computations in fp64, forward and backward; dry on the CPU."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.kernels import packed_attention
from mgpu_pipe.objectives.losses import chunked_head
from mgpu_pipe.objectives.losses.chunked_head import ChunkedHead
from mgpu_pipe.objectives.losses.cross_entropy import linear_cross_entropy
from mgpu_pipe.parallel.context.kernels import Gradients, Partial
from mgpu_pipe.parallel.context.sequences import whole_blocks

BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest error of a tensor's norm over the norm."""
DTYPES = tuple(BOUNDS)
LENGTHS = ((37, 5, 86), (128,), (1, 1, 126))
"""Of the documents of each row."""


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double().cpu() - expected.detach()).norm() / expected.detach().norm())


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Values that ``dtype`` has, in fp64."""
    return torch.randn(*shape).to(dtype).double()


def documents_alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, window: int | None
) -> torch.Tensor:
    """Attention of one document at a time, as it is written down; (rows, heads, tokens, size)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    out = torch.zeros_like(query)
    for row, lengths in enumerate(LENGTHS):
        edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        for span in (slice(*pair) for pair in pairwise(edges)):
            scores = query[row, :, span] @ key[row, :, span].transpose(1, 2) * query.shape[-1] ** -0.5
            at = torch.arange(scores.shape[-1])
            distance = at[:, None] - at[None, :]
            hidden = (distance < 0) & causal
            if window is not None:
                hidden |= distance >= window
            out[row, :, span] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[row, :, span]
    return out


def attended(
    device: torch.device, dtype: torch.dtype, size: int, causal: bool = True, window: int | None = None
) -> Any:
    """Output and gradients of packed attention, and those expected."""
    torch.manual_seed(0)
    rows, tokens = positions().shape
    whole: Any = [draw(rows, heads, tokens, size, dtype=dtype).requires_grad_() for heads in (6, 2, 2)]
    out = documents_alone(whole[0], whole[1], whole[2], causal, window)
    pull = draw(*out.shape, dtype=dtype)
    expected = [out, *torch.autograd.grad(out, whole, pull)]
    given = [states.detach().to(device, dtype).requires_grad_() for states in whole]
    module = SimpleNamespace(is_causal=causal, num_key_value_groups=3)
    starts = packed_attention.document_starts(positions()).to(device)
    query, key, value = given
    found, _ = packed_attention._attention(module, query, key, value, starts, sliding_window=window)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(found, given, pull.transpose(1, 2).to(device, dtype))
    return [found.transpose(1, 2), *gradients], expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "causal", "window"), [(64, True, None), (128, False, None), (20, True, None), (64, True, 9)]
)
def test_packed_attention_is_that_of_each_document_alone(
    device: torch.device, dtype: torch.dtype, size: int, causal: bool, window: int | None
) -> None:
    for found, expected in zip(*attended(device, dtype, size, causal, window), strict=True):
        assert error(found, expected) < BOUNDS[dtype]


def test_a_mask_is_made_on_gpus_in_fp32_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mask(*_: object) -> None:
        raise AssertionError("a mask was made")

    monkeypatch.setattr(packed_attention, "visibility_mask", no_mask)
    if device.type == "cpu":
        attended(device, torch.float32, 64)
        return
    with pytest.raises(AssertionError, match="a mask was made"):
        attended(device, torch.float32, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attended(device, torch.bfloat16, 64)
    assert any("flash" in event.key for event in profile.key_averages())


@pytest.mark.parametrize(("size", "causal"), [(64, True), (128, True), (128, False)])
def test_flash_attention_3_is_that_of_each_document_alone(device: torch.device, size: int, causal: bool) -> None:
    if device.type == "cpu":
        found, expected = attended(device, torch.bfloat16, size, causal)
    else:
        pytest.importorskip("flash_attn_interface", reason="FlashAttention 3: pip install flash-attn-3")
        packed_attention.use_flash_attention_3()
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                found, expected = attended(device, torch.bfloat16, size, causal)
        finally:
            torch.nn.attention.restore_flash_attention_impl()
        assert any("sm90" in event.key.lower() for event in profile.key_averages())
    for mine, wanted in zip(found, expected, strict=True):
        assert error(mine, wanted) < BOUNDS[torch.bfloat16]


def test_starts_of_documents() -> None:
    starts = packed_attention.document_starts(positions())
    assert starts.shape == (1, 1, 2, 17)
    assert starts[0, 0, 0].tolist() == [0, 37, 42, 128, 256, 257, 258, *[384] * 10]
    assert packed_attention.document_starts(torch.arange(1200)[None]).shape == (1, 1, 4, 17)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_the_loss_over_chunks_of_logits_is_the_whole_one(
    device: torch.device, dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_head, "FUSED_FROM", 1 if fused else 1 << 60)
    torch.manual_seed(0)
    tokens, width, vocabulary = 300, 64, 1000
    whole: Any = [
        draw(tokens, width, dtype=dtype).requires_grad_(),
        draw(vocabulary, width, dtype=dtype).requires_grad_(),
    ]
    labels = torch.randint(vocabulary, (tokens,))
    labels[::7] = IGNORE_INDEX
    loss = F.cross_entropy(whole[0] @ whole[1].t() / 8, labels, reduction="sum")
    expected = [loss, *torch.autograd.grad(loss, whole)]
    given = [(whole[0] / 8).detach().to(device, dtype).requires_grad_(), whole[1].detach().to(device, dtype)]
    given[1].requires_grad_()
    found = linear_cross_entropy(ChunkedHead(given[0], given[1], None, labels.to(device), chunk_tokens=128))
    gradients = torch.autograd.grad(found, given)
    assert error(found, expected[0]) < BOUNDS[dtype] / 10
    assert error(gradients[0] / 8, expected[1]) < BOUNDS[dtype]
    assert error(gradients[1], expected[2]) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_context_parallelism_are_that_attention(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cpu" and dtype is torch.float16:  # the CPU's flash operator has none
        dtype = torch.float32
    torch.manual_seed(0)
    rows, tokens = positions().shape
    whole: Any = [draw(rows, heads, tokens, 64, dtype=dtype).requires_grad_() for heads in (6, 2, 2)]
    out = documents_alone(whole[0], whole[1], whole[2], True, None)
    pull = draw(*out.shape, dtype=dtype)
    expected = torch.autograd.grad(out, whole, pull)
    query, key, value, grad_out = (states.detach().to(device, dtype) for states in (*whole, pull))
    blocks = whole_blocks((positions() == 0).cumsum(1))
    partial = Partial(query)
    partial.take(query, key, value, blocks, 64**-0.5)
    gradients = Gradients(query, key, value)
    gradients.take(grad_out, query, key, value, partial.out.to(dtype), partial.lse, blocks, 64**-0.5)
    assert error(partial.out, out.detach()) < BOUNDS[dtype]
    for found, wanted in zip((gradients.query, *gradients.key_value), expected, strict=True):
        assert error(found, wanted) < BOUNDS[dtype]
