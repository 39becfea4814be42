"""Guards gloo groups on one machine, whose listening ports every user of the machine can reach.

A listener of gloo accepts the first connection that sends a rank's number as that rank. After building a group, its
ranks therefore compare the ends of gloo's connections through their store. If they do not match, another user took a
place, and the ranks rebuild the group. From then on a socket filter, inherited from the listener, blocks the data of a
connection until the kernel confirms that its other end belongs to this user.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.errors import BadInputError, print_line

if TYPE_CHECKING:
    from torch.distributed import Store

Address = tuple[str, int]
Pair = tuple[Address, Address]
"""Ends of a connection: this process's and the other."""
ATTEMPTS = 20
"""Attempts to build a group. The first has no filter, which costs 0.2 s per connection. Without permission for filters
each attempt is a race with the other user that the ranks win if they connect within milliseconds."""
DEVICES = 50
LOOK_S = 0.005
LISTENING, ESTABLISHED, HALF_OPEN = 0x0A, 0x01, 0x03
"""States of tcp(7), as /proc/net/tcp has them."""
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
READABLE = 0x001
"""EPOLLIN."""
HEADERS_ALONE = (
    # no segment that carries data: length - 4 * (data offset) > 0; the filter sees it from the TCP header on
    (0x30, 0, 0, 12),  # A = byte 12
    (0x74, 0, 0, 4),  # A >>= 4
    (0x64, 0, 0, 2),  # A <<= 2: length of the header
    (0x07, 0, 0, 0),  # X = A
    (0x80, 0, 0, 0),  # A = length
    (0x1D, 0, 1, 0),  # A == X?
    (0x06, 0, 0, 0xFFFFFFFF),  # accept
    (0x06, 0, 0, 0),  # drop
)


class StrangerError(BadInputError):
    """Another user of the machine connects to gloo again and again."""


@dataclass(frozen=True)
class Entry:
    """A socket of this machine, as /proc/net/tcp has it."""

    local: Address
    remote: Address
    state: int
    user: int


