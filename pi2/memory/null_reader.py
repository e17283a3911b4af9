"""What stands for the reader of neurons where no store is: plans run dry on any machine."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from pi2.arrays import I32, U8, Bits
from pi2.memory.flash import PendingRead
from pi2.memory.io_engine import EngineName
from pi2.memory.observer import ReadObserver


class NullReader:
    """Stands for a reader where nothing is to be read: counts bytes only."""

    fallback: str | None = None
    engine_fallback: str | None = None
    phases_fallback: str | None = None
    engine: EngineName = "pread"

    def __init__(self, stride: int, gate_bytes: int = 0) -> None:
        self._stride = stride
        self._gate_bytes = gate_bytes
        self.read_bytes = 0
        self.waited_s = 0.0
        self.gate_reads = 0
        self.saved_bytes = 0

    def start(self, layer: int, indices: I32, slots: I32) -> PendingRead:
        """Count the reads."""
        gates = np.ones(len(indices), bool) if self._gate_bytes else None
        size = self._gate_bytes or self._stride
        self.read_bytes += len(indices) * size
        self.gate_reads += len(indices) if self._gate_bytes else 0
        return PendingRead(layer, indices, slots, (slice(0, len(indices)),), None, gates)

    def start_rest(self, pending: PendingRead, number: int, opened: Bits) -> PendingRead | None:
        """Count the reads of up and down."""
        self.saved_bytes += int(np.count_nonzero(~opened)) * self.rest_bytes
        self.read_bytes += int(np.count_nonzero(opened)) * self.rest_bytes
        return None

    @property
    def rest_bytes(self) -> int:
        """Bytes of up and down."""
        return self._stride - self._gate_bytes

    def advance(self) -> None:
        """Nothing is under way."""

    def is_idle(self) -> bool:
        """Nothing is under way."""
        return True

    def finish(self, pending: PendingRead, number: int, count: int = 1) -> I32:
        """Nothing is waited for."""
        return pending.slots

    def abandon(self, pending: PendingRead) -> None:
        """Nothing is under way."""

    def start_run(self, layer: int, first: int, buffer: U8) -> Future[None]:
        """Count a long read; done at once."""
        self.read_bytes += buffer.size
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def observe(self, observer: ReadObserver | None) -> None:
        """There is nothing to tell of."""

    def close(self) -> None:
        """Nothing is open."""
