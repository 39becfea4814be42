"""Link check of a SLURM job: measures the link of each node to the first one before the ranks start.

The first task listens at the port of the ranks' store, which is still free. Every other task connects; one task per
node, in turn, answers round trips and transfers. This measures TCP over one connection between a node and the first
node: neither NCCL's traffic outside TCP nor the links between other nodes.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, suppress
from pathlib import Path

from mgpu_pipe.checks.devices import INTERFACES, configured_interfaces
from mgpu_pipe.errors import WorkerError, print_line
from mgpu_pipe.launch.link_channel import LOOK_S, Channel, Claim, Gate, join, make_key, wait_for_key
from mgpu_pipe.launch.node import exclude_node
from mgpu_pipe.system.joined_world import existing_world, hosts, tasks_per_node

ANSWER_S = 10.0
"""Limit in seconds of one exchange."""
MAX_TRIP_S = 0.1
MIB = 1 << 20
TRANSFER, MIN_RATE = 8 * MIB, 10 * MIB
"""Bytes, and bytes per second."""
TRIPS = 10
"""Round trips; the best counts, because busy machines pause. Transfers repeat until one is fast enough."""
MAX_MEASURE_S = (TRIPS + 4) * ANSWER_S
"""Limit in seconds of a node's measurement."""
CHECK, TRANSFERS = "check", "transfers"
"""Purposes of a task's connection."""
STOP_S = 2.0
"""Seconds in which this task gets the stop signal that made another task close its link."""
KEEPALIVE_S = 60
HEADER = struct.Struct("!II")
"""Number of bytes that follow, and of bytes to send back; 0 back ends the measurement."""
SIOCGIFADDR = 0x8915


def links_are_good(folder: Path, node: str, device_type: str, timeout: float) -> bool:
    """Whether the links of this step's nodes are good; every task of the step calls this.

    The first task prints the nodes with bad links and records them for the batch script.

    Args:
        folder: the run's folder.
        timeout: seconds for all tasks to connect.

    Raises:
        WorkerError: this task cannot reach the first one, or is the first and cannot listen.
    """
    world, nodes = existing_world(os.environ), hosts(os.environ.get("SLURM_STEP_NODELIST", ""))
    if not world or len(nodes) < 2:
        return True
    world = {"LOCAL_RANK": os.environ["SLURM_LOCALID"], **os.environ, **world}  # a site may set torch's variables
    if world["RANK"] != "0":
        return _connect_and_measure(folder, world, node, len(nodes), device_type, timeout)
    faults = _with_blame(_meet(folder, world, nodes, device_type, timeout), nodes)
    for name, fault in faults.items():
        exclude_node(folder, name, [fault])
        print_line(f"error: node {name}: {fault}; the job is queued again without it", file=sys.stderr, flush=True)
    return not faults


def _meet(folder: Path, world: Mapping[str, str], nodes: list[str], device_type: str, timeout: float) -> dict[str, str]:
    """On the first task: wait for all others and measure each node's link; returns faults by node."""
    port, until = int(world["MASTER_PORT"]), time.monotonic() + timeout
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(_listener("", port))
            address = interface_address(device_type)
            data = stack.enter_context(_listener(address, 0)) if address else None
        except OSError as error:
            raise WorkerError(f"node {nodes[0]} cannot listen at port {port}, where the ranks meet: {error}") from None
        make_key(folder)
        key = wait_for_key(folder, until)
        tasks = {Claim(_step(), node, place, CHECK): node for node, place in _others(nodes)}
        channels = _gather(stack, listener, key, tasks.keys(), until)
        faults, worst = {}, (0.0, math.inf)
        for claim, channel in channels.items():
            if claim.place:
                continue
            try:
                trip, rate = _measured_link(stack, channel, claim, data, key)
            except OSError as error:
                if isinstance(error, ConnectionError):
                    time.sleep(STOP_S)
                faults[claim.node] = f"its link to {nodes[0]} fails: {error}"
                continue
            worst = max(worst[0], trip), min(worst[1], rate)
            if trip > MAX_TRIP_S:
                faults[claim.node] = f"a round trip to {nodes[0]} takes {1e3 * trip:.0f} ms"
            elif rate < MIN_RATE:
                faults[claim.node] = f"its link to {nodes[0]} carries {rate / MIB:.1f} MiB/s"
        for node in (node for claim, node in tasks.items() if claim not in channels):
            faults[node] = f"it did not reach {nodes[0]} ({world['MASTER_ADDR']}, port {port}) within {timeout:.0f} s"
        listener.close()  # the ranks' store uses this port next
        for channel in channels.values():
            with suppress(OSError):
                channel.send(not faults)
    if not faults:
        what = f"a round trip takes at most {1e3 * worst[0]:.2f} ms, at least {worst[1] / MIB:,.0f} MiB/s pass"
        print_line(f"links of {len(nodes)} nodes to {nodes[0]}: {what}", file=sys.stderr, flush=True)
    return faults