def build(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Build a gloo process group whose connections all join two of its ranks; StrangerError if a stranger stays."""
    from torch.distributed import PrefixStore

    from mgpu_pipe.system.compat.torch_private import gloo_group

    users: set[int] = set()
    named = "another user of this machine connects to gloo's ports"
    for attempt in range(ATTEMPTS):
        began, error, group = time.monotonic(), None, None
        part = PrefixStore(f"attempt{attempt}", store)
        with _devices(guarded=attempt > 0) as (devices, ports):
            try:
                group = gloo_group(part, rank, size, timeout, devices)
            except RuntimeError as failure:
                if time.monotonic() - began > timeout.total_seconds() / 2:
                    raise
                error = failure
        if size == 1 or not _shows_gloo(ports):
            if error is not None:
                raise error
            return group
        part.set(f"ends/{rank}", json.dumps([ports, [] if group is None else sorted(_pairs_in_use())]))
        ends = [_Ends.from_json(part.get(f"ends/{other}")) for other in range(size)]
        if _is_whole(ends) and (attempt > 0 or not _has_stranger(ends)):
            return group
        users |= {entry.user for entry in _sockets() if entry.remote[1] in ports} - {os.geteuid()}
        if users:
            named = f"user {', '.join(map(str, sorted(users)))} of this machine connects to gloo's ports"
            print_line(f"note: {named}; the group is built again", file=sys.stderr, flush=True)
        del group
    raise error or StrangerError(f"rank {rank} cannot start: {named}; have that user stop, or use another machine")


def _shows_gloo(ports: list[int]) -> bool:
    """Whether this kernel shows gloo's sockets; in a sandbox without them, connections are not compared."""
    watched = _list_watched()
    seen = {listener.getsockname()[1] for fd, listener in _listeners() if fd in watched}
    return bool(ports) and seen.issuperset(ports)


@dataclass(frozen=True)
class _Ends:
    """Ports of a rank's listeners, and the connections that its gloo uses."""

    ports: list[int]
    pairs: set[Pair]

    @classmethod
    def from_json(cls, text: bytes) -> _Ends:
        ports, pairs = json.loads(text)
        return cls(ports, {((here, port), (there, other)) for (here, port), (there, other) in pairs})


def _is_whole(ends: list[_Ends]) -> bool:
    """Whether every two ranks are connected once per listener."""
    for rank, ends_of_rank in enumerate(ends):
        for other in ends[:rank]:
            ports = {*ends_of_rank.ports, *other.ports}
            joined = [
                pair for pair in ends_of_rank.pairs if pair[::-1] in other.pairs and ports & {pair[0][1], pair[1][1]}
            ]
            if not ends_of_rank.ports or len(joined) != len(ends_of_rank.ports):
                return False
    return True


def _has_stranger(ends: list[_Ends]) -> bool:
    """Whether a connection to a rank's listener comes from no rank. Without a filter it may have taken a rank's place,
    whose own connection gloo then watches too, until it has read which rank that is."""
    from_ranks = {pair[::-1] for of_rank in ends for pair in of_rank.pairs}
    return any(pair[0][1] in rank.ports and pair not in from_ranks for rank in ends for pair in rank.pairs)


@contextmanager
def _devices(*, guarded: bool) -> Iterator[tuple[list[Any], list[int]]]:
    """gloo's devices, one per configured interface, and their ports; ``guarded`` ones filter connections."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name] or [""]
    pairs = [_device(name, guarded=guarded) for name in names]
    devices, ports = [device for device, _ in pairs], [port for _, listening in pairs for port in listening]
    if not guarded:
        yield devices, ports
        return
    end = threading.Event()
    doorkeeper = threading.Thread(target=_let_in, args=(set(ports), end), daemon=True)
    doorkeeper.start()
    try:
        yield devices, ports
    finally:
        end.set()
        doorkeeper.join()


def _device(interface: str, *, guarded: bool) -> tuple[Any, list[int]]:
    """A device and its ports; a guarded device gets its filter before any connection."""
    from mgpu_pipe.system.compat.torch_private import gloo_device

    for _ in range(DEVICES if guarded else 1):
        before = {fd for fd, _ in _listeners()}
        device = gloo_device(interface)
        ports = []
        for fd, listener in _listeners():
            if fd not in before:
                ports.append(listener.getsockname()[1])
                if guarded:
                    _attach_filter(listener)
        if not guarded or not any(
            entry.local[1] in ports and entry.state not in (LISTENING, HALF_OPEN) for entry in _sockets()
        ):
            return device, ports
        del device
    raise StrangerError("another user of this machine connects to each of gloo's ports; use another machine")


def _let_in(ports: set[int], end: threading.Event) -> None:
    """Remove the filter from this user's connections to these ports, and close those of others."""
    known: set[Pair] = set()
    while not end.wait(LOOK_S):
        users = None
        for _, connection in _own_sockets():
            with suppress(OSError):
                pair = _address(connection.getsockname()), _address(connection.getpeername())
                if pair[0][1] not in ports or pair in known:
                    continue
                if users is None:
                    users = {entry.local: entry for entry in _sockets() if entry.remote[1] in ports}
                there = users.get(pair[1])
                if there is None or there.state != ESTABLISHED or there.remote != pair[0]:
                    continue
                known.add(pair)
                if there.user == os.geteuid():
                    connection.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
                else:
                    connection.shutdown(socket.SHUT_RDWR)


def _attach_filter(listener: socket.socket) -> None:
    """Attach a filter that drops data, if permitted; see socket(7), SO_ATTACH_FILTER."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in HEADERS_ALONE))
    address = struct.pack("HP", len(HEADERS_ALONE), ctypes.addressof(program))
    with suppress(PermissionError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, address)


def _pairs_in_use() -> set[Pair]:
    """Connections that an epoll of this process waits for: the pairs that gloo uses."""
    watched = _list_watched()
    pairs = set()
    for fd, connection in _own_sockets():
        if fd in watched:
            with suppress(OSError):
                pairs.add((_address(connection.getsockname()), _address(connection.getpeername())))
    return pairs


def _list_watched() -> set[int]:
    """Descriptors whose reads an epoll of this process waits for; see proc(5), fdinfo."""
    watched = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}") != "anon_inode:[eventpoll]":
                continue
            for line in Path(f"/proc/self/fdinfo/{entry}").read_text(encoding="ascii").splitlines():
                words = line.split()
                if words[0] == "tfd:" and int(words[3], 16) & READABLE:
                    watched.add(int(words[1]))
    return watched


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    for fd, listener in _own_sockets():
        with suppress(OSError):
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield fd, listener


def _own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """TCP sockets of this process, each as a copy that is closed afterwards."""
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    yield int(entry), copy


def _address(name: Any) -> Address:
    return name[0].partition("%")[0], name[1]


def _sockets() -> list[Entry]:
    """All TCP sockets of this machine."""
    entries = []
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(FileNotFoundError):
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                entries.append(Entry(_read(words[1]), _read(words[2]), int(words[3], 16), int(words[7])))
    return entries


def _read(text: str) -> Address:
    """``0100007F:1F90`` is 127.0.0.1, port 8080: words of 32 bits in this machine's order."""
    host, _, port = text.partition(":")
    words = struct.pack(
        f"={len(host) // 8}I", *(int(host[offset : offset + 8], 16) for offset in range(0, len(host), 8))
    )
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words), int(port, 16)
