"""Main memory as compute units share it, and a meter of who is at work.

A transfer moves the bytes that a piece of work reads; decoding is bound by them.  Every unit has
its own limit, all together have another, and what is too much is taken from all in proportion.
Rates change when a transfer begins or ends, so that time is exact between those events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import simpy

UnitName = Literal["cpu", "dense"]
_LEAST_OVERLAP = 1e-3
_ROUNDING = 1e-3
"""Bytes below which a transfer counts as done."""


@dataclass(slots=True)
class _Transfer:
    unit: UnitName
    left_bytes: float
    limit_bytes_s: float
    done: simpy.Event
    rate_bytes_s: float = 0.0


@dataclass(slots=True)
class Meter:
    """Seconds in which something was at work."""

    cpu_s: float = 0.0
    dense_s: float = 0.0
    flash_s: float = 0.0
    waiting_s: float = 0.0
    """Flash at work and no compute unit."""
    cpu_bytes: float = 0.0
    dense_bytes: float = 0.0
    read_bytes: float = 0.0


class Bus:
    """Shared memory bandwidth inside one SimPy environment."""

    def __init__(
        self,
        env: simpy.Environment,
        *,
        cpu_bytes_s: float,
        dense_bytes_s: float,
        shared_bytes_s: float,
        read_overlap: float = 1.0,
    ) -> None:
        """``read_overlap``: part of the CPU's rate that is left while the flash is read: 1 where
        reading costs the cores nothing."""
        self.env = env
        self.meter = Meter()
        self._limits: dict[UnitName, float] = {"cpu": cpu_bytes_s, "dense": dense_bytes_s}
        self._shared = shared_bytes_s
        self._read_overlap = max(read_overlap, _LEAST_OVERLAP)
        self._transfers: list[_Transfer] = []
        self._reads = 0
        self._since = env.now
        self._version = 0

    def move(
        self, unit: UnitName, size_bytes: float, limit_bytes_s: float | None = None
    ) -> simpy.Event:
        """Start a transfer of a unit; the event fires when it has ended."""
        done = self.env.event()
        limit = self._limits[unit] if limit_bytes_s is None else limit_bytes_s
        self._advance()
        if unit == "cpu":
            self.meter.cpu_bytes += size_bytes
        else:
            self.meter.dense_bytes += size_bytes
        self._transfers.append(_Transfer(unit, size_bytes, limit, done))
        self._schedule()
        return done

    def begin_read(self) -> None:
        """A read from flash begins."""
        self._advance()
        self._reads += 1
        self._schedule()

    def end_read(self, size_bytes: float) -> None:
        """A read of ``size_bytes`` from flash has ended."""
        self._advance()
        self._reads -= 1
        self.meter.read_bytes += size_bytes
        self._schedule()

    def _advance(self) -> None:
        """Account for the time since the last event."""
        elapsed = self.env.now - self._since
        self._since = self.env.now
        if elapsed <= 0.0:
            return
        computing = False
        for unit in ("cpu", "dense"):
            if any(item.unit == unit for item in self._transfers):
                computing = True
                if unit == "cpu":
                    self.meter.cpu_s += elapsed
                else:
                    self.meter.dense_s += elapsed
        if self._reads:
            self.meter.flash_s += elapsed
            if not computing:
                self.meter.waiting_s += elapsed
        for item in self._transfers:
            item.left_bytes -= item.rate_bytes_s * elapsed

    def _schedule(self) -> None:
        """Give every transfer its rate, and wake up when the first ends."""
        wishes = dict.fromkeys(self._limits, 0.0)
        for item in self._transfers:
            wishes[item.unit] += item.limit_bytes_s
        rates = {unit: min(wish, self._limits[unit]) for unit, wish in wishes.items()}
        if self._reads:
            rates["cpu"] *= self._read_overlap
        total = sum(rates.values())
        scale = min(1.0, self._shared / total) if total > 0.0 else 1.0
        first = float("inf")
        for item in self._transfers:
            part = item.limit_bytes_s / wishes[item.unit]
            item.rate_bytes_s = rates[item.unit] * scale * part
            first = min(first, max(item.left_bytes, 0.0) / item.rate_bytes_s)
        self._version += 1
        if self._transfers:
            version = self._version
            timer = self.env.timeout(first)
            assert timer.callbacks is not None
            timer.callbacks.append(lambda _: self._wake(version))

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = [item for item in self._transfers if item.left_bytes <= _ROUNDING]
        if not ended:  # rounding: the first one is due
            ended = [min(self._transfers, key=lambda item: item.left_bytes / item.rate_bytes_s)]
        self._transfers = [item for item in self._transfers if item not in ended]
        self._schedule()
        for item in ended:
            item.done.succeed()
