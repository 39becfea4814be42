"""A protocol of uvicorn that ends connections of clients that send or read too slowly."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0
"""Time for the head of a request, from its connection or the previous answer on."""
READ_S = 30.0
"""Time in which a client must read what fills the send buffer."""
MAX_CONNECTIONS = 4096


class BoundedProtocol(H11Protocol):
    """One connection, aborted when its client is too slow; bodies are bounded where they are read."""

    _request_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._request_timer = self.loop.call_later(REQUEST_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering() and self._request_timer is not None:
            self._request_timer.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._stop_timers()
        if not self._is_answering():  # else the next request was there already
            self._request_timer = self.loop.call_later(REQUEST_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timers()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_timers(self) -> None:
        for timer in (self._request_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
