"""All served plans within one memory budget, and the line of those who wait for one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pi2.serving.errors import ApiError
from pi2.serving.host import Host, ServedPlan


@dataclass(slots=True, eq=False)
class Turn:
    """A request's use of a plan, which begins when `ready` is done."""

    host: Host
    ready: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done when the model is in memory for this request, or holds why it cannot be."""


class Hosts:
    """All served plans, within one memory budget.

    A request for a model that has no room waits in line.  The first in line decides which models
    have to leave; new requests for those line up behind it, so that they drain and are given back.
    All who wait for a model go on with it as soon as it is loaded.  Plans therefore take turns in
    the order of their first waiters, and nobody waits for more than one turn of each other plan.
    """

    def __init__(self, plans: Sequence[ServedPlan], *, memory_bytes: int | None = None) -> None:
        """``memory_bytes``: what the budgets of the models in memory may add up to; None lets all
        of them be there."""
        self.hosts = {plan.name: Host(plan) for plan in plans}
        assert len(self.hosts) == len(plans), "names are unique"
        self._memory_bytes = memory_bytes
        self._line: list[Turn] = []
        self._leaving: Sequence[Host] = ()
        """Models that have to make room: nobody begins to use them."""
        self._changed = asyncio.Event()
        """Somebody has ended his use, or has left the line."""
        self._mover: asyncio.Task[None] | None = None
        """What loads models and gives them back, as long as somebody is in line."""
        self._closing = False

    @property
    def used_bytes(self) -> int:
        """Budgets of the models in memory, added up."""
        return sum(host.plan.budget_bytes for host in self._list_loaded())

    def join(self, name: str, *, waiting: int) -> Turn:
        """Ask for the plan called ``name``; await ``ready`` of what is returned, and `leave` in any
        case.

        ApiError 404 if there is none, 429 if ``waiting`` requests are in line for it already and
        it cannot be had at once, 503 if the server closes or the plan never fits.
        """
        host = self.hosts.get(name) or self.hosts.get(name.removesuffix(":latest"))
        if host is None:
            raise ApiError(
                404,
                f"The model '{name}' does not exist; there are: {', '.join(self.hosts)}.",
                param="model",
                code="model_not_found",
            )
        if self._closing:
            raise ApiError(503, "the server is being closed", retry_after_s=1)
        if self._memory_bytes is not None and host.plan.budget_bytes > self._memory_bytes:
            raise ApiError(503, f"there is no memory for '{name}'")
        turn = Turn(host)
        if host.is_loaded and host not in self._leaving:
            self._admit(turn)
            return turn
        idle_bytes = sum(other.plan.budget_bytes for other in self._list_loaded(idle=True))
        must_wait = bool(self._line) or self._count_missing_bytes(host) > idle_bytes
        if must_wait and host.waiting >= waiting:
            raise ApiError(
                429,
                f"Too many requests are waiting for '{name}', which is not in memory.",
                code="rate_limit_exceeded",
                retry_after_s=5,
            )
        self._line.append(turn)
        host.waiting += 1
        if self._mover is None:
            self._mover = asyncio.create_task(self._move())
        return turn

    def leave(self, turn: Turn) -> None:
        """End a use, or give the place in line up."""
        if turn in self._line:
            self._remove(turn)
        elif turn.ready.done() and not turn.ready.cancelled() and turn.ready.exception() is None:
            turn.host.users -= 1
            turn.host.used_at = time.monotonic()
        self._changed.set()

    async def start(self) -> None:
        """Load what there is memory for, in the order of the plans."""
        for host in self.hosts.values():
            if self._count_missing_bytes(host) <= 0:
                await host.start()

    async def stop(self) -> None:
        """Give everything back; who waits is told so (ApiError 503)."""
        self._closing = True
        for turn in list(self._line):
            self._fail(turn, ApiError(503, "the server is being closed", retry_after_s=1))
        self._changed.set()
        if self._mover is not None:
            await self._mover
        for host in self.hosts.values():
            await host.stop()

    def _list_loaded(self, *, idle: bool = False) -> list[Host]:
        """Models in memory, those that nobody has used for longest first; ``idle``: only such as
        nobody uses."""
        found = [host for host in self.hosts.values() if host.is_loaded]
        if idle:
            found = [host for host in found if not host.users]
        return sorted(found, key=lambda host: host.used_at)

    def _count_missing_bytes(self, host: Host) -> int:
        """Bytes that other models have to give back before ``host`` can be loaded."""
        if self._memory_bytes is None:
            return 0
        return self.used_bytes + host.plan.budget_bytes - self._memory_bytes

    def _remove(self, turn: Turn) -> None:
        self._line.remove(turn)
        turn.host.waiting -= 1

    def _admit(self, turn: Turn) -> None:
        turn.host.users += 1
        turn.ready.set_result(None)

    def _fail(self, turn: Turn, error: Exception) -> None:
        self._remove(turn)
        if not turn.ready.done():
            turn.ready.set_exception(error)

    def _admit_all(self) -> None:
        for turn in list(self._line):
            if turn.host.is_loaded and turn.host not in self._leaving:
                self._remove(turn)
                if not turn.ready.done():
                    self._admit(turn)

    async def _move(self) -> None:
        try:
            while self._line:
                host = self._line[0].host
                has_room = await self._make_room(host)
                self._leaving = ()
                self._admit_all()  # some may have been told to leave and need not
                if has_room:
                    await self._load(host)
                    self._admit_all()
        finally:
            self._mover = None

    async def _load(self, host: Host) -> None:
        """Load a model; if it cannot be, those who wait for it learn why."""
        try:
            await host.start()
        except Exception as error:
            for turn in [turn for turn in self._line if turn.host is host]:
                self._fail(turn, error)

    async def _make_room(self, host: Host) -> bool:
        """Give models back until there is memory for ``host``; False if nobody waits for it any
        more."""
        # Chosen once: it would not end if the choice followed what is used at the moment.
        self._leaving = self._choose_leaving(host)
        while (missing := self._count_missing_bytes(host)) > 0:
            if not host.waiting:
                return False
            idle = self._list_loaded(idle=True)
            if sum(other.plan.budget_bytes for other in idle) < missing:
                idle = [other for other in idle if other in self._leaving]
            if idle:
                await idle[0].stop()
                continue
            self._changed.clear()
            await self._changed.wait()
        return bool(host.waiting)

    def _choose_leaving(self, host: Host) -> list[Host]:
        """Models that make enough room for ``host``: idle ones first, and of these and the others
        such as nobody has stopped using for longest."""
        missing = self._count_missing_bytes(host)
        found = []
        for other in sorted(self._list_loaded(), key=lambda other: other.users > 0):
            if missing <= 0:
                break
            found.append(other)
            missing -= other.plan.budget_bytes
        return found
