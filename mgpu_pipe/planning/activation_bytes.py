"""Bytes of activations of a decoder: of a block by how it is recomputed, around the blocks, and in the loss.

The backward pass needs of each token and block, in the compute type: the inputs of both norms and their results, which
enter matrix products; queries, keys, values and the attention's result; gate, up-projection and their product. A
compiled block keeps exactly these (measured on an H100: 37.7 widths of bytes where the formula has 37.1); where
products are in float8 it computes norms and the gate's product again. Tensor parallelism splits what has heads or the
feed-forward width; the rest only with sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_pipe.architectures.formulas.kept_memory import FP32
from mgpu_pipe.planning.work import Numbers, Work, choose, maximum, minimum

AROUND_BLOCKS = 5
"""Widths in the compute type of a token outside of the blocks: the last block's result, its norm in fp32 and in the
compute type, and the gradient that enters the last norm."""
SCORE_COPIES = 2
"""Copies of attention scores that unfused attention keeps: the softmax and what enters the product with values."""


@dataclass(frozen=True)
class Activations:
    """How blocks and loss keep activations; numbers or arrays like those of :class:`~mgpu_pipe.planning.work.Work`.

    Attributes:
        item: bytes of an activation in the compute type.
        compiled: 1 if blocks are compiled.
        recompute: 1 if the backward pass computes a block again.
        products: share of a block's matrix products whose results are kept where it is recomputed, 0 to 1.
        logit_rows: rows of logits that exist at once; 0 computes the loss from whole logits, outside of the head.
        copies: 1 if blocks that are not compiled keep the attention's result twice, and keys and values repeated for
            all heads, as on the CPU.
        frozen_norms: 1 if the norms' weights are not trained, as next to adapters.
    """

    item: Numbers = 2.0
    compiled: Numbers = 1.0
    recompute: Numbers = 0.0
    products: Numbers = 0.0
    logit_rows: Numbers = 0.0
    copies: Numbers = 0.0
    frozen_norms: Numbers = 0.0


def block_bytes(work: Work, keeps: Activations) -> Numbers:
    """Bytes of a block that is not recomputed, for the tokens of a micro-batch on a rank."""
    item = keeps.item
    inner = (work.chosen + work.shared) * work.inner
    query, key_value = work.heads * work.head_dim, work.key_value_heads * work.head_dim
    attention = item * (2 * query + 2 * choose(keeps.copies, query, key_value)) + FP32 * work.heads
    attention = attention + (1 - work.flash) * SCORE_COPIES * item * work.heads * work.sequence
    # Eager norms keep their input in fp32, weighted values, and normalised ones for the gradient of their weights.
    eager_norms = 2 * work.width * (FP32 + (2 - keeps.frozen_norms) * item) + 2 * FP32
    eager = item * (keeps.copies * query + (3 + work.gated - 1) * inner)
    norms = choose(keeps.compiled, item * work.width * (4 - 2 * work.float8), eager_norms)
    products = item * inner * (1 + work.gated)
    feed_forward = choose(
        keeps.compiled, products + item * inner * (1 - work.float8), eager + item * work.gated * inner
    )
    routed = choose(work.experts > 0, item * work.width * (2 * work.chosen), 0.0)
    return work.tokens * (_on_rank(work, norms) + (attention + feed_forward + routed) / work.tp)


def kept_bytes(work: Work, keeps: Activations) -> Numbers:
    """Bytes of a block between its forward and its backward pass, for the tokens of a micro-batch on a rank."""
    inner, item = (work.chosen + work.shared) * work.inner, keeps.item
    query, key_value = work.heads * work.head_dim, work.key_value_heads * work.head_dim
    products = keeps.products * (query + 2 * key_value + (1 + work.gated) * inner)
    attention = choose(keeps.products, item * query + FP32 * work.heads, 0.0)
    shared = item * work.width * _on_rank(work, 1.0) + 2 * keeps.products * item * work.width * _on_rank(work, 1.0)
    recomputed = work.tokens * (shared + (item * products + attention) / work.tp)
    return choose(keeps.recompute, recomputed, block_bytes(work, keeps))


def backward_bytes(work: Work, keeps: Activations, dequantised: Numbers = 0.0) -> Numbers:
    """Bytes that the backward pass of one block needs besides: the block again if recomputed, and gradients.

    Args:
        dequantised: bytes of the largest four-bit matrix while it is multiplied by. It is the last of the block, whose
            backward pass has the gradient of the block's result alone.
    """
    again = choose(keeps.recompute, block_bytes(work, keeps), 0.0)
    gradients = keeps.item * (2 * work.width + (1 + work.gated) * (work.chosen + work.shared) * work.inner / work.tp)
    whole = choose((work.tp > 1) & (work.sequence_parallel > 0), 2 * keeps.item * work.width, 0.0)
    first = dequantised + work.tokens * keeps.item * work.width
    return again + maximum(work.tokens * (gradients + whole), choose(dequantised, first, 0.0))


def output_bytes(work: Work, keeps: Activations) -> Numbers:
    """Bytes of the outputs of a block's linears and norms; a split backward pass keeps gradients until those of
    weights."""
    query, key_value = work.heads * work.head_dim, work.key_value_heads * work.head_dim
    split = query + 2 * key_value + (1 + work.gated) * (work.chosen + work.shared) * work.inner
    return keeps.item * work.tokens * (split / work.tp + _on_rank(work, 4 * work.width))


def around_bytes(work: Work, keeps: Activations) -> Numbers:
    """Bytes outside of the blocks of the last stage, for the tokens of a micro-batch on a rank."""
    return AROUND_BLOCKS * keeps.item * work.tokens * work.width * _on_rank(work, 1.0)


def message_bytes(work: Work, keeps: Activations) -> Numbers:
    """Bytes of the hidden states that a pipeline stage keeps for a micro-batch: its result or its input."""
    return choose(work.pp > 1, keeps.item * work.tokens * work.width * _on_rank(work, 1.0), 0.0)


def loss_bytes(work: Work, keeps: Activations, head: Numbers) -> Numbers:
    """Bytes of the loss on the last stage at its end: logits, or a chunk of them, and the head's gradient.

    Over several chunks a chunk's gradient is there with the next one's logits, next to which eager code has fp32 ones;
    the gradient of the head's matrix is summed in fp32, until the backward pass scales and rounds it. A single chunk
    has logits in fp32, their gradient in the compute type, and the matrix's gradient. Whole logits exist in the compute
    type, as fp32, as their log-softmax and as its gradient, which eager code rounds next to it; over a split vocabulary
    their exponentials exist too.

    Args:
        head: trained parameters of the head's matrix on a rank.
    """
    a_row = work.vocabulary / work.tp
    a_logit = 2 * keeps.item + FP32 * (keeps.item < FP32) * (1 - keeps.compiled)
    chunk = minimum(keeps.logit_rows, work.tokens) * a_row * a_logit + head * (2 * FP32 + keeps.item)
    halves = keeps.item * (keeps.item < FP32) * (2 - keeps.compiled)
    whole = work.tokens * a_row * (halves + FP32 * choose(work.tp > 1, 4, 3)) + head * keeps.item
    gathered = choose((work.tp > 1) & (work.sequence_parallel > 0), 2 * keeps.item * work.tokens * work.width, 0.0)
    alone = work.tokens * a_row * (FP32 + keeps.item * (keeps.item < FP32)) + head * keeps.item
    in_head = choose(keeps.logit_rows < work.tokens, chunk, alone)
    return choose(keeps.logit_rows, in_head, whole) + gathered


def _on_rank(work: Work, size: Numbers) -> Numbers:
    """The part of ``size`` on a rank; only sequence parallelism splits it."""
    return size / choose(work.sequence_parallel, work.tp, 1.0)
