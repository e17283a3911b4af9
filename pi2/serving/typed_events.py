"""Streams of events that name their types, as ``/v1/messages`` and ``/v1/responses`` have them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request

from pi2.serving.calls import Delta, Finished
from pi2.serving.requests import note_use
from pi2.serving.sse import write_event


async def stream_typed(
    request: Request,
    write: Callable[[Delta | Finished], Sequence[dict[str, Any]]],
    events: AsyncGenerator[Delta | Finished, None],
    kept: AsyncExitStack,
) -> AsyncGenerator[bytes, None]:
    """Give the bytes of what ``write`` makes of ``events``; ``kept`` is closed at the end."""
    async with kept:
        try:
            async for event in events:
                for found in write(event):
                    yield write_event(found, found["type"])
                if isinstance(event, Finished):
                    note_use(request, completion_tokens=event.tokens)
        finally:
            await events.aclose()
