"""``mgpu-pipe serve``: a model behind OpenAI's interface."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config.arguments import byte_size, count, positive_int, share
from mgpu_pipe.errors import EXIT_OK, BadInputError, hide, print_line
from mgpu_pipe.inference.model_arguments import (
    add_device_argument,
    build_parser,
    folder_of,
    parse_arguments,
    resolve_device,
)
from mgpu_pipe.serving.engines import ENGINES, Engine, Gpus, find_engine
from mgpu_pipe.serving.serve import ServeOptions, need_of, print_command, serve, with_share
from mgpu_pipe.serving.serve_file import check_host, read_serve_file, share_gpus
from mgpu_pipe.serving.source import ServedModel, find_draft, find_served, read_adapters
from mgpu_pipe.system.hardware import gpu_capability, host_memory, used_memory
from mgpu_pipe.system.local_files import expand_home

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_PORT = 65535
DTYPES = ("fp32", "bf16", "fp16", "q8_0", "q4_k")
CONCURRENCY = 16
YAML = (".yaml", ".yml")


def run_serve(argv: Sequence[str]) -> int:
    """``mgpu-pipe serve [FOLDER] [--engine NAME]``: exports, starts, compares, and prints the address."""
    arguments = parse_arguments(_parser(), argv)
    _check(arguments)
    token = None if arguments.no_token else arguments.token or secrets.token_urlsafe(24)
    if token is not None:
        hide(token, "<token>")
    file = arguments.folder
    if file is not None and file.suffix in YAML and file.is_file():
        models = _read_models(file, arguments, token)
    else:
        models = [_model_and_options(arguments, token)]
    if arguments.print:
        for model, options in models:
            print_command(model, options)
        return EXIT_OK
    try:
        serve(models)
    except KeyboardInterrupt:
        print_line("stopped", file=sys.stderr)
    return EXIT_OK


def _model_and_options(arguments: argparse.Namespace, token: str | None) -> tuple[ServedModel, ServeOptions]:
    model = find_served(folder_of(arguments), arguments.frozen_weights, arguments.weights == "ema", arguments.name)
    options = replace(_options(arguments, token), adapters=read_adapters(arguments.adapter, model.name))
    return model, options if arguments.draft is None else replace(options, draft=find_draft(arguments.draft, model))


def _read_models(
    file: Path, arguments: argparse.Namespace, token: str | None
) -> list[tuple[ServedModel, ServeOptions]]:
    """The models of a ``serve.yaml``, each with its share of the GPUs; BadInputError if they do not fit."""
    flags = [f"--{name}" for name in ("print", "check", "verbose") if getattr(arguments, name)]
    flags += ["--no-token"] if arguments.no_token else []
    entries = [parse_arguments(_parser(), [*words, *flags]) for words in read_serve_file(file)]
    for entry in entries:
        if not find_engine(entry.engine).is_embedded:
            entry.gpus, entry.gpu_memory = arguments.gpus, arguments.gpu_memory
        _check(entry)
    models = [_model_and_options(entry, token) for entry in entries]
    gpus = _gpus(arguments)
    needs = [need_of(model, options, gpus) for model, options in models]
    check_host(needs, host_memory())
    shares = share_gpus([need for need in needs if need.gpus], gpus, arguments.memory_share)
    numbers = range(gpus.count) if arguments.gpus is not None else sorted(used_memory())
    return [
        (model, with_share(options, shares.pop(0), numbers) if need.gpus else options)
        for (model, options), need in zip(models, needs, strict=True)
    ]


def _options(arguments: argparse.Namespace, token: str | None) -> ServeOptions:
    engine, gpus = find_engine(arguments.engine), _gpus(arguments)
    planned = {"--context": arguments.context, "--concurrency": arguments.concurrency, "--gpus": arguments.gpus}
    planned["--draft"] = arguments.draft
    for option in (option for option, value in planned.items() if engine.is_embedded and value is not None):
        raise BadInputError(f"{option}: is for other engines than {engine.name}; leave it out, or name an --engine")
    if gpus.ranks is not None and engine.name not in ("vllm", "sglang"):
        raise BadInputError(f"--tensor-parallel: {engine.name} takes none; use --engine vllm or sglang")
    dtype = arguments.dtype or _default_dtype(engine, gpus)
    if dtype not in engine.dtypes:
        raise BadInputError(f"--dtype={dtype}: {engine.name} takes {', '.join(engine.dtypes)}; choose one of them")
    return ServeOptions(
        engine=engine,
        host=arguments.host,
        port=arguments.port,
        device=resolve_device(arguments.device),
        dtype=dtype,
        environment=arguments.engine_env,
        context=arguments.context,
        concurrency=arguments.concurrency or CONCURRENCY,
        gpus=gpus,
        memory_share=arguments.memory_share,
        out=None if arguments.out is None else expand_home(arguments.out),
        force=arguments.force,
        frozen=arguments.frozen_weights,
        average=arguments.weights == "ema",
        token=token,
        is_trial=arguments.check,
        is_verbose=arguments.verbose,
    )


def _gpus(arguments: argparse.Namespace) -> Gpus:
    """The GPUs of this machine, or those that are planned with."""
    if (arguments.gpus is None) != (arguments.gpu_memory is None):
        raise BadInputError("--gpus, --gpu-memory: plan for another machine together; give both, or none")
    if arguments.gpus is not None:
        return Gpus(arguments.gpus, arguments.gpu_memory, arguments.tensor_parallel)
    if arguments.device == "cpu":
        return Gpus(0, 0, arguments.tensor_parallel)
    totals = [total for _, total in used_memory().values()]
    return Gpus(len(totals), min(totals, default=0), arguments.tensor_parallel)


def _default_dtype(engine: Engine, gpus: Gpus) -> str:
    """fp32 to give the run's answers; on GPUs the type that they compute in."""
    if engine.format == "gguf":
        return "fp16"
    if engine.is_embedded or not gpus.count:
        return "fp32"
    return "fp16" if (gpu_capability() or (8, 0)) < (8, 0) else "bf16"


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("serve", "Answer requests of OpenAI's interface with a model, until Ctrl-C.")
    parser.usage = "%(prog)s [FOLDER] [options]"
    parser.add_argument("--engine", choices=ENGINES, default="transformers", help="default transformers")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; default 127.0.0.1, this machine alone")
    parser.add_argument("--port", type=count, default=8000, metavar="N", help="default 8000; 0 takes a free one")
    parser.add_argument("--token", metavar="TEXT", help="that requests must bear; default: a random one")
    parser.add_argument("--no-token", action="store_true", help="accept requests without a token")
    parser.add_argument("--name", help="of the model in requests; default: the run's")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights; default fp32, on GPUs bf16")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the export; default: in the cache")
    parser.add_argument("--force", action="store_true", help="replace an existing folder --out")
    parser.add_argument("--print", action="store_true", help="print the engine's command, and start nothing")
    parser.add_argument("--engine-env", type=Path, metavar="FOLDER", help="virtual environment with the engine")
    parser.add_argument("--context", type=positive_int, metavar="N", help="tokens of a prompt and its answer")
    parser.add_argument(
        "--concurrency", type=positive_int, metavar="N", help=f"requests together; default {CONCURRENCY}"
    )
    parser.add_argument("--gpus", type=count, metavar="N", help="plan for a machine with N GPUs; with --print")
    parser.add_argument("--gpu-memory", type=byte_size, metavar="SIZE", help="of each of these GPUs, e.g. 80GB")
    parser.add_argument(
        "--tensor-parallel", type=positive_int, metavar="N", help="GPUs, or processes on CPUs, that share each layer"
    )
    parser.add_argument("--memory-share", type=share, default=0.9, metavar="P", help="of each GPU; default 0.9")
    parser.add_argument("--draft", type=Path, metavar="FOLDER", help="smaller model that proposes tokens")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="adapter of the peft package, which requests choose by its name; repeatable",
    )
    parser.add_argument("--check", action="store_true", help="compare five answers with the run's, and end")
    parser.add_argument("--verbose", action="store_true", help="show all that the engine prints")
    add_device_argument(parser)
    return parser


def _check(arguments: argparse.Namespace) -> None:
    if arguments.port > MAX_PORT:
        raise BadInputError(f"--port={arguments.port}: above {MAX_PORT}; choose a smaller one")
    if arguments.gpus is not None and not arguments.print:
        raise BadInputError("--gpus: plans for another machine; add --print, or leave it out")
    if arguments.no_token and arguments.token is not None:
        raise BadInputError("--no-token: contradicts --token; leave one out")
    if arguments.token is not None and (not arguments.token.isascii() or not arguments.token.isprintable()):
        raise BadInputError("--token: has characters that no header takes; use letters, digits, - and _")
    if arguments.token == "" or arguments.name == "":
        raise BadInputError("--token, --name: are empty; give a text, or leave them out")
    if arguments.no_token and arguments.host not in LOOPBACK:
        raise BadInputError(f"--no-token: lets everybody who reaches --host={arguments.host} in; leave one out")


VERB = Verb("answer requests of OpenAI's interface", run_serve)
