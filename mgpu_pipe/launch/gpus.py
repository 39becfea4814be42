"""The GPUs of a world's ranks, compared before the ranks talk by NCCL, which would hang or abort."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mgpu_pipe.config.resolve import AMPERE
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.runs.lock import boot_id

if TYPE_CHECKING:
    from torch.distributed import Store

SEEN, JUDGED = "gpu", "gpus"


@dataclass(frozen=True)
class Gpu:
    """What a rank sees as its own.

    Attributes:
        machine: the running system's identity; containers of one machine share it.
        capability: its compute capability.
    """

    node: str
    machine: str
    uuid: str
    name: str
    capability: tuple[int, int]

    @classmethod
    def current(cls) -> Gpu:
        import torch

        seen = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(socket.gethostname(), boot_id(), str(seen.uuid), seen.name, (seen.major, seen.minor))


def compare(store: Store, rank: int, world_size: int, own: Gpu) -> None:
    """Tell the others of this rank's GPU, and hear whether all of them go together; rank 0 decides. Collective.

    Raises:
        BadInputError: on every rank, they do not.
    """
    store.set(f"{SEEN}/{rank}", json.dumps(asdict(own)))
    if rank == 0:
        told = [json.loads(store.get(f"{SEEN}/{other}")) for other in range(world_size)]
        gpus = [Gpu(**{**one, "capability": tuple(one["capability"])}) for one in told]
        store.set(JUDGED, fault(gpus))
        if len({gpu.name for gpu in gpus}) > 1:
            print(f"note: {_kinds(gpus)}: a step takes as long as on the slowest", file=sys.stderr, flush=True)
    if found := store.get(JUDGED).decode():
        raise BadInputError(found)


def fault(gpus: Sequence[Gpu]) -> str:
    """Why the ranks, whose ``gpus`` these are, cannot train together; empty where they can."""
    seen: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gpus):
        other = seen.setdefault((gpu.machine, gpu.uuid), rank)
        if other != rank:
            return (
                f"ranks {other} and {rank} see the same GPU ({gpu.name} {gpu.uuid} of node {gpu.node}): start one "
                "process for each GPU, and leave CUDA_VISIBLE_DEVICES alone or give every process its own"
            )
    if len({gpu.capability >= AMPERE for gpu in gpus}) > 1:
        return f"{_kinds(gpus)}: some compute in bf16 and some do not; use nodes of one kind"
    return ""


def _kinds(gpus: Sequence[Gpu]) -> str:
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        first.setdefault(gpu.name, rank)
    return "the ranks see different GPUs: " + ", ".join(f"{name} (from rank {rank} on)" for name, rank in first.items())
