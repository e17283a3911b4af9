"""Connections of HTTP that do not wait for ever: uvicorn's, with limits of time for headers and for
clients that do not read."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

_LEAST_TAKEN_BYTES = 16 << 10
"""What a client has to take in each `TimedConnection.reading_s` while an answer waits."""


class TimedConnection(H11Protocol):
    """Closes itself where a request has not begun in time: its headers have to come whole, however
    slowly a client sends them.  Bodies have a limit of their own (`pi2.serving.requests`).  A
    client that does not read its answer is cut off, and what answers it learns that it has gone.
    """

    headers_s: ClassVar[float] = 30.0
    """Seconds from the connection, or from the last answer, to the end of a request's headers."""
    reading_s: ClassVar[float] = 30.0
    """Seconds in which a client has to take a part of what is written, or the rest of it."""
    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has connected."""
        super().connection_made(transport)
        self._wait_for_headers()

    def on_response_complete(self) -> None:
        """An answer is sent; the next request may come."""
        super().on_response_complete()
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing will come any more."""
        super().connection_lost(exc)
        for timer in (self._deadline, self._reading):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """The client does not take what was written: it is watched until it has."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        super().resume_writing()
        if self._reading is not None and not self.transport.is_closing():
            self._reading.cancel()
            self._reading = None

    def _watch_reader(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        left = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self.reading_s, self._cut_off, left)

    def _cut_off(self, left_before: int) -> None:
        """End the connection unless the client has read since ``left_before`` bytes were left."""
        left = self.transport.get_write_buffer_size()
        if left and left_before - left < _LEAST_TAKEN_BYTES:
            self.transport.abort()  # closing would wait for the client
        elif left:
            self._watch_reader()

    def _wait_for_headers(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.headers_s, self._close_idle)

    def _close_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
            self._watch_reader()
