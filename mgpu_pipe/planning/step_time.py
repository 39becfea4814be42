"""Seconds of an optimizer step, by the work of one rank of the slowest pipeline stage.

Matrix products go by their shapes, attention by its kernel, elementwise work by its bytes. A pipeline fills and drains
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Collectives are rings (see
:mod:`mgpu_pipe.architectures.formulas.kept_memory`), whose ranks share the network of their node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES
from mgpu_pipe.planning.layout_costs import (
    bubble,
    gradient_copy_seconds,
    host_update_seconds,
    offload_seconds,
    weight_copy_seconds,
)
from mgpu_pipe.planning.matrix_products import Product, layer_product_seconds
from mgpu_pipe.planning.work import Constants, Hardware, Numbers, Work, maximum

BUCKET_COPIES = 4
"""Times that DeepSpeed reads or writes a gradient to fill a bucket and to divide it by the number of ranks."""
EAGER_SHARED_BYTES, EAGER_SPLIT_BYTES = 64.0, 34.0
"""Bytes per token and width that a block's forward pass reads and writes in eager kernels besides those of compiled
ones: 32 for each norm in fp32; 20 for rotary positions of queries and keys and 14 for the gate."""
HALF = 2
"""Bytes of an entry for which the constants count bytes."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by purpose; all but ``compute`` count only what computation does not hide."""

    compute: Numbers
    """Products, attention, elementwise work and launches of all micro-batches, recomputation included."""
    tensor_parallel: Numbers
    context_parallel: Numbers
    expert_parallel: Numbers
    gathers: Numbers
    """Weights gathered and gradients reduce-scattered by FSDP or ZeRO-3."""
    bubble: Numbers
    """Pipeline fill and drain."""
    point_to_point: Numbers
    reduction: Numbers
    """Gradients reduced among replicas, by DeepSpeed's ZeRO-2 in each micro-batch, and weights gathered by ZeRO-1 and
    2."""
    optimizer: Numbers
    offload: Numbers
    """Copies between GPU and host that nothing hides, sums on the host, and the disk."""
    overhead: Numbers
    """Constant times and stragglers."""

    @property
    def total(self) -> Numbers:
        return sum(vars(self).values())


@dataclass(frozen=True)
class _Pass:
    """Seconds of a micro-batch in one layer and pass."""

    compute: Numbers
    tensor: Numbers
    context: Numbers
    experts: Numbers
    exposed: Numbers
    """What gathers and reduce-scatters add."""

    @property
    def total(self) -> Numbers:
        return self.compute + self.tensor + self.context + self.experts + self.exposed

    def times(self, passes: Numbers) -> _Pass:
        """Seconds of so many passes."""
        return _Pass(**{name: passes * seconds for name, seconds in vars(self).items()})


def step_time(work: Work, hardware: Hardware, constants: Constants) -> StepTime:
    """Predict a step's seconds, by part; arrays broadcast."""
    forward = _forward(work, hardware, constants).times(1 + work.other_passes)
    backward = _backward(work, hardware, constants)
    tower = _tower_seconds(work, hardware, constants)
    head = _head_seconds(work, hardware, constants)
    layer = forward.total + backward.total
    on_rank, layers = _slowest_stage(work, layer, head)
    each = work.micro_batches
    message = work.activation_bytes * work.tokens * work.width / work.tp
    stride = work.world / work.pp
    speed = _bandwidth(work.pp, stride, hardware, constants)
    hop = np.where(
        work.pp > 1, 2 * work.stages_per_rank * (message / speed + _latency(2, stride, hardware, constants)), 0
    )
    stage = (work.layers * layer + head) / work.pp
    share = _bubble_share(work, forward.total, backward.total, hardware, constants)
    fill = constants.bubble * (work.pp - 1) / work.stages_per_rank * (share * stage + hop)
    head_share = on_rank - layers * layer
    parts = {
        "compute": each * (layers * (forward.compute + backward.compute) + head_share + tower),
        "tensor_parallel": each * layers * (forward.tensor + backward.tensor),
        "context_parallel": each * layers * (forward.context + backward.context),
        "expert_parallel": each * layers * (forward.experts + backward.experts),
        "gathers": each * layers * (forward.exposed + backward.exposed),
        "bubble": fill,
        "point_to_point": each * hop,
        "reduction": _reduction(work, hardware, constants),
        "optimizer": _optimizer(work, hardware, constants),
        "offload": offload_seconds(work, rank_parameters(work), hardware, constants),
    }
    known = sum(parts.values()) + each * (constants.micro_batch + _cast_seconds(work, hardware, constants))
    nodes = np.maximum(1, work.world / hardware.gpus_per_node)
    total = known * (1 + constants.stragglers * np.log2(nodes)) + constants.step
    return StepTime(**parts, overhead=total - sum(parts.values()))


