"""Lines of ``serve``: how near the server's answers are to the run's, and where the server is."""

from __future__ import annotations

import json
import shlex
from typing import Any
from urllib.parse import quote

from mgpu_pipe.errors import MgpuError, print_line
from mgpu_pipe.serving.client import EngineClient
from mgpu_pipe.serving.prepare import ANSWER_TOKENS

SHOWN = 60
"""Characters of an answer in a line about it."""
ANYWHERE = ("0.0.0.0", "::")


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
