"""Seconds that host memory and disks add to a step: copies over PCIe, the host's update, and traffic of the disk.

Weights of FSDP and ZeRO-3 are copied to the GPU before they are gathered, in each pass; gradients are copied to the
host, where several micro-batches are summed up. The processes of a node share its main memory and its disk. Only data
parallelism offloads, so a rank has a ``dp_shard``-th of the model. Nothing of this was measured on a GPU.
"""

from __future__ import annotations

from mgpu_pipe.planning.work import Constants, Hardware, Numbers, Work, choose, minimum

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
    """Seconds of the optimizer on the host, by the bytes that it reads and writes.

    Args:
        parameters: see :func:`offload_seconds`.
    """
    ranks = minimum(work.world, hardware.gpus_per_node)
    moved = work.trained * parameters / work.dp_shard * constants.optimizer_bytes * ranks
    return moved / (hardware.host_bandwidth * constants.memory)
