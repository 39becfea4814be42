"""Generates the answers of the embedded server: one at a time, in the order of their requests, streamed by pieces."""

from __future__ import annotations

import asyncio
import copy
import re
import secrets
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.errors import BadInputError, one_line
from mgpu_pipe.inference.generation import end_tokens, generate_text
from mgpu_pipe.inference.visual_prompts import PromptVisuals
from mgpu_pipe.models.adapters.lora import add_adapters, is_adapter
from mgpu_pipe.models.adapters.low_rank import MAGNITUDE, A, B
from mgpu_pipe.models.adapters.peft_folder import (
    ADAPTER_SETTINGS,
    ADAPTER_WEIGHTS,
    PREFIX,
    first_adapters,
    lengths,
    magnitude_layer,
    name_in_peft,
)
from mgpu_pipe.models.weights.folder import read_header
from mgpu_pipe.serving.engine_process import INCOMPLETE
from mgpu_pipe.serving.server.requests import AnswerRequest, Media, RequestError
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, parse_json, read_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mgpu_pipe.inference.open import LoadedRun


MAX_TOKENS = 4096
"""Tokens of an answer where neither the request nor the model's context limits them."""
NEIGHBOURS = 16
"""Last tokens of a prompt that are decoded with its continuation."""
MAX_WAITING = 64
"""Requests in progress; further ones are refused until one ends."""


@dataclass(frozen=True)
class Piece:
    """A piece of an answer.

    Attributes:
        text: the new text.
        finish_reason: of the last piece: ``stop`` or ``length``; None before.
        prompt_tokens, answer_tokens: numbers of tokens so far.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int
    answer_tokens: int


class AnswerEnded(Exception):
    """Leaves the generation of an answer that a stop string ended, or that nobody waits for."""


class PieceStreamer:
    """transformers' streamer of one answer: turns token ids into pieces of text, and ends at stop strings.

    Args:
        send: takes each piece.
        lead: the chat template's text before an answer; it is not part of it.
        ends: token ids that end an answer.
        stops: texts that end an answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        send: Callable[[Piece], None],
        cancelled: threading.Event,
        lead: str,
        ends: Sequence[int],
        stops: Sequence[str],
        is_chat: bool,
    ) -> None:
        self._tokenizer, self._send, self._cancelled = tokenizer, send, cancelled
        self._lead, self._ends, self._stops, self._is_chat = lead, ends, stops, is_chat
        self._prompt: list[int] | None = None
        self._before = ""
        self._ids: list[int] = []
        self._sent = 0

    def put(self, value: torch.Tensor) -> None:
        """Take the ids of the prompt, then those of each step."""
        ids = value.reshape(-1).tolist()
        if self._cancelled.is_set():
            raise AnswerEnded
        if self._prompt is None:
            self._prompt = ids
            self._before = "" if self._is_chat else self._decode([])
            return
        self._ids += ids
        text = self._text()
        cut = min((start for stop in self._stops if (start := text.find(stop)) >= 0), default=None)
        if cut is not None:
            self._piece(text[:cut], "stop")
            raise AnswerEnded
        withheld = 0 if self._stops == () else max(_overlap(text, stop) for stop in self._stops)
        self._piece(text[: len(text) - withheld].rstrip(INCOMPLETE), None)

    def end(self) -> None:
        """Send the last piece."""
        ended = bool(self._ids) and self._ids[-1] in self._ends
        self._piece(self._text(), "stop" if ended else "length")

    def _decode(self, new: list[int]) -> str:
        before = (self._prompt or [])[-NEIGHBOURS:]
        return str(self._tokenizer.decode([*before, *new], skip_special_tokens=True))

    def _text(self) -> str:
        """The answer so far. Without the prompt, decoding would lose the space before a continuation's first word."""
        new = self._ids[:-1] if self._ids and self._ids[-1] in self._ends else self._ids
        if not self._is_chat:
            text = self._decode(new)
            if text.startswith(self._before):
                return text[len(self._before) :]
        return str(self._tokenizer.decode(new, skip_special_tokens=True)).removeprefix(self._lead)

    def _piece(self, text: str, finish_reason: str | None) -> None:
        if self._lead.startswith(text) and finish_reason is None:
            return  # the lead may be what began
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        if new or finish_reason is not None:
            self._send(Piece(new, finish_reason, len(self._prompt or []), len(self._ids)))


