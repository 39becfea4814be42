"""Closed forms: the collectives of a process in a step and the bytes that it sends, by ring algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu_pipe.architectures.formulas.flops import Shape
from mgpu_pipe.architectures.formulas.kept_memory import FP32, all_reduced, exchanged_bytes
from mgpu_pipe.architectures.formulas.parameters import (
    embedding_parameters,
    final_norm_parameters,
    head_parameters,
    layer_counts,
    layer_norm_parameters,
)
from mgpu_pipe.topology import ParallelDims

FORWARD, BACKWARD = "hidden states sent", "hidden states' gradients sent"
EXCHANGES = ("dispatch_tokens", "return_outputs", "dispatch_output_gradients", "return_token_gradients")
"""Functions by which expert parallelism sends in a layer and micro-batch."""
LAYER_TENSORS = 9
"""Named parameters of a llama layer: four of attention, three of the feed-forward part, two norms."""
FP64 = 8

Collectives = dict[str, tuple[int, float]]
"""Calls and sent bytes of a process, by name."""


def state_traffic(
    parameters: int, weight: int, shards: int, replicas: int = 1, stage: int = 3, micro_batches: int = 1
) -> float:
    """Bytes of weights and gradients under ZeRO, FSDP2, HSDP and DDP (``shards=1``).

    Gradients are reduced in fp32: every micro-batch, by ZeRO-1 and among replicas once a step batch. Weights are
    gathered for every forward and backward pass; by ZeRO-1 and 2 once, after the update.

    Args:
        weight: bytes of a weight in its compute type.
        stage: see :func:`architectures.formulas.kept_memory.state_bytes`.
    """
    reductions = 1 if stage == 1 else micro_batches
    gathers = 2 * micro_batches if stage == 3 else 1
    sharded = exchanged_bytes((FP32 * reductions + weight * gathers) * parameters, shards)
    return sharded + all_reduced(FP32 * parameters / shards, replicas)


def expert_traffic(passes: int, experts: int, width: int, ranks: int, elsewhere: int) -> dict[str, tuple[int, int]]:
    """Calls of a process under expert parallelism, and bytes that all of them send, in fp32.

    Args:
        passes: layers with experts times micro-batches.
        elsewhere: slots of tokens, over all passes, whose expert is on another process.
    """
    counts = passes * ranks * 8 * experts * (ranks - 1) // ranks
    return {"exchange_counts": (passes, counts), **dict.fromkeys(EXCHANGES, (passes, elsewhere * width * FP32))}


@dataclass(frozen=True)
class Step:
    """Work of a data-parallel process in a step."""

    micro_batches: int
    rows: int
    tokens: int
    """Tokens of a row."""


def axes_traffic(
    fields: Mapping[str, Any],
    dims: ParallelDims,
    step: Step,
    stage: int,
    sequence_parallel: bool = False,
    method: str = "ring",
) -> Collectives:
    """Every collective of a process in a step of a llama without tied weights, in fp32.

    Of one process, with sizes ``tp cp pp`` and shards ``f = dp_shard * cp``; a step of M micro-batches of B rows of S
    tokens, T = S / cp of them on a process; width W, head size d, H heads and K key-value heads, L layers on the
    process. Hidden states are X = 4BTW bytes. "First" and "last" are the pipeline's stages, one process being both.

    * ``tp``, a micro-batch: all-reduces of X, one for the embeddings (first), four a layer (attention and feed-forward,
      forward and backward), one for the gradient of what enters the head (last); one all-gather a chunk of logits of
      two floats for each of its rows from every process, 8 BT tp bytes (last; one chunk here).
    * with sequence parallelism, of X: all-gathers, six a layer (what enters attention and feed-forward, again for their
      weights' gradients, and the gradients of what they give), one before the head (last), one for the gradient of the
      embeddings (first); reduce-scatters, four a layer, one for the embeddings (first), one for the gradient of what
      enters the head (last). Once a step an all-reduce of the gradients of all 2L norms of W, and of the last one.
    * ``pp``: M messages of X forward, but from the last stage, and M backward, but from the first.
    * ``cp`` by the ring, with Z = 8BTdK/tp bytes of keys and values: a layer and micro-batch, (cp-1) messages of Z
      forward, and backward as many of keys and values and as many of their gradients.
    * ``cp`` by Ulysses: a layer and micro-batch, an all-to-all of 4BTd(H+2K)/tp before attention and one of 4BTdH/tp
      after it, and the same backward.
    * FSDP2 over f > 1 processes, with units that are the embeddings (first), each layer, norm and head together (last):
      without a pipeline every unit is gathered forward, and layers again backward, a micro-batch, and every unit's
      gradients are reduce-scattered a micro-batch. With a pipeline, which keeps weights and gradients whole for the
      length of a step batch, each once a step. Once a step an all-reduce of a float64 a parameter, whether it has a
      gradient.
    * Once a step, over all processes: an all-reduce of the sum of losses, the stop flag, the step's time and whether a
      save is due, and one of the gradient's sum of squares, in float64.
    """
    shape, batches = Shape.from_fields(fields), step.micro_batches
    first, last = stage == 0, stage == dims.pp - 1
    layers, tokens = shape.layers // dims.pp, step.rows * step.tokens // dims.cp
    hidden = FP32 * tokens * shape.width
    sent: Collectives = {}

    def exchange(name: str, calls: int, size: float, ranks: int) -> None:
        if calls:
            sent[name] = calls, exchanged_bytes(size, ranks)

    if dims.tp > 1 and sequence_parallel:
        gathers, scatters = (batches * (each * layers + first + last) for each in (6, 4))
        exchange("sequence gathered", gathers, gathers * hidden, dims.tp)
        exchange("sequence reduce-scattered", scatters, scatters * hidden, dims.tp)
        norms = layers * layer_norm_parameters(fields) + last * final_norm_parameters(fields)
        sent["replicated gradients summed"] = 1, all_reduced(FP32 * norms, dims.tp)
    elif dims.tp > 1:
        sums = batches * (4 * layers + first + last)
        sent["activations summed"] = sums, all_reduced(sums * hidden, dims.tp)
    if dims.tp > 1 and last:
        exchange("softmax of the vocabulary gathered", batches, batches * 2 * FP32 * tokens * dims.tp, dims.tp)
    if not last:
        sent[FORWARD] = batches, batches * hidden
    if not first:
        sent[BACKWARD] = batches, batches * hidden
    sent.update(_context_traffic(shape, dims, batches * layers, tokens, method))
    sent.update(_unit_traffic(fields, dims, batches, layers, first, last))
    sent["loss and stop flag"] = 1, all_reduced(4 * FP64, dims.world_size)
    sent["gradient norm"] = 1, all_reduced(FP64, dims.world_size)
    return sent


def _unit_traffic(
    fields: Mapping[str, Any], dims: ParallelDims, batches: int, layers: int, first: bool, last: bool
) -> Collectives:
    """Collectives of FSDP2's units, see :func:`axes_traffic`; ``layers``, ``first`` and ``last`` are of the process."""
    shards = dims.dp_shard * dims.cp
    if shards == 1:
        return {}
    norms = layer_norm_parameters(fields)
    layer = (layer_counts(fields)[0].total - norms) // dims.tp + norms
    tables = first * embedding_parameters(fields) + last * head_parameters(fields)
    ends = tables // dims.tp + last * final_norm_parameters(fields)
    times, again = (1, 0) if dims.pp > 1 else (batches, layers)
    units = layers + first + last
    gathered, reduced = ((count * layer + ends) * FP32 * times for count in (layers + again, layers))
    return {
        "weights gathered": (times * (units + again), exchanged_bytes(gathered, shards)),
        "gradients reduce-scattered": (times * units, exchanged_bytes(reduced, shards)),
        "used gradients": (1, all_reduced(FP64 * (LAYER_TENSORS * layers + first + 2 * last), shards)),
    }


def _context_traffic(shape: Shape, dims: ParallelDims, passes: int, tokens: int, method: str) -> Collectives:
    """Collectives of context parallelism, see :func:`axes_traffic`.

    Args:
        passes: layers times micro-batches.
        tokens: tokens of a micro-batch on a process.
    """
    if dims.cp == 1:
        return {}
    head_bytes = FP32 * tokens * shape.head_dim // dims.tp
    if method == "ring":
        hops, message = passes * (dims.cp - 1), 2 * shape.key_value_heads * head_bytes
        passed = {"keys and values passed": 2 * hops, "their gradients passed": hops}
        return {name: (calls, calls * message) for name, calls in passed.items()}
    sent = exchanged_bytes(passes * head_bytes * (2 * shape.heads + 2 * shape.key_value_heads), dims.cp)
    return {name: (2 * passes, sent) for name in ("sequence to heads", "heads to sequence") if passes}
