"""Matrices of a layer's FFN while it is packed: all of them, or those of a few experts."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from pi2.arrays import I32, Raw

_KEPT_EXPERTS = 2 * (os.cpu_count() or 1) + 2
"""Experts that pieces which are packed at the same time may need."""


class ExpertMatrices:
    """Reads an expert's matrices when the first of its neurons is packed, and forgets those that
    were not asked for lately; several threads may ask."""

    def __init__(self, read: Callable[[int], list[Raw]]) -> None:
        self._read = read
        self._kept: OrderedDict[int, Future[list[Raw]]] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, expert: int) -> list[Raw]:
        """Matrices of ``expert``; raises what reading them raises."""
        with self._lock:
            found = self._kept.get(expert)
            is_mine = found is None
            if found is None:
                found = self._kept[expert] = Future()
            self._kept.move_to_end(expert)
            while len(self._kept) > _KEPT_EXPERTS:
                self._kept.popitem(last=False)
        if is_mine:
            try:
                found.set_result(self._read(expert))
            except BaseException as error:
                found.set_exception(error)
        return found.result()


def is_by_expert(order: I32, neurons: int) -> bool:
    """Whether the neurons of an expert, ``neurons`` of each, follow each other in ``order``."""
    owners = order // neurons
    return bool((owners[1:] >= owners[:-1]).all())
