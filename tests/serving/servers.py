"""Trained runs, and servers of them as a user starts them."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_pipe.serving.engine_process import DIRECT
from tests.support.command import launched, mgpu
from tests.support.program import ForkedProgram

QUESTIONS = [f"Is {n} even{' or odd' * (n % 3)}?" for n in range(12)]
CONTEXT = 1024


def train_run(folder: Path, cache: Path) -> Path:
    """A run on conversations, whose answers are random but far from ties."""
    rows = [{"prompt": question, "completion": ("Yes.", "No.")[n % 2]} for n, question in enumerate(QUESTIONS * 4)]
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [
        *("model=llama_tiny", "model.config.vocab_size=300", "model.config.initializer_range=0.3", "data=chat_jsonl"),
        "model.config.head_dim=32",  # the smallest of vLLM on CPUs
        *("data.paths=[chat.jsonl]", "data.chat_template=chatml", "data.seq_len=64", "data.global_batch_size=4"),
        *("precision=fp32", "trainer.max_steps=2", "logger=none", "run.dir=run", "run.name=talk", "optimizer.lr=3e-5"),
    ]
    mgpu(cache, folder, *words)
    return folder / "run"


@dataclass
class Server:
    """A running ``mgpu-pipe serve``."""

    process: ForkedProgram | subprocess.Popen[str]
    address: str
    token: str
    printed: list[str]

    def send(self, path: str, body: dict[str, Any] | bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """The status and body of an answer; every header replaces a default one, an empty one removes it."""
        given = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", **headers}
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        request = urllib.request.Request(self.address + path, data, {k: v for k, v in given.items() if v})
        try:
            with DIRECT.open(request, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        status, body = self.send("/v1/completions", {"model": "talk", "prompt": prompt, "temperature": 0, **fields})
        assert status == 200, body
        answer: dict[str, Any] = json.loads(body)
        return answer

    def stream(self, prompt: str, **fields: Any) -> list[dict[str, Any]]:
        body = {"model": "talk", "prompt": prompt, "temperature": 0, "stream": True, **fields}
        lines = self.send("/v1/completions", body)[1].decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@contextmanager
def serving(cache: Path, cwd: Path, *words: str, program: Callable[..., Any] = launched) -> Iterator[Server]:
    """A server on a free port, ended by SIGTERM.

    Args:
        program: starts the command: ``launched``, or ``start`` with interpreters of its own.
    """
    process = program(cache, cwd, "serve", *words, "--port", "0")
    try:
        is_forked = isinstance(process, ForkedProgram)
        out = process.first_lines(3) if is_forked else [process.stdout.readline() for _ in range(3)]
        address = re.search(r"curl (http://\S+?)/v1", out[-1] if out else "")
        assert address is not None, process.communicate(timeout=1)
        token = re.search(r"Bearer (\S+?)'", out[2])
        yield Server(process, address[1], "" if token is None else token[1], out)
    finally:
        process.terminate()
        assert process.wait(60) in (0, -9), process.communicate(timeout=1)