def _others(nodes: list[str]) -> Iterator[tuple[str, int]]:
    """Node and local index of every task but the first."""
    counts = tasks_per_node(os.environ["SLURM_STEP_TASKS_PER_NODE"])
    for node, count in zip(nodes, counts, strict=True):
        yield from ((node, place) for place in range(count) if (node, place) != (nodes[0], 0))


def _gather(
    stack: ExitStack, listener: socket.socket, key: bytes, tasks: Set[Claim], until: float
) -> dict[Claim, Channel]:
    """Channels of the ``tasks`` that connect in time; a second connection of a task replaces its first."""
    channels: dict[Claim, Channel] = {}
    with Gate(listener, key) as gate:
        while len(channels) < len(tasks) and (joined := gate.next(until)):
            channel, claim = joined
            stack.enter_context(channel.connection)
            if claim in tasks:
                channels[claim] = channel
            else:
                channel.connection.close()
    return channels


def _measured_link(
    stack: ExitStack, channel: Channel, claim: Claim, data: socket.socket | None, key: bytes
) -> tuple[float, float]:
    """:func:`measure_link` over a connection to ``data`` if the ranks use a configured interface."""
    channel.send(data and list(data.getsockname()[:2]))
    if data is None:
        return measure_link(channel.connection)
    wanted = Claim(claim.step, claim.node, claim.place, TRANSFERS)
    links = _gather(stack, data, key, {wanted}, time.monotonic() + ANSWER_S)
    if wanted not in links:
        raise TimeoutError("it does not connect to the interface's address in time")
    return measure_link(links[wanted].connection)


def _with_blame(faults: dict[str, str], nodes: list[str]) -> dict[str, str]:
    """Faults, or the first node's if no link to it is good; with two nodes, both are blamed."""
    if len(faults) < len(nodes) - 1:
        return faults
    first_node = {nodes[0]: "; ".join(f"{name}: {fault}" for name, fault in faults.items())}
    return first_node if len(nodes) > 2 else {**first_node, **faults}


def _connect_and_measure(
    folder: Path, world: Mapping[str, str], node: str, nodes: int, device_type: str, timeout: float
) -> bool:
    """On every other task: connect, measure as the node's first task, and return whether all links are good."""
    where, until = (world["MASTER_ADDR"], int(world["MASTER_PORT"])), time.monotonic() + timeout + ANSWER_S
    key, claim = wait_for_key(folder, until), Claim(_step(), node, int(world["LOCAL_RANK"]), CHECK)
    while True:
        try:
            connection = socket.create_connection(where, timeout=ANSWER_S)
            try:
                channel = join(connection, key, claim)
                break
            except OSError:
                connection.close()
                raise
        except OSError as error:
            if time.monotonic() > until:
                raise WorkerError(f"node {node} does not reach {where[0]}, port {where[1]}: {error}") from None
            time.sleep(LOOK_S)
    until += nodes * MAX_MEASURE_S  # other nodes may be measured first, and slowly
    with connection, suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        if claim.place == 0:
            match channel.receive(until):
                case [str(address), int(port)]:
                    address_here = interface_address(device_type)
                    source = (address_here, 0) if address_here else None
                    with socket.create_connection((address, port), ANSWER_S, source_address=source) as link:
                        join(link, key, Claim(claim.step, node, 0, TRANSFERS))
                        answer(link)
                case None:
                    answer(connection)
                case _:
                    return False
        return channel.receive(until) is True
    return False


def measure_link(link: socket.socket) -> tuple[float, float]:
    """Seconds of a round trip, and bytes/s in the slower direction, with :func:`answer`; OSError without a peer."""
    link.settimeout(ANSWER_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trip = min(_exchange(link, 0, 1) for _ in range(TRIPS))
    rates = []
    for there, back in ((TRANSFER, 1), (0, TRANSFER)):
        rate, until = 0.0, time.monotonic() + ANSWER_S
        while rate < MIN_RATE and time.monotonic() < until:
            rate = max(rate, TRANSFER / _exchange(link, there, back))
        rates.append(rate)
    link.sendall(HEADER.pack(0, 0))
    return trip, min(rates)


def answer(link: socket.socket) -> None:
    """Receive and send as :func:`measure_link` requests."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        there, back = HEADER.unpack(_take(link, HEADER.size))
        if not back:
            return
        if max(there, back) > TRANSFER:
            raise ConnectionError("it asks for more than a transfer")
        _take(link, there)
        link.sendall(bytes(back))


def interface_address(device_type: str) -> str:
    """This node's IPv4 address on the configured interface of the ranks; empty if none is configured."""
    if os.environ.get(INTERFACES[device_type], "").startswith("^"):  # any but these
        return ""
    for name in configured_interfaces(device_type) or ():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused, suppress(OSError):
            request = fcntl.ioctl(unused, SIOCGIFADDR, struct.pack("256s", name.encode()))
            return socket.inet_ntoa(request[20:24])
    return ""


def _exchange(link: socket.socket, there: int, back: int) -> float:
    """Send and receive these numbers of bytes; returns the seconds."""
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
    return socket.create_server((address, port), family=family, backlog=4096, dualstack_ipv6=both)


def _step() -> str:
    """ID of the job's step and its attempt."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "-".join(os.environ.get(name, "0") for name in names)
