"""Requests that wait for a place."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pi2.engine.scheduler import Ticket


class Line:
    """Requests that wait, by client; clients take turns.  Whoever drives uses it alone."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[Ticket]:
        for tickets in self._clients.values():
            yield from tickets

    def push(self, ticket: Ticket) -> None:
        """Put a request at the end of its client's."""
        self._clients.setdefault(ticket.client, deque()).append(ticket)

    def pop(self) -> Ticket:
        """Take the next one: the first of the client whose turn it is."""
        client, tickets = self._clients.popitem(last=False)
        ticket = tickets.popleft()
        if tickets:
            self._clients[client] = tickets
        return ticket

    def drop_cancelled(self) -> list[Ticket]:
        """Take out those that nobody wants any more."""
        dropped = [ticket for ticket in self if ticket.cancelled]
        for ticket in dropped:
            own = self._clients[ticket.client]
            own.remove(ticket)
            if not own:
                del self._clients[ticket.client]
        return dropped
