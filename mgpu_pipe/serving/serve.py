"""Serves a model: prepares its folder, starts the engine, compares its answers with the run's, and ends with it."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

from mgpu_pipe.errors import BadInputError, MgpuError, print_line
from mgpu_pipe.inference.export_folder import check_target
from mgpu_pipe.serving.client import EngineClient
from mgpu_pipe.serving.engine_process import EngineProcess
from mgpu_pipe.serving.engines import Engine, EngineRequest
from mgpu_pipe.serving.prepare import ANSWER_TOKENS, Preparation
from mgpu_pipe.serving.source import ServedModel, make_cache, read_answers

SHOWN = 60
"""Characters of an answer in a line about it."""
ANYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True)
class ServeOptions:
    """How a model is served.

    Attributes:
        out: folder of the export; None for one in the cache.
        token: that requests bear; None for no token.
        is_trial: end after the comparison.
    """

    engine: Engine
    host: str
    port: int
    device: str
    dtype: str
    python: Path
    out: Path | None
    force: bool
    frozen: Path | None
    average: bool
    token: str | None
    is_trial: bool
    is_verbose: bool


def serve(model: ServedModel, options: ServeOptions) -> None:
    """Serve until a signal or the engine's end.

    Raises:
        BadInputError: the port is in use, or the model cannot be exported for the engine.
        MgpuError: the engine ended, or its answers are not the run's.
    """
    options.engine.require(options.python)
    with ExitStack() as resources:
        listener = resources.enter_context(bind(options.host, options.port))
        port = listener.getsockname()[1]
        folder, expected = prepare_folder(model, options)
        if not options.engine.listens:
            listener.close()
        fd = listener.fileno() if options.engine.listens else None
        request = EngineRequest(
            folder, model.name, options.host, port, fd, options.device, options.python, options.token
        )
        command = options.engine.command(request)
        resources.enter_context(_ended_by_signals())
        print_line(f"starting {options.engine.name}", file=sys.stderr, flush=True)
        passed = [] if fd is None else [fd]
        process = EngineProcess(options.engine.name, command.words, command.environment, passed, options.is_verbose)
        resources.callback(process.end)
        address = address_of(options.host, port)
        client = EngineClient(address, options.token, model.name)
        process.wait_until_ready(client)
        compare(client, expected, is_exact=options.engine.is_exact and options.dtype == "fp32")
        print_address(address, options.token, model.name, expected["is_chat"], has_page=options.engine.listens)
        if not options.is_trial:
            process.wait()


def prepare_folder(model: ServedModel, options: ServeOptions) -> tuple[Path, dict[str, Any]]:
    """The folder for the engine and the run's answers; what an earlier call exported is used again.

    Raises:
        BadInputError: ``out`` must not be replaced, or the model cannot be exported so.
    """
    kind, out = f"{options.engine.format}-{options.dtype}", options.out
    is_exported = bool(model.digest) or options.engine.format != "hf"
    if out is not None:
        if not is_exported:
            raise BadInputError(f"--out={out}: {model.source} is a model folder and served as it is; leave it out")
        check_target(out, options.force)
    folder = out or model.folder(kind)
    record = folder.with_name(f"{folder.name}.json") if model.digest and out is None else None
    expected = None if record is None or not folder.exists() else read_answers(record)
    if expected is None:
        if is_exported:
            make_cache()
            print_line(f"exporting {model.source} to {folder}", file=sys.stderr, flush=True)
        expected = Preparation(
            str(model.source),
            None if options.frozen is None else str(options.frozen),
            options.average,
            options.device,
            str(folder) if is_exported else None,
            options.engine.format,
            options.dtype,
            options.force or out is None,
            None if record is None else str(record),
        ).run()
    return folder, expected


@contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens on ``host``; port 0 chooses a free one.

    Raises:
        BadInputError: the port is in use, or the address is not this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
            listener.set_inheritable(True)
            yield listener
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadInputError(f"--port={port}: {host}: {reason}; choose another, or 0 for any free one") from error


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
