"""Resident matrices of files, which several models of a process may use at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import RLock
from typing import NamedTuple

from pi2.arrays import U8
from pi2.diagnostics import UserError
from pi2.memory.budget import drop_pages
from pi2.memory.bulk_load import join_neighbours


class MatrixPlace(NamedTuple):
    """A matrix in a file; a file that was changed has other places."""

    device: int
    inode: int
    changed_ns: int
    offset: int
    size: int
    is_mapped: bool
    """Whether it stays in the page cache, which the system shares."""


@dataclass(slots=True)
class _Matrix:
    data: U8
    users: int


Protect = Callable[[], UserError | None]
"""Tells a watch which memory to give back in a shortage; returns the error if it has done so."""


class MatrixPool:
    """Any thread may call it.  Matrices that no model uses any more go back to the system."""

    def __init__(self) -> None:
        self._matrices: dict[MatrixPlace, _Matrix] = {}
        self._watches: list[Protect] = []
        self._lock = RLock()

    def share(self, places: Iterable[MatrixPlace], cleanup: ExitStack) -> dict[MatrixPlace, U8]:
        """The ``places`` that are in memory, for use until ``cleanup`` is closed.

        Raises a user's `UserError` P696 if memory was short and its matrices are lost."""
        with self._lock:
            found = {place: self._matrices[place] for place in places if place in self._matrices}
            for matrix in found.values():
                matrix.users += 1
            cleanup.callback(self._leave, list(found))
            for error in [protect() for protect in self._watches]:
                if error is not None and found:
                    raise error
        return {place: matrix.data for place, matrix in found.items()}

    def add(self, matrices: Mapping[MatrixPlace, U8], cleanup: ExitStack) -> None:
        """Offer matrices that are loaded; the caller uses them until ``cleanup`` is closed."""
        with self._lock:
            new = {place: _Matrix(data, 1) for place, data in matrices.items()}
            # Another model may have loaded the same at the same time.
            twice = [new.pop(place).data for place in self._matrices.keys() & new.keys()]
            self._matrices |= new
        cleanup.callback(_drop, twice)
        cleanup.callback(self._leave, list(new))

    def watch(self, protect: Protect, cleanup: ExitStack) -> None:
        """Call ``protect`` now, and whenever other matrices are shared, until ``cleanup`` ends."""
        with self._lock:
            self._watches.append(protect)
            protect()
        cleanup.callback(self._watches.remove, protect)

    def list_unshared(self, arrays: Sequence[U8]) -> list[U8]:
        """The ``arrays`` that no second model uses."""
        with self._lock:
            shared = {id(matrix.data) for matrix in self._matrices.values() if matrix.users > 1}
        return [array for array in arrays if id(array) not in shared]

    def _leave(self, places: Sequence[MatrixPlace]) -> None:
        with self._lock:
            for place in places:
                self._matrices[place].users -= 1
            unused = [place for place in places if not self._matrices[place].users]
            _drop([self._matrices.pop(place).data for place in unused])
            for protect in self._watches:
                protect()


def _drop(arrays: Sequence[U8]) -> None:
    for first, end in join_neighbours(arrays):
        drop_pages(first, end)
