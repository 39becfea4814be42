"""Reads the bodies of ``/v1/completions`` and ``/v1/chat/completions``.

Source: https://platform.openai.com/docs/api-reference/chat/create and ``.../completions/create``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mgpu_pipe.data.text.conversations import AUDIO, PLACE

ROLES = ("system", "developer", "user", "assistant")
MAX_STOPS = 16
MAX_FILES = 64
"""Pictures and recordings of a request, all of which are decoded before the answer."""
COLDEST = 1e-5
"""Lower temperatures are 0: logits divided by them are beyond fp32."""
MAX_MESSAGE = 1000
"""Characters of a refusal; a request's value may be in it."""
COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions; a chat's default is the rest of the context."""
UNSUPPORTED = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "response_format": (None, {"type": "text"}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    **dict.fromkeys(("min_p", "min_tokens"), (None, 0)),
    "top_k": (None, 0, -1),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (None, 1)),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), (None,)),
}
"""Fields of OpenAI and of other engines that would change the answer, with the values that leave it as it is."""


class RequestError(ValueError):
    """A request that is refused, with its HTTP status and OpenAI's ``param`` and ``code``."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self)[:MAX_MESSAGE], "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Media:
    """Contents of the picture and recording files of a conversation, in their order."""

    pictures: list[bytes] = field(default_factory=list)
    sounds: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class AnswerRequest:
    """A request for one answer.

    Attributes:
        prompt: a text to continue, or a conversation's messages to answer, with a place for each file of ``media``.
        max_tokens: of the answer; None for the rest of the context.
        temperature: 0 always takes the likeliest token.
        seed: of the draws; None draws one.
        stops: texts that end the answer; they are not part of it.
        includes_usage: whether a stream ends with the numbers of tokens.
    """

    model: str
    prompt: str | list[dict[str, str]]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    includes_usage: bool
    media: Media

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)


def read_request(body: object, is_chat: bool) -> AnswerRequest:
    """The request in a decoded JSON ``body``.

    Raises:
        RequestError: a field is missing, wrong, or would change the answer in a way that this server cannot.
    """
    if not isinstance(body, dict):
        raise RequestError("body: no JSON object; send {...}")
    for name, neutral in UNSUPPORTED.items():
        if body.get(name) not in neutral:
            raise RequestError(f"{name}={body[name]!r}: this server does not support it; leave it out", name)
    limit = _number(body, "max_tokens", 1, math.inf, whole=True)
    if is_chat:
        limit = _number(body, "max_completion_tokens", 1, math.inf, whole=True) or limit
    temperature, top_p = _number(body, "temperature", 0, 100), _number(body, "top_p", 0, 1)
    seed = _number(body, "seed", -(2**63), 2**63 - 1, whole=True)
    if top_p == 0:
        raise RequestError("top_p=0: not above 0; use temperature=0 for the likeliest token", "top_p")
    options = body.get("stream_options") or {}
    if body.get("stream") not in (None, False, True) or type(body.get("stream")) is int:
        raise RequestError(f"stream={body['stream']!r}: not true or false; correct it", "stream")
    if not isinstance(options, Mapping):
        raise RequestError(f"stream_options={options!r}: no object; send {{...}}", "stream_options")
    media = Media()
    return AnswerRequest(
        model=_text(body, "model", ""),
        prompt=_messages(body, media) if is_chat else _prompt(body),
        max_tokens=int(limit) if limit is not None else None if is_chat else COMPLETION_TOKENS,
        temperature=1.0 if temperature is None else float(temperature) if temperature >= COLDEST else 0.0,
        top_p=1.0 if top_p is None else float(top_p),
        seed=None if seed is None else int(seed),
        stops=_stops(body),
        stream=body.get("stream") is True,
        includes_usage=options.get("include_usage") is True,
        media=media,
    )


def _number(body: Mapping[str, Any], name: str, low: float, high: float, whole: bool = False) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise RequestError(f"{name}={value!r}: not {kind} {limits}; correct it", name)
    number: float = value
    return number


def _text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise RequestError(f"{name}: missing or no text; give one", name)
    return value


def _prompt(body: Mapping[str, Any]) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        [prompt] = prompt
    if not isinstance(prompt, str):
        raise RequestError("prompt: not one text; send a request for each prompt, without token ids", "prompt")
    return prompt


def _messages(body: Mapping[str, Any], media: Media) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages: missing or empty; give a list of {role, content}", "messages")
    read = [_message(message, f"messages[{number}]", media) for number, message in enumerate(messages)]
    if len(media.pictures) + len(media.sounds) > MAX_FILES:
        raise RequestError(f"messages: more than {MAX_FILES} pictures and recordings; send fewer", "messages")
    return read


def _message(message: object, where: str, media: Media) -> dict[str, str]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or role not in ROLES:
        raise RequestError(f"{where}: no object with one of the roles {', '.join(ROLES)}; correct it", "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, where, media) for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{where}: its content is no text; give one", "messages")
    return {"role": "system" if role == "developer" else str(role), "content": content}


def _part(part: object, where: str, media: Media) -> str:
    """The text of a part of a message; of a picture or a recording, which goes to ``media``, its place."""
    kind = part.get("type") if isinstance(part, dict) else None
    value = part.get(kind) if isinstance(part, dict) and isinstance(kind, str) else None
    if kind == "text" and isinstance(value, str):
        return value
    if kind == "image_url":
        url = value.get("url") if isinstance(value, dict) else value
        head, _, data = str(url).partition(",")
        if not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
            fix = "send data:image/png;base64,... as this server loads nothing"
            raise RequestError(f"{where}: image_url is no data; {fix}", "messages")
        media.pictures.append(_decode(data, f"{where}: image_url"))
        return PLACE
    if kind == "input_audio":
        media.sounds.append(_decode(value.get("data") if isinstance(value, dict) else None, f"{where}: input_audio"))
        return AUDIO
    raise RequestError(f"{where}: a part is none of text, image_url and input_audio; correct it", "messages")


def _decode(data: object, where: str) -> bytes:
    if not isinstance(data, str):
        raise RequestError(f"{where}: has no data; give the file in base64", "messages")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except ValueError as error:
        raise RequestError(f"{where}: no base64 ({error}); encode the file again", "messages") from None


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"stop: not a text or a list of at most {MAX_STOPS} texts; correct it", "stop")
    return tuple(stops)