def _overlap(text: str, stop: str) -> int:
    """The length of the longest beginning of ``stop`` with which ``text`` ends."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Job:
    """A request in the queue, where its pieces or its error go, and whether somebody still waits for them."""

    request: AnswerRequest
    send: Callable[[Piece | RequestError], None]
    cancelled: threading.Event


class Answerer:
    """The models of a server. The main thread computes, as chat templates are bounded by a signal; others ask.

    Args:
        run: its tokenizer and chat template are those of every model.
        models: by name; requests that name none get the first.
    """

    def __init__(self, run: LoadedRun, models: Mapping[str, PreTrainedModel]) -> None:
        self._run, self._models, self._tokenizer, self._chat = run, models, run.tokenizer(), run.template()
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._waiting = 0

    @property
    def names(self) -> list[str]:
        """Names of the models."""
        return list(self._models)

    async def answer(self, request: AnswerRequest) -> AsyncIterator[Piece]:
        """The pieces of an answer; closing the iterator ends its generation at the next token.

        Raises:
            RequestError: the server is busy, the prompt fills the context, or the model has no chat template.
        """
        if request.is_chat and self._chat is None:
            raise RequestError("messages: the model has no chat template; use /v1/completions", "messages")
        if self._waiting >= MAX_WAITING:
            raise RequestError(f"{MAX_WAITING} requests are in progress; try again later", None, 429, "busy")
        loop, cancelled = asyncio.get_running_loop(), threading.Event()
        pieces: asyncio.Queue[Piece | RequestError] = asyncio.Queue()

        def send(item: Piece | RequestError) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, item)

        self._waiting += 1
        self._jobs.put(Job(request, send, cancelled))
        try:
            while True:
                item = await pieces.get()
                if isinstance(item, RequestError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._waiting -= 1
            cancelled.set()

    def work(self) -> NoReturn:
        """Compute answers, one after the other, in the main thread."""
        while True:
            job = self._jobs.get()
            field = "messages" if job.request.is_chat else "prompt"
            try:
                if not job.cancelled.is_set():
                    self._generate(job)
            except AnswerEnded:
                continue
            except BadInputError as error:
                job.send(RequestError(one_line(error), field))
            except Exception as error:  # the next requests are answered all the same
                job.send(RequestError(f"the generation failed: {one_line(error)}", None, 500))

    def _generate(self, job: Job) -> None:
        request = job.request
        chat = self._chat if request.is_chat else None
        lead, ends = "" if chat is None else chat.lead(), end_tokens(self._tokenizer, chat)
        streamer = PieceStreamer(self._tokenizer, job.send, job.cancelled, lead, ends, request.stops, request.is_chat)
        generate_text(
            self._models[request.model or self.names[0]],
            self._tokenizer,
            [request.prompt],
            chat=chat,
            max_new_tokens=request.max_tokens or MAX_TOKENS,
            temperature=request.temperature,
            top_k=None,
            top_p=request.top_p,
            seed=secrets.randbits(32) if request.seed is None else request.seed,
            streamer=streamer,  # type: ignore[arg-type]
            visuals=_read_media(self._run, request.media),
        )


def _read_media(run: LoadedRun, media: Media) -> PromptVisuals | None:
    """The pictures and recordings of a request as the run's model takes them.

    Raises:
        BadInputError: a file is no picture or recording, or the model takes none.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for option, contents in (("image", media.pictures), ("audio", media.sounds)):
            files[option] = [Path(folder) / f"{option}-{number}" for number in range(1, len(contents) + 1)]
            for file, content in zip(files[option], contents, strict=True):
                file.write_bytes(content)
        try:
            return PromptVisuals.from_files(run, files["image"], sounds=files["audio"])
        except BadInputError as error:
            raise BadInputError(re.sub(rf"--\w+={re.escape(folder)}/", "", one_line(error))) from error


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A model that computes with the adapter of ``folder``; all other weights are those of ``model``, not copies.

    Raises:
        ConfigError: the adapter is not one of this model, or of a kind other than LoRA and DoRA.
        ModelFolderError: its weights cannot be read.
    """
    keys = adapter_keys(folder)
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # else its layers count as frozen, which take no adapter
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    add_adapters(twin, keys)
    _unshare(twin, {name for name, value in twin.named_parameters() if value.requires_grad and not is_adapter(name)})
    parameters = dict(twin.named_parameters())
    for name, value in first_adapters(keys, twin):
        layer = magnitude_layer(name)
        parameters[name].data.copy_(value if layer is None else value - lengths(twin, layer).to(value.device))
    return twin.eval()


def adapter_keys(folder: Path) -> PeftConfig:
    """The configuration of an adapter, from its settings and the names of its tensors."""
    settings = parse_json(read_bytes(folder / ADAPTER_SETTINGS, MAX_CONFIG_BYTES), folder / ADAPTER_SETTINGS)
    names = read_header(folder / ADAPTER_WEIGHTS)
    return PeftConfig(
        name="dora" if settings.get("use_dora") else "lora",
        r=settings.get("r", 8),
        alpha=settings.get("lora_alpha", 8),
        rslora=bool(settings.get("use_rslora")),
        targets=_layers(names),
        train_also=other_weights(names),
        init_from=str(folder),
    )


def _layers(names: Iterable[str]) -> list[str]:
    """Layers with adapters."""
    ending = name_in_peft(f".{A}").removeprefix(PREFIX)
    return sorted(name.removeprefix(PREFIX).removesuffix(ending) for name in names if name.endswith(ending))


def other_weights(names: Iterable[str]) -> list[str]:
    """Parameters that an adapter's file replaces, next to its adapters."""
    endings = tuple(name_in_peft(f".{kind}").removeprefix(PREFIX) for kind in (A, B, MAGNITUDE))
    return sorted(name.removeprefix(PREFIX) for name in names if not name.endswith(endings))


def _unshare(model: nn.Module, names: set[str]) -> None:
    """Gives ``model`` its own parameters under these names, and under other names that they are tied to."""
    every = dict(model.named_parameters(remove_duplicate=False))
    copies = {id(every[name]): nn.Parameter(every[name].detach().clone()) for name in names}
    for name, parameter in every.items():
        if id(parameter) in copies:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, copies[id(parameter)])
