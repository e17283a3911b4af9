"""Somebody who drives a scheduler all the time: a thread of its own, for those who only wait."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from threading import Event, Thread

from pi2.engine.answer import Piece
from pi2.engine.scheduler import Scheduler, Ticket, tell_nobody

_PATIENCE_S = 60.0
"""The thread looks by itself after this time whether there is something to do."""


class Driver:
    """Does rounds as long as there is something to do."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._wake = Event()
        self._ending = False
        self._thread: Thread | None = None
        scheduler.wake = self._wake.set

    def start(self) -> None:
        """Do it in a thread of its own."""
        self._thread = Thread(target=self.run, name="pi2-driver", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Do it in the calling thread until `end` is called."""
        while not self._ending:
            self._wake.clear()
            while not self._ending and self._scheduler.drive():
                pass
            if not self._ending:
                self._wake.wait(_PATIENCE_S)

    def submit(self, *tickets: Ticket) -> None:
        """Put requests into the line; UserError P615 if the model is closed."""
        self._scheduler.submit(*tickets)

    def cancel(self, ticket: Ticket) -> None:
        """Say that nobody wants a request any more."""
        ticket.cancel()
        self._wake.set()

    def end(self) -> None:
        """End the thread after the round that is under way."""
        self._ending = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()


async def stream_pieces(
    driver: Driver, ticket: Ticket, *, submitted: bool = False
) -> AsyncGenerator[Piece, None]:
    """Put ``ticket`` into the line, unless it is ``submitted``, and give its pieces as they are
    made.

    Whoever stops iterating gives the request up.  Raises what the request fails with.
    """
    import asyncio  # with TLS it takes 4 MiB, which runs that only generate do without

    loop = asyncio.get_running_loop()
    ready = asyncio.Event()

    def notify() -> None:
        try:
            loop.call_soon_threadsafe(ready.set)
        except RuntimeError:  # the loop has ended: nobody waits any more
            ticket.cancel()

    ticket.notify = notify
    if submitted:
        # Something may have come before there was anybody to tell.
        ready.set()
    else:
        driver.submit(ticket)
    try:
        while True:
            await ready.wait()
            ready.clear()
            ended = ticket.ended
            while ticket.pieces:
                yield ticket.pieces.popleft()
            if ended:
                break
    finally:
        # What was called knows the ticket: both would stay until somebody looks for garbage.
        ticket.notify = tell_nobody
        if not ticket.ended:
            driver.cancel(ticket)
    if ticket.error is not None:
        raise ticket.error
