"""Whether a job's nodes reach its first one, and how fast, before the ranks meet there. No torch.

The first task listens where the ranks will meet, at a port that is free until then. Every other task connects; one of
each node, one after the other, answers round trips and takes and sends a transfer. What is measured is TCP by one
connection between a node and the first: neither what NCCL sends past TCP, nor two other nodes with one another.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from mgpu_pipe.config.interfaces import INTERFACES, told_interfaces
from mgpu_pipe.config.joined_world import existing_world, hosts, tasks_per_node
from mgpu_pipe.errors import WorkerError
from mgpu_pipe.launch.node_check import leave_out

ANSWER_S = 10.0
"""The longest that one exchange may take."""
MOST_TRIP_S = 0.1
MIB = 1 << 20
TRANSFER, LEAST_RATE = 8 * MIB, 10 * MIB
"""Bytes, and bytes per second."""
TRIPS = 10
"""The best one counts, for a busy machine has pauses; so does that of the transfers, until one is fast enough."""
LOOK_S = 0.2
STOP_S = 2.0
"""A task that is asked to stop leaves and closes its link; this one was asked, too, and leaves within this time."""
KEEPALIVE_S = 60
HEADER = struct.Struct("!II")
"""Bytes that follow, and bytes that are wanted back; none back: the measurement is over."""
LONGEST_LINE = 1000
SIOCGIFADDR = 0x8915


def links_are_good(folder: Path, node: str, device_type: str, timeout: float) -> bool:
    """Whether the nodes of this step may train together; every task of the step calls this.

    The first task names the nodes whose links are bad, and writes them down for the batch script.

    Args:
        folder: the run's.
        timeout: seconds in which all tasks have to connect.

    Raises:
        WorkerError: this task does not reach the first one, or is that and cannot listen.
    """
    world, nodes = existing_world(os.environ), hosts(os.environ.get("SLURM_STEP_NODELIST", ""))
    if not world or len(nodes) < 2:
        return True
    world = {"LOCAL_RANK": os.environ["SLURM_LOCALID"], **os.environ, **world}  # a site may set torch's own variables
    if world["RANK"] != "0":
        return _come(world, node, device_type, timeout)
    faults = _blamed(_meet(world, nodes, device_type, timeout), nodes)
    for name, fault in faults.items():
        leave_out(folder, name, [fault])
        print(f"error: node {name}: {fault}; the job is queued again without it", file=sys.stderr, flush=True)
    return not faults


def _meet(world: Mapping[str, str], nodes: list[str], device_type: str, timeout: float) -> dict[str, str]:
    """The first task: wait for all others and measure each node's link; what is wrong, by the node's name."""
    port, until = int(world["MASTER_PORT"]), time.monotonic() + timeout
    missing = Counter(dict(zip(nodes, tasks_per_node(os.environ["SLURM_STEP_TASKS_PER_NODE"]), strict=True)))
    missing[nodes[0]] -= 1
    faults, worst, connections = {}, (0.0, math.inf), []
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(_listener("", port))
            own = interface_address(device_type)
            data = stack.enter_context(_listener(own, 0)) if own else None
        except OSError as error:
            raise WorkerError(f"node {nodes[0]} cannot listen at port {port}, where the ranks meet: {error}") from None
        while missing.total():
            try:
                connection = stack.enter_context(listener.accept()[0])
                connection.settimeout(ANSWER_S)
                step, there, leads = json.loads(_line(connection))
            except TimeoutError:  # nobody waits to be heard
                if time.monotonic() > until:
                    break
                continue
            except (OSError, ValueError, TypeError):
                continue  # not one of ours
            if step != _step():
                continue
            missing[there] -= 1
            connections.append(connection)
            if not leads:
                continue
            try:
                _say(connection, data and data.getsockname()[:2])
                trip, rate = measured(stack.enter_context(data.accept()[0]) if data else connection)
            except OSError as error:
                if isinstance(error, ConnectionError):
                    time.sleep(STOP_S)
                faults[there] = f"its link to {nodes[0]} fails: {error}"
                continue
            worst = max(worst[0], trip), min(worst[1], rate)
            if trip > MOST_TRIP_S:
                faults[there] = f"a round trip to {nodes[0]} takes {1e3 * trip:.0f} ms"
            elif rate < LEAST_RATE:
                faults[there] = f"its link to {nodes[0]} carries {rate / MIB:.1f} MiB/s"
        for there in (name for name, tasks in missing.items() if tasks):
            faults[there] = f"it did not reach {nodes[0]} ({world['MASTER_ADDR']}, port {port}) within {timeout:.0f} s"
        listener.close()  # the ranks meet at this port next
        for connection in connections:
            with suppress(OSError):
                _say(connection, not faults)
    if not faults:
        what = f"a round trip takes at most {1e3 * worst[0]:.2f} ms, at least {worst[1] / MIB:,.0f} MiB/s pass"
        print(f"links of {len(nodes)} nodes to {nodes[0]}: {what}", file=sys.stderr, flush=True)
    return faults


def _blamed(faults: dict[str, str], nodes: list[str]) -> dict[str, str]:
    """Where no node has a good link to the first one, the first one is bad; of two nodes nobody can tell which."""
    if len(faults) < len(nodes) - 1:
        return faults
    own = {nodes[0]: "; ".join(f"{name}: {fault}" for name, fault in faults.items())}
    return own if len(nodes) > 2 else {**own, **faults}


def _come(world: Mapping[str, str], node: str, device_type: str, timeout: float) -> bool:
    """Every other task: connect, be measured where it is its node's first, and hear whether all links are good."""
    where, until = (world["MASTER_ADDR"], int(world["MASTER_PORT"])), time.monotonic() + timeout + ANSWER_S
    while True:
        try:
            connection = socket.create_connection(where, timeout=ANSWER_S)
            break
        except OSError as error:
            if time.monotonic() > until:
                raise WorkerError(f"node {node} does not reach {where[0]}, port {where[1]}: {error}") from None
            time.sleep(LOOK_S)
    leads = world["LOCAL_RANK"] == "0"
    with connection, suppress(OSError, ValueError):
        connection.settimeout(None)  # others may be measured first, bad ones slowly
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        _say(connection, [_step(), node, leads])
        if leads and (data := json.loads(_line(connection))):
            own = interface_address(device_type)
            with socket.create_connection(tuple(data), ANSWER_S, source_address=(own, 0) if own else None) as link:
                answer(link)
        elif leads:
            answer(connection)
        return bool(json.loads(_line(connection)))
    return False


