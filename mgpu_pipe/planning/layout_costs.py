"""Costs of a step that only some layouts have: those of pipeline schedules, and of offload to host and disk.

Costs of a schedule are closed forms of the streams of :mod:`mgpu_pipe.parallel.pipeline.work_order`: a search needs no
simulation. Weights of FSDP and ZeRO-3 are copied to the GPU before they are gathered, in each pass; gradients are
copied to the host, where several micro-batches are summed up. The processes of a node share its main memory and its
disk. Only data parallelism offloads, so a rank has a ``dp_shard``-th of the model. No offload was measured on a GPU.
"""

from __future__ import annotations

from mgpu_pipe.planning.work import Constants, Hardware, Numbers, Work, choose, maximum, minimum


def passes_in_flight(schedule: str, rank: Numbers, pp: Numbers, stages: Numbers, micro_batches: Numbers) -> Numbers:
    """The most micro-batches of all its layers whose activations a pipeline rank keeps.

    A split backward pass keeps them until the gradients of weights are there.

    Args:
        schedule: name of the schedule.
        stages: stages of each rank; a fraction of a micro-batch is in some of them.
    """
    left = pp - 1 - rank
    most = {
        "gpipe": micro_batches * stages,
        "1f1b": left + 1,
        "interleaved_1f1b": (stages - 1) * pp + 2 * left + 1,
        "interleaved_zero_bubble": stages * pp,
        "zbv": 2 * pp,
        "dualpipev": 2 * pp + 1,
    }[schedule]
    return minimum(most, micro_batches * stages) / stages


GRADIENT_SHARE = 0.5
"""Bytes of gradients that wait for those of weights, over the activations that they wait with; about, in a trace."""


def waiting_passes(schedule: str, rank: Numbers, pp: Numbers) -> Numbers:
    """Passes of a stage at a rank's peak that have gradients of inputs and none of weights.

    ZB-V's rank peaks late, where it keeps fewer passes and all of them wait; they count here as if it kept all.
    DualPipeV's wait after the peak.
    """
    if schedule == "interleaved_zero_bubble":
        return rank + 1.0
    if schedule == "zbv":
        late = 2 * rank + 1
        return maximum(1.0, late - (2 * pp - late) / GRADIENT_SHARE)
    return 0.0 * rank


def bubble(
    schedule: str, pp: Numbers, micro_batches: Numbers, forward: Numbers, inputs: Numbers, weights: Numbers
) -> Numbers:
    """Seconds that a pipeline rank waits in a step, over ``pp - 1``.

    Those of 1F1B are in section 2.2 of arXiv:2104.04473 and those of ZB-H1 in table 2 of arXiv:2401.10241. Those of
    ZB-V and DualPipeV are exact where ``weights <= forward <= inputs``.

    Args:
        schedule: name of the schedule.
        forward: seconds of a stage's forward pass.
        inputs: seconds of the gradients of its inputs.
        weights: seconds of the gradients of its weights.
    """
    if schedule == "interleaved_zero_bubble":
        return maximum(forward + inputs - weights, inputs)
    if schedule == "zbv":
        return choose(micro_batches < 2 * pp - 1, 2 * inputs, maximum(inputs, 2 * (inputs - weights)))
    if schedule == "dualpipev":
        late = 2 * inputs - weights - forward / maximum(1, pp - 1)
        return maximum(maximum(forward + inputs - weights, inputs), late)
    return forward + inputs + weights


COPIED = 0.8
"""Share of the speed of PCIe and of a disk that large copies reach; assumed."""
SUMMED_BYTES = 12
"""Bytes that the host reads and writes for each gradient that it adds to another."""
DISK_BYTES = 32
"""Bytes of a parameter that a disk reads and writes in an update: its weight, two moments and its gradient, in fp32."""


def weight_copy_seconds(work: Work, hardware: Hardware) -> Numbers:
    """Seconds in which a rank copies its part of a layer's weights to the GPU, for one pass."""
    size = work.host_weight_bytes * work.layer_parameters / work.dp_shard
    return choose((work.offloads > 0) & (work.zero > 2), size / (hardware.pcie * COPIED), 0.0)


def gradient_copy_seconds(work: Work, hardware: Hardware) -> Numbers:
    """Seconds in which a rank copies its part of a layer's gradients to the host, where nothing is summed up there."""
    size = work.gradient_bytes * work.trained * work.layer_parameters / work.dp_shard
    hides = (work.offloads > 0) & (work.zero > 2) & (work.micro_batches == 1)
    return choose(hides, size / (hardware.pcie * COPIED), 0.0)


def offload_seconds(work: Work, parameters: Numbers, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of a step in which a rank waits for copies, sums on the host, and the disk.

    The host adds a gradient to those of earlier micro-batches after its copy has arrived. ZeRO-1 and 2 copy updated
    weights back.

    Args:
        parameters: of a rank's part of the model, before it is sharded.
    """
    trained = work.trained * parameters / work.dp_shard
    ranks = minimum(work.world, hardware.gpus_per_node)
    waits = choose((work.zero < 3) | (work.micro_batches > 1), work.micro_batches * work.gradient_bytes, 0.0)
    back = choose(work.zero < 3, work.weight_bytes, 0.0)
    copied = trained * (waits + back) / (hardware.pcie * COPIED)
    summed = (work.micro_batches - 1) * SUMMED_BYTES * trained * ranks / (hardware.host_bandwidth * constants.memory)
    stored = choose(work.on_disk, DISK_BYTES * trained * ranks / (hardware.disk * COPIED), 0.0)
    return choose(work.offloads, copied + summed + stored, 0.0)


def host_update_seconds(work: Work, parameters: Numbers, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds of the optimizer on the host, by the bytes that it reads and writes; see :func:`offload_seconds`."""
    ranks = minimum(work.world, hardware.gpus_per_node)
    moved = work.trained * parameters / work.dp_shard * constants.optimizer_bytes * ranks
    return moved / (hardware.host_bandwidth * constants.memory)
