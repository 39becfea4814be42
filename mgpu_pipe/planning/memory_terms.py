"""Memory of a rank from plain numbers: bytes of each term, for one plan or for arrays of plans at once.

Two moments can be the peak: the start of the last backward pass for which all micro-batches are in flight, when all
activations are there, and its end, when all gradients are. What a term cannot be derived from is a constant of
:class:`Overheads`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_pipe.architectures.formulas.kept_memory import ADAM_STATE, FP32, HALF
from mgpu_pipe.planning.activation_bytes import (
    Activations,
    around_bytes,
    backward_bytes,
    kept_bytes,
    loss_bytes,
    message_bytes,
    output_bytes,
)
from mgpu_pipe.planning.work import Numbers, Work, choose, maximum, minimum

GIB = 1 << 30
Terms = dict[str, Numbers]


@dataclass(frozen=True)
class Overheads:
    """Bytes that no formula gives; each is assumed unless its line says that it was calibrated.

    Attributes:
        context: bytes of a CUDA context with the workspaces of cuBLAS, on the device.
        group: bytes of NCCL's buffers for each group of ranks.
        fragmentation: share of what comes and goes that the allocator holds besides.
        second_gradients: share of the blocks' whole fp32 gradients that exists twice where blocks are compiled and
            several micro-batches are summed up on one process; calibrated on ``benchmarks/results/gpu_step-gpu.json``
            (torch 2.11); a trace of the uncompiled model has none.
    """

    context: float = 0.6 * GIB
    group: float = 0.2 * GIB
    fragmentation: float = 0.04
    second_gradients: float = 1.0


@dataclass(frozen=True)
class State:
    """Parameters of a model and how a rank keeps them; numbers or arrays like those of ``Work``.

    Attributes:
        block: parameters of a block.
        experts: those of them that are experts'.
        norms: those of them that every tensor-parallel rank has.
        embedding: parameters of the tables and towers, on the first pipeline stage.
        uncut: those of them that every tensor-parallel rank has.
        head: parameters of the output head on the last stage; 0 if the same rank has it as its embedding.
        head_trains: 1 if the matrix of the output head gets a gradient.
        block_weight: bytes of a block's weight; of the embedding's and head's, ``weight``.
        weight: bytes of a weight that the optimizer updates, without a half copy.
        copy: bytes of a weight in the compute type next to it; 0 for none.
        block_copy: bytes of a block's weight that are gathered; those of a four-bit weight keep their four bits.
        dequantised: bytes of the largest four-bit matrix while it is multiplied by.
        gradient: bytes of a gradient that is kept.
        optimizer: bytes of the optimizer's state of a trained parameter.
        trained: share of the parameters that is trained.
        trained_apart: parameters of towers and projector that train although others do not, less those that do not
            although others do.
        uncut_apart: those of them that every tensor-parallel rank has.
        added: trained parameters of a block's adapters.
        gathers_units: 1 if weights are gathered unit by unit and freed; 0 if the copy is kept whole.
        sums_whole: 1 if several micro-batches are summed up in whole gradients.
        units: units that are gathered at once.
        buckets: bytes of buffers that gradients are reduced in.
        other: bytes of other models on a rank, such as a teacher.
        offloads: 1 if gradients and optimizer state are in host memory, with ZeRO-3 and FSDP the weights too; ZeRO-1
            keeps its whole gradients.
        on_disk: 1 if the optimizer state is on a disk instead.
        groups: groups of ranks that a rank is in.
    """

    block: Numbers
    embedding: Numbers
    head: Numbers
    experts: Numbers = 0.0
    norms: Numbers = 0.0
    uncut: Numbers = 0.0
    head_trains: Numbers = 1.0
    block_weight: Numbers = FP32
    weight: Numbers = FP32
    copy: Numbers = HALF
    block_copy: Numbers = HALF
    dequantised: Numbers = 0.0
    gradient: Numbers = FP32
    optimizer: Numbers = ADAM_STATE
    trained: Numbers = 1.0
    trained_apart: Numbers = 0.0
    uncut_apart: Numbers = 0.0
    added: Numbers = 0.0
    gathers_units: Numbers = 1.0
    sums_whole: Numbers = 0.0
    units: Numbers = 2.0
    buckets: Numbers = 0.0
    other: Numbers = 0.0
    offloads: Numbers = 0.0
    on_disk: Numbers = 0.0
    groups: Numbers = 0.0


@dataclass(frozen=True)
class Place:
    """A rank's place in the pipeline.

    Attributes:
        layers: layers of all its stages.
        passes: micro-batches in flight, each of all its layers; see :mod:`mgpu_pipe.planning.layout_costs`.
        first: 1 if it has the embedding.
        last: 1 if it has norm, head and loss.
        waiting: see :func:`mgpu_pipe.planning.layout_costs.waiting_passes`.
    """

    layers: Numbers
    passes: Numbers = 1.0
    first: Numbers = 1.0
    last: Numbers = 1.0
    waiting: Numbers = 0.0


def memory_terms(work: Work, state: State, keeps: Activations, place: Place, overheads: Overheads) -> Terms:
    """Bytes of a rank's terms at its peak, by name."""
    shards = work.dp_shard * work.cp
    a_block = (state.block - state.norms) / work.tp + state.norms
    embedding = place.first * ((state.embedding - state.uncut) / work.tp + state.uncut)
    ends = embedding + place.last * state.head / work.tp
    blocks = place.layers * a_block
    adapters = place.layers * state.added / work.tp
    apart = place.first * ((state.trained_apart - state.uncut_apart) / work.tp + state.uncut_apart)
    trained = state.trained * (blocks + ends) + adapters + apart
    weights_split = choose(work.zero > 2, shards, 1)
    weights = (state.block_weight * blocks + state.weight * (ends + adapters)) / weights_split
    weights = weights * choose(work.zero > 2, 1 - state.offloads, 1.0)
    terms: Terms = {"weights": weights, "optimizer": (1 - state.offloads) * state.optimizer * trained / shards}
    here = choose(work.zero < 2, 1.0, 1 - state.offloads)

    whole = (state.sums_whole > 0) | (work.zero < 2)
    # A unit's experts are gathered over the ranks that hold the same ones; tensor and expert parallelism share a cut.
    others = (state.block - state.experts - state.norms) / work.tp + state.norms
    unit = choose(state.experts, others + state.experts / maximum(work.ep, work.tp), a_block)
    whole_blocks = place.layers * unit
    whole_trained = state.trained * (whole_blocks + ends) + adapters + apart
    gradients = state.gradient * choose(whole, whole_trained, trained / shards)
    summed = work.micro_batches > place.passes
    twice = overheads.second_gradients * keeps.compiled * (shards == 1) * whole * (state.copy > 0)
    second = twice * summed * state.gradient * state.trained * whole_blocks
    head = place.last * choose(state.head, state.head, state.embedding) / work.tp
    gathered_at_loss, gathered_in_block = _gathered_weights(state, place, unit, head, ends)

    a_pass = place.layers * kept_bytes(work, keeps) + work.stages_per_rank * message_bytes(work, keeps)
    tower = place.first * work.tower_trains * work.tower_layers * kept_bytes(work.tower_work(), keeps)
    tokens_kept = place.passes * (a_pass + tower) + place.last * around_bytes(work, keeps)
    waits = place.waiting * place.layers / work.stages_per_rank * output_bytes(work, keeps)
    waits = waits + place.last * maximum(place.waiting - 1.0, 0.0) * keeps.item * state.head_trains * head
    tokens_kept = tokens_kept + state.trained * waits
    at_loss = place.last * loss_bytes(work, keeps, state.head_trains * head)
    in_block = backward_bytes(work, keeps, state.dequantised / work.tp)
    in_unit = state.trained * unit * choose(shards > 1, state.copy + state.gradient, state.copy)
    early = maximum(gathered_at_loss + at_loss, gathered_in_block + in_block + in_unit)
    late = in_block + maximum(in_unit, (state.trained * embedding + apart) * (state.copy + state.gradient))
    late_activations = (place.passes - 1) * (a_pass + tower) + kept_bytes(work, keeps) + tower
    starts = choose(summed, gradients, 0.0) * here + second + tokens_kept + early
    ends_with = gradients * here + late_activations + gathered_in_block + late
    at_start = starts >= ends_with
    terms["gradients"] = here * choose(at_start, choose(summed, gradients, 0.0), gradients)
    terms["second gradients"] = choose(at_start, second, 0.0)
    seen = place.passes * tower
    terms["activations"] = choose(at_start, tokens_kept, late_activations) - seen
    terms["activations of the tower"] = seen + 0.0 * weights
    head_first = at_start & (gathered_at_loss + at_loss >= gathered_in_block + in_block + in_unit)
    terms["gathered weights"] = choose(head_first, gathered_at_loss, gathered_in_block)
    terms["loss head"] = choose(head_first, at_loss, 0.0)
    terms["backward pass of a block"] = choose(head_first, 0.0, in_block)
    terms["gradients under way"] = choose(head_first, 0.0, choose(at_start, in_unit, late - in_block))
    terms.update(_steady_terms(state, overheads, weights))
    terms["fragmentation"] = overheads.fragmentation * sum(terms[name] for name in MOVING)
    return terms