def measured(link: socket.socket) -> tuple[float, float]:
    """A round trip's seconds, and bytes per second in the slower direction; :func:`answer` is at the other end.

    Raises:
        OSError: the other end does not answer in time, or is gone.
    """
    link.settimeout(ANSWER_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trip = min(_exchange(link, 0, 1) for _ in range(TRIPS))
    rates = []
    for there, back in ((TRANSFER, 1), (0, TRANSFER)):
        rate, until = 0.0, time.monotonic() + ANSWER_S
        while rate < LEAST_RATE and time.monotonic() < until:
            rate = max(rate, TRANSFER / _exchange(link, there, back))
        rates.append(rate)
    link.sendall(HEADER.pack(0, 0))
    return trip, min(rates)


def answer(link: socket.socket) -> None:
    """Take and send what :func:`measured` asks for."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        there, back = HEADER.unpack(_take(link, HEADER.size))
        if not back:
            return
        _take(link, there)
        link.sendall(bytes(back))


def interface_address(device_type: str) -> str:
    """This node's IPv4 address on the interface that the ranks were told to use; empty where they were told none."""
    if os.environ.get(INTERFACES[device_type], "").startswith("^"):  # any but these
        return ""
    for name in told_interfaces(device_type) or ():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused, suppress(OSError):
            found = fcntl.ioctl(unused, SIOCGIFADDR, struct.pack("256s", name.encode()))
            return socket.inet_ntoa(found[20:24])
    return ""


def _exchange(link: socket.socket, there: int, back: int) -> float:
    """Send and take as many bytes; the seconds it took."""
    began = time.perf_counter()
    link.sendall(HEADER.pack(there, back) + bytes(there))
    _take(link, back, began + ANSWER_S)
    return time.perf_counter() - began


def _take(link: socket.socket, size: int, until: float = math.inf) -> bytes:
    taken = bytearray()
    while len(taken) < size:
        part = link.recv(min(size - len(taken), MIB))
        if not part:
            raise ConnectionError("it was closed")
        if time.perf_counter() > until:
            raise TimeoutError(f"{size / MIB:.0f} MiB take more than {ANSWER_S:.0f} s")
        taken += part
    return bytes(taken)


def _listener(address: str, port: int) -> socket.socket:
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=4096, dualstack_ipv6=both)
    listener.settimeout(LOOK_S if port else ANSWER_S)
    return listener


def _say(connection: socket.socket, value: object) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _line(connection: socket.socket) -> bytes:
    """A line; byte by byte, for what follows it is not its own."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
        line += _take(connection, 1)
    return line


def _step() -> str:
    """Names the job's step and its attempt."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "-".join(os.environ.get(name, "0") for name in names)
