"""The tasks of a job prove that they have its key; strangers at the port of the check change nothing."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from mgpu_pipe.launch import link_channel, link_check
from mgpu_pipe.launch.link_channel import Channel, Claim, Gate, join, make_key, wait_for_key
from mgpu_pipe.launch.node import BAD_NODES
from tests.launch.test_link_check import step
from tests.support.worlds import free_port

KEY = b"k" * 64
CLAIM = Claim("1-0-0", "n1", 0, link_check.CHECK)


@contextmanager
def strangers(port: int) -> Iterator[None]:
    """Connections that keep silent, send slowly, too much, or what a task of another node would, over and over."""
    end = threading.Event()
    claimed: list[object] = [["1-0-0", "n2", True], ["1-0-0", "n1", 0, "check"], {}, 7]
    claims = [json.dumps(claim).encode() for claim in claimed]
    lines = [b"", b"x", *(claim + b"\n" for claim in claims), b"[" * 900 + b"\n", b"\n\n\n", bytes(1 << 20)]

    def disturb() -> None:
        kept: list[socket.socket] = []
        while not end.is_set():
            for line in lines:
                with suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=0.2)
                    kept.append(connection)
                    connection.sendall(line)
            for connection in kept[-40:]:
                with suppress(OSError):
                    connection.send(b"x")
            for connection in kept[:-40]:
                connection.close()
            del kept[:-40]
            time.sleep(0.01)
        for connection in kept:
            connection.close()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("variables", [{}, {"GLOO_SOCKET_IFNAME": "lo"}], ids=["the rendezvous'", "an interface's own"])
def test_strangers_change_nothing(tmp_path: Path, variables: dict[str, str]) -> None:
    port = free_port()
    with strangers(port):
        codes, said = step(tmp_path, 3, 2, dict.fromkeys(range(3), port), **variables)
    assert codes == [0] * 6, said
    assert "links of 3 nodes to n0: a round trip takes at most " in said and not (tmp_path / BAD_NODES).exists()


@pytest.mark.slow
def test_a_stranger_cannot_stand_for_a_node(tmp_path: Path) -> None:
    port, elsewhere = free_port(), free_port()
    with strangers(port):
        codes, said = step(tmp_path, 3, 1, {0: port, 1: port, 2: elsewhere})
    assert all(codes), said
    (line,) = (tmp_path / BAD_NODES).read_text().splitlines()
    assert line.startswith("n2 it did not reach n0 ")


@contextmanager
def gate() -> Iterator[tuple[Gate, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, Gate(listener, KEY) as opened:
        yield opened, listener.getsockname()[1]


def admitted(opened: Gate, seconds: float) -> tuple[Channel, Claim] | None:
    return opened.next(time.monotonic() + seconds)


def test_lines_of_another_connection_do_not_count() -> None:
    with gate() as (opened, port), ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", port)) as task:
        sent: list[bytes] = []
        recording = type(
            "Recording",
            (socket.socket,),
            {"sendall": lambda self, data: (sent.append(data), self.send(data))},  # type: ignore[func-returns-value]
        )
        joining = pool.submit(join, recording(fileno=task.detach()), KEY, CLAIM)
        joined = admitted(opened, 5)
        assert joined is not None and joined[1] == CLAIM
        channel = joining.result()
        joined[0].send([1])
        assert channel.receive(time.monotonic() + 5) == [1]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(sent[0])
            assert admitted(opened, 0.5) is None
        # nor does the same line twice, or one's own back
        line = link_channel._sign(joined[0]._key, b"first 2 ", b"[2]")
        joined[0].connection.sendall(2 * line)
        assert channel.receive(time.monotonic() + 5) == [2]
        with pytest.raises(ConnectionError, match="does not have the job's key"):
            channel.receive(time.monotonic() + 5)


@pytest.mark.parametrize(
    "claim",
    [[], 7, None, ["1-0-0", "n1", True, "check"], ["1-0-0", ["n1"], 0, "check"], [1, "n1", 0, "check"], {"a": 1}],
)
def test_fields_have_their_types_even_with_the_key(claim: object) -> None:
    assert Claim.from_json(json.dumps(claim).encode()) is None


def test_the_end_that_listens_proves_itself_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        task = socket.create_connection(listener.getsockname())
        joining = pool.submit(join, task, KEY, CLAIM)
        with listener.accept()[0] as stranger:
            stranger.sendall(b"0" * 32 + b"\n")
            stranger.recv(1000)
            stranger.sendall(b"0" * 64 + b" true\n")
            with pytest.raises(ConnectionError, match="does not have the job's key"):
                joining.result()
        task.close()


def test_the_key_is_its_owners_alone(tmp_path: Path) -> None:
    make_key(tmp_path)
    key = wait_for_key(tmp_path, 0)
    make_key(tmp_path)  # a job that is queued again
    assert len(key) == 64 and wait_for_key(tmp_path, 0) == key
    path = tmp_path / link_channel.KEY
    assert path.stat().st_mode & 0o777 == 0o600 and [each.name for each in tmp_path.iterdir()] == [path.name]
    path.unlink()
    path.symlink_to("/etc/hostname")  # somebody's
    make_key(tmp_path)
    assert len(wait_for_key(tmp_path, 0)) == 64 and not path.is_symlink()
    known = tmp_path.parent / "known"
    known.write_bytes(KEY)  # a file as long as a key
    path.unlink()
    path.symlink_to(known)
    make_key(tmp_path)
    assert wait_for_key(tmp_path, 0) != KEY and not path.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_key_of_another_user_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / link_channel.KEY
    path.write_bytes(KEY)
    os.chown(path, 65534, 65534)
    make_key(tmp_path)
    assert wait_for_key(tmp_path, 0) != KEY and path.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("part", [b"", b"0"], ids=["silent", "slow"])
def test_a_stranger_that_answers_no_whole_line_is_left(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr(link_channel, "LINE_S", 0.3)
    end = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        with socket.create_connection(listener.getsockname()) as task, listener.accept()[0] as stranger:

            def drip() -> None:
                while not end.wait(0.05):
                    with suppress(OSError):
                        stranger.sendall(part)

            dripping, joining = pool.submit(drip), pool.submit(join, task, KEY, CLAIM)
            has_left = not wait([joining], timeout=20).not_done
            end.set()
            stranger.shutdown(socket.SHUT_RDWR)
            dripping.result()
            assert has_left and isinstance(joining.exception(), OSError)


def test_the_gate_closes_connections_that_send_no_whole_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_channel, "LINE_S", 0.3)
    with gate() as (opened, port), socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"0" * 40)
        assert admitted(opened, 1.0) is None
        stranger.settimeout(5)
        stranger.recv(100)
        assert stranger.recv(1) == b"", "it is closed"


def test_silent_strangers_do_not_keep_a_task_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate keeps a limited number of them, and a further connection closes the oldest."""
    monkeypatch.setattr(link_channel, "MAX_PENDING", 3)
    with gate() as (opened, port), ExitStack() as stack, ThreadPoolExecutor(1) as pool:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))

        silent = [connect() for _ in range(4)]
        assert admitted(opened, 0.5) is None
        joining = pool.submit(join, connect(), KEY, CLAIM)
        joined = admitted(opened, 5)
        assert joined is not None and joined[1] == CLAIM
        joining.result()
        joined[0].connection.close()
        for stranger in silent[:2]:
            stranger.recv(100)
            assert stranger.recv(1) == b"", "it is closed"


def test_a_node_sends_no_more_than_a_transfer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as node, listener.accept()[0] as first:
            node.settimeout(2)
            first.sendall(link_check.HEADER.pack(0, link_check.TRANSFER + 1))
            with pytest.raises(ConnectionError, match="asks for more than a transfer"):
                link_check.answer(node)
