"""The routes of the embedded server: OpenAI's models, completions and chat completions, and a page to talk to."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mgpu_pipe.serving.server.answerer import Answerer, Piece
from mgpu_pipe.serving.server.requests import AnswerRequest, RequestError, read_request

STATIC = Path(__file__).with_name("static")
BODY_BYTES = 16_000_000
"""Room for a phone's picture in base64."""
BODY_S = 10.0
"""Time for the body of a request."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
T = TypeVar("T")


def build_app(answerer: Answerer, token: str | None, host: str) -> Starlette:
    """The application.

    Args:
        token: that requests to ``/v1`` must bear; None accepts every request that a browser cannot forge.
        host: the address that the server is bound to.
    """
    routes = Routes(answerer)
    return Starlette(
        routes=[
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            *(Route(f"/{file}".removesuffix("page.html"), show_file) for file in ("page.html", "page.js", "page.css")),
        ],
        middleware=[Middleware(Guard, token=token, hosts=(*LOOPBACK, host))],
        exception_handlers={RequestError: _refuse, HTTPException: _refuse_route},
    )


async def show_file(request: Request) -> Response:
    """A file of the page, which asks for the token itself."""
    return FileResponse(STATIC / (request.url.path.strip("/") or "page.html"), headers=PAGE_HEADERS)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body(), error.status)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(RequestError(error.detail, status=error.status_code).body(), error.status_code)


class Guard:
    """Middleware that asks for the token; without one it refuses what another web page could send.

    Another page cannot name its own host in ``Host`` unless its name leads here, nor send JSON without asking first.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: tuple[str, ...]) -> None:
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._problem(Request(scope)) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(error.body(), error.status)(scope, receive, send)

    def _problem(self, request: Request) -> RequestError | None:
        if not request.url.path.startswith("/v1"):
            return None
        if self._token is None:
            if urlsplit(f"//{request.headers.get('host', '')}").hostname not in self._hosts:
                return RequestError("Host: is another name; use the printed address", status=403)
            if request.method == "POST" and request.headers.get("content-type", "") != "application/json":
                return RequestError("Content-Type: send application/json", status=415)
            return None
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secrets.compare_digest(token.strip().encode(), self._token.encode()):
            return RequestError("Authorization: send Bearer and the printed token", None, 401, "invalid_api_key")
        return None


class Routes:
    """Answers to requests about a model and its adapters."""

    def __init__(self, answerer: Answerer) -> None:
        self._answerer, self._names, self._created = answerer, answerer.names, int(time.time())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        self._require(request.path_params["name"])
        return JSONResponse(self._entry(request.path_params["name"]))

    def _entry(self, name: str) -> dict[str, Any]:
        base = self._names[0]
        parent = {} if name == base else {"parent": base}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "mgpu_pipe", **parent}

    def _require(self, name: str) -> None:
        if name not in self._names:
            known = ", ".join(map(repr, self._names))
            raise RequestError(f"model={name!r}: no such model; use {known}", "model", 404, "model_not_found")

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def _answer(self, http_request: Request, is_chat: bool) -> Response:
        query = read_request(await _json_body(http_request), is_chat)
        if query.model:
            self._require(query.model)
        pieces = self._answerer.answer(query)
        first = await _or_disconnect(http_request, anext(pieces))
        if query.stream:
            return StreamingResponse(self._events(query, first, pieces), media_type="text/event-stream")
        async with aclosing(pieces):  # type: ignore[type-var]
            every = [first]
            while every[-1].finish_reason is None:
                every.append(await _or_disconnect(http_request, anext(pieces)))
        text = "".join(piece.text for piece in every)
        choice = self._choice(query, {"role": "assistant", "content": text} if is_chat else text, every[-1])
        head = self._head(query, "chat.completion" if is_chat else "text_completion")
        return JSONResponse({**head, "choices": [choice], "usage": _usage(every[-1])})

    async def _events(self, query: AnswerRequest, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """Server-sent events of a streamed answer."""
        head = self._head(query, "chat.completion.chunk" if query.is_chat else "text_completion")
        try:
            piece, role = first, {"role": "assistant"}
            while True:
                content = {**role, "content": piece.text} if query.is_chat else piece.text
                choice = self._choice(query, content, piece, "delta")
                yield _event({**head, "choices": [choice]})
                role = {}
                if piece.finish_reason is not None:
                    break
                piece = await anext(pieces)
            if query.includes_usage:
                yield _event({**head, "choices": [], "usage": _usage(piece)})
        except RequestError as error:
            yield _event(error.body())
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
        yield "data: [DONE]\n\n"

    def _choice(self, query: AnswerRequest, content: Any, piece: Piece, key: str = "message") -> dict[str, Any]:
        name = key if query.is_chat else "text"
        return {"index": 0, name: content, "logprobs": None, "finish_reason": piece.finish_reason}

    def _head(self, query: AnswerRequest, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if query.is_chat else "cmpl"
        name = f"{prefix}-{secrets.token_hex(12)}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": query.model or self._names[0]}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _usage(piece: Piece) -> dict[str, int]:
    total = piece.prompt_tokens + piece.answer_tokens
    return {"prompt_tokens": piece.prompt_tokens, "completion_tokens": piece.answer_tokens, "total_tokens": total}


async def _json_body(request: Request) -> object:
    """The decoded body.

    Raises:
        RequestError: it is too large, too slow, or no JSON.
    """
    body = bytearray()

    async def read() -> None:
        async for part in request.stream():
            body.extend(part)
            if len(body) > BODY_BYTES:
                raise RequestError(f"body: has more than {BODY_BYTES} bytes; send less", status=413)

    try:
        await asyncio.wait_for(read(), BODY_S)
        content = json.loads(body)
        json.dumps(content, ensure_ascii=False).encode()  # no tokenizer takes half of a surrogate pair
        return content
    except asyncio.TimeoutError:
        raise RequestError(f"body: did not come within {BODY_S:g} s; send it faster", status=408) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"body: no JSON ({error}); correct it") from None


async def _or_disconnect(request: Request, coming: Awaitable[T]) -> T:
    """Wait for ``coming``.

    Raises:
        ClientDisconnect: the client hung up before.
    """
    wanted, gone = asyncio.ensure_future(coming), asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait((wanted, gone), return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise ClientDisconnect
        return wanted.result()
    finally:
        for task in (wanted, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
