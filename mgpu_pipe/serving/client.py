"""A client of OpenAI's interface by the standard library; it compares answers with the run's and prints addresses."""

from __future__ import annotations

import json
import shlex
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from mgpu_pipe.errors import MgpuError, print_line
from mgpu_pipe.serving.prepare import ANSWER_TOKENS

POLL_S = 5.0
"""Time for an answer to whether the server is there."""
ANSWER_S = 600.0
SHOWN = 60
"""Characters of an answer in a line about it."""
ANYWHERE = ("0.0.0.0", "::")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the proxies of the environment: the server is on this machine."""


class EngineClient:
    """Requests to the server at ``address``, e.g. ``http://127.0.0.1:8000``."""

    def __init__(self, address: str, token: str | None, name: str) -> None:
        self._address, self._token, self._name = address, token, name

    def is_ready(self) -> bool:
        """Whether the server lists its models."""
        try:
            self._send("/v1/models", None, POLL_S)
        except (OSError, ValueError):
            return False
        return True

    def greedy_answer(self, prompt: str, max_tokens: int, is_chat: bool) -> str:
        """The likeliest continuation of ``prompt``, or the answer to it.

        Raises:
            MgpuError: the server refuses the request or does not answer.
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
            raise MgpuError(f"{self._address}{path}: the server answers {error.code}: {said}") from error
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

    Args:
        is_exact: every answer must be equal; otherwise one, as other kernels and types may choose among near equals.

    Raises:
        MgpuError: they are too different.
    """
    pairs = expected["answers"]
    answers = [client.greedy_answer(prompt, ANSWER_TOKENS, expected["is_chat"]) for prompt, _ in pairs]
    triples = [(prompt, wanted, answer) for (prompt, wanted), answer in zip(pairs, answers, strict=True)]
    different = [triple for triple in triples if triple[1] != triple[2]]
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
