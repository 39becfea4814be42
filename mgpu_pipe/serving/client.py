"""A client of OpenAI's interface, by the standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from mgpu_pipe.errors import MgpuError

POLL_S = 5.0
"""Time for an answer to whether the server is there."""
ANSWER_S = 600.0
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
