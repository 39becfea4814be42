"""Serves a model: prepares its folder, starts the engine, compares its answers with the run's, and ends with it."""

from __future__ import annotations

import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from mgpu_pipe.errors import BadInputError, print_line
from mgpu_pipe.inference.export_folder import check_target
from mgpu_pipe.serving.engine_process import (
    EngineClient,
    EngineProcess,
    address_of,
    compare,
    print_address,
    wait_for_any,
)
from mgpu_pipe.serving.engines import (
    ITEM_BYTES,
    Engine,
    EngineRequest,
    EngineSizes,
    Gpus,
    choose_context,
    choose_sizes,
    model_context,
)
from mgpu_pipe.serving.prepare import Preparation
from mgpu_pipe.serving.serve_file import GpuShare, Need
from mgpu_pipe.serving.source import NamedAdapter, ServedModel, make_cache, read_answers


@dataclass(frozen=True)
class ServeOptions:
    """How a model is served.

    Attributes:
        device: of the embedded server, and of the run's answers.
        out: folder of the export; None for one in the cache.
        environment: the engine's virtual environment; None for this one or PATH.
        context: most tokens of a prompt and its answer; None for the model's.
        memory_share: of each GPU's memory that the engine may take.
        token: that requests bear; None for no token.
        is_trial: end after the comparison.
        variables: added to the engine's environment, such as its GPUs.
        draft: a smaller model that proposes tokens; None for none.
        adapters: that requests choose by name.
    """

    engine: Engine
    host: str
    port: int
    device: str
    dtype: str
    environment: Path | None
    context: int | None
    concurrency: int
    gpus: Gpus
    memory_share: float
    out: Path | None
    force: bool
    frozen: Path | None
    average: bool
    token: str | None
    is_trial: bool
    is_verbose: bool
    variables: Mapping[str, str] = field(default_factory=dict)
    draft: ServedModel | None = None
    adapters: Sequence[NamedAdapter] = ()

    def elements(self, model: ServedModel) -> int:
        """Numbers in the weights of ``model`` and of its adapters."""
        return model.elements + sum(adapter.elements for adapter in self.adapters)


def serve(models: Sequence[tuple[ServedModel, ServeOptions]]) -> None:
    """Serve until a signal, or until an engine ends.

    Raises:
        BadInputError: a port is in use, an engine is not installed or refuses its model, or the GPUs do not hold it.
        MgpuError: an engine ended, or its answers are not the run's.
    """
    programs = [_check(model, options) for model, options in models]
    with ExitStack() as resources:
        ports = [resources.enter_context(bind(options.host, options.port)) for _, options in models]
        prepared = [prepare_folder(model, options) for model, options in models]
        for _, options in models:
            if options.draft is not None and _is_exported(options.draft, options.engine):
                prepare_folder(options.draft, _draft_options(options))
        resources.enter_context(_ended_by_signals())
        started = []
        for (model, options), program, listener, (folder, expected) in zip(
            models, programs, ports, prepared, strict=True
        ):
            port = listener.getsockname()[1]
            process = _start(model, options, program, listener, folder)
            resources.callback(process.end)
            address = address_of(options.host, port)
            client = EngineClient(address, options.token, model.name)
            process.wait_until_ready(client)
            compare(client, expected, is_exact=options.engine.is_embedded and options.dtype == "fp32")
            print_address(address, options.token, model.name, expected["is_chat"], options.engine.is_embedded)
            started.append(process)
        if not models[0][1].is_trial:
            wait_for_any(started)


def _check(model: ServedModel, options: ServeOptions) -> Sequence[str]:
    """The engine's program, once it is known to take the model."""
    sizes = sizes_of(model, options)
    program = options.engine.find(options.environment)
    options.engine.command(engine_request(model, options, _target(model, options), sizes, 0, None), program)
    return program


def _start(
    model: ServedModel, options: ServeOptions, program: Sequence[str], listener: socket.socket, folder: Path
) -> EngineProcess:
    """Start an engine; the one that does not take a listening socket gets its port, which is free again."""
    engine, port = options.engine, listener.getsockname()[1]
    if not engine.is_embedded:
        listener.close()
    passed = [listener.fileno()] if engine.is_embedded else []
    request = engine_request(model, options, folder, sizes_of(model, options), port, next(iter(passed), None))
    command = engine.command(request, program)
    print_line(f"starting {engine.name} for {model.name}", file=sys.stderr, flush=True)
    environment = {**command.environment, **options.variables}
    return EngineProcess(engine.name, [*program, *command.words], environment, passed, options.is_verbose)


def sizes_of(model: ServedModel, options: ServeOptions) -> EngineSizes:
    """The engine's sizes for ``model``.

    Raises:
        BadInputError: the engine refuses the model, the context is too long, or the GPUs do not hold it.
    """
    gpus = Gpus(0, 0) if options.engine.is_embedded else options.gpus
    options.engine.check(model.fields, bool(gpus.count))
    context, draft = choose_context(model.fields, options.context), options.draft
    if draft is not None:
        options.engine.check(draft.fields, bool(gpus.count))
        longest = model_context(draft.fields)
        if longest is not None and longest < context:
            raise BadInputError(f"--draft={draft.source}: was made for {longest} tokens; add --context {longest}")
    return choose_sizes(
        model.fields,
        options.elements(model),
        options.dtype,
        context,
        options.concurrency,
        gpus,
        options.memory_share,
        None if draft is None else (draft.fields, draft.elements),
    )


