"""Three ranks train twice, the second time while another user sends numbers of ranks to gloo's ports; prints losses.

Runs in a network of its own, for the attack would reach what else this machine does.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from mgpu_pipe.launch.process_group import process_group
from mgpu_pipe.launch.world import World, launcher_store

RANKS, STEPS, NOBODY = 3, 3, 65534
SIOCSIFFLAGS, UP_AND_RUNNING = 0x8914, 0x41


def attack(hits: int) -> None:
    """As another user: send each new listener the numbers of all ranks, and other bytes; writes a byte for each."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    seen: set[str] = set()
    kept = []
    while True:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] != "0A" or words[9] in seen:
                continue
            seen.add(words[9])
            for text in (b"?", b"garbage garbage", *(struct.pack("<q", number) for number in range(RANKS + 1))):
                stranger = socket.socket()
                kept.append(stranger)
                with suppress(OSError):
                    stranger.settimeout(1)
                    stranger.connect(("127.0.0.1", int(words[1].partition(":")[2], 16)))
                    stranger.sendall(text)
            os.write(hits, b"x")
        time.sleep(0.001)


def train(rank: int, store: int, hits: int | None) -> list[str]:
    """Losses, in hexadecimal. Rank 1 comes to each group when another rank's listener has been attacked."""
    world = World(rank, rank, RANKS, RANKS, "127.0.0.1", 0, store_fd=store)

    def wait() -> None:
        if hits is not None and rank == 1:
            os.read(hits, 1)

    wait()
    with process_group(world, launcher_store(world, 60), "cpu", 60):
        wait()
        halves = dist.new_group([0, 1])
        wait()
        whole = dist.new_group(list(range(RANKS)), backend="gloo")
        weight = torch.ones(8, 8, requires_grad=True)
        generator = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(STEPS):
            loss = (torch.rand(4, 8, generator=generator) @ weight).square().mean()
            (gradient,) = torch.autograd.grad(loss, weight)
            dist.all_reduce(gradient, group=whole)
            if rank < 2:
                dist.all_reduce(gradient, group=halves)
            weight.data -= 0.01 * gradient
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total).hex())
    return losses


def run(attacked: bool) -> None:
    store = os.memfd_create("store")
    read, write = os.pipe()
    attacker = 0
    if attacked and not (attacker := os.fork()):
        attack(write)
    ranks = []
    for rank in range(RANKS):
        if pid := os.fork():
            ranks.append(pid)
            continue
        losses = train(rank, store, read if attacked else None)
        os.write(1, f"{'attacked' if attacked else 'alone'} {rank} {' '.join(losses)}\n".encode())
        os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    if attacker:
        os.kill(attacker, 9)
        os.waitpid(attacker, 0)
    assert not any(codes), codes


if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", UP_AND_RUNNING))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    run(attacked=False)
    run(attacked=True)