def _bubble_share(work: Work, forward: Numbers, backward: Numbers, hardware: Hardware, constants: Constants) -> Numbers:
    """Wait for each other rank over a stage's passes; a split backward fills it with gradients of weights
    (:func:`bubble`)."""
    schedule, share = np.asarray(work.schedule), np.asarray(1.0)
    for index, (name, traits) in enumerate(SCHEDULES.items()):
        is_chosen = (schedule == index) & (np.asarray(work.pp) > 1)
        if traits.splits_backward and np.any(is_chosen):
            weights = layer_product_seconds(work, hardware, constants)[2]
            each = bubble(name, work.pp, work.micro_batches, forward, backward - weights, weights)
            share = np.where(is_chosen, each / (forward + backward), share)
    return share


def _tower_seconds(work: Work, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of a micro-batch in a vision tower; without a backward pass if it is frozen."""
    if not np.any(np.asarray(work.tower_layers) > 0):
        return 0.0
    tower = work.tower_work()
    forward, backward = _forward(tower, hardware, constants), _backward(tower, hardware, constants)
    return work.tower_layers * (forward.total + work.tower_trains * backward.total)


def _slowest_stage(work: Work, layer: Numbers, head: Numbers) -> tuple[Numbers, Numbers]:
    """Seconds of a micro-batch on the rank that takes longest, and its layers."""
    even = np.ceil(work.layers / work.pp)
    last = np.clip(np.floor(((work.layers * layer + head) / work.pp - head) / layer), 1, work.layers - work.pp + 1)
    others = np.ceil((work.layers - last) / np.maximum(1, work.pp - 1))
    is_cut = (work.pp > 1) & (np.asarray(work.is_balanced) > 0)
    last, others = np.where(is_cut, last, work.layers / work.pp), np.where(is_cut, others, even)
    last = np.where(work.pp > 1, last, work.layers)
    longest = np.maximum(last * layer + head, np.where(work.pp > 1, others * layer, 0))
    return longest, np.where(longest > last * layer + head, others, last)


def all_reduce_seconds(size: Numbers, ranks: Numbers, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of an all-reduce of ``size`` bytes among neighbouring ranks."""
    return 2 * _collective(size, ranks, 1, hardware, constants)


def _cast_seconds(work: Work, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds in which whole weights get their compute copy, which a pipeline's ranks and four-bit weights keep."""
    is_whole = (np.asarray(work.pp) == 1) & (np.asarray(work.dp_shard * work.cp) == 1)
    layers = np.where(np.asarray(work.dequantised_bytes) > 0, 0, work.layers)
    moved = np.where(is_whole, work.cast_bytes, 0) * rank_parameters(replace(work, layers=layers))
    return moved / (hardware.bandwidth * constants.memory)


def _attention_seconds(work: Work, hardware: Hardware, constants: Constants) -> tuple[Numbers, Numbers]:
    """Seconds of a layer's attention, forward and backward."""
    heads = work.heads / work.tp
    is_fused = np.asarray(work.flash) > 0
    products = 4 * work.tokens * work.head_dim * heads / (hardware.peak * constants.attention)
    fused = products * (work.context + constants.short_attention) / 2
    whole = products * work.sequence
    moved = (
        work.activation_bytes
        / HALF
        * work.tokens
        * work.sequence
        * heads
        * constants.score_bytes
        / (hardware.bandwidth * constants.memory)
    )
    misaligned = np.where(work.head_dim % 8 == 0, 1, constants.misaligned)
    forward = np.where(is_fused, fused, whole + moved) * misaligned
    backward = np.where(is_fused, constants.attention_backward * fused, 2 * (whole + moved)) * misaligned
    return forward, backward


def _elementwise_seconds(work: Work, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of a layer's norms, activations and sums in a forward pass; a backward pass takes twice."""
    shared = constants.shared_bytes + EAGER_SHARED_BYTES * work.eager
    shared = shared / np.where(np.asarray(work.sequence_parallel) > 0, work.tp, 1)
    inner = constants.split_bytes * (work.chosen + work.shared) * (1 + work.gated) * work.inner / (4 * work.width)
    split = (inner + EAGER_SPLIT_BYTES * work.eager) / work.tp
    moved = work.activation_bytes / HALF * work.tokens * work.width * (shared + split)
    return moved / (hardware.bandwidth * constants.memory)


def _dequantise_seconds(work: Work, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds in which a pass makes a layer's four-bit weights numbers of the compute type."""
    experts = work.experts * work.expert_parameters / maximum(work.tp, work.ep)
    weights = work.dense_parameters / work.tp + experts
    return work.dequantised_bytes * weights / (hardware.bandwidth * constants.memory)


def _bandwidth(ranks: Numbers, stride: Numbers, hardware: Hardware, constants: Constants) -> Numbers:
    """Bytes a second of a ring whose ranks are ``stride`` ranks apart; groups of a node share its network."""
    inside = hardware.link * constants.link
    sharing = np.minimum(stride, hardware.gpus_per_node)
    between = np.minimum(inside, hardware.network * constants.network / sharing)
    return np.where(ranks * stride <= hardware.gpus_per_node, inside, between)


def _latency(ranks: Numbers, stride: Numbers, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of a collective without bytes."""
    each = np.where(ranks * stride <= hardware.gpus_per_node, constants.link_latency, constants.network_latency)
    return each * np.log2(np.maximum(ranks, 1))


def _collective(size: Numbers, ranks: Numbers, stride: Numbers, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of an all-gather or reduce-scatter of ``size`` bytes in a ring; an all-reduce takes twice."""
    sent = size * (ranks - 1) / ranks
    seconds = sent / _bandwidth(ranks, stride, hardware, constants) + _latency(ranks, stride, hardware, constants)
    return np.where(ranks > 1, seconds, 0)


def _all_to_all(size: Numbers, ranks: Numbers, stride: Numbers, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of an all-to-all of ``size`` bytes, inside and between nodes; all GPUs of a node send at once."""
    near = np.clip(hardware.gpus_per_node / stride, 1, ranks)
    inside = (near - 1) / ranks / (hardware.link * constants.link)
    between = (ranks - near) / ranks * hardware.gpus_per_node / (hardware.network * constants.network)
    seconds = size * np.maximum(inside, between) + _latency(ranks, stride, hardware, constants)
    return np.where(ranks > 1, seconds, 0)


def _tensor_seconds(work: Work, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of two all-reduces, or gathers and reduce-scatters of the sequence, of a layer and pass."""
    size = work.activation_bytes * work.tokens * work.width
    return 4 * _collective(size, work.tp, 1, hardware, constants)


def _context_seconds(
    work: Work, attention: Numbers, hardware: Hardware, constants: Constants, backward: bool = False
) -> Numbers:
    """Seconds that the ring, or exchanging heads for tokens, adds to a layer's attention; backward also gradients."""
    bandwidth = _bandwidth(work.cp, work.tp, hardware, constants)
    entries = 2 * work.tokens * work.head_dim * work.key_value_heads / work.tp
    messages, size = (2, work.activation_bytes + 4) if backward else (1, work.activation_bytes)
    each = _latency(work.cp, work.tp, hardware, constants) / np.maximum(1, np.log2(work.cp))
    sent = (work.cp - 1) * (entries * size / bandwidth + messages * each)
    exchanged: Numbers = 0.0
    for heads in (work.heads + 2 * work.key_value_heads, work.heads):
        size = work.activation_bytes * work.tokens * work.head_dim * heads / work.tp
        exchanged = exchanged + _all_to_all(size, work.cp, work.tp, hardware, constants)
    ring = np.where(work.cp > 1, _exposed_seconds(attention, sent, constants), 0)
    return np.where(np.asarray(work.ulysses) > 0, exchanged, ring)


def _expert_seconds(work: Work, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of dispatching tokens to experts and of their return, in a pass."""
    size = work.activation_bytes * work.tokens * work.width * work.chosen / work.tp
    return 2 * _all_to_all(size, work.ep, 1, hardware, constants)


def _exposed_seconds(compute: Numbers, sent: Numbers, constants: Constants) -> Numbers:
    """Seconds that communication during computation adds to it."""
    return np.maximum(compute, sent) + constants.overlap_loss * np.minimum(compute, sent) - compute


def _gather_seconds(work: Work, size: Numbers, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds in which FSDP moves a layer of ``size`` bytes a parameter; 0 for other ZeRO stages."""
    dense = work.dense_parameters
    experts = np.where(work.experts > 0, work.experts * work.expert_parameters / work.ep, 0)
    shards = work.dp_shard * work.cp
    inner = np.maximum(1, work.ep / work.tp)
    seconds = _collective(size * dense / work.tp, shards, work.tp, hardware, constants)
    expert_tp = np.where(work.ep > 1, 1, work.tp)
    seconds = seconds + _collective(
        size * experts / expert_tp, np.maximum(1, shards / inner), work.tp * inner, hardware, constants
    )
    return np.where((np.asarray(work.zero) > 2) & (shards > 1), seconds, 0)


def _forward(work: Work, hardware: Hardware, constants: Constants) -> _Pass:
    """Seconds of a layer's forward pass."""
    attention = _attention_seconds(work, hardware, constants)[0]
    busy = (
        layer_product_seconds(work, hardware, constants)[0]
        + attention
        + _elementwise_seconds(work, hardware, constants)
        + _dequantise_seconds(work, hardware, constants)
    )
    gathers = _gather_seconds(work, work.weight_bytes, hardware, constants) + weight_copy_seconds(work, hardware)
    context = _context_seconds(work, attention, hardware, constants)
    return _layer_pass(work, busy, context, 1, 1, gathers, hardware, constants)


def _backward(work: Work, hardware: Hardware, constants: Constants) -> _Pass:
    """Seconds of a layer's backward pass, recomputation included."""
    again, inputs, weights = layer_product_seconds(work, hardware, constants)
    attention_again, attention = _attention_seconds(work, hardware, constants)
    elementwise = _elementwise_seconds(work, hardware, constants)
    busy = inputs + weights + attention + 2 * elementwise
    busy = busy + work.recompute_products * again + work.recompute_attention * attention_again
    busy = busy + work.recompute_elementwise * elementwise
    busy = busy + (1 + work.recompute_products) * _dequantise_seconds(work, hardware, constants)
    gathers = _gather_seconds(work, work.weight_bytes + work.trained * work.gradient_bytes, hardware, constants)
    gathers = gathers + weight_copy_seconds(work, hardware) + gradient_copy_seconds(work, hardware)
    context = _context_seconds(work, attention, hardware, constants, backward=True)
    context = context + work.recompute_products * _context_seconds(work, attention_again, hardware, constants)
    launches, passes = 2 + work.recompute_products, 1 + work.recompute_products
    return _layer_pass(work, busy, context, launches, passes, gathers, hardware, constants)


def _layer_pass(
    work: Work,
    busy: Numbers,
    context: Numbers,
    launches: Numbers,
    passes: Numbers,
    gathers: Numbers,
    hardware: Hardware,
    constants: Constants,
) -> _Pass:
    """A pass of ``busy`` seconds of computation, with ``passes`` times its collectives but for the ``context``'s."""
    compute = (busy**4 + (launches * constants.launch) ** 4) ** 0.25  # the longer one; both where they are alike
    tensor = passes * _tensor_seconds(work, hardware, constants)
    experts = passes * _expert_seconds(work, hardware, constants)
    hidden = _exposed_seconds(compute + tensor + context + experts, gathers, constants)
    exposed = np.where(np.asarray(work.overlaps) > 0, hidden, gathers)
    return _Pass(compute, tensor, context, experts, exposed)


def _head_seconds(work: Work, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of a micro-batch's logits and loss, forward and backward."""
    columns, rows = work.vocabulary / work.tp, work.tokens
    product = Product(rows, columns, work.width, entry=work.activation_bytes)
    of_input, of_weight = product.gradients
    forward, inputs, weights = (
        each.seconds(hardware, constants, hardware.peak) for each in (product, of_input, of_weight)
    )
    weights = np.where(np.asarray(work.adapter_rank) > 0, 0, weights)
    products = (1 + work.other_passes) * forward + inputs + weights
    return products + rows * columns * constants.logit_bytes / (hardware.bandwidth * constants.memory)


def rank_parameters(work: Work) -> Numbers:
    """Parameters of a rank's part of the model, before ``dp_shard`` shards it."""
    dense = work.dense_parameters
    experts = np.where(work.experts > 0, work.experts * work.expert_parameters, 0)
    tables = work.vocabulary * work.width * np.where(np.asarray(work.pp) > 1, 1, 2 - work.tied)
    return work.layers / work.pp * (dense / work.tp + experts / np.maximum(work.tp, work.ep)) + tables / work.tp


def _reduction(work: Work, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of the data-parallel collectives at a step's end."""
    parameters, zero = rank_parameters(work), np.asarray(work.zero)
    shards = work.dp_shard * work.cp
    stride = work.tp * np.where(zero > 2, shards, 1)
    ranks = work.dp_replicate * np.where(zero > 2, 1, shards)
    each = np.where(zero > 2, parameters / shards, parameters)
    reduced = _collective(each * work.trained * work.gradient_bytes, ranks, stride, hardware, constants)
    gathered = _collective(each * work.weight_bytes, ranks, stride, hardware, constants)
    is_partial, overlaps = (zero > 0) & (zero < 3), np.asarray(work.overlaps) > 0
    reduced = reduced * np.where((zero == 2) & ~overlaps, work.micro_batches, 1)
    copies = BUCKET_COPIES * work.gradient_bytes * work.trained * parameters / (hardware.bandwidth * constants.memory)
    copied = np.where(overlaps, 0, copies * np.where(zero > 1, work.micro_batches, 1))
    share = np.where(overlaps, constants.reduction, 1)
    return share * np.where(is_partial, reduced + gathered, 2 * reduced) + copied


def _optimizer(work: Work, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of the update."""
    shards = np.where(np.asarray(work.zero) > 0, work.dp_shard * work.cp, 1)
    parameters = rank_parameters(work)
    moved = work.trained * parameters / shards * constants.optimizer_bytes
    here = moved / (hardware.bandwidth * constants.memory)
    return np.where(np.asarray(work.offloads) > 0, host_update_seconds(work, parameters, hardware, constants), here)