def need_of(model: ServedModel, options: ServeOptions, gpus: Gpus) -> Need:
    """GPUs and memory that ``model`` needs; the embedded server takes one GPU at most, and answers one request."""
    if not options.engine.is_embedded:
        sizes = sizes_of(model, options)
    else:
        context = choose_context(model.fields, None)
        on_gpu = Gpus(min(1, gpus.count) if options.device != "cpu" else 0, gpus.memory)
        sizes = choose_sizes(model.fields, options.elements(model), options.dtype, context, 1, on_gpu, 1.0)
    if sizes.gpu_bytes:
        return Need(sizes.tensor_parallel, sizes.gpu_bytes)
    elements = options.elements(model) + (0 if options.draft is None else options.draft.elements)
    return Need(0, int(elements * ITEM_BYTES[options.dtype]) + sizes.cache_bytes)


def with_share(options: ServeOptions, share: GpuShare, numbers: Sequence[int]) -> ServeOptions:
    """``options`` on the GPUs of a share, by the driver's ``numbers``."""
    visible = ",".join(str(numbers[device]) for device in share.devices)
    return replace(options, memory_share=round(share.share, 3), variables={"CUDA_VISIBLE_DEVICES": visible})


def engine_request(
    model: ServedModel, options: ServeOptions, folder: Path, sizes: EngineSizes, port: int, fd: int | None
) -> EngineRequest:
    """The request to the engine, from the options and what was found since."""
    return EngineRequest(
        folder=folder.absolute(),
        name=model.name,
        host=options.host,
        port=port,
        fd=fd,
        device=options.device,
        dtype=options.dtype,
        sizes=sizes,
        memory_share=options.memory_share,
        token=options.token,
        draft=None if options.draft is None else _target(options.draft, _draft_options(options)).absolute(),
        adapters=options.adapters,
    )


def print_command(model: ServedModel, options: ServeOptions) -> None:
    """Print the lines that export ``model`` and start its engine.

    Raises:
        BadInputError: as :func:`serve`, but for what only starting shows.
    """
    engine, folder = options.engine, _target(model, options)
    sizes = sizes_of(model, options)
    variables = [f"{name}={shlex.quote(value)}" for name, value in options.variables.items()]
    if engine.is_embedded:
        words = ["mgpu-pipe", "serve", str(model.source), "--name", model.name, "--dtype", options.dtype]
        words += ["--host", options.host, "--port", str(options.port), "--device", options.device]
        words += [word for adapter in options.adapters for word in ("--adapter", adapter.word)]
        print_line(" ".join([*variables, shlex.join(words)]))
        return
    command = engine.command(engine_request(model, options, folder, sizes, options.port, None), engine.program)
    _print_export(model, options)
    if options.draft is not None and _target(options.draft, _draft_options(options)) != folder:
        _print_export(options.draft, _draft_options(options))
    variables += [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    print_line(" ".join([*variables, shlex.join([*engine.program, *command.words])]))


def _print_export(model: ServedModel, options: ServeOptions) -> None:
    """Print the line that exports ``model``, if its engine reads an export that is not there yet."""
    folder = _target(model, options)
    if not _is_exported(model, options.engine) or folder.exists():
        return
    words = ["mgpu-pipe", "export", str(model.source), "--out", str(folder)]
    words += ["--format", options.engine.format, "--dtype", options.dtype]
    words += [] if options.frozen is None else ["--frozen-weights", str(options.frozen)]
    print_line(shlex.join([*words, *(["--weights", "ema"] if options.average else [])]))


def _draft_options(options: ServeOptions) -> ServeOptions:
    """The options that export the draft model."""
    return replace(options, draft=None, adapters=(), out=None, force=False, frozen=None, average=False)


def _is_exported(model: ServedModel, engine: Engine) -> bool:
    return not (model.is_folder and engine.format == "hf")


def _target(model: ServedModel, options: ServeOptions) -> Path:
    """The folder that the engine reads."""
    if not _is_exported(model, options.engine):
        return model.source
    return options.out or model.export_folder(f"{options.engine.format}-{options.dtype}")


def prepare_folder(model: ServedModel, options: ServeOptions) -> tuple[Path, dict[str, Any]]:
    """The folder for the engine and the run's answers; what an earlier call exported is used again.

    Raises:
        BadInputError: ``out`` must not be replaced, or the model cannot be exported so.
    """
    out, is_exported = options.out, _is_exported(model, options.engine)
    if out is not None:
        if not is_exported:
            raise BadInputError(f"--out={out}: {model.source} is a model folder and served as it is; leave it out")
        check_target(out, options.force)
    folder = _target(model, options)
    record = folder.with_name(f"{folder.name}.json") if is_exported and out is None else None
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