def host_bytes(work: Work, state: State, place: Place) -> Numbers:
    """Bytes of weights, gradients and optimizer state that a rank of data parallelism alone keeps in host memory."""
    blocks, ends = place.layers * state.block, state.embedding + state.head
    adapters = place.layers * state.added
    trained = state.trained * (blocks + ends) + adapters + state.trained_apart
    weights = choose(work.zero > 2, state.block_weight * blocks + state.weight * (ends + adapters), 0.0)
    gradients = choose(work.zero < 2, 0.0, state.gradient * trained)
    optimizer = (1 - state.on_disk) * state.optimizer * trained
    return state.offloads * (weights + gradients + optimizer) / (work.dp_shard * work.cp)


def _gathered_weights(
    state: State, place: Place, unit: Numbers, head: Numbers, ends: Numbers
) -> tuple[Numbers, Numbers]:
    """Bytes of gathered weights at the loss and in a block's backward pass.

    At the loss the head's unit, gathered last, is there with the buffer in which it came, and no block's; it is freed
    before the blocks' backward pass. Tied tables are in the root unit, which stays.

    Args:
        unit: parameters of a block's unit.
        head: parameters of the matrix of the output head on this rank.
        ends: parameters of embedding and head on this rank.
    """
    units = choose(state.gathers_units, minimum(state.units, place.layers) * unit, place.layers * unit)
    root = state.copy * choose(state.gathers_units, choose(state.head, 0.0, head), ends)
    in_block = state.block_copy * units + root
    unit_of_head = choose(state.head, 2 * state.copy * head, root + state.block_copy * unit)
    return choose(state.gathers_units, unit_of_head, in_block), in_block


def _steady_terms(state: State, overheads: Overheads, weights: Numbers) -> Terms:
    """Terms that are the same all through a step; ``weights`` gives them their shape."""
    return {
        "buckets": state.buckets + 0.0 * weights,
        "other models": state.other + 0.0 * weights,
        "communication": overheads.group * state.groups,
        "context": overheads.context + 0.0 * weights,
    }


MOVING = (
    *("gathered weights", "activations", "activations of the tower", "loss head", "backward pass of a block"),
    "gradients under way",
)
"""Terms that the allocator frees and gives again."""
OUTSIDE = ("communication", "context", "fragmentation")
"""Terms that torch's count of allocated bytes leaves out."""
