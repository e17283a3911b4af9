"""Notices files that are cut, changed or unreadable while a model reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pi2.arrays import U8
from pi2.backends.faults.guard import find_guard
from pi2.caches import open_regular
from pi2.diagnostics import UserError
from pi2.reads import refuse_cut, refuse_weights


class WatchedFiles:
    """A model's files, from the time on when their headers had been read."""

    def __init__(self, paths: Sequence[Path], maps: Mapping[int, U8]) -> None:
        """``maps``: the bytes of mapped ones, by number."""
        self._paths = paths
        self._descriptors = [open_regular(path) for path in paths]
        self._states = [_read_state(own) for own in self._descriptors]
        self._guard = find_guard() if maps else None
        self._ranges: dict[int, int] = {}
        for number, whole in maps.items() if self._guard is not None else ():
            assert self._guard is not None
            found = self._guard.watch(whole.ctypes.data, whole.nbytes)
            if found is not None:
                self._ranges[number] = found

    def check(self) -> None:
        """Raises `UserError` P532 if a file was cut, P546 if its disk failed, P547 if its contents
        were changed."""
        for number, descriptor in enumerate(self._descriptors):
            if _read_state(descriptor) != self._states[number]:
                raise self._refuse(number)
        for number, place in self._ranges.items():
            assert self._guard is not None
            if self._guard.find_fault(place) is not None:
                raise self._refuse(number)

    def _refuse(self, number: int) -> UserError:
        path, size = self._paths[number], self._states[number][0]
        if os.fstat(self._descriptors[number]).st_size < size:
            return refuse_cut(path)
        range_number = self._ranges.get(number)
        if self._guard is not None and range_number is not None:
            fault = self._guard.find_fault(range_number)
            if fault is not None and _read_state(self._descriptors[number]) == self._states[number]:
                return refuse_weights(path, fault, OSError(5, os.strerror(5)))
        return UserError.of(
            "P547",
            f"{path} was changed while it was in use",
            help="load the model again when the file is written, and replace files by renaming",
        )

    def close(self) -> None:
        """Call it before the files are mapped no longer."""
        for number in self._ranges.values():
            assert self._guard is not None
            self._guard.forget(number)
        self._ranges.clear()
        while self._descriptors:
            os.close(self._descriptors.pop())


def _read_state(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns
