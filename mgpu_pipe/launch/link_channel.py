"""Authenticated connections between the tasks of a job, whose ends prove that they have the job's key.

Each end sends a nonce, and each line has an HMAC over both nonces, its direction and its number, so no line of another
connection is accepted. A line is parsed only after its HMAC is verified. The key is in the run's folder, in a file that
only its owner can read.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.errors import WorkerError

KEY = ".link_key"
"""Key file in the run's folder: 32 bytes in hexadecimal."""
KEY_BYTES, NONCE_BYTES = 32, 16
LINE_S = 10.0
"""Seconds for a whole line to arrive."""
MAX_LINE = 1000
LOOK_S = 0.2
MAX_PENDING = 256
"""Limit of unauthenticated connections; a further one closes the oldest."""
FIRST, TASK = b"first", b"task"
"""Ends of a connection: the listener and the client."""


def make_key(folder: Path) -> None:
    """Write the job's key into the run's folder if it is missing."""
    if _read_key(folder) is not None:
        return
    temporary = folder / f"{KEY}.{secrets.token_hex(8)}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(KEY_BYTES))
        os.replace(temporary, folder / KEY)
    finally:
        temporary.unlink(missing_ok=True)


def wait_for_key(folder: Path, until: float) -> bytes:
    """The job's key, which the first task may write; WorkerError if it is missing at ``until``."""
    while (key := _read_key(folder)) is None:
        if time.monotonic() > until:
            raise WorkerError(f"{folder / KEY}: is not there, or not a file of this user; remove it")
        time.sleep(LOOK_S)
    return key


def _read_key(folder: Path) -> bytes | None:
    """The key; None without a whole key of the folder's owner."""
    try:
        descriptor = os.open(folder / KEY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        there = os.fstat(descriptor)
        if not stat.S_ISREG(there.st_mode) or there.st_uid != folder.stat().st_uid:
            return None
        key = file.read(2 * KEY_BYTES + 1)
    return key if len(key) == 2 * KEY_BYTES else None


class Channel:
    """An authenticated connection; lines are JSON values, numbered in each direction.

    Args:
        nonces: nonces of the listener and of the client.
        end: this end, :data:`FIRST` or :data:`TASK`.
    """

    def __init__(self, connection: socket.socket, key: bytes, nonces: bytes, end: bytes) -> None:
        self.connection = connection
        self._key = hmac.digest(key, nonces, hashlib.sha256)
        self._mine, self._other = (FIRST, TASK) if end == FIRST else (TASK, FIRST)
        self._sent = self._received = 0

    def send(self, value: object) -> None:
        """Send a line; raises OSError if it takes longer than :data:`LINE_S`."""
        text = json.dumps(value).encode()
        self.connection.settimeout(LINE_S)
        self.connection.sendall(_sign(self._key, self._mine + b" %d " % self._sent, text))
        self._sent += 1

    def receive(self, until: float) -> object:
        """Receive the value of the next line; OSError if it is incomplete at ``until``, or not the other end's."""
        text = _check(self._key, self._other + b" %d " % self._received, read_line(self.connection, until))
        self._received += 1
        value: object = json.loads(text)
        return value


@dataclass(frozen=True)
class Claim:
    """Identity of a connecting task and its purpose.

    Attributes:
        step: ID of the job's step, with its attempt.
        place: index of the task on its node.
        purpose: purpose of the connection.
    """

    step: str
    node: str
    place: int
    purpose: str

    @classmethod
    def from_json(cls, text: bytes) -> Claim | None:
        """Parsed claim; None if ``text`` is none."""
        try:
            match json.loads(text):
                case [str(step), str(node), int(place), str(purpose)] if not isinstance(place, bool):
                    return cls(step, node, place, purpose)
        except (ValueError, RecursionError):
            pass
        return None


def join(connection: socket.socket, key: bytes, claim: Claim) -> Channel:
    """Authenticate this end and the listener to each other; OSError if that takes too long."""
    first_nonce = read_line(connection, time.monotonic() + LINE_S)
    nonces = first_nonce + secrets.token_hex(NONCE_BYTES).encode()
    if len(nonces) != 4 * NONCE_BYTES:
        raise ConnectionError("what answers there is not this job")
    text = json.dumps([claim.step, claim.node, claim.place, claim.purpose]).encode()
    connection.settimeout(LINE_S)
    connection.sendall(nonces[2 * NONCE_BYTES :] + _sign(key, TASK + nonces, text))
    channel = Channel(connection, key, nonces, TASK)
    channel.receive(time.monotonic() + LINE_S)
    return channel


class Gate:
    """Accepts connections whose other end has the key; closes others without blocking."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._pending: dict[socket.socket, _Pending] = {}

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in list(self._pending):
            self._drop(connection)
        self._selector.close()

    def next(self, until: float) -> tuple[Channel, Claim] | None:
        """The next authenticated connection; None at ``until``, in seconds of the monotonic clock."""
        while (left := until - time.monotonic()) > 0:
            for entry, _ in self._selector.select(min(left, LOOK_S)):
                if entry.fileobj is self._listener:
                    self._accept()
                    continue
                assert isinstance(entry.fileobj, socket.socket)
                if entry.fileobj in self._pending and (joined := self._read(entry.fileobj)):
                    return joined
            for connection, pending in list(self._pending.items()):  # the oldest first
                if time.monotonic() < pending.until:
                    break
                self._drop(connection)
        return None

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError:  # already closed, or too many open files
            if self._pending:
                self._drop(next(iter(self._pending)))
            return
        if len(self._pending) >= MAX_PENDING:
            self._drop(next(iter(self._pending)))
        pending = _Pending(secrets.token_hex(NONCE_BYTES).encode(), time.monotonic() + LINE_S)
        connection.setblocking(False)
        self._pending[connection] = pending
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.sendall(pending.nonce + b"\n")
        except OSError:
            self._drop(connection)

    def _read(self, connection: socket.socket) -> tuple[Channel, Claim] | None:
        """Take what has come; the connection is closed unless it is the start of a line, or a right one."""
        pending = self._pending[connection]
        try:
            part = connection.recv(MAX_LINE)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        pending.line += part
        whole = pending.line.endswith(b"\n")
        if part and not whole and b"\n" not in pending.line and len(pending.line) < MAX_LINE:
            return None
        nonce, signed = bytes(pending.line[: 2 * NONCE_BYTES]), bytes(pending.line[2 * NONCE_BYTES :])
        nonces = pending.nonce + nonce
        claim = None
        if whole:
            with suppress(OSError):
                claim = Claim.from_json(_check(self._key, TASK + nonces, signed))
        if claim is None:
            self._drop(connection)
            return None
        del self._pending[connection]
        self._selector.unregister(connection)
        channel = Channel(connection, self._key, nonces, FIRST)
        try:
            channel.send(True)
        except OSError:
            connection.close()
            return None
        return channel, claim

    def _drop(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)
        connection.close()


@dataclass
class _Pending:
    """A connection that has not proved itself: the nonce it was sent, its line so far, and when it is closed."""

    nonce: bytes
    until: float
    line: bytes = b""


def read_line(connection: socket.socket, until: float) -> bytes:
    """A line without its end, byte by byte, for the rest is another's; OSError if incomplete at ``until``."""
    line = b""
    while len(line) < MAX_LINE:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("it does not answer in time")
        connection.settimeout(left)
        part = connection.recv(1)
        if not part:
            raise ConnectionError("it was closed")
        if part == b"\n":
            return line
        line += part
    raise ConnectionError("what answers there is not this job")


def _sign(key: bytes, place: bytes, text: bytes) -> bytes:
    return hmac.new(key, place + text, hashlib.sha256).hexdigest().encode() + b" " + text + b"\n"


def _check(key: bytes, place: bytes, line: bytes) -> bytes:
    """The text of a signed line."""
    mac, _, text = line.removesuffix(b"\n").partition(b" ")
    if not hmac.compare_digest(mac, hmac.new(key, place + text, hashlib.sha256).hexdigest().encode()):
        raise ConnectionError("what answers there does not have the job's key")
    return text
