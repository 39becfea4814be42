"""Oracle: torch's own cross-entropy of the whole logits, in float64 where a bound is tight."""

import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.architectures.formulas.kept_memory import chunk_rows
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.losses.chunked_head import ChunkedHead
from mgpu_pipe.objectives.losses.cross_entropy import linear_cross_entropy, logits_cross_entropy


def make(rows: int = 37, width: int = 16, vocabulary: int = 101, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[::5] = IGNORE_INDEX
    return hidden, weight, bias, labels


def reference(hidden, weight, bias, labels):
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    loss = F.cross_entropy(F.linear(*leaves), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    (loss / 7).backward()
    return loss.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 1000, "auto", 0])
def test_loss_and_every_gradient_equal_the_whole_computation(chunk):
    hidden, weight, bias, labels = make()
    expected, gradients = reference(hidden, weight, bias, labels)
    loss = linear_cross_entropy(ChunkedHead(hidden, weight, bias, labels, chunk))
    loss.backward(torch.full_like(loss, 1 / 7))
    assert loss.dtype == torch.float64
    assert abs(loss.item() - expected.item()) <= 1e-6 * expected.item()
    for tensor, gradient in zip((hidden, weight, bias), gradients, strict=True):
        assert torch.linalg.vector_norm(tensor.grad - gradient) <= 1e-6 * torch.linalg.vector_norm(gradient)


def test_rows_without_a_label_have_no_gradient_and_no_loss():
    hidden, weight, bias, labels = make()
    labels[:] = IGNORE_INDEX
    loss = linear_cross_entropy(ChunkedHead(hidden, weight, bias, labels, 4))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def test_bf16_chunks_are_as_close_to_fp32_as_the_plain_bf16_computation():
    hidden, weight, bias, labels = make(dtype=torch.bfloat16)
    _, gradients = reference(hidden, weight, bias, labels)
    plain = [t.detach().clone().requires_grad_() for t in (hidden, weight, bias)]
    whole = logits_cross_entropy(F.linear(*plain), labels)
    whole.backward(torch.full_like(whole, 1 / 7))
    loss = linear_cross_entropy(ChunkedHead(hidden, weight, bias, labels, 8))
    loss.backward(torch.full_like(loss, 1 / 7))
    for tensor, other, gradient in zip((hidden, weight, bias), plain, gradients, strict=True):
        ours, theirs = (torch.linalg.vector_norm(t.grad.double() - gradient) for t in (tensor, other))
        assert ours <= 1.5 * theirs + 1e-9


def test_auto_bounds_the_logits_to_64_mib():
    assert chunk_rows("auto", vocabulary=128_256, rows=8192) * 128_256 * 4 <= 64 << 20
    assert chunk_rows("auto", vocabulary=100, rows=10) == 10
    assert chunk_rows(0, vocabulary=128_256, rows=8192) == 8192


def test_on_gpus_auto_takes_whole_tiles_of_256_mib():
    assert chunk_rows("auto", vocabulary=128_256, rows=8192, gpu_item=2) == 1024
    assert chunk_rows("auto", vocabulary=128_256, rows=8192, gpu_item=4) == 512
    assert chunk_rows("auto", vocabulary=100, rows=10, gpu_item=2) == 10
    assert chunk_rows("auto", vocabulary=2_000_000, rows=8192, gpu_item=2) == 67


def test_evaluation_needs_no_gradients():
    hidden, weight, bias, labels = make()
    with torch.no_grad():
        loss = linear_cross_entropy(ChunkedHead(hidden, weight, bias, labels, 5))
    assert not loss.requires_grad
    assert torch.isclose(loss, logits_cross_entropy(F.linear(hidden, weight, bias), labels), rtol=1e-6)
