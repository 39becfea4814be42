"""An engine's processes, and a client of OpenAI's interface that compares its answers with the run's."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import quote

from mgpu_pipe.errors import MgpuError, print_line
from mgpu_pipe.launch.orphan_guard import OrphanGuard
from mgpu_pipe.serving.prepare import ANSWER_TOKENS
from mgpu_pipe.system.child_process import bind_command

READY_S = 5.0
"""Time for an answer to whether the server is there."""
ANSWER_S = 600.0
INCOMPLETE = "\ufffd"
"""Shows bytes that are no whole character."""
SHOWN = 60
"""Characters of an answer in a line about it."""
ANYWHERE = ("0.0.0.0", "::")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the proxies of the environment: the server is on this machine."""


class RefusedAnswerError(MgpuError):
    """The server answers with an HTTP error."""


class EngineClient:
    """Requests to the server at ``address``, e.g. ``http://127.0.0.1:8000``."""

    def __init__(self, address: str, token: str | None, name: str) -> None:
        self._address, self._token, self._name = address, token, name

    def is_ready(self) -> bool:
        """Whether the server lists its models."""
        try:
            self._send("/v1/models", None, READY_S)
        except (OSError, ValueError):
            return False
        return True

    def greedy_answer(self, prompt: str, max_tokens: int, is_chat: bool) -> str:
        """The likeliest continuation of ``prompt``, or the answer to it.

        Raises:
            RefusedAnswerError: the server refuses the request.
            MgpuError: the server does not answer.
        """
        body: dict[str, Any] = {"model": self._name, "max_tokens": max_tokens, "temperature": 0}
        if is_chat:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
        else:
            path, body["prompt"] = "/v1/completions", prompt
        try:
            [choice] = self._send(path, body, ANSWER_S)["choices"]
            return str((choice["message"]["content"] if is_chat else choice["text"]) or "")
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise RefusedAnswerError(f"{self._address}{path}: the server answers {error.code}: {said}") from error
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise MgpuError(f"{self._address}{path}: no answer ({error})") from error

    def _send(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}{path}", data, headers)
        with DIRECT.open(request, timeout=timeout) as answer:
            content: dict[str, Any] = json.load(answer)
        return content


def address_of(host: str, port: int) -> str:
    """The address at which this machine reaches a server that is bound to ``host``."""
    reached = "127.0.0.1" if host in ANYWHERE else host
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def compare(client: EngineClient, expected: dict[str, Any], is_exact: bool) -> None:
    """Compare the server's greedy answers with the run's, and print the result.

    An answer may end within a character, which vLLM leaves out and others show as :data:`INCOMPLETE`.

    Args:
        is_exact: every answer must be equal; otherwise one, as other kernels and types may choose among near equals,
            and llama.cpp refuses to send an answer that is not text in UTF-8.

    Raises:
        MgpuError: they are too different, or the server does not answer.
    """
    pairs = expected["answers"]
    triples, errors = list[tuple[str, str, str]](), list[RefusedAnswerError]()
    for prompt, wanted in pairs:
        try:
            answer = client.greedy_answer(prompt, ANSWER_TOKENS, expected["is_chat"])
        except RefusedAnswerError as error:
            errors.append(error)
            answer = str(error).partition(": ")[2]
        triples.append((prompt, wanted, answer))
    if errors and (is_exact or len(errors) == len(pairs)):
        raise errors[0]
    different = [triple for triple in triples if triple[1].rstrip(INCOMPLETE) != triple[2].rstrip(INCOMPLETE)]
    equal = f"{len(pairs) - len(different)} of {len(pairs)} greedy answers equal the run's"
    if different:
        prompt, wanted, answer = different[0]
        equal += f"; to {prompt!r} it answers {answer[:SHOWN]!r}, the run {wanted[:SHOWN]!r}"
    if different and (is_exact or len(different) == len(pairs)):
        raise MgpuError(f"the server is wrong: {equal}")
    print_line(equal)


def print_address(address: str, token: str | None, name: str, is_chat: bool, has_page: bool) -> None:
    """Print where the server is, and a line that asks it something."""
    if has_page:
        fragment = "" if token is None else f"#token={quote(token)}"
        print_line(f"serving {name} at {address}/{fragment} (open it in a browser), OpenAI's interface at {address}/v1")
    else:
        print_line(f"serving {name}, OpenAI's interface at {address}/v1")
    body: dict[str, Any] = {"model": name, "max_tokens": 64}
    if is_chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Hello"}]
    else:
        path, body["prompt"] = "/v1/completions", "Once"
    words = ["curl", f"{address}{path}", "-H", "Content-Type: application/json"]
    words += [] if token is None else ["-H", f"Authorization: Bearer {token}"]
    print_line(shlex.join([*words, "-d", json.dumps(body)]), flush=True)


TAIL_LINES = 20
SHOWN_LINES = 3
POLL_S = 0.2
TERM_S = 10.0
"""Time that an engine gets after SIGTERM."""


class EngineProcess:
    """A running engine in its own process group.

    The kernel kills the engine with this process's main thread; the orphan guard then kills the rest of its group.

    Args:
        name: of the engine, for messages.
        environment: added to this process's.
        passed: descriptors that the engine inherits.
        is_verbose: whether the engine's output goes to standard error.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], passed: Sequence[int], is_verbose: bool
    ) -> None:
        self._name, self._tail = name, deque[str](maxlen=TAIL_LINES)
        self._guard = OrphanGuard()
        self._process = subprocess.Popen(
            bind_command(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            pass_fds=passed,
            start_new_session=True,
        )
        self._guard.watch(self._process.pid)
        self._reader = threading.Thread(target=self._read, args=(is_verbose,), daemon=True)
        self._reader.start()

    def _read(self, is_verbose: bool) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._tail.append(line)
            if is_verbose:
                print_line(line, file=sys.stderr, flush=True)

    def wait_until_ready(self, client: EngineClient) -> None:
        """Wait until ``client`` is answered; MgpuError if the engine ended."""
        while not client.is_ready():
            if self.has_ended():
                raise self.end_error()
            time.sleep(POLL_S)

    def has_ended(self) -> bool:
        """Whether the engine ended. It is not reaped, so that its group's ID is not reused before :meth:`end`."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None

    def end_error(self) -> MgpuError:
        """The error of an engine that ended, with the last that it printed."""
        self._reader.join(1)
        tail = " | ".join(list(self._tail)[-SHOWN_LINES:]) or "it printed nothing"
        return MgpuError(f"--engine={self._name}: ended: {tail}; --verbose shows all that it prints")

    def end(self) -> None:
        """End the engine and everything that it started; again, or after Ctrl-C, at once."""
        try:
            os.kill(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + TERM_S
            while not self.has_ended() and time.monotonic() < deadline:
                time.sleep(POLL_S / 4)
        except KeyboardInterrupt:
            print_line("ending at once", file=sys.stderr)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._guard.dismiss(self._process.pid)
        self._guard.close()


def wait_for_any(processes: Sequence[EngineProcess]) -> NoReturn:
    """Wait until an engine ends, then raise MgpuError."""
    while True:
        for process in processes:
            if process.has_ended():
                raise process.end_error()
        time.sleep(POLL_S)
